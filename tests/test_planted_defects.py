"""Defects that are planted in the agent, and the tests of `make test` that find each of them.

The simulations plant defects in decisions (see `simulation` and `cluster_simulation`). What talks to the kernel is not
simulated, so its defects are planted in a copy of the packages, which the tests named here are run against.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import only_long

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 900.0
"""Seconds for the tests that are to find one defect."""

TEST_TIMEOUT = 90
"""Seconds for each of these tests: of many a defect a job hangs."""


@dataclass(frozen=True)
class Defect:
    """One place in the sources, what is there, what is there instead, and a test that has to fail of it."""

    file: str
    right: str
    wrong: str
    found_by: str


DEFECTS = {
    "a task starts where another one still runs": Defect(
        "dlrover_run/agent/reconcile.py",
        "if task.place not in occupied:",
        "if True:",
        "test_reconcile.py",
    ),
    "servers end before those whom they serve": Defect(
        "dlrover_run/agent/reconcile.py",
        "if not (any_served and state.serves)]",
        "if True]",
        "test_reconcile.py",
    ),
    "a task is stopped again and again": Defect(
        "dlrover_run/agent/reconcile.py",
        "return [] if state.stopping is not None and state.stopping >= mode else [Stop(state.key, mode)]",
        "return [Stop(state.key, mode)]",
        "test_reconcile.py",
    ),
    "a leaving node takes new ranks": Defect(
        "dlrover_run/agent/agent.py",
        "            if not leaving:\n",
        "            if True:\n",
        "test_agent_rounds.py",
    ),
    "a dismissed node stays": Defect(
        "dlrover_run/agent/agent.py",
        "return dismissed or assignment.phase",
        "return assignment.phase",
        "test_health_check.py",
    ),
    "a node leaves without a report": Defect(
        "dlrover_run/agent/agent.py",
        "if (last := self._adapter.leave_report(error)) is not None:",
        "if (last := None) is not None:",
        "test_agent_rounds.py",
    ),
    "the workers of an ended round count": Defect(
        "dlrover_run/agent/node_state.py",
        "if current is None or current.key != state.round:",
        "if current is None:",
        "test_agent_rounds.py",
    ),
    "a success is forgotten when the node leaves": Defect(
        "dlrover_run/agent/node_state.py",
        "if current.group.succeeded:",
        "if current.group.succeeded and not leaving:",
        "test_agent_rounds.py",
    ),
    "a worker that ignores SIGTERM is never killed": Defect(
        "dlrover_run/supervisor/process.py",
        "self._kill_timer = asyncio.get_running_loop().call_later(grace,",
        "self._kill_timer = asyncio.get_running_loop().call_later(1e6,",
        "test_signals.py",
    ),
    "data loaders get the worker's SIGTERM": Defect(
        "dlrover_run/supervisor/process.py",
        "if self.spec.signal_group:",
        "if True:",
        "test_step_signals.py",
    ),
    "a stopped worker does not see its SIGTERM": Defect(
        "dlrover_run/supervisor/process.py",
        "        self._kill(signal.SIGCONT)\n",
        "        pass\n",
        "test_signals.py",
    ),
    "a signal of the whole step reaches a worker twice": Defect(
        "dlrover_run/supervisor/process.py",
        "        if delivered_at is None or self._started > delivered_at:\n            self._kill(number)\n        # A",
        "        self._kill(number)\n        # A",
        "test_step_signals.py",
    ),
    "a worker outlives its agent": Defect(
        "dlrover_run/supervisor/process.py",
        "if spec.dies_with_parent:\n            tree",
        "if False:\n            tree",
        "test_process_tree.py",
    ),
    "what a killed agent leaves is left alone": Defect(
        "dlrover_run/process_tree/watchdog.py",
        "    tree.end_children()\n",
        "    pass\n",
        "test_process_tree.py",
    ),
    "orphans go to process 1": Defect(
        "dlrover_run/process_tree/tree.py",
        "    _prctl(_PR_SET_CHILD_SUBREAPER, 1)\n",
        "    pass\n",
        "test_process_tree.py",
    ),
    "a master is ended with the launcher that started it": Defect(
        "dlrover_run/process_tree/tree.py",
        'if relative.session != relative.pid or title.partition(b"(")[2] != MASTER_NAME.encode():',
        "if True:",
        "test_hosting.py",
    ),
    "children of an ended worker live on": Defect(
        "dlrover_run/process_tree/orphans.py",
        "        self._ended_sessions.add(worker)\n",
        "        pass\n",
        "test_process_tree.py",
    ),
    "a kill for memory is a plain SIGKILL": Defect(
        "dlrover_run/agent/exit_info.py",
        "asks_memory = worker.stopped_with is None and",
        "asks_memory = False and",
        "test_failures.py",
    ),
    "every SIGKILL is a kill for memory": Defect(
        "dlrover_run/failures/oom_kills.py",
        "if not _rose(then[own.path].kills, own.kills):",
        "if False:",
        "test_failures.py",
    ),
    "ranks begin at 0 on each node": Defect(
        "dlrover_run/agent/environment.py",
        "    rank = ranks.first_rank + local_rank\n",
        "    rank = local_rank\n",
        "test_two_nodes.py",
    ),
    "workers have no bound on threads": Defect(
        "dlrover_run/agent/environment.py",
        "    if workers > 1:\n",
        "    if False:\n",
        "test_worker_contract.py",
    ),
    "a second Ctrl-C waits for the workers": Defect(
        "dlrover_run/agent/shutdown.py",
        "insists = self._interrupted and number is signal.SIGINT",
        "insists = False",
        "test_signals.py",
    ),
    "a lost watchdog goes unnoticed": Defect(
        "dlrover_run/agent/shutdown.py",
        "            self.orphaned = True\n",
        "            pass\n",
        "test_process_tree.py",
    ),
    "secrets stay in the memory of the relay": Defect(
        "dlrover_run/output/relay_process.py",
        "            scrub(secrets)\n",
        "            pass\n",
        "test_strangers.py",
    ),
}

SAMPLE = ("a task starts where another one still runs", "a leaving node takes new ranks")
"""Those that are planted in `make test` too, so that it shows that this file works."""


def locate(test: str) -> Path:
    """The file of a test, in whichever folder of the tests it is."""
    (path,) = (ROOT / "tests").rglob(test)
    return path


def run_against(packages: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of one file that `make test` would run, against a copy of the packages."""
    # The working directory and PYTHONPATH come before the packages that are installed.
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    options = ["-x", "-q", f"--timeout={TEST_TIMEOUT}", "-p", "no:cacheprovider", "-m", "not long and not rival"]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *options]
    return subprocess.run(
        [*command, str(locate(test))],
        cwd=packages,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
    )


def test_each_planted_defect_still_has_its_place() -> None:
    counts = {name: (ROOT / each.file).read_text().count(each.right) for name, each in DEFECTS.items()}
    assert counts == dict.fromkeys(DEFECTS, 1)


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", [*SAMPLE, *only_long(*(name for name in DEFECTS if name not in SAMPLE))])
def test_a_planted_defect_is_found(tmp_path: Path, name: str) -> None:
    defect = DEFECTS[name]
    for package in ("dlrover_run", "tf_ps_runner"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / defect.file
    source = file.read_text()
    assert source.count(defect.right) == 1, f"{defect.file} has changed: plant {name!r} elsewhere"
    file.write_text(source.replace(defect.right, defect.wrong))
    done = run_against(tmp_path, defect.found_by)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("test", sorted({defect.found_by for defect in DEFECTS.values()}))
def test_without_a_defect_the_same_tests_pass(tmp_path: Path, test: str) -> None:
    for package in ("dlrover_run", "tf_ps_runner"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    done = run_against(tmp_path, test)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
