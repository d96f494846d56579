"""Decides whether the workers of one round are stalled. Pure: it takes evidence with its times, and knows no clock.

Progress is any of these, of any worker: bytes on its connections, a step on its progress page, input or output, or a
child that works. The limit follows from the pauses of this round: a job whose steps, evaluations and checkpoints leave
pauses of ten seconds is not stalled after eight. A detector belongs to one round and is forgotten with it.

Processor time alone is no progress, because a worker that spins looks the same as one that evaluates, and a worker that
waits for an accelerator spins too. So the stack of a busy worker is read, again and again: one that works shows
other frames, or new memory; one whose stack stays within a few lines is stalled.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrover_run.features.hangs.search.changes import Change, Changes
from dlrover_run.features.hangs.search.spin import moves, stays
from dlrover_run.observe.records import Evidence

MIN_LIMIT = 3.0
"""Seconds without progress that are never a stall."""

UNLEARNED_LIMIT = 60.0
"""Seconds without progress that are a stall before PAUSES_TO_LEARN pauses are known: a first step compiles. It counts
only for workers that have reached the store: others need not train at all."""

EARLY_LIMIT = 6.0
"""Seconds without progress after which workers that have trained are looked at before their pauses are known. So early
a stall is only what no first step does (`guilt.is_certain_early`)."""

STARTUP_LIMIT = 120.0
"""Seconds after the first worker has reached the store, after which one that has not is stalled."""

PAUSE_FACTOR = 3.0
"""The limit is this many times the longest pause of the last KEPT_PAUSES."""

SILENT_AFTER = 30.0
"""Seconds without data of training after which a round with keep-alives trains where no connection shows it, as over
NVLink: then all progress is its rhythm."""

SILENT_LIMIT = 10.0
"""Seconds without progress that are never a stall of such a round, unless it has a rhythm of data or steps too: what
else a worker does shows less of its steps."""

KEPT_PAUSES = 64

PAUSES_TO_LEARN = 5

FREEZE = 3.0
"""Seconds between two samples after which the whole machine was frozen: that time is no pause of the workers."""

MEASURED = 2
"""Samples in a row that must show no progress of any process: an agent that has no processor takes few of them."""

PROBING = 3.0
"""Seconds for which it is asked at least: a single operation may take that long."""


class StallCode(enum.Enum):
    """Why workers are stalled."""

    START = "start"
    """A worker has not reached the store long after the first one."""
    TRAINING = "training"
    """No worker makes progress."""
    BUSY = "busy"
    """A worker uses its processor, in one place, and no worker makes progress."""
    ALONE = "alone"
    """Workers make no progress while others train (`round_detectors`)."""


@dataclass(frozen=True)
class Stalled:
    """The workers have made no progress since `since`, for longer than `limit` seconds. With START, `ranks` are the
    workers that have not reached the store, with ALONE those that make no progress; otherwise all. With `early` they
    have made none for EARLY_LIMIT, and how long their pauses are is not known."""

    code: StallCode
    ranks: tuple[int, ...]
    since: float
    limit: float
    early: bool = False


@dataclass(frozen=True)
class AskStacks:
    """The stall is certain only with the stacks of these workers, which are busy; `note_stacks` takes them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Resumed:
    """The workers `ranks` make progress again, after a stall of this many seconds was reported. With `alone` the others
    were not stalled."""

    seconds: float
    ranks: tuple[int, ...]
    alone: bool = False


Decision = Stalled | AskStacks | Resumed | None


@dataclass
class Detector:
    """The detector of one round. `timeout` is the limit that the user has set (`--stall-timeout`), None to learn it.
    `elsewhere`: the round has workers on other nodes too, for which those of this node may wait. `trains`: the workers
    are known to train when the detector begins, and have no store to reach. A limit that is learned is at least
    `min_limit`, and as long as the pauses of an `earlier` round ask for, until those of this one are as many. With
    `looks_early` a stall is decided after EARLY_LIMIT too."""

    timeout: float | None = None
    elsewhere: bool = False
    trains: bool = False
    min_limit: float = MIN_LIMIT
    earlier: tuple[float, ...] = ()
    looks_early: bool = False
    _own_pauses: int = 0
    _pauses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PAUSES))
    _silent_pauses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PAUSES))
    _beats: bool = False
    _trained_at: float = 0.0
    _changes: Changes = field(default_factory=Changes)
    _began: float | None = None
    _sampled: float | None = None
    _looked: float | None = None
    _repeated_since: float | None = None
    _exchanged_at: float | None = None
    _progress_at: float | None = None
    _progressed: bool = False
    _busy_at: float = 0.0
    _computed_at: float = 0.0
    _measured: int = 0
    _probed_since: float = 0.0
    _first_at_store: float | None = None
    _trains: bool = False
    _has_trained: bool = False
    _reported: Stalled | None = None
    _min_quiet: float = 0.0
    _stacks: dict[int, list[tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pauses.extend(self.earlier)
        self._changes.elsewhere = self.elsewhere

    @property
    def pauses(self) -> tuple[float, ...]:
        """The last pauses that are known, for the detector of the next round."""
        return tuple(self._pauses)

    @property
    def limit(self) -> float:
        """The seconds without progress after which the workers count as stalled."""
        if self.timeout is not None:
            return self.timeout
        if not self.knows_limit:
            return UNLEARNED_LIMIT
        is_silent = self._own_pauses < PAUSES_TO_LEARN
        least = max(self.min_limit, SILENT_LIMIT) if is_silent else self.min_limit
        return max(least, PAUSE_FACTOR * max((*self._pauses, *self._silent_pauses)))

    @property
    def knows_limit(self) -> bool:
        """Whether the user has set the limit, or it follows from the pauses of this round."""
        return self.timeout is not None or self.has_rhythm

    @property
    def has_rhythm(self) -> bool:
        """Whether the pauses of this round are known."""
        return self._own_pauses >= PAUSES_TO_LEARN or len(self._silent_pauses) >= PAUSES_TO_LEARN

    @property
    def _is_silent(self) -> bool:
        """Whether the workers train, if they do, where no connection shows it."""
        return self._beats and self._sampled is not None and self._sampled - self._trained_at >= SILENT_AFTER

    @property
    def stalled(self) -> Stalled | None:
        """The stall that was decided last, None if there is none."""
        return self._reported

    @property
    def exchanged_at(self) -> float | None:
        """When the workers of this node last exchanged data, None if they never have."""
        return self._exchanged_at

    @property
    def _is_learned(self) -> bool:
        """Whether anything shows that these workers train together."""
        together = self._first_at_store is not None and (self._changes.workers > 1 or self.elsewhere)
        return self.trains or self.knows_limit or together

    @property
    def needs_figures(self) -> bool:
        """Whether the next sample has to contain the figures of processes: those of the connections showed no training
        in the last one."""
        return not self._trains

    @property
    def quiet_seconds(self) -> float:
        """The seconds without progress before the last sample."""
        return 0.0 if self._progress_at is None or self._sampled is None else self._sampled - self._progress_at

    def has_progressed(self, rank: int) -> bool:
        """Whether the last sample showed progress of the workers; the rank of one does not matter."""
        return self._progressed or self._progress_at == self._sampled

    def observe(self, samples: Sequence[Evidence], steps: Mapping[int, int] | None = None) -> Decision:
        """Take the evidence of all workers at one time, and the steps that they have reported."""
        if not samples:
            return None
        now = samples[0].at
        if self._began is None:
            self._began = self._trained_at = now
        before = self._sampled
        if before is not None and now - before > FREEZE and self._progress_at is not None:
            self._thaw(now - before)
            before = now
        moved = self._changes.moved(samples)
        data_age = min((age for one in moved if (age := one.traffic.data_age) is not None), default=None)
        if moved:
            self._exchanged_at = now if data_age is None or self._looked is None else max(self._looked, now - data_age)
        earliest = before
        if self._repeated_since is not None and not self._changes.count(samples, steps or {}):
            # The data that have moved may have done so before the last sample, which did not look at them.
            earliest = self._repeated_since
        changes = self._changes.take(samples, steps or {})
        if self._first_at_store is None and any(one.traffic.at_store for one in samples):
            self._first_at_store = now
        self._sampled = now
        is_repeated = all(one.repeated for one in samples)
        self._looked, self._repeated_since = (self._looked, before) if is_repeated else (now, None)
        self._trains = any(change.trained for change in changes.values())
        self._trained_at = now if self._trains else self._trained_at
        self._beats = self._beats or any(change.beats for change in changes.values())
        was_quiet = not self._progressed
        self._progressed = self._progress_at is None or any(change.progress for change in changes.values())
        is_measured = not self._progressed and all(change.measured for change in changes.values())
        self._measured = self._measured + 1 if is_measured else 0
        if self._progressed:
            by_data = all(change.trained for change in changes.values() if change.progress)
            if is_repeated:
                data_age = 0.0
            if by_data and data_age is not None and before is not None and earliest is not None:
                # Of a rhythm that is faster than the samples, the last one has shown how long a pause was until then.
                pause = None if was_quiet or self._progress_at is None else before - self._progress_at
                return self._note_progress(max(earliest, now - data_age), pause)
            return self._note_progress(now)
        if self._reported is not None:
            return None
        if any(one.figures is not None and one.figures.traced for one in samples):
            # A debugger is attached: a person looks at it already.
            self._progress_at = now
            return None
        return self._late_starters(samples, now) or self._decide(samples, changes, now)

    def note_stacks(self, stacks: Mapping[int, Sequence[tuple[str, ...]]]) -> None:
        """Take the stacks of busy workers: for each rank the frames of its main thread, the innermost first, each as
        `file:line:function`."""
        for rank, found in stacks.items():
            self._stacks.setdefault(rank, []).extend(stack for stack in found if stack)

    def withdraw(self) -> None:
        """Forget the stall that was decided last, as it is none: a person debugs a worker, or no worker waits for
        another one. The workers have another limit from now on."""
        if self._is_silent and self._progress_at is not None:
            self._silent_pauses.append(self.quiet_seconds)
        self._progress_at = self._sampled
        self._reported = None
        self._stacks.clear()

    def postpone(self, seconds: float) -> None:
        """Take back the stall that was decided last, as the evidence is good enough only after `seconds` without
        progress. They count from the last progress, or from when a worker last computed: one that only waited for a
        processor, as each worker does on a loaded machine, would put the end off for ever."""
        self._min_quiet = seconds
        self._reported = None
        self._stacks.clear()

    def _decide(self, samples: Sequence[Evidence], changes: Mapping[int, Change], now: float) -> Decision:
        assert self._progress_at is not None
        ranks = tuple(one.rank for one in samples)
        busy = tuple(rank for rank, change in changes.items() if change.busy)
        # What was busy until now has done something else than to hang.
        since = self._progress_at
        if not busy:
            since = max(since, self._computed_at if self._min_quiet else self._busy_at)
        if busy:
            self._busy_at = now
        if any(change.computed for change in changes.values()):
            self._computed_at = now
        limit = max(self.limit, self._min_quiet)
        early = self._may_be_early and now - since < limit
        if now - since < (EARLY_LIMIT if early else limit) or not self._is_learned or self._measured < MEASURED:
            return None
        if busy:
            if any(moves(self._stacks.get(rank, ())) for rank in busy):
                # No pause of the rhythm, unless it has no other: the next one is recognized by its stacks as well.
                if self._is_silent and not early:
                    self._silent_pauses.append(now - self._progress_at)
                self._progress_at = now
                self._stacks.clear()
                return None
            if not self._stacks:
                self._probed_since = now
            if now - self._probed_since < PROBING or any(not stays(self._stacks.get(rank, ())) for rank in busy):
                return AskStacks(busy)
            if self._is_unknown(busy) and self.timeout is None and now - since < UNLEARNED_LIMIT:
                # Without a stack nothing tells a loop that hangs from one that evaluates.
                return None
        code = StallCode.BUSY if busy else StallCode.TRAINING
        self._reported = Stalled(code, ranks, self._progress_at, self.limit, early)
        return self._reported

    @property
    def _may_be_early(self) -> bool:
        """Whether workers whose pauses are not known have trained, and were not looked at since."""
        return self.looks_early and not self.knows_limit and not self._min_quiet and (self._has_trained or self._beats)

    def _is_unknown(self, busy: Sequence[int]) -> bool:
        """Whether no stack shows where one of these workers is."""
        return any(not any(stack[0] for stack in self._stacks.get(rank, ())) for rank in busy)

    def _late_starters(self, samples: Sequence[Evidence], now: float) -> Stalled | None:
        if self.trains:
            return None
        since = self._first_at_store
        if since is None and self.elsewhere:
            # Workers of other nodes may wait for these; whether they do is known where all nodes report.
            since = self._began
        assert self._progress_at is not None
        if (
            self.trains
            or since is None
            or now - since < STARTUP_LIMIT
            or now - self._progress_at < MIN_LIMIT
            or self._own_pauses
        ):
            return None
        late = tuple(one.rank for one in samples if not one.traffic.at_store)
        if not late or (len(late) == len(samples) and not self.elsewhere):
            return None
        self._reported = Stalled(StallCode.START, late, since, STARTUP_LIMIT)
        return self._reported

    def _note_progress(self, at: float, pause: float | None = None) -> Decision:
        """Note that the workers made progress at this time, for the last time before this sample, and the pause before
        it, unless another one is given."""
        decision: Decision = None
        if self._progress_at is not None:
            pause = at - self._progress_at if pause is None else pause
            if self._reported is not None:
                decision = Resumed(at - self._reported.since, self._reported.ranks)
            # A pause that was reported belongs to the rhythm too: what has come back was no stall. Those before the
            # first step do not: imports and connections have no rhythm.
            if self._trains and self._has_trained:
                self._pauses.append(pause)
                self._own_pauses += 1
            elif self._is_silent:
                self._silent_pauses.append(pause)
            self._has_trained = self._has_trained or self._trains
        self._progress_at = at
        self._reported = None
        self._min_quiet = 0.0
        self._stacks.clear()
        return decision

    def _thaw(self, gap: float) -> None:
        assert self._progress_at is not None
        self._progress_at += gap
        self._trained_at += gap
        self._busy_at += gap
        self._computed_at += gap
        self._probed_since += gap
        if self._began is not None:
            self._began += gap
        if self._exchanged_at is not None:
            self._exchanged_at += gap
        if self._looked is not None:
            self._looked += gap
        self._repeated_since = None
        if self._first_at_store is not None:
            self._first_at_store += gap
        self._changes.forget_figures()
