"""Between two rounds, and before the first: which nodes are here, whether they suffice, and the round they form."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from dlrover_run.coordination.decision import (
    Deadline,
    DeadlineReason,
    Decision,
    changed_by,
    deadline_if,
    end_job,
    update_plan,
)
from dlrover_run.coordination.gate import Gate
from dlrover_run.coordination.membership import KnownNode, Nodes, all_have_left
from dlrover_run.coordination.records.assignment import Waiting
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import is_quorum_lacking
from dlrover_run.coordination.rounds.ranks import assign_ranks, display_names
from dlrover_run.coordination.rounds.waiting import missing_nodes, wait_for_round
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names

RoundMembers = Sequence[tuple[Member, KnownNode | None]]
"""Members of a round, each with what is known of it."""


def gather(
    rules: JobRules,
    gate: Gate,
    plan: Plan,
    nodes: Nodes,
    now: float,
    candidates: Container[NodeKey] | None = None,
) -> Decision:
    """What follows while the job has no round that runs. With `candidates` the next one is formed of these only."""
    if all_have_left(nodes, now):
        # Nodes that are started later belong to another job, with a budget of its own.
        unheld = _is_first(plan)
        reasons = (Code.EVERY_NODE_LEFT(),) if unheld else chain(plan.reasons, Code.NO_NODE_LEFT())
        return Decision(end_job(plan, now, PlanPhase.FAILED, reasons))
    if (over := plan.first_reasons(lambda part: part.why_over(plan))) and over != plan.reasons:
        plan = update_plan(plan, now, reasons=over, failure=None)
    # A job without a node ends as any other does.
    if (held := plan.first_reasons(lambda part: part.why_held(plan))) and gate.healthy(plan, nodes):
        return Decision(plan, wait=lambda _, __: Waiting(held))
    if last := plan.first_reasons(lambda part: part.ends_job):
        # The restart that was charged does not come.
        used = max(0, plan.restart_count - 1)
        return Decision(end_job(plan, now, PlanPhase.FAILED, chain(plan.reasons, *last), restart_count=used))
    if plan.wanted_nodes != rules.wanted_nodes:
        # The next decision forms the round with the rules of that size.
        return Decision(plan)
    step = gate.between(plan, nodes, now)
    changes = changed_by(gate.name, plan, step.plan)
    plan = step.plan
    alive = eligible(gate, plan, nodes)
    if candidates is not None:
        alive = [state for state in alive if state.report.key in candidates]
    decision = Decision(plan, step.deadlines) if step.holds else _form(rules, gate, plan, alive, nodes, now)
    wait = partial(wait_for_round, rules, gate, plan, alive, dict(nodes), step.wait)
    return decision._replace(
        log_lines=step.log_lines + decision.log_lines, wait=wait, changes=changes + decision.changes
    )


def _form(rules: JobRules, gate: Gate, plan: Plan, alive: list[KnownNode], nodes: Nodes, now: float) -> Decision:
    """The next round, of the nodes that are alive; or what it waits for, or what the gate begins before it."""
    is_first = plan.key.number == 0
    if is_first and not alive and not (_has_held(plan) and nodes):
        # No node waits.
        return Decision(plan)
    lacks_quorum = is_quorum_lacking(plan, alive)
    size = 0 if lacks_quorum else rules.size(len(alive))
    # Where the gate has held a round there were enough nodes before, and some were lost or removed.
    timeout = rules.join_timeout if _is_first(plan) else rules.pend_timeout
    if lacks_quorum and not _is_first(plan):
        timeout = min(timeout, rules.master_timeout)
    if not size:
        deadline = plan.since + timeout
        if now >= deadline:
            return Decision(end_job(plan, now, PlanPhase.FAILED, _short_of_nodes(rules, plan, alive, timeout)))
        waits_for = DeadlineReason.JOIN if _is_first(plan) else DeadlineReason.REPLACEMENT
        return Decision(plan, (Deadline(deadline, waits_for),))
    complete = _complete(rules, plan, nodes, alive, size, now)
    if complete is not None and now < complete.at:
        return Decision(plan, (complete,))
    permit = gate.permit(plan, alive, partial(_choose, rules, plan), now)
    if permit.begun is not None:
        return Decision(permit.begun, again=True, changes=changed_by(gate.name, plan, permit.begun))
    if permit.until is not None:
        return Decision(plan, (permit.until,))
    ranked = permit.ranked
    if not offers_a_fresh_port(rules, plan, ranked[0].report):
        deadline = max(plan.since, ranked[0].joined_at) + timeout
        if now >= deadline:
            silent = Code.RANK0_SILENT(node=display_names(plan, ranked[:1])[0], seconds=timeout)
            return Decision(end_job(plan, now, PlanPhase.FAILED, (silent,)))
        return Decision(plan, (Deadline(deadline, DeadlineReason.RANK0_NODE),))
    reasons = plan.reasons
    if is_first and any(part.has_removed(nodes) for part in plan.parts):
        reasons = chain(plan.reasons, Code.NODES_LEFT(number=len(ranked)))
    elif is_first:
        reasons = (Code.NODES_HERE(number=len(ranked)),)
        if len(ranked) < rules.max_size:
            reasons = chain(reasons, Code.LAST_CALL_OVER(seconds=rules.last_call_timeout))
    reasons = chain(reasons, *(note for part in plan.parts for note in part.round_note))
    return Decision(_begin_round(rules, plan, ranked, now, reasons), again=True)


def _choose(rules: JobRules, plan: Plan, nodes: Sequence[KnownNode]) -> list[KnownNode]:
    members = list(plan.members)
    for part in plan.parts:
        places = [place for place, member in enumerate(members) if member.key in part.exchanged]
        if len(places) == 2:
            one, other = places
            members[one], members[other] = members[other], members[one]
    return assign_ranks(members, nodes, rules.size(len(nodes)))


def _is_first(plan: Plan) -> bool:
    """Whether the job has had no round, and the gate has held none."""
    return plan.key.number == 0 and not _has_held(plan)


def _has_held(plan: Plan) -> bool:
    return any(part.has_held for part in plan.parts)


def _begin_round(rules: JobRules, plan: Plan, ranked: Sequence[KnownNode], now: float, reasons: Reasons) -> Plan:
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


def eligible(gate: Gate, plan: Plan, nodes: Nodes) -> list[KnownNode]:
    """The nodes of which a round can be formed: those that are healthy, without those that are about to leave."""
    found, leaving = gate.healthy(plan, nodes), {*plan.draining, *plan.to_drain}
    return [
        state
        for state in found
        if state.report.key not in leaving and not any(part.refuses(state.report.key) for part in plan.parts)
    ]


def end_round(gate: Gate, plan: Plan, now: float, reasons: Reasons) -> Decision:
    """The round is over: the next one is formed of the nodes that are alive, or waits for others. A planned change that
    waits for a checkpoint of the round is made with it."""
    released = release_drains(plan, now)
    without_ranks = gate.end_round(released)
    ended = update_plan(
        without_ranks,
        now,
        phase=PlanPhase.GATHERING,
        since=now,
        reasons=reasons,
        change=None,
    )
    return Decision(ended, again=True, changes=changed_by(gate.name, released, without_ranks))


def release_drains(plan: Plan, now: float) -> Plan:
    """The plan that assigns a drain to the nodes that are to drain."""
    if not plan.to_drain:
        return plan
    return update_plan(plan, now, draining=tuple(dict.fromkeys((*plan.draining, *plan.to_drain))), to_drain=())


def round_members(plan: Plan, nodes: Nodes) -> list[tuple[Member, KnownNode | None]]:
    """The members of the plan's round with what is known of each; None for one that was never here."""
    return [(member, nodes.get(member.key)) for member in plan.members]


def disconnects_resolved_at(members: RoundMembers, now: float) -> float | None:
    """When the last member whose connection has just broken is back or lost; None when there is no such member."""
    broken = [
        state for _, state in members if state is not None and state.lost_at is not None and not state.is_draining
    ]
    return max((state.lost_at for state in broken if state.lost_at is not None and now < state.lost_at), default=None)


def _complete(
    rules: JobRules, plan: Plan, nodes: Nodes, alive: list[KnownNode], size: int, now: float
) -> Deadline | None:
    """When it is known which nodes take part in the next round, if none joins or leaves before."""
    # A disconnected member keeps its rank until it is declared lost, so it is waited for in any case.
    found = [*deadline_if(disconnects_resolved_at(round_members(plan, nodes), now), DeadlineReason.LOST)]
    if size < rules.max_size:
        found += [
            Deadline(state.lost_at, DeadlineReason.LOST)
            for state in nodes.values()
            if state.lost_at is not None and not state.is_draining
        ]
        if _is_first(plan):
            last_call = max(state.joined_at for state in alive) + rules.last_call_timeout
            found.append(Deadline(last_call, DeadlineReason.LAST_CALL))
    # After the first round all live nodes are known, so there is no last call for nodes that may never come.
    return max(found, key=lambda deadline: deadline.at, default=None)


def _short_of_nodes(rules: JobRules, plan: Plan, alive: list[KnownNode], waited: float) -> Reasons:
    hosts = display_names(plan, alive)
    lacks_quorum = is_quorum_lacking(plan, alive)
    least = max(rules.min_size, plan.quorum) if lacks_quorum else rules.min_size
    here = Code.NO_NODE_CAME(seconds=waited, least=least)
    if hosts:
        here = Code.TOO_FEW_NODES(seconds=waited, number=len(hosts), least=least, names=shown_names(hosts))
    before = () if _is_first(plan) else plan.reasons
    quorum = (Code.QUORUM(number=plan.quorum),) if lacks_quorum else ()
    return chain(before, here, *quorum, *missing_nodes(rules, plan, alive))
