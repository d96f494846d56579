"""The virtual job whose program is torch: rounds of nodes with ranks, and the node check."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action
from dlrover_run.coordination.records.round import Failure, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.model import HealthStatus, NodeCheckReport
from dlrover_run.features.node_check.rules import NodeCheckRules
from support.node_truth import Truth
from support.policy_parts import check_part, check_report, check_state, fold
from support.virtual import COMMON_EVENTS, COMMON_FACTS, VirtualJob

KILLED = Failure(rank=1, host="b", exit_text="was killed by SIGKILL", node_rank=1)
LOST_PEER = Failure(
    rank=0, host="a", exit_text="raised RuntimeError: Connection closed by peer", lost_peer=True, node_rank=0
)


class TorchJob(VirtualJob):
    """A job whose nodes accept their assignments at once, unless they are deaf.

    Nodes keep their state when another coordinator takes over. With a `truth` they compute when they join, and do the
    tasks of a node check, unless they are *mute* (they report nothing about tasks).
    """

    def __init__(self, rules: JobRules, epoch: int = 5, truth: Truth | None = None) -> None:
        super().__init__(rules, epoch)
        self.truth = truth
        self.mute: set[str] = set()

    @property
    def ranks(self) -> list[str]:
        return [member.node_id for member in self.plan.members]

    def round(self) -> list[str]:
        """Return the number and the nodes of the round that trains, after the phase of a job that does not train."""
        phase = [] if self.plan.phase is PlanPhase.TRAINING else [self.plan.phase.value]
        return [*phase, str(self.plan.key.number), *self.ranks]

    def come(self, *names: str, incarnation: str = "1", **changes: object) -> None:
        """Nodes join, all at the same time."""
        for name in names:
            status = NodeReport(
                node_id=name,
                incarnation=incarnation,
                host=name,
                address=f"{name}.net",
                port=next(self._ports),
                workers=2,
            )
            if self.truth is not None:
                computed = None if name in self.mute else self.truth.compute(status.address)
                status = msgspec.structs.replace(
                    status, parts=(NodeCheckReport(compute_result=computed, check_port=1),)
                )
            self.statuses[name] = msgspec.structs.replace(status, **fold(NodeCheckReport, changes, status.parts))
            self.away.discard(name)
            self.coordinator.receive(self.statuses[name], self.now)
        self.settle()

    def report(self, name: str, **changes: object) -> None:
        """As `send`, with the fields of the node check by name too."""
        self.send(name, **fold(NodeCheckReport, changes, self.statuses[name].parts))

    def report_phase(
        self, name: str, phase: NodePhase, failure: Failure | None = None, progressed: bool = False
    ) -> None:
        """Report the phase of a node in the round in which it has ranks."""
        self.report(name, phase=phase, failure=failure, progressed=progressed)

    def report_leaving(self, name: str, phase: NodePhase) -> None:
        self.report_phase(name, phase)

    def mark(self, *names: str) -> None:
        """Workers of these nodes mark a checkpoint, which their agents report as the product's do."""
        for name in names:
            self.report(name, saves=True, saved_for=self.assignment(name).change or self.statuses[name].saved_for)

    def fail(self, name: str, failure: Failure = KILLED, progressed: bool = True) -> None:
        self.report_phase(name, NodePhase.FAILED, failure, progressed)

    def succeed(self, *names: str) -> None:
        for name in names:
            self.report_phase(name, NodePhase.SUCCEEDED, progressed=True)

    def works(self, name: str) -> bool:
        assignment = self.assignment(name)
        health = check_part(assignment).health
        return assignment.waiting is None or (health is not None and health.dismissed)

    def answer(self) -> bool:
        return any(self.take(name) or self.try_task(name) for name in self.present if name not in self.deaf)

    def take(self, name: str) -> bool:
        """Let a node receive its assignment and report. Return whether that changed anything."""
        status, wanted = self.statuses[name], self.assignment(name)
        if (wanted.key, wanted.epoch, wanted.ranks) == (status.known_round, status.epoch, status.ranks) or self.is_over:
            return False
        moved = wanted.ranks is None or status.ranks is None or wanted.ranks.key != status.ranks.key
        status = msgspec.structs.replace(
            status,
            known_round=wanted.key,
            epoch=wanted.epoch,
            ranks=wanted.ranks,
            port=next(self._ports),
            restart_count=wanted.restart_count,
        )
        if moved and status.phase not in (NodePhase.LEAVING, NodePhase.LEFT):
            phase = NodePhase.WAITING if wanted.ranks is None else NodePhase.RUNNING
            status = msgspec.structs.replace(
                status, phase=phase, failure=None, progressed=False, saves=False, saved_for=None
            )
        self.statuses[name] = status
        self.coordinator.receive(status, self.now)
        return True

    def try_task(self, name: str) -> bool:
        """Let a node do its task of a node check. Return whether there was a new task."""
        status, task = self.statuses[name], check_part(self.assignment(name)).check_task
        if self.truth is None or task is None or name in self.mute:
            return False
        before = after = check_report(status)
        if task.compute and (before.compute_result is None or before.compute_result.key != task.key):
            after = msgspec.structs.replace(after, compute_result=self.truth.compute(status.address, task.key))
        if task.links and (before.link_result is None or before.link_result.key != task.key):
            after = msgspec.structs.replace(after, link_result=self.truth.link(status.address, task))
        if after == before:
            return False
        self.statuses[name] = msgspec.structs.replace(status, parts=(after,))
        self.coordinator.receive(self.statuses[name], self.now)
        return True

    def drain(self, name: str) -> None:
        """An operator asks this node to leave."""
        self.request(Action.DRAIN, name)

    def scale(self, size: str) -> None:
        """An operator asks for another size, N or MIN:MAX."""
        least, _, most = size.rpartition(":")
        self.request(Action.SCALE, min_nodes=int(least or 0), max_nodes=int(most))

    def leave(self, *names: str) -> None:
        for name in names:
            self.report_phase(name, NodePhase.LEFT)
            del self.statuses[name]

    def receive_again(self, name: str) -> None:
        """Let a deaf node receive the latest assignment."""
        self.deaf.discard(name)
        self.settle()

    def succeed_by_another(self, epoch: int, with_journal: bool, after: float = 3.0) -> None:
        """Replace the coordinator by a successor with another clock, to which no node is connected yet."""
        self.now += after + 5e6
        self.coordinator = Coordinator(self.rules, self.now, epoch, self.stored[-1] if with_journal else None)
        self.away = set(self.statuses)

    def ranks_of(self, name: str) -> RankAssignment:
        """Return the ranks of a node in the current round. It must have some."""
        ranks = self.coordinator.ranks(self.key(name))
        assert ranks is not None, f"{name} has no ranks"
        return ranks

    def assignment(self, name: str) -> Assignment:
        """Return the assignment of a node, which must have the fields of one state only."""
        given = self.coordinator.assignment(self.key(name), self.waiting)
        assert given.ranks is None or (given.phase is PlanPhase.TRAINING and given.waiting is None), given
        assert given.waiting is None or given.phase not in OVER, given
        return given

    @property
    def waiting(self) -> Waiting:
        """Return what nodes without ranks receive, in whole seconds, because two clocks never agree on the last
        digit."""
        waiting = self.coordinator.waiting(self.now)
        return waiting if waiting.seconds is None else msgspec.structs.replace(waiting, seconds=round(waiting.seconds))


EVENTS: dict[str, Callable[[TorchJob, list[str]], object]] = {
    **COMMON_EVENTS,
    "come": lambda job, names: job.come(*names),
    "come_ranked": lambda job, words: [
        job.come(name, preferred_rank=int(rank)) for name, _, rank in (word.partition("=") for word in words)
    ],
    "replace": lambda job, names: job.come(*names, incarnation="2"),
    "succeed": lambda job, names: job.succeed(*names),
    "mark": lambda job, names: job.mark(*names),
    "scale": lambda job, sizes: [job.scale(size) for size in sizes],
    "drain": lambda job, names: [job.drain(name) for name in names],
    "fail": lambda job, names: [job.fail(name) for name in names],
    "fail_early": lambda job, names: [job.fail(name, progressed=False) for name in names],
    "lose_peer": lambda job, names: [job.fail(name, LOST_PEER) for name in names],
    "listen": lambda job, _: job.deaf.clear(),
    "receive": lambda job, names: [job.receive_again(name) for name in names],
    "mute": lambda job, names: job.mute.update(names),
    "unmute": lambda job, names: (job.mute.difference_update(names), job.settle()),
    "come_preparing": lambda job, names: job.come(*names, preparing=True),
    "prepared": lambda job, names: [job.report(name, preparing=False) for name in names],
    "come_computed": lambda job, names: job.come(*names, compute_result=Truth().compute("")),
    "come_unchecked": lambda job, names: (job.mute.update(names), job.come(*names, check_port=0)),
    "compute": lambda job, names: [job.report(name, compute_result=Truth().compute("")) for name in names],
    "gone": lambda job, names: job.leave(*names),
    "successor": lambda job, kind: job.succeed_by_another(9, with_journal=kind == ["journal"]),
}
"""The events of a script, with the names of nodes or a time. A node that is `gone` does not come back; a node that has
`come_computed` reports a good measurement when it joins, and one that has come with `come_preparing` is ready once it
is `prepared`."""

FACTS: dict[str, Callable[[TorchJob], list[str]]] = {
    **COMMON_FACTS,
    "round": lambda job: job.round(),
    "formed": lambda job: [str(job.plan.key.epoch), str(job.plan.key.number), *job.ranks],
    "processes": lambda job: [f"{member.node_id}.{member.incarnation}" for member in job.plan.members],
    "restarts": lambda job: [str(job.plan.restart_count)],
    "failed": lambda job: [] if job.plan.failure is None else [job.plan.failure.host],
    "checks": lambda job: [str(check_state(job.plan).check_count)],
    "check": lambda job: [] if check_state(job.plan).check is None else ["runs"],
    "named": lambda job: [
        f"{one.node_id}={one.status.value}"
        for one in check_state(job.plan).health
        if one.status is not HealthStatus.PASSED
    ],
    "known": lambda job: [f"{one.node_id}.{one.incarnation}" for one in check_state(job.plan).health],
    "dismissed": lambda job: [one.node_id for one in check_state(job.plan).health if one.dismissed],
    "drained": lambda job: [key.node_id for key in job.plan.draining],
}
"""The facts that a script may check. A training `round` has its number and its nodes by rank; `formed` has the epoch of
the coordinator before both. `named` are the nodes that did not pass a node check, `known` the processes that it knows
of."""


TorchJob.EVENTS, TorchJob.FACTS = EVENTS, FACTS


def rules(least: int, most: int, **changes: object) -> JobRules:
    """Return rules with a restart budget, unless a test sets others."""
    plain = {"min_nodes": least, "max_nodes": most, "max_restarts": 3}
    return JobRules(**{**plain, **fold(NodeCheckRules, changes)})  # type: ignore[arg-type]
