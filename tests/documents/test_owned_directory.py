"""What a run of the tests keeps in a temporary directory does not stay behind one that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.owned_directory import OwnedDirectory

HOLDS = """
import sys
sys.path.insert(0, sys.argv[1])
from support.owned_directory import OwnedDirectory
print(OwnedDirectory("kept-", sys.argv[2]).path, flush=True)
sys.stdin.read()
"""


def test_the_directory_of_a_run_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", HOLDS, tests, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        path = Path(run.stdout.readline().strip())
        (path / "file").touch()
        beside = OwnedDirectory("kept-", str(tmp_path))
        assert path.exists(), "its process runs"
        run.kill()
    own = OwnedDirectory("kept-", str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted(map(Path, (beside.path, own.path)))
    for directory in (beside, own):
        directory.close()
    assert list(tmp_path.iterdir()) == []
