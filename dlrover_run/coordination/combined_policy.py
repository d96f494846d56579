"""Several policies of one job as one policy; see `policy` for what holds where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dlrover_run.coordination.combined_records import combine
from dlrover_run.coordination.decision import Deadline, Decision
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import OVER, Member, NodeKey, NodeReport, Plan, RankAssignment, Waiting
from dlrover_run.coordination.policy import Admission, Policy, PolicyStep
from dlrover_run.coordination.policy_records import PolicyAssignment
from dlrover_run.coordination.reasons import Reason, Reasons, chain
from dlrover_run.coordination.rules import JobRules


class CombinedPolicy(Policy):
    """The policies of a job that has several, by their names, in the order in which they are asked."""

    def __init__(self, rules: JobRules, policies: Mapping[str, Policy]) -> None:
        super().__init__(rules)
        self._named = policies
        self._policies = tuple(policies.values())
        parts = () if rules.policy is None else rules.policy.each()
        self._alone = next((policies[part.policy_name] for part in parts if not part.has_rounds), None)
        self.needs_gathering = any(one.needs_gathering for one in self._policies)
        self.watches_spares = any(one.watches_spares for one in self._policies)

    def decide(self, plan: Plan, members: Members, now: float) -> Decision | None:
        """The decision of the policy that decides alone, after the others were refreshed and stepped. What it decides
        may lead to further steps of the others, so this is repeated until nothing changes."""
        if self._alone is None:
            return None
        lines: list[str] = []
        while True:
            before = self.refresh(plan, members, now)
            others = self._fold(before.plan, lambda one, plan: one.step(plan, members, now))
            whole = self._alone.decide(others.plan, members, now)
            assert whole is not None, "the policy decides alone"
            lines += (*before.log_lines, *others.log_lines, *whole.log_lines)
            if whole.plan.phase in OVER:
                return Decision(self.end_job(whole.plan, now), (), tuple(lines))
            if whole.plan == plan:
                return Decision(plan, (*others.deadlines, *whole.deadlines), tuple(lines))
            plan = whole.plan

    def refresh(self, plan: Plan, members: Members, now: float) -> PolicyStep:
        """Refresh each policy."""
        return self._fold(plan, lambda one, plan: one.refresh(plan, members, now))

    def has_started(self, plan: Plan) -> bool:
        """Whether one of the policies has held a round before."""
        return any(one.has_started(plan) for one in self._policies)

    def is_active(self, plan: Plan) -> bool:
        """Whether one of the policies has something running."""
        return any(one.is_active(plan) for one in self._policies)

    def eligible(self, plan: Plan, members: Members) -> list[MemberState]:
        """The nodes that are eligible for each policy."""
        found, *others = (one.eligible(plan, members) for one in self._policies)
        for nodes in others:
            keys = {p.report.key for p in nodes}
            found = [p for p in found if p.report.key in keys]
        return found

    def has_removed(self, plan: Plan, members: Members) -> bool:
        """Whether one of the policies has removed a node that is still here."""
        return any(one.has_removed(plan, members) for one in self._policies)

    def stop_watching(self, plan: Plan, now: float) -> Plan:
        """The plan without what any policy did for nodes without ranks."""
        return self._change(plan, lambda one, plan: one.stop_watching(plan, now))

    def step(self, plan: Plan, members: Members, now: float) -> PolicyStep:
        """Continue what each policy has running. Of policies that hold no round no deadline counts."""
        return self._fold(plan, lambda one, plan: one.step(plan, members, now), only_holding=True)

    def admit(self, plan: Plan, nodes: list[MemberState], now: float) -> Admission:
        """The nodes that each policy admits of those that the policies before it do; the first hold counts."""
        for one in self._policies:
            nodes, hold_until = one.admit(plan, nodes, now)
            if hold_until is not None:
                return Admission(nodes, hold_until)
        return Admission(nodes)

    def hold_for(self, plan: Plan, ranked: Sequence[MemberState], now: float) -> Deadline | None:
        """The deadline of the first policy that has one."""
        return next((held for one in self._policies if (held := one.hold_for(plan, ranked, now)) is not None), None)

    def begin(self, plan: Plan, ranked: Sequence[MemberState], nodes: Sequence[MemberState], now: float) -> Plan | None:
        """The plan in which the first policy that has to begin something begins it. The others begin once that is
        over."""
        begun = (one.begin(plan, ranked, nodes, now) for one in self._policies)
        return next((following for following in begun if following is not None), None)

    def end_round(self, plan: Plan) -> Plan:
        """The plan after the end of a round."""
        return self._change(plan, lambda one, plan: one.end_round(plan))

    def watch(self, plan: Plan, members: Members, now: float) -> PolicyStep:
        """Each policy acts on nodes without ranks."""
        return self._fold(plan, lambda one, plan: one.watch(plan, members, now))

    def admitted(self, plan: Plan, nodes: Sequence[MemberState]) -> list[MemberState]:
        """The nodes that each policy admits at once of those that the policies before it do."""
        found = list(nodes)
        for one in self._policies:
            found = one.admitted(plan, found)
        return found

    def end_job(self, plan: Plan, now: float) -> Plan:
        """The plan of a job that is over."""
        return self._change(plan, lambda one, plan: one.end_job(plan, now))

    def take_over(self, plan: Plan) -> Plan:
        """A predecessor's plan, for its successor."""
        return self._change(plan, lambda one, plan: one.take_over(plan))

    def expected(self, plan: Plan) -> list[Member]:
        """The nodes without ranks that a successor waits for, each once."""
        found: dict[NodeKey, Member] = {}
        for one in self._policies:
            for member in one.expected(plan):
                found.setdefault(member.key, member)
        return list(found.values())

    def recover(self, plan: Plan, members: Members) -> Plan:
        """The plan with the part of each policy."""
        return self._change(plan, lambda one, plan: one.recover(plan, members))

    def recover_job(self, plan: Plan, reports: Sequence[NodeReport], grace_over: bool, now: float) -> Plan | None:
        """The plan of a running job, rebuilt by the policy that decides alone if there is one."""
        recover = super().recover_job if self._alone is None else self._alone.recover_job
        return recover(plan, reports, grace_over, now)

    def continued(self, report: NodeReport) -> PolicyAssignment | None:
        """The parts with which a node continues."""
        return combine(one.continued(report) for one in self._policies)

    def tasks(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, PolicyAssignment]:
        """Of each node that a policy concerns: what the policies assign to it."""
        given = [one.tasks(plan, ranks) for one in self._policies]
        keys = dict.fromkeys(key for tasks in given for key in tasks)
        found = ((key, combine(tasks.get(key) for tasks in given)) for key in keys)
        return {key: part for key, part in found if part is not None}

    def answer(self, plan: Plan, key: NodeKey) -> PolicyAssignment | None:
        """The answers to requests of a node that no policy assigns anything."""
        return combine(one.answer(plan, key) for one in self._policies)

    def waiting(self, plan: Plan, members: Members, seconds: float | None, now: float) -> Waiting | None:
        """What nodes wait for by the first policy for which they do, and what all policies show."""
        found = [one.waiting(plan, members, seconds, now) for one in self._policies]
        shown = [waiting for waiting in found if waiting is not None]
        if not shown:
            return None
        return Waiting(shown[0].reasons, shown[0].seconds, combine(waiting.policy for waiting in shown))

    def removals(self, plan: Plan, members: Members) -> Reasons:
        """Which nodes the policies have removed."""
        return chain((), *(reason for one in self._policies for reason in one.removals(plan, members)))

    def watch_reason(self, deadline: Deadline, joining: bool) -> Reason | None:
        """What nodes wait for while the policy acts whose deadline that is."""
        one = self._named.get(deadline.policy)
        return None if one is None else one.watch_reason(deadline, joining)

    def _change(self, plan: Plan, change: Callable[[Policy, Plan], Plan]) -> Plan:
        for one in self._policies:
            plan = change(one, plan)
        return plan

    def _fold(self, plan: Plan, step: Callable[[Policy, Plan], PolicyStep], only_holding: bool = False) -> PolicyStep:
        deadlines: list[Deadline] = []
        lines: list[str] = []
        holds = False
        for name, one in self._named.items():
            done = step(one, plan)
            plan = done.plan
            lines += done.log_lines
            holds = holds or done.holds
            if done.holds or not only_holding:
                deadlines += (deadline._replace(policy=name) for deadline in done.deadlines)
        return PolicyStep(plan, tuple(deadlines), tuple(lines), holds)
