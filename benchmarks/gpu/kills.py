"""From a SIGKILL of one of two ranks on one GPU to the next step of both, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from core.launchers import FORKSERVER, SPAWN, TORCHRUN, Job, Launcher
from core.run import Run

from gpu.jobs import open_job
from gpu.phases import PHASES, TITLES, recovery_of
from gpu.plan import Key, Record
from gpu.setting import Clock, Setting, has_flag, torch_version

RANKS = 2

SETTLE = 3.0
"""Seconds of training before the kill."""

WARM_LIMIT = 40.0
WARM_LOOK = 0.25
WARM_EVENT = '"dlrover.worker.prepared"'
"""How long warm workers may take to be ready, how often to look, and their event in the event log."""

WARM_FLAGS = ("--warm-workers", "--progress=optimizer")
"""Where steps are counted, warm workers are prepared a second after the first ones."""

RECOVERY_LIMIT = 45.0

SURVIVE = (2, 14)
"""The first torch that forms a group in place."""


@dataclass(frozen=True)
class Rival:
    """A launcher, and why it cannot take part here (None if it can)."""

    launcher: Launcher
    unavailable: Callable[[], str | None] = lambda: None
    warm: bool = False


def _no_warm() -> str | None:
    return None if has_flag("--warm-workers") else "this dlrover-run has no --warm-workers"


def _no_survivors() -> str | None:
    version = torch_version()
    return None if version >= SURVIVE else f"torch {version[0]}.{version[1]} forms no group in place; 2.14 does"


_PRELOADED = replace(FORKSERVER, options=(*FORKSERVER.options, "--preload=torch"))

RIVALS = {
    "forkserver": Rival(replace(_PRELOADED, name="dlrover-run forkserver, torch preloaded")),
    "warm": Rival(
        replace(
            _PRELOADED,
            name="dlrover-run warm workers",
            options=(*_PRELOADED.options, *WARM_FLAGS),
        ),
        _no_warm,
        warm=True,
    ),
    "survivors": Rival(
        replace(
            _PRELOADED,
            name="dlrover-run survivors",
            options=(*_PRELOADED.options, "--survivors=keep"),
            script="gpu_surviving.py",
        ),
        _no_survivors,
    ),
    "spawn": Rival(SPAWN),
    "torchrun": Rival(TORCHRUN),
}


def run_case(key: Key, setting: Setting, clock: Clock, recorded: Path) -> Record:
    """Kill rank 1 once. Raises Lost if the job ends, or does not come back in time."""
    rival = RIVALS[key.case]
    if why := rival.unavailable():
        return Record(key, setting.device, left_out=why)
    with open_job(key, recorded) as run:
        journal = run.directory / "journal"
        options = (f"--journal={journal}",) if rival.warm else ()
        launcher = replace(rival.launcher, options=(*rival.launcher.options, *options))
        launcher = replace(launcher, environment={**launcher.environment, **setting.environment})
        launcher.start(run, Job("gpu_steps.py", RANKS, max_restarts=3))
        workers = run.wait(PHASES[-1], RANKS, clock.left(600.0))
        run.settle(SETTLE)
        ready: float | None = None
        if rival.warm:
            ready = _wait_for_warm(run, clock, setting.patience(WARM_LIMIT))
        killed = run.kill(workers[1].pid)
        run.wait(PHASES[-1], RANKS, clock.left(setting.patience(RECOVERY_LIMIT)), killed)
        recovery = recovery_of(run.reports, killed, RANKS, [worker.pid for worker in workers])
    assert recovery is not None
    figures: dict[str, float | None] = {"total": recovery.total, **dict(zip(TITLES, recovery.phases, strict=True))}
    if rival.warm:
        figures["ready"] = ready
    return Record(key, setting.device, figures)


def _wait_for_warm(run: Run, clock: Clock, limit: float) -> float | None:
    """Wait until a warm worker stands beside each rank; return the seconds, None if they have not come in time."""
    began = time.monotonic()
    while clock.left(limit - (time.monotonic() - began)):
        files = (run.directory / "journal").glob("**/*events.jsonl*")
        if sum(file.read_text(errors="replace").count(WARM_EVENT) for file in files) >= RANKS:
            return time.monotonic() - began
        run.settle(WARM_LOOK)
    return None
