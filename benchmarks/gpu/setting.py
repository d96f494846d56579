"""Where the benchmark runs: on a GPU with NCCL, or as a rehearsal with gloo and the stand-ins of `device_lab`."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from core.launchers import OURS
from device_lab.build import why_no_compiler
from device_lab.job import device_job
from device_lab.shared import NAMES

REHEARSAL = "rehearsal on a CPU: says nothing about a GPU"

PROBE = """
import torch, pynvml
assert torch.cuda.is_available(), "torch sees no GPU"
pynvml.nvmlInit()
driver = pynvml.nvmlSystemGetDriverVersion()
gpu = torch.cuda.get_device_properties(0)
nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}")
"""
PROBE_TIMEOUT = 60.0
"""Seconds for the first look at the GPU, which imports torch from a cold disk."""

HELP_TIMEOUT = 30.0
DEVICE_OPTIONS = {"tcp": 1, "ras": 1, "copies": 0, "wait": 0, "shared": 1}
"""Of the stand-in: what two ranks on one GPU have, which believe in two hosts."""

LAUNCHED = struct.Struct("qq")
"""What `workers/cuda_device.py` writes."""


class NoGpu(Exception):
    """There is no GPU that torch can use; the message says why."""


@dataclass(frozen=True)
class Setting:
    """`device` is in each result: the GPU with its driver and libraries, or that it is a rehearsal."""

    rehearsal: bool
    device: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What each job needs besides."""
        return {} if self.rehearsal else {"BENCHMARK_CUDA": "1"}

    def patience(self, limit: float) -> float:
        """The limit of a wait. A rehearsal may run on a busy machine, and its times say nothing."""
        return limit * (3.0 if self.rehearsal else 1.0)

    def scaled(self, on_gpu: float, in_rehearsal: float) -> float:
        """A size or a time, which in a rehearsal is smaller."""
        return in_rehearsal if self.rehearsal else on_gpu

    def enter_device(self, folder: Path, stack: contextlib.ExitStack) -> DeviceView:
        """The variables of a job whose workers wait for a device, and a view of what they wait for. Raises OSError if
        the stand-in cannot be compiled."""
        if not self.rehearsal:
            return DeviceView(dict(self.environment), functools.partial(_awaited, folder))
        if why := why_no_compiler():
            raise OSError(why)
        job = stack.enter_context(device_job(folder, 1, DEVICE_OPTIONS))
        return DeviceView(dict(job.environment), lambda guilty: job.awaited(guilty))


@dataclass(frozen=True)
class DeviceView:
    """`awaited` returns the operation in which the ranks other than this one wait, with its number, or nothing."""

    environment: Mapping[str, str]
    awaited: Callable[[int], str]


def _awaited(folder: Path, guilty: int) -> str:
    """The last operation that another rank has launched."""
    for file in sorted(folder.glob("launched-*")):
        if file.name != f"launched-{guilty}":
            kind, count = LAUNCHED.unpack(file.read_bytes())
            return f"{NAMES[kind]} {count}"
    return ""


def open_setting(rehearsal: bool) -> Setting:
    """The setting of this machine. Raises NoGpu."""
    if rehearsal:
        return Setting(True, REHEARSAL)
    try:
        found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"torch has not answered in {PROBE_TIMEOUT:.0f} s") from None
    if found.returncode:
        raise NoGpu(found.stderr.strip().rpartition("\n")[2])
    return Setting(False, found.stdout.strip())


@functools.cache
def has_flag(flag: str) -> bool:
    """Whether this dlrover-run has a flag."""
    text = subprocess.run([*OURS, "--help"], capture_output=True, text=True, timeout=HELP_TIMEOUT).stdout
    return flag in text


def torch_version() -> tuple[int, int]:
    """The version of torch, without its last part; (0, 0) without torch."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


@dataclass(frozen=True)
class Clock:
    """The end of a run, by the monotonic clock."""

    end: float

    @classmethod
    def of(cls, seconds: float) -> Clock:
        return cls(time.monotonic() + seconds)

    def left(self, at_most: float) -> float:
        """The whole seconds that a wait may take: at most those that are left."""
        return float(max(0.0, min(at_most, round(self.end - time.monotonic()))))
