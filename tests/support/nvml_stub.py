"""A stand-in for NVIDIA's library of a driver, libnvidia-ml.so.1, for the processes of a launch (`nvml_stub.c`).

`FakeNvml` of `fake_nvml` replaces `pynvml` in the process of a test; this replaces what `pynvml` loads in any process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")

LAUNCHER = """\
import sys
from dlrover_run.devices import holders
holders.PREFIX = sys.argv.pop(1)
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.program import DLROVER_RUN
sys.exit(run(DLROVER_RUN, sys.argv[1:]))
"""
"""A launcher whose first argument is the prefix of the files that count as those of a device (`holders.PREFIX`)."""


class NvmlStub:
    """The library, built into `directory`, and its GPUs. `environment` is that of a process that loads it."""

    def __init__(self, directory: Path, gpus: int = 1) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / "libnvidia-ml.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-O1", "-o", library, SOURCE], check=True)
        (directory / "events").touch()
        for index in range(gpus):
            self.set(index)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.directory), "NVML_STUB": str(self.directory)}

    def set(self, index: int, *, pids: Iterable[int] = (), **values: int) -> None:
        """What the driver reports of a GPU from now on: `lost`, `action`, `memory_errors`, `used`, `total`, `refused`,
        and the processes on it."""
        lines = [*(f"{name}={value}" for name, value in values.items()), *(f"pid={pid}" for pid in pids)]
        fresh = self.directory / f"gpu{index}.new"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.rename(self.directory / f"gpu{index}")

    def report(self, index: int, xid: int) -> None:
        """Report an error of a GPU to each process that listens."""
        with (self.directory / "events").open("a") as events:
            events.write(f"{index} {xid}\n")
