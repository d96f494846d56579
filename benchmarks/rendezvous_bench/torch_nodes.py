"""A crowd of nodes of torch's c10d rendezvous: a thread and a store connection each, made by torch's own factories.

`python -m rendezvous_bench.torch_nodes ORDER`. The nodes are connected to their store before they are told to join: a
connection looks up the name of its peer, and many at once would measure this machine's name server.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from rendezvous_bench.crowd import Join, Order, Tally, play


def _tell_when_heard(backend: C10dRendezvousBackend, tally: Tally) -> None:
    """The first state that a node manages to write is the one with itself in it."""
    write = backend.set_state
    written = False

    def set_state(state: bytes, token: Any = None) -> Any:
        nonlocal written
        answer = write(state, token)
        if answer is not None and answer[2] and not written:
            written = True
            tally.reach("heard")
        return answer

    backend.set_state = set_state  # type: ignore[method-assign]


def _connect(order: Order, tally: Tally) -> DynamicRendezvousHandler:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=order.address,
        run_id=order.job,
        min_nodes=order.least,
        max_nodes=order.nodes,
        local_addr="127.0.0.1",
        is_host="False",
    )
    backend, store = create_backend(parameters)
    _tell_when_heard(backend, tally)
    return create_handler(store, backend, parameters)


def _live(handler: DynamicRendezvousHandler, tally: Tally) -> None:
    try:
        place = handler.next_rendezvous()
    except Exception as error:
        # Whatever a node of the rival dies of is its result.
        tally.fail(f"{type(error).__name__}: {error}")
        os._exit(1)
    tally.reach("seated", place.world_size)


def _prepare(order: Order, tally: Tally) -> Join:
    # The handlers have to be held for as long as they shall send heartbeats.
    handlers = [_connect(order, tally) for _ in range(order.count)]
    threads = [threading.Thread(target=_live, args=(handler, tally), daemon=True) for handler in handlers]

    def join() -> None:
        for thread in threads:
            thread.start()
        threading.Event().wait()

    return join


if __name__ == "__main__":
    play(_prepare)
