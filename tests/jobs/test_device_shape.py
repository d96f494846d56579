"""The jobs of the matrix of hangs with the shape of a device: what the workers of each kind look like from outside."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import only_long

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from core.launchers import OURS, Job, Launcher
from core.run import Run
from device_lab.build import compiler
from device_lab.job import device_job
from device_lab.shared import read_shared
from stall_matrix.kinds import BY_NAME, DEVICE, Key

from dlrover_run.stacks.reader import StackReader

pytestmark = [pytest.mark.torchrun, pytest.mark.skipif(compiler() is None, reason="there is no C compiler")]

WAIT = 120.0
SPUN = 5
"""Ticks of the processor that a main thread that spins has used."""

# Those that the worker does itself, without a place from outside.
KINDS = ("stopped", "spin", "spin-in-c", "lost-loader", "lock", "mismatch", "left", "cut", "storm", "endless-kernel")


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def functions_of(pid: int) -> list[str]:
    """The functions in which the main thread of a worker is, the innermost first, those of the benchmark's script by
    their names and others by their files."""
    reader = StackReader(pid)
    try:
        frames = reader.read(main=True).main
    finally:
        reader.close()
    return [one.function if one.file.endswith("/benchmarks/workers/stalling.py") else one.file for one in frames]


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("kind", ["sleep", *only_long(*KINDS)])
@pytest.mark.parametrize("turn", [1, *only_long(2)], ids=["by memory", "by connections"])
def test_the_others_wait_for_their_device_on_a_line_of_the_script(kind: str, turn: int) -> None:
    key = Key(kind, 2, turn, shape=DEVICE)
    fault = BY_NAME[kind]
    with contextlib.ExitStack() as setting:
        run = setting.enter_context(Run())
        run.ends_by_itself = False
        device = setting.enter_context(device_job(run.directory, key.ranks, key.device_options))
        environment = {"BENCHMARK_FAULT": f"{kind} 1 0.5 0 -", "BENCHMARK_GUILTY": "1", **device.environment}
        launcher = Launcher("", OURS, ("--start-method=forkserver", "--preload=torch"), environment)
        launcher.start(run, Job(fault.script, key.ranks))
        pid = run.wait("step", 2, WAIT)[0].pid
        guilty = run.wait("fault", 1, WAIT, only={1})[0].pid
        until(lambda: device.awaited(1).startswith("all_reduce "))
        until(lambda: functions_of(pid)[0] == "step")
        before = ticks(pid)
        until(lambda: ticks(pid) >= before + SPUN)
        assert functions_of(pid)[0] == "step"
        if fault.functions:
            until(lambda: {*functions_of(guilty)} & {*fault.functions})
        known = read_shared(run.directory / "round-0").ranks[0]
        if kind not in ("stopped", "cut"):
            until(lambda: read_shared(run.directory / "round-0").ranks[0].keepalives > known.keepalives)
