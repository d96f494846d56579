"""Slurm. A step (`srun`) runs the launcher once on each of its nodes, so its variables count and not the job's.

`srun` copies the variables of the batch script and adds those of the step. A batch script itself is not in a step.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Set

from dlrover_run.environment import host_list
from dlrover_run.environment.host_list import HostListError
from dlrover_run.environment.records import (
    BY_FLAGS,
    Context,
    Contradiction,
    Detected,
    Detection,
    Unstarted,
    is_count,
    port_of,
    several_launchers,
)
from dlrover_run.spec import FlagValue
from dlrover_run.words.text import counted

JOB = "SLURM_JOB_ID"
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_SHELLS = frozenset({"interactive", "bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash"})
"""Names of jobs that are a shell: that of `salloc`, and of `srun --pty bash` outside of a job."""

_HET_SIZE = "SLURM_HET_SIZE"
_MAX_COMPONENTS = 128
"""Components of the largest heterogeneous job that Slurm allows."""

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Steps from this number on are Slurm's own: the batch script, an interactive shell, and what runs outside of steps."""

_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def detect(context: Context) -> Detection:
    """What Slurm's variables say. Raises Contradiction."""
    job, step = context.number(JOB, "SLURM_JOBID"), context.number(*_STEP)
    if step is None:
        rank = context.number("SLURM_PROCID")
        left = context.given("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES") or (
            rank if rank and int(rank.text) else None
        )
        if left:
            raise Contradiction(f"{left.source} is set, and {_STEP[0]} is not", BY_FLAGS)
    if job is None:
        raise Contradiction(f"{JOB} is not set, and other variables of a Slurm step are", BY_FLAGS)
    if step is None or int(step.text) >= _FIRST_SPECIAL_STEP:
        return _outside_of_a_step(context, job)
    if (components := _components(context)) and context.given("SLURM_STEP_NODELIST") is None:
        # A step may have the nodes of one component, of some or of all: the job's variables do not show it.
        raise Contradiction(
            f"Slurm job {job.text} has {components} components ({_HET_SIZE}), and SLURM_STEP_NODELIST, which has the "
            "nodes of this step, is not set",
            BY_FLAGS,
        )
    return _step(context, job, step)


def _components(context: Context) -> int:
    """How many components a heterogeneous job has; 0 for another job. A step numbers its nodes over all of its
    components (seen with Slurm 22.05), so it is like any other step."""
    size = context.number(_HET_SIZE)
    return min(int(size.text), _MAX_COMPONENTS) if size and int(size.text) > 1 else 0


def _component_sizes(context: Context) -> list[int]:
    """The number of nodes of each component of a heterogeneous job; empty for another job."""
    counts = [context.number(f"SLURM_JOB_NUM_NODES_HET_GROUP_{one}") for one in range(_components(context))]
    return [int(count.text) if count else 1 for count in counts]


def _launch_components(context: Context, components: Iterable[int]) -> str:
    """The command that starts one launcher on each node of these components, without that of the last launcher: srun
    ignores a number of tasks that is given for several components at once, if they were allocated with another."""
    sizes = _component_sizes(context)
    parts = [f"--het-group={one} --nodes={sizes[one]} --ntasks={sizes[one]} --ntasks-per-node=1" for one in components]
    return f"srun {f' {context.command} : '.join(parts)}"


def _outside_of_a_step(context: Context, job: FlagValue) -> Detection:
    nodes = context.number("SLURM_JOB_NUM_NODES", "SLURM_NNODES", lowest=1)
    if nodes is None:
        return None
    name = context.given("SLURM_JOB_NAME")
    # salloc starts its shell on the login node, where it is no task.
    shell = context.interactive or (name is not None and name.text in _SHELLS) or "SLURM_PROCID" not in context.environ
    shell = shell and not context.named
    # In a batch script the other variables are those of the first component.
    components = _component_sizes(context)
    size = sum(components) or int(nodes.text)
    if size == 1:
        workers = context.visible_gpus("SLURM_GPUS_ON_NODE")
        return None if shell else Detected("slurm", f"Slurm job {job.text}", nodes, workers=workers, first=True)
    launch = f"srun --ntasks={size} --ntasks-per-node=1 {context.command}"
    source = nodes.source
    if components:
        launch = f"{_launch_components(context, range(len(components)))} {context.command}"
        source = f"{len(components)} components, {_HET_SIZE}"
    return Unstarted(
        f"Slurm job {job.text} has {size} nodes ({source}), and srun did not start this launcher",
        f"give `{launch}` for a job on all of them, or --cluster=none for one on this node alone",
        hint_only=shell,
    )


def _step(context: Context, job: FlagValue, step: FlagValue) -> Detection:
    title = f"Slurm step {job.text}.{step.text}"
    nodes = context.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", lowest=1)
    hosts = _hosts(context, nodes)
    if nodes is None:
        if not hosts:
            raise Contradiction(f"{title} does not say how many nodes it has", BY_FLAGS)
        nodes = FlagValue(hosts[0].source, str(len(hosts)))
    size = int(nodes.text)
    _refuse_several_launchers(context, title, size, hosts)
    # Slurm connects only the first task with the terminal, and it may be a shell.
    pty = context.given("SLURM_PTY_PORT")
    if pty and size == 1 and not context.named:
        return None
    if pty and size > 1:
        raise Contradiction(
            f"{title} has {size} nodes and a terminal ({pty.source}), so srun may have started a shell on each",
            f"leave --pty out (`srun {context.command}`), or give --cluster=none for a job on this node alone",
        )
    rank = _rank(context, title, size, hosts)
    parts = [context.given("SLURM_ARRAY_JOB_ID"), context.given("SLURM_ARRAY_TASK_ID")]
    array = "_".join(part.text for part in parts if part) if all(parts) else ""
    attempt = context.positive("SLURM_RESTART_COUNT")
    # Slurm numbers the steps of a requeued job from 0 again, and a node of the last attempt may not be gone yet.
    run_id = f"{array or job.text}.{step.text}" + (f"-restart{attempt.text}" if attempt else "")
    source = "SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID" if array else job.source
    return Detected(
        "slurm",
        title,
        nodes,
        rank,
        host=hosts[0] if hosts else None,
        port=port_of(run_id),
        run_id=FlagValue(f"{source}, {step.source}" + (f", {attempt.source}" if attempt else ""), run_id),
        workers=context.visible_gpus("SLURM_GPUS_ON_NODE"),
        first=None if rank is None else rank.text == "0",
        hosts=tuple(host.text for host in hosts),
    )


def _hosts(context: Context, nodes: FlagValue | None) -> list[FlagValue]:
    """The nodes of the step; none if only the job's are known and are more than those of the step."""
    for source in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        text = context.given(source)
        if text is None:
            continue
        try:
            names = host_list.expand(text.text)
        except HostListError as error:
            raise Contradiction(f"{source} {text.text[:200]!r} {error}", BY_FLAGS) from None
        if nodes is None or len(names) == int(nodes.text):
            return [FlagValue(source, name) for name in names]
        if source == "SLURM_STEP_NODELIST":
            raise Contradiction(
                f"{nodes.source} is {nodes.text}, and {source} {text.text[:200]} names {len(names)}",
                f"unset the variables of another step, or {BY_FLAGS}",
            )
    return []


def _refuse_several_launchers(context: Context, title: str, nodes: int, hosts: list[FlagValue]) -> None:
    tasks = context.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", lowest=1)
    local = context.number("SLURM_LOCALID")
    each = context.given("SLURM_STEP_TASKS_PER_NODE")
    if each is None and "SLURM_STEP_NUM_TASKS" not in context.environ:
        each = context.given("SLURM_TASKS_PER_NODE")
    counts = _tasks_per_node(each)
    most = max([*counts, int(local.text) + 1 if local else 1])
    if tasks is not None and int(tasks.text) < nodes:
        raise Contradiction(
            f"{title} has {nodes} nodes and {counted(int(tasks.text), 'task')} ({tasks.source})",
            f"unset the variables of another step, or {BY_FLAGS}",
        )
    total = int(tasks.text) if tasks else max(sum(counts), most + nodes - 1)
    if total == nodes and most == 1:
        return
    most = max(most, -(-total // nodes))
    own = _own_components(context, {host.text for host in hosts})
    component = f" --het-group={own[0]}" if own else ""
    launch = f"srun{component} --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"
    cpus = context.given("SLURM_CPUS_PER_TASK")
    if cpus and is_count(cpus.text):
        launch += f" --cpus-per-task={int(cpus.text) * most}"
    gpus = context.given("SLURM_GPUS_ON_NODE")
    if gpus and is_count(gpus.text) and int(gpus.text):
        launch += f" --gpus-per-node={gpus.text}"
    if len(own) > 1:
        launch = _launch_components(context, own)
    problem = f"{title} starts {most} launchers on a node ({total} tasks on {counted(nodes, 'node')})"
    raise several_launchers(problem, total, launch, context)


def _own_components(context: Context, hosts: Set[str]) -> list[int]:
    """The components of a heterogeneous job in which the step with those nodes runs."""
    found = []
    for one in range(_components(context)):
        nodes = context.given(f"SLURM_JOB_NODELIST_HET_GROUP_{one}")
        with contextlib.suppress(HostListError):
            if nodes is not None and not hosts.isdisjoint(host_list.expand(nodes.text)):
                found.append(one)
    return found


def _tasks_per_node(value: FlagValue | None) -> list[int]:
    """The tasks of each node, from a text such as `2(x3),1`."""
    counts: list[int] = []
    for item in value.text.split(",") if value else ():
        found = _TASKS.fullmatch(item)
        if found is None or int(found[2] or 1) > host_list.MAX_HOSTS:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _rank(context: Context, title: str, nodes: int, hosts: list[FlagValue]) -> FlagValue | None:
    rank = context.number("SLURM_NODEID")
    own = context.given("SLURMD_NODENAME")
    if rank is not None and int(rank.text) >= nodes:
        raise Contradiction(
            f"{rank.source} is {rank.text}, and {title} has {nodes} node{'s' * (nodes > 1)}",
            "unset the variables of another step, or give --cluster=none",
        )
    if not hosts:
        return rank
    name = own or FlagValue("the host name", context.hostname)
    at = host_list.find_host([host.text for host in hosts], name.text)
    if own is not None and (at is None or (rank is not None and at != int(rank.text))):
        where = "is not in" if at is None else f"is number {at} of"
        other = "" if at is None or rank is None else f", and {rank.source} is {rank.text}"
        raise Contradiction(
            f"{own.source} {own.text} {where} the nodes of {title} ({hosts[0].source}){other}",
            f"unset the variables of another step, or {BY_FLAGS}",
        )
    return rank or (FlagValue(name.source, str(at)) if at is not None else None)
