"""Programs that start MPI jobs: mpirun of Open MPI, mpiexec of MPICH, Intel MPI and PALS, and jsrun.

They number the processes and not the nodes, so with one process on each node its rank is that of the node. They run
inside the job of a scheduler too, and then the scheduler's list of hosts is theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.environment import batch, host_list
from dlrover_run.environment.host_list import HostListError
from dlrover_run.environment.records import (
    BY_FLAGS,
    Context,
    Contradiction,
    Detected,
    Detection,
    is_count,
    port_of,
    several_launchers,
)
from dlrover_run.spec import FlagValue


class _MpiLauncher(NamedTuple):
    """The variables of one program, and the command that starts one process on each node."""

    name: str
    size: str
    local_size: str
    rank: str
    local_rank: str
    launch: str


_MPI_LAUNCHERS = (
    _MpiLauncher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "mpirun -N 1",
    ),
    _MpiLauncher(
        "jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_SIZE",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_LOCAL_RANK",
        "jsrun --rs_per_host=1 --tasks_per_rs=1",
    ),
    _MpiLauncher("PALS", "PMI_SIZE", "PMI_LOCAL_SIZE", "PMI_RANK", "PALS_LOCAL_RANKID", "mpiexec --ppn 1"),
    _MpiLauncher("MPICH", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI_RANK", "MPI_LOCALRANKID", "mpiexec -ppn 1"),
)
_HOST_FILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile", "PBS_NODEFILE")
_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
_CONTACTS = ("OMPI_MCA_orte_hnp_uri", "PRTE_MCA_prte_hnp_uri")
_ADDRESS = re.compile(r"tcp(?:4|6)?://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))")


def detect(context: Context) -> Detection:
    """What the variables of an MPI program say. Raises Contradiction."""
    starter = _starter(context)
    if starter is None:
        return None
    size, rank = context.number(starter.size, lowest=1), context.number(starter.rank)
    local_size, local_rank = context.number(starter.local_size, lowest=1), context.number(starter.local_rank)
    remedy = f"start it with `{starter.launch} {context.command}`, or {BY_FLAGS}"
    if size is None or rank is None:
        missing = starter.size if size is None else starter.rank
        raise Contradiction(f"{missing} of {starter.name} is not set", remedy)
    nodes = int(size.text)
    title = f"{starter.name} job"
    on_node = max(int(local_size.text) if local_size else 1, int(local_rank.text) + 1 if local_rank else 1)
    if on_node > 1:
        problem = f"{title} starts {on_node} launchers on a node ({(local_size or size).source})"
        raise several_launchers(problem, nodes, starter.launch, context)
    if starter is _MPI_LAUNCHERS[0] and (each := context.given("OMPI_APP_CTX_NUM_PROCS")):
        counts = each.text.split()
        if not all(map(is_count, counts)) or sum(map(int, counts)) != nodes:
            raise Contradiction(f"{size.source} is {nodes}, and {each.source} is {each.text[:100]!r}", remedy)
    if int(rank.text) >= nodes:
        raise Contradiction(f"{rank.source} is {rank.text}, and {size.source} is {nodes}", remedy)
    if local_size is None and nodes > 1:
        problem = f"{starter.local_size} does not say how many of them are on this node"
        raise Contradiction(f"{size.source} is {nodes}, and {problem}", remedy)
    hosts = context.hosts or _hosts(context)
    job = context.given(*_JOBS)
    run_id = FlagValue(job.source, job.text[:200]) if job and job.text.isprintable() else None
    return Detected(
        "mpi",
        f"{starter.name} job {run_id.text}" if run_id else title,
        FlagValue(size.source, str(nodes)),
        rank,
        host=hosts[0] if hosts else None,
        port=port_of(run_id.text if run_id else ""),
        run_id=run_id,
        workers=context.visible_gpus(),
        first=rank.text == "0",
        hosts=tuple(host.text for host in hosts) if len(hosts) == nodes else (),
        no_host="give --hostfile FILE with the hosts in the order of their ranks, or --rdzv-endpoint=HOST:PORT",
    )


def _starter(context: Context) -> _MpiLauncher | None:
    for starter in _MPI_LAUNCHERS[:2]:
        if context.given(starter.size, starter.rank):
            return starter
    for starter in _MPI_LAUNCHERS[2:]:
        # srun sets PMI_SIZE for programs with MPI, but not these.
        if context.given(starter.local_size, starter.local_rank) and context.given(starter.size, starter.rank):
            return starter
    if context.given("PMI_SIZE") and not context.given("SLURM_STEP_ID", "SLURM_STEPID"):
        return _MPI_LAUNCHERS[-1]
    return None


def _hosts(context: Context) -> Sequence[FlagValue]:
    """The hosts on which the program starts processes, the first of which gets rank 0; at least the first if known."""
    for name in _HOST_FILES:
        path = context.given(name)
        listed = batch.read_file(path, context) if path else None
        if path and listed:
            return [FlagValue(path.source, host.name) for host in listed]
    source, names = batch.lsf_hosts(context)
    if names:
        return [FlagValue(source, name) for name in names]
    if text := context.given("SLURM_JOB_NODELIST"):
        try:
            return [FlagValue(text.source, name) for name in host_list.expand(text.text)]
        except HostListError as error:
            raise Contradiction(f"{text.source} {text.text[:200]!r} {error}", "give --hostfile FILE") from None
    if text := context.given(*_CONTACTS):
        # The address of mpirun, which runs on the first host unless it was started from a login node. The launcher of
        # rank 0 finds out whether it is its own.
        for in_brackets, plain in _ADDRESS.findall(text.text):
            return [FlagValue(text.source, in_brackets or plain)]
    return []
