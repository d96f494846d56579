"""Which workers the others of a round wait for: from samples to shares, from shares to ranks, and what nodes learn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.policy_parts import running_report

from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.node_views import build_assignment, node_views
from dlrover_run.coordination.observer import Observation
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import validate_report
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.events.records import Event, Events, StragglerFound, StragglerGone
from dlrover_run.features.hangs.node.round_stragglers import RoundStragglers
from dlrover_run.features.hangs.node.stall_watch import TRAINING_INTERVAL
from dlrover_run.features.hangs.stragglers.finding import (
    CAUSES,
    FOUND_GAP,
    GONE_GAP,
    MAX_STRAGGLERS,
    Straggler,
    find_stragglers,
)
from dlrover_run.features.hangs.stragglers.model import (
    MAX_REPORTED,
    StragglerAssignment,
    StragglerNodeReport,
    StragglerState,
)
from dlrover_run.features.hangs.stragglers.observer import StragglerObserver, find
from dlrover_run.features.hangs.stragglers.rules import StragglerRules
from dlrover_run.features.hangs.stragglers.shares import (
    KEPT_WINDOWS,
    SENDING_BYTES,
    WINDOW,
    NodeShares,
    Shares,
    WorkerSample,
)
from dlrover_run.features.hangs.stragglers.text import StragglerCode
from dlrover_run.features.operate.web.metrics import JobFigures, render_metrics
from dlrover_run.features.registry import decode_part, job_of
from dlrover_run.job_status.status import JobView, StragglerStatus, job_status
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.observe.waits import MainThread, Waits, classify
from dlrover_run.transport.messages import MAX_NODE_MESSAGE, InvalidMessage, Report, decode_from_node, encode

PEERS, DATA, DISK, TIME, RUNS = Waits.PEERS, Waits.DATA, Waits.DISK, Waits.TIME, Waits.NOTHING


class TestWhatAThreadWaitsFor:
    @pytest.mark.parametrize(
        ("state", "function", "waits"),
        [
            ("S", "futex_do_wait", PEERS),
            ("S", "futex_wait_queue_me", PEERS),
            ("S", "poll_schedule_timeout.constprop.0", DATA),
            ("S", "anon_pipe_read", DATA),
            ("S", "do_epoll_wait", DATA),
            ("S", "wait_woken", DATA),
            ("S", "do_wait", DATA),
            ("S", "request_wait_answer", DISK),
            ("D", "folio_wait_bit_common", DISK),
            ("D", "", DISK),
            ("S", "hrtimer_nanosleep", TIME),
            ("R", "", RUNS),
            ("S", "", None),
            ("T", "do_signal_stop", None),
            ("t", "ptrace_stop", None),
            ("I", "anything", None),
        ],
    )
    def test_follows_from_its_state_and_its_place_in_the_kernel(
        self, state: str, function: str, waits: Waits | None
    ) -> None:
        assert classify(state, function) is waits


class Node:
    """A node whose workers are sampled once a second."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks or (0, 1)
        self.shares = NodeShares()
        self.now = 0.0
        self.bytes = 0
        self.reports = 0
        self.queued = dict.fromkeys(self.ranks, 0.0)
        self.waited = dict.fromkeys(self.ranks, 0.0)

    def run(self, seconds: float, **does: str) -> None:
        """For that long each worker does what the letters say by turns: p, d, k, t, r or ?, for an unknown one.
        `still` is without data between the workers."""
        letters = {"p": PEERS, "d": DATA, "k": DISK, "t": TIME, "r": RUNS, "?": None}
        still = does.pop("still", "") == "yes"
        turns = {int(name[1:]): itertools.cycle(text) for name, text in does.items()}
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.bytes += 0 if still else 1000
            samples = [self._sample(rank, letters[next(turns[rank])]) for rank in self.ranks]
            self.reports += self.shares.add(samples, self.now)

    def _sample(self, rank: int, waits: Waits | None) -> WorkerSample:
        return WorkerSample(rank, waits, self.queued[rank], self.waited[rank], self.bytes)

    @property
    def stragglers(self) -> tuple[tuple[int, str], ...]:
        return tuple((one.rank, one.cause) for one in find_stragglers(self.shares.current))


LONG = (KEPT_WINDOWS + 1) * WINDOW
"""Seconds after which everything before is forgotten."""


class TestGuilty:
    @pytest.mark.parametrize(
        ("slow", "cause"),
        [("rrrrrrrp", "computing"), ("dddddrrp", "data"), ("kkkkkrrp", "disk"), ("tttttrrp", "time")],
    )
    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_worker_that_never_waits_is_named_with_what_it_does(self, rank: int, slow: str, cause: str) -> None:
        node = Node()
        node.run(LONG, **{f"r{rank}": slow, f"r{1 - rank}": "rrpppppp"})
        assert node.stragglers == ((rank, cause),)

    def test_a_worker_whose_processor_others_use(self) -> None:
        node = Node()
        for _ in range(int(LONG)):
            node.queued[1] += 0.8
            node.run(1.0, r0="p", r1="r")
        assert node.stragglers == ((1, "processor"),)

    def test_what_the_script_reports_of_its_wait_for_data_counts_where_it_waits_on_a_futex(self) -> None:
        node = Node()
        for _ in range(int(LONG)):
            node.waited[1] += 0.9
            node.run(1.0, r0="p", r1="p")
        assert node.stragglers == ((1, "data"),)

    def test_two_slow_workers_of_eight(self) -> None:
        node = Node(*range(8))
        node.run(LONG, **{f"r{rank}": "ddddr" if rank in (3, 4) else "rpppp" for rank in range(8)})
        assert node.stragglers == ((3, "data"), (4, "data"))

    def test_it_is_named_after_five_windows_and_its_end_too(self) -> None:
        node = Node()
        node.run((KEPT_WINDOWS - 1) * WINDOW, r0="rpppp", r1="ddddr")
        assert node.stragglers == ()
        node.run(WINDOW + 1, r0="rpppp", r1="ddddr")
        assert node.stragglers == ((1, "data"),)
        node.run(KEPT_WINDOWS * WINDOW, r0="rp", r1="rp")
        assert node.stragglers == ()


class TestInnocent:
    @pytest.mark.parametrize("does", ["rp", "pppr", "r", "d", "k", "t", "?"])
    def test_workers_that_do_all_the_same(self, does: str) -> None:
        node = Node()
        node.run(LONG, r0=does, r1=does)
        assert node.stragglers == ()

    @pytest.mark.parametrize("seconds", [5, 20, 60, 600])
    @pytest.mark.parametrize("saves", ["k", "r", "d"])
    def test_rank_0_saves_a_checkpoint_or_evaluates_once(self, saves: str, seconds: int) -> None:
        node = Node()
        node.run(LONG + 4, r0="rrp", r1="rrp")
        node.run(seconds, r0=saves, r1="p", still="yes")
        named = []
        for _ in range(int(LONG)):
            node.run(1.0, **dict.fromkeys(("r0", "r1"), "rrp"[int(node.now) % 3]))
            named.append(node.stragglers)
        assert not any(named)

    @pytest.mark.parametrize("seconds", [5, 13, 22, 29])
    @pytest.mark.parametrize("before", range(0, 76, 3))
    def test_one_pause_of_a_young_round(self, before: int, seconds: int) -> None:
        """As of `main_process_first`, in which rank 0 prepares the data for all."""
        node = Node()
        named = []
        node.run(before, r0="rp", r1="rp")
        for _ in range(seconds):
            node.run(1.0, r0="d", r1="p", still="yes")
            named.append(node.stragglers)
        for _ in range(int(LONG)):
            node.run(1.0, **dict.fromkeys(("r0", "r1"), "rp"[int(node.now) % 2]))
            named.append(node.stragglers)
        assert not any(named)

    def test_two_slow_windows_of_five(self) -> None:
        node = Node()
        node.run(KEPT_WINDOWS * WINDOW + 1, r0="rp", r1="rp")
        node.run(2 * WINDOW, r0="k", r1="p")
        assert len(node.shares.current) == 2
        assert node.stragglers == ()

    def test_the_start(self) -> None:
        node = Node()
        node.run(600, r0="r", r1="p", still="yes")
        assert node.shares.current == ()
        node.run(2 * WINDOW, r0="r", r1="p")
        assert node.shares.current == ()

    def test_workers_that_wait_for_their_accelerators_by_spinning(self) -> None:
        node = Node()
        node.run(LONG, r0="r", r1="rrrp")
        assert node.stragglers == ()

    def test_three_of_four_that_are_slow(self) -> None:
        assert find_stragglers([Shares(0, peers=0.9), *(Shares(rank, computing=1.0) for rank in (1, 2, 3))]) == ()

    def test_half_of_four_that_are_slow(self) -> None:
        workers = [Shares(rank, peers=0.9 if rank < 2 else 0.0) for rank in range(4)]
        assert find_stragglers(workers) == ()

    @pytest.mark.parametrize("workers", [(), (Shares(0, computing=1.0),)])
    def test_a_worker_alone(self, workers: tuple[Shares, ...]) -> None:
        assert find_stragglers(workers) == ()

    def test_a_worker_that_has_ended_ends_the_comparison(self) -> None:
        node = Node()
        node.run(LONG, r0="rpppp", r1="ddddr")
        node.ranks = (0,)
        reports = node.reports
        node.run(1.0, r0="p")
        assert (node.shares.current, node.reports) == ((), reports + 1)
        node.run(LONG, r0="p")
        assert [one.rank for one in node.shares.current] == [0]


class TestTheLimits:
    @pytest.mark.parametrize(
        ("gap", "known", "found"),
        [
            (FOUND_GAP + 0.01, (), True),
            (FOUND_GAP - 0.01, (), False),
            (FOUND_GAP - 0.01, (1,), True),
            (GONE_GAP + 0.01, (1,), True),
            (GONE_GAP - 0.01, (1,), False),
            (FOUND_GAP - 0.01, (0,), False),
        ],
    )
    def test_a_straggler_stays_one_until_it_is_clearly_none(
        self, gap: float, known: tuple[int, ...], found: bool
    ) -> None:
        workers = [Shares(0, peers=0.6), Shares(1, peers=0.6 - gap, computing=0.5)]
        assert bool(find_stragglers(workers, known)) is found

    @pytest.mark.parametrize(
        ("sending", "others", "waits", "known", "found"),
        [
            (0.9, 0.0, 0.8, (), True),
            (0.9, 0.4, 0.8, (), False),
            (0.9, 0.0, 0.1, (), False),
            (0.4, 0.0, 0.8, (), False),
            (0.4, 0.0, 0.8, (2,), True),
            (0.2, 0.0, 0.8, (2,), False),
        ],
    )
    def test_a_worker_whose_link_is_slow(
        self, sending: float, others: float, waits: float, known: tuple[int, ...], found: bool
    ) -> None:
        workers = [Shares(rank, peers=waits, sending=sending if rank == 2 else others) for rank in range(3)]
        expected = ((2, "network"),) if found else ()
        assert tuple((one.rank, one.cause) for one in find_stragglers(workers, known)) == expected

    def test_bytes_on_their_way_count_and_what_is_only_announced_does_not(self) -> None:
        for unsent, share in ((SENDING_BYTES, 1.0), (96, 0.0)):
            shares = NodeShares()
            for now in range(int(LONG)):
                shares.add([WorkerSample(rank, PEERS, exchanged=now, unsent=unsent) for rank in (0, 1)], float(now))
            assert [one.sending for one in shares.current] == [share, share]

    def test_at_most_some_are_named_those_that_wait_least(self) -> None:
        workers = [Shares(rank, peers=0.9 if rank >= 20 else rank / 100) for rank in range(100)]
        assert [one.rank for one in find_stragglers(workers)] == list(range(MAX_STRAGGLERS))

    def test_shares_that_only_vary_are_not_reported_again(self) -> None:
        node = Node()
        node.run(LONG, r0="rrpp", r1="rrpp")
        reports = node.reports
        node.run(3 * LONG, r0="rrppr", r1="rrppp")
        assert node.reports <= reports + 1

    @pytest.mark.parametrize("cause", CAUSES)
    def test_each_cause_has_a_text(self, cause: Any) -> None:
        text = Straggler(3, cause, 0.62, 0.02, 0.6).text
        assert text.startswith("rank 3 is a straggler: ")
        assert "62 %" in text
        assert StragglerCode[cause.upper()].within(Straggler(3, cause, 0.62, 0.02, 0.6).reasons)


# Three nodes with two workers each.
RULES = JobRules(3, 3, parts=(StragglerRules(watched=1),))
KEY = RoundKey(5, 2)
PLAN = Plan(
    epoch=5,
    phase=PlanPhase.TRAINING,
    key=KEY,
    members=tuple(Member(f"n{place}", "i", f"node-{place}", 2) for place in range(3)),
)
SLOW = Shares(5, data=0.9)


def part(place: int, *shares: Shares) -> StragglerNodeReport:
    """A node whose workers wait for the others, apart from these."""
    others = {rank: Shares(rank, peers=0.7) for rank in (2 * place, 2 * place + 1)}
    return StragglerNodeReport(tuple((others | {one.rank: one for one in shares}).values()))


def report(place: int, of: StragglerNodeReport | None, **changes: Any) -> NodeReport:
    return running_report(PLAN, PLAN.members[place], of, **changes)


def nodes_with(*parts: StragglerNodeReport | None) -> dict[NodeKey, KnownNode]:
    reports = [report(place, of) for place, of in enumerate(parts)]
    return {one.key: KnownNode(one, 0.0, 0.0) for one in reports}


ALL = (part(0), part(1), part(2, SLOW))


class TestSeveralNodes:
    def test_the_straggler_is_found_among_the_workers_of_all_nodes(self) -> None:
        found = find(PLAN, nodes_with(*ALL))
        assert found is not None
        assert [(one.rank, one.cause, one.own, one.others) for one in found] == [(5, "data", 0.0, 0.7)]

    def test_there_is_none_until_every_node_has_reported(self) -> None:
        assert find(PLAN, nodes_with(part(0), None, part(2, SLOW))) == ()

    def test_there_is_none_when_a_worker_has_ended(self) -> None:
        assert find(PLAN, nodes_with(part(0), part(1), StragglerNodeReport((SLOW,)))) == ()

    def test_what_was_found_holds_while_a_node_is_away(self) -> None:
        job = job_of(RULES)
        plan = decide(job, PLAN, nodes_with(*ALL), 1.0).plan
        away = nodes_with(*ALL)
        key = PLAN.members[0].key
        away[key] = replace(away[key], disconnected_at=2.0, lost_at=99.0)
        assert find(plan, away) is None
        assert StragglerState.get(decide(job, plan, away, 2.0).plan.parts).stragglers
        del away[key]
        assert find(plan, away) is None

    def test_only_a_report_about_this_round_counts(self) -> None:
        old = nodes_with(*ALL)
        key = PLAN.members[2].key
        ranks = replace(rank_assignments(PLAN)[key], key=RoundKey(5, 1))
        old[key] = replace(old[key], report=report(2, part(2, SLOW), ranks=ranks))
        assert find(PLAN, old) == ()

    def test_it_changes_the_plan_once_and_nothing_but_its_part(self) -> None:
        job = job_of(RULES)
        assert isinstance(job.observers["stragglers"], StragglerObserver)
        before = decide(job, PLAN, nodes_with(part(0), part(1), part(2)), 1.0).plan
        found = decide(job, before, nodes_with(*ALL), 2.0)
        assert len(found.log_lines) == 1
        assert "rank 5" in found.log_lines[0]
        assert replace(found.plan, parts=before.parts, clock=before.clock) == before
        # Other figures of the same rank are no news.
        varied = nodes_with(part(0), part(1), part(2, Shares(5, computing=0.7, data=0.2)))
        assert decide(job, found.plan, varied, 3.0).plan == found.plan
        gone = decide(job, found.plan, nodes_with(part(0), part(1), part(2)), 4.0).plan
        assert StragglerState.get(gone.parts) == StragglerState()

    def test_only_the_node_of_the_straggler_is_told(self) -> None:
        job = job_of(RULES)
        plan = decide(job, PLAN, nodes_with(*ALL), 1.0).plan
        told = job.observers["stragglers"].orders(plan, rank_assignments(plan))
        assert list(told) == [PLAN.members[2].key]
        assert told[PLAN.members[2].key].slow_ranks == ((5, "data"),)

    def test_its_state_ends_with_the_round(self) -> None:
        job = job_of(RULES)
        plan = decide(job, PLAN, nodes_with(*ALL), 1.0).plan
        observer = job.observers["stragglers"]
        ended = replace(plan, phase=PlanPhase.GATHERING)
        assert observer.observe(ended, nodes_with(*ALL), 2.0).part == StragglerState()
        assert observer.observe(replace(PLAN, phase=PlanPhase.GATHERING), nodes_with(*ALL), 2.0) == Observation()

    def test_a_node_cannot_report_ranks_that_are_not_its_own(self) -> None:
        assert validate_report(report(2, part(2)), PLAN) is None
        for shares in ((Shares(1),), (Shares(5), Shares(5))):
            assert validate_report(report(2, StragglerNodeReport(shares)), PLAN) is not None

    def test_a_report_is_bounded(self) -> None:
        most = tuple(Shares(2**53 - rank, *[0.12] * 7) for rank in range(MAX_REPORTED))
        sent = report(0, StragglerNodeReport(most))
        message = encode(Report(sent))
        assert len(message) < MAX_NODE_MESSAGE / 4
        assert decode_from_node(message) == Report(sent)
        with pytest.raises(InvalidMessage):
            decode_from_node(encode(Report(report(0, StragglerNodeReport((*most, Shares(1)))))))

    def test_the_status_and_the_metrics_name_it(self) -> None:
        job = job_of(RULES)
        plan = decide(job, PLAN, nodes_with(*ALL), 1.0).plan
        views = node_views(job, plan)
        status = job_status(JobView("j", RULES, plan, nodes_with(*ALL), views, None, 2.0))
        assert [node.stragglers for node in status.nodes] == [(), (), (StragglerStatus(5, "data"),)]
        assert [bool(node.reason) for node in status.nodes] == [False, False, True]
        assert "rank 5 is a straggler" in status.nodes[2].reason
        text = render_metrics([JobFigures(status, {})], 0.0)
        counted = {
            line.split('cause="')[1].split('"')[0]: line.split()[-1]
            for line in text.splitlines()
            if line.startswith("dlrover_stragglers{")
        }
        assert counted == {cause: "1" if cause == "data" else "0" for cause in CAUSES}


class Kept(Events):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def watched(threads: Callable[[int, bool], MainThread | None]) -> tuple[RoundStragglers, Kept, list[int]]:
    """What node 2 sees of its workers 4 and 5, whose pids are 104 and 105."""
    kept = Kept()
    woken: list[int] = []
    running = [SimpleNamespace(spec=SimpleNamespace(rank=rank), pid=100 + rank) for rank in (4, 5)]
    workers: Any = SimpleNamespace(
        key=KEY,
        ranks=rank_assignments(PLAN)[PLAN.members[2].key],
        group=SimpleNamespace(running=running),
    )
    return RoundStragglers(workers, kept, lambda: woken.append(1), dict, threads), kept, woken


def evidence() -> Iterator[list[Evidence]]:
    for number in itertools.count():
        yield [Evidence(rank, number * TRAINING_INTERVAL, Traffic(number, number)) for rank in (4, 5)]


class TestTheAgent:
    def test_the_shares_are_reported_when_they_are_known(self) -> None:
        stragglers, _, woken = watched(lambda pid, _: MainThread(DATA if pid == 105 else PEERS))
        for samples in itertools.islice(evidence(), int(LONG)):
            stragglers.observe(samples)
            if not woken:
                assert StragglerNodeReport.find(stragglers.add_to_report(report(2, None)).parts) is None
        assert len(woken) == 1
        found = StragglerNodeReport.get(stragglers.add_to_report(report(2, None)).parts)
        assert found == StragglerNodeReport((Shares(4, peers=1.0), Shares(5, data=1.0)))
        assert validate_report(stragglers.add_to_report(report(2, None)), PLAN) is None

    def test_a_worker_that_ends_between_two_samples_is_left_out(self) -> None:
        stragglers, _, _ = watched(lambda pid, _: None)
        for samples in itertools.islice(evidence(), int(LONG)):
            stragglers.observe(samples)
        assert stragglers.add_to_report(report(2, None)).parts == ()

    def test_what_is_found_is_an_event_once_and_its_end_is_one(self) -> None:
        stragglers, kept, _ = watched(lambda pid, _: None)
        plan = decide(job_of(RULES), PLAN, nodes_with(*ALL), 1.0).plan
        view = node_views(job_of(RULES), plan)[PLAN.members[2].key]
        found = build_assignment(plan, view, None)
        for assignment in (found, found, replace(found, parts=()), replace(found, parts=())):
            stragglers.follow(assignment)
        begun, gone = kept.events
        assert isinstance(begun, StragglerFound)
        assert isinstance(gone, StragglerGone)
        assert (begun.round, begun.rank, begun.local_rank) == (gone.round, gone.rank, gone.local_rank) == (2, 5, 1)
        assert [reason.code for reason in begun.reasons] == ["straggler.data", "straggler.waits"]

    def test_what_is_found_of_another_round_is_no_event(self) -> None:
        stragglers, kept, _ = watched(lambda pid, _: None)
        part = StragglerAssignment(RoundKey(5, 9), (Straggler(5, "data", 0.9, 0.0, 0.7),))
        own = rank_assignments(PLAN)[PLAN.members[2].key]
        stragglers.follow(Assignment(ranks=own, key=KEY, parts=(part,)))
        stragglers.follow(Assignment(ranks=replace(own, key=RoundKey(5, 9)), key=RoundKey(5, 9), parts=(part,)))
        stragglers.follow(Assignment())
        assert kept.events == []
        # The end of its round ends it too, and needs no event of its own.
        stragglers.follow(Assignment(ranks=own, key=KEY, parts=(replace(part, key=KEY),)))
        stragglers.follow(Assignment(ranks=replace(own, key=RoundKey(5, 9)), key=RoundKey(5, 9)))
        stragglers.follow(Assignment())
        assert [type(event) for event in kept.events] == [StragglerFound]


def test_what_travels_and_is_kept_is_decoded_as_it_was() -> None:
    sent = report(2, part(2, SLOW))
    assert msgspec.json.decode(msgspec.json.encode(sent), type=NodeReport, dec_hook=decode_part) == sent
    plan = decide(job_of(RULES), PLAN, nodes_with(*ALL), 1.0).plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan, dec_hook=decode_part) == plan
