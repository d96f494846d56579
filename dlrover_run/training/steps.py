"""Reports the steps of a training loop to the launcher."""

from __future__ import annotations

import math

from dlrover_run.progress import page


def report(steps: int = 1, samples: int = 0, waited: float = 0.0, left: int | None = None) -> None:
    """Report that this rank has made `steps` more steps with `samples` more samples of its own, and that it waited for
    data for `waited` seconds of that time.

    `left` is how much the job has still to train after that, on any number of ranks: in samples of all ranks together
    if samples are reported, else in steps. A job that scales itself makes no change that would not pay any more.

    It takes about two microseconds, and has no effect in a process that `dlrover-run` has not started. From the first
    report on, steps that the sampler or the optimizer count are ignored. Raises ValueError for a number below 0.
    """
    if not (0 <= steps <= page.MAX_COUNT and 0 <= samples <= page.MAX_COUNT):
        raise ValueError(f"steps and samples must be from 0 to {page.MAX_COUNT}, not {steps} and {samples}")
    if left is not None and not 0 <= left <= page.MAX_COUNT:
        raise ValueError(f"left must be from 0 to {page.MAX_COUNT}, not {left}")
    if not (waited >= 0 and math.isfinite(waited)):
        raise ValueError(f"waited must be a number of seconds, 0 or more, not {waited}")
    page.add(page.StepSource.REPORT, steps, samples, waited, left)
