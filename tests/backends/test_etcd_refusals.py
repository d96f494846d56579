"""What an etcd client does when its node cannot take part, with a fake store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dlrover_run.coordination.model import NodeReport
from dlrover_run.etcd.operations import EtcdUnavailable, KeyValue, Range, Txn, TxnResult
from dlrover_run.policies.parameter_servers.model import DesiredReplicas
from dlrover_run.policies.parameter_servers.reports import NodeTasks
from dlrover_run.rendezvous.etcd_client import EtcdClient
from dlrover_run.rendezvous.etcd_records import Keys
from dlrover_run.spec import Entrypoint, EtcdSpec, JobSpec

SPEC = JobSpec(
    entrypoint=Entrypoint("script", "train.py"), backend="etcd", etcd=EtcdSpec((("127.0.0.1", 1),)), run_id="job"
)


class EmptyStore:
    """A store with the report of this node only. It becomes unreachable when a lease is to be revoked."""

    def __init__(self) -> None:
        key = Keys("/dlrover-run", "job").node("client")
        self._found = {key: KeyValue(key, b"{}", 1, 1, 7)}
        self.revoked = 0

    @asynccontextmanager
    async def watch(self, ranges: Sequence[Range]) -> AsyncIterator[None]:
        yield

    async def grant(self, seconds: int) -> int:
        return 7

    async def commit(self, txn: Txn) -> TxnResult:
        return TxnResult(True, 1, self._found)

    async def revoke(self, lease: int) -> None:
        self.revoked += 1
        raise EtcdUnavailable("it ended the connection")

    async def close(self) -> None:
        pass


async def give_up(store: Any) -> EtcdClient:
    """A client that only sends a scale request, after its refusal."""
    changed = asyncio.Event()
    client = EtcdClient(SPEC, changed.set, print, store)
    part = NodeTasks(scale_request=DesiredReplicas(ps=2), scale_request_number=1)
    client.report(NodeReport(node_id="client", incarnation="x", host="h", address="", port=0, workers=0, policy=part))
    async with asyncio.timeout(30):
        await changed.wait()
    await client.close()
    return client


def test_a_refused_scale_client_reports_the_reason_though_etcd_becomes_unreachable() -> None:
    store = EmptyStore()
    client = asyncio.run(give_up(store))
    assert client.problem is not None
    assert client.problem.startswith("no node of a job 'job' is in etcd")
    assert (client.is_user_error, store.revoked) == (True, 1)
