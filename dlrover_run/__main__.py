"""`python -m dlrover_run` and the `dlrover-run` command."""

from __future__ import annotations

import sys

from dlrover_run.cli import main


def run() -> None:
    """Run the command and leave the process with its code."""
    sys.exit(main())


if __name__ == "__main__":
    run()
