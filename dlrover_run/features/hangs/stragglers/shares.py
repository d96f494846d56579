"""The shares of the time of one worker: in which it waits for the others, for data, for a disk, and computes. Pure.

They are counted in windows of WINDOW seconds, and a window counts only if every worker of the node has exchanged data
in it. So a checkpoint or an evaluation, in which the round stands still, is in two windows at most, however long it
takes, and the median of KEPT_WINDOWS windows does not show it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Total
from dlrover_run.observe.waits import Waits

WINDOW = 15.0
"""Seconds of one window."""

KEPT_WINDOWS = 5
"""Windows that shares are the median of. With fewer there are no shares: the first steps of a round compile and load,
and of three windows the two at the edges of a pause would be the median."""

MIN_SAMPLES = 8
"""Samples of a window that counts."""

MIN_MOVES = 2
"""Samples of a window in which a worker must have exchanged data since the sample before."""

SENDING_BYTES = 16 * 1024
"""Bytes on their way with which a worker sends to the others: what it only announces is shorter."""

REPORTED_CHANGE = 0.1
"""The change of a share that is reported: a report may lead to a decision."""

Ratio = Annotated[float, Meta(ge=0, le=1)]


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The shares of the time of one worker, each of all of it: it waits for other workers (`peers`), for `data`, for a
    `disk`, for a `processor` that others use, it sleeps (`time`), or it runs (`computing`). `sending` is the share in
    which its data were on their way, whatever it did meanwhile."""

    rank: Total
    peers: Ratio = 0.0
    data: Ratio = 0.0
    disk: Ratio = 0.0
    time: Ratio = 0.0
    processor: Ratio = 0.0
    computing: Ratio = 0.0
    sending: Ratio = 0.0


FIGURES = tuple(name for name in Shares.__struct_fields__ if name != "rank")


class WorkerSample(NamedTuple):
    """One worker at one time. `queued` and `waited` are seconds since its start: without a processor, and waited for
    data as its script reports it. `exchanged` are the bytes that it has sent and received, `unsent` those on their
    way."""

    rank: int
    waits: Waits | None
    queued: float = 0.0
    waited: float = 0.0
    exchanged: int = 0
    unsent: int = 0


class NodeShares:
    """The shares of the workers of one node in one round."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._samples: list[Mapping[int, WorkerSample]] = []
        self._windows: dict[int, deque[Shares]] = {}
        self.current: tuple[Shares, ...] = ()
        """The shares of each worker, rounded; empty as long as they are not known."""

    def is_boundary(self, at: float) -> bool:
        """Whether a sample at this time begins or ends a window. Of the others `waited` and `queued` do not matter."""
        return self._began is None or at - self._began >= WINDOW

    def add(self, samples: Iterable[WorkerSample], at: float) -> bool:
        """Take a sample of all workers, at a time in seconds. Whether `current` has changed so much that it is to be
        reported."""
        found = {one.rank: one for one in samples}
        if self._samples and found.keys() != self._samples[-1].keys():
            # A worker has ended: the others do not train as before.
            self._samples, self._windows, self.current, changed = [], {}, (), bool(self.current)
            self._began = None
            return changed
        if self._began is None:
            self._began = at
        self._samples.append(found)
        if at - self._began < WINDOW:
            return False
        window = _window(self._samples, at - self._began)
        # The last sample is what the next window's first is compared with.
        self._samples, self._began = [found], at
        if not window:
            return False
        for one in window:
            self._windows.setdefault(one.rank, deque(maxlen=KEPT_WINDOWS)).append(one)
        return self._update()

    def _update(self) -> bool:
        if any(len(kept) < KEPT_WINDOWS for kept in self._windows.values()):
            return False
        found = tuple(_median(rank, kept) for rank, kept in sorted(self._windows.items()))
        if len(found) == len(self.current) and not any(map(_differ, self.current, found)):
            return False
        self.current = found
        return True


def _window(samples: list[Mapping[int, WorkerSample]], seconds: float) -> list[Shares]:
    """The shares of each worker in these samples; none unless all of them have trained meanwhile."""
    found = []
    for rank in samples[0]:
        ours = [sample[rank] for sample in samples]
        counted = Counter(one.waits for one in ours[1:] if one.waits is not None)
        moves = sum(before.exchanged != after.exchanged for before, after in itertools.pairwise(ours))
        if counted.total() < MIN_SAMPLES or moves < MIN_MOVES:
            return []
        found.append(_shares(rank, ours, counted, seconds))
    return found


def _shares(rank: int, samples: list[WorkerSample], counted: Counter[Waits], seconds: float) -> Shares:
    total = counted.total()
    share = {kind: counted[kind] / total for kind in Waits}
    # What the script reports is exact; it may have waited for its data on a futex too.
    waited = min(1.0, max(0.0, (samples[-1].waited - samples[0].waited) / seconds))
    more = min(max(0.0, waited - share[Waits.DATA]), share[Waits.PEERS])
    runs = share[Waits.NOTHING]
    queued = min(runs, max(0.0, (samples[-1].queued - samples[0].queued) / seconds))
    sending = sum(one.unsent >= SENDING_BYTES for one in samples[1:]) / (len(samples) - 1)
    return Shares(
        rank,
        peers=share[Waits.PEERS] - more,
        data=share[Waits.DATA] + more,
        disk=share[Waits.DISK],
        time=share[Waits.TIME],
        processor=queued,
        computing=runs - queued,
        sending=sending,
    )


def _median(rank: int, windows: Iterable[Shares]) -> Shares:
    kept = list(windows)
    return Shares(rank, *(round(_middle(getattr(one, name) for one in kept), 2) for name in FIGURES))


def _middle(values: Iterable[float]) -> float:
    # Not `statistics`, which every launch would import: that takes longer than all of this package.
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[-half - 1]) / 2


def _differ(before: Shares, after: Shares) -> bool:
    return before.rank != after.rank or any(
        abs(getattr(before, name) - getattr(after, name)) >= REPORTED_CHANGE for name in FIGURES
    )
