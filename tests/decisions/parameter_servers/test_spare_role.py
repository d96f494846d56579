"""A role that is only a row of the table passes through everything that depends on the role."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHECKS = ["command_line", "environment", "exits", "placement", "failures", "new_version", "texts", "end"]


def test_a_row_of_the_table_is_a_role_wherever_the_table_is_read() -> None:
    # A process of its own, because the command line and the decoders read the table once.
    command = [sys.executable, str(HERE / "spare_role.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(HERE.parents[1])}, capture_output=True, text=True
    )
    assert (done.stdout.split(), done.returncode) == (CHECKS, 0), done.stderr
