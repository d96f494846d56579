"""The agent's watch over one round: when it asks for stacks, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.policy_parts import running_report
from support.virtual_loop import run_virtually

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import Member, RoundKey
from dlrover_run.events.records import Event, WatchFailed, WatchRestored
from dlrover_run.features.hangs.node.diagnosis import CoordinatedDiagnosis, LocalDiagnosis
from dlrover_run.features.hangs.node.stall_report import StallReport
from dlrover_run.features.hangs.node.stall_watch import BURST, QUIET_INTERVAL, TRAINING_INTERVAL, Sources, StallWatch
from dlrover_run.features.hangs.node.watch_health import WatchHealth
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import PAUSES_TO_LEARN, UNLEARNED_LIMIT, Detector, Resumed
from dlrover_run.features.hangs.search.outside import OUTSIDE_LIMIT, LearnedPauses
from dlrover_run.features.hangs.search.round_detectors import RoundDetectors
from dlrover_run.features.hangs.search.spin import PROBES
from dlrover_run.features.hangs.settings import StallAction
from dlrover_run.features.hangs.stalls.model import StallAssignment, StallFinding, StallNodeReport
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.observe.tick import Tick
from dlrover_run.stacks.stack import Frame, Stack, Thread
from dlrover_run.stacks.wait import Wait


def stack(*frames: Frame) -> Stack:
    return Stack((Thread("0x1", frames),))


WAITS = stack(Frame("/x/site-packages/torch/distributed/c10d.py", 3, "all_reduce"), Frame("/u/train.py", 19, "step"))
SPINS = stack(Frame("/u/train.py", 10, "next_batch"))


class Workers:
    """Two workers that train until `hung`; then rank 1 spins."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bytes = 0
        self.cpu = 0.0
        self.hung = False
        self.closed = False
        self.idle = False
        self.ranks = [0, 1]
        self.stacks = {0: WAITS, 1: SPINS}
        self.requests: list[int] = []

    def sample(self, full: bool) -> list[Evidence]:
        self.now += 0.5
        self.bytes += 0 if self.hung else 1000
        self.cpu += 0.0 if self.idle else 0.5
        return [self._evidence(rank, full) for rank in self.ranks]

    def _evidence(self, rank: int, full: bool) -> Evidence:
        own = ProcessFigures(rank + 9, "python", "S", 1, self.cpu if rank else 0.0, 0, 0, 0)
        return Evidence(rank, self.now, Traffic(self.bytes, self.bytes), WorkerFigures(own) if full else None)

    def forget(self, rank: int) -> None:
        self.ranks.remove(rank)

    def close(self) -> None:
        self.closed = True

    async def read(
        self,
        ranks: Iterable[int],
        *,
        main: bool = False,
        times: int = 1,
        enough: Callable[[list[Stack]], bool] | None = None,
    ) -> dict[int, tuple[Stack, ...]]:
        self.requests += ranks
        return {rank: (self.stacks[rank],) * times for rank in ranks}


def watch_of(
    detector: Any,
    workers: Workers,
    on_stall: Callable[[StallReport], None] = lambda _: None,
    on_resume: Callable[[Resumed], None] = lambda _: None,
    steps: Callable[[], Mapping[int, int]] = dict,
    pauses: LearnedPauses | None = None,
    **more: Any,
) -> StallWatch:
    """The watch of a round of one node."""
    pauses = pauses or LearnedPauses()
    diagnosis = LocalDiagnosis(detector, on_stall, on_resume, pauses)
    return StallWatch(detector, Sources(workers, workers, steps), diagnosis, pauses, **more)


KEY = RoundKey(1, 1)
NODE = Member("a", "i", "node-a", 2)
PLAN = Plan(epoch=1, phase=PlanPhase.TRAINING, key=KEY, members=(NODE,))


class OneOfSeveral:
    """The watch of one of several nodes. `quiet` is what it has reported, None when its workers make progress again."""

    def __init__(self, detector: Any, workers: Workers, steps: Callable[[], Mapping[int, int]] = dict) -> None:
        self.quiet: list[StallNodeReport | None] = []
        self.reports: list[StallReport] = []
        self.resumed: list[Resumed] = []
        pauses = LearnedPauses()
        self.diagnosis = CoordinatedDiagnosis(
            KEY, self._wake, lambda since: 0, self.reports.append, self.resumed.append, pauses
        )
        self.watch = StallWatch(detector, Sources(workers, workers, steps), self.diagnosis, pauses)

    def _wake(self) -> None:
        self.quiet.append(StallNodeReport.find(self.diagnosis.add_to_report(running_report(PLAN, NODE)).parts))

    def confirm(self, number: int, rank: int, code: GuiltCode, node: str, alone: bool = False) -> None:
        """The coordinator has found this."""
        finding = StallFinding(KEY, number, (rank,), (node,), (code(),), (rank,), alone)
        assigned = Assignment(epoch=1, phase=PlanPhase.TRAINING, key=KEY, parts=(StallAssignment(finding),))
        self.diagnosis.follow(assigned)


async def hang(watch: StallWatch, workers: Workers, samples: int) -> None:
    """Take 20 samples of workers that train, and then as many of workers that hang."""
    for _ in range(20):
        await watch.step()
    workers.hung = True
    for _ in range(samples):
        await watch.step()


def test_a_stall_is_reported_once_with_rank_and_line_and_then_its_end() -> None:
    workers = Workers()
    reports: list[StallReport] = []
    resumed: list[Resumed] = []
    watch = watch_of(Detector(), workers, reports.append, resumed.append)

    async def scenario() -> None:
        await hang(watch, workers, 30)
        workers.hung = False
        await watch.step()

    run_virtually(scenario())
    assert len(reports) == 1
    assert GuiltCode.SPINNING.within(reports[0].reasons)
    assert reports[0].guilty == reports[0].to_restart == (1,)
    assert "rank 1" in reports[0].line
    assert "/u/train.py:10" in reports[0].line
    assert reports[0].text.startswith("rank 0:")
    assert set(workers.requests[:-2]) == {1}
    assert len(workers.requests) - 2 >= PROBES // BURST, "each read of a worker that stays in its place is of a burst"
    assert workers.requests[-2:] == [0, 1]
    assert len(resumed) == 1


class Counting(Workers):
    """Workers that count steps as well. `looks` says of each sample what was looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[str] = []

    def steps(self) -> dict[int, int]:
        return dict.fromkeys(self.ranks, self.bytes)

    def sample(self, full: bool) -> list[Evidence]:
        self.looks.append("processes" if full else "connections")
        return super().sample(full)

    def repeat(self) -> list[Evidence]:
        self.looks.append("steps")
        before = self.bytes
        return [one._replace(traffic=Traffic(before, before), repeated=True) for one in super().sample(False)]


def test_while_each_worker_counts_steps_their_connections_are_looked_at_less_often() -> None:
    workers, others = Counting(), Workers()
    reports: list[StallReport] = []
    watch = watch_of(RoundDetectors(), workers, reports.append, lambda _: None, steps=workers.steps)
    silent = watch_of(RoundDetectors(), others, reports.append)

    async def scenario() -> None:
        await hang(watch, workers, 0)
        assert workers.looks[-8:] == ["connections", "steps", "steps", "steps"] * 2
        await hang(watch, workers, 30)
        await hang(silent, others, 30)

    run_virtually(scenario())
    # As soon as one counts none, all that is known of a worker.
    assert workers.looks[-30] == "processes"
    assert [report.guilty for report in reports] == [(1,), (1,)]
    counting, without = reports
    assert counting.seconds <= without.seconds


def test_sampling_ends_with_the_watch() -> None:
    workers = Workers()
    watch = watch_of(Detector(), workers, lambda _: None)

    asyncio.run(run_for(0, watch))
    assert workers.closed


IDLES = stack(Frame("/u/serve.py", 7, "next_request"))
DEBUGS = stack(Frame("/usr/lib/python3.11/pdb.py", 9, "interaction"), Frame("/u/train.py", 10, "next_batch"))


@pytest.mark.parametrize(
    ("stacks", "steps", "reported"),
    [
        ({0: IDLES, 1: IDLES}, {}, False),
        ({0: WAITS, 1: DEBUGS}, {}, False),
        ({0: IDLES, 1: IDLES}, {0: 20, 1: 20}, True),
        ({0: WAITS, 1: WAITS}, {}, True),
    ],
)
def test_workers_that_are_idle_on_purpose_are_not_reported(
    stacks: dict[int, Stack], steps: dict[int, int], reported: bool
) -> None:
    workers = Workers()
    workers.idle = True
    workers.stacks = stacks
    reports: list[StallReport] = []
    watch = watch_of(Detector(), workers, reports.append, lambda _: None, steps=lambda: steps)

    asyncio.run(hang(watch, workers, 30))
    assert bool(reports) == reported


def test_a_rank_that_left_the_loop_is_named_while_another_one_waits_for_it() -> None:
    workers = Workers()
    workers.idle = True
    reports: list[StallReport] = []
    watch = watch_of(Detector(), workers, reports.append)

    async def scenario() -> None:
        for _ in range(20):
            await watch.step()
        workers.hung = True
        watch.note_end(1)
        for _ in range(30):
            await watch.step()

    asyncio.run(scenario())
    assert len(reports) == 1
    assert GuiltCode.ENDED.within(reports[0].reasons)
    assert (reports[0].guilty, reports[0].to_restart) == ((1,), (0,))


def test_one_of_several_nodes_reports_its_stall_and_waits_for_the_finding() -> None:
    workers = Workers()
    node = OneOfSeveral(Detector(elsewhere=True), workers)

    async def steps(count: int) -> None:
        for _ in range(count):
            await node.watch.step()

    async def scenario() -> None:
        await steps(20)
        node.confirm(1, 7, GuiltCode.LOCKED, "node-b")
        assert node.reports == [], "its workers make progress"
        workers.hung = True
        await steps(30)
        assert node.reports == []
        node.confirm(1, 7, GuiltCode.LOCKED, "node-b")
        workers.hung = False
        await steps(1)
        node.confirm(2, 7, GuiltCode.LOCKED, "node-b")

    asyncio.run(scenario())
    first, last = node.quiet
    assert first is not None
    assert last is None
    assert first.number == 1
    assert [one.rank for one in first.suspects] == [0, 1]
    assert len(node.reports) == len(node.resumed) == 1
    assert "rank 7 on node-b" in node.reports[0].line
    assert set(node.reports[0].stacks) == {0, 1}, "those of this node"


class Independent(Workers):
    """Three workers that count steps and exchange nothing; rank 1 sleeps from `hung` on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = True
        self.ranks = [0, 1, 2]
        self.stacks = {0: IDLES, 1: SPINS, 2: IDLES}
        self.steps = dict.fromkeys(self.ranks, 0)

    def sample(self, full: bool) -> list[Evidence]:
        found = super().sample(full)
        for rank in self.ranks:
            self.steps[rank] += not (self.hung and rank == 1)
        return [one._replace(traffic=Traffic()) for one in found]

    def repeat(self) -> list[Evidence]:
        return [one._replace(repeated=True) for one in self.sample(False)]


def test_a_worker_that_hangs_while_the_others_train_is_named_with_its_own_stacks() -> None:
    workers = Independent()
    reports: list[StallReport] = []
    resumed: list[Resumed] = []
    watch = watch_of(RoundDetectors(), workers, reports.append, resumed.append, steps=lambda: dict(workers.steps))

    async def scenario() -> None:
        await hang(watch, workers, 200)
        workers.hung = False
        await watch.step()
        await watch.step()

    run_virtually(scenario())
    (report,) = reports
    assert report.guilty == report.to_restart == report.stalled.ranks == (1,)
    assert GuiltCode.IDLE.within(report.reasons)
    assert GuiltCode.OTHERS_GO_ON.within(report.reasons)
    assert report.is_alone
    assert report.line.endswith("rank 1 makes no progress while the others go on, at /u/train.py:10 in next_batch")
    assert workers.requests == [1]
    assert report.text.startswith("rank 1:")
    assert [(one.ranks, one.alone) for one in resumed] == [((1,), True)]


@pytest.mark.parametrize(("stack", "requests"), [(WAITS, 2), (DEBUGS, 2)])
def test_a_worker_that_may_wait_for_one_that_works_is_not_reported(stack: Stack, requests: int) -> None:
    """It is asked for its stack again after twice the time."""
    workers = Independent()
    workers.stacks[1] = stack
    reports: list[StallReport] = []
    watch = watch_of(RoundDetectors(), workers, reports.append, lambda _: None, steps=lambda: dict(workers.steps))

    run_virtually(hang(watch, workers, 100))
    assert reports == []
    assert workers.requests == [1] * requests


def test_one_of_several_nodes_reports_the_workers_that_hang_alone_and_waits_for_the_finding() -> None:
    workers = Independent()
    node = OneOfSeveral(RoundDetectors(elsewhere=True), workers, lambda: dict(workers.steps))

    async def scenario() -> None:
        await hang(node.watch, workers, 100)
        node.confirm(1, 1, GuiltCode.IDLE, "node-a")
        assert node.reports == [], "the round is not stalled"
        node.confirm(1, 1, GuiltCode.IDLE, "node-a", alone=True)
        workers.hung = False
        await node.watch.step()
        await node.watch.step()

    run_virtually(scenario())
    first, last = node.quiet
    assert first is not None
    assert last is None
    assert (first.number, first.partly) == (1, True)
    assert [(one.rank, one.alone, one.counts) for one in first.suspects] == [(1, True, True)]
    (report,) = node.reports
    assert report.stalled.ranks == (1,)
    assert "rank 1 on node-a" in report.line


def test_a_node_of_which_all_workers_are_quiet_says_later_which_are_so_for_longer_than_their_own_limits() -> None:
    workers = Workers()
    workers.idle = True
    node = OneOfSeveral(RoundDetectors(elsewhere=True), workers)

    run_virtually(hang(node.watch, workers, 100))
    assert [
        (one.number, one.partly, [each.alone for each in one.suspects]) for one in node.quiet if one is not None
    ] == [
        (1, False, [False, False]),
        (1, False, [True, True]),
    ], "the same stall"


def test_samples_are_taken_often_until_the_rhythm_is_known() -> None:
    workers = Workers()
    waits: list[float] = []
    detector = Detector()
    watch = watch_of(detector, workers, lambda _: None, lambda _: None, vary=lambda seconds: seconds)

    async def scenario() -> None:
        waits.extend([await watch.take() for _ in range(PAUSES_TO_LEARN + 10)])

    asyncio.run(scenario())
    assert set(waits[:PAUSES_TO_LEARN]) == {QUIET_INTERVAL}
    assert waits[-1] == TRAINING_INTERVAL


class Refused(Workers):
    """The kernel does not show connections for some time, after the workers have trained for a minute."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def sample(self, full: bool) -> list[Evidence]:
        now = asyncio.get_running_loop().time()
        self.now = now - 0.5
        if 60 <= now < 60 + self.seconds:
            raise OSError(7, "more than 20000 connections")
        self.hung = now >= 100
        return super().sample(full)


class Told:
    """What a watch tells."""

    def __init__(self, action: StallAction = "restart") -> None:
        self.lines: list[str] = []
        self.kept: list[Event] = []
        self.woken = 0
        self.reports: list[StallReport] = []
        console: Any = SimpleNamespace(info=self.lines.append)
        events: Any = SimpleNamespace(emit=self.kept.append)
        self.health = WatchHealth(action, console, events, self.wake, lambda: asyncio.get_running_loop().time())

    def wake(self) -> None:
        self.woken += 1


async def run_for(seconds: float, watch: StallWatch) -> None:
    """Give the watch samples for so long."""
    errors: list[Exception] = []
    tick = Tick(dict, lambda name, error: errors.append(error))
    tick.add("hangs", lambda sample: watch.take())
    tick.follow(1, running=True)
    await asyncio.sleep(seconds)
    tick.close()
    watch.close()
    assert not errors


def test_an_error_of_the_kernel_does_not_end_the_watch_and_is_said_once() -> None:
    workers, told = Refused(25), Told()
    watch = watch_of(Detector(), workers, told.reports.append, health=told.health)

    async def scenario() -> None:
        await run_for(75, watch)
        assert told.health.problem == "more than 20000 connections"
        await run_for(200, watch)

    run_virtually(scenario())
    assert [report.guilty for report in told.reports] == [(1,)], "the hang after it is found"
    first, second = told.lines
    assert "--stall-action=restart has no effect: more than 20000 connections" in first
    assert second.startswith("hangs are found again, after ")
    assert [type(event) for event in told.kept] == [WatchFailed, WatchRestored]
    assert (told.health.problem, told.woken) == ("", 2)


def test_a_defect_in_what_takes_samples_too_does_not_end_the_watch() -> None:
    workers, told = Refused(0), Told("report")

    def broken(samples: Sequence[Evidence]) -> None:
        raise ValueError("no such rank")

    watch = watch_of(Detector(), workers, told.reports.append, lambda _: None, on_sample=broken, health=told.health)
    run_virtually(run_for(2000, watch))
    assert [report.guilty for report in told.reports] == [(1,)]
    (line,) = told.lines
    assert line.startswith("warning: stragglers are not found in this round: internal error: ValueError(")
    assert told.health.problem == ""


BROADCASTS = (
    Frame("/x/site-packages/torch/distributed/c10d.py", 3, "broadcast"),
    Frame("/u/train.py", 44, "end_epoch"),
)
OUTSIDE = {
    "http": ("wait_woken", stack(Frame("/usr/lib/python3.11/socket.py", 5, "readinto"), Frame("/u/train.py", 9, "f"))),
    "child": ("do_wait", stack(Frame("/usr/lib/python3.11/subprocess.py", 5, "wait"), Frame("/u/train.py", 9, "run"))),
    "sleep": ("hrtimer_nanosleep", stack(Frame("/u/train.py", 9, "back_off"))),
}


class WaitsOutside(Workers):
    """Two workers; from 30 s on rank 1 waits outside for so many seconds, and rank 0 for rank 1."""

    def __init__(self, kind: str, seconds: float, again: float = float("inf")) -> None:
        super().__init__()
        self.wchan, self.stacks[1] = OUTSIDE[kind]
        self.seconds = seconds
        self.again = again

    def sample(self, full: bool) -> list[Evidence]:
        now = asyncio.get_running_loop().time()
        self.hung = self.idle = now >= 30 and (now - 30) % self.again < self.seconds
        found = super().sample(full)
        child = ProcessFigures(50, "sleep", "S", 10, 0.0, 0, 0, 0)
        return [self._outside(one._replace(at=now), child) for one in found]

    def _outside(self, one: Evidence, child: ProcessFigures) -> Evidence:
        if one.figures is None or one.rank == 0 or not self.hung:
            return one
        children = (child,) if self.wchan == "do_wait" else ()
        return one._replace(figures=one.figures._replace(wchan=self.wchan, children=children))


@pytest.mark.parametrize("seconds", [8, 10, 12, 15, 18, 20, 25, 30, 35, 40, 45, 50, 55, 60])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_worker_that_waits_for_an_answer_from_outside_is_not_named(kind: str, seconds: float) -> None:
    workers, told = WaitsOutside(kind, seconds), Told()
    run_virtually(run_for(130, watch_of(RoundDetectors(), workers, told.reports.append)))
    assert told.reports == []


@pytest.mark.parametrize("seconds", [8, 10, 12, 15, 18, 20, 25, 30, 35, 40, 45, 50, 55, 60])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_node_of_several_reports_that_such_a_worker_waits_outside(kind: str, seconds: float) -> None:
    workers = WaitsOutside(kind, seconds)
    node = OneOfSeveral(RoundDetectors(elsewhere=True), workers)
    run_virtually(run_for(130, node.watch))
    assert node.reports == []
    for one in node.quiet:
        assert one is None or [suspect.outside for suspect in one.suspects] == [False, True]


@pytest.mark.parametrize("kind", OUTSIDE)
def test_it_is_named_when_no_answer_comes(kind: str) -> None:
    workers, told = WaitsOutside(kind, 10_000), Told()
    watch = watch_of(RoundDetectors(), workers, told.reports.append)
    run_virtually(run_for(130, watch))
    (report,) = told.reports
    assert report.guilty == (1,)
    assert OUTSIDE_LIMIT <= report.seconds < OUTSIDE_LIMIT + 3


class WaitsAndRuns(WaitsOutside):
    """Rank 1 waits for a processor for `queued` seconds in half a second of each two, and computes until `computes`."""

    def __init__(self, computes: float = 0.0, queued: float = 0.0) -> None:
        super().__init__("sleep", 10_000)
        self.computes, self.queued = computes, queued

    def _outside(self, one: Evidence, child: ProcessFigures) -> Evidence:
        one = super()._outside(one, child)
        if one.figures is None or one.rank == 0 or not self.hung:
            return one
        own = one.figures.own._replace(cpu=100 + min(one.at, self.computes), queued=self.queued * (one.at // 2))
        return one._replace(figures=one.figures._replace(own=own))


def test_a_worker_that_tries_again_and_again_is_named_on_a_loaded_machine_too() -> None:
    workers, told = WaitsAndRuns(queued=0.2), Told()
    watch = watch_of(RoundDetectors(), workers, told.reports.append)
    run_virtually(run_for(130, watch))
    (report,) = told.reports
    assert report.guilty == (1,)
    assert OUTSIDE_LIMIT <= report.seconds < OUTSIDE_LIMIT + 5


@pytest.mark.parametrize("computes", [40, 60, 80, 100])
def test_a_wait_outside_counts_from_when_the_worker_last_computed(computes: float) -> None:
    workers, told = WaitsAndRuns(computes=computes), Told()
    watch = watch_of(RoundDetectors(), workers, told.reports.append)
    run_virtually(run_for(computes + OUTSIDE_LIMIT - 5, watch))
    assert told.reports == []


def test_a_node_of_several_reports_it_again_when_no_answer_comes() -> None:
    node = OneOfSeveral(RoundDetectors(elsewhere=True), WaitsOutside("http", 10_000))
    run_virtually(run_for(130, node.watch))
    found = [(one.number, [suspect.outside for suspect in one.suspects]) for one in node.quiet if one is not None]
    assert found[0] == (1, [False, True])
    assert found[-1][1] == [False, False]
    assert found[-1][0] > 1, "the coordinator takes it as a new one"


def test_the_next_round_knows_how_long_such_waits_are() -> None:
    pauses, told = LearnedPauses(), Told()
    for _ in range(2):
        workers = WaitsOutside("http", 100, again=150)
        detectors = RoundDetectors(earlier=pauses.rhythm)
        watch = watch_of(detectors, workers, told.reports.append, lambda _: None, pauses=pauses)
        run_virtually(run_for(400, watch))
        pauses.rhythm = detectors.pauses
        assert len(told.reports) == 1, "the first of them"
    assert pauses.outside_limit >= 3 * OUTSIDE_LIMIT


def test_a_wait_that_the_end_of_a_round_cuts_off_says_nothing_about_the_next_one() -> None:
    pauses, told = LearnedPauses(), Told()
    waits = watch_of(RoundDetectors(), WaitsOutside("http", 10_000), told.reports.append, pauses=pauses)
    run_virtually(run_for(60, waits))
    assert told.reports == [], "it still waits when its round ends"
    workers = Workers()
    workers.now = 1000.0
    run_virtually(run_for(60, watch_of(RoundDetectors(), workers, told.reports.append, pauses=pauses)))
    assert pauses.outside_limit == OUTSIDE_LIMIT


@pytest.mark.parametrize("change", ["futex", "lost child", "lost data", "collective", "timeout"])
def test_what_hangs_in_the_job_itself_is_named_in_seconds(change: str) -> None:
    workers, told = WaitsOutside("http", 10_000), Told()
    child = ProcessFigures(50, "python", "Z", 10, 0.0, 0, 0, 0)
    plain = workers._outside

    def changed(one: Evidence, _: ProcessFigures) -> Evidence:
        one = plain(one, child)
        if one.figures is None or one.rank == 0 or not workers.hung:
            return one
        if change == "futex":
            workers.stacks[1] = stack(Frame("/u/train.py", 10, "next_batch"))
            return one._replace(figures=one.figures._replace(wchan="futex_do_wait"))
        if change == "lost child":
            return one._replace(figures=one.figures._replace(children=(child,)))
        return one._replace(traffic=one.traffic._replace(unsent_peers=1)) if change == "lost data" else one

    workers._outside = changed  # type: ignore[method-assign]
    if change == "collective":
        workers.stacks[1] = stack(*BROADCASTS)
    detectors = RoundDetectors(5.0 if change == "timeout" else None)
    watch = watch_of(detectors, workers, told.reports.append)
    run_virtually(run_for(60, watch))
    assert [report.seconds < 10 for report in told.reports] == [True]


class Young(Workers):
    """Two workers that have trained for `samples` samples when rank 1 hangs in this way."""

    def __init__(self, how: str, samples: int) -> None:
        super().__init__()
        self.how, self.left, self.idle = how, samples, True

    def waits(self) -> dict[int, Wait]:
        return {1: Wait(sleeps={"sleeps": 1e6, "backs off": 30.0}.get(self.how))}

    def sample(self, full: bool) -> list[Evidence]:
        self.hung = self.left <= 0
        self.left -= 1
        return super().sample(full)

    def _evidence(self, rank: int, full: bool) -> Evidence:
        one = super()._evidence(rank, full)
        one = one._replace(traffic=one.traffic._replace(at_store=True))
        if rank == 0 or one.figures is None or not self.hung:
            return one
        own, wchan = one.figures.own, "hrtimer_nanosleep" if self.how in ("sleeps", "backs off") else "futex_do_wait"
        return one._replace(figures=WorkerFigures(own._replace(state="T" if self.how == "stopped" else "S"), (), wchan))


@pytest.mark.parametrize("samples", range(2, PAUSES_TO_LEARN + 2))
@pytest.mark.parametrize(("how", "after"), [("stopped", 10), ("sleeps", 10), ("waits", 65), ("backs off", 80)])
def test_before_the_pauses_are_known_only_what_never_ends_is_named_in_seconds(
    how: str, after: float, samples: int
) -> None:
    workers, reports = Young(how, samples), list[StallReport]()
    detectors, pauses = RoundDetectors(), LearnedPauses()
    sources = Sources(workers, workers, waits=workers.waits)
    diagnosis = LocalDiagnosis(detectors, reports.append, lambda _: None, pauses)
    watch = StallWatch(detectors, sources, diagnosis, pauses)

    async def scenario() -> None:
        for _ in range(samples + int(after / 0.5)):
            await watch.step()

    run_virtually(scenario())
    (report,) = reports
    assert report.guilty == (1,)
    assert (report.seconds < UNLEARNED_LIMIT) == (after < UNLEARNED_LIMIT)
