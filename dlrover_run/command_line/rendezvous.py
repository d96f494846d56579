"""Resolves the rendezvous of a job: its kind, name and endpoints, from the flags and variables of the user.

torchrun's rule for a single node is kept: without an endpoint it needs no rendezvous, and each such job gets a fresh
name (`Alone`); a single node with a given port is `Static`. Several nodes meet where the backend of `--rdzv-backend`
says (`rendezvous/backends.py`): at a master, or in a store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dlrover_run.command_line import credentials, values
from dlrover_run.command_line.flag import STATIC_ADDRESS
from dlrover_run.rendezvous import backends, kinds
from dlrover_run.rendezvous.backends import MASTER_VARIABLE, Backend
from dlrover_run.spec import FlagValue, SpecError
from dlrover_run.words.text import join_address

UNNAMED = "none"
"""torchrun's default of `--rdzv-id`."""

RANK_VARIABLES = ("NODE_RANK", "WORKER_RANK")
"""The number that a cluster manager gives a node, the newer name first."""

ID_VARIABLES = ("NODE_ID", "WORKER_ID")
"""The name that a cluster manager gives a node, the newer name first."""

STATIC_RANK_HINTS = ("JOB_COMPLETION_INDEX", "SLURM_NODEID", *RANK_VARIABLES)
"""Variables of schedulers with the node rank, which `static` takes from --node-rank alone, as torchrun does."""

LOCAL_MASTER = kinds.Master(host="127.0.0.1", port=0, is_host=False)
"""The master of nodes on this machine. Its address and token are known when it has been started."""

USUAL = "c10d"
"""The backend of several nodes where no flag names one."""

_SCHEMES = ("http", "https")
_NODE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_RANK = 1_000_000


class RendezvousArgs(NamedTuple):
    """The flags of the rendezvous. Texts are parsed only if they count, because torchrun ignores them otherwise.

    None means that a flag was not given; a text that has a default holds the default. `is_host` is whether this node
    hosts the master of the endpoint, None if the address decides. `hosts` are the nodes of the job as its cluster lists
    them, that of the endpoint first; empty if they are not known.
    """

    nodes: FlagValue
    endpoint: FlagValue
    run_id: FlagValue
    environ: Mapping[str, str]
    spares: int = 0
    standalone: bool = False
    backend: FlagValue | None = None
    node_rank: FlagValue | None = None
    master_addr: FlagValue | None = None
    master_port: int | None = None
    is_host: bool | None = None
    hosts: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """The number of this node. Raises SpecError."""
        return values.integer(*self.node_rank, 0) if self.node_rank else None

    @property
    def preferred_rank(self) -> FlagValue | None:
        """The number of this node where nodes communicate: the variables of a cluster manager count too, if they hold
        a number (see `unread_hints`)."""
        return self.node_rank or _first_fit(self.environ, RANK_VARIABLES, _is_rank)


class Rendezvous(NamedTuple):
    """The resolved rendezvous: where the nodes meet, and who this node is there.

    `place` has no credentials yet; it is `LOCAL_MASTER` if the launcher of all nodes on this machine starts a master
    with them. `met` says where the nodes meet, with the source of that, None where one node meets none. `protocol` is
    the scheme before the members of a store, with the flag that gave it. `node_rank`, `node_id`, `name` and `endpoint`
    are the fields of `JobSpec`.
    """

    place: kinds.Rendezvous
    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    met: FlagValue | None = None
    protocol: FlagValue = FlagValue("", "")
    node_rank: int | None = None
    node_id: str = ""
    warnings: tuple[str, ...] = ()
    name: str = ""
    endpoint: str = ""

    @property
    def coordinated(self) -> bool:
        """Whether nodes communicate, so that each learns of the others."""
        return self.place.coordinated

    @property
    def nodes_apart(self) -> bool:
        """Whether the job has several nodes that do not communicate. Asked by features that need nodes to communicate,
        before they warn or refuse."""
        return self.max_nodes > 1 and not self.coordinated


def resolve(args: RendezvousArgs, fresh_id: str) -> Rendezvous:
    """The rendezvous of this node; `fresh_id` is a name that no other job has. Raises SpecError."""
    min_nodes, max_nodes = values.node_range(*args.nodes)
    if args.standalone:
        if max_nodes != 1:
            given = f"{args.nodes.source} is {args.nodes.text}"
            raise SpecError(f"--standalone runs a single node, and {given}: leave one out.")
        return _single_node(args, fresh_id)
    several = max_nodes + args.spares > 1
    word = args.backend or FlagValue("--rdzv-backend", "static")
    backend = backends.by_word(word.text)
    if several and _set_by_variable(args) and not (backend and backend.kind.coordinated):
        backend = backends.by_word(USUAL)
    if backend is None:
        offered = values.alternatives([row.words[0] for row in _by_use()])
        raise values.invalid(*word, "is not valid", f"give {offered}, or leave it out for one node")
    if backend.kind.ranked:
        if min_nodes != max_nodes:
            remedy = (
                f"give --rdzv-backend={USUAL} and --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, set "
                f"{MASTER_VARIABLE}, or give --local-nodes={max_nodes} to start all nodes here"
            )
            raise values.invalid(
                *args.nodes, f"is a range, which --rdzv-backend={backend.name} does not support", remedy
            )
        if max_nodes == 1 and not args.endpoint.text.strip() and args.master_port is None:
            return _single_node(args, fresh_id)
        return _static(args, backend, max_nodes, fresh_id)
    if several:
        several_at = _with_store if backend.kind.leased else _with_master
        return several_at(args, backend, word, min_nodes, max_nodes)
    # A single node does not need the endpoint, but an error in it would show when a second node is added.
    if not backend.kind.leased:
        values.endpoint(*args.endpoint, backend.port)
    elif args.endpoint.text.strip():
        parse_members(*args.endpoint, backend)
    return _single_node(args, args.run_id.text or fresh_id)


def _by_use() -> Sequence[Backend]:
    """The backends that `--rdzv-backend` offers, those for several nodes first."""
    return sorted((row for row in backends.TABLE if row.words), key=lambda row: row.kind.ranked)


def resolve_local(args: RendezvousArgs, fresh_id: str) -> Rendezvous:
    """The rendezvous of nodes that are all started on this machine: through the store that the flags name, else through
    a local master. The launcher gives them ranks and names, so the machine's own in a cluster are not used. No other
    node finds a local master by the job's name, so an unnamed job gets `fresh_id`: what a script saves by that name is
    then not taken for another run's."""
    min_nodes, max_nodes = values.node_range(*args.nodes)
    word = args.backend or FlagValue("--rdzv-backend", USUAL)
    backend = backends.by_word(word.text)
    if backend is not None and backend.kind.leased:
        return _with_store(args._replace(environ={}), backend, word, min_nodes, max_nodes)
    if backend is None or not backend.kind.hosted:
        offered = values.alternatives([row.words[0] for row in _by_use() if row.kind.coordinated])
        raise values.invalid(*word, "cannot be used with --local-nodes", f"give {offered}, or leave it out")
    run_id = values.shared_name(*args.run_id)
    return Rendezvous(LOCAL_MASTER, fresh_id if run_id == UNNAMED else run_id, min_nodes, max_nodes)


def _set_by_variable(args: RendezvousArgs) -> bool:
    """Whether the variable counts. It does not beside a flag of the rendezvous, which means torchrun's static."""
    by_flag = args.backend or args.endpoint.text.strip() or args.master_addr or args.master_port is not None
    return not by_flag and bool(args.environ.get(MASTER_VARIABLE, "").strip())


def _with_master(args: RendezvousArgs, backend: Backend, word: FlagValue, min_nodes: int, max_nodes: int) -> Rendezvous:
    variable = FlagValue(MASTER_VARIABLE, args.environ.get(MASTER_VARIABLE, ""))
    # Kubeflow's trainer gives a master address and no endpoint, also for --rdzv-backend=c10d.
    by_address = FlagValue("", "")
    if args.master_addr and args.master_addr.text.strip():
        host = values.host(*args.master_addr)
        port = backend.port if args.master_port is None else args.master_port
        by_address = FlagValue(args.master_addr.source, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    endpoint = next((value for value in (args.endpoint, variable, by_address) if value.text.strip()), None)
    if endpoint is None:
        remedy = f"give --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, or set {MASTER_VARIABLE}"
        if args.environ.get("SLURM_JOB_NODELIST"):
            remedy += "; in a job of Slurm start the launcher with srun, and leave it out"
        raise values.invalid(*word, "needs an endpoint", remedy)
    host, port = values.endpoint(*endpoint, backend.port)
    if port == 0:
        problem = "has port 0, which would be a different port on each node"
        raise values.invalid(*endpoint, problem, "give a port from 1 to 65535")
    # A master that the variable names runs already.
    master = kinds.Master(host, port, is_host=False if endpoint is variable else args.is_host, hosts=args.hosts)
    return Rendezvous(
        master,
        values.shared_name(*args.run_id),
        min_nodes,
        max_nodes,
        FlagValue(endpoint.source, f"master at {master.endpoint}"),
        node_rank=_preferred_rank(args),
        node_id=_node_id(args.environ),
        warnings=unread_hints(args),
    )


def _with_store(args: RendezvousArgs, backend: Backend, word: FlagValue, min_nodes: int, max_nodes: int) -> Rendezvous:
    name = backend.name
    if not args.endpoint.text.strip():
        remedy = f"give --rdzv-endpoint=HOST:PORT of an {name}, or of several of its members with commas between them"
        raise values.invalid(*word, "needs an endpoint", remedy)
    members, protocol = parse_members(*args.endpoint, backend)
    said = backend.aliases.get(word.text)
    alias = f"{word.source} {word.text!r} means {name}: {said}."
    return Rendezvous(
        kinds.Store(members, name=name),
        values.shared_name(*args.run_id),
        min_nodes,
        max_nodes,
        FlagValue(args.endpoint.source, f"{name} at {args.endpoint.text}"),
        FlagValue(args.endpoint.source, protocol),
        node_rank=_preferred_rank(args),
        node_id=_node_id(args.environ),
        warnings=(*unread_hints(args), *((alias,) if said else ())),
    )


def unread_hints(args: RendezvousArgs) -> tuple[str, ...]:
    """Warnings of variables that other programs use too, and that hold no rank or name of a node as they would for this
    one. They are hints, so the job begins without them; flags and variables of our own are refused. Called for a
    rendezvous at a master or in a store."""
    found = []
    if args.node_rank is None and not _first_fit(args.environ, RANK_VARIABLES, _is_rank):
        hint = _first_set(args.environ, RANK_VARIABLES)
        found += [f"{hint.source}={hint.text!r} is no rank (0 to {_MAX_RANK}) and is not used." if hint else ""]
    if not _first_fit(args.environ, ID_VARIABLES, _is_node_id):
        hint = _first_set(args.environ, ID_VARIABLES)
        problem = "is no name of a node (1-128 letters, digits, dots, dashes, underscores or colons)"
        found += [f"{hint.source}={hint.text!r} {problem} and is not used." if hint else ""]
    return tuple(filter(None, found))


def _preferred_rank(args: RendezvousArgs) -> int | None:
    given = args.preferred_rank
    return values.integer(*given, 0, _MAX_RANK) if given else None


def _node_id(environ: Mapping[str, str]) -> str:
    given = _first_fit(environ, ID_VARIABLES, _is_node_id)
    return given.text if given else ""


def _is_node_id(text: str) -> bool:
    return _NODE_ID.fullmatch(text) is not None


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_RANK)) and int(text) <= _MAX_RANK


def _first_fit(environ: Mapping[str, str], names: tuple[str, ...], fits: Callable[[str], bool]) -> FlagValue | None:
    return next((FlagValue(name, text) for name in names if fits(text := environ.get(name, ""))), None)


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> FlagValue | None:
    return next((FlagValue(name, environ[name]) for name in names if environ.get(name)), None)


def _single_node(args: RendezvousArgs, run_id: str) -> Rendezvous:
    ignored = f"--node-rank {args.rank} has no effect, since this job has one node and no static rendezvous."
    warnings = (ignored,) if args.rank else ()
    return Rendezvous(kinds.Alone(), run_id, warnings=warnings, name=_name(args), endpoint=args.endpoint.text.strip())


def _name(args: RendezvousArgs) -> str:
    """The user's name of a job whose nodes need none to meet; empty without one. torchrun takes any text."""
    given = args.run_id.text
    return given if given != UNNAMED and given.isprintable() and len(given) <= values.MAX_NAME_LENGTH else ""


def _static(args: RendezvousArgs, backend: Backend, nodes: int, fresh_id: str) -> Rendezvous:
    node_rank = args.rank or 0
    if not 0 <= node_rank < nodes:
        remedy = (
            f"give 0 to {nodes - 1}, since {args.nodes.source} is {nodes}" if nodes > 1 else "give 0, or more --nnodes"
        )
        raise values.invalid("--node-rank", str(node_rank), "is out of range", remedy)
    port = backend.port if args.master_port is None else args.master_port
    source = "default of --master-addr"
    if args.endpoint.text.strip():
        address, port = values.endpoint(*args.endpoint, port)
        source = args.endpoint.source
    elif args.master_addr:
        address, source = values.host(*args.master_addr), args.master_addr.source
    else:
        address = STATIC_ADDRESS
    run_id = args.run_id.text or fresh_id
    if port:
        warnings = _assumed_defaults(args, nodes, address, port)
        met = FlagValue(source, f"node 0 at {join_address(address, port)}")
        place = kinds.Static((address, port))
        return Rendezvous(place, run_id, nodes, nodes, met, node_rank=node_rank, warnings=warnings)
    if nodes > 1:
        raise SpecError("Port 0 would be a different port on each node: give --master-port a number from 1 to 65535.")
    return _single_node(args, run_id)


def _assumed_defaults(args: RendezvousArgs, nodes: int, address: str, port: int) -> tuple[str, ...]:
    """Warnings for a rank and an address that were not given, where several nodes need different ranks and one
    address. The defaults are torchrun's, and with them the nodes may wait for each other until a timeout."""
    if nodes == 1:
        return ()
    warnings = []
    if args.node_rank is None:
        hint = _first_set(args.environ, STATIC_RANK_HINTS)
        remedy = f"; {hint.source}={hint.text} is not read: give --node-rank=${hint.source}" if hint else ""
        warnings.append(f"--node-rank is not given, so this node takes rank 0 of {nodes}{remedy}.")
    given = args.environ.get("MASTER_ADDR", "").strip()
    if given and args.master_addr is None and not args.endpoint.text.strip() and given not in (address, "localhost"):
        remedy = "give --master-addr=$MASTER_ADDR or set PET_MASTER_ADDR"
        warnings.append(f"MASTER_ADDR={given} is not read, so rank 0 is expected at {address}:{port}: {remedy}.")
    return tuple(warnings)


def parse_members(source: str, text: str, backend: Backend) -> tuple[tuple[tuple[str, int], ...], str]:
    """The members of a store as `etcdctl --endpoints` takes them: several of them, with or without `http://` or
    `https://`, and the scheme, empty if there is none. Raises SpecError. Called for the endpoint of a job of several
    nodes, and for that of a single node, where it is only checked."""
    # Checked first, because the other errors quote the text.
    if "@" in text:
        raise SpecError(
            f"{source} contains a login, which every process list shows: give --rdzv-conf user=NAME and set "
            f"{credentials.PASSWORD_VARIABLE} or {credentials.PASSWORD_FILE_VARIABLE}."
        )
    addresses: list[tuple[str, int]] = []
    protocols: set[str] = set()
    for entry in (part.strip() for part in text.split(",")):
        scheme, separator, written = entry.rpartition("://")
        if separator:
            if scheme.lower() not in _SCHEMES:
                remedy = "give HOST:PORT, http://HOST:PORT or https://HOST:PORT"
                raise values.invalid(source, entry, f"is not the address of an {backend.name}", remedy)
            protocols.add(scheme.lower())
        written = written.removesuffix("/")
        if not written:
            raise values.invalid(source, text, "has an empty entry", "give HOST:PORT,HOST:PORT")
        host, port = values.endpoint(source, written, backend.port)
        if port == 0:
            raise values.invalid(source, written, "has port 0", "give a port from 1 to 65535")
        if (host.lower(), port) in ((name.lower(), number) for name, number in addresses):
            raise values.invalid(source, text, f"names {written} twice", "name each member once")
        addresses.append((host, port))
    if len(protocols) > 1:
        raise values.invalid(source, text, "has both http:// and https://", "give one of them for all members")
    return tuple(addresses), "".join(protocols)
