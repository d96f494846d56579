"""Decides where this job's records live, and under which name, from what the user said about nodes and rendezvous.

torchrun's rule for a lone node is kept: with no word about a meeting place it needs none, and each such job gets a name
of its own. Here that is the `memory` backend; a node that was told a port keeps to it, and that is `static`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.spec import SpecError

NOT_BUILT = ("c10d", "etcd", "etcd-v2", "master")


class Wish(NamedTuple):
    """What was asked for. Texts stay texts until it is known that they count: torchrun ignores them otherwise."""

    nodes: Given
    standalone: bool
    backend: Given
    endpoint: Given
    run_id: str
    node_rank: int
    master_addr: Given
    master_port: int | None


class Meeting(NamedTuple):
    """What is done: the fields of `JobSpec` with the same names, and sentences about what will have no effect."""

    backend: Literal["memory", "static"]
    run_id: str
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    warnings: tuple[str, ...] = ()


def settle(wish: Wish, fresh_id: str) -> Meeting:
    """The meeting that a wish comes to; `fresh_id` is a name that no other job has."""
    least, nodes = flags.node_range(*wish.nodes)
    if least != nodes:
        problem = "is an elastic range, and those are not built yet in this version"
        raise flags.wrong(*wish.nodes, problem, f"give one number, such as {nodes}")
    if wish.standalone:
        if nodes != 1:
            raise SpecError(f"--standalone is for one node, and {wish.nodes.place} asks for {nodes}: leave one out.")
        return _alone(wish, fresh_id)
    if wish.backend.text == "static":
        if nodes == 1 and not wish.endpoint.text.strip() and wish.master_port is None:
            return _alone(wish, fresh_id)
        return _static(wish, nodes, fresh_id)
    if wish.backend.text == "c10d" and nodes == 1:
        # The endpoint is not needed, but a mistake in it would be one when a second node is added.
        flags.endpoint(*wish.endpoint, flags.STATIC_PORT)
        return _alone(wish, wish.run_id or fresh_id)
    if wish.backend.text in NOT_BUILT:
        lone = " for several nodes" if wish.backend.text == "c10d" else ""
        remedy = "give static, with --node-rank, --master-addr and --master-port"
        raise flags.wrong(*wish.backend, f"is not built yet{lone} in this version", remedy)
    raise flags.wrong(*wish.backend, "is not known", "give static, give c10d for one node, or leave it out")


def _alone(wish: Wish, run_id: str) -> Meeting:
    if not wish.node_rank:
        return Meeting("memory", run_id)
    ignored = f"--node-rank {wish.node_rank} has no effect, since this job has one node and no static rendezvous."
    return Meeting("memory", run_id, warnings=(ignored,))


def _static(wish: Wish, nodes: int, fresh_id: str) -> Meeting:
    if not 0 <= wish.node_rank < nodes:
        remedy = (
            f"give 0 to {nodes - 1}, since {wish.nodes.place} is {nodes}" if nodes > 1 else "give 0, or more --nnodes"
        )
        raise flags.wrong("--node-rank", str(wish.node_rank), "is out of range", remedy)
    port = flags.STATIC_PORT if wish.master_port is None else wish.master_port
    if wish.endpoint.text.strip():
        address, port = flags.endpoint(*wish.endpoint, port)
    else:
        address = flags.host(*wish.master_addr)
    run_id = wish.run_id or fresh_id
    if port:
        return Meeting("static", run_id, nodes, wish.node_rank, address, port)
    if nodes > 1:
        raise SpecError("Port 0 is another port on every node: give --master-port a number from 1 to 65535.")
    return _alone(wish, run_id)
