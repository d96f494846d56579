"""A job whose workers have the shape of those with a device: what it needs in its folder and its environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from device_lab.build import compile_library
from device_lab.reports import RasReports
from device_lab.shared import awaited_operation, read_shared


@dataclass(frozen=True)
class DeviceJob:
    """The job in a folder, which is its BENCHMARK_RUN. `environment` is for its launcher. Some `answer` as NCCL RAS."""

    folder: Path
    environment: Mapping[str, str]
    reports: RasReports
    answers: bool

    def awaited(self, guilty: int) -> str:
        """The operation in which the other ranks wait, in the first round; empty if none does, or none answers."""
        return awaited_operation(read_shared(self.folder / "round-0"), guilty) if self.answers else ""


@contextlib.contextmanager
def device_job(folder: Path, devices: int, options: Mapping[str, int]) -> Iterator[DeviceJob]:
    """A job on nodes with that many devices, and with these options of `workers/device.py`."""
    library = compile_library("device.c", folder / "libdevice.so")
    words = [str(library), *(f"{name}={value}" for name, value in options.items())]
    compile_library("nvml.c", folder / "libnvidia-ml.so.1")
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {
        "BENCHMARK_DEVICE": " ".join(words),
        "BENCHMARK_NVML": f"{folder} {1 if options['shared'] else devices}",
        "LD_LIBRARY_PATH": ":".join(paths),
    }
    if not options["ras"]:
        environment["NCCL_RAS_ENABLE"] = "0"
    with RasReports(folder) as reports:
        yield DeviceJob(folder, environment, reports, bool(options["ras"]))
