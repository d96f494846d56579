"""The three rendezvous backends in virtual time, and nodes whose reports a test writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodePhase, ReportPart
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous.kv.records import Keys
from dlrover_run.rendezvous.local import LocalClient
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.store.operations import Put, Txn
from simulation.etcd import EtcdCluster
from simulation.etcd_client import Client
from simulation.etcd_invariants import Store
from simulation.etcd_scenario import SPEC, ClientInEtcd
from simulation.invariants import Invariants
from simulation.master_client import ClientOfMaster
from simulation.masters import Masters
from simulation.network import Weather
from simulation.nodes import Node, NodeClient, Place, job_spec
from simulation.scenario import stand_ins
from simulation.timeline import Timeline

MAX_WAIT = 3600.0
"""Timeout of `until` in seconds of virtual time."""


class ClientAlone(NodeClient):
    """The client of the local backend."""

    def __init__(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> None:
        super().__init__(node)
        self.client = LocalClient(spec.rules, None, on_change, node.note)


class WrittenNode(Node):
    """A node that sends the reports that a test writes. `part` is its part of a feature; `changes` counts the
    changes that its client has notified."""

    def __init__(self, place: Place, spec: JobSpec, host: str, incarnation: str, part: ReportPart | None) -> None:
        self.changes = 0
        self.part = part
        self._fields: dict[str, Any] | None = None
        super().__init__(place, spec, host, incarnation)

    @property
    def assignment(self) -> Assignment:
        return self.rendezvous.assignment

    def report(self, **changes: Any) -> None:
        """Report this state now and after each assignment of the same round, as an agent does."""
        self._fields = changes
        self.run(self._send)

    def leave(self, **changes: Any) -> None:
        """Send the last report, and end."""
        self.report(**changes)
        self.run(self._close)

    def _receive(self) -> None:
        self.changes += 1
        if self._fields is not None:
            self.call_soon(self._send)

    def _send(self) -> None:
        if self.left:
            return
        before = self._state.round
        self._state.accept(self.assignment)
        if self._state.round != before:
            self._fields = {"phase": NodePhase.WAITING}
        self.rendezvous.report(
            msgspec.structs.replace(self._state.report(**self._fields), parts=() if self.part is None else (self.part,))
        )

    def _follow(self) -> None:
        pass

    def _end_tasks(self) -> None:
        pass


class Backend:
    """One job over one backend: `local`, `master` or `etcd`. A context manager.

    `lines` is the trace of its events, with what its clients log.
    """

    def __init__(self, name: str, rules: JobRules) -> None:
        self.rules = rules
        self.lines: list[str] = []
        self.timeline = Timeline(1, self.lines.append)
        self.nodes: list[WrittenNode] = []
        self._invariants = Invariants(rules, durable=False, nodes_stay=False)
        self._stack = ExitStack()
        self._open = {"local": self._alone, "master": self._at_master, "etcd": self._in_etcd}[name]
        self._weather = Weather(0.01, 0.0)
        self._place = Place(self.timeline, self._open, self._invariants, self._weather, lambda node, address: True)

    def __enter__(self) -> Backend:
        self._stack.enter_context(stand_ins(lambda: self._invariants))
        self._masters = Masters(self.timeline, self._invariants, None, two_places=False, clock_jumps=False)
        self._cluster = EtcdCluster(self.timeline)
        self._store = Store(self._cluster, self._invariants, Keys(SPEC.prefix, "job"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for process in (*self.nodes, *self._masters.all):
            process.dispose()
        self._stack.close()

    def node(self, name: str = "a", part: ReportPart | None = None, program: str = "a.py") -> WrittenNode:
        """Start a process that becomes a node of the job, and reports that it waits."""
        number = len(self.nodes) + 1
        spec = job_spec(name, f"10.1.0.{number}", 2, "default", None, self.rules)
        spec = replace(spec, entrypoint=Entrypoint("script", f"/home/{name}/{program}"))
        node = WrittenNode(self._place, spec, name, f"i{number}", part)
        self.nodes.append(node)
        return node

    def allow_internal_errors(self) -> None:
        """A test plants one; otherwise the trace of a run may have none."""
        self._invariants.internal_errors_allowed = True

    def edit_plan(self, edit: Callable[[bytes], bytes]) -> None:
        """Change the plan in etcd by hand."""
        key = Keys(SPEC.prefix, "job").plan
        before = self._cluster.keys[key]
        after = edit(before.value)
        assert after != before.value, before.value
        self._cluster.on_change = lambda writer, keys: None
        self._cluster.commit(Txn(then=(Put(key, after, before.lease),)), None)

    def lose_records(self) -> None:
        """Let etcd lose its data, and another master without a journal come, on a machine whose clock is behind."""
        self._cluster.lose_everything()
        self._masters.current.kill()
        self._masters.begin(behind=3600)

    def wait(self, seconds: float) -> None:
        end = self.timeline.now + seconds
        self.timeline.run_until(end, lambda: False)
        self.timeline.now = end

    def until(self, holds: Callable[[], object]) -> None:
        """Let time pass until the condition holds."""
        self.timeline.run_until(self.timeline.now + MAX_WAIT, lambda: bool(holds()))
        assert holds(), [(node.key.node_id, node.rendezvous.problem, node.assignment) for node in self.nodes]

    def _alone(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        return ClientAlone(node, spec, on_change)

    def _at_master(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        return ClientOfMaster(node, spec, on_change, self._masters)

    def _in_etcd(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        client = Client(node, node.link, self._cluster, self._weather, node.burn)
        return ClientInEtcd(node, replace(spec, rendezvous=SPEC), on_change, self._store, client)
