"""A short look at this machine before its devices are tried: what is known to be wrong, with the figure and what to do.

It starts nothing, uses no device and waits for nothing. What it finds is told to a person; only what makes training
here impossible or wrong is a fault of the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlrover_run.devices.health_ailment import Ailment
from dlrover_run.devices.health_gpus import HealthNvml, examine_gpus
from dlrover_run.devices.health_limits import examine_limits

__all__ = ["Ailment", "examine"]


def examine(
    workers: int,
    log_dir: str | None,
    environ: Mapping[str, str],
    gpu_each: bool = False,
    nvml: HealthNvml | None = None,
    dev: Path = Path("/dev"),
) -> tuple[Ailment, ...]:
    """What ails this machine as the place of that many workers, the severe first; empty for a healthy one.

    `environ` is that of the workers. `gpu_each` says that the person who started the job has asked for a GPU for each
    worker; without it, few GPUs are a fault only where CUDA_VISIBLE_DEVICES names more. It takes some milliseconds on
    a machine without an NVIDIA driver; with one NVML's own start is added, which is seconds where the driver is
    in no persistence mode and has to wake its GPUs, so whoever runs a loop asks in a thread. Raises nothing.
    """
    found = [*examine_gpus(workers, environ, gpu_each, nvml, dev), *examine_limits(workers, log_dir, environ, dev)]
    return tuple(sorted(found, key=lambda ailment: not ailment.severe))
