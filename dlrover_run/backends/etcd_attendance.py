"""Turns the keys under which nodes put their statuses into what a coordinator hears: statuses, and who is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dlrover_run.backends.etcd_records import Keys, unpack
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.notice import misfit
from dlrover_run.coordination.plausible import implausible
from dlrover_run.coordination.records import NodeKey, NodePhase, NodeStatus, Plan
from dlrover_run.coordination.rules import MOST_NODES
from dlrover_run.etcd.operations import Change, KeyValue
from dlrover_run.wire.messages import BadMessage


class Attendance:
    """Who has a key now. `say` prints one line, about a status that does not count, and once about each node.

    `strangers` are nodes of another kind than the job. They learn that from its rules, so somebody has to write these
    where they read.
    """

    def __init__(self, keys: Keys, say: Callable[[str], None]) -> None:
        self._keys = keys
        self._say = say
        self._nodes: dict[str, NodeKey] = {}
        self._unreadable: set[str] = set()
        self._left: set[NodeKey] = set()
        self.strangers: frozenset[str] = frozenset()

    def has_left(self, key: NodeKey) -> bool:
        """Whether that node has said goodbye."""
        return key in self._left

    def awaits(self, plan: Plan) -> bool:
        """Whether a member of the plan is not here, and may come back to learn what has become of the job."""
        here = {*self._nodes.values(), *self._left}
        return any(not member.done and member.key not in here for member in plan.members)

    def hear_all(self, coordinator: Coordinator, found: Iterable[KeyValue], now: float) -> None:
        """Hear how everything stands at one revision."""
        there = {self._node_id(current.key): current for current in found}
        for node_id in self._nodes.keys() - there.keys():
            self._lose(coordinator, node_id, now)
        for node_id, current in there.items():
            self._hear(coordinator, node_id, current, now)

    def hear(self, coordinator: Coordinator, change: Change, now: float) -> bool:
        """Hear what has become of one key; whether that is news."""
        node_id = self._node_id(change.key)
        if change.now is not None:
            return self._hear(coordinator, node_id, change.now, now)
        if node_id not in self._nodes:
            return False
        self._lose(coordinator, node_id, now)
        return True

    def _hear(self, coordinator: Coordinator, node_id: str, current: KeyValue, now: float) -> bool:
        try:
            status = unpack(current.value, NodeStatus)
        except BadMessage as error:
            self._reject(node_id, current, str(error))
            return False
        problem = misfit(coordinator.rules, status)
        if problem is not None:
            self.strangers |= {node_id}
        problem = problem or implausible(status, coordinator.plan, coordinator.seat(status.key))
        if status.node_id != node_id:
            problem = f"that of {status.node_id}"
        elif len(self._nodes) >= MOST_NODES and node_id not in self._nodes:
            problem = f"one too many, for a job has at most {MOST_NODES} nodes"
        if problem is not None:
            self._reject(node_id, current, problem)
            return False
        self._nodes[node_id] = status.key
        if status.phase is NodePhase.LEFT:
            self._left.add(status.key)
        return coordinator.hear(status, now)

    def _lose(self, coordinator: Coordinator, node_id: str, now: float) -> None:
        key = self._nodes.pop(node_id)
        coordinator.disconnect(key, now)

    def _reject(self, node_id: str, current: KeyValue, problem: str) -> None:
        if node_id not in self._unreadable:
            self._unreadable.add(node_id)
            self._say(f"warning: the status in etcd under {current.key} does not count: {problem}")

    def _node_id(self, key: str) -> str:
        return key.removeprefix(self._keys.nodes)
