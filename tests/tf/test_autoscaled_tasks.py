"""Real jobs of pretended tasks that choose their own numbers: the throughput of each number of workers is planted, and
so is the memory of the servers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pretended import SERVERS, Job
from support.harness import WAIT, status_of

from dlrover_run.job_status.status import JobState

PLANTED = Path(__file__).parent / "workers" / "planted.py"

CONF = "autoscale_block=0.8,autoscale_warm_up=0.5,autoscale_tolerance=0.1"

MEMORY = 320
"""MiB that a server may use. An interpreter with gRPC takes some 30."""

SEARCH_TIMEOUT = 4 * WAIT
"""Seconds until the search of a job on a busy machine has ended."""


def number(found: dict[str, Any], role: str) -> int:
    return sum(name.startswith(f"{role} ") for node in found["nodes"] for name in node["tasks"])


@pytest.mark.long
@pytest.mark.parametrize(("rates", "workers"), [("50,100,102,104", 1), ("50,100,150,200", 3)], ids=["knee", "linear"])
def test_the_planted_numbers_are_found(rates: str, workers: int, start: Callable[..., Job], tmp_path: Path) -> None:
    end = tmp_path / "end"
    flags = ["--autoscale", "--workers=0:3", "--ps=1:2", f"--rdzv-conf={CONF}", f"--checkpoint-dir={tmp_path}"]
    flags += [f"--ps-memory={MEMORY}Mi", f"--max-memory={MEMORY}Mi"]
    # The tables of one server take most of what it may use, and those of two take half of that.
    job = start(*flags, script=PLANTED, args=(rates, "240", str(end)))
    try:
        deadline = time.monotonic() + SEARCH_TIMEOUT
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            time.sleep(1)
            found = status_of(SERVERS, job.run_id)
            choice = found.get("size_choice") or {}
            if found and number(found, "ps") == 2 and str(choice.get("condition")).startswith("Reach"):
                break
        choice = found["size_choice"]
        print(json.dumps(choice, indent=1))
        assert (number(found, "worker"), number(found, "ps")) == (workers, 2), found
        assert (choice["wanted_nodes"], choice["servers"]["wanted"], choice["noun"]) == (workers, 2, "worker")
        assert found["state"] == JobState.TRAINING
        assert choice["servers"]["memory"] is not None
        assert choice["servers"]["processor"] is not None
    finally:
        end.touch()
        output, _ = job.process.communicate(timeout=WAIT)
    assert job.process.returncode == 0, output
    saved = re.search(r"chief-\d+ saved at step (\d+)", output)
    restored = re.search(r"restored from step (\d+), no step lost", output)
    assert saved is not None, output
    assert restored is not None, output
    assert saved[1] == restored[1]
