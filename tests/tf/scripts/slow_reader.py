"""Runs the script of the Criteo example that is named first, with a disk that takes 0.1 s for each block of rows. So
each task makes at most ten steps per second, and more tasks make more."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

SCRIPT = Path(sys.argv[1])
sys.path.insert(0, str(SCRIPT.parent))
sys.argv = sys.argv[1:]

import criteo  # noqa: E402

read = criteo.Lines.read


def read_slowly(lines: criteo.Lines, begin: int, end: int) -> list[bytes]:
    time.sleep(0.1)
    rows: list[bytes] = read(lines, begin, end)
    return rows


criteo.Lines.read = read_slowly
runpy.run_path(str(SCRIPT), run_name="__main__")
