"""`python -m dlrover_run` and the `dlrover-run` command."""

from __future__ import annotations

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Python's handler prints a traceback. The default action ends this process, which is right before there is a job;
    # afterwards the signal is awaited, or it ends the watchdog and with it the job.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from dlrover_run.command_line import entry_point
from dlrover_run.command_line.program import DLROVER_RUN


def run() -> None:
    """Run the command and leave the process with its code."""
    sys.exit(entry_point.run(DLROVER_RUN))


if __name__ == "__main__":
    run()
