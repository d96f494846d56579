"""Who takes part: our launcher with both start methods, torchrun in both ways, and what else is installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from launch_bench.rivals import OURS_FORKSERVER, OURS_SPAWN, TORCHRUN, TORCHRUN_UNSHARED, CommandRival

_BESIDE_PYTHON = Path(sys.executable).with_name("ft_launcher")

FT_LAUNCHER = CommandRival(
    "ft_launcher",
    (str(_BESIDE_PYTHON) if _BESIDE_PYTHON.exists() else shutil.which("ft_launcher") or "ft_launcher",),
    ("--ignore-missing-fault-tol-cfg",),
)
"""The launcher of nvidia-resiliency-ext. Of `--nnodes=MIN:MAX` it trains with MIN nodes and holds the others back, so
it has no part in what happens to a world that shrinks or grows."""

TORCHRUNS = (TORCHRUN, TORCHRUN_UNSHARED)
OURS = (OURS_SPAWN, OURS_FORKSERVER)
ELASTIC = (*OURS, *TORCHRUNS)
EVERYONE = (*ELASTIC, FT_LAUNCHER)
