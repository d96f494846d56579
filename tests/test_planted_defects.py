"""Defects that are planted in the agent, and the tests of `make test` that find each of them.

The simulations plant defects in decisions (see `simulation` and `cluster_simulation`). What talks to the kernel is not
simulated, so its defects are planted in a copy of the packages, which the tests named here are run against.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import only_long

from dlrover_run.process_tree import tree

ROOT = Path(__file__).resolve().parents[1]
RUN_TIMEOUT = 600.0
"""Seconds for the tests that are to find one defect. A run that reaches it has hung, and is ended."""

MAX_HEALTHY_RUN = RUN_TIMEOUT / 2
"""Seconds for the same tests without a defect: only then does a run that reaches RUN_TIMEOUT show that a job hung."""

TEST_TIMEOUT = 90
"""Seconds for each of these tests: many a defect lets a job hang."""


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
    "servers end before the tasks that use them": Defect(
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


@dataclass(frozen=True)
class Run:
    """A run of tests: pytest's exit code, None if the run reached RUN_TIMEOUT, and its seconds and output."""

    code: int | None
    seconds: float
    output: str


def run_against(packages: Path, test: str) -> Run:
    """Run the tests of one file that `make test` would run, against a copy of the packages."""
    # The working directory and PYTHONPATH come before the packages that are installed.
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    options = ["-x", "-q", f"--timeout={TEST_TIMEOUT}", "-p", "no:cacheprovider", "-m", "not long and not rival"]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *options]
    # Agents of a job that hangs keep what they inherited open, and would hold a pipe; their orphans come to this
    # process, which ends them.
    output = packages / "output"
    tree.become_subreaper()
    earlier = tree.children()
    began = time.monotonic()
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [*command, str(locate(test))],
            cwd=packages,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(RUN_TIMEOUT)
    finally:
        process.kill()
        process.wait()
        tree.end_children(earlier)
    return Run(code, time.monotonic() - began, output.read_text(errors="replace"))


def assert_passes(packages: Path, test: str) -> None:
    """Assert that the tests of one file pass, and take much less than RUN_TIMEOUT."""
    run = run_against(packages, test)
    assert run.code == pytest.ExitCode.OK, run.output
    assert run.seconds < MAX_HEALTHY_RUN, run.output


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The directory of a copy of the packages."""
    for package in ("dlrover_run", "tf_ps_runner"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_each_planted_defect_still_has_its_place() -> None:
    counts = {name: (ROOT / each.file).read_text().count(each.right) for name, each in DEFECTS.items()}
    assert counts == dict.fromkeys(DEFECTS, 1)


@pytest.mark.timeout(2 * RUN_TIMEOUT + 60)
@pytest.mark.parametrize("name", [*SAMPLE, *only_long(*(name for name in DEFECTS if name not in SAMPLE))])
def test_a_planted_defect_is_found(packages: Path, name: str) -> None:
    defect = DEFECTS[name]
    file = packages / defect.file
    source = file.read_text()
    assert source.count(defect.right) == 1, f"{defect.file} has changed: plant {name!r} elsewhere"
    file.write_text(source.replace(defect.right, defect.wrong))
    run = run_against(packages, defect.found_by)
    if run.code is None:
        file.write_text(source)
        assert_passes(packages, defect.found_by)
    else:
        assert run.code == pytest.ExitCode.TESTS_FAILED, run.output


@pytest.mark.long
@pytest.mark.timeout(RUN_TIMEOUT + 60)
@pytest.mark.parametrize("test", sorted({defect.found_by for defect in DEFECTS.values()}))
def test_without_a_defect_the_same_tests_pass(packages: Path, test: str) -> None:
    assert_passes(packages, test)
