"""How a node of a local cluster is started, and how its end is classified."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.places import place_of
from support.virtual_loop import run_virtually

from dlrover_run.agent.result import JobResult
from dlrover_run.command_line import credentials
from dlrover_run.coordination.records.round import Failure
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.features.local_nodes import cluster_master
from dlrover_run.features.local_nodes.cluster_master import RESTART_PAUSE, ClusterMaster
from dlrover_run.features.local_nodes.nodes import decode, end_of, environment_of, spec_of
from dlrover_run.features.local_nodes.supervision import EndKind, LocalNode, job_result
from dlrover_run.launch_request import command
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.master_client.launcher import MasterNotReady
from dlrover_run.spec import Entrypoint, JobSpec, LogSpec

SETTINGS = {"local_nodes": {"min_nodes": 2, "max_nodes": 3}}
JOB = JobSpec(
    Entrypoint("script", "train.py"),
    "run",
    settings=SETTINGS,
    exit_codes="torchrun",
)
MASTER = kinds.Master("127.0.0.1", 1234, token="hush")
REPLACEMENT = LocalNode(number=4, place=1)


def worker_end(rank: int, code: int) -> WorkerExit:
    return WorkerExit(rank, local_rank=0, pid=1000 + rank, code=code, unix_time=1.0)


FAILED = worker_end(3, 7)


# ---- what it is started with


def test_a_node_is_known_by_its_number_and_prefers_the_rank_of_its_place() -> None:
    spec = spec_of(JOB, REPLACEMENT, MASTER)
    assert (spec.node_id, spec.node_rank, spec.console_name) == ("node-4", 1, "node 4")
    assert (spec.settings, place_of(spec).master, spec.run_id) == ({}, MASTER, JOB.run_id)
    assert spec.logs.prefixed, "nodes share a console"
    assert spec.exit_codes == "precise", "the supervisor tells ends apart by our own codes"


@pytest.mark.parametrize(
    ("asked", "has"),
    [(None, None), ("/dev/null", "/dev/null"), ("logs", "logs/node-4"), ("/var/log", "/var/log/node-4")],
)
def test_each_node_has_its_own_directory_in_that_for_logs(asked: str | None, has: str | None) -> None:
    assert spec_of(replace(JOB, logs=LogSpec(log_dir=asked)), REPLACEMENT, None).logs.log_dir == has


@pytest.mark.parametrize(("asked", "has"), [(None, "[node 4 rank ${rank}]: "), ("<${rank}>", "<${rank}>")])
def test_lines_have_node_and_rank_unless_another_prefix_is_set(asked: str | None, has: str) -> None:
    assert spec_of(replace(JOB, logs=LogSpec(prefix_template=asked)), REPLACEMENT, None).logs.prefix_template == has


def test_the_environment_distinguishes_the_nodes_and_names_no_rank() -> None:
    inherited = {"NODE_RANK": "9", "WORKER_RANK": "9", "NODE_ID": "9", "WORKER_ID": "9", "KEPT": "yes"}
    assert environment_of(inherited, REPLACEMENT, isolated=False) == {
        "KEPT": "yes",
        "NODE_ID": "4",
        "WORKER_ID": "4",
        "DLROVER_LOCAL_NODE": "4",
        "DLROVER_LOCAL_CLUSTER": str(os.getpid()),
    }


def test_the_environment_holds_no_secret() -> None:
    secrets = dict.fromkeys(credentials.VARIABLES, "hush")
    assert "hush" not in environment_of(secrets, REPLACEMENT, isolated=False).values()


def test_a_node_with_a_network_of_its_own_uses_that_by_default() -> None:
    own = environment_of({"NCCL_SOCKET_IFNAME": "lo"}, REPLACEMENT, isolated=True)
    assert (own["GLOO_SOCKET_IFNAME"], own["NCCL_SOCKET_IFNAME"]) == ("eth0", "lo")


def test_a_module_in_the_working_directory_does_not_take_the_place_of_one_of_pythons(tmp_path: Path) -> None:
    for name in ("signal", "random", "json", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    with open(tmp_path / "request", "w+b") as request:
        done = subprocess.run(
            command(request.fileno()), pass_fds=[request.fileno()], cwd=tmp_path, capture_output=True, text=True
        )
    # It gets as far as the request, which is empty.
    assert "the wrong module" not in done.stderr
    assert "JSONDecodeError" in done.stderr


# ---- how its end is classified


@pytest.mark.parametrize(
    ("code", "result", "kind"),
    [
        (0, JobResult(0, ExitReason.SUCCESS, "all workers succeeded"), EndKind.DONE),
        (-9, JobResult(0, ExitReason.SUCCESS, "all workers succeeded"), EndKind.DONE),
        (-9, None, EndKind.DIED),
        (-9, JobResult(143, ExitReason.STOPPED, "SIGTERM stopped the job", stopped=True), EndKind.DIED),
        (137, None, EndKind.DIED),
        (143, JobResult(143, ExitReason.STOPPED, "SIGTERM stopped the job", stopped=True), EndKind.LEFT),
        (73, JobResult(73, ExitReason.FAULTY_NODE, "the node check dismissed this node"), EndKind.EXCLUDED),
        (74, JobResult(74, ExitReason.STRAGGLER, "the node check dismissed this node"), EndKind.EXCLUDED),
        (72, JobResult(72, ExitReason.CANNOT_JOIN, "", error="no master", ends=(FAILED,)), EndKind.LEFT),
        (72, JobResult(72, ExitReason.CANNOT_JOIN, "", error="no master"), EndKind.FAILED),
        (
            7,
            JobResult(7, ExitReason.WORKER_FAILED, "rank 3 exited with code 7", ends=(FAILED,), root=FAILED),
            EndKind.FAILED,
        ),
        (76, JobResult(76, ExitReason.CUT_OFF, "", error="this node is cut off"), EndKind.LEFT),
        # A script may exit with a code of the launcher's.
        (73, JobResult(73, ExitReason.WORKER_FAILED, "", ends=(FAILED,), root=FAILED), EndKind.FAILED),
        (72, JobResult(72, ExitReason.WORKER_FAILED, "", ends=(FAILED,), root=FAILED), EndKind.FAILED),
        (75, JobResult(75, ExitReason.TOO_FEW_NODES, "", error="the job failed: too few nodes"), EndKind.FAILED),
        (2, None, EndKind.FAILED),
        (70, None, EndKind.FAILED),
        (71, None, EndKind.FAILED),
    ],
)
def test_each_end_of_a_node_is_of_one_kind(code: int, result: JobResult | None, kind: EndKind) -> None:
    end = end_of(1, code, result)
    assert (end.number, end.kind, end.by_peer) == (1, kind, False)
    assert end.code == (0 if kind is EndKind.DONE else 128 + 9 if code < 0 else code)


def test_a_node_that_died_of_a_signal_that_it_was_sent_has_left() -> None:
    assert end_of(1, -signal.SIGTERM, None, {signal.SIGTERM}).kind is EndKind.LEFT
    assert end_of(1, -signal.SIGKILL, None, {signal.SIGTERM}).kind is EndKind.DIED


def test_a_node_that_only_learned_of_the_failure_reports_so() -> None:
    elsewhere = JobResult(1, ExitReason.PEER_FAILED, "", failure=Failure(3, "node 1", "exited with code 7"))
    end = end_of(0, 1, elsewhere)
    assert (end.kind, end.by_peer, end.clause) == (EndKind.FAILED, True, "ended because another node failed")


def test_half_a_result_is_none() -> None:
    whole = msgspec.json.encode(JobResult(7, ExitReason.WORKER_FAILED, "failed", ends=(FAILED,), root=FAILED))
    assert decode(whole) == JobResult(7, ExitReason.WORKER_FAILED, "failed", ends=(FAILED,), root=FAILED)
    assert [decode(whole[:length]) for length in (0, 1, len(whole) // 2, len(whole) - 1)] == [None] * 4


# ---- what the command answers of them


def test_the_command_reports_the_node_that_has_the_failed_worker() -> None:
    failure = Failure(3, "node 1", "exited with code 7")
    of_peer = JobResult(1, ExitReason.PEER_FAILED, "of the peer", ends=(worker_end(0, 0),), failure=failure)
    has = JobResult(7, ExitReason.WORKER_FAILED, "has", ends=(FAILED,), root=FAILED)
    dismissed = JobResult(73, ExitReason.FAULTY_NODE, "dismissed", error="The node network is breakdown.")
    result = job_result(7, [dismissed, of_peer, has], "node 1 failed with exit code 7")
    assert (result.exit_code, result.root, result.error) == (7, FAILED, None)
    assert [end.rank for end in result.ends] == [0, 3]


def test_the_command_reports_the_end_itself_where_no_node_could() -> None:
    left = JobResult(143, ExitReason.STOPPED, "SIGTERM stopped the job", stopped=True)
    result = job_result(137, [left], "node 1 was killed by SIGKILL, so no node is left")
    assert (result.exit_code, result.error) == (137, "node 1 was killed by SIGKILL, so no node is left")


def test_a_job_that_succeeded_has_no_error() -> None:
    assert (
        job_result(0, [JobResult(0, ExitReason.SUCCESS, "all workers succeeded")], "2 nodes on this machine").error
        is None
    )


def test_the_page_names_tests_that_exist() -> None:
    tests = Path(__file__).parents[2]
    named = re.findall(r"`(test_\w+)`", (tests.parent / "docs" / "local-nodes.md").read_text())
    files = [*tests.rglob("test_local_*.py"), *(tests / "experiments").glob("test_*.py")]
    defined = re.findall(r"^def (test_\w+)", "".join(file.read_text() for file in files), re.MULTILINE)
    assert len(named) > 15
    assert not set(named) - set(defined)


# ---- the master of the nodes


class SlowMaster:
    """Replaces the process of a master. The second process does not listen, and takes long to end."""

    started: list[SlowMaster]

    def __init__(self, *_: object, **__: object) -> None:
        self.started.append(self)
        self.pid = len(self.started)

    def start(self, on_end: Callable[[], None]) -> None:
        self.on_end = on_end

    async def ready(self) -> int:
        if self.pid == 2:
            raise MasterNotReady("it did not listen")
        return 1000


def test_a_master_that_ends_after_its_successor_has_started_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SlowMaster.started = []
    monkeypatch.setattr(cluster_master, "MasterProcess", SlowMaster)

    async def main() -> None:
        master = ClusterMaster(None, lambda line: None)
        await master.start()
        first, *_ = SlowMaster.started
        first.on_end()
        await asyncio.sleep(3 * RESTART_PAUSE)
        _, second, third = SlowMaster.started
        second.on_end()
        await asyncio.sleep(3 * RESTART_PAUSE)
        assert master.pids == {third.pid}
        assert len(SlowMaster.started) == 3

    run_virtually(main())
