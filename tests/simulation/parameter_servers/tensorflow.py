"""TensorFlow processes as far as coordination sees them: they start, wait for each other, train, save and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.timeline import demand
from tf_ps_runner.cluster.model import EndCause, PlannedTask, Role, TaskEnd

if TYPE_CHECKING:
    from simulation.parameter_servers.nodes import ServerNode as Node
    from simulation.parameter_servers.program import ServersProgram as World

SUCCESS = TaskEnd(EndCause.SUCCESS, "exited with code 0")
LEFT = TaskEnd(EndCause.RESHAPED, "left, for the cluster has changed")
STEP = 0.2
"""Seconds between two steps of each process that trains."""

SAVE_EACH = 3.0
"""Seconds between two checkpoints."""


@dataclass
class Disk:
    """The checkpoints of the job: the step of the newest checkpoint, 0 before the first, and the most that any chief
    has saved. A chief on a node that is cut off may save an older step after a newer one."""

    step: int = 0
    most: int = 0


@dataclass
class Process:
    """One process: the task that it was started for, and its progress. The `model` of a server is the version of the
    model that it holds a part of (None before that), and the first server keeps the step of the model."""

    world: World
    node: Node
    task: PlannedTask
    servers: tuple[str, ...]
    address: str
    alive: bool = True
    ready: bool = False
    trains: bool = False
    step: int = -1
    saved: int = -1
    restored: int = -1
    near_memory_limit: bool = False
    model: int | None = None
    model_step: int = 0
    hangs: bool = False
    saved_at: float = 0.0
    on_end: Callable[[TaskEnd], None] = field(default=lambda end: None)

    def begin(self) -> None:
        random = self.world.timeline.random
        delay = random.choice((0.05, 0.05, 0.3, random.uniform(0.5, 4)))
        self.world.timeline.after(delay, self._boot)

    def kill(self) -> None:
        self.alive = False

    def end(self, how: TaskEnd) -> None:
        """End the process, and notify its agent of its exit."""
        if self.alive:
            self.alive = False
            self.on_end(how)

    def _boot(self) -> None:
        if not self.alive or self.hangs:
            return
        if self.task.role is Role.CHIEF:
            self._restore()
        elif self.task.role is Role.WORKER:
            self._wait_at_gate()
        else:
            self._become_ready()
            if self.task.role is Role.EVALUATOR:
                self._evaluate()

    def _become_ready(self) -> None:
        self.ready = True
        self.node.publish()

    def _again(self, step: Callable[[], None]) -> None:
        jitter = self.world.timeline.random.uniform(0.5, 1.5)
        self.world.timeline.after(STEP * jitter, lambda: step() if self.alive and not self.hangs else None)

    def _peers(self) -> list[Process] | None:
        """Return the servers of its `TF_CONFIG` if each of them answers and can be reached."""
        found = [self.world.listening.get(address) for address in self.servers]
        peers = [one for one in found if one is not None and one.alive and one.ready and not one.hangs]
        if len(peers) < len(self.servers) or not all(self.node.talks_to(one.node) for one in peers):
            return None
        return peers

    def _restore(self) -> None:
        peers = self._peers()
        if peers is None:
            self._again(self._restore)
            return
        version = self.task.version
        if self.node.stale and any(one.task.version != version for one in peers):
            # It was cut off, and does not know yet that it was replaced. What it would do then to servers that have
            # the addresses of its own is left out here: it would take over their model, or restore the same checkpoint.
            self._again(self._restore)
            return
        for one in peers:
            demand(one.task.version == version, f"{self.task.key} meets a server of version {one.task.version}")
            demand(one.model in (None, version), f"{self.task.key} begins with what was left of version {one.model}")
        if any(one.model is None for one in peers):
            peers[0].model_step = self.world.disk.step
            self.world.cluster_invariants.restored(self, self.world.disk.step)
        for one in peers:
            one.model = version
        self.restored = self.step = peers[0].model_step
        self.world.cluster_invariants.chief_ready(self)
        self._become_ready()
        self.saved_at = self.world.timeline.now
        self._again(self._lead)

    def _lead(self) -> None:
        """Do a step of the chief."""
        order = self.node.order_for(self.task)
        peers = self._peers()
        if order is not None and order.save:
            if peers is not None:
                self._save(peers[0])
                self.world.cluster_invariants.saved_and_left(self)
                self.end(LEFT)
            else:
                self._again(self._lead)
            return
        if order is not None and order.pause:
            self._again(self._lead)
            return
        if peers is not None:
            self._train(peers[0])
            if self.world.timeline.now - self.saved_at > SAVE_EACH:
                self._save(peers[0])
            if peers[0].model_step >= self.world.goal:
                self._save(peers[0])
                self.end(SUCCESS)
                return
        self._again(self._lead)

    def _save(self, server: Process) -> None:
        self.saved = self.world.disk.step = server.model_step
        self.world.disk.most = max(self.world.disk.most, self.saved)
        self.saved_at = self.world.timeline.now

    def _train(self, server: Process) -> None:
        self.world.cluster_invariants.trains(self)
        server.model_step += 1
        if server.model_step % 10 == 0:
            self.step = server.model_step
            self.node.publish()

    def _wait_at_gate(self) -> None:
        order = self.node.order_for(self.task)
        if order is not None and order.pause:
            self.end(LEFT)
            return
        peers = self._peers()
        if order is None or not order.open or peers is None or any(one.model is None for one in peers):
            self._again(self._wait_at_gate)
            return
        self.world.cluster_invariants.passes_gate(self)
        self.trains = True
        self._become_ready()
        self._again(self._work)

    def _work(self) -> None:
        order = self.node.order_for(self.task)
        if order is not None and order.pause:
            self.end(LEFT)
        elif order is not None and order.ending:
            self.end(SUCCESS)
        else:
            peers = self._peers()
            if peers is not None:
                self._train(peers[0])
            if self.world.timeline.random.random() < self.world.share_done:
                self.end(SUCCESS)
            else:
                self._again(self._work)

    def _evaluate(self) -> None:
        order = self.node.order
        if order is not None and order.ending:
            self.end(SUCCESS)
        else:
            self._again(self._evaluate)
