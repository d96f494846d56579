"""One run of a job whose records are in etcd: the client of the product on each node, and one store for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.rules import RESULT_RETENTION
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.kv import leader as etcd_leader
from dlrover_run.rendezvous.kv.client import StoreClient, lease_time
from dlrover_run.rendezvous.kv.records import Keys
from dlrover_run.rendezvous.kv.requests import REQUEST_LEASE
from dlrover_run.spec import JobSpec
from dlrover_run.store.operations import KeyValue
from simulation.etcd import EXPIRY_TICK, EtcdCluster
from simulation.etcd_client import Client
from simulation.etcd_faults import EtcdFaults
from simulation.etcd_invariants import Store
from simulation.network import Weather
from simulation.nodes import Node, NodeClient, WatchedClient
from simulation.program import Outcome, Program
from simulation.scenario import TROUBLES, Scenario
from simulation.timeline import Timeline, demand
from simulation.torch.program import TorchProgram

SPEC = kinds.Store(endpoints=(("10.0.0.1", 2379),))

NEIGHBOUR = f"{SPEC.prefix}/job/team/plan"
"""The key of another job, whose prefix is the name of this job."""


class WatchedEtcdClient(WatchedClient, StoreClient):
    """The etcd client of the product, with checks of the invariants."""

    def __init__(self, node: Node, store: Store, *given: Any) -> None:
        self._invariants_of_store = store
        super().__init__(node, *given)

    def _take(self, assignment: Assignment) -> None:
        self._invariants_of_store.receiving(assignment)
        super()._take(assignment)


class ClientInEtcd(NodeClient):
    """The client of a node of a job with its records in etcd."""

    leaving = 30.0

    def __init__(self, node: Node, spec: JobSpec, on_change: Callable[[], None], store: Store, client: Client) -> None:
        super().__init__(node)
        self._connection = client
        self._store = store
        chance = node.timeline.random.random
        self.client = WatchedEtcdClient(node, store, spec, on_change, node.note, client, chance, node.reaches)

    def report(self, status: NodeReport) -> None:
        self._store.publishing(status)
        super().report(status)

    def close(self, on_closed: Callable[[], None]) -> None:
        def end() -> None:
            self._connection.vanish()
            on_closed()

        super().close(end)

    def break_off(self, silent: bool) -> None:
        self._connection.vanish()

    def cut(self) -> None:
        self._connection.cut()


class Clocks:
    """Replaces the module `time`: the wall clocks of all nodes, which differ."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._skew = timeline.random.choice((0, 1000, 10_000_000))

    def time_ns(self) -> int:
        ms = 1_700_000_000_000 + int(self._timeline.now * 1000) + self._timeline.random.randint(0, self._skew)
        return ms * 1_000_000


class EtcdScenario(Scenario):
    """The records are in etcd. If `durable`, etcd never loses them."""

    flag = " --etcd"

    def __init__(
        self, seed: int, log: Callable[[str], None] | None = None, program: type[Program] = TorchProgram
    ) -> None:
        super().__init__(seed, log, program)
        random = self.timeline.random
        # The default of the product with etcd is 0.
        self.rules = replace(self.rules, lost_after=random.choice((0.0, 0.0, 1.0)))
        self.trouble = random.choice(TROUBLES)
        self.durable = self.trouble == "gentle" or random.random() < 0.8 or self.program.always_durable
        if self.trouble == "gentle":
            # No echo, because a late echo of a renewal would prolong the lease of a node that has ended.
            weather = Weather(slowness=0.05, echo=0.0, lag=random.choice((0.0, 0.05)))
        else:
            weather = Weather(
                slowness=random.choice((0.01, 0.3, 2.0)),
                echo=random.choice((0.0, 0.1, 0.6)),
                lag=random.choice((0.0, 0.5, 3.0)),
            )
        self.invariants = self.program.make_invariants(self.durable, nodes_stay=False)
        # A decision waits for an answer of etcd, which may take long.
        self.invariants.slow_disk = self.trouble != "gentle"
        self.cluster = EtcdCluster(self.timeline)
        # Other users of etcd have made changes too.
        self.cluster.revision = random.choice((1, random.randint(1, 1000)))
        self.cluster.keys[NEIGHBOUR] = KeyValue(NEIGHBOUR, b"", 1, 1, 0)
        self.store = Store(self.cluster, self.invariants, Keys(SPEC.prefix, "job"))
        self.clients: dict[Node, Client] = {}
        self._furnish(weather)
        if random.random() < 0.2:
            # Longer than the result of a job is kept.
            self.program.slow_stops(2 * RESULT_RETENTION)
        self.faults = EtcdFaults(self)
        self._describe("etcd keeps its data" if self.durable else "etcd may lose its data")

    def run(self) -> Outcome:
        with patch.object(etcd_leader, "time", Clocks(self.timeline)):
            return super().run()

    @property
    def plan(self) -> Plan | None:
        return self.store.plan

    @property
    def coordinators(self) -> int:
        return self.store.elections

    @property
    def leader(self) -> Node | None:
        """The elected node. It may have ended while its lease has not expired."""
        leader = self.store.leader
        assert leader is None or isinstance(leader, Node), "only nodes stand for election"
        return leader

    def _open_client(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        client = Client(node, node.link, self.cluster, self.place.weather, node.burn)
        self.clients[node] = client
        spec = replace(spec, rendezvous=SPEC)
        return ClientInEtcd(node, spec, on_change, self.store, client)

    def _may_stay(self, node: Node) -> bool:
        # A process of that name that has ended blocks the id until its lease expires, which may be too late.
        return self.store.holder(node.key.node_id) in (None, node)

    def _settle(self) -> None:
        self.place.weather.lag = 0.0
        for node in self.nodes:
            node.fuse = None
        for client in self.clients.values():
            client.denied = False
        if self.cluster.away:
            self.cluster.come_back()

    def _demand_rest(self) -> None:
        # An operator's program may have ended without an answer.
        ttl = max(lease_time(self.rules), REQUEST_LEASE)
        self.timeline.run_until(self.timeline.now + RESULT_RETENTION + ttl + 4 * EXPIRY_TICK, lambda: False)
        plan = self.plan
        if plan is None or plan.phase in OVER:
            left = self.cluster.keys.keys() - {NEIGHBOUR}
            demand(not left, f"a job that is over leaves no keys in etcd, but there are {left}")
        demand(not self.durable or NEIGHBOUR in self.cluster.keys, "no node changes the keys of another job")
