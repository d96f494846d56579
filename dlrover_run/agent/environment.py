"""The environment that a worker finds: torchrun's contract, and the names that a DLRover user expects."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from dlrover_run.coordination.model import RankAssignment, RoundKey
from dlrover_run.spec import JobSpec, SpecError

OWN_DEVICE = "DLROVER_RUN_CHECK_OWN_DEVICE"
"""The variable that tells a process of the node check that no other local rank has the one device that it sees
(`node_check/tasks.py`): as many of them as there are could otherwise not be told from one that all share."""


def worker_environment(
    spec: JobSpec, seat: RankAssignment, local_rank: int, parent: Mapping[str, str], error_file: str
) -> dict[str, str]:
    """The whole environment of one worker. `parent` is the launcher's own; `error_file` is empty when no file may be
    written.

    Raises SpecError when `--virtual-local-rank` finds fewer devices than workers.
    """
    rank = seat.first_rank + local_rank
    environment = dict(parent)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(seat.node_rank),
        ROLE_RANK=str(seat.role_first_rank + local_rank),
        ROLE_NAME=spec.role,
        WORLD_SIZE=str(seat.world_size),
        LOCAL_WORLD_SIZE=str(seat.workers),
        GROUP_WORLD_SIZE=str(seat.nodes),
        ROLE_WORLD_SIZE=str(seat.role_world_size),
        MASTER_ADDR=seat.store_address,
        MASTER_PORT=str(seat.store_port),
        TORCHELASTIC_RESTART_COUNT=str(seat.restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(spec.rules.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id,
        # The worker with rank 0 hosts the store, so that it dies with its round; True would make rank 0 a client as
        # well.
        TORCHELASTIC_USE_AGENT_STORE="False",
        TORCHELASTIC_ERROR_FILE=error_file,
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(s.name for s in spec.signals),
    )
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    _bound_threads(environment, seat.workers)
    # What a cluster manager says of its nodes stays; on a bare machine the round's numbers stand in for it.
    for prefix in ("NODE", "WORKER"):
        environment.setdefault(f"{prefix}_RANK", str(seat.node_rank))
        environment.setdefault(f"{prefix}_NUM", str(seat.nodes))
    if spec.virtual_local_rank:
        _show_own_device(environment, local_rank)
    return environment


def check_environments(spec: JobSpec, parent: Mapping[str, str]) -> list[dict[str, str]]:
    """The environments of the processes of a node check, by local rank: devices and threads are as the workers have
    them, and there is no round yet.

    Raises what `worker_environment` raises.
    """

    def environment(local_rank: int) -> dict[str, str]:
        own = {**parent, "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(spec.workers_per_node)}
        _bound_threads(own, spec.workers_per_node)
        if spec.virtual_local_rank:
            _show_own_device(own, local_rank)
            own[OWN_DEVICE] = "1"
        return own

    return [environment(local_rank) for local_rank in range(spec.workers_per_node)]


def seatless_environments(spec: JobSpec, parent: Mapping[str, str]) -> list[dict[str, str]]:
    """Environments which have that in common which the workers of this node will have whatever its seat is.

    Raises what `worker_environment` raises.
    """

    def seat(number: int) -> RankAssignment:
        others = dict.fromkeys(("node_rank", "nodes", "first_rank", "role_first_rank", "store_port"), number)
        return RankAssignment(
            key=RoundKey(),
            restart_count=number,
            workers=spec.workers_per_node,
            world_size=number,
            role_world_size=number,
            store_address=str(number),
            **others,
        )

    return [
        worker_environment(spec, seat(number), local_rank, parent, error_file=str(number))
        for number in (1, 2)
        for local_rank in range(spec.workers_per_node)
    ]


def _bound_threads(environment: dict[str, str], workers: int) -> None:
    if workers > 1:
        # torch spreads over all cores by default, and that many times the workers of a node overload it (as torchrun).
        environment.setdefault("OMP_NUM_THREADS", "1")


def _show_own_device(environment: dict[str, str], local_rank: int) -> None:
    environment["LOCAL_RANK"] = "0"
    # ROCm reads HIP_VISIBLE_DEVICES before CUDA_VISIBLE_DEVICES, so an inherited one must not hide the worker's own.
    if environment.get("HIP_VISIBLE_DEVICES"):
        own = _own_device("HIP_VISIBLE_DEVICES", environment, local_rank)
        environment["HIP_VISIBLE_DEVICES"] = own
    else:
        own = _own_device("CUDA_VISIBLE_DEVICES", environment, local_rank)
    environment["CUDA_VISIBLE_DEVICES"] = own


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
