"""Actions of an operator, an administrator or an outside client on a job in etcd, and what its nodes report. Real
processes.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_conversation import RENEW_TIMEOUT, read
from support.cluster import Cluster, leave, send_signal, succeed
from support.etcd_server import Etcd, serving
from support.harness import WAIT
from support.rendezvous_backends import EtcdBackend

from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.rules import RESULT_RETENTION
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.kv import client as etcd_client
from dlrover_run.rendezvous.kv.client import StoreClient
from dlrover_run.rendezvous.kv.records import Keys, decode_record
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.store.etcd.store import EtcdStore
from dlrover_run.store.operations import Range
from dlrover_run.transport.addresses import Address, UnresolvedHost


@pytest.fixture
def place(etcd: Etcd) -> EtcdBackend:
    """One server of which each test may change or stop anything."""
    return EtcdBackend(etcd)


class TestAnEtcdThatTakesOnlyShortWrites:
    """The status of a node fits into the limit; the records that the elected agent writes do not."""

    @pytest.fixture
    def etcd(self, tmp_path: Path) -> Iterator[Etcd]:
        with serving(tmp_path / "etcd", flags=["--max-request-bytes=1000"]) as etcd:
            yield etcd

    def test_the_elected_agent_reports_it_and_exits(self, cluster: Cluster, place: EtcdBackend) -> None:
        node = cluster.node("a", "2")
        assert node.finish() == 2
        assert node.has_printed("request is too large")
        assert node.has_printed("Start etcd with a greater --max-request-bytes.")
        assert not node.has_printed("lost etcd")


@pytest.mark.parametrize(
    ("names", "advertised"),
    [
        (("this", "other"), "192.0.2.2"),
        (("other", "this"), "192.0.2.2"),
        (("unknown", "this", "unreachable", "other"), "192.0.2.2"),
        (("unknown", "this", "unreachable"), "127.0.0.1"),
    ],
)
def test_a_machine_that_is_an_etcd_member_too_advertises_no_loopback(
    shared_etcd: Etcd, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], advertised: str
) -> None:
    """Debian maps the name of a machine to 127.0.1.1 in /etc/hosts, and other nodes cannot connect to that address."""
    hosts = {"this": "127.0.1.1", "other": "192.0.2.9", "unreachable": "203.0.113.9"}

    async def resolve(host: str, port: int) -> list[Address]:
        if host not in hosts:
            raise UnresolvedHost(host)
        return [Address(socket.AF_INET, hosts[host], port)]

    monkeypatch.setattr(etcd_client, "resolve", resolve)
    routes = {"127.0.1.1": "127.0.0.1", "192.0.2.9": "192.0.2.2"}
    monkeypatch.setattr(etcd_client, "route_source", lambda address: routes.get(address.host))
    run_id = "-".join(names)
    members = kinds.Store(tuple((name, 2379) for name in names))
    spec = JobSpec(entrypoint=Entrypoint("script", "train.py"), run_id=run_id, rendezvous=members)

    async def join() -> NodeReport:
        watching = EtcdStore(kinds.Store(shared_etcd.places), RENEW_TIMEOUT)
        client = StoreClient(spec, lambda: None, print, EtcdStore(kinds.Store(shared_etcd.places), RENEW_TIMEOUT))
        async with watching.watch([Range(Keys(kinds.DEFAULT_PREFIX, run_id).node("n"))]) as watch:
            before = (await read(watching)).revision
            client.report(NodeReport(node_id="n", incarnation="i", host="h", address="", port=0, workers=1))
            (change,) = await asyncio.wait_for(anext(watch.after(before)), WAIT)
        assert change.now is not None
        await client.close()
        await watching.close()
        return decode_record(change.now.value, NodeReport)

    assert asyncio.run(join()).address == advertised


@pytest.mark.long
@pytest.mark.parametrize("end", ["succeeds", "fails", "is interrupted"])
def test_a_job_whose_elected_agents_changed_leaves_no_lease_of_a_day(
    cluster: Cluster, etcd: Etcd, place: EtcdBackend, end: str
) -> None:
    nodes = {name: cluster.node(name, "2:3", env={"NODE_ID": name}) for name in "abc"}
    cluster.world(3)
    nodes.pop(place.elected()).lose()
    world = cluster.world(2)
    if end == "succeeds":
        succeed(world, *nodes.values())
    elif end == "fails":
        send_signal(world[:1], signal.SIGKILL)
        assert {node.finish() for node in nodes.values()} <= {1, 128 + signal.SIGKILL}
    else:
        for node in nodes.values():
            leave(node)
    leases = etcd.ctl("lease", "list").split("\n")[1:]
    lives = [etcd.ctl("lease", "timetolive", lease) for lease in leases if lease]
    # The lease of the lost agent and the lease of the result expire by themselves; they may have expired already.
    left = [int(seconds) for life in lives for seconds in re.findall(r"granted with TTL\((\d+)s\)", life)]
    assert all(seconds <= RESULT_RETENTION for seconds in left), lives


def test_a_leader_key_written_by_hand_or_copied_from_another_etcd_is_ignored(
    cluster: Cluster, etcd: Etcd, place: EtcdBackend
) -> None:
    """`etcdctl make-mirror` copies keys without their leases, so this key would never expire."""
    nodes = cluster.nodes("ab", "2", "--max-restarts=1")
    world = cluster.world(2)
    (key,) = [key for key in place.all_keys() if key.endswith("/leader")]
    etcd.ctl("put", key, "nobody")
    send_signal(world[:1], signal.SIGKILL)
    world = cluster.world(2)
    assert {m["restart"] for m in world} == {1}
    succeed(world, *nodes)


def test_revoking_the_lease_of_the_plan_loses_no_node(cluster: Cluster, etcd: Etcd, place: EtcdBackend) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=1")
    world = cluster.world(2)
    (key,) = [key for key in place.all_keys() if key.endswith("/plan")]
    (lease,) = re.findall(r'"lease":(\d+)', etcd.ctl("get", "--write-out=json", key))
    etcd.ctl("lease", "revoke", f"{int(lease):x}")
    for node in nodes:
        node.until_prints("is back")
    send_signal(world[:1], signal.SIGKILL)
    world = cluster.world(2)
    assert {m["restart"] for m in world} == {1}
    assert not any(node.has_printed("is in use by another process") for node in nodes)
    succeed(world, *nodes)


def fill(etcd: Etcd) -> None:
    """Write until the database is full."""
    while True:
        etcd.ctl("put", "/filler", 20_000 * "x")


class TestAnEtcdThatRunsFull:
    @pytest.fixture
    def etcd(self, tmp_path: Path) -> Iterator[Etcd]:
        with serving(tmp_path / "etcd", flags=["--quota-backend-bytes=600000"]) as etcd:
            yield etcd

    def test_a_node_that_cannot_write_to_a_full_etcd_reports_why_and_continues_when_there_is_space(
        self, cluster: Cluster, etcd: Etcd
    ) -> None:
        nodes = cluster.nodes("ab", "2", "--max-restarts=1")
        world = cluster.world(2)
        with pytest.raises(AssertionError, match="database space exceeded"):
            fill(etcd)
        send_signal(world[:1], signal.SIGKILL)
        node = next(node for node in nodes if node.name == world[0]["node"])
        node.until_prints("(its database is full: an administrator has to compact it and clear the alarm); this node")
        (revision,) = re.findall(r'"revision":(\d+)', etcd.ctl("get", "--write-out=json", "/nothing"))
        etcd.ctl("compact", revision)
        etcd.ctl("defrag")
        etcd.ctl("alarm", "disarm")
        world = cluster.world(2)
        assert {m["restart"] for m in world} == {1}
        succeed(world, *nodes)
