"""`python -m tf_ps_runner` and the `tf-ps-run` command."""

from __future__ import annotations

import gc
import signal
import sys

# As in dlrover-run: not while modules are imported.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # As in dlrover-run: before there is a job, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from dlrover_run.command_line import entry_point  # noqa: E402
from tf_ps_runner.command_line.options import TF_PS_RUN  # noqa: E402


def run() -> None:
    """Run the command and leave the process with its code."""
    sys.exit(entry_point.run(TF_PS_RUN))


if __name__ == "__main__":
    run()
