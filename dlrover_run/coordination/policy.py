"""The seam between the coordination core and its policies.

A policy decides which nodes may take part in a round, and until when a round waits for the others. The core asks it at
fixed points of a decision and names none. `Policy` itself is the policy of a job without any: it admits every node.

A policy is pure: what it returns follows from the rules, the plan, the members and the job time alone.

A job may have several policies. `combined_policy.CombinedPolicy` makes one of them, which the core calls in the same
way. It asks them in the order of `features.registry.POLICIES`. Where they disagree:

- A node has a rank only if every policy admits it: `admit` and `admitted` filter the nodes that the policies before
  have left.
- A round begins only when no policy holds it. The first policy that holds names the deadline and the reason. A hold
  follows from the members and the state, not from when the policy was first asked, so holds run at the same time.
- One policy at a time begins something before a round: the first that has to. Once it is over, all are asked again from
  the first on. So a round is formed only of nodes for which no policy has anything left to do.
- Every policy is stepped in each decision, also while another one holds. Each deadline names its policy, so the status
  shows the reason of the policy whose deadline it is.
- A policy writes its own part of the plan, and may read those of the policies before it. `since`, `key` and `reasons`
  of the plan are written only by the policy that begins something, until that is over.
- A node receives the parts of all policies. One of them is enough to dismiss it.
- Of the sizes that policies want the smallest counts. One that an operator has fixed takes precedence.
- At most one policy decides alone (`has_rounds` is False). The others are refreshed and stepped before it until nothing
  changes, and act on it through their parts of the plan: it reads them, and they are not asked about rounds. It also
  says whether the job has all of its tasks (`is_full`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlrover_run.coordination.decision import Deadline, Decision
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import Member, NodeKey, NodeReport, Plan, RankAssignment, Waiting
from dlrover_run.coordination.parts import AssignmentPart, ReportPart, RequestPart
from dlrover_run.coordination.recovery import recover_plan
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words.reasons import Reason, Reasons


class Accepted(NamedTuple):
    """A request that is carried out: the plan after it, and what the job does now, for who has requested it."""

    plan: Plan
    answer: Reasons = ()


class Policy:
    """A policy of one job; this one admits every node."""

    needs_gathering = False
    """Whether nodes that join a running job are admitted between two rounds only."""
    watches_spares = False
    """Whether the policy acts on nodes without ranks while a round runs."""

    def __init__(self, rules: JobRules) -> None:
        self.rules = rules

    @property
    def has_rounds(self) -> bool:
        """Whether nodes have ranks in rounds; else the policy decides alone."""
        return self.rules.has_rounds

    def decide(self, plan: Plan, members: Members, now: float) -> Decision | None:
        """The whole decision, for a job without rounds; None where the core decides."""
        return None

    def is_full(self, plan: Plan, offers: Sequence[ReportPart] = ()) -> bool | None:
        """Whether a job without rounds has all of its tasks, so that a node which comes with these `offers` would wait
        as a spare; None where the core decides."""
        return None

    def refresh(self, plan: Plan, members: Members, now: float) -> Decision:
        """At the begin of each decision, and after one that begins a round: drop what is known of nodes that are gone,
        and note nodes that came."""
        return Decision(plan)

    def has_started(self, plan: Plan) -> bool:
        """Whether the policy has held a round of this job before, so that there were enough nodes already."""
        return False

    def is_active(self, plan: Plan) -> bool:
        """Whether the policy has something running."""
        return False

    def eligible(self, plan: Plan, members: Members) -> list[MemberState]:
        """The nodes that may have ranks in some round to come."""
        return [p for p in members.values() if p.is_available]

    def has_removed(self, plan: Plan, members: Members) -> bool:
        """Whether the policy has removed a node that is still here."""
        return False

    # Between two rounds.

    def stop_watching(self, plan: Plan, now: float) -> Plan:
        """The plan without what the policy did for nodes without ranks while a round ran."""
        return plan

    def step(self, plan: Plan, members: Members, now: float) -> Decision:
        """Continue what the policy has running, as far as the reports lead."""
        return Decision(plan)

    def admit(self, plan: Plan, nodes: list[MemberState], now: float) -> list[MemberState]:
        """Which of the eligible nodes the next round is formed of, enough for a round. Nodes that the policy knows
        nothing of yet delay no round that has enough others."""
        return nodes

    def hold_for(self, plan: Plan, ranked: Sequence[MemberState], now: float) -> Deadline | None:
        """Until when a round of those nodes, in the order of their ranks, has to wait."""
        return None

    def begin(self, plan: Plan, ranked: Sequence[MemberState], nodes: Sequence[MemberState], now: float) -> Plan | None:
        """The plan in which the policy begins what has to precede a round of the nodes `ranked`; None if nothing has
        to. `nodes` are all that are eligible."""
        return None

    def end_round(self, plan: Plan) -> Plan:
        """The plan after the end of a round."""
        return plan

    # While a round runs.

    def watch(self, plan: Plan, members: Members, now: float) -> Decision:
        """Act on nodes without ranks."""
        return Decision(plan)

    def admitted(self, plan: Plan, nodes: Sequence[MemberState]) -> list[MemberState]:
        """Those of the eligible nodes that may have ranks at once."""
        return list(nodes)

    # What an operator requests.

    def scale(self, plan: Plan, members: Members, request: RequestPart, by: str, now: float) -> Accepted | None:
        """What follows from a request for another size; None for one that this policy does not know. `by` is who
        requests it. Raises RequestFailed."""
        return None

    # At the end of the job, and after a change of the coordinator.

    def end_job(self, plan: Plan, now: float) -> Plan:
        """The plan of a job that is over."""
        return plan

    def take_over(self, plan: Plan) -> Plan:
        """A predecessor's plan, for its successor."""
        return plan

    def expected(self, plan: Plan) -> list[Member]:
        """Nodes without ranks that a successor waits for."""
        return []

    def recover(self, plan: Plan, members: Members) -> Plan:
        """The policy's part of a plan that was rebuilt from reports."""
        return plan

    def recover_job(self, plan: Plan, reports: Sequence[NodeReport], grace_over: bool, now: float) -> Plan | None:
        """The plan of a running job, rebuilt from reports; see `recovery.recover_plan`."""
        return recover_plan(plan, reports, grace_over)

    def continued(self, report: NodeReport) -> AssignmentPart | None:
        """The part of the assignment with which a node continues until the plan is rebuilt."""
        return None

    def continued_parts(self, report: NodeReport) -> tuple[AssignmentPart, ...]:
        """The parts of the assignment with which a node continues until the plan is rebuilt."""
        part = self.continued(report)
        return () if part is None else (part,)

    # What nodes receive.

    def tasks(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        """Of each node that the policy concerns: what the policy assigns to it."""
        return {}

    def assigned(
        self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]
    ) -> Mapping[NodeKey, tuple[AssignmentPart, ...]]:
        """The parts of the assignment of each node that has one."""
        return {key: (part,) for key, part in self.tasks(plan, ranks).items()}

    def waiting(self, plan: Plan, members: Members, seconds: float | None, now: float) -> Waiting | None:
        """What nodes without ranks wait for, if that is the policy's. `seconds` is the time until the next deadline
        that concerns them."""
        return None

    def removals(self, plan: Plan, members: Members) -> Reasons:
        """Which nodes the policy has removed, for nodes that wait for others."""
        return ()

    def watch_reason(self, deadline: Deadline, joining: bool) -> Reason | None:
        """What nodes without ranks wait for until that deadline of `watch`, while the policy acts on them; with
        `joining`, a larger round follows."""
        return None
