"""A crowd: one process that plays many nodes of a job: `python -m workers.crowd ORDER`, see `core/crowds.py`.

A line on its standard input lets the nodes join. It writes an `Event` to its standard output, a line of JSON, whenever
all of its nodes have reached a state. The end of its standard input ends it, so that it never outlives the benchmark.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from core.crowds import Event, Order, What, raise_file_limit

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination.model import NodePhase
from dlrover_run.coordination.rules import JobRules
from dlrover_run.spec import Entrypoint, EtcdSpec, JobSpec, MasterSpec

JOB = "benchmark"
MAX_REASON = 500
WORKERS_PER_NODE = 8

Join = Callable[[], None]


class Tally:
    """Counts the nodes of a crowd that have reached each state, and emits an event at the last one. Thread-safe."""

    def __init__(self, count: int, emit: Callable[[Event], None], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._count = count
        self._emit = emit
        self._clock = clock
        self._reached: Counter[tuple[What, int]] = Counter()
        self._lock = threading.Lock()

    def reach(self, what: What, size: int = 0) -> None:
        """One more node has reached it. Each node calls this once for each state."""
        now = self._clock()
        with self._lock:
            self._reached[what, size] += 1
            if self._reached[what, size] == self._count:
                self._emit(Event(what, now, size))

    def fail(self, why: str) -> None:
        """A node has given up."""
        with self._lock:
            self._emit(Event("failed", self._clock(), why=why[:MAX_REASON]))


class Node:
    """A node with the product's own client, and so with a connection of its own. It starts no workers."""

    def __init__(self, order: Order, number: int, tally: Tally) -> None:
        host, _, port = order.address.rpartition(":")
        rules = JobRules(min_nodes=order.least, max_nodes=order.nodes, keep_alive_interval=order.interval)
        spec = JobSpec(
            Entrypoint("program", "true"),
            run_id=JOB,
            workers_per_node=WORKERS_PER_NODE,
            rules=rules,
            backend="master",
            master=MasterSpec(host, int(port), is_host=False),
            node_id=f"node{number}",
            local_addr="127.0.0.1",
        )
        if order.kind == "etcd":
            # As on the command line: the end of a lease is the loss of its node.
            rules = dataclasses.replace(rules, lost_after=0.0)
            spec = dataclasses.replace(spec, backend="etcd", etcd=EtcdSpec(((host, int(port)),)), rules=rules)
        self._spec = spec
        self._tally = tally
        self._state = NodeState(spec)

    async def live(self) -> None:
        """Join, and stay until the process ends. Raises ConnectionError if the node gives up."""
        from dlrover_run.rendezvous.backends import open_client

        changed = asyncio.Event()
        client = open_client(self._spec, changed.set, lambda line: print(line, file=sys.stderr, flush=True))
        known = False
        while client.problem is None:
            # Before the first assignment of a coordinator there is an empty one.
            if client.assignment.epoch:
                if not known:
                    known = True
                    self._tally.reach("known")
                before = self._state.round
                self._state.accept(client.assignment)
                ranks = self._state.seat
                if ranks is not None and ranks.key != before:
                    self._tally.reach("placed", ranks.nodes)
            phase = NodePhase.RUNNING if self._state.seat else NodePhase.WAITING
            client.report(self._state.report(phase))
            await changed.wait()
            changed.clear()
        raise ConnectionError(client.problem)


def _our_nodes(order: Order, tally: Tally) -> Join:
    # Imported before the clock starts, as the nodes of torch have imported theirs.
    from dlrover_run.transport.grpc_setup import load_grpc

    load_grpc()
    if order.kind == "etcd":
        import dlrover_run.etcd.store
        import dlrover_run.rendezvous.etcd_client
        from dlrover_run.etcd import codec

        codec.load()
    else:
        import dlrover_run.rendezvous.master_client  # noqa: F401
    nodes = [Node(order, number, tally) for number in range(order.first, order.first + order.count)]

    async def live() -> None:
        try:
            await asyncio.gather(*(node.live() for node in nodes))
        except ConnectionError as error:
            tally.fail(str(error))
            sys.exit(1)

    return lambda: asyncio.run(live())


def _torch_nodes(order: Order, tally: Tally) -> Join:
    """Nodes of torch's c10d rendezvous, made by its own factories: a thread and a store connection each.

    They are connected to their store before they join: a connection looks up the name of its peer, and many at once
    would measure the name server of this machine.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def connect() -> Any:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=order.address,
            run_id=JOB,
            min_nodes=order.least,
            max_nodes=order.nodes,
            local_addr="127.0.0.1",
            is_host="False",
        )
        backend, store = create_backend(parameters)
        write = backend.set_state
        written = False

        def set_state(state: bytes, token: Any = None) -> Any:
            nonlocal written
            answer = write(state, token)
            # The first state that a node manages to write contains the node itself.
            if answer is not None and answer[2] and not written:
                written = True
                tally.reach("known")
            return answer

        backend.set_state = set_state  # type: ignore[method-assign]
        return create_handler(store, backend, parameters)

    def live(handler: Any) -> None:
        try:
            world = handler.next_rendezvous()
        except Exception as error:
            # Any failure of a node of the rival is its result.
            tally.fail(f"{type(error).__name__}: {error}")
            os._exit(1)
        tally.reach("placed", world.world_size)

    # A handler sends heartbeats for as long as it is referenced.
    handlers = [connect() for _ in range(order.count)]
    threads = [threading.Thread(target=live, args=(handler,), daemon=True) for handler in handlers]

    def join() -> None:
        for thread in threads:
            thread.start()
        threading.Event().wait()

    return join


def emit(event: Event) -> None:
    """Write an event. A line is shorter than PIPE_BUF, so it is written whole."""
    os.write(sys.stdout.fileno(), msgspec.json.encode(event) + b"\n")


def main() -> None:
    """Prepare the nodes, report that they are ready, and let them join."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    raise_file_limit()
    join = (_torch_nodes if order.kind == "torch" else _our_nodes)(order, Tally(order.count, emit))
    emit(Event("ready", time.monotonic_ns()))
    if not sys.stdin.readline():
        return

    def end_with_benchmark() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_benchmark, daemon=True).start()
    emit(Event("joining", time.monotonic_ns()))
    join()


if __name__ == "__main__":
    main()
