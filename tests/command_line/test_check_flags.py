"""The flags of the node check and of `--auto-config`, alone and combined."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields
from support.command_lines import AT_NODE0, isolate, job, parsed, watched
from support.policy_parts import check_rules

from dlrover_run.api import LaunchConfig
from dlrover_run.command_line.flags import TABLE, UNSUPPORTED_DLROVER_FLAGS
from dlrover_run.command_line.parse import parse_argv
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import config_mismatch
from dlrover_run.features.node_check.flags import NODE_CHECK
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, NodeCheckRules


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)


def health(line: str, **environ: str) -> NodeCheckRules:
    """The node check rules of a job of several nodes."""
    spec = job(f"--nnodes=2:4 {AT_NODE0} {line}", **environ)
    assert (spec.entrypoint.target, spec.entrypoint.args) == ("train.py", ("--lr",))
    return check_rules(spec.rules)


@pytest.mark.parametrize(
    ("line", "environ", "mode"),
    [
        ("--network-check", {}, CHECK_ONCE),
        ("--network_check=always", {}, CHECK_ALWAYS),
        ("--network-check --network-check=always", {}, CHECK_ALWAYS),
        ("--network-check=always --network-check", {}, CHECK_ONCE),
        ("--network-check=True", {}, CHECK_ONCE),
        ("", {"PET_NETWORK_CHECK": "1"}, CHECK_ONCE),
        ("", {"PET_NETWORK_CHECK": "Always"}, CHECK_ALWAYS),
        ("", {"PET_NETWORK_CHECK": "off"}, CHECK_NEVER),
        ("--network-check", {"PET_NETWORK_CHECK": "always"}, CHECK_ONCE),
        ("--network-check=0", {"PET_NETWORK_CHECK": "always"}, CHECK_NEVER),
        ("--comm-perf-test", {}, CHECK_ONCE),
        ("--comm_perf_test --network-check=always", {}, CHECK_ALWAYS),
        ("--precheck=0", {}, CHECK_NEVER),
        ("--precheck=1", {}, CHECK_ONCE),
        ("--precheck 2", {}, CHECK_ONCE),
        ("--precheck=0 --network-check", {}, CHECK_ONCE),
        ("--precheck=1 --network-check=always", {}, CHECK_ALWAYS),
        ("", {"PET_PRECHECK": "1"}, CHECK_ONCE),
    ],
)
def test_nodes_are_checked_when_a_flag_requests_it(line: str, environ: dict[str, str], mode: int) -> None:
    assert health(line, **environ).check == mode


@pytest.mark.parametrize("line", ["", "--master-port=4000"], ids=["no rendezvous", "static"])
def test_a_single_node_is_checked_too(line: str) -> None:
    assert check_rules(job(f"{line} --network-check").rules).check == CHECK_ONCE


def test_the_check_and_its_rules_are_off_by_default() -> None:
    assert job(f"--nnodes=2 {AT_NODE0}").rules == watched(JobRules(min_nodes=2, max_nodes=2))


def test_the_word_after_the_flag_is_always_the_script() -> None:
    assert parse_argv(["--network-check", "always", "once"]).script == "always"
    assert parse_argv(["--network-check", "-r3", "train.py"]).values == {"network_check": ["once"], "redirects": ["3"]}


@pytest.mark.parametrize(
    ("line", "measured"),
    [("--network-check", 0), ("--precheck=1", 0), ("--comm-perf-test", 1), ("--precheck=2", 1)],
)
def test_every_link_is_measured_when_a_flag_requests_it(line: str, measured: int) -> None:
    assert health(line).measure_links == measured


def test_the_straggler_threshold_and_its_consequence_are_rules() -> None:
    by_flag = health("--network-check --exclude-straggler --straggler-threshold=1.75 --rdzv-conf=check_timeout=30")
    expected = NodeCheckRules(check=CHECK_ONCE, exclude_stragglers=1, straggler_threshold=1.75, check_timeout=30)
    assert by_flag == expected
    by_variable = {"PET_NETWORK_CHECK": "1", "PET_EXCLUDE_STRAGGLER": "true", "PET_STRAGGLER_THRESHOLD": "1.75"}
    assert health("--rdzv-conf=check_timeout=30", **by_variable) == expected


def test_options_of_the_check_have_no_effect_without_it() -> None:
    found = check_rules(parsed("--exclude-straggler --straggler-threshold=3")[0].rules)
    assert (found.exclude_stragglers, found.straggler_threshold) == (0, NodeCheckRules().straggler_threshold)
    assert parsed("", PET_EXCLUDE_STRAGGLER="0")[1] == []
    assert parsed("", PET_EXCLUDE_STRAGGLER="1")[1] == ["PET_EXCLUDE_STRAGGLER has no effect without --network-check."]


@pytest.mark.parametrize(
    ("environ", "nodes", "mode"),
    [
        ({"NODE_NUM": "3", "WORKER_NUM": "9"}, 3, CHECK_NEVER),
        ({"NODE_NUM": "", "WORKER_NUM": "4"}, 4, CHECK_ONCE),
        ({"NODE_NUM": "4", "PET_NETWORK_CHECK": "off"}, 4, CHECK_NEVER),
        ({"NODE_NUM": "4", "PET_NETWORK_CHECK": "always"}, 4, CHECK_ALWAYS),
    ],
)
def test_auto_config_uses_the_number_of_nodes_of_the_cluster(environ: dict[str, str], nodes: int, mode: int) -> None:
    spec = job(f"--auto_config {AT_NODE0}", **environ)
    assert spec.workers_per_node == 8
    assert spec.rules == watched(JobRules(nodes, nodes, parts=(NodeCheckRules(check=mode),) if mode else ()))


@pytest.mark.parametrize(("line", "environ"), [("", {"NODE_NUM": "1"}), ("--standalone", {})])
def test_auto_config_accepts_a_single_node(line: str, environ: dict[str, str]) -> None:
    spec = job(f"--auto-config {line}", **environ)
    assert (spec.rendezvous.backend, spec.workers_per_node) == ("memory", 8)


@pytest.mark.parametrize(
    ("line", "environ", "most", "workers", "warnings"),
    [
        ("--nnodes=4:6 --nproc-per-node=2", {"NODE_NUM": "8"}, 6, 2, 2),
        ("", {"NODE_NUM": "8", "PET_NPROC_PER_NODE": "3"}, 8, 3, 1),
        # The same value from both sources gives no warning.
        ("--nnodes=2 --nproc-per-node=auto", {}, 2, 8, 0),
        ("--nnodes=2 --nproc-per-node=auto", {"NODE_NUM": "2"}, 2, 8, 0),
    ],
)
def test_explicit_numbers_take_precedence_over_auto_config(
    line: str, environ: dict[str, str], most: int, workers: int, warnings: int
) -> None:
    spec, printed = parsed(f"--auto-config {line} {AT_NODE0}", **environ)
    assert (spec.rules.max_nodes, spec.workers_per_node, len(printed)) == (most, workers, warnings)


def test_auto_config_does_not_check_static_nodes() -> None:
    spec, _ = parsed("--auto-config --node-rank=0", NODE_NUM="4")
    assert (spec.rendezvous.backend, spec.rules.max_nodes, check_rules(spec.rules).check) == ("static", 4, CHECK_NEVER)


def test_a_difference_in_rules_is_reported_with_the_values_of_the_flags() -> None:
    part = NodeCheckRules(
        check=CHECK_ALWAYS, straggler_threshold=3, exclude_stragglers=1, measure_links=1, check_timeout=60
    )
    assert config_mismatch(JobRules(parts=(part,)), JobRules()) == (
        "the rules of the job's first node hold: --network-check is always, not off; check_timeout is 60, not 120; "
        "--straggler-threshold is 3, not 2; --exclude-straggler is on, not off; --comm-perf-test is on, not off"
    )


def test_reported_differences_use_the_names_of_flags() -> None:
    changed = {
        field.name: getattr(JobRules(), field.name) + 1
        for field in fields(JobRules)
        if field.name not in ("store", "detection_delay", "parts")
    }
    part = NodeCheckRules(**{name: value + 1 for name, value in msgspec.structs.asdict(NodeCheckRules()).items()})
    printed = config_mismatch(JobRules(), JobRules(**changed, parts=(part,))).partition(": ")[2].split("; ")
    named = {name.removeprefix("--") for name in (sentence.split()[0] for sentence in printed) if name.startswith("--")}
    assert named <= {flag.name for flag in TABLE}
    assert {flag.name for flag in TABLE if flag.panel == NODE_CHECK} - {"precheck"} <= named


@pytest.mark.parametrize(("mode", "flag"), [(True, "once"), ("always", "always"), ("once", "once")])
def test_network_check_of_launch_config_is_a_switch_or_a_mode(mode: bool | str, flag: str) -> None:
    config = LaunchConfig(1, 1, 1, network_check=mode, comm_perf_test=True)
    assert config.flags()[-1] == "--comm-perf-test"
    assert f"--network-check={flag}" in config.flags()
    assert not [word for word in LaunchConfig(1, 1, 1).flags() if "check" in word or "straggler" in word]


def test_unsupported_dlrover_flags_are_not_in_the_table() -> None:
    assert not {f"--{name}" for name in UNSUPPORTED_DLROVER_FLAGS} & DLROVER_RUN.by_spelling.keys()
