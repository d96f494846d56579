"""Questions and requests of an operator's program about a job in etcd. The program is no node of the job.

It reads the same records as the next leader would, and makes the status from them. A request is a key that the leader
deletes once the plan contains it.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import OVER, NodeReport
from dlrover_run.coordination.requests import Action, OperatorRequest, RequestFailed, desired_size, find_nodes
from dlrover_run.coordination.status import JobStatus
from dlrover_run.etcd.operations import (
    Compacted,
    EtcdMisconfigured,
    EtcdUnavailable,
    Get,
    KeyValueStore,
    Put,
    Range,
    Txn,
)
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.rendezvous.etcd_records import Keys, StoredPlan, decode_record, encode_record
from dlrover_run.transport.messages import InvalidMessage, decode_rules

REQUEST_LEASE = 30
"""Seconds after which a request that no leader has taken is forgotten."""


async def ask_etcd(store: KeyValueStore, keys: Keys, name: str, request: OperatorRequest | None) -> JobStatus:
    """The status of a job, after its leader has taken the request, if there is one. The caller limits the time. Raises
    AskFailed."""
    try:
        before = await read_job(store, keys, name)
        now = asyncio.get_running_loop().time()
        if request is not None:
            before.request(request, now)
            await _request(store, keys, request)
            after = await read_job(store, keys, name)
            if not _is_done(before, after, request):
                raise AskFailed("the leader of the job has just begun and has not carried the request out; try again")
            before = after
        status = before.status(name, now, aged=False)
        return msgspec.structs.replace(status, epoch=before.plan.epoch - 1)
    except RequestFailed as failed:
        raise AskFailed(str(failed)) from None
    except (EtcdUnavailable, EtcdMisconfigured, Compacted) as error:
        raise AskFailed(f"etcd cannot be read: {error}") from None


async def read_job(store: KeyValueStore, keys: Keys, name: str) -> Coordinator:
    """A coordinator that decides nothing, with the records of the job. Raises AskFailed and the errors of etcd."""
    reads = (Get(Range(keys.plan)), Get(Range(keys.nodes, prefix=True)))
    found = (await store.commit(Txn(then=reads))).found
    stored = found.get(keys.plan)
    if stored is None:
        raise AskFailed(f"there is no job {name!r} in etcd", no_job=True)
    now = asyncio.get_running_loop().time()
    try:
        record = decode_record(stored.value, StoredPlan)
        coordinator = Coordinator(decode_rules(record.rules), now, record.plan.epoch + 1, record.plan)
        for key, current in found.items():
            if key.startswith(keys.nodes):
                coordinator.receive(decode_record(current.value, NodeReport), now)
    except InvalidMessage as error:
        raise AskFailed(f"a record of the job in etcd is {error}") from None
    return coordinator


async def _request(store: KeyValueStore, keys: Keys, request: OperatorRequest) -> None:
    """Put a request, and wait until the leader has deleted it."""
    key = Range(f"{keys.requests}{secrets.token_hex(8)}")
    lease = await store.grant(REQUEST_LEASE)
    try:
        async with store.watch([key]) as watch:
            put = await store.commit(Txn(then=(Put(key.key, encode_record(request), lease),)))
            async for changes in watch.after(put.revision):
                if any(change.now is None for change in changes):
                    return
    finally:
        await store.revoke(lease)


def _is_done(before: Coordinator, after: Coordinator, request: OperatorRequest) -> bool:
    if request.action is Action.STOP:
        return after.plan.phase in OVER
    if request.action is Action.SCALE:
        return after.plan.desired == desired_size(before.rules, before.policy, before.plan, before.members, request)
    here = after.members
    wanted = find_nodes(before.plan, before.members, request.node)
    asked = {*after.plan.draining, *after.plan.to_drain}
    return all(key in asked or key not in here or here[key].is_draining for key in wanted)
