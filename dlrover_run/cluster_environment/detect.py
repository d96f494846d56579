"""Finds the cluster that started a launcher, from the variables of its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dlrover_run.cluster_environment import MARKERS, batch, host_list, is_marked
from dlrover_run.cluster_environment.host_list import Host
from dlrover_run.cluster_environment.records import BY_FLAGS, Context, Contradiction, Detected, Finding, port_of
from dlrover_run.coordination.text import join_words
from dlrover_run.spec import FlagValue


def detect(
    environ: Mapping[str, str], context: Context, cluster: str = "auto", hostfile: FlagValue | None = None
) -> Finding:
    """The launcher's place in a job of its cluster; None if no cluster started it.

    `cluster` is `auto` or the name of one. `hostfile` is the path of a file with the hosts of the job, and its source.
    Raises Contradiction.
    """
    if cluster != "auto":
        context = context._replace(interactive=False, named=True)
    if hostfile is None:
        return _detect(environ, context, cluster, None)
    listed = batch.read_file(hostfile, context)
    if listed is None:
        raise Contradiction(
            f"{hostfile.source} {hostfile.text!r} cannot be read", "name a file that this node can read"
        )
    hosts = [FlagValue(f"{hostfile.source} {hostfile.text}", host.name) for host in listed]
    return _with_hosts(_detect(environ, context, cluster, hosts), hostfile, listed, hosts, context)


def _detect(environ: Mapping[str, str], context: Context, cluster: str, hosts: list[FlagValue] | None) -> Finding:
    names = [name for name in MARKERS if cluster in ("auto", name) and is_marked(environ, name)]
    if cluster not in ("auto", "none", *names):
        raise Contradiction(
            f"--cluster={cluster} is given, and this process has none of its variables "
            f"({join_words(MARKERS[cluster], 'or')})",
            "leave it out, or have the cluster start the launcher",
        )
    found: dict[str, Finding] = {}
    for name in names:
        result = _look_at(name, environ, context, hosts)
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


def _is_single(found: Finding) -> bool:
    return isinstance(found, Detected) and found.size == 1


def _look_at(name: str, environ: Mapping[str, str], context: Context, hosts: list[FlagValue] | None) -> Finding:
    """What one cluster's variables say. Only its own module is imported."""
    if name == "mpi":
        from dlrover_run.cluster_environment import mpi

        return mpi.find(environ, context, hosts)
    if name == "slurm":
        from dlrover_run.cluster_environment import slurm

        return slurm.find(environ, context)
    if name == "kubernetes":
        from dlrover_run.cluster_environment import kubernetes

        return kubernetes.find(environ, context)
    if name in ("lsf", "pbs"):
        return (batch.find_lsf if name == "lsf" else batch.find_pbs)(environ, context)
    from dlrover_run.cluster_environment import managed

    return (managed.find_sagemaker if name == "sagemaker" else managed.find_vertex)(environ, context)


def _with_hosts(
    found: Finding, path: FlagValue, listed: list[Host], hosts: list[FlagValue], context: Context
) -> Detected:
    """The job on the hosts of a file. What started the launcher completes it, and must not contradict it."""
    names = [host.text for host in hosts]
    size = FlagValue(hosts[0].source, str(len(names)))
    if isinstance(found, Detected):
        if found.nodes is not None and found.size != len(names) and found.cluster != "mpi":
            raise Contradiction(
                f"{path.source} {path.text!r} names {len(names)} hosts, and {found.title} has {found.size} nodes "
                f"({found.nodes.source})",
                "name those hosts only, or give --cluster=none",
            )
        if found.cluster == "mpi":
            if (found.size or 0) > len(names):
                raise Contradiction(
                    f"{path.source} {path.text!r} names {len(names)} hosts, and {found.title} has {found.size} nodes",
                    "name every host of the job",
                )
            slots = listed[int(found.node_rank.text)].slots if found.node_rank else 0
            return replace(found, workers=found.workers or _slots(hosts[0].source, slots))
    at = _own_position(names, context)
    if at is None:
        raise Contradiction(
            f"this host, {context.hostname}, is not in {path.source} {path.text!r}, or not once",
            f"add it as `hostname` prints it, or {BY_FLAGS}",
        )
    base = found if isinstance(found, Detected) else Detected("hostfile", "hosts of a file", None)
    joined = ",".join(names)
    return Detected(
        base.cluster,
        base.title,
        size,
        FlagValue(hosts[0].source, str(at)),
        host=hosts[0],
        port=base.port or port_of(joined),
        run_id=base.run_id,
        workers=base.workers or _slots(hosts[0].source, listed[at].slots),
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
