"""The invariants of every run of a torch job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.policy_parts import check_part, check_rules, check_state

from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import (
    Failure,
    NodeKey,
    PlannedChange,
    RankAssignment,
    RoundKey,
)
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.node_check.decision.diagnosis import ENOUGH_WITNESSES, MIN_WITNESSES
from dlrover_run.features.node_check.decision.model import HealthStatus, NodeCheck, NodeCheckState, NodeHealth
from dlrover_run.features.node_check.decision.pairing import MAX_ROUNDS
from dlrover_run.features.node_check.decision.round import CHECK_MARGIN, key_of
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.words.reasons import Code
from simulation.invariants import Invariants
from simulation.timeline import demand
from simulation.torch.checks import ALLOWED_STATUSES, HOPELESS, Health
from simulation.torch.newcomer_invariants import NewcomerInvariants, preparing_newcomers, sized


class TorchInvariants(Invariants):
    """Checks rounds, ranks, the restart budget and the node check. `found_kinds` has the kinds of problems that a
    check had to find."""

    def __init__(self, rules: JobRules, durable: bool, nodes_stay: bool, health: Health) -> None:
        super().__init__(rules, durable, nodes_stay)
        self.health = health
        self.newcomers = NewcomerInvariants(rules)
        self._charged: set[RoundKey] = set()
        self._charge_times: list[float] = []
        self._taken: dict[RoundKey, tuple[int, int, str, int]] = {}
        self._assigned: dict[RoundKey, dict[int, tuple[NodeKey, int, int]]] = {}
        self._stores: dict[tuple[str, int], RoundKey] = {}
        self._numbers: dict[int, RoundKey] = {}
        self._held: dict[NodeKey, list[RoundKey | None]] = {}
        self._succeeded: set[tuple[RoundKey, NodeKey]] = set()
        self._checks: dict[tuple[int, int], float] = {}
        self._disturbed: set[tuple[int, int]] = set()
        self._marked_before: dict[PlannedChange, int] = {}
        self.marks: Mapping[RoundKey, int] = {}
        """How often the workers of a round have saved."""
        self.waited = 0
        """Planned changes that were made after a checkpoint, or at the deadline."""
        self.granted = 0
        """Requests of an operator that were carried out."""
        self._asking: list[OperatorRequest] = []
        self._asks_at_once = False
        self.blamed: set[RoundKey] = set()
        self.dismissed: set[NodeKey] = set()
        self.found_kinds: set[str] = set()
        self.rounds = 0
        self.restarts = 0
        self.checks = 0

    def _check_state(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        self._check_health(plan, after, present, now)
        checks = bool(check_rules(self._rules).check)
        self.newcomers.check(plan, after, present, now, is_slow=self.slow_disk, checks=checks)

    def _check_change(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        self._check_budget(plan, after, present)
        if after.phase is PlanPhase.FAILED:
            self._check_failure(plan, after, present, now)
        super()._check_change(plan, after, present, now)
        if after.key != plan.key and after.phase is PlanPhase.TRAINING:
            self._check_round(plan, after, present, now)
        elif after.key != plan.key:
            is_known = any(p.report.known_round == after.key for p in present.values())
            demand(
                is_known and not self._durable and bool(check_rules(self._rules).check),
                "no round number is skipped that no node knows",
            )
        self._check_planned_change(plan, after, present, now)
        self._check_rest(plan, after, present)
        if after.phase is PlanPhase.FINISHED:
            lacking = [m.host for m in plan.members if (plan.key, m.key) not in self._succeeded]
            demand(not lacking, f"a job is finished only when all workers of its last round succeeded, not {lacking}")

    def _check_health(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        """Check that a node check ends in time, and names the nodes with a problem, and no other node."""
        if not check_rules(self._rules).check:
            demand(NodeCheckState.find(after.parts) is None, "no node is checked without a reason")
            return
        before, state = check_state(plan), check_state(after)
        if state.check is not None:
            begun = self._checks.setdefault((after.epoch, state.check.key.number), now)
            longest = (MAX_ROUNDS + MIN_WITNESSES) * (check_rules(self._rules).check_timeout + CHECK_MARGIN)
            demand(now <= begun + longest, "a check comes to its end")
            if not all(
                (p := present.get(key_of(node))) and p.connected and not p.is_draining for node in state.check.nodes
            ):
                self._disturbed.add((after.epoch, state.check.key.number))
        demand(state.check is None or after.phase not in OVER, "a job that is over checks no node")
        for node_health in state.health:
            if node_health not in before.health:
                self._check_status(node_health)
        if before.check is not None and (state.check is None or state.check.key.number != before.check.key.number):
            self._check_what_must_be_found(before.check, after)
        self.checks += state.check_count > before.check_count

    def _check_status(self, node_health: NodeHealth) -> None:
        key, status = key_of(node_health), node_health.status
        kind = self.health.planted.get(key, "")
        demand(
            status in ALLOWED_STATUSES[kind],
            f"{node_health.host} is {kind or 'healthy'}, not a {status}: {node_health.reason}",
        )
        demand(not self.calm or kind != "flaky" or status is HealthStatus.PASSED, "one failure is no fault")
        leaves = status is HealthStatus.FAULT or (
            status is HealthStatus.STRAGGLER and bool(check_rules(self._rules).exclude_stragglers)
        )
        demand(node_health.dismissed == leaves, f"a {status} is dismissed or not as was asked for")

    def _check_what_must_be_found(self, check: NodeCheck, after: Plan) -> None:
        """If no node leaves during a check, and every node answers, it names all nodes that a comparison shows."""
        if not self.calm or (after.epoch, check.key.number) in self._disturbed:
            return
        kinds = {key_of(node): self.health.planted.get(key_of(node), "") for node in check.nodes}
        statuses = {key_of(node_health): node_health.status for node_health in check_state(after).health}
        for node in check.nodes:
            if node.already_passed or key_of(node) not in statuses:
                continue
            status = statuses[key_of(node)]
            kind = kinds[key_of(node)]
            others = [key_of(other) for other in check.nodes if kinds[key_of(other)] not in HOPELESS]
            alike = [
                key_of(other) for other in check.nodes if key_of(other) in others and other.workers == node.workers
            ]
            if kind == "cut" and not check.during_training:
                witnesses = sum(kinds[other] != "cut" for other in others)
                demand(
                    witnesses < ENOUGH_WITNESSES or status is HealthStatus.FAULT,
                    "a node that reaches no other node is found",
                )
                self.found_kinds.add(kind)
            slow = sum(kinds[other] == "slow" for other in alike)
            if kind == "slow" and (len(alike) == 2 > slow or slow < len(alike) - slow):
                demand(status is HealthStatus.STRAGGLER, "a node that computes slowly is found")
                self.found_kinds.add(kind)

    def _check_budget(self, plan: Plan, after: Plan, present: Nodes) -> None:
        failed = [p.report for p in present.values() if p.report.in_round(plan.key) and p.report.failure is not None]
        if not failed:
            demand(after.restart_count == plan.restart_count, "a change of membership costs no restart")
        if after.restart_count > plan.restart_count or (after.phase is PlanPhase.FAILED and after.failure is not None):
            self.blamed.add(plan.key)
        if after.restart_count == plan.restart_count:
            members = [present.get(member.key) for member in plan.members if not member.done]
            undisturbed = all(p is not None and p.connected and not p.is_draining for p in members)
            own = [failure for p in members if p and (failure := failure_in(p, plan.key)) and not failure.lost_peer]
            free = plan.phase is PlanPhase.TRAINING and undisturbed and own and after.phase is not PlanPhase.FAILED
            demand(not free or self.excuses(plan), "the failure of a worker costs a restart if no node left")
            return
        demand(after.restart_count == plan.restart_count + 1, "one failure costs one restart")
        demand(plan.phase is PlanPhase.TRAINING, "only a round that trains can fail")
        if not self._rules.restart_window:
            demand(after.restart_count <= self._rules.max_restarts, "no more restarts than were granted")

    def shown_size(self, requested: int) -> str:
        """The size that the status names after an operator has requested one."""
        return "" if requested == self._rules.max_nodes else str(requested)

    def asking(self, request: OperatorRequest) -> None:
        self._asking.append(request)
        self._asks_at_once = len(self._asking) > 1 or self._asks_at_once

    def answered(self, request: OperatorRequest, answer: JobStatus | AskFailed) -> None:
        """The answer comes once the job has the size that was requested, which another request may change at once."""
        alone = not self._asks_at_once
        self._asking.remove(request)
        self._asks_at_once = self._asks_at_once and bool(self._asking)
        if isinstance(answer, AskFailed):
            return
        self.granted += 1
        if request.action is Action.SCALE and alone:
            demand(
                answer.desired_nodes == self.shown_size(request.max_nodes), "a request that is granted is carried out"
            )

    def excuses(self, plan: Plan) -> bool:
        """Return whether a failure may end the round without a charge."""
        return False

    def _check_planned_change(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        """A planned change interrupts no round before its workers have saved or the deadline has passed."""
        if after.change is not None:
            self._marked_before.setdefault(after.change, self.marks.get(plan.key, 0))
        resized = Code.SCALED_UP.within(after.reasons) or Code.SCALED_DOWN.within(after.reasons)
        # The drain of a node that is lost interrupts nothing, nor does one in a round that ends meanwhile. Once workers
        # have succeeded no round is planned, and a drain begins at once.
        drained = (
            plan.phase is after.phase is PlanPhase.TRAINING
            and after.key == plan.key
            and not any(p.succeeded_in(plan.key) for p in present.values())
            and not any(member.done for member in plan.members)
            and any(
                key in present and not present[key].is_lost(now) for key in set(after.draining) ^ set(plan.draining)
            )
        )
        if not drained and (not resized or after.reasons == plan.reasons):
            return
        change, longest = plan.change, self._rules.scale_wait
        if change is None:
            saves = any(p.report.saves for p in present.values())
            demand(not saves or not longest, "a planned change waits for a checkpoint of a job that saves")
            return
        saved = self.marks.get(plan.key, 0) > self._marked_before.get(change, 0)
        demand(saved or now >= change.since + longest, "no round is interrupted before it has saved")
        self.waited += 1

    def _check_rest(self, plan: Plan, after: Plan, present: Nodes) -> None:
        """If all nodes stay, a round ends only by success, by a failure, or for a larger round."""
        if not self.nodes_stay or plan.phase is not PlanPhase.TRAINING or after.phase in OVER or self.over is not None:
            return
        if any(member.incarnation == "unknown" for member in plan.members):
            # Without a journal: the last master had sent the round only to some of them.
            return
        failed = any(p.report.failure is not None and p.report.in_round(plan.key) for p in present.values())
        checks = check_state(after).check is not None and not check_state(after).check.during_training
        # A policy acts before the larger round.
        grows = after.phase is PlanPhase.GATHERING and Code.SCALED_UP.within(after.reasons)
        resized = Code.RESIZED.within(after.reasons) and after.reasons != plan.reasons
        goes_on = checks or grows or resized or (after.phase is PlanPhase.TRAINING and after.key == plan.key)
        demand(failed or goes_on or len(after.members) > len(plan.members), "no round ends because its master was away")

    def _check_failure(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        rules = sized(self._rules, after)
        if any(p.has_left for p in present.values()) and all(p.has_left or p.is_lost(now) for p in present.values()):
            # The last nodes have left as they were requested to.
            return
        if plan.phase is PlanPhase.TRAINING:
            used = len(after.restart_times) if rules.restart_window else after.restart_count
            is_hopeless = 0 < rules.early_failure_limit <= after.early_failures
            demand(used >= rules.max_restarts or is_hopeless, "a job fails only when its restarts are used up")
            demand(after.failure is not None, "a job that failed has a reason")
            return
        patience = rules.pend_timeout if plan.key.number or check_state(after).check_count else rules.join_timeout
        demand(now >= plan.since + patience, "a job waits for its timeout")
        living = {key for key, p in present.items() if p.is_available} - dismissed_in(after) - set(after.draining)
        demand(not rules.size(len(living)), "a job with enough nodes does not fail for lack of nodes")
        missing = [member.host for member in plan.members if member.key not in living]
        demand(not missing or Code.MISSING.within(after.reasons), "a job that failed for lack of nodes names them")

    def _check_round(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        self.rounds += 1
        rules = sized(self._rules, after)
        demand(after.key > plan.key and after.key.number == plan.key.number + 1, "rounds are numbered one by one")
        demand(after.key.epoch == after.epoch, "a round carries the epoch of the coordinator that formed it")
        nodes = len(after.members)
        demand(
            rules.min_nodes <= nodes <= rules.max_nodes and nodes % rules.node_unit == 0,
            f"{nodes} nodes are no size of a round",
        )
        able = {key for key, p in present.items() if p.is_available} - set(after.draining)
        if check_rules(rules).check:
            able &= {key_of(node_health) for node_health in check_state(after).health if not node_health.dismissed}
        could = able
        if plan.phase is PlanPhase.TRAINING and Code.SCALED_UP.within(after.reasons):
            # Only a round that has ended anyway takes in a node that still prepares.
            could = able - {state.report.key for state in preparing_newcomers(plan, present)}
        living = min(len(could), rules.max_nodes)
        if plan.wanted_nodes:
            least = -(-rules.min_nodes // rules.node_unit) * rules.node_unit
            living = min(living, max(plan.wanted_nodes, least))
        demand(nodes == living // rules.node_unit * rules.node_unit, f"{nodes} nodes train while {living} could")
        keys = [member.key for member in after.members]
        demand(len({key.node_id for key in keys}) == nodes, "no node has two ranks")
        for key in keys:
            p = present.get(key)
            demand(key in able, "no node trains unchecked, or after it was dismissed or asked to leave")
            demand(not self._durable or key not in self.dismissed, "a dismissed node never trains")
            demand(self.health.planted.get(key) not in HOPELESS, "a node that cannot compute never trains")
            demand(p is not None and p.connected, "only a connected node gets ranks")
            demand(
                p is not None and p.report.phase not in (NodePhase.LEAVING, NodePhase.LEFT),
                "a leaving node gets no ranks",
            )
        before = {member.key: rank for rank, member in enumerate(plan.members)}
        for rank, key in enumerate(keys):
            old = before.get(key, nodes)
            wished = present[key].report.preferred_rank == rank and (
                rank >= len(plan.members) or plan.members[rank].key not in keys
            )
            demand(old >= nodes or old == rank or wished, f"{key.node_id} survives as rank {old} and is given {rank}")
        for member in plan.members:
            p = present.get(member.key)
            suspect = p is not None and not p.connected and not p.is_lost(now) and not p.is_draining
            demand(not suspect, "no round is formed while it is unknown whether a member lives")
        if any(p.succeeded_in(plan.key) for p in present.values()) and plan.phase is PlanPhase.TRAINING:
            gone = [m for m in plan.members if m.key not in present or not present[m.key].is_available]
            failed = any(p.report.failure is not None and p.report.in_round(plan.key) for p in present.values())
            demand(bool(gone) or failed, "no round is started for a newcomer after the first success")
        check_ranks(list(rank_assignments(after).values()))

    def storing(self, before: Plan | None, after: Plan, now: float) -> None:
        self.dismissed |= dismissed_in(after)
        if before is None:
            # It may belong to another job of that name.
            self._charge_times.clear()
            return
        if after.restart_count == before.restart_count:
            return
        if (not self._durable and after.epoch != before.epoch) or before.key == RoundKey():
            # The count of a plan that was lost, as the nodes know it.
            return
        self.restarts += 1
        demand(before.key not in self._charged, f"the failure of round {before.key.number} is charged once")
        self._charged.add(before.key)
        window = self._rules.restart_window
        if window and not self.slow_disk:
            self._charge_times = [time for time in self._charge_times if now < time + window] + [now]
            demand(len(self._charge_times) <= self._rules.max_restarts, "no more restarts in the window than granted")

    def sending(self, known: Plan | None, wanted: Assignment) -> None:
        part = check_part(wanted)
        if part.check_task is not None or part.health is not None:
            demand(known is not None, "a check is stored before it is sent to a node")
            assert known is not None
            state, task = check_state(known), part.check_task
            asked = state.check is not None and task is not None and state.check.key == task.key
            demand(asked or part.check_task is None, "a check is stored before it is sent to a node")
            demand(
                part.health is None or part.health in state.health, "a result of a check is stored before it is sent"
            )
        super().sending(known, wanted)

    def taking(self, key: NodeKey, wanted: Assignment) -> None:
        super().taking(key, wanted)
        ranks = wanted.ranks
        if wanted.phase not in OVER:
            held = self._held.setdefault(key, [])
            if not held or held[-1] != (ranks and ranks.key):
                demand(ranks is None or ranks.key not in held, "no node loses its ranks and gets them back")
                held.append(ranks and ranks.key)
        if ranks is None:
            return
        layout = (ranks.nodes, ranks.world_size, ranks.store_address, ranks.store_port)
        demand(self._taken.setdefault(ranks.key, layout) == layout, f"two worlds in round {ranks.key}")
        others = self._assigned.setdefault(ranks.key, {})
        mine = (key, ranks.first_rank, ranks.workers)
        demand(others.setdefault(ranks.node_rank, mine) == mine, f"two nodes with rank {ranks.node_rank}")
        taken = sorted((first, first + workers) for _, first, workers in others.values())
        apart = all(taken[index - 1][1] <= taken[index][0] for index in range(1, len(taken)))
        demand(apart and taken[-1][1] <= ranks.world_size, "two workers with one rank")
        if self._rules.store is None:
            store = (ranks.store_address, ranks.store_port)
            demand(self._stores.setdefault(store, ranks.key) == ranks.key, f"two rounds at the store {store}")
        if self._durable and self.over is None:
            demand(self._numbers.setdefault(ranks.key.number, ranks.key) == ranks.key, "two rounds of one number")

    def admitting(self, status: NodeReport, present: Nodes) -> None:
        super().admitting(status, present)
        known = present[status.key].report
        demand(known.preparing == status.preparing, "a coordinator knows which nodes prepare")

    def succeeding(self, key: NodeKey, ranks: RankAssignment) -> None:
        """Note that all workers of a node have really succeeded."""
        self._succeeded.add((ranks.key, key))


def dismissed_in(plan: Plan) -> set[NodeKey]:
    """Return the nodes that a check has dismissed."""
    return {key_of(node_health) for node_health in check_state(plan).health if node_health.dismissed}


def failure_in(p: KnownNode, key: RoundKey) -> Failure | None:
    """Return the reason of the failure of a node's workers in that round, if they failed."""
    failed = p.report.phase is NodePhase.FAILED and p.report.in_round(key) and not p.succeeded_in(key)
    return p.report.failure if failed else None


def check_ranks(world: Sequence[RankAssignment]) -> None:
    """Check that ranks of nodes and of workers are dense and unique, in the world and in each role."""
    next_rank = 0
    for rank, ranks in enumerate(world):
        demand(ranks.node_rank == rank and ranks.first_rank == next_rank, "ranks are dense and unique")
        demand(ranks.nodes == len(world), "every node knows the number of nodes")
        next_rank += ranks.workers
    demand(all(ranks.world_size == next_rank for ranks in world), "every node knows the world size")
