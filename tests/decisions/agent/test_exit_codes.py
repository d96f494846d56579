"""The exit codes of each scheme: a table of reasons, and what two operators do with each code."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dlrover_run import exit_codes
from dlrover_run.exit_reasons import ExitReason, in_scheme, reason_without_result

PRECISE = {
    ExitReason.SUCCESS: exit_codes.SUCCESS,
    ExitReason.WORKER_FAILED: 7,
    ExitReason.PEER_FAILED: exit_codes.PEER_FAILED,
    ExitReason.STOPPED: exit_codes.of_signal(signal.SIGTERM),
    ExitReason.BAD_COMMAND_LINE: exit_codes.BAD_COMMAND_LINE,
    ExitReason.INTERNAL_ERROR: exit_codes.INTERNAL_ERROR,
    ExitReason.CANNOT_START: exit_codes.CANNOT_START,
    ExitReason.CANNOT_JOIN: exit_codes.CANNOT_JOIN,
    ExitReason.FAULTY_NODE: exit_codes.FAULTY_NODE,
    ExitReason.STRAGGLER: exit_codes.STRAGGLER,
    ExitReason.TOO_FEW_NODES: exit_codes.TOO_FEW_NODES,
    ExitReason.CUT_OFF: exit_codes.CUT_OFF,
    ExitReason.STOPPED_ON_REQUEST: exit_codes.STOPPED_ON_REQUEST,
}
PERMANENT = {
    ExitReason.WORKER_FAILED,
    ExitReason.PEER_FAILED,
    ExitReason.BAD_COMMAND_LINE,
    ExitReason.INTERNAL_ERROR,
    ExitReason.STOPPED_ON_REQUEST,
}


def kubedl_retries(code: int) -> bool:
    """KubeDL's rule (`pkg/util/train`): each code that it does not name is permanent."""
    return code in (130, 137, 138, 143)


def kubeflow_retries(code: int) -> bool:
    """The rule of Kubeflow's training operator."""
    return code >= 128


@pytest.mark.parametrize("reason", ExitReason)
def test_both_operators_retry_what_another_attempt_may_cure(reason: ExitReason) -> None:
    code = in_scheme(reason, PRECISE[reason], "kubernetes")
    assert (code == 0) == (reason is ExitReason.SUCCESS)
    wanted = reason not in PERMANENT and reason is not ExitReason.SUCCESS
    assert (kubedl_retries(code), kubeflow_retries(code)) == (wanted, wanted)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTERM])
def test_a_node_that_a_signal_ended_is_started_again(number: int) -> None:
    code = in_scheme(ExitReason.STOPPED, exit_codes.of_signal(number), "kubernetes")
    assert kubedl_retries(code)
    if kubedl_retries(exit_codes.of_signal(number)):
        assert code == exit_codes.of_signal(number)


@pytest.mark.parametrize("code", range(1, 256))
def test_a_workers_own_code_is_not_changed(code: int) -> None:
    assert in_scheme(ExitReason.WORKER_FAILED, code, "kubernetes") == code


@pytest.mark.parametrize("status", range(256))
def test_a_peer_is_retried_where_the_node_of_the_failed_worker_is(status: int) -> None:
    code = in_scheme(ExitReason.PEER_FAILED, exit_codes.PEER_FAILED, "kubernetes", status)
    own = in_scheme(ExitReason.WORKER_FAILED, status or exit_codes.PEER_FAILED, "kubernetes")
    assert kubedl_retries(code) == kubedl_retries(own)
    assert code == (status if kubedl_retries(status) else exit_codes.PEER_FAILED)
    assert in_scheme(ExitReason.PEER_FAILED, exit_codes.PEER_FAILED, "precise", status) == exit_codes.PEER_FAILED
    assert in_scheme(ExitReason.WORKER_FAILED, 3, "kubernetes", status) == 3


@pytest.mark.parametrize("reason", ExitReason)
def test_torchruns_scheme_has_one_code_for_failures(reason: ExitReason) -> None:
    kept = reason in (ExitReason.SUCCESS, ExitReason.BAD_COMMAND_LINE)
    assert in_scheme(reason, PRECISE[reason], "torchrun") == (PRECISE[reason] if kept else 1)
    assert in_scheme(reason, PRECISE[reason], "precise") == PRECISE[reason]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, ExitReason.SUCCESS),
        (2, ExitReason.BAD_COMMAND_LINE),
        (70, ExitReason.INTERNAL_ERROR),
        (71, ExitReason.CANNOT_START),
        (137, ExitReason.STOPPED),
    ],
)
def test_a_launcher_that_left_no_result_has_a_reason(code: int, reason: ExitReason) -> None:
    assert reason_without_result(code) is reason


def test_the_page_has_the_same_table() -> None:
    """The table in docs/schedulers.md, from a precise code to the code of `--exit-codes=kubernetes`."""
    page = (Path(__file__).parents[3] / "docs" / "schedulers.md").read_text()
    _, _, section = page.partition("## Operators that decide by exit code")
    rows = [line.split("|")[1:-1] for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    documented = {ExitReason(name.strip(" `")): int(code) for name, _, code in rows if code.strip().isdigit()}
    fixed = set(ExitReason) - {ExitReason.SUCCESS, ExitReason.WORKER_FAILED, ExitReason.STOPPED, ExitReason.PEER_FAILED}
    assert set(documented) == fixed
    assert documented == {reason: in_scheme(reason, PRECISE[reason], "kubernetes") for reason in fixed}
