"""Decides where this job's records live, and under which name, from what the user said about nodes and rendezvous.

torchrun's rule for a lone node is kept: with no word about a meeting place it needs none, and each such job gets a name
of its own. Here that is the `memory` backend; a node that was told a port keeps to it, and that is `static`. Several
nodes that `c10d` (or `master`, which is the same) brings together meet at a master, those of `etcd` in a cluster of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from dlrover_run.command_line import etcd_place, flags
from dlrover_run.command_line.etcd_place import Members
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.options import STATIC_ADDRESS
from dlrover_run.spec import SpecError

MASTER_PORT = 29400
"""The port of a master when nobody names one, as of torchrun's c10d."""

MASTER_VARIABLE = "DLROVER_MASTER_ADDR"
"""Says where a master runs already, where no flag says where the nodes meet."""

RANK_VARIABLES = ("NODE_RANK", "WORKER_RANK")
"""What a cluster manager calls a node's number, the newer name first."""

ID_VARIABLES = ("NODE_ID", "WORKER_ID")
"""What a cluster manager calls a node's name, the newer name first."""

STATIC_RANK_HINTS = ("JOB_COMPLETION_INDEX", "SLURM_NODEID", *RANK_VARIABLES)
"""Variables in which schedulers keep the number that `static` takes from --node-rank alone, as torchrun does."""

MEETING_AT_A_MASTER = ("c10d", "master")
MEETING_IN_ETCD = ("etcd", "etcd-v2")

LONGEST_NAME = 255
"""Characters of a name that nodes tell each other."""

_NODE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HIGHEST_RANK = 1_000_000


class Wish(NamedTuple):
    """What was asked for. Texts stay texts until it is known that they count: torchrun ignores them otherwise.

    None is what nobody gave; a text that has a default holds it.
    """

    nodes: Given
    spares: int
    standalone: bool
    backend: Given | None
    endpoint: Given
    run_id: Given
    node_rank: int | None
    master_addr: Given | None
    master_port: int | None
    environ: Mapping[str, str]


class Endpoint(NamedTuple):
    """Where the master is. `elsewhere` says that it runs already and is no business of this node."""

    host: str
    port: int
    elsewhere: bool = False


class Meeting(NamedTuple):
    """What is done: the fields of `JobSpec` and `Rules` with the same names, where a master or an etcd is, and
    sentences about what will have no effect, or another one. `own_master` says that the master is none that anybody
    could name: whoever starts all nodes on this machine starts it with them."""

    backend: Literal["memory", "static", "master", "etcd"]
    run_id: str
    least: int = 1
    most: int = 1
    store: tuple[str, int] | None = None
    endpoint: Endpoint | None = None
    members: Members | None = None
    own_master: bool = False
    node_rank: int | None = None
    node_id: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def has_place(self) -> bool:
        """Whether nodes meet, so that each hears of the others."""
        return self.endpoint is not None or self.members is not None or self.own_master


def settle(wish: Wish, fresh_id: str) -> Meeting:
    """The meeting that a wish comes to; `fresh_id` is a name that no other job has."""
    least, most = flags.node_range(*wish.nodes)
    if wish.standalone:
        if most != 1:
            asked = f"{wish.nodes.place} asks for {wish.nodes.text}"
            raise SpecError(f"--standalone is for one node, and {asked}: leave one out.")
        return _alone(wish, fresh_id)
    several = most + wish.spares > 1
    backend = wish.backend or Given("--rdzv-backend", "static")
    if backend.text in MEETING_AT_A_MASTER or (several and _found_by_variable(wish)):
        if several:
            return _at_a_master(wish, backend, least, most)
        # The endpoint is not needed, but a mistake in it would be one when a second node is added.
        flags.endpoint(*wish.endpoint, MASTER_PORT)
        return _alone(wish, wish.run_id.text or fresh_id)
    if backend.text in MEETING_IN_ETCD:
        if several:
            return _in_etcd(wish, backend, least, most)
        if wish.endpoint.text.strip():
            etcd_place.find_members(*wish.endpoint)
        return _alone(wish, wish.run_id.text or fresh_id)
    if backend.text == "static":
        if least != most:
            remedy = (
                "give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, set "
                f"{MASTER_VARIABLE}, or give --local-nodes={most} to start all nodes here"
            )
            raise flags.wrong(*wish.nodes, "is an elastic range, and static has none", remedy)
        if most == 1 and not wish.endpoint.text.strip() and wish.master_port is None:
            return _alone(wish, fresh_id)
        return _static(wish, most, fresh_id)
    raise flags.wrong(*backend, "is not known", "give c10d, etcd or static, or leave it out for one node")


def settle_here(wish: Wish) -> Meeting:
    """The meeting of nodes that are all started on this machine: in the etcd that the wish names, else at a master of
    their own. Their ranks and names come from whoever starts them, and the machine's own in a cluster are not theirs.
    """
    least, most = flags.node_range(*wish.nodes)
    backend = wish.backend or Given("--rdzv-backend", MEETING_AT_A_MASTER[0])
    if backend.text in MEETING_IN_ETCD:
        return _in_etcd(wish._replace(environ={}), backend, least, most)
    if backend.text not in MEETING_AT_A_MASTER:
        raise flags.wrong(*backend, "does not go with --local-nodes", "give c10d or etcd, or leave it out")
    variable = Given(MASTER_VARIABLE, wish.environ.get(MASTER_VARIABLE, ""))
    unused = [given.place for given in (wish.endpoint, variable) if given.text.strip()]
    run_id = shared_run_id(wish.run_id)
    return Meeting("master", run_id, least, most, own_master=True, warnings=tuple(map(without_effect_here, unused)))


def without_effect_here(what: str) -> str:
    """The sentence about what would say where a master is, or how it does its work, and is of no use here."""
    return f"{what} has no effect with --local-nodes, whose nodes meet at a master of their own."


def _found_by_variable(wish: Wish) -> bool:
    """Whether the variable counts: a flag that says where to meet is torchrun's static, whatever the variable says."""
    said = wish.backend or wish.endpoint.text.strip() or wish.master_addr or wish.master_port is not None
    return not said and bool(wish.environ.get(MASTER_VARIABLE, "").strip())


def _at_a_master(wish: Wish, backend: Given, least: int, most: int) -> Meeting:
    variable = Given(MASTER_VARIABLE, wish.environ.get(MASTER_VARIABLE, ""))
    place = next((given for given in (wish.endpoint, variable) if given.text.strip()), None)
    if place is None:
        problem = "needs a place where the nodes meet"
        remedy = f"give --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, or set {MASTER_VARIABLE}"
        if wish.environ.get("SLURM_JOB_NODELIST"):
            remedy += '; in a job of Slurm HOST is "$(scontrol show hostnames | head -n 1)"'
        raise flags.wrong(*backend, problem, remedy)
    host, port = flags.endpoint(*place, MASTER_PORT)
    if port == 0:
        raise flags.wrong(*place, "has port 0, which is another one on every node", "give a port from 1 to 65535")
    return Meeting(
        "master",
        shared_run_id(wish.run_id),
        least,
        most,
        endpoint=Endpoint(host, port, elsewhere=place is variable),
        node_rank=_rank_wish(wish),
        node_id=_node_id(wish.environ),
    )


def _in_etcd(wish: Wish, backend: Given, least: int, most: int) -> Meeting:
    if not wish.endpoint.text.strip():
        remedy = "give --rdzv-endpoint=HOST:PORT of an etcd, or of several of its members with commas between them"
        raise flags.wrong(*backend, "needs a place where the nodes meet", remedy)
    members = etcd_place.find_members(*wish.endpoint)
    other_name = f"{backend.place} {backend.text!r} is taken as etcd, whose v3 API is spoken: that of v2 is not needed."
    return Meeting(
        "etcd",
        shared_run_id(wish.run_id),
        least,
        most,
        members=members,
        node_rank=_rank_wish(wish),
        node_id=_node_id(wish.environ),
        warnings=() if backend.text == "etcd" else (other_name,),
    )


def shared_run_id(given: Given) -> str:
    """The name under which the nodes find each other, so a fresh one on each node would not do."""
    if not 0 < len(given.text) <= LONGEST_NAME or not given.text.isprintable():
        remedy = f"give 1 to {LONGEST_NAME} printable characters, the same on every node"
        raise flags.wrong(*given, "is no name under which nodes meet", remedy)
    return given.text


def _rank_wish(wish: Wish) -> int | None:
    by_flag = None if wish.node_rank is None else Given("--node-rank", str(wish.node_rank))
    given = by_flag or _first_set(wish.environ, RANK_VARIABLES)
    return flags.whole_number(*given, 0, _HIGHEST_RANK) if given else None


def _node_id(environ: Mapping[str, str]) -> str:
    given = _first_set(environ, ID_VARIABLES)
    if given is None:
        return ""
    if not _NODE_ID.fullmatch(given.text):
        remedy = "set it to at most 128 letters, digits, dots, dashes, underscores and colons, or unset it"
        raise flags.wrong(*given, "is no name for a node", remedy)
    return given.text


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> Given | None:
    return next((Given(name, environ[name]) for name in names if environ.get(name)), None)


def _alone(wish: Wish, run_id: str) -> Meeting:
    if not wish.node_rank:
        return Meeting("memory", run_id)
    ignored = f"--node-rank {wish.node_rank} has no effect, since this job has one node and no static rendezvous."
    return Meeting("memory", run_id, warnings=(ignored,))


def _static(wish: Wish, nodes: int, fresh_id: str) -> Meeting:
    node_rank = wish.node_rank or 0
    if not 0 <= node_rank < nodes:
        remedy = (
            f"give 0 to {nodes - 1}, since {wish.nodes.place} is {nodes}" if nodes > 1 else "give 0, or more --nnodes"
        )
        raise flags.wrong("--node-rank", str(node_rank), "is out of range", remedy)
    port = flags.STATIC_PORT if wish.master_port is None else wish.master_port
    if wish.endpoint.text.strip():
        address, port = flags.endpoint(*wish.endpoint, port)
    else:
        address = flags.host(*wish.master_addr) if wish.master_addr else STATIC_ADDRESS
    run_id = wish.run_id.text or fresh_id
    if port:
        warnings = _assumed_defaults(wish, nodes, address, port)
        return Meeting("static", run_id, nodes, nodes, store=(address, port), node_rank=node_rank, warnings=warnings)
    if nodes > 1:
        raise SpecError("Port 0 is another port on every node: give --master-port a number from 1 to 65535.")
    return _alone(wish, run_id)


def _assumed_defaults(wish: Wish, nodes: int, address: str, port: int) -> tuple[str, ...]:
    """Sentences about a rank and an address that were not given where several nodes need different ranks and one
    address. The defaults are torchrun's, and with them the nodes may wait for each other until a time-out."""
    if nodes == 1:
        return ()
    warnings = []
    if wish.node_rank is None:
        hint = _first_set(wish.environ, STATIC_RANK_HINTS)
        given = f"; {hint.place}={hint.text} is not read: give --node-rank=${hint.place}" if hint else ""
        warnings.append(f"--node-rank is not given, so this node takes rank 0 of {nodes}{given}.")
    said = wish.environ.get("MASTER_ADDR", "").strip()
    if said and wish.master_addr is None and not wish.endpoint.text.strip() and said not in (address, "localhost"):
        remedy = "give --master-addr=$MASTER_ADDR or set PET_MASTER_ADDR"
        warnings.append(f"MASTER_ADDR={said} is not read, so rank 0 is expected at {address}:{port}: {remedy}.")
    return tuple(warnings)
