"""A crowd: one process that plays many nodes of a job, for `rendezvous.py`.

    crowd.py master|etcd|torch ADDRESS FIRST COUNT NODES LEAST INTERVAL

It plays COUNT of the NODES nodes of a job, from number FIRST on, which meet at ADDRESS. The job trains with at least
LEAST nodes, and a node sends a heartbeat every INTERVAL seconds. SIGUSR1 lets the nodes join. It reports when all of
its nodes have reached a state: "ready", "joining", "known" (to the rendezvous) or "placed-N" (each has its rank in a
world of N nodes), and "failed" if one of them gives up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from reporting import report

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec

JOB = "benchmark"
WORKERS_PER_NODE = 8

KIND, ADDRESS = sys.argv[1:3]
FIRST, COUNT, NODES, LEAST = map(int, sys.argv[3:7])
INTERVAL = float(sys.argv[7])

_reached: Counter[str] = Counter()
_lock = threading.Lock()


def reach(event: str) -> None:
    """One more node has reached a state, which each node does once; report it if it is the last one. Thread-safe."""
    now = time.monotonic_ns()
    with _lock:
        _reached[event] += 1
        if _reached[event] == COUNT:
            report(event, now)


def fail(why: str) -> None:
    """A node has given up."""
    print(why, file=sys.stderr, flush=True)
    report("failed")


class Node:
    """A node with the product's own client, and so with a connection of its own. It starts no workers."""

    def __init__(self, number: int) -> None:
        host, _, port = ADDRESS.rpartition(":")
        rules = JobRules(min_nodes=LEAST, max_nodes=NODES, keep_alive_interval=INTERVAL)
        spec = JobSpec(
            Entrypoint("program", "true"),
            run_id=JOB,
            workers_per_node=WORKERS_PER_NODE,
            rules=rules,
            rendezvous=kinds.Master(host, int(port), is_host=False),
            node_id=f"node{number}",
            local_addr="127.0.0.1",
        )
        if KIND == "etcd":
            # As on the command line: the end of a lease is the loss of its node.
            rules = msgspec.structs.replace(rules, lost_after=0.0)
            spec = msgspec.structs.replace(spec, rendezvous=kinds.Store(((host, int(port)),)), rules=rules)
        self._spec = spec
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
                    reach("known")
                before = self._state.round
                self._state.accept(client.assignment)
                ranks = self._state.ranks
                if ranks is not None and ranks.key != before:
                    reach(f"placed-{ranks.nodes}")
            phase = NodePhase.RUNNING if self._state.ranks else NodePhase.WAITING
            client.report(self._state.report(phase))
            await changed.wait()
            changed.clear()
        raise ConnectionError(client.problem)


def our_nodes() -> Callable[[], None]:
    """Prepare the nodes; the function that is returned lets them join."""
    # Imported before the clock starts, as the nodes of torch have imported theirs.
    from dlrover_run.transport.grpc_setup import load_grpc

    load_grpc()
    if KIND == "etcd":
        import dlrover_run.rendezvous.kv.client
        import dlrover_run.store.etcd.store
        from dlrover_run.store.etcd import codec

        codec.load()
    else:
        import dlrover_run.rendezvous.master_client.client  # noqa: F401
    nodes = [Node(number) for number in range(FIRST, FIRST + COUNT)]

    async def live() -> None:
        try:
            await asyncio.gather(*(node.live() for node in nodes))
        except ConnectionError as error:
            fail(str(error))

    return lambda: asyncio.run(live())


def torch_nodes() -> Callable[[], None]:
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
            endpoint=ADDRESS,
            run_id=JOB,
            min_nodes=LEAST,
            max_nodes=NODES,
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
                reach("known")
            return answer

        backend.set_state = set_state  # type: ignore[method-assign]
        return create_handler(store, backend, parameters)

    def live(handler: Any) -> None:
        try:
            world = handler.next_rendezvous()
        except Exception as error:
            # Any failure of a node of the rival is its result.
            fail(f"{type(error).__name__}: {error}")
            os._exit(1)
        reach(f"placed-{world.world_size}")

    # A handler sends heartbeats for as long as it is referenced.
    handlers = [connect() for _ in range(COUNT)]
    threads = [threading.Thread(target=live, args=(handler,), daemon=True) for handler in handlers]

    def join() -> None:
        for thread in threads:
            thread.start()
        threading.Event().wait()

    return join


# Blocked before there are threads, so that it waits for `sigwait`.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
join = torch_nodes() if KIND == "torch" else our_nodes()
report("ready")
signal.sigwait({signal.SIGUSR1})
report("joining")
join()
