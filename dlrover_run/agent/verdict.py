"""What a finished job tells whoever called for it: the exit code, how the workers ended, what they returned."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from dlrover_run import exit_codes
from dlrover_run.coordination.records import PlanPhase
from dlrover_run.failures.outcome import WorkerEnd


@dataclass(frozen=True)
class Verdict:
    """The end of a job on this node. `results` are the pickled return values of a function launch, by global rank.

    `root` is the worker that failed first, when one did; `error` is a sentence when the launcher itself had to give up.
    """

    exit_code: int
    reason: str
    restarts: int = 0
    ends: tuple[WorkerEnd, ...] = ()
    root: WorkerEnd | None = None
    error: str | None = None
    results: dict[int, bytes] = field(default_factory=dict)


def exit_code_of(phase: PlanPhase, root: WorkerEnd | None, stopped_by: signal.Signals | None, compat: bool) -> int:
    """The launcher's exit code for a job that ended in `phase`; the README's table is made of this rule."""
    if phase is PlanPhase.FINISHED:
        return exit_codes.SUCCESS
    if stopped_by is not None:
        return exit_codes.of_failure(exit_codes.of_signal(stopped_by), compat)
    return exit_codes.of_failure(root.exit_status if root is not None else exit_codes.INTERNAL_ERROR, compat)
