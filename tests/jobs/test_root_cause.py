"""Which worker real process groups make look like the cause of a failure, and which one is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import OURS, finish, start

pytest.importorskip("torch")

FAILURES = 20

SCRIPT = """
import atexit, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
if "slow exit" in sys.argv and dist.get_rank() == 1:
    # Handlers run in the reverse of their order: the connections close, and the process goes on for a while.
    atexit.register(time.sleep, 30)
    atexit.register(dist.destroy_process_group)
try:
    dist.all_reduce(one)
    if dist.get_rank() == 1:
        raise ValueError("a bad label")
    dist.all_reduce(one)
finally:
    if "closed first" in sys.argv:
        dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["by itself", "closed first", "slow exit"])
def test_the_worker_with_an_error_of_its_own_is_named_and_not_the_one_that_lost_it(how: str, tmp_path: Path) -> None:
    """Its connections close before its peer can see why, and its peer may exit first."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node=2", "--start-method=forkserver", f"--max-restarts={FAILURES - 1}"]
    ended = finish(start(OURS, [*flags, script, how], cwd=tmp_path), timeout=600)
    named = re.findall(r"into the round, (rank \d)", " ".join(ended.err.split()))
    assert named == ["rank 1"] * (FAILURES - 1), ended.err
    assert "rank 1 raised ValueError: a bad label" in ended.err.partition("Root Cause")[2]
