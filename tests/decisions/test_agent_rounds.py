"""The agent of a job of several nodes: what it says and does, word by word, before a board that the test speaks for."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import WAIT, WORKERS, Mailbox, finish, launch
from scripted_agent import FINISHED, Answer, Play, gathering, over, seat, training

from dlrover_run import exit_codes
from dlrover_run.agent.environment import requeue_count
from dlrover_run.agent.node_state import build_failure
from dlrover_run.agent.result import JobEnd, resolve_result
from dlrover_run.agent.startup_probe import StartupProbe, store_clients
from dlrover_run.agent.torch_adapter import worker_results
from dlrover_run.coordination.bounds import MAX_TRACE
from dlrover_run.coordination.model import (
    Assignment,
    Failure,
    NodePhase,
    NodeReport,
    PlanPhase,
    RankAssignment,
    RoundKey,
)
from dlrover_run.coordination.reasons import Code, sentence
from dlrover_run.exit_reasons import RETRY, ExitReason, ExitScheme
from dlrover_run.failures.worker_exit import WorkerExit

WAITING, RUNNING, SUCCEEDED = NodePhase.WAITING, NodePhase.RUNNING, NodePhase.SUCCEEDED
FAILED, LEAVING, LEFT = NodePhase.FAILED, NodePhase.LEAVING, NodePhase.LEFT

UNTIL_RELEASED = "echo x >> started; echo x > up; read word < gate"
"""A worker that says when it is up, and ends well as soon as something is written to the gate."""

STUBBORN = "trap : TERM; echo x > up; until read word < gate; do :; done"
"""The same, but it goes on after a SIGTERM."""

ELSEWHERE = Failure(3, "node-b", "raised ValueError: x", trace="Traceback (most recent call last):\nValueError: x")


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    for name in ("gate", "up"):
        os.mkfifo(tmp_path / name)
    return tmp_path


def release(stage: Path) -> None:
    (stage / "gate").write_text("go\n")


def when_up(stage: Path, answer: Answer) -> Callable[[], Answer]:
    """The answer, but not before the worker that has been started is up."""

    def wait() -> Answer:
        (stage / "up").read_text()
        return answer() if callable(answer) else answer

    return wait


def starts(stage: Path) -> int:
    return len((stage / "started").read_text().splitlines())


def test_the_same_ranks_from_another_coordinator_leave_the_workers_alone(stage: Path) -> None:
    successor = training(seat(store_port=7), epoch=5)

    def obeys(status: NodeReport) -> bool:
        return status.epoch == 5 and status.phase is RUNNING

    play = Play(stage, UNTIL_RELEASED).on(WAITING, training(seat(store_port=7))).on(RUNNING, when_up(stage, successor))
    played = play.on(obeys, lambda: release(stage)).on(SUCCEEDED, FINISHED).run()
    assert played.phases == [WAITING, RUNNING, SUCCEEDED, LEFT]
    assert starts(stage) == 1
    assert played.verdict.exit_code == 0


def test_a_node_that_loses_its_ranks_stops_its_workers_and_starts_new_ones_with_the_next(stage: Path) -> None:
    def second(status: NodeReport) -> bool:
        return status.phase is RUNNING and status.in_round(RoundKey(1, 2))

    play = Play(stage, UNTIL_RELEASED).on(WAITING, training(seat())).on(RUNNING, when_up(stage, gathering(1)))
    play.on(WAITING, training(seat(2), reasons=sentence("node-b was lost"))).on(
        second, when_up(stage, lambda: release(stage))
    )
    played = play.on(SUCCEEDED, over(PlanPhase.FINISHED, 2)).run()
    assert played.phases == [WAITING, RUNNING, WAITING, RUNNING, SUCCEEDED, LEFT]
    without = [status for status in played.statuses if status.phase is WAITING and status.ranks is None]
    assert [status.known_round.number for status in without] == [0, 1]
    assert "into the round, node-b was lost; round 2 with 1 node\n" in played.said
    assert "restart" not in played.said.replace("restart_count=0", "")
    assert starts(stage) == 2


def test_a_word_that_comes_while_workers_end_is_answered_before_they_have(stage: Path) -> None:
    """The coordinator may need the answer for the next round; a worker's grace can be half a minute."""

    def heard(status: NodeReport) -> bool:
        return status.known_round.number == 3

    def released() -> Assignment:
        release(stage)
        return FINISHED

    play = Play(stage, STUBBORN).on(WAITING, training(seat())).on(RUNNING, when_up(stage, gathering(1)))
    played = play.on(WAITING, training(None, 3)).on(heard, released).run()
    assert played.verdict.ends[0].code == 0, "it was released, and not killed after its grace"


def test_each_round_prints_torchs_block_with_verbose_output(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "INFO")
    place = seat(
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
    play = Play(stage, "exit 0", spec={"workers_per_node": 2}).on(WAITING, training(place))
    said = play.on(SUCCEEDED, over(PlanPhase.FINISHED, 4)).run().said
    assert said == (
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


def test_the_environment_follows_the_ranks(stage: Path) -> None:
    names = ("RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
    more = ("NODE_NUM", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
    shell = "printf '%s ' " + " ".join(f"${name}" for name in (*names, *more)) + "> environment"
    place = seat(
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
    Play(stage, shell).on(WAITING, training(place)).on(SUCCEEDED, over(PlanPhase.FINISHED, 4)).run()
    assert (stage / "environment").read_text().split() == ["4", "1", "5", "6", "1", "3", "1", "3", "node-a", "2"]


class TestFailures:
    """What the other nodes are told of a failure."""

    RAISE = "echo 'Traceback (most recent call last):' >&2; echo '  File x' >&2; echo 'ValueError: x' >&2; exit 1"
    LOST = "echo 'Traceback (most recent call last):' >&2; echo 'RuntimeError: Connection closed by peer' >&2; exit 1"

    def test_it_is_reported_once_and_with_its_traceback(self, stage: Path) -> None:
        place = seat(first_rank=2, world_size=3, nodes=2, node_rank=1)
        play = Play(stage, self.RAISE).on(WAITING, training(place))
        played = play.on(FAILED, lambda: over(PlanPhase.FAILED, failure=ELSEWHERE)).run()
        told = [status for status in played.statuses if status.phase is FAILED]
        assert len({status.failure for status in told}) == 1
        failure = told[0].failure
        assert failure is not None
        assert (failure.rank, failure.exit_text, failure.lost_peer) == (2, "raised ValueError: x", False)
        assert failure.trace == "Traceback (most recent call last):\n  File x\nValueError: x"

    def test_a_lost_peer_is_reported_as_such_until_a_worker_fails_of_itself(self, stage: Path) -> None:
        shell = f"[ $LOCAL_RANK = 0 ] && {{ {self.LOST}; }}; read word < gate; exit 3"
        place = seat(workers=2, world_size=4, nodes=2)

        def is_lost(status: NodeReport) -> bool:
            return status.failure is not None and status.failure.lost_peer

        def is_own(status: NodeReport) -> bool:
            return status.failure is not None and not status.failure.lost_peer

        play = Play(stage, shell, spec={"workers_per_node": 2}).on(WAITING, training(place))
        play.on(is_lost, lambda: release(stage))
        own = Failure(1, "here", "exited with code 3")
        played = play.on(is_own, over(PlanPhase.FAILED, failure=own)).run()
        assert [f.rank for s in played.statuses if (f := s.failure)] == [0, 1]
        assert played.verdict.exit_code == 3

    def test_what_is_too_long_is_clipped_to_what_may_travel(self, stage: Path) -> None:
        lines = "i=0; while [ $i -lt 900 ]; do echo '  File deep' $i >&2; i=$((i+1)); done"
        shell = f"echo 'Traceback (most recent call last):' >&2; {lines}; echo 'ValueError: x' >&2; exit 1"
        played = Play(stage, shell).on(WAITING, training(seat())).on(FAILED, FINISHED).run()
        failure = next(s.failure for s in played.statuses if s.failure)
        assert len(failure.trace) == MAX_TRACE
        assert failure.trace.startswith("Traceback (most recent call last):\n")
        assert failure.trace.endswith("File deep 899\nValueError: x")

    @pytest.mark.parametrize(("mark", "has_trained"), [("printf 1 > $DLROVER_CHECKPOINT_MARK;", True), ("", False)])
    def test_a_checkpoint_is_evidence_of_work(self, stage: Path, mark: str, has_trained: bool) -> None:
        played = Play(stage, f"{mark} exit 3").on(WAITING, training(seat())).on(FAILED, FINISHED).run()
        assert [s.progressed for s in played.statuses if s.phase is FAILED] == [has_trained]

    @pytest.mark.parametrize(("written", "step"), [(b"120\n", 120), (b"120\n180\n", 180), (b"1", None), (b"x\n", None)])
    def test_a_checkpoint_is_noted_at_once_with_its_step(self, written: bytes, step: int | None) -> None:
        async def noted() -> int | None:
            found: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            probe = StartupProbe(seat())
            probe.listen(found.set_result)
            with open(probe.mark_path, "wb") as mark:
                mark.write(written)
            try:
                return await asyncio.wait_for(found, WAIT)
            finally:
                probe.close()

        assert asyncio.run(noted()) == step

    def test_workers_that_cannot_be_started_are_a_failure_of_this_node(self, stage: Path) -> None:
        from dlrover_run.spec import Entrypoint

        missing = {"entrypoint": Entrypoint("program", "/nowhere/at-all")}
        place = seat(2, node_rank=1, nodes=2, first_rank=3, world_size=4)
        played = Play(stage, "", spec=missing).on(WAITING, training(place)).run()
        last = played.statuses[-1]
        assert (last.phase, last.failure and last.failure.rank) == (LEFT, 3)
        assert "could not be started: " in str(last.failure)
        assert played.verdict.exit_code == exit_codes.CANNOT_START


class TestLeaving:
    """A node that is asked to go, or has to."""

    ENDS_WHEN_SAID = (
        "trap 'until [ -e said ]; do sleep 0.01; done; exit 7' TERM; echo x > up; until read word < gate; do :; done"
    )
    """A worker that ends of SIGTERM, but not before the test has made the file `said`."""

    def test_it_says_so_while_its_workers_have_their_grace(self, stage: Path) -> None:
        play = Play(stage, self.ENDS_WHEN_SAID).on(WAITING, training(seat()))
        play.on(RUNNING, when_up(stage, lambda: play.signal(signal.SIGTERM)))
        played = play.on(LEAVING, (stage / "said").touch).run()
        assert played.phases == [WAITING, RUNNING, LEAVING, LEFT]
        assert played.verdict.ends[0].code == 7
        assert played.verdict.exit_code == 128 + signal.SIGTERM

    def test_it_takes_no_new_ranks_while_its_workers_end(self, stage: Path) -> None:
        play = Play(stage, self.ENDS_WHEN_SAID).on(WAITING, training(seat()))
        play.on(RUNNING, when_up(stage, lambda: play.signal(signal.SIGTERM)))

        def assign_another_round() -> Assignment:
            (stage / "said").touch()
            return training(seat(2))

        played = play.on(LEAVING, assign_another_round).run()
        leaving = [status.ranks for status in played.statuses if status.phase in (LEAVING, LEFT)]
        assert {ranks and ranks.key for ranks in leaving} == {RoundKey(1, 1)}
        assert played.verdict.ends[0].code == 7

    def test_no_other_node_begins_anew_when_its_workers_have_succeeded(self, stage: Path) -> None:
        play = Play(stage, "exit 0").on(WAITING, training(seat()))
        played = play.on(SUCCEEDED, lambda: play.signal(signal.SIGTERM)).run()
        # Workers that end at once may have succeeded before the agent reports that they run.
        assert [phase for phase in played.phases if phase is not RUNNING] == [WAITING, SUCCEEDED]
        assert played.verdict.exit_code == 128 + signal.SIGTERM

    def test_the_loss_of_its_watchdog_kills_and_is_reported(self, stage: Path) -> None:
        # It reads as ended once it has been opened and closed at the other end.
        os.mkfifo(stage / "watchdog")
        watchdog = os.open(stage / "watchdog", os.O_RDONLY | os.O_NONBLOCK)
        play = Play(stage, STUBBORN, parent_pipes=[watchdog]).on(WAITING, training(seat()))
        played = play.on(RUNNING, when_up(stage, lambda: os.close(os.open(stage / "watchdog", os.O_WRONLY)))).run()
        os.close(watchdog)
        assert played.phases[-2:] == [LEAVING, LEFT]
        assert played.verdict.ends[0].code == -signal.SIGKILL


class TestLosingTheMaster:
    """A board with a problem has no part in the job for this node."""

    PROBLEM = "the master at a:1 has been away for 600 s"

    def test_running_workers_are_stopped_and_the_code_says_why(self, stage: Path) -> None:
        played = (
            Play(stage, UNTIL_RELEASED).on(WAITING, training(seat())).on(RUNNING, when_up(stage, self.PROBLEM)).run()
        )
        assert (played.verdict.exit_code, played.verdict.error) == (exit_codes.CANNOT_JOIN, self.PROBLEM)
        assert played.statuses[-1].phase is LEFT

    def test_a_node_that_was_never_taken_in_starts_nothing(self, stage: Path) -> None:
        played = Play(stage, UNTIL_RELEASED).on(WAITING, self.PROBLEM).run()
        assert played.verdict.exit_code == exit_codes.CANNOT_JOIN
        assert not (stage / "started").exists()

    def test_work_that_is_done_is_done(self, stage: Path) -> None:
        played = Play(stage, "exit 0").on(WAITING, training(seat())).on(SUCCEEDED, self.PROBLEM).run()
        assert played.verdict.exit_code == 0
        assert played.verdict.error == f"{self.PROBLEM}; all workers of this node had succeeded by then"


def end(rank: int, code: int, after: float = 0.0, **more: Any) -> WorkerExit:
    return WorkerExit(rank=rank, local_rank=rank, pid=100 + rank, code=code, unix_time=1000.0 + after, **more)


OWN_RANKS = seat(nodes=2, workers=2, world_size=4)


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
def test_a_scheduler_says_how_often_it_has_started_the_job_again(environ: dict[str, str], count: int) -> None:
    assert requeue_count(environ) == count


class TestVerdicts:
    """The table of exit codes, and whose failure it was."""

    OWN = Failure(1, "node-a", "exited with code 9")

    def test_the_worker_that_all_nodes_receive_is_the_root_cause_here_too(self) -> None:
        ends = (end(0, 7), end(1, 9, 0.5))
        verdict = resolve_result(ending(assignment=over(PlanPhase.FAILED, failure=self.OWN), ends=ends), "precise")
        assert (verdict.exit_code, verdict.root, verdict.failure) == (9, ends[1], None)

    @pytest.mark.parametrize("place", [seat(nodes=2, workers=2, world_size=4), seat(3, nodes=2, world_size=4), None])
    def test_a_failure_elsewhere_is_answered_as_torchrun_does(self, place: Any) -> None:
        wanted = over(PlanPhase.FAILED, failure=ELSEWHERE)
        lost = end(0, 1, stderr_tail="Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n")
        verdict = resolve_result(ending(assignment=wanted, ranks=place, ends=(lost,)), "precise")
        assert (verdict.exit_code, verdict.root, verdict.failure) == (exit_codes.PEER_FAILED, None, ELSEWHERE)

    @pytest.mark.parametrize(("scheme", "code"), [("precise", 1), ("torchrun", 1), ("kubernetes", 137)])
    def test_a_worker_killed_elsewhere_is_a_cause_to_try_again(self, scheme: ExitScheme, code: int) -> None:
        killed = build_failure(end(3, -signal.SIGKILL), "node-b")
        verdict = resolve_result(ending(assignment=over(PlanPhase.FAILED, failure=killed)), scheme)
        assert (verdict.exit_code, verdict.exit_reason) == (code, ExitReason.PEER_FAILED)

    def test_a_rank_of_an_earlier_round_is_not_one_of_ours(self) -> None:
        last = ending(assignment=over(PlanPhase.FAILED, 2, self.OWN), ends=(end(1, 9),))
        verdict = resolve_result(last, "precise")
        assert (verdict.root, verdict.failure) == (None, self.OWN)

    @pytest.mark.parametrize(("scheme", "code"), [("precise", exit_codes.TOO_FEW_NODES), ("torchrun", 1)])
    def test_too_few_nodes_have_a_sentence_and_a_code(self, scheme: ExitScheme, code: int) -> None:
        wanted = over(PlanPhase.FAILED, reasons=sentence("waited 600 s for enough nodes: 1 of the 2 nodes is here"))
        verdict = resolve_result(ending(assignment=wanted), scheme)
        assert (verdict.exit_code, verdict.error) == (code, f"the job failed: {wanted.reason}")

    @pytest.mark.parametrize(
        ("scheme", "code"),
        [("precise", exit_codes.CANNOT_JOIN), ("torchrun", 1), ("kubernetes", RETRY)],
    )
    def test_a_problem_has_a_code(self, scheme: ExitScheme, code: int) -> None:
        verdict = resolve_result(ending(assignment=training(None), problem="refused"), scheme)
        assert (verdict.exit_code, verdict.exit_reason) == (code, ExitReason.CANNOT_JOIN)

    def test_a_script_that_exits_with_a_code_of_the_launcher_keeps_it(self) -> None:
        """Its pod is not started again because of a number."""
        ends = (end(1, exit_codes.FAULTY_NODE),)
        failed = over(PlanPhase.FAILED, failure=self.OWN)
        verdict = resolve_result(ending(assignment=failed, ends=ends), "kubernetes")
        assert (verdict.exit_code, verdict.exit_reason) == (exit_codes.FAULTY_NODE, ExitReason.WORKER_FAILED)

    def test_why_there_was_no_other_round_is_kept_apart_from_the_failure(self) -> None:
        failed = over(PlanPhase.FAILED, failure=self.OWN, reasons=(self.OWN.reason, Code.EARLY_FAILURES(number=5)))
        assert resolve_result(ending(assignment=failed), "precise").why_over.startswith("5 rounds in succession failed")
        assert resolve_result(ending(assignment=over(PlanPhase.FAILED, failure=self.OWN)), "precise").why_over == ""


class TestMeeting:
    """Whether workers have met, from what the kernel shows of connections."""

    HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    STORE = 0x99AF

    def table(self, *lines: str) -> str:
        return self.HEAD + "".join(f"   {n}: {line} 00000000:00000000 00:00000000\n" for n, line in enumerate(lines))

    def v6(self, *lines: tuple[str, str, str]) -> str:
        mapped = "0000000000000000FFFF00000100007F"
        return self.table(*(f"{mapped}:{local} {mapped}:{remote} {state}" for local, remote, state in lines))

    def test_both_ends_of_a_connection_on_one_machine_are_one_client(self) -> None:
        recorded = self.v6(
            ("99AF", "834E", "01"), ("99AF", "8356", "01"), ("834E", "99AF", "01"), ("8356", "99AF", "01")
        )
        assert len(store_clients([recorded], self.STORE)) == 2

    def test_a_killed_client_is_seen_from_its_own_end(self) -> None:
        recorded = self.v6(("99AF", "834E", "01"), ("834E", "99AF", "01"), ("8356", "99AF", "06"))
        assert len(store_clients([recorded], self.STORE)) == 2

    def test_a_killed_store_is_seen_from_its_own_end(self) -> None:
        recorded = self.v6(("9A7A", "99AF", "08"), ("99AF", "9A7A", "04"), ("99AF", "9A86", "06"))
        assert len(store_clients([recorded], self.STORE)) == 2

    def test_one_client_in_both_tables_is_one(self) -> None:
        plain = self.table("0100007F:834E 0100007F:99AF 01")
        assert len(store_clients([plain, self.v6(("99AF", "834E", "01"))], self.STORE)) == 1

    def test_what_is_no_connection_does_not_count(self) -> None:
        listening = "00000000000000000000000000000000:99AF 00000000000000000000000000000000:0000 0A"
        opening = "0100007F:834E 0100007F:99AF 02"
        accepting = "0100007F:99AF 0100007F:834E 03"
        other = "0100007F:0016 0100007F:834E 01"
        assert store_clients([self.table(listening, opening, accepting, other), self.HEAD, ""], self.STORE) == set()


class TestTwoLaunchers:
    """Real ones, which meet on loopback."""

    def join(
        self, mailbox: Mailbox, port: int, script: Path, *flags: str, nnodes: str = "2", conf: str = "lost_after=0.2"
    ) -> subprocess.Popen[str]:
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
        return launch(mailbox, f"--nnodes={nnodes}", *place, *flags, script)

    def test_a_worker_that_fails_on_one_restarts_both_and_both_succeed_together(
        self, mailbox: Mailbox, free_port: int
    ) -> None:
        os.mkfifo(mailbox.directory / "turn")
        script = WORKERS / "fail_once.py"
        nodes = [self.join(mailbox, free_port, script, "--max-restarts=1") for _ in range(2)]
        ended = [finish(node) for node in nodes]
        assert [each.code for each in ended] == [0, 0], ended
        seen = mailbox.gather(4, timeout=0)
        assert [(m["restart"], m["rank"]) for m in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        told = "".join(each.err for each in ended)
        assert told.count("; restart 1 of 1\n") == 2
        assert told.count("rank 1 exited with code 11") == 1
        assert told.count(f"rank 1 on node 1 ({socket.gethostname()}) exited with code 11") == 1

    @pytest.mark.parametrize(("flags", "codes"), [([], [1, 9]), (["--compat-exit-codes"], [1, 1])])
    def test_both_report_one_root_cause(
        self, mailbox: Mailbox, free_port: int, flags: list[str], codes: list[int]
    ) -> None:
        script = mailbox.script(
            "fail.py",
            "import os, signal, traceback\n"
            "try: raise ValueError('the disk is gone')\n"
            "except ValueError: os.environ['RANK'] == '0' or traceback.print_exc()\n"
            "os.environ['RANK'] == '0' and signal.pause()\n"
            "sys.exit(9)\n",
        )
        nodes = [self.join(mailbox, free_port, script, *flags) for _ in range(2)]
        ended = [finish(node) for node in nodes]
        assert sorted(each.code for each in ended) == codes
        (whole,) = (each for each in ended if "Root Cause" in each.err)
        (other,) = (each for each in ended if each is not whole)
        _, _, report = whole.err.partition("Root Cause (first observed failure):\n")
        assert report.startswith("  rank 1 exited with code 9\n"), whole.err
        assert re.search(r"^  rank      : 1\b", report, re.MULTILINE)
        assert "    ValueError: the disk is gone\n" in report
        assert f"The launcher exits with code {whole.code}." in report
        node = f"node 1 ({socket.gethostname()})"
        line = f"dlrover-run: the job failed: rank 1 on {node} exited with code 9; the full report is on the console "
        assert other.err.count(f"{line}of {node}; this launcher exits with code {other.code}\n") == 1, other.err
        assert "Traceback" not in other.err

    def test_when_one_is_asked_to_go_the_other_goes_on_without_a_time_out(
        self, mailbox: Mailbox, free_port: int
    ) -> None:
        script = mailbox.script(
            "hold.py", "import os, signal\npost(world=os.environ['WORLD_SIZE'], node=os.getppid())\nsignal.pause()\n"
        )
        patient = "last_call_timeout=9999,lost_after=9999,pend_timeout=9999"
        nodes = [self.join(mailbox, free_port, script, nnodes="1:2", conf=patient) for _ in range(2)]
        assert [m["world"] for m in mailbox.gather(2)] == ["2", "2"]
        nodes[0].terminate()
        again = mailbox.receive()
        assert (again["world"], again["rank"], again["restart"]) == ("1", 0, 0)
        assert finish(nodes[0]).code == 128 + signal.SIGTERM
        nodes[1].terminate()
        ended = finish(nodes[1])
        assert ended.code == 128 + signal.SIGTERM
        host = re.escape(socket.gethostname())
        assert re.search(
            f"into the round, node \\d \\({host}\\) was ended by SIGTERM; round 2 with 1 node\\n", ended.err
        )

    def test_a_node_that_stays_alone_says_what_is_missing(self, mailbox: Mailbox, free_port: int) -> None:
        ended = finish(self.join(mailbox, free_port, WORKERS / "hold.py", conf="join_timeout=1"))
        assert ended.code == exit_codes.TOO_FEW_NODES
        assert re.search(
            r"^\d\d:\d\d:\d\d dlrover-run: the job failed: .*\b1 of .*\b2 nodes\b", ended.err, re.MULTILINE
        ), ended.err
