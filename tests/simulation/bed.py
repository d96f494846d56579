"""An etcd cluster and processes with clients of it, for tests of the simulation itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dlrover_run.store.operations import Delete, Get, Put, Txn, TxnResult
from simulation.etcd import EtcdCluster
from simulation.etcd_client import Client
from simulation.loop import LoopProcess
from simulation.network import Link, Weather
from simulation.timeline import Timeline


class Bed:
    """A timeline with one etcd cluster, and processes with clients of it."""

    def __init__(self, seed: int = 1, echo: float = 0.0, lag: float = 0.0) -> None:
        self.timeline = Timeline(seed)
        self.cluster = EtcdCluster(self.timeline)
        self.weather = Weather(0.01, echo, lag)
        self.process = LoopProcess(self.timeline, "one")
        self.link = Link()
        self.client = self.client_of(self.process, self.link)

    def client_of(self, process: LoopProcess, link: Link, burn: Callable[[], None] = lambda: None) -> Client:
        return Client(process, link, self.cluster, self.weather, burn)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.process.create_task(work)

    def wait(self, seconds: float = 100.0) -> None:
        end = self.timeline.now + seconds
        self.timeline.run_until(end, lambda: False)
        self.timeline.now = end

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = self.start(work)
        self.timeline.run_until(self.timeline.now + 100, task.done)
        return task.result()

    def commit(self, *operations: Get | Put | Delete | Txn, conditions: tuple[Any, ...] = ()) -> TxnResult:
        return self.cluster.commit(Txn(conditions, operations), self.process)

    def put(self, key: str, value: bytes = b"", lease: int = 0) -> int:
        return self.commit(Put(key, value, lease)).revision
