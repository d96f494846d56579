"""What of the data, the input and the output between two samples is progress, by what the main thread did meanwhile."""

from __future__ import annotations

import pytest

from dlrover_run.features.hangs.search.changes import HELPER_BYTES, Change, Changes
from dlrover_run.features.hangs.search.detector import (
    EARLY_LIMIT,
    PAUSE_FACTOR,
    SILENT_AFTER,
    SILENT_LIMIT,
    UNLEARNED_LIMIT,
    AskStacks,
    Detector,
    Stalled,
)
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic

STILL, SPINS, RUNS, UNCOUNTED = "still", "spins", "runs", "uncounted"


def figures(
    main: str, second: float, *, read: int = 0, faults: int = 0, main_faults: int | None = None
) -> WorkerFigures:
    """A worker whose main thread has done this in each second."""
    turns = {STILL: 5, SPINS: 5 + int(10 * second), RUNS: 5 + int(20 * second), UNCOUNTED: 0}[main]
    used = {STILL: 1.0, SPINS: second, RUNS: 0.02 * second, UNCOUNTED: 0.0}[main]
    own = ProcessFigures(9, "python", "R" if main == SPINS else "S", 1, used, faults, read, 0, 0.0, used, turns)
    return WorkerFigures(own, main_faults=main_faults)


def change(main: str, before: Traffic, after: Traffic, *, read: int = 0) -> Change:
    """What a worker did in a second between two samples with its figures; another worker does nothing."""
    changes = Changes()
    other = [Evidence(1, at, Traffic(carried=0, counted=0), figures(STILL, at)) for at in (10.0, 11.0)]
    changes.take([Evidence(0, 10.0, before, figures(main, 10.0)), other[0]], {})
    return changes.take([Evidence(0, 11.0, after, figures(main, 11.0, read=read)), other[1]], {})[0]


COPY_FAULTS, COPY_PERIOD = 256, 2.5
"""Page faults of a thread that maps a mebibyte anew for its copies, and the seconds between two of them."""

NOTHING = Traffic(100, 100, carried=50, counted=60)
LARGE = Traffic(900, 900, carried=850, counted=860)
SMALL = Traffic(110, 110, carried=50, counted=70)
HEARTBEAT = Traffic(110, 110, carried=50, counted=60)


@pytest.mark.parametrize(
    ("main", "counting"),
    [
        (STILL, {"large"}),
        (SPINS, {"large", "small"}),
        (RUNS, {"large", "small", "heartbeat", "line"}),
        (UNCOUNTED, {"large", "small", "heartbeat", "line"}),
    ],
)
def test_what_counts_as_progress(main: str, counting: set[str]) -> None:
    exchanged = {"large": LARGE, "small": SMALL, "heartbeat": HEARTBEAT}
    found = {name for name, after in exchanged.items() if change(main, NOTHING, after).progress}
    found |= {name for name, read in {"line": 60}.items() if change(main, NOTHING, NOTHING, read=read).progress}
    assert found == counting
    trained = {name for name, after in exchanged.items() if change(main, NOTHING, after).trained}
    assert trained == counting - {"line"}
    assert [name for name, after in exchanged.items() if change(main, NOTHING, after).beats] == ["heartbeat"]
    assert change(main, NOTHING, NOTHING, read=int(HELPER_BYTES)).progress, "a thread that writes a checkpoint"


@pytest.mark.parametrize(("waits", "counts"), [(0, False), (3, True)])
def test_a_heartbeat_is_no_progress_of_a_main_thread_that_waits_long_for_a_processor(waits: int, counts: bool) -> None:
    """The kernel counts a wait for a processor at its end: until then a thread that spins shows little time."""
    changes = Changes()

    def sample(at: float, traffic: Traffic, used: float, turns: int, switches: int) -> Evidence:
        own = ProcessFigures(9, "python", "R", 1, used, 0, 0, 0, 0.0, used, turns)
        return Evidence(0, at, traffic, WorkerFigures(own, voluntary_switches=switches))

    other = [Evidence(1, at, Traffic(carried=0, counted=0), figures(STILL, at)) for at in (10.0, 11.0)]
    changes.take([sample(10.0, NOTHING, 1.0, 50, 7), other[0]], {})
    found = changes.take([sample(11.0, HEARTBEAT, 1.05, 52, 7 + waits), other[1]], {})
    assert found[0].progress is counts


def test_a_heartbeat_counts_only_with_figures_of_the_process() -> None:
    changes = Changes()
    changes.take([Evidence(rank, 10.0, NOTHING) for rank in (0, 1)], {})
    found = changes.take([Evidence(rank, 11.0, HEARTBEAT) for rank in (0, 1)], {})
    assert not found[0].progress
    again = HEARTBEAT._replace(acked=120)
    found = changes.take([Evidence(rank, 12.0, again, figures(RUNS, 12.0)) for rank in (0, 1)], {})
    assert not found[0].progress, "of one sample nothing is known of the main thread"


@pytest.mark.parametrize("main", [STILL, SPINS])
def test_heartbeats_do_not_hide_a_stall(main: str) -> None:
    detector, now, sent = Detector(), 0.0, 0

    def sample(*, trains: bool) -> object:
        nonlocal now, sent
        now += 0.5
        sent += 100
        carried = int(now * 1e6) if trains else 10**8
        traffic = Traffic(carried + sent, carried + sent, carried=carried, counted=carried)
        workers = [Evidence(rank, now, traffic, figures(main if rank else STILL, now)) for rank in (0, 1)]
        decision = detector.observe(workers)
        detector.note_stacks({1: [("train.py:9:step",)] * 20})
        return decision

    for _ in range(60):
        assert not isinstance(sample(trains=True), Stalled)
    assert any(isinstance(sample(trains=False), Stalled) for _ in range(30))


class Silent:
    """Two workers that train over NVLink: only heartbeats are on their connections. They load a batch each `period`
    seconds, and else wait for their devices at one line. With `copies` a thread of theirs maps new memory."""

    def __init__(self, period: float, *, beats: bool = True, copies: bool = False, looks_early: bool = False) -> None:
        self.detector = Detector(looks_early=looks_early)
        self.lines = 1
        self.copies = copies
        self.period, self.beats = period, beats
        self.now = 0.0
        self.read = 0
        self.due = period

    def run(self, seconds: float, *, trains: bool = True) -> Stalled | None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if trains and self.now >= self.due:
                self.due += self.period
                self.read += 10**6
            sent = int(self.now) * 100 if self.beats else 0
            traffic = Traffic(sent, sent, at_store=True, carried=0, counted=0)
            faults = COPY_FAULTS * int(self.now / COPY_PERIOD) if self.copies else 0
            own = figures(SPINS, self.now, read=self.read, faults=faults, main_faults=0)
            workers = [Evidence(rank, self.now, traffic, own) for rank in (0, 1)]
            decision = self.detector.observe(workers)
            if isinstance(decision, AskStacks):
                stacks = [(f"train.py:{number % self.lines}:step",) for number in range(20)]
                self.detector.note_stacks(dict.fromkeys((0, 1), stacks))
            elif isinstance(decision, Stalled) and decision.early:
                self.detector.postpone(UNLEARNED_LIMIT)
            elif isinstance(decision, Stalled):
                return decision
        return None


@pytest.mark.parametrize(
    ("main", "main_faults", "works"),
    [(SPINS, 0, False), (SPINS, 256, True), (SPINS, None, True), (UNCOUNTED, 0, True), (STILL, 0, True)],
)
def test_new_memory_is_that_of_a_main_thread_that_spins(main: str, main_faults: int | None, works: bool) -> None:
    """Whatever the other threads of a worker copy; one whose main thread waits for such a thread works by it."""
    changes = Changes()
    now = [figures(main, at, faults=0, main_faults=main_faults and 0) for at in (10.0, 11.0)]
    after = now[1]._replace(own=now[1].own._replace(faults=256, cpu=now[0].own.cpu + 1.0), main_faults=main_faults)
    changes.take([Evidence(0, 10.0, NOTHING, now[0])], {})
    assert changes.take([Evidence(0, 11.0, NOTHING, after)], {})[0].progress is works


def test_a_thread_that_copies_does_not_hide_a_stall() -> None:
    silent = Silent(0.5, copies=True)
    assert silent.run(SILENT_AFTER + 10) is None
    assert silent.run(3 * UNLEARNED_LIMIT, trains=False) is not None


def test_a_round_without_data_learns_no_pauses_from_when_it_is_looked_at() -> None:
    """Workers that evaluate are recognized by their stacks, after some seconds; a kernel may take longer."""
    silent = Silent(1.0, looks_early=True)
    silent.lines = 20
    assert silent.run(SILENT_AFTER + 6 * EARLY_LIMIT, trains=False) is None
    silent.lines = 1
    assert silent.run(UNLEARNED_LIMIT - 10, trains=False) is None


@pytest.mark.parametrize("period", [0.5, 2.0, 20.0])
def test_without_data_all_progress_is_the_rhythm(period: float) -> None:
    silent = Silent(period)
    assert silent.run(SILENT_AFTER + 8 * period) is None
    assert silent.detector.has_rhythm
    assert max(SILENT_LIMIT, PAUSE_FACTOR * period) <= silent.detector.limit <= PAUSE_FACTOR * (period + 10)
    began = silent.now
    assert silent.run(200, trains=False) is not None
    assert silent.now - began <= silent.detector.limit + period + 5


def test_without_heartbeats_the_limit_is_that_of_a_round_that_is_not_known() -> None:
    silent = Silent(0.5, beats=False)
    assert silent.run(3 * SILENT_AFTER) is None
    assert not silent.detector.has_rhythm
    assert silent.detector.limit == UNLEARNED_LIMIT


def test_a_wait_that_was_withdrawn_is_part_of_the_silent_rhythm() -> None:
    silent = Silent(0.5)
    assert silent.run(SILENT_AFTER + 10) is None
    assert silent.run(200, trains=False) is not None
    before = silent.detector.limit
    silent.detector.withdraw()
    assert silent.detector.limit > before


class Beating:
    """Two workers with a heartbeat each second, whose main threads do this; one that wakes runs only in that moment."""

    def __init__(self, *mains: str) -> None:
        self.mains = mains
        self.now = 10.0
        self.turns = [5.0, 5.0]
        self.changes = Changes()

    def progress(self) -> list[bool]:
        self.now += 0.5
        beat = self.now % 1 == 0
        samples = []
        for rank, main in enumerate(self.mains):
            runs = main == RUNS or (main == WAKES and beat)
            self.turns[rank] += 10 if runs or main == SPINS else 0
            used = self.now if main == SPINS else 1.0
            own = ProcessFigures(9, "python", "R" if main == SPINS else "S", 1, used, 0, 0, 0, 0.0, used)
            own = own._replace(turns=int(self.turns[rank]))
            sent = 100 * int(self.now)
            samples.append(Evidence(rank, self.now, Traffic(sent, sent, carried=0, counted=60), WorkerFigures(own)))
        return [change.progress for change in self.changes.take(samples, {}).values()]

    def goes_on(self) -> bool:
        found = [any(self.progress()) for _ in range(40)]
        return any(found[20:])


WAKES = "wakes"


@pytest.mark.parametrize(
    ("mains", "goes_on"),
    [
        ((RUNS, SPINS), False),
        ((RUNS, STILL), False),
        ((WAKES, SPINS), True),
        ((WAKES, WAKES), True),
        ((RUNS, RUNS), True),
        ((RUNS, WAKES), True),
        ((SPINS, SPINS), False),
    ],
)
def test_a_worker_that_tries_again_and_again_makes_no_progress_by_heartbeats(
    mains: tuple[str, str], goes_on: bool
) -> None:
    """As one that writes to a full disk each 0.1 s, while another one waits for it. Messages of a job wake workers."""
    assert Beating(*mains).goes_on() is goes_on
