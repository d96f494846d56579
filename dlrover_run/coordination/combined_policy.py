"""Several policies of one job as one policy; see `policy` for what holds where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from dlrover_run.coordination.decision import MAX_STEPS, Deadline, Decision, Unsettled
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import OVER, Member, NodeKey, NodeReport, Plan, RankAssignment, Waiting
from dlrover_run.coordination.parts import AssignmentPart, ReportPart, RequestPart, combine
from dlrover_run.coordination.policy import Accepted, Policy
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words.reasons import Reason, Reasons, chain

Method = TypeVar("Method", bound=Callable[..., Any])


def _any(method: Method) -> Method:
    """Whether it is so for one of the policies."""

    def combined(self: CombinedPolicy, *given: Any) -> bool:
        return any(getattr(one, method.__name__)(*given) for one in self._policies)

    return cast(Method, combined)


def _first(method: Method) -> Method:
    """The answer of the first policy that has one."""

    def combined(self: CombinedPolicy, *given: Any) -> Any:
        answers = (getattr(one, method.__name__)(*given) for one in self._policies)
        return next((answer for answer in answers if answer is not None), None)

    return cast(Method, combined)


def _in_turn(method: Method) -> Method:
    """The plan that each policy has changed, one after the other."""

    def combined(self: CombinedPolicy, plan: Plan, *given: Any) -> Plan:
        for one in self._policies:
            plan = getattr(one, method.__name__)(plan, *given)
        return plan

    return cast(Method, combined)


def _steps(method: Method) -> Method:
    """A step of each policy, one after the other, with the name of the policy in its deadlines."""

    def combined(self: CombinedPolicy, plan: Plan, *given: Any) -> Decision:
        deadlines: list[Deadline] = []
        lines: list[str] = []
        holds = False
        for name, one in self._named.items():
            done: Decision = getattr(one, method.__name__)(plan, *given)
            plan = done.plan
            lines += done.log_lines
            holds = holds or done.holds
            deadlines += (deadline._replace(author=name) for deadline in done.deadlines)
        return Decision(plan, tuple(deadlines), tuple(lines), holds)

    return cast(Method, combined)


class CombinedPolicy(Policy):
    """The policies of a job that has several, by their names, in the order in which they are asked."""

    refresh = _steps(Policy.refresh)
    step = _steps(Policy.step)
    watch = _steps(Policy.watch)
    has_started = _any(Policy.has_started)
    is_active = _any(Policy.is_active)
    has_removed = _any(Policy.has_removed)
    hold_for = _first(Policy.hold_for)
    # The others begin once that is over.
    begin = _first(Policy.begin)
    stop_watching = _in_turn(Policy.stop_watching)
    end_round = _in_turn(Policy.end_round)
    end_job = _in_turn(Policy.end_job)
    take_over = _in_turn(Policy.take_over)
    recover = _in_turn(Policy.recover)

    def __init__(self, rules: JobRules, policies: Mapping[str, Policy]) -> None:
        super().__init__(rules)
        self._named = policies
        self._policies = tuple(policies.values())
        self._alone = next((policies[part.feature] for part in rules.parts if not part.has_rounds), None)
        self.needs_gathering = any(one.needs_gathering for one in self._policies)
        self.watches_spares = any(one.watches_spares for one in self._policies)

    def decide(self, plan: Plan, members: Members, now: float) -> Decision | None:
        """The decision of the policy that decides alone, after the others were refreshed and stepped. What it decides
        may lead to further steps of the others, so this is repeated until nothing changes."""
        if self._alone is None:
            return None
        lines: list[str] = []
        for _ in range(MAX_STEPS):
            before = self.refresh(plan, members, now)
            others = self.step(before.plan, members, now)
            whole = self._alone.decide(others.plan, members, now)
            assert whole is not None, "the policy decides alone"
            lines += (*before.log_lines, *others.log_lines, *whole.log_lines)
            if whole.plan.phase in OVER:
                return Decision(self.end_job(whole.plan, now), (), tuple(lines))
            if whole.plan == plan:
                return Decision(plan, (*others.deadlines, *whole.deadlines), tuple(lines))
            plan = whole.plan
        raise Unsettled

    def is_full(self, plan: Plan, offers: Sequence[ReportPart] = ()) -> bool | None:
        return None if self._alone is None else self._alone.is_full(plan, offers)

    def eligible(self, plan: Plan, members: Members) -> list[MemberState]:
        found, *others = (one.eligible(plan, members) for one in self._policies)
        for nodes in others:
            keys = {p.report.key for p in nodes}
            found = [p for p in found if p.report.key in keys]
        return found

    def admit(self, plan: Plan, nodes: list[MemberState], now: float) -> list[MemberState]:
        for one in self._policies:
            nodes = one.admit(plan, nodes, now)
        return nodes

    def admitted(self, plan: Plan, nodes: Sequence[MemberState]) -> list[MemberState]:
        found = list(nodes)
        for one in self._policies:
            found = one.admitted(plan, found)
        return found

    def expected(self, plan: Plan) -> list[Member]:
        found: dict[NodeKey, Member] = {}
        for one in self._policies:
            for member in one.expected(plan):
                found.setdefault(member.key, member)
        return list(found.values())

    def recover_job(self, plan: Plan, reports: Sequence[NodeReport], grace_over: bool, now: float) -> Plan | None:
        recover = super().recover_job if self._alone is None else self._alone.recover_job
        return recover(plan, reports, grace_over, now)

    def continued_parts(self, report: NodeReport) -> tuple[AssignmentPart, ...]:
        return combine(*(one.continued_parts(report) for one in self._policies))

    def assigned(
        self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]
    ) -> Mapping[NodeKey, tuple[AssignmentPart, ...]]:
        found: dict[NodeKey, tuple[AssignmentPart, ...]] = {}
        for one in self._policies:
            for key, parts in one.assigned(plan, ranks).items():
                found[key] = combine(found.get(key, ()), parts)
        return found

    def scale(self, plan: Plan, members: Members, request: RequestPart, by: str, now: float) -> Accepted | None:
        found = (one.scale(plan, members, request, by, now) for one in self._policies)
        return next((accepted for accepted in found if accepted is not None), None)

    def waiting(self, plan: Plan, members: Members, seconds: float | None, now: float) -> Waiting | None:
        """What nodes wait for by the first policy for which they do, and what all policies show."""
        found = [one.waiting(plan, members, seconds, now) for one in self._policies]
        shown = [waiting for waiting in found if waiting is not None]
        if not shown:
            return None
        return Waiting(shown[0].reasons, shown[0].seconds, combine(*(waiting.parts for waiting in shown)))

    def removals(self, plan: Plan, members: Members) -> Reasons:
        return chain((), *(reason for one in self._policies for reason in one.removals(plan, members)))

    def watch_reason(self, deadline: Deadline, joining: bool) -> Reason | None:
        one = self._named.get(deadline.author)
        return None if one is None else one.watch_reason(deadline, joining)
