"""Questions for the stacks of a job in a key-value store: a key that each node watches, and a key with
the answer of each node.

All of them are under the lease of the program that asks, so nothing is left of a question, also if its program dies.
The leader takes no part in it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

import msgspec

from dlrover_run.background import TimeLimit, every
from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.job_status import stacks
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import (
    JobStacks,
    NodeStacks,
    StackRequest,
    nodes_to_ask,
)
from dlrover_run.rendezvous.answer_stacks import answer_stacks
from dlrover_run.rendezvous.client import AskFailed, StackSource
from dlrover_run.rendezvous.kv.records import Keys, decode_record, encode_record
from dlrover_run.rendezvous.kv.requests import REQUEST_LEASE, read_job
from dlrover_run.store.operations import (
    Change,
    Compacted,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseExpired,
    Put,
    Range,
    StoreMisconfigured,
    StoreUnavailable,
    Txn,
)
from dlrover_run.transport.messages import InvalidMessage
from dlrover_run.words.log_level import internal_error, log_frames

Log = Callable[[str], None]

WATCH_RETRY = 5.0
"""Seconds after which a node watches for questions again, if etcd could not be watched."""


class PublishedQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a question: what is asked, and the ids of the nodes that are to answer."""

    query: StackQuery
    nodes: tuple[str, ...]


async def ask_store_for_stacks(store: KeyValueStore, keys: Keys, name: str, query: StackQuery) -> JobStacks:
    """The stacks of a job's workers, from the nodes that answer in time. The caller limits the time. Raises
    AskFailed."""
    try:
        job = await read_job(store, keys, name)
        nodes = nodes_to_ask(job.plan, job.nodes, query)
        # A node whose lease has expired has no key.
        request = StackRequest(0, nodes, [key for key, member in job.nodes.items() if member.connected])
        if request.waits_for:
            await _gather(store, keys, query, request)
        return request.result(name, job.plan)
    except RequestFailed as failed:
        raise AskFailed(str(failed)) from None
    except (StoreUnavailable, StoreMisconfigured, Compacted, LeaseExpired) as error:
        raise AskFailed(f"{keys.store} cannot be read: {error}") from None


async def _gather(store: KeyValueStore, keys: Keys, query: StackQuery, request: StackRequest) -> None:
    number = secrets.token_hex(8)
    answers = Range(keys.stacks(number), prefix=True)
    by_id = {key.node_id: key for key in request.waits_for}
    question = encode_record(PublishedQuery(query, tuple(by_id)))
    lease = await store.grant(REQUEST_LEASE)
    try:
        async with store.watch([answers]) as watch:
            put = await store.commit(Txn(then=(Put(f"{keys.stack_requests}{number}", question, lease),)))
            with contextlib.suppress(TimeoutError):
                async with TimeLimit(stacks.NODE_TIMEOUT):
                    async for changes in watch.after(put.revision):
                        for change in changes:
                            _take(request, by_id, answers.key, change)
                        if not request.waits_for:
                            break
    finally:
        await store.revoke(lease)


def _take(request: StackRequest, by_id: dict[str, NodeKey], prefix: str, change: Change) -> None:
    key = by_id.get(change.key.removeprefix(prefix))
    if key is None or change.now is None:
        return
    with contextlib.suppress(InvalidMessage):
        request.take(key, decode_record(change.now.value, NodeStacks))


async def answer_stack_requests(store: KeyValueStore, keys: Keys, node_id: str, source: StackSource, log: Log) -> None:
    """Answer the questions that concern this node, until it is cancelled. Training does not depend on it."""

    async def answer_while_watched() -> None:
        with contextlib.suppress(StoreUnavailable, StoreMisconfigured, Compacted):
            async with store.watch([Range(keys.stack_requests, prefix=True)]) as watch:
                now = await store.commit(Txn(then=(Get(Range(keys.stack_requests, prefix=True)),)))
                for current in now.found.values():
                    await _answer(store, keys, node_id, source, current, log)
                async for changes in watch.after(now.revision):
                    for change in changes:
                        if change.now is not None:
                            await _answer(store, keys, node_id, source, change.now, log)

    def note_error(error: Exception) -> None:
        log(f"warning: questions for stacks are not answered: {internal_error(error)}")
        log_frames(log, error)

    await every(WATCH_RETRY, answer_while_watched, note_error)


async def _answer(
    store: KeyValueStore, keys: Keys, node_id: str, source: StackSource, asked: KeyValue, log: Log
) -> None:
    try:
        published = decode_record(asked.value, PublishedQuery)
    except InvalidMessage:
        return
    if node_id not in published.nodes or not asked.lease:
        # Without a lease the answer would stay.
        return
    number = asked.key.removeprefix(keys.stack_requests)
    found = await answer_stacks(source, published.query, log)
    if found is None:
        return
    # The program that asked may be gone.
    with contextlib.suppress(LeaseExpired):
        await store.commit(Txn(then=(Put(f"{keys.stacks(number)}{node_id}", encode_record(found), asked.lease),)))
