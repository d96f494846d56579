"""Decides which workers of a round are stalled: all of them together, or some while the others train on. Pure.

Most jobs communicate in every step, so that a worker that hangs stops all others, and the detector of the whole round
finds it within seconds. Workers that communicate in groups, or not at all, go on without it. So each worker has a
detector of its own too. No other worker confirms what that one finds, so its limit is longer, and two things must hold:

- The worker has a rhythm of its own, of steps or of data, and has been quiet for longer than its limit.
- After that, other workers still train: they count steps, or two of them exchange data. A worker that waits for one
  that evaluates, saves or loads is quiet for as long, but then no worker trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dlrover_run.features.hangs.search.detector import (
    FREEZE,
    PAUSE_FACTOR,
    AskStacks,
    Decision,
    Detector,
    Resumed,
    StallCode,
    Stalled,
)
from dlrover_run.observe.records import Evidence
from dlrover_run.observe.rhythm import Rhythm

ALONE_LIMIT = 15.0
"""Seconds without progress after which a worker is stalled while others train, at least. It is as long as that of a
TensorFlow task, which no other task confirms either."""

WITNESS_SECONDS = 3.0
"""Seconds for which another worker must train before it counts as one that goes on: the first data of a step is sent
before anything shows that a peer is missing."""

WITNESS_SAMPLES = 3
"""Samples in that time that must show it."""

ENOUGH_WITNESSES = 2
"""Workers that must go on. One that counts steps is enough: one that only exchanges data may download something."""

_KEPT_TIMES = 16


@dataclass
class _Worker:
    """One worker: what it does by itself, and the last times at which it trained."""

    detector: Detector
    timeout: float | None
    rhythm: Rhythm = field(default_factory=Rhythm)
    counted: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    trained: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))

    @property
    def has_rhythm(self) -> bool:
        """Whether it is known how long its pauses are. Of a worker that counts steps only these are its rhythm: what it
        exchanges besides may end at any time."""
        return self.rhythm.knows_pauses if self.rhythm.counts else self.detector.has_rhythm

    @property
    def limit(self) -> float:
        longest = self.rhythm.longest_pause if self.timeout is None else 0.0
        return max(self.detector.limit, PAUSE_FACTOR * longest)

    @property
    def is_quiet(self) -> bool:
        """Whether it has made no progress for longer than its limit, although it could."""
        return self.has_rhythm and self.detector.stalled is not None and self.detector.quiet_seconds >= self.limit

    def observe(self, one: Evidence, steps: int | None, frozen: float) -> Decision:
        if frozen:
            self.rhythm.shift(frozen)
            self.counted.clear()
            self.trained.clear()
        if steps is not None and self.rhythm.observe(None, steps, one.at):
            self.counted.append(one.at)
        decision = self.detector.observe([one], {} if steps is None else {one.rank: steps})
        if not self.detector.needs_figures:
            self.trained.append(one.at)
        return decision


class RoundDetectors:
    """The detectors of one round, with the parameters of `Detector`. With `elsewhere` a worker that is quiet by itself
    is a stall of this node; whether the others train on is known where all nodes report."""

    def __init__(
        self, timeout: float | None = None, *, elsewhere: bool = False, earlier: tuple[float, ...] = ()
    ) -> None:
        self._together = Detector(timeout, elsewhere=elsewhere, earlier=earlier, looks_early=True)
        self._workers: dict[int, _Worker] = {}
        self._elsewhere = elsewhere
        self._sampled: float | None = None
        self._judged: frozenset[int] = frozenset()
        self._judge_again = float("inf")
        self._decided_alone = False

    @property
    def pauses(self) -> tuple[float, ...]:
        """The last pauses of the workers together."""
        return self._together.pauses

    @property
    def timeout(self) -> float | None:
        return self._together.timeout

    @property
    def knows_limit(self) -> bool:
        return self._together.knows_limit

    @property
    def exchanged_at(self) -> float | None:
        return self._together.exchanged_at

    @property
    def needs_figures(self) -> bool:
        """As `Detector.needs_figures`, of all workers together or of one that has a rhythm."""
        alone = any(worker.has_rhythm and worker.detector.needs_figures for worker in self._workers.values())
        return alone or self._together.needs_figures

    def has_progressed(self, rank: int) -> bool:
        """Whether the last sample showed progress of this worker."""
        return rank not in self._workers or self._workers[rank].detector.has_progressed(rank)

    def observe(self, samples: Sequence[Evidence], steps: Mapping[int, int] | None = None) -> Decision:
        """Take the evidence of all workers at one time, and the steps that they have reported."""
        if not samples:
            return None
        now = samples[0].at
        gap = 0.0 if self._sampled is None else now - self._sampled
        self._sampled = now
        decision = self._together.observe(samples, steps)
        self._workers = {one.rank: self._workers.get(one.rank) or self._new_worker() for one in samples}
        asked, resumed = set[int](), dict[int, float]()
        for one in samples:
            found = self._workers[one.rank].observe(one, (steps or {}).get(one.rank), gap if gap > FREEZE else 0.0)
            if isinstance(found, AskStacks) and self._may_be_alone(one.rank):
                asked.add(one.rank)
            elif isinstance(found, Resumed) and one.rank in self._judged:
                resumed[one.rank] = found.seconds
        if isinstance(decision, Resumed) or resumed:
            self._judged = frozenset()
        if isinstance(decision, AskStacks):
            asked.update(decision.ranks)
        elif decision is not None:
            self._decided_alone = False
            return decision
        if resumed:
            return Resumed(max(resumed.values()), tuple(sorted(resumed)), alone=True)
        traced = any(one.figures is not None and one.figures.traced for one in samples)
        return (None if traced else self._find_alone(now)) or (AskStacks(tuple(sorted(asked))) if asked else None)

    def note_stacks(self, stacks: Mapping[int, Sequence[tuple[str, ...]]]) -> None:
        """As `Detector.note_stacks`."""
        self._together.note_stacks(stacks)
        for rank, found in stacks.items():
            if rank in self._workers:
                self._workers[rank].detector.note_stacks({rank: found})

    def withdraw(self) -> None:
        """As `Detector.withdraw`. Workers that are quiet while others train are looked at again after twice that time,
        or when there is another one."""
        if not self._decided_alone:
            self._together.withdraw()
        elif self._sampled is not None:
            here = self._judged & self._workers.keys()
            longest = max((self._workers[rank].detector.quiet_seconds for rank in here), default=0.0)
            self._judge_again = self._sampled + longest

    def postpone(self, seconds: float) -> None:
        """As `Detector.postpone`, of all workers together."""
        self._together.postpone(seconds)

    def witnesses(self, since: float) -> int:
        """How many workers of this node have trained on since a time, up to ENOUGH_WITNESSES."""
        workers = self._workers.values()
        if any(_goes_on(worker.counted, since) for worker in workers):
            return ENOUGH_WITNESSES
        return min(ENOUGH_WITNESSES, sum(_goes_on(worker.trained, since) for worker in workers))

    def _new_worker(self) -> _Worker:
        timeout = self._together.timeout
        return _Worker(Detector(timeout, elsewhere=True, trains=True, min_limit=ALONE_LIMIT), timeout)

    def _may_be_alone(self, rank: int) -> bool:
        worker = self._workers[rank]
        if self._sampled is None or not worker.has_rhythm:
            return False
        if self._elsewhere:
            return True
        over_limit = self._sampled - worker.detector.quiet_seconds + worker.limit
        return self.witnesses(over_limit) >= ENOUGH_WITNESSES

    def _find_alone(self, now: float) -> Stalled | None:
        quiet = frozenset(
            rank for rank, worker in self._workers.items() if worker.is_quiet and self._may_be_alone(rank)
        )
        if not self._elsewhere and self._together.stalled is not None:
            return None
        if quiet <= self._judged and (now < self._judge_again or not quiet):
            return None
        self._judged, self._judge_again, self._decided_alone = quiet, float("inf"), True
        detectors = [self._workers[rank].detector for rank in sorted(quiet)]
        since = min(now - detector.quiet_seconds for detector in detectors)
        return Stalled(StallCode.ALONE, tuple(sorted(quiet)), since, max(detector.limit for detector in detectors))


def _goes_on(times: Collection[float], since: float) -> bool:
    after = [at for at in times if at > since]
    return len(after) >= WITNESS_SAMPLES and after[-1] - after[0] >= WITNESS_SECONDS
