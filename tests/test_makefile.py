"""What `make` tells a person who runs it for the first time."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["demo", "demo-tf"])
def test_a_download_is_announced_with_its_size(target: str, tmp_path: Path) -> None:
    where = [f"VENV={tmp_path / 'venv'}", f"TF={tmp_path / 'tf'}"]
    plan = subprocess.run(
        ["make", "--dry-run", target, *where], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    announced = 0
    for line in plan.splitlines():
        announced += bool(re.match(r"echo .*about \d+ MB to download", line))
        if " -m venv " in line:
            venvs = plan[: plan.index(line)].count(" -m venv ") + 1
            assert announced >= venvs, f"nothing was said before {line}"
    assert announced == 2
    assert "bin/dlrover-run" not in plan, "another package may have replaced that script"
