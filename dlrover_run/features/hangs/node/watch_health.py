"""Whether the watch over the workers works: it never stops in silence."""

from __future__ import annotations

import time
from collections.abc import Callable

from dlrover_run.console.console import Console
from dlrover_run.events.records import Events, WatchFailed, WatchRestored
from dlrover_run.features.hangs.settings import StallAction

RETRY_INTERVAL = 10.0
"""Seconds after an error until the next sample: a machine with too many connections has them for some time."""

MAX_PROBLEM = 200
"""Characters of an error that are shown."""


class WatchHealth:
    """The watch of a node over all rounds of its job. An error is printed once for the job, is in the events each time,
    and is `problem` until a sample succeeds. `wake` has the status reported."""

    def __init__(
        self,
        action: StallAction,
        console: Console,
        events: Events,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""
        self._action = action
        self._console = console
        self._events = events
        self._wake = wake
        self._clock = clock
        self._since = 0.0
        self._is_printed = False
        self._denied = False

    def failed(self, error: Exception, what: str = "hangs") -> None:
        """A sample, or what was to follow from it, has raised this. `what` is not found until that is over; stragglers
        are not looked for in the rest of the round."""
        problem = _describe(error)
        if what != "hangs":
            self._events.emit(WatchFailed(what=f"{what}: {problem}"))
            self._console.info(f"warning: {what} are not found in this round: {problem}")
            return
        if problem == self.problem:
            return
        if not self.problem:
            self._since = self._clock()
        self.problem = problem
        self._events.emit(WatchFailed(what=f"{what}: {problem}"))
        if not self._is_printed:
            self._is_printed = True
            effect = f", and --stall-action={self._action} has no effect" if self._action != "report" else ""
            self._console.info(
                f"hangs are not found{effect}: {problem}; the launcher tries again every {RETRY_INTERVAL:.0f} s"
            )
        self._wake()

    def worked(self) -> None:
        """A sample was taken, and what followed from it was done."""
        if self.problem:
            seconds = self._clock() - self._since
            self.problem = ""
            self._events.emit(WatchRestored(seconds=seconds))
            self._console.info(f"hangs are found again, after {seconds:.0f} s")
            self._wake()

    def note_denied(self) -> None:
        """The kernel does not let the stacks of workers be read."""
        if not self._denied:
            self._denied = True
            self._console.info(
                "the stacks of workers cannot be read (kernel.yama.ptrace_scope above 1, or another user): "
                "a hang is found without them, later, and without a line of the script"
            )


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        text = error.strerror or type(error).__name__
    else:
        text = f"internal error: {error!r}; please report it"
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:MAX_PROBLEM]
