"""A crowd of nodes of ours that meet in etcd: each with a client, and so a connection, of its own.

`python -m rendezvous_bench.etcd_nodes ORDER`. Their boards are the product's own, the election included. Only what a
node does besides (start workers) is left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import sys

from dlrover_run.etcd import codec
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import EtcdSpec
from dlrover_run.transport.grpc_setup import load_grpc
from rendezvous_bench.crowd import Join, Order, Tally, play
from rendezvous_bench.node import Node


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


async def _live(node: Node, etcd: EtcdSpec) -> None:
    """Join, and stay until the process ends. Raises ConnectionError when the node gives up."""
    changed = asyncio.Event()
    # As the command line has it: the end of a lease is the loss of its node.
    rules = dataclasses.replace(node.spec.rules, lost_after=0.0)
    client = open_client(dataclasses.replace(node.spec, backend="etcd", etcd=etcd, rules=rules), changed.set, _say)
    while client.problem is None:
        # Before the first word of an elected agent the assignment is nobody's.
        if client.assignment.epoch:
            node.hear(client.assignment)
        client.report(node.status)
        await changed.wait()
        changed.clear()
    raise ConnectionError(client.problem)


async def _live_all(nodes: list[Node], etcd: EtcdSpec, tally: Tally) -> None:
    try:
        await asyncio.gather(*(_live(node, etcd) for node in nodes))
    except ConnectionError as error:
        tally.fail(str(error))
        sys.exit(1)


def _prepare(order: Order, tally: Tally) -> Join:
    load_grpc()
    codec.load()
    # `open_client` would do so while the clock runs, and the nodes of a master have imported theirs.
    for module in ("rendezvous.etcd_client", "etcd.store"):
        importlib.import_module(f"dlrover_run.{module}")
    host, _, port = order.address.rpartition(":")
    nodes = [Node(order, number, tally) for number in range(order.first, order.first + order.count)]
    return lambda: asyncio.run(_live_all(nodes, EtcdSpec(((host, int(port)),)), tally))


if __name__ == "__main__":
    play(_prepare)
