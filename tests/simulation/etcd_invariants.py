"""The invariants for the keys of a job in etcd, checked at each commit that could break them."""

from __future__ import annotations

from msgspec.structs import replace
from support.policy_parts import tasks_of

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.rendezvous.kv.records import Keys, StoredPlan, decode_record, wanted_value
from dlrover_run.store.operations import KeyValue
from simulation.etcd import EtcdCluster
from simulation.invariants import Invariants
from simulation.timeline import Process, demand


class Store:
    """The records in etcd, and their invariants: each is checked at the commit that could break it."""

    def __init__(self, cluster: EtcdCluster, invariants: Invariants, keys: Keys) -> None:
        self._cluster = cluster
        self._invariants = invariants
        self._keys = keys
        self._stored_rounds: set[tuple[RoundKey, PlanPhase, int]] = set()
        self._leaders: set[int] = set()
        # The reports of each process in their order, and the place of the one that is stored, at the earliest.
        self._published: dict[NodeKey, list[NodeReport]] = {}
        self._stored: dict[NodeKey, int] = {}
        cluster.on_change = self._check

    @property
    def plan(self) -> Plan | None:
        return _plan_of(self._cluster.keys.get(self._keys.plan))

    @property
    def leader(self) -> Process | None:
        return self._owner(self._cluster.keys.get(self._keys.leader))

    @property
    def elections(self) -> int:
        return len(self._leaders)

    def holder(self, node_id: str) -> Process | None:
        """Return the process whose report is stored under that id."""
        return self._owner(self._cluster.keys.get(self._keys.node(node_id)))

    def receiving(self, wanted: Assignment) -> None:
        """Check an assignment that a node has received."""
        if wanted.key.number or wanted.phase in OVER:
            known = (wanted.key, wanted.phase, wanted.restart_count) in self._stored_rounds
            demand(known, "a plan is stored before it is sent to a node")

    def publishing(self, status: NodeReport) -> None:
        """Note that a node stores this report."""
        self._published.setdefault(status.key, []).append(_without_memory(status))

    def _owner(self, current: KeyValue | None) -> Process | None:
        lease = None if current is None else self._cluster.leases.get(current.lease)
        return None if lease is None else lease.owner

    def _check(self, writer: Process | None, before: dict[str, KeyValue]) -> None:
        after, keys = self._cluster.keys, self._keys
        for key, current in after.items():
            if before.get(key) == current:
                continue
            demand(current.lease != 0, f"every key of a job is deleted or has a lease, unlike {key}")
            if key.startswith(keys.nodes):
                previous = before.get(key)
                demand(previous is None or self._owner(previous) in (None, writer), "two processes are one node")
                self._check_report(current)
            elif key == keys.leader:
                self._leaders.add(current.created)
            elif not key.startswith(keys.requests):
                demand(self.leader is writer, f"only the elected agent writes {key}")
            if key == keys.plan:
                self._check_plan(_plan_of(before.get(key)), _plan_of(current))
                wanted = wanted_value(decode_record(current.value, StoredPlan).plan)
                published = after.get(keys.wanted)
                # A job that has not chosen yet leaves what its predecessor wished until the lease of that ends.
                has_wish = published is not None and published.value == wanted
                demand(wanted is None or has_wish, "the wish is published")
        if keys.plan in before and keys.plan not in after:
            all_have_left = not any(key.startswith(keys.nodes) for key in after)
            demand(all_have_left or self._invariants.over is not None, "a job is not forgotten while it has nodes")
            self._invariants.forgetting(all_have_left)

    def _check_report(self, after: KeyValue) -> None:
        now = _without_memory(decode_record(after.value, NodeReport))
        published, last = self._published[now.key], self._stored.get(now.key, 0)
        place = next((place for place in range(last, len(published)) if published[place] == now), None)
        demand(place is not None, "no older report of a node replaces a newer one")
        self._stored[now.key] = place or 0

    def _check_plan(self, before: Plan | None, after: Plan | None) -> None:
        assert after is not None, "it was just written"
        demand(before is None or after.epoch >= before.epoch, "epochs grow")
        self._invariants.storing(before, after, self._cluster.timeline.now)
        self._stored_rounds.add((after.key, after.phase, after.restart_count))


def _without_memory(report: NodeReport) -> NodeReport:
    """Return the report as the agent made it: the client adds fields that a coordinator without records needs."""
    tasks = tasks_of(report)
    return report if tasks is None else replace(report, parts=(replace(tasks, hint=None),))


def _plan_of(current: KeyValue | None) -> Plan | None:
    return None if current is None else decode_record(current.value, StoredPlan).plan
