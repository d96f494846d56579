"""One job of a master in virtual time: timeouts, stalls, what is delayed, what is sent, and when the job is removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.harness import calls_of
from support.master_node import FAST, status
from support.policy_parts import fold

from dlrover_run.coordination.coordinator import RETURN_GRACE, Coordinator
from dlrover_run.coordination.driver import STORE_RETRY
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import MAX_WORKERS
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.coordination.records.rules import RESULT_RETENTION, JobRules
from dlrover_run.coordination.records.validation import MAX_EPOCH, MAX_ROUND, config_mismatch
from dlrover_run.features.node_check.decision.model import NodeCheckReport
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.master.job import JobHost, RequestRefused
from dlrover_run.master.journal import Journal
from dlrover_run.transport.messages import (
    Assigned,
    ReadStacks,
    Refused,
    Report,
    StacksFound,
    decode_from_master,
    decode_from_node,
    encode,
)


class Line:
    """Stands for a stream; keeps what was sent to it."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.last_message: Refused | None = None
        self.notices: list[str] = []
        self.wanted: list[ReadStacks] = []

    def send_assignment(self, wanted: Assignment) -> None:
        self.assignments.append(wanted)

    def ask_for_stacks(self, wanted: ReadStacks) -> None:
        self.wanted.append(wanted)

    def send_notice(self, text: str) -> None:
        self.notices.append(text)

    def end(self, last_message: Refused | None) -> None:
        self.last_message = last_message


class Bed:
    """A job with a virtual clock."""

    def __init__(self, rules: JobRules = FAST, directory: Path | None = None, epoch: int = 5, now: float = 0.0) -> None:
        self.now = now
        self.output: list[str] = []
        self.rules = rules
        journal, plan = None, None
        if directory is not None:
            journal = Journal(directory, "job")
            story = journal.take_over(rules, epoch)
            rules, epoch, plan = story.header.rules, story.header.epoch, story.plan
        self.job = JobHost("job", Coordinator(rules, now, epoch, plan), journal, now, self.output.append)
        self.lines: dict[str, Line] = {}
        self.statuses: dict[str, NodeReport] = {}

    def join(self, *names: str, rules: JobRules | None = None, **fields: object) -> None:
        for name in names:
            line = Line()
            self.job.join(line, status(name, **fold(NodeCheckReport, fields)), rules or self.rules, self.now)
            self.lines[name], self.statuses[name] = line, status(name, **fold(NodeCheckReport, fields))
        self.job.step(self.now)
        for name in names:
            # A node confirms at once which epoch it obeys.
            if self.lines[name].assignments and not self.statuses[name].epoch:
                self.report(name, epoch=self.lines[name].assignments[-1].epoch)

    def report(self, name: str, **fields: object) -> bool:
        self.statuses[name] = msgspec.structs.replace(
            self.statuses[name], **fold(NodeCheckReport, fields, self.statuses[name].parts)
        )
        news = self.job.receive(self.lines[name], self.statuses[name], self.now)
        if news:
            self.job.step(self.now)
        return news

    def take_ranks(self) -> None:
        """Every node reports that it trains in the round of its assignment."""
        for name, line in self.lines.items():
            wanted = line.assignments[-1]
            self.report(name, phase=NodePhase.RUNNING, ranks=wanted.ranks, known_round=wanted.key, epoch=wanted.epoch)

    def cut(self, name: str) -> None:
        self.job.disconnect(self.lines[name], self.statuses[name].key, self.now)
        self.job.step(self.now)

    def until(self, now: float) -> None:
        """Advance the clock, and step the job at each time that it asked for."""
        while (time := self.job.wake_at()) is not None and time <= now and not self.job.is_unneeded(self.now):
            assert time >= self.now, "a wake-up time in the past would make the job spin"
            self.now = time
            self.job.step(time)
        self.now = now

    def phase(self, name: str) -> PlanPhase:
        return self.lines[name].assignments[-1].phase


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A disk that is full while the list is not empty."""
    full = [False]
    write = os.write

    def maybe(fd: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", maybe)
    return full


def test_a_master_that_was_stalled_declares_no_node_lost() -> None:
    bed = Bed(JobRules(min_nodes=1, max_nodes=3, lost_after=1.0))
    bed.join("a", "b", "c")
    bed.take_ranks()
    bed.cut("c")
    bed.now += 30.0
    bed.job.compensate_stall(30.0, bed.now)
    bed.job.step(bed.now)
    assert bed.lines["a"].assignments[-1].key.number == 1
    # The remaining grace period continues after the stall.
    bed.until(bed.now + 1.1)
    assert bed.lines["a"].assignments[-1].reason == "node 2 (host-c) was lost"


def test_every_report_is_answered_and_a_decision_is_sent_to_the_nodes_it_changes() -> None:
    bed = Bed()
    bed.join("a", "b")
    assert [len(bed.lines[name].assignments) for name in "ab"] == [2, 3], (
        "both wait, then get the round; b's report is answered"
    )
    bed.take_ranks()
    assert not bed.report("b")
    assert [len(bed.lines[name].assignments) for name in "ab"] == [3, 5]


def test_waiting_nodes_are_informed_of_new_nodes_at_most_once_a_second() -> None:
    bed = Bed(JobRules(min_nodes=50, max_nodes=50))
    for number in range(40):
        bed.join(f"n{number}")
        bed.until(bed.now + 0.1)
    assignments = bed.lines["n0"].assignments
    bed.until(bed.now + 1.0)
    assert 4 <= len(assignments) <= 6
    assert assignments[-1].waiting is not None
    assert assignments[-1].waiting.text.startswith("40 nodes of 50 are here")


def test_of_many_missing_ranks_only_the_first_are_named() -> None:
    bed = Bed(JobRules(min_nodes=100_000, max_nodes=100_000))
    bed.join("a", preferred_rank=0)
    bed.join("b", preferred_rank=2)
    bed.join("c", preferred_rank=200_000)
    bed.until(2.0)
    waiting = bed.lines["a"].assignments[-1].waiting
    assert waiting is not None
    assert waiting.text.endswith("missing: node 1, node 3 and 99996 others")


def test_no_node_receives_a_plan_that_is_not_on_disk(tmp_path: Path, disk: list[bool]) -> None:
    bed = Bed(directory=tmp_path)
    bed.join("a")
    disk[0] = True
    bed.join("b")
    assert all(line.assignments[-1].ranks is None for line in bed.lines.values())
    assert "No space left on device" in bed.output[-1]
    bed.until(STORE_RETRY * 5.5)
    bed.report("a")
    waiting = bed.lines["a"].assignments[-1].waiting
    assert waiting is not None
    assert waiting.text.startswith("the master cannot write")
    assert len(bed.output) == 1, "the same problem is reported once"
    disk[0] = False
    bed.until(STORE_RETRY * 6.5)
    assert all(line.assignments[-1].key.number == 1 for line in bed.lines.values())
    assert bed.output[1:] == [
        "job 'job': the journal is written again",
        "job 'job': round 1 with 2 nodes: 2 nodes are here",
    ]
    assert Bed(directory=tmp_path).job._coordinator.plan.key.number == 1


def test_the_round_continues_while_its_end_cannot_be_stored(tmp_path: Path, disk: list[bool]) -> None:
    bed = Bed(JobRules(min_nodes=1, max_nodes=2, lost_after=1.0), tmp_path)
    bed.join("a", "b")
    bed.take_ranks()
    disk[0] = True
    bed.cut("b")
    bed.until(2.0)
    bed.report("a")
    assert bed.lines["a"].assignments[-1].key.number == 1
    assert bed.lines["a"].assignments[-1].ranks is not None
    disk[0] = False
    bed.until(4.0)
    assert bed.lines["a"].assignments[-1].key.number == 2


def test_a_request_that_cannot_be_stored_is_not_answered_as_carried_out(tmp_path: Path, disk: list[bool]) -> None:
    bed = Bed(JobRules(min_nodes=1, max_nodes=2), tmp_path)
    bed.join("a", "b")
    bed.take_ranks()
    disk[0] = True
    fewer = OperatorRequest(Action.SCALE, by="ann", max_nodes=1)
    accepted = bed.job.request(fewer, bed.now)
    assert not bed.job.write_error
    bed.job.step(bed.now)
    assert "No space left on device" in bed.job.write_error
    assert bed.job.answer(accepted) is None
    refused = bed.job.request(fewer, bed.now)
    bed.job.step(bed.now)
    answer = bed.job.answer(refused)
    assert answer is not None
    assert answer.refusal.endswith("nothing is changed until it can")
    disk[0] = False
    bed.until(bed.now + STORE_RETRY * 1.5)
    assert not bed.job.write_error
    assert bed.job.status(bed.now).desired_nodes == "1"


def test_a_report_of_a_later_epoch_makes_a_master_step_down_once_none_of_its_members_is_left(tmp_path: Path) -> None:
    bed = Bed(directory=tmp_path)
    bed.join("a", "b")
    bed.take_ranks()
    later = msgspec.structs.replace(bed.statuses["a"], epoch=MAX_EPOCH)
    for there in ("b is connected", "b may come back"):
        with pytest.raises(RequestRefused) as refused:
            bed.job.join(Line(), later, bed.rules, bed.now)
        assert refused.value.last_message.retry, there
        assert bed.job.stepped_down is None
        bed.cut("b" if there == "b is connected" else "a")
    bed.until(bed.now + bed.rules.lost_after + 0.01)
    bed.job.join(Line(), later, bed.rules, bed.now)
    bed.job.step(bed.now)
    assert bed.job.stepped_down is not None
    assert not bed.job.replaced
    assert list(tmp_path.iterdir()) == [], "the journal of a replaced master is removed"


def test_of_two_processes_with_one_node_id_the_later_one_takes_it_only_once() -> None:
    bed = Bed()
    bed.join("a", "b")
    bed.take_ranks()
    bed.report("b", phase=NodePhase.LEFT, ranks=None)
    bed.until(bed.now + 60)
    left, stream = bed.statuses["b"], bed.lines["b"]
    later = msgspec.structs.replace(left, incarnation="later", phase=NodePhase.WAITING, epoch=0)
    bed.job.join(Line(), later, bed.rules, bed.now)
    bed.job.step(bed.now)
    # The stream of the process that has left is still open, and it repeats its report.
    with pytest.raises(RequestRefused, match="in use by another process"):
        bed.job.receive(stream, left, bed.now)
    assert bed.job._coordinator.nodes[later.key].connected


def test_a_result_is_kept_for_a_disconnected_member_for_a_limited_time() -> None:
    bed = Bed(JobRules(min_nodes=1, max_nodes=2, lost_after=1.0))
    bed.join("a", "b")
    bed.take_ranks()
    for name in "ab":
        bed.report(name, phase=NodePhase.SUCCEEDED)
        if name == "a":
            bed.cut("a")
    assert bed.job.over
    bed.report("b", phase=NodePhase.LEFT)
    bed.cut("b")
    assert not bed.job.is_unneeded(bed.now)
    with pytest.raises(RequestRefused, match="has just ended"):
        bed.join("new")
    line = Line()
    bed.job.join(line, bed.statuses["a"], bed.rules, bed.now)
    bed.job.step(bed.now)
    assert line.assignments[-1].phase is PlanPhase.FINISHED
    bed.job.disconnect(line, bed.statuses["a"].key, bed.now)
    assert not bed.job.is_unneeded(bed.now)
    bed.until(bed.now + RESULT_RETENTION + 1)
    assert bed.job.is_unneeded(bed.now)


def test_a_process_whose_node_id_was_taken_learns_how_the_job_ends() -> None:
    bed = Bed(JobRules(min_nodes=1, max_nodes=2, lost_after=1.0))
    bed.join("a", "b")
    bed.take_ranks()
    first = bed.statuses["b"]
    bed.cut("b")
    bed.until(bed.now + 2)
    bed.statuses["b"] = status("b", incarnation="later")
    bed.lines["b"] = Line()
    bed.job.join(bed.lines["b"], bed.statuses["b"], bed.rules, bed.now)
    bed.job.step(bed.now)
    with pytest.raises(RequestRefused, match="in use by another process"):
        bed.job.join(Line(), first, bed.rules, bed.now)
    bed.report("b", epoch=bed.lines["b"].assignments[-1].epoch)
    for _ in range(2):
        # The round of one node, and the one of both.
        bed.take_ranks()
    for name in "ab":
        bed.report(name, phase=NodePhase.SUCCEEDED)
    assert bed.job.over
    for name in "ab":
        bed.report(name, phase=NodePhase.LEFT)
        bed.cut(name)
    assert not bed.job.is_unneeded(bed.now)
    line = Line()
    bed.job.join(line, first, bed.rules, bed.now)
    bed.job.step(bed.now)
    assert line.assignments[-1].phase is PlanPhase.FINISHED
    bed.job.receive(line, msgspec.structs.replace(first, phase=NodePhase.LEFT), bed.now)
    bed.job.disconnect(line, first.key, bed.now)
    assert bed.job.is_unneeded(bed.now)


def test_a_plan_that_only_records_a_success_is_not_announced() -> None:
    bed = Bed()
    bed.join("a", "b")
    bed.take_ranks()
    assert bed.output == ["job 'job': round 1 with 2 nodes: 2 nodes are here"]
    bed.report("a", phase=NodePhase.SUCCEEDED)
    bed.cut("a")
    bed.until(1.0)
    # The success of `a` is in the plan now, because the job forgets `a` later.
    assert len(bed.output) == 1
    bed.report("b", phase=NodePhase.SUCCEEDED)
    assert len(bed.output) == 2
    assert bed.phase("b") is PlanPhase.FINISHED


def test_a_job_that_all_nodes_have_left_is_removed_at_once() -> None:
    bed = Bed()
    bed.join("a", "b")
    bed.take_ranks()
    for phase in (NodePhase.SUCCEEDED, NodePhase.LEFT):
        for name in "ab":
            bed.report(name, phase=phase)
    assert bed.phase("a") is PlanPhase.FINISHED
    bed.cut("a")
    assert not bed.job.is_unneeded(bed.now)
    bed.cut("b")
    assert bed.job.is_unneeded(bed.now)


def test_a_job_that_never_started_is_removed_with_its_last_node() -> None:
    bed = Bed(JobRules(min_nodes=2, max_nodes=2, lost_after=1.0))
    bed.join("a")
    bed.cut("a")
    assert not bed.job.is_unneeded(bed.now), "the node may reconnect"
    bed.until(1.5)
    assert bed.job.is_unneeded(bed.now)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epoch": MAX_EPOCH + 1}, "an epoch that no coordinator has"),
        ({"epoch": -1}, "an epoch that no coordinator has"),
        ({"known_round": RoundKey(MAX_EPOCH + 1, 1)}, "an epoch that no coordinator has"),
        ({"known_round": RoundKey(1, MAX_ROUND + 1)}, "a round that no job has"),
        ({"workers": 0}, "a node has 1 to"),
        ({"workers": MAX_WORKERS + 1}, "a node has 1 to"),
    ],
)
def test_numbers_that_no_node_sends_are_refused(fields: dict[str, object], words: str) -> None:
    bed = Bed()
    with pytest.raises(RequestRefused, match=words):
        bed.join("a", **fields)
    bed.join("a")
    with pytest.raises(RequestRefused, match=words):
        bed.report("a", **fields)


@pytest.mark.parametrize(
    "lie",
    [
        {"workers": MAX_WORKERS},
        {"epoch": MAX_EPOCH},
        {"known_round": RoundKey(MAX_EPOCH, 1)},
        {"known_round": RoundKey(1, MAX_ROUND), "epoch": MAX_EPOCH},
    ],
)
def test_the_largest_values_of_a_node_keep_messages_to_others_within_their_limits(lie: dict[str, object]) -> None:
    bed = Bed(JobRules(min_nodes=2, max_nodes=2, max_restarts=9))
    bed.join("liar", **lie)
    bed.join("b", workers=MAX_WORKERS)
    bed.until(RETURN_GRACE + 1)
    for _ in range(3):
        wanted = bed.lines["b"].assignments[-1]
        assert decode_from_master(encode(Assigned(wanted))) == Assigned(wanted)
        for name in ("liar", "b"):
            bed.report(name, known_round=wanted.key, epoch=wanted.epoch)
        bed.take_ranks()
        assert bed.lines["b"].assignments[-1].ranks is not None
        assert decode_from_node(encode(Report(bed.statuses["b"]))) == Report(bed.statuses["b"])
        own = bed.lines["b"].assignments[-1].ranks.first_rank
        bed.report("b", phase=NodePhase.FAILED, failure=Failure(own, "host-b", "failed"))


def test_ranks_in_a_round_of_a_million_nodes_are_refused() -> None:
    bed = Bed()
    bed.join("a", "b")
    ranks = bed.lines["a"].assignments[-1].ranks
    assert ranks is not None
    for wrong in ({"nodes": 1_000_000}, {"node_rank": 2}):
        with pytest.raises(RequestRefused, match="a node rank that no round has"):
            bed.report("a", ranks=msgspec.structs.replace(ranks, **wrong))


def test_the_config_mismatch_names_the_differences() -> None:
    assert config_mismatch(JobRules(max_nodes=4), JobRules(max_nodes=4)) == ""
    assert config_mismatch(JobRules(max_nodes=4, max_restarts=3), JobRules(max_nodes=2)) == (
        "the rules of the job's first node hold: --nnodes (most) is 4, not 2; --max-restarts is 3, not 0"
    )


def calls_for_a_failure(nodes: int) -> int:
    """The number of functions that the master calls for one more status of a failed node."""
    names = [f"n{number}" for number in range(nodes)]
    bed = Bed(msgspec.structs.replace(FAST, min_nodes=nodes, max_nodes=nodes))
    bed.join(*names)
    bed.take_ranks()
    ranks = bed.statuses[names[0]].ranks
    assert ranks is not None
    failure = Failure(ranks.first_rank, bed.statuses[names[0]].host, "was broken", lost_peer=True)
    bed.report(names[0], phase=NodePhase.FAILED, failure=failure)
    return calls_of(lambda: bed.job.receive(bed.lines[names[0]], bed.statuses[names[0]], bed.now))


def test_a_report_of_a_failure_costs_the_same_in_a_job_of_any_size() -> None:
    assert calls_for_a_failure(40) < 2 * calls_for_a_failure(4)


@pytest.mark.parametrize("answer", [b'{"workers": 3}', b"[]", b'"\xff"', b"{"])
def test_an_answer_that_has_no_stacks_is_ignored_and_the_node_trains_on(answer: bytes) -> None:
    bed = Bed()
    bed.join("a", "b")
    bed.take_ranks()
    done: list[bool] = []
    request = bed.job.ask_for_stacks(StackQuery(), lambda: done.append(True))
    for name, line in bed.lines.items():
        (wanted,) = line.wanted
        bed.job.take_stacks(line, bed.statuses[name].key, StacksFound(wanted.number, msgspec.Raw(answer)))
    assert not done
    assert sum("is ignored: these are no stacks" in line for line in bed.output) == 2
    assert bed.job.connected == 2
    assert bed.job.end_stacks(request).stacks == ()
    assert [line.last_message for line in bed.lines.values()] == [None, None]
