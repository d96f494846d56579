"""Which nodes may have ranks, and until when a round waits for that to be known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from dlrover_run.coordination.decision import Deadline, Wait
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.plan import Plan, PlanPart
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import Reason, Reasons

Choose = Callable[[Sequence[KnownNode]], list[KnownNode]]
"""The nodes of the next round out of these, in the order of their ranks."""


class Step(NamedTuple):
    """What a gate comes to: the plan after its step, when it goes on though no report was received, and lines for the
    coordinator's log. `holds`: no round is formed before its next step. `wait` says what nodes without ranks wait for
    meanwhile, if that is the gate's. `spare` says it of those beside a round that runs: on its own, and if a larger
    round follows."""

    plan: Plan
    deadlines: tuple[Deadline, ...] = ()
    log_lines: tuple[str, ...] = ()
    holds: bool = False
    wait: Wait | None = None
    spare: tuple[Reason, Reason] | None = None


class Permit(NamedTuple):
    """What a gate says of the next round. It may begin with the nodes `ranked`, in the order of their ranks, but not
    before `until`; or `begun` is the plan in which the gate has begun what has to precede the round."""

    ranked: Sequence[KnownNode] = ()
    until: Deadline | None = None
    begun: Plan | None = None


class Gate(Protocol):
    """The feature of a job, one at most, that decides which nodes may have ranks.

    Pure, as an observer is. `RoundEngine` asks it: `healthy` wherever it counts nodes, `between` and `permit` while no
    round runs, or for the round of a planned change, `during` and `joins` while one does. `Plan.since`, `Plan.key` and
    `Plan.reasons` are its own until what it has begun is over.
    """

    name: ClassVar[str]
    """The feature, as the author of its changes."""

    def healthy(self, plan: Plan, nodes: Nodes) -> list[KnownNode]:
        """The nodes that may have ranks in some round to come."""
        ...

    def between(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        """Continue what the gate has begun before the next round, as far as the reports lead."""
        ...

    def permit(self, plan: Plan, nodes: Sequence[KnownNode], choose: Choose, now: float) -> Permit:
        """Whether a round can be formed of these nodes, which are enough for one. Nodes that the gate knows nothing of
        yet delay no round that has enough others."""
        ...

    def during(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        """Act on nodes without ranks while a round runs."""
        ...

    def joins(self, plan: Plan, nodes: Sequence[KnownNode]) -> list[KnownNode]:
        """Those of the healthy nodes that may have ranks at once, in place of or beside those of the round."""
        ...

    def end_round(self, plan: Plan) -> Plan:
        """The plan after the end of a round."""
        ...

    def removals(self, plan: Plan, nodes: Nodes) -> Reasons:
        """Which nodes the gate has removed, for nodes that wait for others."""
        ...

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        """As of an observer: what the gate assigns to nodes."""
        ...

    def take_over(self, plan: Plan) -> Plan:
        """A predecessor's plan, for its successor."""
        ...

    def recovered(self, plan: Plan, nodes: Nodes) -> PlanPart | None:
        """As of an observer: its part of a plan that was rebuilt from reports."""
        ...


class OpenGate(Gate):
    """The gate of a job without one: it lets every node in."""

    name = ""

    def __init__(self, rules: JobRules) -> None:
        self.rules = rules

    def healthy(self, plan: Plan, nodes: Nodes) -> list[KnownNode]:
        return [state for state in nodes.values() if state.is_available]

    def between(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        return Step(plan)

    def permit(self, plan: Plan, nodes: Sequence[KnownNode], choose: Choose, now: float) -> Permit:
        return Permit(choose(nodes))

    def during(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        return Step(plan)

    def joins(self, plan: Plan, nodes: Sequence[KnownNode]) -> list[KnownNode]:
        return list(nodes)

    def end_round(self, plan: Plan) -> Plan:
        return plan

    def removals(self, plan: Plan, nodes: Nodes) -> Reasons:
        return ()

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        return {}

    def take_over(self, plan: Plan) -> Plan:
        return plan

    def recovered(self, plan: Plan, nodes: Nodes) -> PlanPart | None:
        return None
