"""An operator of a torch job, who requests other sizes and drains nodes."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dlrover_run.coordination.records.requests import Action, OperatorRequest
from simulation.nodes import Node

if TYPE_CHECKING:
    from simulation.scenario import Scenario

SHARE_OF_RUNS = 0.15
"""In how many runs there is an operator."""

LAST_REQUEST = 45.0
"""Seconds before the last fault after which nothing more is requested. A leader of etcd may still carry a request out
when its program has long given up."""


class Operator:
    """Makes a few requests, from a generator of its own: the runs of seeds without an operator stay the same."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._random = Random(f"commands {seed}")
        self.is_here = self._random.random() < SHARE_OF_RUNS

    def begin(self, until: float) -> None:
        if self.is_here and until > LAST_REQUEST:
            # Nodes leave, and rounds become smaller, at the request of the operator.
            self._scenario.invariants.nodes_stay = False
            for _ in range(self._random.randint(1, 4)):
                self._scenario.timeline.after(self._random.uniform(0, until - LAST_REQUEST), self._act)

    def _act(self) -> None:
        living = [node for node in self._scenario.living if not node.is_leaving]
        if living:
            self._random.choice(living).request(self._request(living))

    def _request(self, living: list[Node]) -> OperatorRequest:
        random, rules = self._random, self._scenario.rules
        if random.random() < 0.6:
            return OperatorRequest(Action.SCALE, by="ann", max_nodes=random.randint(rules.min_nodes, rules.max_nodes))
        return OperatorRequest(Action.DRAIN, random.choice(living).key.node_id, by="ann")
