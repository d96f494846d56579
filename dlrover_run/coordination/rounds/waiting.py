"""What a node without ranks waits for: which nodes are here, which are missing, and for how long. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Wait, seconds_left
from dlrover_run.coordination.gate import Gate, Step
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.assignment import Waiting
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import is_quorum_lacking
from dlrover_run.coordination.rounds.ranks import display_names
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names
from dlrover_run.words.text import node_name


def wait_for_round(
    rules: JobRules,
    gate: Gate,
    plan: Plan,
    alive: list[KnownNode],
    nodes: Nodes,
    of_gate: Wait | None,
    deadlines: Sequence[Deadline],
    now: float,
) -> Waiting:
    """What every node waits for while no round runs. `alive` are those of which it is formed."""
    own = None if of_gate is None else of_gate(deadlines, now)
    if own is not None:
        return own
    wanted = f"{rules.min_size}" if rules.min_size == rules.max_size else f"{rules.min_size} to {rules.max_size}"
    here = Code.NODES_OF(number=len(alive), wanted=wanted)
    hosts = shown_names(display_names(plan, alive))
    named = (Code.NAMED(names=hosts),) if hosts else ()
    quorum = (Code.QUORUM(number=plan.quorum),) if is_quorum_lacking(plan, alive) else ()
    missing = missing_nodes(rules, plan, alive)
    reasons = chain(gate.removals(plan, nodes), here, *named, *quorum, *missing)
    return Waiting(reasons, seconds_left(deadlines, now))


def is_full(rules: JobRules, plan: Plan) -> bool:
    """Whether a round runs that has as many nodes as it may have."""
    return plan.phase is PlanPhase.TRAINING and len(plan.members) >= rules.max_size


def wait_as_spare(
    rules: JobRules,
    gate: Gate,
    plan: Plan,
    nodes: Nodes,
    watched: Step | None,
    deadlines: Sequence[Deadline],
    now: float,
) -> Waiting:
    """What a node without ranks waits for while a round runs. `watched` is the step of the gate."""
    train = Code.TRAINING(number=len(plan.members))
    joins_in = seconds_left(deadlines, now, {DeadlineReason.SCALE_UP})
    checked_in = None if watched is None else seconds_left(watched.deadlines, now)
    alone, joining = (None, None) if watched is None or watched.spare is None else watched.spare
    if joins_in is not None:
        joins = Code.JOINS_NEXT_ROUND() if plan.change is None else Code.JOINS_AT_CHECKPOINT()
        return Waiting((train, (joining if checked_in is not None else None) or joins), joins_in)
    if checked_in is not None and alone is not None:
        return Waiting((train, alone), checked_in)
    in_round = {member.key for member in plan.members}
    alive = gate.healthy(plan, nodes)
    others = [state for state in alive if state.report.key not in in_round]
    preparing = sum(state.report.preparing for state in others)
    if preparing and rules.size(len(alive)) > len(plan.members):
        return Waiting((train, Code.NODES_PREPARE(number=preparing)))
    spares = len(others)
    is_resized = plan.desired is not None or plan.wanted_nodes  # Then --nnodes counts this node too.
    if not rules.spares and not is_resized and is_full(rules, plan):
        return Waiting((train, Code.NOT_REQUESTED()))
    spare = Code.SPARE_OF(number=spares, wanted=rules.spares) if rules.spares else Code.SPARE(number=spares)
    return Waiting((train, spare))


def missing_nodes(rules: JobRules, plan: Plan, alive: list[KnownNode]) -> Reasons:
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
