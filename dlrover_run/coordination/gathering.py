"""Between two rounds, and before the first: which nodes are here, whether they suffice, and the round they form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dlrover_run.coordination.decision import (
    MAX_STEPS,
    Deadline,
    DeadlineReason,
    Decision,
    Unsettled,
    deadline_if,
    end_job,
    update_plan,
)
from dlrover_run.coordination.membership import Members, MemberState, all_have_left
from dlrover_run.coordination.model import Member, NodeReport, Plan, PlanPhase, RoundKey
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.ranks import assign_ranks, display_names
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names
from dlrover_run.words.text import node_name

RoundMembers = Sequence[tuple[Member, MemberState | None]]
"""Members of a round, each with what is known of it."""


def gather(policy: Policy, plan: Plan, members: Members, now: float) -> Decision:
    """What follows while the job has no round that runs."""
    if all_have_left(members, now):
        # Nodes that are started later belong to another job, with a budget of its own.
        unheld = _is_first(policy, plan)
        reasons = (Code.EVERY_NODE_LEFT(),) if unheld else chain(plan.reasons, Code.NO_NODE_LEFT())
        return end_job(plan, now, PlanPhase.FAILED, reasons)
    if plan.wanted_nodes != policy.rules.wanted_nodes:
        # The next decision forms the round with the rules of that size.
        return Decision(plan)
    plan = policy.stop_watching(plan, now)
    lines: tuple[str, ...] = ()
    # What the policy begins may be over at once, and then the nodes are looked at again.
    for _ in range(MAX_STEPS):
        step = policy.step(plan, members, now)
        plan, lines = step.plan, lines + step.log_lines
        if step.holds:
            return step._replace(log_lines=lines)
        ready = _form(policy, plan, members, now)
        if isinstance(ready, Decision):
            return ready._replace(log_lines=lines + ready.log_lines)
        plan = ready
    raise Unsettled


def _form(policy: Policy, plan: Plan, members: Members, now: float) -> Decision | Plan:
    """The next round, or what it waits for; or the plan in which the policy begins what has to precede the round."""
    rules = policy.rules
    is_first = plan.key.number == 0
    alive = eligible(policy, plan, members)
    if is_first and not alive and not (policy.has_started(plan) and members):
        # No node waits.
        return Decision(plan)
    lacks_quorum = is_quorum_lacking(plan, alive)
    size = 0 if lacks_quorum else rules.size(len(alive))
    # Where the policy has held a round there were enough nodes before, and some were lost or removed.
    timeout = rules.join_timeout if _is_first(policy, plan) else rules.pend_timeout
    if lacks_quorum and not _is_first(policy, plan):
        timeout = min(timeout, rules.master_timeout)
    if not size:
        deadline = plan.since + timeout
        if now >= deadline:
            return end_job(plan, now, PlanPhase.FAILED, _short_of_nodes(policy, plan, alive, timeout))
        waits_for = DeadlineReason.JOIN if _is_first(policy, plan) else DeadlineReason.REPLACEMENT
        return Decision(plan, (Deadline(deadline, waits_for),))
    complete = _complete(policy, plan, members, alive, size, now)
    if complete is not None and now < complete.at:
        return Decision(plan, (complete,))
    alive = policy.admit(plan, alive, now)
    size = rules.size(len(alive))
    ranked = assign_ranks(plan.members, alive, size)
    held = policy.hold_for(plan, ranked, now)
    if held is not None:
        return Decision(plan, (held,))
    begun = policy.begin(plan, ranked, alive, now)
    if begun is not None:
        return begun
    if not offers_a_fresh_port(rules, plan, ranked[0].report):
        deadline = max(plan.since, ranked[0].joined_at) + timeout
        if now >= deadline:
            silent = Code.RANK0_SILENT(node=display_names(plan, ranked[:1])[0], seconds=timeout)
            return end_job(plan, now, PlanPhase.FAILED, (silent,))
        return Decision(plan, (Deadline(deadline, DeadlineReason.RANK0_NODE),))
    reasons = plan.reasons
    if is_first and policy.has_removed(plan, members):
        reasons = chain(plan.reasons, Code.NODES_LEFT(number=size))
    elif is_first:
        reasons = (Code.NODES_HERE(number=size),)
        if size < rules.max_size:
            reasons = chain(reasons, Code.LAST_CALL_OVER(seconds=rules.last_call_timeout))
    return Decision(form_round(rules, plan, ranked, now, reasons), again=True)


def is_quorum_lacking(plan: Plan, alive: list[MemberState]) -> bool:
    """Whether nodes are not here that another master may have: members of the last round or, if they are not known, so
    many nodes. A node whose connection has ended may be with the other master already."""
    if not plan.quorum:
        return False
    members = {member.key for member in plan.members if not member.done}
    if not members:
        return sum(state.connected for state in alive) < plan.quorum
    return sum(state.report.key in members for state in alive) < plan.quorum


def _is_first(policy: Policy, plan: Plan) -> bool:
    """Whether the job has had no round, and the policy has held none."""
    return plan.key.number == 0 and not policy.has_started(plan)


def form_round(rules: JobRules, plan: Plan, ranked: list[MemberState], now: float, reasons: Reasons) -> Plan:
    """The next round, of the nodes `ranked` in the order of their ranks."""
    rank0_node = ranked[0].report
    # A store whose place the user gave keeps its port. It is fresh all the same, because it lives in the worker with
    # rank 0 and ends with it.
    address, port = rules.store or (rank0_node.address, rank0_node.port)
    return update_plan(
        plan,
        now,
        phase=PlanPhase.TRAINING,
        since=now,
        key=RoundKey(plan.epoch, plan.key.number + 1),
        members=tuple(state.report.member for state in ranked),
        store_address=address,
        store_port=port,
        reasons=reasons,
        change=None,
        quorum=0,
    )


def offers_a_fresh_port(rules: JobRules, plan: Plan, rank0_node: NodeReport) -> bool:
    """Whether no round has ever used the port that this node offers for the store.

    A node holds another port as soon as it receives another round or another coordinator's assignment, so the port is
    fresh if the node knows the last of both. A node that does not know them yet may offer the port of the round that it
    does not know, and the workers of two rounds could connect to one store. The same holds for a node without any
    coordinator yet: a predecessor without a journal may have sent a round with it to other nodes only. A node that
    knows a later round than this coordinator does, from such a predecessor, never used the port of the last round here.
    """
    knows = rank0_node.known_round == plan.key and rank0_node.epoch == plan.epoch
    return rules.store is not None or knows or rank0_node.known_round > plan.key


def eligible(policy: Policy, plan: Plan, members: Members) -> list[MemberState]:
    """The nodes of which a round can be formed: those that are eligible, without those that are about to leave."""
    found, leaving = policy.eligible(plan, members), {*plan.draining, *plan.to_drain}
    return [state for state in found if state.report.key not in leaving] if leaving else list(found)


def end_round(policy: Policy, plan: Plan, now: float, reasons: Reasons) -> Decision:
    """The round is over: the next one is formed of the nodes that are alive, or waits for others. A planned change that
    waits for a checkpoint of the round is made with it."""
    ended = update_plan(
        policy.end_round(release_drains(plan, now)),
        now,
        phase=PlanPhase.GATHERING,
        since=now,
        reasons=reasons,
        change=None,
    )
    return Decision(ended, again=True)


def release_drains(plan: Plan, now: float) -> Plan:
    """The plan that assigns a drain to the nodes that are to drain."""
    if not plan.to_drain:
        return plan
    return update_plan(plan, now, draining=tuple(dict.fromkeys((*plan.draining, *plan.to_drain))), to_drain=())


def round_members(plan: Plan, members: Members) -> list[tuple[Member, MemberState | None]]:
    """The members of the plan's round with what is known of each; None for one that was never here."""
    return [(member, members.get(member.key)) for member in plan.members]


def disconnects_resolved_at(members: RoundMembers, now: float) -> float | None:
    """When the last member whose connection has just broken is back or lost; None when there is no such member."""
    broken = [
        state for _, state in members if state is not None and state.lost_at is not None and not state.is_draining
    ]
    return max((state.lost_at for state in broken if state.lost_at is not None and now < state.lost_at), default=None)


def _complete(
    policy: Policy, plan: Plan, members: Members, alive: list[MemberState], size: int, now: float
) -> Deadline | None:
    """When it is known which nodes take part in the next round, if none joins or leaves before."""
    rules = policy.rules
    # A disconnected member keeps its rank until it is declared lost, so it is waited for in any case.
    found = [*deadline_if(disconnects_resolved_at(round_members(plan, members), now), DeadlineReason.LOST)]
    if size < rules.max_size:
        found += [
            Deadline(state.lost_at, DeadlineReason.LOST)
            for state in members.values()
            if state.lost_at is not None and not state.is_draining
        ]
        if _is_first(policy, plan):
            last_call = max(state.joined_at for state in alive) + rules.last_call_timeout
            found.append(Deadline(last_call, DeadlineReason.LAST_CALL))
    # After the first round all live nodes are known, so there is no last call for nodes that may never come.
    return max(found, key=lambda deadline: deadline.at, default=None)


def _short_of_nodes(policy: Policy, plan: Plan, alive: list[MemberState], waited: float) -> Reasons:
    rules = policy.rules
    hosts = display_names(plan, alive)
    lacks_quorum = is_quorum_lacking(plan, alive)
    least = max(rules.min_size, plan.quorum) if lacks_quorum else rules.min_size
    here = Code.NO_NODE_CAME(seconds=waited, least=least)
    if hosts:
        here = Code.TOO_FEW_NODES(seconds=waited, number=len(hosts), least=least, names=shown_names(hosts))
    before = () if _is_first(policy, plan) else plan.reasons
    quorum = (Code.QUORUM(number=plan.quorum),) if lacks_quorum else ()
    return chain(before, here, *quorum, *missing_nodes(rules, plan, alive))


def missing_nodes(rules: JobRules, plan: Plan, alive: list[MemberState]) -> Reasons:
    """Which nodes are missing, if that is known: members of the last round, or node ranks that users gave."""
    here = {state.report.key for state in alive}
    if plan.members:
        missing = [node_name(one.host, rank) for rank, one in enumerate(plan.members) if one.key not in here]
        return (Code.MISSING(names=shown_names(missing)),) if missing else ()
    preferred = {rank for state in alive if (rank := state.report.preferred_rank) is not None and rank < rules.min_size}
    if not alive or any(state.report.preferred_rank is None for state in alive):
        return ()
    # A job may have a hundred thousand nodes, and this is computed again and again.
    first = itertools.islice((rank for rank in range(rules.min_size) if rank not in preferred), 3)
    names = shown_names([f"node {rank}" for rank in first], rules.min_size - len(preferred))
    return (Code.MISSING(names=names),) if names else ()
