"""A rack that loses power: several nodes of a torch job vanish at once, in some runs with the coordinator."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.scenario import Scenario

SHARE_OF_RACKS = 0.05
"""The share of runs in which a rack may be lost."""


class Rack:
    """Draws from a generator of its own: the runs of the other seeds stay the same."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._random = Random(f"rack {seed}")
        self.lost = 0

    def begin(self, until: float) -> None:
        """Let the rack be lost before that time, in a run whose machines may be lost."""
        if self._random.random() < SHARE_OF_RACKS and self._scenario.trouble in ("nodes", "all"):
            self._scenario.timeline.after(self._random.uniform(5.0, until), self._lose)

    def _lose(self) -> None:
        living = self._scenario.living
        if self._scenario.faults.over or len(living) < 2:
            return
        self._scenario.timeline.note("job", "a rack loses power")
        for node in self._random.sample(living, self._random.randint(2, len(living))):
            node.kill(silent=True)
            self.lost += 1
        if self._random.random() < 0.3:
            self._scenario.faults.lose_coordinator()
