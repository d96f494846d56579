"""Asks about a job in a store from a program that is no node of it, over a connection of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import JobStacks
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.kv.records import Keys
from dlrover_run.rendezvous.kv.requests import ask_store
from dlrover_run.rendezvous.kv.stacks import ask_store_for_stacks
from dlrover_run.store.operations import KeyValueStore


class StoreAsker:
    """Opens the store for each question. The caller limits the time; both questions raise AskFailed."""

    def __init__(self, open_store: Callable[[], KeyValueStore], place: kinds.Store, run_id: str) -> None:
        self._open_store = open_store
        self._keys = Keys(place.prefix, run_id, place.backend)
        self._run_id = run_id

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        async with self._opened() as store:
            return await ask_store(store, self._keys, self._run_id, request)

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        async with self._opened() as store:
            return await ask_store_for_stacks(store, self._keys, self._run_id, query)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[KeyValueStore]:
        store = self._open_store()
        try:
            yield store
        finally:
            await store.close()
