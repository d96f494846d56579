"""The command line of a worker, and its environment: the variables of torchrun and those of DLRover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Template
from typing import Literal

from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.environment import without_outer_job
from dlrover_run.features import FEATURES
from dlrover_run.spec import Entrypoint, JobSpec, SpecError

FUNCTION_WORKER = "dlrover_run.workers.function_worker"

# The script's directory is no part of sys.path and the code is no frame of a file of ours: what runpy itself gives.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

REQUEUE_COUNT = "DLROVER_REQUEUE_COUNT"
"""The variable that tells a worker how often the scheduler has started its job again, if it has. A manifest may set it
for the launcher."""

_REQUEUE_COUNTS = (REQUEUE_COUNT, "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT")

FEATURE_VARIABLES = tuple(feature.variables for feature in FEATURES if feature.variables)
"""How the variables begin that features give to a worker: a launcher in a worker of another one passes on none."""


def worker_environment(
    spec: JobSpec, ranks: RankAssignment, local_rank: int, parent: Mapping[str, str], error_file: str
) -> dict[str, str]:
    """The whole environment of one worker. `parent` is the launcher's own; `error_file` is empty when no file may be
    written.

    Raises SpecError when `--virtual-local-rank` finds fewer devices than workers.
    """
    rank = ranks.first_rank + local_rank
    environment = without_outer_job(parent)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(ranks.node_rank),
        ROLE_RANK=str(ranks.role_first_rank + local_rank),
        ROLE_NAME=spec.role,
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_WORLD_SIZE=str(ranks.workers),
        GROUP_WORLD_SIZE=str(ranks.nodes),
        ROLE_WORLD_SIZE=str(ranks.role_world_size),
        MASTER_ADDR=ranks.store_address,
        MASTER_PORT=str(ranks.store_port),
        TORCHELASTIC_RESTART_COUNT=str(ranks.restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(spec.rules.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id,
        TORCHELASTIC_USE_AGENT_STORE=str(serves_store(parent)),
        TORCHELASTIC_ERROR_FILE=error_file,
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(s.name for s in spec.signals),
    )
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    _bound_threads(environment, ranks.workers)
    # What a cluster manager reports of its nodes stays; on a bare machine the round's numbers stand in for it.
    for prefix in ("NODE", "WORKER"):
        environment.setdefault(f"{prefix}_RANK", str(ranks.node_rank))
        environment.setdefault(f"{prefix}_NUM", str(ranks.nodes))
    if requeues := requeue_count(parent):
        environment[REQUEUE_COUNT] = str(requeues)
    if spec.virtual_local_rank:
        _show_own_device(environment, local_rank)
    return environment


def serves_store(parent: Mapping[str, str]) -> bool:
    """Whether the agent of rank 0 serves the store of each round, so that every worker is its client; otherwise rank 0
    hosts it (as torchrun)."""
    return parent.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"


def requeue_count(parent: Mapping[str, str]) -> int:
    """How often the scheduler has started this job again under the same name."""
    given = next((text for name in _REQUEUE_COUNTS if (text := parent.get(name))), "0")
    return int(given) if given.isdecimal() and given.isascii() else 0


def environments_beside_workers(spec: JobSpec, parent: Mapping[str, str]) -> list[dict[str, str]]:
    """The environments of processes that are no workers, one for each local rank: devices and threads are as the
    workers have them, and there is no round.

    Raises what `worker_environment` raises.
    """
    found = []
    for local_rank in range(spec.workers_per_node):
        own = {**parent, "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(spec.workers_per_node)}
        _bound_threads(own, spec.workers_per_node)
        if spec.virtual_local_rank:
            _show_own_device(own, local_rank)
        found.append(own)
    return found


def environments_before_ranks(spec: JobSpec, parent: Mapping[str, str]) -> list[dict[str, str]]:
    """Environments whose common part is what the workers of this node have in common for any ranks.

    Raises what `worker_environment` raises.
    """

    counts = ("restart_count", "node_rank", "nodes", "first_rank", "world_size", "role_first_rank", "role_world_size")
    found: list[dict[str, str]] = []
    for number in (1, 2):
        numbers = dict.fromkeys((*counts, "store_port"), number)
        ranks = RankAssignment(key=RoundKey(), workers=spec.workers_per_node, store_address=str(number), **numbers)
        found += [worker_environment(spec, ranks, rank, parent, str(number)) for rank in range(spec.workers_per_node)]
    return found


def _bound_threads(environment: dict[str, str], workers: int) -> None:
    if workers > 1:
        # torch spreads over all cores by default, and that many times the workers of a node overload it (as torchrun).
        environment.setdefault("OMP_NUM_THREADS", "1")


def _show_own_device(environment: dict[str, str], local_rank: int) -> None:
    environment["LOCAL_RANK"] = "0"
    # ROCm reads HIP_VISIBLE_DEVICES before CUDA_VISIBLE_DEVICES, so an inherited one must not hide the worker's own.
    variable = "HIP_VISIBLE_DEVICES" if environment.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    environment[variable] = environment["CUDA_VISIBLE_DEVICES"] = _own_device(variable, environment, local_rank)


def _own_device(variable: str, environment: Mapping[str, str], local_rank: int) -> str:
    visible = environment.get(variable)
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise SpecError(
            f"--virtual-local-rank: local rank {local_rank} has no device, for {variable}={visible} "
            f"names {len(devices)}; name more devices or start fewer workers."
        )
    return devices[local_rank].strip()


def fill_macros(args: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """The script's arguments with `${local_rank}` filled in; other dollar words stay, and `$$` becomes `$` (as
    torchrun)."""
    return tuple(Template(arg).safe_substitute(local_rank=str(local_rank)) for arg in args)


def command_line(entrypoint: Entrypoint, args: Sequence[str]) -> tuple[str, ...]:
    """What is executed for a worker whose own arguments are `args` (as torchrun, `-u` included)."""
    if entrypoint.kind == "program":
        return (entrypoint.target, *args)
    python = (entrypoint.python, "-u")
    if entrypoint.kind == "run_path":
        return (*python, "-c", _RUN_PATH, entrypoint.target, *args)
    kind, target = python_program(entrypoint) or ("script", entrypoint.target)
    return (*python, "-m", target, *args) if kind == "module" else (*python, target, *args)


def python_program(entrypoint: Entrypoint) -> tuple[Literal["script", "module", "run_path"], str] | None:
    """What an interpreter is to run, as (kind, target); None for a program of which nothing is known."""
    if entrypoint.kind == "program":
        return None
    if entrypoint.kind == "function":
        return "module", FUNCTION_WORKER
    return entrypoint.kind, entrypoint.target
