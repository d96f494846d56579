"""`python -m dlrover_run.master`."""

from __future__ import annotations

import sys

from dlrover_run.master.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
