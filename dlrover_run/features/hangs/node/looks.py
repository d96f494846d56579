"""How much of the workers is looked at in each sample: the less it can say of a hang, the less is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dlrover_run.observe.records import Evidence

LOOK_EVERY = 4
"""As long as each worker counts steps between two samples, connections are looked at in one sample of so many: that
takes most of the time of a sample, and says nothing more of a stall."""

STEADY = 3
"""Samples in succession in which each worker has counted steps, before its connections are looked at less often."""

SUSPECT_SAMPLES = 2
"""Samples with all evidence, soon after each other, once not all workers have counted steps any more."""


class Sampling(Protocol):
    """What takes samples: `observe.sample.Sampler`."""

    def sample(self, full: bool) -> list[Evidence]: ...

    def repeat(self) -> list[Evidence]: ...

    def forget(self, rank: int) -> None: ...

    def close(self) -> None: ...


class Looks:
    """The looks at the workers of one round, by their steps."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._ranks: tuple[int, ...] = ()
        self._counts: Mapping[int, int] = {}
        # Samples in succession in which each worker has counted steps, and how many are still to be taken soon.
        self._steady = 0
        self._suspect = 0

    @property
    def suspects(self) -> bool:
        """Whether workers have just stopped counting steps, so that the next sample is to be taken soon."""
        return self._suspect > 0

    def take(self, steps: Mapping[int, int], needs_figures: bool, knows_limit: bool) -> tuple[list[Evidence], bool]:
        """The evidence of all workers, and whether it has the figures of their processes; they are there if the
        detector needs them. `knows_limit`: it knows how long a pause may be."""
        before, self._counts = self._counts, steps
        if self._ranks and all(rank in before and steps.get(rank, -1) > before[rank] for rank in self._ranks):
            self._steady += 1
        else:
            self._suspect = SUSPECT_SAMPLES if self._steady > STEADY else self._suspect
            self._steady = 0
        full = self._suspect > 0 or needs_figures
        if self._steady > STEADY and self._steady % LOOK_EVERY and knows_limit and not full:
            samples, full = self._sampling.repeat(), False
        else:
            self._suspect = max(0, self._suspect - 1)
            samples = self._sampling.sample(full)
        if samples:
            self._ranks = tuple(one.rank for one in samples)
        return samples, full

    def forget(self, rank: int) -> None:
        """Leave out a worker that has ended."""
        self._sampling.forget(rank)

    def close(self) -> None:
        self._sampling.close()
