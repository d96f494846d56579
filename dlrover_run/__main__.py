"""`python -m dlrover_run` and the `dlrover-run` command."""

from __future__ import annotations

import gc
import signal
import sys

# The collector would go through all modules again and again while they are imported. Subcommands and event loops turn
# it on again.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Python's handler prints a traceback. The default action ends this process, which is right before there is a job;
    # afterwards the signal is awaited, or it ends the watchdog and with it the job.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from dlrover_run.command_line import entry_point  # noqa: E402
from dlrover_run.command_line.program import DLROVER_RUN  # noqa: E402


def run() -> None:
    """Run the command and leave the process with its code."""
    sys.exit(entry_point.run(DLROVER_RUN))


if __name__ == "__main__":
    run()
