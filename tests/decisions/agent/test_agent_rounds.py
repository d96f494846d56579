"""The agent of a job of several nodes: its reports and actions for each assignment that the test sends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.harness import WAIT
from support.scripted_agent import FINISHED, Answer, ScriptedAgent, gathering, over, rank_assignment, training

from dlrover_run import exit_codes
from dlrover_run.agent.result import JobEnd, resolve_result, worker_results
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import MAX_TRACE
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import (
    Failure,
    PlannedChange,
    RankAssignment,
    RoundKey,
)
from dlrover_run.exit_reasons import ExitReason, ExitScheme
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.features.node_check.decision.model import HealthStatus, NodeCheckAssignment, NodeHealth
from dlrover_run.training import mark_checkpoint
from dlrover_run.words.reasons import Code, sentence
from dlrover_run.workers import startup_probe
from dlrover_run.workers.adapter import build_failure
from dlrover_run.workers.checkpoint_marks import MARK_VARIABLE, CheckpointMarks
from dlrover_run.workers.environment import requeue_count
from dlrover_run.workers.startup_probe import StartupProbe, store_clients

WAITING, RUNNING, SUCCEEDED = NodePhase.WAITING, NodePhase.RUNNING, NodePhase.SUCCEEDED
FAILED, LEAVING, LEFT = NodePhase.FAILED, NodePhase.LEAVING, NodePhase.LEFT

UNTIL_RELEASED = "echo x >> started; echo x > up; read word < gate"
"""A worker that shows when it is up, and succeeds as soon as something is written to the gate."""

STUBBORN = "trap : TERM; echo x > up; until read word < gate; do :; done"
"""The same, but it ignores SIGTERM."""

ELSEWHERE = Failure(3, "node-b", "raised ValueError: x", trace="Traceback (most recent call last):\nValueError: x")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("gate", "up"):
        os.mkfifo(tmp_path / name)
    return tmp_path


def release(directory: Path) -> None:
    (directory / "gate").write_text("go\n")


def when_up(directory: Path, answer: Answer) -> Callable[[], Answer]:
    """Return the answer, but not before the worker that was started is up."""

    def wait() -> Answer:
        (directory / "up").read_text()
        return answer() if callable(answer) else answer

    return wait


def starts(directory: Path) -> int:
    return len((directory / "started").read_text().splitlines())


def test_the_same_ranks_from_another_coordinator_leave_the_workers_alone(directory: Path) -> None:
    successor = training(rank_assignment(store_port=7), epoch=5)

    def obeys(status: NodeReport) -> bool:
        return status.epoch == 5 and status.phase is RUNNING

    agent = (
        ScriptedAgent(directory, UNTIL_RELEASED)
        .on(WAITING, training(rank_assignment(store_port=7)))
        .on(RUNNING, when_up(directory, successor))
    )
    agent_run = agent.on(obeys, lambda: release(directory)).on(SUCCEEDED, FINISHED).run()
    assert agent_run.phases == [WAITING, RUNNING, SUCCEEDED, LEFT]
    assert starts(directory) == 1
    assert agent_run.result.exit_code == 0


def test_a_node_that_loses_its_ranks_stops_its_workers_and_starts_new_ones_with_the_next(directory: Path) -> None:
    def second(status: NodeReport) -> bool:
        return status.phase is RUNNING and status.in_round(RoundKey(1, 2))

    agent = (
        ScriptedAgent(directory, UNTIL_RELEASED)
        .on(WAITING, training(rank_assignment()))
        .on(RUNNING, when_up(directory, gathering(1)))
    )
    agent.on(WAITING, training(rank_assignment(2), reasons=sentence("node-b was lost"))).on(
        second, when_up(directory, lambda: release(directory))
    )
    agent_run = agent.on(SUCCEEDED, over(PlanPhase.FINISHED, 2)).run()
    assert agent_run.phases == [WAITING, RUNNING, WAITING, RUNNING, SUCCEEDED, LEFT]
    without = [status for status in agent_run.statuses if status.phase is WAITING and status.ranks is None]
    assert [status.known_round.number for status in without] == [0, 1]
    assert "into the round, node-b was lost; round 2 with 1 node\n" in agent_run.output
    assert "restart" not in agent_run.output.replace("restart_count=0", "")
    assert starts(directory) == 2


def test_an_assignment_that_arrives_while_workers_end_is_reported_before_their_end(directory: Path) -> None:
    """The coordinator may need the report for the next round; the grace period of a worker may be half a minute."""

    def is_received(status: NodeReport) -> bool:
        return status.known_round.number == 3

    def released() -> Assignment:
        release(directory)
        return FINISHED

    agent = (
        ScriptedAgent(directory, STUBBORN)
        .on(WAITING, training(rank_assignment()))
        .on(RUNNING, when_up(directory, gathering(1)))
    )
    agent_run = agent.on(WAITING, training(None, 3)).on(is_received, released).run()
    assert agent_run.result.ends[0].code == 0, "it was released, and not killed after its grace period"


def test_each_round_prints_torchs_block_with_verbose_output(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "INFO")
    place = rank_assignment(
        4,
        restart_count=2,
        node_rank=1,
        nodes=3,
        workers=2,
        first_rank=2,
        world_size=6,
        role_first_rank=1,
        role_world_size=5,
        store_address="node-a",
        store_port=1234,
    )
    agent = ScriptedAgent(directory, "exit 0", spec={"workers_per_node": 2}).on(WAITING, training(place))
    output = agent.on(SUCCEEDED, over(PlanPhase.FINISHED, 4)).run().output
    assert output == (
        "dlrover-run: round 4: ranks 2 to 3 of 6, as node rank 1 of 3; the store is at node-a:1234\n"
        "dlrover-run: Rendezvous complete for workers. Result:\n"
        "  restart_count=2\n"
        "  master_addr=node-a\n"
        "  master_port=1234\n"
        "  group_rank=1\n"
        "  group_world_size=3\n"
        "  local_ranks=[0, 1]\n"
        "  role_ranks=[1, 2]\n"
        "  global_ranks=[2, 3]\n"
        "  role_world_sizes=[5, 5]\n"
        "  global_world_sizes=[6, 6]\n"
        "  event_log_handler=null\n"
    )


def test_the_environment_follows_the_ranks(directory: Path) -> None:
    names = ("RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
    more = ("NODE_NUM", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
    shell = "printf '%s ' " + " ".join(f"${name}" for name in (*names, *more)) + "> environment"
    place = rank_assignment(
        4,
        restart_count=2,
        node_rank=1,
        nodes=3,
        first_rank=4,
        world_size=6,
        role_first_rank=1,
        role_world_size=5,
        store_address="node-a",
    )
    ScriptedAgent(directory, shell).on(WAITING, training(place)).on(SUCCEEDED, over(PlanPhase.FINISHED, 4)).run()
    assert (directory / "environment").read_text().split() == ["4", "1", "5", "6", "1", "3", "1", "3", "node-a", "2"]


class TestFailures:
    """What is reported to the other nodes about a failure."""

    RAISE = "echo 'Traceback (most recent call last):' >&2; echo '  File x' >&2; echo 'ValueError: x' >&2; exit 1"
    LOST = "echo 'Traceback (most recent call last):' >&2; echo 'RuntimeError: Connection closed by peer' >&2; exit 1"

    def test_it_is_reported_once_and_with_its_traceback(self, directory: Path) -> None:
        place = rank_assignment(first_rank=2, world_size=3, nodes=2, node_rank=1)
        agent = ScriptedAgent(directory, self.RAISE).on(WAITING, training(place))
        agent_run = agent.on(FAILED, lambda: over(PlanPhase.FAILED, failure=ELSEWHERE)).run()
        failures = [status for status in agent_run.statuses if status.phase is FAILED]
        assert len({status.failure for status in failures}) == 1
        failure = failures[0].failure
        assert failure is not None
        assert (failure.rank, failure.exit_text, failure.lost_peer) == (2, "raised ValueError: x", False)
        assert failure.trace == "Traceback (most recent call last):\n  File x\nValueError: x"

    def test_a_lost_peer_is_reported_as_such_until_a_worker_fails_of_itself(self, directory: Path) -> None:
        shell = f"[ $LOCAL_RANK = 0 ] && {{ {self.LOST}; }}; read word < gate; exit 3"
        place = rank_assignment(workers=2, world_size=4, nodes=2)

        def is_lost(status: NodeReport) -> bool:
            return status.failure is not None and status.failure.lost_peer

        def is_own(status: NodeReport) -> bool:
            return status.failure is not None and not status.failure.lost_peer

        agent = ScriptedAgent(directory, shell, spec={"workers_per_node": 2}).on(WAITING, training(place))
        agent.on(is_lost, lambda: release(directory))
        own = Failure(1, "here", "exited with code 3")
        agent_run = agent.on(is_own, over(PlanPhase.FAILED, failure=own)).run()
        # A report may come again, as where the time went is news too.
        assert list(dict.fromkeys(f.rank for s in agent_run.statuses if (f := s.failure))) == [0, 1]
        assert agent_run.result.exit_code == 3

    def test_what_is_too_long_is_clipped_to_what_may_travel(self, directory: Path) -> None:
        lines = "i=0; while [ $i -lt 900 ]; do echo '  File deep' $i >&2; i=$((i+1)); done"
        shell = f"echo 'Traceback (most recent call last):' >&2; {lines}; echo 'ValueError: x' >&2; exit 1"
        agent_run = ScriptedAgent(directory, shell).on(WAITING, training(rank_assignment())).on(FAILED, FINISHED).run()
        failure = next(s.failure for s in agent_run.statuses if s.failure)
        assert len(failure.trace) == MAX_TRACE
        assert failure.trace.startswith("Traceback (most recent call last):\n")
        assert failure.trace.endswith("File deep 899\nValueError: x")

    @pytest.mark.parametrize(("mark", "has_trained"), [("printf 1 > $DLROVER_CHECKPOINT_MARK;", True), ("", False)])
    def test_a_checkpoint_is_evidence_of_work(self, directory: Path, mark: str, has_trained: bool) -> None:
        agent_run = (
            ScriptedAgent(directory, f"{mark} exit 3")
            .on(WAITING, training(rank_assignment()))
            .on(FAILED, FINISHED)
            .run()
        )
        assert [s.progressed for s in agent_run.statuses if s.phase is FAILED] == [has_trained]

    def test_the_first_checkpoint_is_reported_and_then_one_for_each_planned_change(self, directory: Path) -> None:
        change, place = PlannedChange(epoch=7, since=30.0), rank_assignment()
        shell = 'while :; do echo 10 > "$DLROVER_CHECKPOINT_MARK"; sleep 0.05; done'
        agent = (
            ScriptedAgent(directory, shell)
            .on(WAITING, training(place))
            .on(lambda status: status.saves, training(place, change=change))
        )
        agent_run = agent.on(lambda status: status.saved_for == change, FINISHED).run()
        saved = [status.saved_for for status in agent_run.statuses if status.saves]
        assert saved == [None, change]

    @pytest.mark.parametrize(("written", "step"), [(b"120\n", 120), (b"120\n180\n", 180), (b"1", None), (b"x\n", None)])
    def test_a_checkpoint_is_noted_at_once_with_its_step(self, written: bytes, step: int | None) -> None:
        async def noted() -> int | None:
            found: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            probe = StartupProbe(rank_assignment())
            probe.marks.listen(found.set_result)
            with open(probe.marks.environment()[MARK_VARIABLE], "wb") as mark:
                mark.write(written)
            try:
                return await asyncio.wait_for(found, WAIT)
            finally:
                probe.close()

        assert asyncio.run(noted()) == step

    def test_a_worker_waits_after_its_checkpoint_for_an_announced_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        marks, released = CheckpointMarks(), threading.Event()
        seen: list[int | None] = []
        for name, path in marks.environment().items():
            monkeypatch.setenv(name, path)

        def go_on() -> None:
            while len(seen) < 2:
                marks.read()
            released.set()
            marks.announce(False)

        async def listen() -> None:
            marks.listen(seen.append)

        asyncio.run(listen())
        mark_checkpoint(10)
        marks.read()
        assert seen == [10], "no change is announced"
        marks.announce(True)
        other = threading.Thread(target=go_on)
        other.start()
        mark_checkpoint(20)
        assert released.is_set(), "it has not waited"
        other.join()
        # The mark of one that came before the announcement would not count, so it is repeated.
        assert {*seen[1:]} == {20}
        marks.close()

    @pytest.mark.parametrize(("round_", "node_rank", "waits"), [(2, 0, 0), (2, 1, 1), (1, 1, 0)])
    def test_forked_workers_of_other_nodes_wait_for_the_store_of_a_later_round(
        self, round_: int, node_rank: int, waits: int
    ) -> None:
        async def connections() -> int:
            with socket.socket() as store:
                store.bind(("127.0.0.1", 0))
                place = rank_assignment(round_, node_rank=node_rank, nodes=2, first_rank=node_rank, world_size=2)
                port = store.getsockname()[1]
                probe = StartupProbe(replace(place, store_address="127.0.0.1", store_port=port))
                assert await probe.until_store_listens(0.0) == (startup_probe.STORE_TIMEOUT if waits else 0.0)
                waiting = asyncio.ensure_future(probe.until_store_listens(WAIT))
                # The first attempt is refused.
                await asyncio.sleep(2 * startup_probe.STORE_INTERVAL)
                assert waiting.done() == (not waits)
                store.listen()
                assert await waiting == (startup_probe.LONG_STORE_TIMEOUT if waits else WAIT)
                probe.close()
                store.settimeout(WAIT if waits else 0)
                with contextlib.suppress(BlockingIOError):
                    store.accept()[0].close()
                    return 1
                return 0

        assert asyncio.run(connections()) == waits

    def test_workers_that_cannot_be_started_are_a_failure_of_this_node(self, directory: Path) -> None:
        from dlrover_run.spec import Entrypoint

        missing = {"entrypoint": Entrypoint("program", "/nowhere/at-all")}
        place = rank_assignment(2, node_rank=1, nodes=2, first_rank=3, world_size=4)
        agent_run = ScriptedAgent(directory, "", spec=missing).on(WAITING, training(place)).run()
        last = agent_run.statuses[-1]
        assert (last.phase, last.failure and last.failure.rank) == (LEFT, 3)
        assert "could not be started: " in str(last.failure)
        assert agent_run.result.exit_code == exit_codes.CANNOT_START


class TestLeaving:
    """A node that is requested to leave, or must leave."""

    ENDS_ON_REQUEST = (
        "trap 'until [ -e said ]; do sleep 0.01; done; exit 7' TERM; echo x > up; until read word < gate; do :; done"
    )
    """A worker that ends of SIGTERM, but not before the test has made the file `said`."""

    def test_it_reports_so_during_the_grace_period_of_its_workers(self, directory: Path) -> None:
        agent = ScriptedAgent(directory, self.ENDS_ON_REQUEST).on(WAITING, training(rank_assignment()))
        agent.on(RUNNING, when_up(directory, lambda: agent.signal(signal.SIGTERM)))
        agent_run = agent.on(LEAVING, (directory / "said").touch).run()
        assert agent_run.phases == [WAITING, RUNNING, LEAVING, LEFT]
        assert agent_run.result.ends[0].code == 7
        assert agent_run.result.exit_code == 128 + signal.SIGTERM

    def test_it_takes_no_new_ranks_while_its_workers_end(self, directory: Path) -> None:
        agent = ScriptedAgent(directory, self.ENDS_ON_REQUEST).on(WAITING, training(rank_assignment()))
        agent.on(RUNNING, when_up(directory, lambda: agent.signal(signal.SIGTERM)))

        def assign_another_round() -> Assignment:
            (directory / "said").touch()
            return training(rank_assignment(2))

        agent_run = agent.on(LEAVING, assign_another_round).run()
        leaving = [status.ranks for status in agent_run.statuses if status.phase in (LEAVING, LEFT)]
        assert {ranks and ranks.key for ranks in leaving} == {RoundKey(1, 1)}
        assert agent_run.result.ends[0].code == 7

    def test_a_round_that_ends_meanwhile_does_not_repeat_the_signal_of_its_workers(self, directory: Path) -> None:
        """A scheduler sends the signal to all processes of all nodes, and another node has left first."""
        told = "trap 'echo x > told; exit 7' TERM; echo x > up; until read word < gate; do :; done"
        agent = ScriptedAgent(directory, told, spec={"shutdown_timeout": 0.5}).on(WAITING, training(rank_assignment()))

        def signal_agent(turns: int) -> None:
            if turns:
                asyncio.get_running_loop().call_soon(signal_agent, turns - 1)
            else:
                os.kill(os.getpid(), signal.SIGTERM)

        def half_of_the_signal() -> Assignment:
            agent.signal(signal.SIGTERM, above=True)
            signal_agent(turns=5)  # Before that, the loop acts on the end of the round.
            return gathering(1)

        agent_run = agent.on(RUNNING, when_up(directory, half_of_the_signal)).run()
        assert agent_run.result.ends[0].code == -signal.SIGKILL
        assert not (directory / "told").exists()

    def test_no_other_node_restarts_when_its_workers_have_succeeded(self, directory: Path) -> None:
        agent = ScriptedAgent(directory, "exit 0").on(WAITING, training(rank_assignment()))
        agent_run = agent.on(SUCCEEDED, lambda: agent.signal(signal.SIGTERM)).run()
        # Workers that end at once may have succeeded before the agent reports that they run.
        assert [phase for phase in agent_run.phases if phase is not RUNNING] == [WAITING, SUCCEEDED]
        assert agent_run.result.exit_code == 128 + signal.SIGTERM

    def test_the_loss_of_its_watchdog_kills_and_is_reported(self, directory: Path) -> None:
        # It is at its end for the reader once the other end has been opened and closed.
        os.mkfifo(directory / "watchdog")
        watchdog = os.open(directory / "watchdog", os.O_RDONLY | os.O_NONBLOCK)
        agent = ScriptedAgent(directory, STUBBORN, parent_pipes=[watchdog]).on(WAITING, training(rank_assignment()))
        agent_run = agent.on(
            RUNNING, when_up(directory, lambda: os.close(os.open(directory / "watchdog", os.O_WRONLY)))
        ).run()
        os.close(watchdog)
        assert agent_run.phases[-2:] == [LEAVING, LEFT]
        assert agent_run.result.ends[0].code == -signal.SIGKILL


class TestLosingTheMaster:
    """With a problem of the rendezvous client, this node has no part in the job."""

    PROBLEM = "the master at a:1 has been away for 600 s"

    def test_running_workers_are_stopped_and_the_code_has_the_reason(self, directory: Path) -> None:
        agent_run = (
            ScriptedAgent(directory, UNTIL_RELEASED)
            .on(WAITING, training(rank_assignment()))
            .on(RUNNING, when_up(directory, self.PROBLEM))
            .run()
        )
        assert (agent_run.result.exit_code, agent_run.result.error) == (exit_codes.CANNOT_JOIN, self.PROBLEM)
        assert agent_run.statuses[-1].phase is LEFT

    def test_a_node_that_was_never_taken_in_starts_nothing(self, directory: Path) -> None:
        agent_run = ScriptedAgent(directory, UNTIL_RELEASED).on(WAITING, self.PROBLEM).run()
        assert agent_run.result.exit_code == exit_codes.CANNOT_JOIN
        assert not (directory / "started").exists()

    def test_finished_work_stays_finished(self, directory: Path) -> None:
        agent_run = (
            ScriptedAgent(directory, "exit 0")
            .on(WAITING, training(rank_assignment()))
            .on(SUCCEEDED, self.PROBLEM)
            .run()
        )
        assert agent_run.result.exit_code == 0
        assert agent_run.result.error == f"{self.PROBLEM}; all workers of this node had succeeded by then"


def end(rank: int, code: int, after: float = 0.0, **more: Any) -> WorkerExit:
    return WorkerExit(rank=rank, local_rank=rank, pid=100 + rank, code=code, unix_time=1000.0 + after, **more)


OWN_RANKS = rank_assignment(nodes=2, workers=2, world_size=4)


def ending(
    assignment: Assignment = FINISHED,
    ranks: RankAssignment | None = OWN_RANKS,
    ends: tuple[WorkerExit, ...] = (),
    **more: Any,
) -> JobEnd:
    return JobEnd(assignment, worker_results(assignment, ranks, ends, succeeded=False, returned={}), **more)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "0"}, 0),
        ({"SLURM_RESTART_COUNT": "2"}, 2),
        ({"JOBSET_RESTART_ATTEMPT": "1"}, 1),
        ({"DLROVER_REQUEUE_COUNT": "3", "JOBSET_RESTART_ATTEMPT": "1"}, 3),
        ({"SLURM_RESTART_COUNT": "often"}, 0),
    ],
)
def test_a_scheduler_sets_how_often_it_has_restarted_the_job(environ: dict[str, str], count: int) -> None:
    assert requeue_count(environ) == count


KILLED_HERE = Failure(1, "node-a", "exited with code 9")
FAILED_HERE = over(PlanPhase.FAILED, failure=KILLED_HERE)
TOO_FEW = over(PlanPhase.FAILED, reasons=sentence("waited 600 s for enough nodes: 1 of the 2 nodes is here"))
STOPPED = over(PlanPhase.FAILED, reasons=(Code.STOPPED_ON_REQUEST(by="ann"),))
DRAINED = JobEnd(Assignment(), stopped_by=signal.SIGTERM, drained=True)


def checked(assignment: Assignment, status: HealthStatus) -> Assignment:
    """Return the assignment of a node with that result of the node check; a faulty node is dismissed."""
    fault = status is HealthStatus.FAULT
    health = NodeHealth(node_id="n", incarnation="i", host="h", status=status, dismissed=fault)
    return msgspec.structs.replace(assignment, parts=(NodeCheckAssignment(health=health),))


RESULTS = {
    "too few nodes": (ending(TOO_FEW), ExitReason.TOO_FEW_NODES, 75),
    "a problem of the rendezvous": (ending(training(None), problem="refused"), ExitReason.CANNOT_JOIN, 72),
    "a script that exits with a code of the launcher keeps it": (
        ending(FAILED_HERE, ends=(end(1, exit_codes.FAULTY_NODE),)), ExitReason.WORKER_FAILED, 73,
    ),
    "the job that a node's dismissal ends": (
        JobEnd(checked(over(PlanPhase.FAILED), HealthStatus.FAULT)), ExitReason.FAULTY_NODE, 73,
    ),
    "a straggler that stays, in a job that fails otherwise": (
        JobEnd(checked(over(PlanPhase.FAILED), HealthStatus.STRAGGLER)), ExitReason.TOO_FEW_NODES, 75,
    ),
    "a signal counts before a dismissal": (
        JobEnd(checked(Assignment(), HealthStatus.FAULT), stopped_by=signal.SIGTERM), ExitReason.STOPPED, 143,
    ),
    "a drained node ends as after a signal": (DRAINED, ExitReason.STOPPED, 143),
    "an operator stops the job": (JobEnd(STOPPED), ExitReason.STOPPED_ON_REQUEST, exit_codes.STOPPED_ON_REQUEST),
}  # fmt: skip


class TestResult:
    """The reason and exit code of each result, and the node that failed. `test_exit_codes.py` has the other schemes."""

    @pytest.mark.parametrize(("job_end", "reason", "code"), RESULTS.values(), ids=RESULTS)
    def test_each_end_has_a_reason_and_a_code(self, job_end: JobEnd, reason: ExitReason, code: int) -> None:
        result = resolve_result(job_end, "precise")
        assert (result.exit_reason, result.exit_code) == (reason, code)

    @pytest.mark.parametrize(("scheme", "code"), [("precise", 1), ("torchrun", 1), ("kubernetes", 137)])
    def test_a_worker_killed_elsewhere_is_a_cause_to_try_again(self, scheme: ExitScheme, code: int) -> None:
        killed = build_failure(end(3, -signal.SIGKILL), "node-b")
        result = resolve_result(ending(over(PlanPhase.FAILED, failure=killed)), scheme)
        assert (result.exit_code, result.exit_reason) == (code, ExitReason.PEER_FAILED)

    def test_the_worker_that_all_nodes_receive_is_the_root_cause_here_too(self) -> None:
        ends = (end(0, 7), end(1, 9, 0.5))
        result = resolve_result(ending(FAILED_HERE, ends=ends), "precise")
        assert (result.exit_code, result.root, result.failure) == (9, ends[1], None)

    @pytest.mark.parametrize(
        "place", [rank_assignment(nodes=2, workers=2, world_size=4), rank_assignment(3, nodes=2, world_size=4), None]
    )
    def test_a_failure_elsewhere_is_answered_as_torchrun_does(self, place: Any) -> None:
        wanted = over(PlanPhase.FAILED, failure=ELSEWHERE)
        lost = end(0, 1, stderr_tail="Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n")
        result = resolve_result(ending(wanted, place, ends=(lost,)), "precise")
        assert (result.exit_code, result.root, result.failure) == (exit_codes.PEER_FAILED, None, ELSEWHERE)

    def test_a_rank_of_an_earlier_round_is_not_one_of_ours(self) -> None:
        last = ending(over(PlanPhase.FAILED, 2, KILLED_HERE), ends=(end(1, 9),))
        result = resolve_result(last, "precise")
        assert (result.root, result.failure) == (None, KILLED_HERE)

    def test_why_the_job_ended_is_a_sentence_and_kept_apart_from_the_failure(self) -> None:
        assert resolve_result(ending(TOO_FEW), "precise").error == f"the job failed: {TOO_FEW.reason}"
        failed = over(
            PlanPhase.FAILED, failure=KILLED_HERE, reasons=(KILLED_HERE.reason, Code.EARLY_FAILURES(number=5))
        )
        assert resolve_result(ending(failed), "precise").why_over.startswith("5 rounds in succession failed")
        assert resolve_result(ending(FAILED_HERE), "precise").why_over == ""
        assert resolve_result(JobEnd(STOPPED), "precise").error == "ann stopped the job"
        assert "operator" in resolve_result(DRAINED, "precise").reason


class TestMeeting:
    """Whether workers have connected to each other, from the kernel's tables of connections."""

    HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    STORE = 0x99AF

    def table(self, *lines: str) -> str:
        return self.HEAD + "".join(f"   {n}: {line} 00000000:00000000 00:00000000\n" for n, line in enumerate(lines))

    def v6(self, *lines: tuple[str, str, str]) -> str:
        mapped = "0000000000000000FFFF00000100007F"
        return self.table(*(f"{mapped}:{local} {mapped}:{remote} {state}" for local, remote, state in lines))

    @pytest.mark.parametrize(
        "recorded",
        [
            pytest.param(
                (("99AF", "834E", "01"), ("99AF", "8356", "01"), ("834E", "99AF", "01"), ("8356", "99AF", "01")),
                id="both ends of each connection on one machine",
            ),
            pytest.param(
                (("99AF", "834E", "01"), ("834E", "99AF", "01"), ("8356", "99AF", "06")),
                id="a killed client, seen from its own end",
            ),
            pytest.param(
                (("9A7A", "99AF", "08"), ("99AF", "9A7A", "04"), ("99AF", "9A86", "06")),
                id="a killed store, seen from its own end",
            ),
        ],
    )
    def test_two_clients_are_counted_once_each(self, recorded: tuple[tuple[str, str, str], ...]) -> None:
        assert len(store_clients([self.v6(*recorded)], self.STORE)) == 2

    def test_one_client_in_both_tables_is_one_and_no_other_line_counts(self) -> None:
        plain = self.table("0100007F:834E 0100007F:99AF 01")
        assert len(store_clients([plain, self.v6(("99AF", "834E", "01"))], self.STORE)) == 1
        listening = "00000000000000000000000000000000:99AF 00000000000000000000000000000000:0000 0A"
        opening = "0100007F:834E 0100007F:99AF 02"
        accepting = "0100007F:99AF 0100007F:834E 03"
        other = "0100007F:0016 0100007F:834E 01"
        assert store_clients([self.table(listening, opening, accepting, other), self.HEAD, ""], self.STORE) == set()
