"""Detects the cluster that started a launcher, from the variables of its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module

from dlrover_run.environment import MARKERS, batch, host_list, is_marked
from dlrover_run.environment.host_list import Host
from dlrover_run.environment.records import BY_FLAGS, Context, Contradiction, Detected, Detection, port_of
from dlrover_run.spec import FlagValue
from dlrover_run.words.text import join_words

_DETECTORS = {
    "mpi": "mpi:detect",
    "slurm": "slurm:detect",
    "lsf": "batch:detect_lsf",
    "pbs": "batch:detect_pbs",
    "kubernetes": "kubernetes:detect",
    "sagemaker": "managed:detect_sagemaker",
    "vertex": "managed:detect_vertex",
}


def detect(
    environ: Mapping[str, str], context: Context, cluster: str = "auto", hostfile: FlagValue | None = None
) -> Detection:
    """The launcher's place in a job of its cluster; None if no cluster started it.

    `cluster` is `auto` or the name of one. `hostfile` is the path of a file with the hosts of the job, and its source.
    Raises Contradiction.
    """
    context = context._replace(environ=environ)
    if cluster != "auto":
        context = context._replace(interactive=False, named=True)
    if hostfile is None:
        return _detect(context, cluster)
    listed = batch.read_file(hostfile, context)
    if listed is None:
        raise Contradiction(
            f"{hostfile.source} {hostfile.text!r} cannot be read", "name a file that this node can read"
        )
    source = f"{hostfile.source} {hostfile.text}"
    context = context._replace(hosts=tuple(FlagValue(source, host.name) for host in listed))
    return _with_hosts(_detect(context, cluster), hostfile, listed, context)


def _detect(context: Context, cluster: str) -> Detection:
    names = [name for name in MARKERS if cluster in ("auto", name) and is_marked(context.environ, name)]
    if cluster not in ("auto", "none", *names):
        raise Contradiction(
            f"--cluster={cluster} is given, and this process has none of its variables "
            f"({join_words(MARKERS[cluster], 'or')})",
            "leave it out, or have the cluster start the launcher",
        )
    found: dict[str, Detection] = {}
    for name in names:
        result = _detect_in(name, context)
        # mpirun runs inside the jobs of the other clusters, and there it decides where launchers run. The variables of
        # the scheduler are then those of mpirun's own processes, and need not fit this node.
        if name == "mpi" and result is not None:
            return result
        # The nodes of a job of several look for themselves, since a shell on one of them is to print a hint.
        if result is not None and not (_is_single(result) and context.interactive):
            found[name] = result
    if len(found) > 1 and not all(map(_is_single, found.values())):
        first, second = list(found)[:2]
        raise Contradiction(
            f"the variables of {first} and {second} show different jobs",
            f"give --cluster={first} or --cluster={second}, or --cluster=none",
        )
    return next(iter(found.values()), None)


def _is_single(found: Detection) -> bool:
    return isinstance(found, Detected) and found.size == 1


def _detect_in(name: str, context: Context) -> Detection:
    """What one cluster's variables say. Only its own module is imported."""
    module, _, function = _DETECTORS[name].partition(":")
    detector: Callable[[Context], Detection] = getattr(import_module(f"dlrover_run.environment.{module}"), function)
    return detector(context)


def _with_hosts(found: Detection, path: FlagValue, listed: list[Host], context: Context) -> Detected:
    """The job on the hosts of a file. What started the launcher completes it, and must not contradict it."""
    names = [host.name for host in listed]
    file = context.hosts[0].source
    if isinstance(found, Detected) and found.cluster == "mpi":
        if (found.size or 0) > len(names):
            raise Contradiction(
                f"{path.source} {path.text!r} names {len(names)} hosts, and {found.title} has {found.size} nodes",
                "name every host of the job",
            )
        slots = listed[int(found.node_rank.text)].slots if found.node_rank else 0
        return replace(found, workers=found.workers or _slots(file, slots))
    if isinstance(found, Detected) and found.nodes is not None and found.size != len(names):
        raise Contradiction(
            f"{path.source} {path.text!r} names {len(names)} hosts, and {found.title} has {found.size} nodes "
            f"({found.nodes.source})",
            "name those hosts only, or give --cluster=none",
        )
    at = _own_position(names, context)
    if at is None:
        raise Contradiction(
            f"this host, {context.hostname}, is not in {path.source} {path.text!r}, or not once",
            f"add it as `hostname` prints it, or {BY_FLAGS}",
        )
    base = found if isinstance(found, Detected) else Detected("hostfile", "hosts of a file", None)
    return replace(
        base,
        nodes=FlagValue(file, str(len(names))),
        node_rank=FlagValue(file, str(at)),
        host=context.hosts[0],
        port=base.port or port_of(",".join(names)),
        workers=base.workers or _slots(file, listed[at].slots),
        first=at == 0,
        hosts=tuple(names),
    )


def _slots(source: str, slots: int) -> FlagValue | None:
    return FlagValue(source, str(slots)) if slots else None


def _own_position(names: list[str], context: Context) -> int | None:
    own = host_list.find_host(names, context.hostname)
    if own is not None:
        return own
    here = [at for at, name in enumerate(names) if context.is_own_address(name)]
    return here[0] if len(here) == 1 else None
