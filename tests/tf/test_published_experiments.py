"""The published experiments with parameter servers, each one command: a chief, a worker and a server, of which
`scripts/start_chaos.sh` evicts one or lets it run out of memory. The tasks stand in for those of TensorFlow, which
`tests/tf/faults/` has."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness import WAIT, Mailbox, finish
from pretended import Job

from tf_ps_runner.memory.cgroups import find_cgroup_parent

pytestmark = pytest.mark.long

CHAOS = Path(__file__).parents[2] / "scripts" / "start_chaos.sh"


def limit_of(pid: int) -> int:
    """The MiB that a task may use, by the kernel's word, as `grep memory` has it in the documents."""
    parent = find_cgroup_parent()
    assert parent is not None
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    name = next(name for line in lines if (name := line.rpartition("/")[2]).startswith("tf-ps-run."))
    file = "memory.max" if parent.version == 2 else "memory.limit_in_bytes"
    return int((parent.folder / name / file).read_text()) >> 20


@pytest.mark.parametrize(
    ("verb", "role", "said"),
    [
        ("kill-process", "worker", "start_chaos: node 1: killed worker-0, process "),
        ("memory-overload", "chief", "start_chaos: node 1: chief-0 has ended"),
        ("kill-process", "ps", "start_chaos: node 1: killed ps-0, process "),
    ],
)
def test_a_task_is_replaced(mailbox: Mailbox, verb: str, role: str, said: str) -> None:
    if verb == "memory-overload" and find_cgroup_parent() is None:
        pytest.skip("no control group can be made here, of version 1 or 2: that takes root, or a delegated group")
    job = Job(mailbox, "--ps=1", "--workers=1", "--worker-memory=100Mi", "--max-memory=1Gi")
    before = {name: job.up(name)["pid"] for name in ("ps-0", "chief-0", "worker-0")}
    job.train()
    environ = {**os.environ, "CHAOS_ROLE": role, "CHAOS_CLUSTER": str(job.process.pid)}
    limit = limit_of(before["chief-0"]) if verb == "memory-overload" else 0
    done = subprocess.run(["bash", CHAOS, verb], env=environ, capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
    successor = job.up(f"{role}-1")
    assert not limit or (limit, limit_of(successor["pid"])) == (100, 200)
    job.process.send_signal(signal.SIGTERM)
    console = finish(job.process).out
    assert f"{role}-1 takes its place" in console
    assert not limit or "200Mi instead of 100Mi" in console
