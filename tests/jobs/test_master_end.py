"""The launcher of the last node waits for the end of the master that it has started: the first process of a container
may collect no process that it has not started, and would keep a defunct master for each job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import quiet_port
from support.harness import WAIT, environment
from support.scripted_agent import rank_assignment

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.rendezvous.master_client.end import collect_masters, is_last_node

FIRST_PROCESS = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
command = sys.argv[2:]
codes = [each.wait() for each in [subprocess.Popen(command) for _ in range(int(sys.argv[1]))]]
try:
    pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
    left = open(f"/proc/{pid}/comm").read().strip()
except ChildProcessError:
    left = "nothing"
print(f"codes {codes}, {left} is left")
"""
"""Starts launchers as the first process of a container would, and collects only those."""

LAUNCHER = f"""
from dlrover_run.__main__ import run
from dlrover_run.rendezvous.master_client import end
end.END_TIMEOUT = {WAIT}  # On a busy machine the end of a master may take longer.
run()
"""


@pytest.mark.parametrize("launchers", [1, 2])
def test_no_master_is_left_to_the_first_process_of_a_container(launchers: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained')\n")
    flags = [f"--nnodes={launchers}:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{quiet_port()}"]
    flags += ["--rdzv-id=one", "--rdzv-conf=last_call_timeout=1", str(script)]
    launcher = [sys.executable, "-c", LAUNCHER, *flags]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PROCESS, str(launchers), *launcher],
        cwd=tmp_path,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=2 * WAIT,
    )
    assert done.stdout.splitlines()[-1:] == [f"codes {[0] * launchers}, nothing is left"], done.stdout + done.stderr


def test_a_master_that_runs_longer_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "1000"]) as master:
        collect_masters([master.pid], timeout=0.0)
        assert master.poll() is None
        master.kill()


def ranks(nodes: int) -> RankAssignment:
    return rank_assignment(nodes=nodes, world_size=nodes, role_world_size=nodes, store_address="a", store_port=1)


@pytest.mark.parametrize(
    ("phase", "nodes", "last"),
    [
        (PlanPhase.FINISHED, 2, True),
        (PlanPhase.FAILED, 0, True),
        (PlanPhase.TRAINING, 2, False),
        (PlanPhase.TRAINING, 1, True),
        (PlanPhase.TRAINING, 0, False),
        (PlanPhase.GATHERING, 0, True),
    ],
)
def test_a_node_whose_master_others_need_does_not_wait_for_it(phase: PlanPhase, nodes: int, last: bool) -> None:
    assert is_last_node(Assignment(phase=phase), ranks(nodes) if nodes else None) is last
