"""Judges each failure of a job: what the next round changes, which node leaves, or why no round follows."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import Failure, Member, NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules, applies
from dlrover_run.features.experiments.advise import Advice, Possible, Verdict, advise
from dlrover_run.features.experiments.model import (
    MAX_TRIALS,
    Alike,
    Cause,
    Change,
    ExperimentsAssignment,
    ExperimentsReport,
    ExperimentsState,
    FailedWorker,
    NodeOrder,
    Removed,
    Trial,
)
from dlrover_run.features.experiments.text import ExperimentsCode
from dlrover_run.words.reasons import Reasons
from dlrover_run.words.text import node_name


class ExperimentsObserver(Observer):
    """Proposes; the engine forms the round, charges the restart and ends the job."""

    def __init__(self, rules: JobRules) -> None:
        self._rules = rules
        # Workers that keep their processes keep their devices and ranks.
        self._may_move = not applies(rules.parts, "survivors")

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation:
        """Once for each failure, when it has ended its round and the next one has not begun."""
        before = ExperimentsState.get(plan.parts)
        state = replace(before, trials=tuple(_completed(trial, nodes, plan) for trial in before.trials))
        if plan.phase is PlanPhase.TRAINING:
            state = replace(state, exchange=(), note=())
        elif plan.failure is not None and before.judged != plan.key:
            state = self._judge(replace(state, judged=plan.key), plan, plan.failure, nodes, now)
        return Observation() if state == before else Observation(state)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, ExperimentsAssignment]:
        """To each node with ranks the order of its devices, and to a removed one why it leaves."""
        state = ExperimentsState.get(plan.parts)
        by_node = {one.node: one.order for one in state.orders}
        found = {key: ExperimentsAssignment(by_node.get(key.node_id, ())) for key in ranks}
        return found | {one.key: ExperimentsAssignment(refused=one.why) for one in state.removed}

    def _judge(
        self, state: ExperimentsState, plan: Plan, failure: Failure, nodes: Nodes, now: float
    ) -> ExperimentsState:
        place = failure.node_rank
        if place is None or place >= len(plan.members):
            return state
        member = plan.members[place]
        report = _report(member.key, nodes)
        failed = None if report is None else report.failed
        if report is None or failed is None or failed.key != plan.key:
            # Not a kind that is compared.
            return state
        trial = _trial(plan, member, failed, now)
        trials = (*state.trials, _completed(trial, nodes, plan))[-MAX_TRIALS:]
        state = replace(state, trials=trials)
        other = self._other(plan, place, nodes)
        possible = Possible(devices=self._may_move and report.devices, nodes=other is not None)
        advice = advise(trials, (), possible)
        if advice.verdict is not None:
            return self._conclude(state, advice.verdict, plan)
        return _change(state, advice, trial, place, other, plan)

    def _other(self, plan: Plan, place: int, nodes: Nodes) -> int | None:
        """The member with which the one at that place can exchange its ranks: the next one with as many workers. None
        where the user has fixed the ranks."""
        if not self._may_move or self._rules.store is not None:
            return None
        member, size = plan.members[place], len(plan.members)
        candidates = [(place + step) % size for step in range(1, size)]
        return next((at for at in candidates if _may_exchange(plan.members[at], member, nodes)), None)

    def _conclude(self, state: ExperimentsState, verdict: Verdict, plan: Plan) -> ExperimentsState:
        reasons = _reasons(verdict, state.trials, plan)
        if verdict.stops:
            left = max(1, self._rules.max_restarts - plan.restart_count + 1)
            return replace(state, last=(*reasons, ExperimentsCode.STOPPED(left=left)))
        # What was learned is used up: the node in its place is not blamed for it.
        state = replace(state, trials=(), note=reasons)
        removed = [member for member in plan.members if member.node_id == verdict.removes]
        return replace(state, removed=(*state.removed, *(Removed(*member.key, reasons) for member in removed)))


def _trial(plan: Plan, member: Member, failed: FailedWorker, now: float) -> Trial:
    return Trial(
        round=plan.key.number,
        kind=failed.kind,
        rank=failed.rank,
        local_rank=failed.local_rank,
        node=member.node_id,
        host=member.host,
        device=failed.device,
        workers=sum(each.workers for each in plan.members),
        local=member.workers,
        at=now,
        depth=failed.depth,
        resumed=failed.resumed,
    )


def _completed(trial: Trial, nodes: Nodes, plan: Plan) -> Trial:
    """The trial with what nodes have reported since of the workers that failed with it."""
    if trial.alike is Alike.NODES:
        return trial
    alike: dict[str, bool | None] = {}
    for key in nodes:
        report = _report(key, nodes)
        failed = None if report is None else report.failed
        if failed is not None and failed.key.number == trial.round and failed.kind.digest == trial.kind.digest:
            alike[key.node_id] = failed.several
    if len(alike) > 1:
        return replace(trial, alike=Alike.NODES)
    several = alike.get(trial.node)
    if several is None:
        return trial
    return replace(trial, alike=Alike.NODE if several else Alike.ONE)


def _report(key: NodeKey, nodes: Nodes) -> ExperimentsReport | None:
    node = nodes.get(key)
    return None if node is None else ExperimentsReport.find(node.report.parts)


def _may_exchange(one: Member, other: Member, nodes: Nodes) -> bool:
    here = [nodes[member.key] for member in (one, other) if member.key in nodes]
    free = len(here) == 2 and all(ExperimentsReport.get(node.report.parts).ranks for node in here)
    return free and (one.workers, one.role) == (other.workers, other.role)


def _change(
    state: ExperimentsState, advice: Advice, trial: Trial, place: int, other: int | None, plan: Plan
) -> ExperimentsState:
    """The state with the change that is proposed, and its line."""
    earlier = [each.at for each in state.trials[:-1] if each.kind.digest == trial.kind.digest]
    seconds = trial.at - earlier[-1] if earlier else 0.0
    if advice.change is Change.DEVICES:
        one, two = trial.local_rank, (trial.local_rank + 1) % trial.local
        order = list(next((each.order for each in state.orders if each.node == trial.node), range(trial.local)))
        order[one], order[two] = order[two], order[one]
        others = tuple(each for each in state.orders if each.node != trial.node)
        ranks = sorted((trial.rank, trial.rank - one + two))
        note = ExperimentsCode.DEVICES(seconds=seconds, one=ranks[0], other=ranks[1])
        return replace(state, orders=(*others, NodeOrder(trial.node, tuple(order))), note=(note,))
    if advice.change is Change.NODES and other is not None:
        here, there = plan.members[place], plan.members[other]
        names = [node_name(member.host, at) for member, at in ((here, place), (there, other))]
        note = ExperimentsCode.NODES(seconds=seconds, one=names[0], other=names[1])
        return replace(state, exchange=(here.key, there.key), note=(note,))
    return state


def _reasons(verdict: Verdict, trials: tuple[Trial, ...], plan: Plan) -> Reasons:
    suspect, last = verdict.suspect, trials[-1]
    counts = {"there": verdict.there, "failures": verdict.failures}
    alike = [each for each in trials if each.kind.digest == last.kind.digest]
    match suspect.cause:
        case Cause.GPU | Cause.NODE:
            hosts = {member.node_id: node_name(member.host, rank) for rank, member in enumerate(plan.members)}
            name = hosts.get(suspect.node, suspect.node)
            if suspect.cause is Cause.GPU:
                return (ExperimentsCode.GPU(device=suspect.device, node=name, **counts),)
            if last.device and {(each.node, each.device) for each in alike} == {(last.node, last.device)}:
                return (ExperimentsCode.NODE_DEVICE(device=last.device, node=name, failures=verdict.failures),)
            return (ExperimentsCode.NODE(node=name, **counts),)
        case Cause.RANK:
            found = [ExperimentsCode.RANK(rank=suspect.number, **counts)]
            if len({(each.node, each.device) for each in alike if each.rank == suspect.number}) > 1:
                found.append(ExperimentsCode.MOVED())
            cause = ExperimentsCode.OF_RANK()
        case Cause.CHECKPOINT if suspect.number:
            return (ExperimentsCode.FROM_CHECKPOINT(step=suspect.number),)
        case _:
            found, cause = [ExperimentsCode.CODE(failures=verdict.failures)], ExperimentsCode.OF_CODE()
    if last.step is not None and len({each.step for each in alike}) == 1:
        found.append(ExperimentsCode.AT_STEP(step=last.step))
    found.append(cause)
    if Cause.CHECKPOINT in (suspect.cause, *verdict.perhaps):
        found.append(ExperimentsCode.OR(names="the checkpoint"))
    return tuple(found)


OBSERVER = ExperimentsObserver
