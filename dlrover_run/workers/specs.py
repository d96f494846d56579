"""Builds the specs of the workers of one round: environment, command line, streams, processors, result files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlrover_run import linux
from dlrover_run.agent.host import host_name
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.observe import page
from dlrover_run.observe.pages import ProgressPages
from dlrover_run.output.destinations import StreamPlan, line_prefix, plan_streams, share_console
from dlrover_run.output.opening import open_outputs, show_files, size_of
from dlrover_run.output.relay_client import RelayClient, StepSearch
from dlrover_run.output.run_directory import make_attempt_dirs, next_free_attempt
from dlrover_run.processes.process import ManagedProcess, ProcessSpec
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.workers.environment import (
    FEATURE_VARIABLES,
    command_line,
    fill_macros,
    python_program,
    worker_environment,
)
from dlrover_run.workers.starter import WANTED_VARIABLE
from dlrover_run.workers.startup_probe import StartupProbe

if TYPE_CHECKING:
    from dlrover_run.torchrun.logs_specs import LogsDestinations


OPTIMIZER_STEPS = "optimizer-steps"
"""What `worker_path/sitecustomize.py` installs."""


class WorkerSpec(ProcessSpec, frozen=True, kw_only=True):
    """One worker of a round."""

    rank: int
    local_rank: int


Worker = ManagedProcess[WorkerSpec]


class ResultFiles:
    """Memory files for the return values of a function launch, one for each local rank. Nothing is on a disk."""

    def __init__(self, local_ranks: int) -> None:
        self._fds = [linux.memfd_create(f"dlrover-run result {rank}") for rank in range(local_ranks)]

    def path(self, local_rank: int) -> str:
        """The path at which the worker opens its file; it needs no inherited descriptor."""
        return f"/proc/{os.getpid()}/fd/{self._fds[local_rank]}"

    def renew(self, local_rank: int) -> None:
        """Empty the file for another process in the place of that local rank."""
        os.ftruncate(self._fds[local_rank], 0)

    def read(self, local_rank: int) -> bytes:
        """The data that the worker has written."""
        fd = self._fds[local_rank]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def close(self) -> None:
        """Free the memory."""
        for fd in self._fds:
            os.close(fd)


class WorkerSpecs(msgspec.Struct, frozen=True):
    """The specs of the workers of one round on this node, and the resources opened for them. `progress` has the page of
    each; `results` is None unless a function runs. Workers that run since an earlier round, and their resources, are
    those of the specs before."""

    ranks: RankAssignment
    streams: StreamPlan
    workers: tuple[WorkerSpec, ...]
    startup_probe: StartupProbe
    progress: ProgressPages
    results: ResultFiles | None


def launcher_environments(spec: JobSpec, ranks: RankAssignment, parent: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """The variables that the launcher itself sets, by local rank, as torchrun passes them to a plugin for logs."""
    names = worker_environment(spec, ranks, 0, {}, "").keys()
    wholes = [worker_environment(spec, ranks, rank, parent, "") for rank in range(ranks.workers)]
    return {rank: {name: whole[name] for name in names} for rank, whole in enumerate(wholes)}


def build_worker_specs(
    spec: JobSpec,
    ranks: RankAssignment,
    parent: Mapping[str, str],
    run_dir: str | None,
    relay: RelayClient,
    placed: LogsDestinations | None = None,
    own: Callable[[int], Mapping[str, str]] = lambda local_rank: {},
    before: WorkerSpecs | None = None,
    kept: Collection[int] = (),
) -> WorkerSpecs:
    """Build the specs of a round's workers and open their streams; `close_streams` closes the inherited ones.

    `placed` is a plugin's answer: where the output goes and which environments the workers have. `own` returns further
    variables of a local rank. The local ranks `kept` run since the round of the specs `before`: they keep what was
    opened for them. Raises SpecError if a device, a CPU set or a log directory is missing, OSError if a file cannot be
    opened.
    """
    if placed is None:
        attempt = next_free_attempt(run_dir, ranks.round - 1)
        plan = plan_streams(spec.logs, run_dir, attempt, ranks.workers)
        if plan.directory is not None:
            make_attempt_dirs(plan.directory, range(ranks.workers))
    else:
        plan = _placed_plan(placed, spec)
    shared, searched = plan.shared, bool(spec.progress_regex)
    plan = share_console(plan, one_place=relay.single_console, prefixed=spec.logs.prefixed, searched=searched)
    cpus = _bound_cpus(spec, ranks, parent)
    wanted = wanted_at_start(spec)
    probe, progress, results = _resources(spec, ranks, before, kept)
    if before is not None:
        old, new = before.streams.ranks, plan.ranks
        merged = tuple(old[one.local_rank] if one.local_rank in kept else one for one in new)
        plan = replace(plan, ranks=merged, tees=tuple(tee for tee in plan.tees if tee.local_rank not in kept))
    workers = []
    for placement in plan.ranks:
        local_rank = placement.local_rank
        rank = ranks.first_rank + local_rank
        if before is not None and local_rank in kept:
            workers.append(replace(before.workers[local_rank], name=f"rank {rank}", rank=rank, stdio=(0, 1, 2)))
            continue
        if placed is None:
            environment = worker_environment(spec, ranks, local_rank, parent, placement.error_file or "")
        else:
            environment = {**parent, **placed.environments[local_rank]}
        environment |= probe.marks.environment()
        environment = {name: value for name, value in environment.items() if not name.startswith(FEATURE_VARIABLES)}
        environment.update(own(local_rank))
        environment[page.VARIABLE] = progress.path(local_rank)
        if wanted:
            environment[WANTED_VARIABLE] = ",".join(wanted)
        if results is None:
            args = fill_macros(spec.entrypoint.args, local_rank)
        else:
            args = (_payload_path(spec), results.path(local_rank))
        prefix = _prefix(spec, ranks, local_rank) if spec.logs.prefixed else None
        search = StepSearch(spec.progress_regex, progress.path(local_rank)) if spec.progress_regex else None
        outputs = open_outputs(placement, relay, str(local_rank), prefix=prefix, whole_lines=shared, steps=search)
        workers.append(
            WorkerSpec(
                name=f"rank {rank}",
                rank=rank,
                local_rank=local_rank,
                record_imports=local_rank == 0,
                argv=command_line(spec.entrypoint, args),
                args=args,
                environment=environment,
                stdio=(0, *outputs),
                cpus=cpus.get(local_rank),
                signal_group=spec.entrypoint.kind == "program",
            )
        )
        if search is not None:
            for path in placement.log_paths:
                relay.search_log(path, search, start=size_of(path))
    show_files(((tee, _prefix(spec, ranks, tee.local_rank)) for tee in plan.tees), relay)
    return WorkerSpecs(ranks, plan, tuple(workers), probe, progress, results)


def _payload_path(spec: JobSpec) -> str:
    """The path at which a worker reads the function that it calls. Raises SpecError."""
    path = f"/proc/{os.getpid()}/fd/{spec.entrypoint.payload_fd}"
    if not os.path.exists(path):
        raise SpecError(
            f"the workers cannot get the function that they are to call, because {path} does not exist here: mount "
            "proc at /proc, or launch a script in place of a function"
        )
    return path


def _resources(
    spec: JobSpec, ranks: RankAssignment, before: WorkerSpecs | None, kept: Collection[int]
) -> tuple[StartupProbe, ProgressPages, ResultFiles | None]:
    """What the agent opens for the workers of a round; those of the round before, if some of its workers go on."""
    if before is not None:
        before.startup_probe.carry_on(ranks)
        for local_rank in set(range(ranks.workers)).difference(kept):
            before.progress.renew(local_rank)
            if before.results is not None:
                before.results.renew(local_rank)
        return before.startup_probe, before.progress, before.results
    results = ResultFiles(ranks.workers) if spec.entrypoint.kind == "function" else None
    return StartupProbe(ranks), ProgressPages(ranks.workers), results


def wanted_at_start(spec: JobSpec) -> tuple[str, ...]:
    """What is to be installed in each worker before its script begins; nothing in a program that may not be Python."""
    if python_program(spec.entrypoint) is None:
        return ()
    return (OPTIMIZER_STEPS,) if spec.progress == "optimizer" else ()


def _prefix(spec: JobSpec, ranks: RankAssignment, local_rank: int) -> str:
    rank = ranks.first_rank + local_rank
    return line_prefix(spec.logs.prefix_template, spec.role, rank, local_rank, host_name())


def _placed_plan(placed: LogsDestinations, spec: JobSpec) -> StreamPlan:
    from dlrover_run.torchrun.logs_specs import plan_from_destinations

    plan = plan_from_destinations(placed, spec.logs)
    for placement in plan.ranks:
        # A plugin may name the same file in every round; the record of an earlier round must not be read as this one's.
        if placement.error_file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(placement.error_file)
    return plan


def _bound_cpus(spec: JobSpec, ranks: RankAssignment, parent: Mapping[str, str]) -> dict[int, frozenset[int]]:
    """The processors of each local rank with `--numa-binding`, empty without."""
    if spec.numa_binding is None:
        return {}
    from dlrover_run.devices import numa

    gpus = numa.binding_gpus(spec.numa_binding, parent)
    return {rank: numa.cpus_for_rank(spec.numa_binding, rank, gpus) for rank in range(ranks.workers)}


def close_streams(workers: Iterable[WorkerSpec]) -> None:
    """Close this process's copies of the workers' outputs, after the workers have been started or will not be."""
    for worker in workers:
        worker.close_stdio()
