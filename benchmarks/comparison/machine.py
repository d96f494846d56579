"""What machine a result comes from; a ratio travels, a second does not."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The facts beside a result. `load_average` is that of the last 1, 5 and 15 minutes when the run began."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str
    load_average: tuple[float, float, float]
    date: str
    commit: str


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo, or "unknown": not every architecture writes one."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return "unknown"


def memory_gib(meminfo: str) -> float:
    """GiB of memory in the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return round(int(value.split()[0]) / 1024**2, 1)
    raise ValueError("/proc/meminfo has no MemTotal line")


def torch_version(version: Callable[[str], str] = importlib.metadata.version) -> str:
    """torch's version from its metadata: importing it would load the driver with what the rivals are measured for."""
    try:
        return version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def now() -> str:
    """The time of day, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def look(repository: Path, proc: Path = Path("/proc")) -> Machine:
    """The machine that this process runs on, now."""
    return Machine(
        cpu=cpu_model((proc / "cpuinfo").read_text()),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=memory_gib((proc / "meminfo").read_text()),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch_version(),
        load_average=os.getloadavg(),
        date=now(),
        commit=_commit(repository),
    )


def _commit(repository: Path) -> str:
    git = ["git", "-C", str(repository)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
