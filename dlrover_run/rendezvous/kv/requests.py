"""Questions and requests of an operator's program about a job in a key-value store. The program is no node of the job.

It reads the same records as the next leader would, and makes the status from them. A request is a key whose value the
leader replaces by its answer once the plan contains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.take_over import misfit
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.rendezvous.kv.records import Keys, RequestAnswer, StoredPlan, decode_record, encode_record
from dlrover_run.store.operations import (
    Change,
    Compacted,
    Get,
    KeyValueStore,
    Put,
    Range,
    StoreMisconfigured,
    StoreUnavailable,
    Txn,
)
from dlrover_run.transport.messages import InvalidMessage, decode_rules

REQUEST_LEASE = 30
"""Seconds after which a request that no leader has answered is forgotten."""


async def ask_store(store: KeyValueStore, keys: Keys, name: str, request: OperatorRequest | None) -> JobStatus:
    """The status of a job, after its leader has carried out the request, if there is one. The caller limits the time.
    Raises AskFailed."""
    try:
        job, answer = await read_job(store, keys, name), ""
        if request is not None:
            answer = await _request(store, keys, request)
            job = await read_job(store, keys, name)
        status = job.status(name, asyncio.get_running_loop().time(), aged=False)
        return msgspec.structs.replace(status, epoch=job.plan.epoch - 1, answer=answer)
    except (StoreUnavailable, StoreMisconfigured, Compacted) as error:
        raise AskFailed(f"{keys.store} cannot be read: {error}") from None


async def read_job(store: KeyValueStore, keys: Keys, name: str) -> Coordinator:
    """A coordinator that decides nothing, with the records of the job. Raises AskFailed and the errors of etcd."""
    reads = (Get(Range(keys.plan)), Get(Range(keys.nodes, prefix=True)))
    found = (await store.commit(Txn(then=reads))).found
    stored = found.get(keys.plan)
    if stored is None:
        raise AskFailed(f"there is no job {name!r} in {keys.store}", no_job=True)
    now = asyncio.get_running_loop().time()
    try:
        record = decode_record(stored.value, StoredPlan)
        rules = decode_rules(record.rules)
        if (problem := misfit(rules, record.plan)) is not None:
            raise InvalidMessage(problem)
        coordinator = Coordinator(rules, now, record.plan.epoch + 1, record.plan)
        for key, current in found.items():
            if key.startswith(keys.nodes):
                coordinator.receive(decode_record(current.value, NodeReport), now)
    except InvalidMessage as error:
        raise AskFailed(f"a record of the job in {keys.store} is {error}") from None
    # An internal error is the leader's to report; the rest of the status is right without the wait.
    with contextlib.suppress(Exception):
        coordinator.compute_wait(now)
    return coordinator


async def _request(store: KeyValueStore, keys: Keys, request: OperatorRequest) -> str:
    """Put a request, and wait until the leader has replaced it by its answer. Raises AskFailed."""
    key, written = Range(f"{keys.requests}{secrets.token_hex(8)}"), encode_record(request)
    lease = await store.grant(REQUEST_LEASE)
    try:
        async with store.watch([key]) as watch:
            put = await store.commit(Txn(then=(Put(key.key, written, lease),)))
            return await _read_answer(watch.after(put.revision), written, keys.store)
    except InvalidMessage as error:
        raise AskFailed(f"the answer in {keys.store} is {error}") from None
    finally:
        await store.revoke(lease)


async def _read_answer(watched: AsyncIterator[Sequence[Change]], written: bytes, store: str) -> str:
    """The answer in place of the request that was written. Raises AskFailed and InvalidMessage."""
    async for changes in watched:
        for change in changes:
            if change.now is None:
                # The request was deleted with its lease.
                raise AskFailed(f"no leader of the job has answered within {REQUEST_LEASE} s")
            if change.now.value != written:
                return _answer(decode_record(change.now.value, RequestAnswer))
    raise AskFailed(f"the watch of the answer in {store} has ended")


def _answer(found: RequestAnswer) -> str:
    if found.refusal:
        raise AskFailed(found.refusal)
    return found.answer
