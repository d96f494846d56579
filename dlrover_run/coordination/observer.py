"""What looks at the nodes of a job in each decision, and notes what follows in a part of the plan of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dlrover_run.coordination.decision import Deadline
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.plan import Plan, PlanPart
from dlrover_run.coordination.records.round import NodeKey, RankAssignment


class Observation(NamedTuple):
    """What an observer comes to: its new part of the plan, None if that does not change, when it is to look again
    though no report was received, and lines for the coordinator's log."""

    part: PlanPart | None = None
    deadlines: tuple[Deadline, ...] = ()
    log_lines: tuple[str, ...] = ()


class Observer(Protocol):
    """A feature that decides nothing about rounds. What it wants it says in its part of the plan: see `PlanPart`.

    Pure: what it returns follows from the rules, the plan, the nodes and the job time alone. A decision calls `observe`
    at its begin, and again once a round has ended or begun.
    """

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation: ...

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        """Of each node that it concerns: what it assigns to the node. Called whenever the plan has changed."""
        ...

    def recovered(self, plan: Plan, nodes: Nodes) -> PlanPart | None:
        """Its part of a plan that was rebuilt from the nodes' reports; None without one. Called once, by a coordinator
        that has lost its records."""
        return None
