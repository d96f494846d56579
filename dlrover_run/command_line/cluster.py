"""What the cluster that started the launcher says of a job: the values of flags that are not given, and where its nodes
meet.

A single node takes the number of its workers, and has the rendezvous that it has without a cluster. This module is
imported only where a cluster may have started the launcher (`cluster_environment.may_complete`).
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from dlrover_run.command_line import values
from dlrover_run.command_line.parse import CommandLine
from dlrover_run.command_line.program import Program
from dlrover_run.command_line.rendezvous import USUAL, Rendezvous, RendezvousArgs
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.coordination.records.rules import MAX_NODES
from dlrover_run.environment.detect import detect
from dlrover_run.environment.host_list import find_host, short
from dlrover_run.environment.records import Context, Contradiction, Detected, Unstarted
from dlrover_run.rendezvous import backends
from dlrover_run.rendezvous.backends import MASTER_VARIABLE
from dlrover_run.spec import FlagValue, SpecError
from dlrover_run.transport.addresses import Address, is_local_address
from dlrover_run.words.text import join_address

_MAX_FILE = 16 * 1024 * 1024
"""Bytes of a host file that are read: more than `MAX_HOSTS` hosts."""

_MAX_COMMAND = 200
"""Characters of a command line in a message."""

_SEPARATE_JOBS = "--cluster=none for separate jobs"


class RequestedSize(NamedTuple):
    """What the flags and variables say about the size of a job, and about the place where its nodes meet.

    None means that they do not. `alone` is the flag that runs the job on this machine only. `any_size` means that the
    job runs on any number of nodes. `workers` is whether the cluster gives a single node the number of its workers.
    """

    nodes: FlagValue | None = None
    spares: int = 0
    alone: FlagValue | None = None
    place: FlagValue | None = None
    any_size: bool = False
    workers: bool = True

    @property
    def least(self) -> int:
        """The lowest number of nodes that a round may have."""
        return values.node_range(*self.nodes)[0] if self.nodes else 1

    @property
    def most(self) -> int:
        """The highest number of nodes, spares included; 0 if it is not given."""
        return values.node_range(*self.nodes)[1] + self.spares if self.nodes else 0


def context_of(line: CommandLine, program: Program) -> Context:
    """This machine, with the command line for messages. Called by both launchers, and by a command for running jobs,
    before `detect_job`."""
    words = [program.name]
    for dest, texts in line.values.items():
        spelling = program.by_dest[dest].spellings[0]
        words += [f"{spelling}={text}" if text else spelling for text in texts]
    command = shlex.join([*words, line.script or "SCRIPT", *line.script_args])
    if len(command) > _MAX_COMMAND or not command.isprintable():
        command = f"{program.name} ..."
    return Context(socket.gethostname(), _read, _is_interactive(), command, _is_own_address)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_FILE)
    except OSError:
        return None


def _is_interactive() -> bool:
    """Whether a person types at the terminal of this process. In a container with a terminal its first process, or a
    shell that is the first process, starts the launcher."""
    try:
        return os.isatty(0) and os.getpid() != 1 and os.getppid() != 1
    except OSError:
        return False


def _is_own_address(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return is_local_address(Address(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, host, 0))


def detect_job(
    flags: FlagValues,
    environ: Mapping[str, str],
    requested: RequestedSize,
    context: Context,
    inform: Callable[[str], None],
) -> Detected | None:
    """The job that the cluster started; None for any other. `inform` takes hints.

    A job of one node has the size 1, also where flags say so, and only its workers count.

    Raises SpecError when it contradicts the flags, and when this launcher would be a job of its own beside the others.
    Called by both launchers where the variables of a cluster are set, and by a command for running jobs to find the
    rendezvous of the job around its shell.
    """
    name, hostfile = flags.choice("cluster"), flags.explicit("hostfile")
    try:
        found = detect(environ, context, name, hostfile)
    except Contradiction as problem:
        # A command line that says everything needs no cluster. Each of several launchers on a node may be a node of it.
        several = requested.most > 1 or (requested.any_size and not problem.launchers)
        if _is_shared(requested, context) and several and problem.launchers in (0, requested.most):
            return None
        raise
    if isinstance(found, Unstarted):
        if requested.nodes or requested.alone or requested.place:
            return None
        if not found.hint_only:
            raise SpecError(f"{found.problem}: {found.remedy}.")
        inform(f"{found.problem}: {found.remedy}.")
        return None
    if found is None:
        return None
    if found.size != 1 and _is_several(found, requested):
        return found
    source = requested.alone or requested.nodes
    return replace(found, nodes=found.nodes or (source and source._replace(text="1"))) if requested.workers else None


def _is_shared(requested: RequestedSize, context: Context) -> bool:
    """Whether a place is given that can be the same on each node, so that none of them is a job of its own."""
    if requested.place is None or requested.alone or _is_loopback(requested.place):
        return False
    own = short(values.endpoint(*requested.place, 0)[0]) == short(context.hostname)
    return not own or requested.least > 1


def _is_several(found: Detected, requested: RequestedSize) -> bool:
    """Whether the job has several nodes. Raises SpecError when the flags contradict the cluster."""
    size = found.size
    if size is None:
        return _is_several_pods(found, requested)
    assert found.nodes is not None
    has = f"{found.title} has {size} nodes ({found.nodes.source})"
    if requested.alone:
        raise SpecError(
            f"{requested.alone.source} runs a job on this machine only, and {has}: leave it out, "
            f"or give {_SEPARATE_JOBS}."
        )
    if requested.nodes and requested.most < size:
        spares = f" or --spares={size - requested.most + requested.spares}" if requested.most > 1 else ""
        remedy = f"leave it out, or give --nnodes={size}{spares}, or {_SEPARATE_JOBS}"
        raise SpecError(f"{requested.nodes.source} is {requested.nodes.text}, and {has}: {remedy}.")
    if requested.nodes and requested.least > size and not requested.place:
        raise SpecError(
            f"{requested.nodes.source} is {requested.nodes.text}, and {has}: give --nnodes={size}, "
            "or request more nodes."
        )
    return True


def _is_several_pods(found: Detected, requested: RequestedSize) -> bool:
    if requested.any_size:
        return True
    rank = found.node_rank
    index = f"{rank.source} is {rank.text}" if rank else f"{found.title} has several nodes"
    if not requested.nodes and not requested.alone:
        raise SpecError(
            f"{index}, and the cluster does not say how many nodes the job has: give --nnodes=N, the completions of "
            f"the Job, or {_SEPARATE_JOBS}."
        )
    size = 1 if requested.alone else requested.most
    source = requested.alone or requested.nodes
    if source and size < found.least:
        text = f" {source.text}" if source.text else ""
        raise SpecError(
            f"{index}, and {source.source}{text} means {size} node{'s' * (size > 1)}: give --nnodes={found.least} or "
            f"more, or {_SEPARATE_JOBS}."
        )
    return size > 1


def values_of(found: Detected) -> Mapping[str, FlagValue]:
    """The values of flags that the cluster gives, by `Flag.dest`. A job of one node has its own name. Called by both
    launchers for a detected job."""
    run_id = None if found.size == 1 else found.run_id
    said = {"nnodes": found.nodes, "nproc_per_node": found.workers, "rdzv_id": run_id}
    return {dest: value for dest, value in said.items() if value is not None}


def complete(args: RendezvousArgs, found: Detected, context: Context) -> RendezvousArgs:
    """The options with the place where the nodes of a job in a cluster meet, as far as they leave it open. Raises
    SpecError when they and the cluster do not fit together. Called by both launchers before they resolve the
    rendezvous, and by a command for running jobs in the shell of a cluster."""
    if found.size == 1:
        return args
    endpoint = args.endpoint if args.endpoint.text.strip() else None
    backend = backends.by_word(args.backend.text) if args.backend else None
    by_address = endpoint is not None or args.master_addr is not None or args.master_port is not None
    if backend.kind.ranked if backend else args.backend is None and by_address:
        return _complete_static(args, found, endpoint)
    if args.node_rank is None and found.node_rank and args.preferred_rank is None:
        args = args._replace(node_rank=found.node_rank)
    if backend and backend.kind.leased:
        return args
    variable = args.environ.get(MASTER_VARIABLE, "").strip()
    if endpoint or variable or args.master_addr:
        given = endpoint or args.master_addr or FlagValue(MASTER_VARIABLE, variable)
        _refuse_own_host(given, args, found, context)
        return args
    if args.backend and not (backend and backend.kind.hosted):
        return args
    if found.host is None:
        raise SpecError(f"{found.title} does not say where its nodes meet: {found.no_host}.")
    port = found.port if args.master_port is None else args.master_port
    return args._replace(
        backend=args.backend or FlagValue("--cluster", USUAL),
        endpoint=FlagValue(found.host.source, join_address(found.host.text, port)),
        is_host=found.first,
        hosts=found.hosts if found.hosts[:1] == (found.host.text,) else (),
    )


def _complete_static(args: RendezvousArgs, found: Detected, endpoint: FlagValue | None) -> RendezvousArgs:
    given = endpoint or args.master_addr
    if args.node_rank is None:
        if found.node_rank is None:
            raise SpecError(f"{found.title} does not say which node this is: give --node-rank, or --rdzv-backend=c10d.")
        args = args._replace(node_rank=found.node_rank)
        host = values.endpoint(*endpoint, 0)[0] if endpoint else given.text if given else ""
        at = find_host(found.hosts, host)
        if at:
            raise SpecError(
                f"{given.source if given else ''} {host} is node {at} of {found.title}, and with static it must be "
                f"node 0: give {found.hosts[0]}, or --rdzv-backend=c10d."
            )
    if given and _is_loopback(given) and args.rank != 0:
        raise _loopback(given)
    if given:
        return args
    if found.host is None:
        raise SpecError(f"{found.title} does not say where its nodes meet: {found.no_host}.")
    if args.node_rank and found.first is not None and found.first != (args.rank == 0):
        raise SpecError(
            f"{args.node_rank.source} is {args.node_rank.text}, and node 0 of {found.title} is {found.host.text} "
            f"({found.host.source}): leave {args.node_rank.source} out, or give --master-addr."
        )
    return args._replace(
        master_addr=found.host, master_port=found.port if args.master_port is None else args.master_port
    )


def _refuse_own_host(given: FlagValue, args: RendezvousArgs, found: Detected, context: Context) -> None:
    """Refuse an endpoint that would be another master on each node."""
    if _is_loopback(given):
        raise _loopback(given)
    host = values.endpoint(*given, 0)[0]
    # Each node may have put its own name there; a job of one node would then be complete.
    if found.first is False and values.node_range(*args.nodes)[0] == 1 and short(host) == short(context.hostname):
        raise SpecError(
            f"{given.source} {given.text} is this node, which is not the first of {found.title}, so each node may "
            f"have put its own name there: leave {given.source} out."
        )


def _is_loopback(given: FlagValue) -> bool:
    host = values.endpoint(*given, 0)[0].lower()
    return host in ("localhost", "::1", "0.0.0.0", "::") or host.startswith("127.")


def _loopback(given: FlagValue) -> SpecError:
    return SpecError(f"{given.source} {given.text} is another machine on each node: leave {given.source} out.")


def describe(
    found: Detected, flags: FlagValues, args: RendezvousArgs, rendezvous: Rendezvous, nodes: FlagValue, hosted: str
) -> str:
    """The line that says what the job has come to, and where each value is from. `hosted` is what this node runs.
    Called by both launchers once the command line is accepted, unless this is not the first node."""
    parts = [f"{nodes.text} node{'s' * (nodes.text != '1')} ({nodes.source})", hosted]
    if rank := args.preferred_rank:
        parts.append(f"node rank {rank.text} ({rank.source})")
    if rendezvous.met:
        parts.append(f"{rendezvous.met.text} ({rendezvous.met.source})")
    if not rendezvous.place.alone:
        parts.append(f"rdzv-id {rendezvous.run_id} ({flags.source_of(args.run_id, 'rdzv_id')})")
    return f"{found.title}: {', '.join(parts)}."


def requested_size(flags: FlagValues, environ: Mapping[str, str], *, local: FlagValue | None) -> RequestedSize:
    """What the flags of dlrover-run say about the size and the place of a job."""
    standalone = flags.explicit("standalone") if flags.is_on("standalone") else None
    place = place_of(flags, environ, "rdzv_endpoint", "master_addr")
    spares = flags.integer("spares", 0, MAX_NODES)
    # Local nodes share the accelerators of this machine.
    return RequestedSize(flags.explicit("nnodes"), spares, standalone or local, place, workers=local is None)


def place_of(flags: FlagValues, environ: Mapping[str, str], *names: str) -> FlagValue | None:
    """The place where nodes meet: from the first of these flags that is given, else from `DLROVER_MASTER_ADDR`. Called
    for the size and the place that each of the two launchers passes to `detect_job`."""
    given = (*(flags.explicit(name) for name in names), FlagValue(MASTER_VARIABLE, environ.get(MASTER_VARIABLE, "")))
    return next((value for value in given if value and value.text.strip()), None)
