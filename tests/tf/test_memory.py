"""The memory limits of tasks, with the kernel of this machine if it allows, and with a simulated one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_lines import LIMIT, run_python

from dlrover_run.processes.process import ProcessSpec, spawn
from dlrover_run.processes.tree import below
from tf_ps_runner.agent.report import EventPrinter
from tf_ps_runner.agent.supervisor import TaskSupervisor
from tf_ps_runner.cluster import text as policy_text
from tf_ps_runner.memory import enforcer, task_cgroup
from tf_ps_runner.memory import watch as watch_module
from tf_ps_runner.memory.enforcer import GroupCounters, MemoryEnforcer
from tf_ps_runner.memory.task_cgroup import CgroupParent, TaskCgroup, find_cgroup_parent, remove_leftover_groups
from tf_ps_runner.memory.watch import ProcessTreeWatch, usage_of

Counted = tuple[int | None, int | None]
"""Kills, and hits of the own limit."""

TAKE = "task_limit = [b'x' * (1 << 20) for _ in range({mib})]\n"
"""Allocates this number of MiB and writes to all of them."""

TAKEN = "import sys; print('taken', flush=True); sys.stdin.read()"
"""Prints that it has the memory, and keeps it until standard input ends."""


def test_a_limit_is_written_as_its_flag_accepts_it() -> None:
    sizes = [policy_text.memory_size(mib) for mib in (0, 100, 1024, 1536, 4096)]
    assert sizes == ["0Mi", "100Mi", "1Gi", "1536Mi", "4Gi"]


def test_a_task_is_near_its_limit_above_nine_tenths_of_it() -> None:
    assert enforcer.is_near_limit(91, 100)
    assert not enforcer.is_near_limit(90, 100)
    assert not enforcer.is_near_limit(10**6, 0)


@pytest.mark.parametrize(
    ("code", "before", "after", "clause"),
    [
        (-9, (0, None), (1, None), "it used more than its memory limit of 4Gi"),
        (7, (2, None), (3, None), "a child process of it was killed, because together they used more than the memory"),
        (-6, (0, 0), (1, 1), "a child process of it was killed"),
        (-9, (0, 2), (1, 3), "it used more than its memory limit of 4Gi"),
        (-9, (0, 2), (1, 2), "the kernel killed it for lack of memory below its limit of 4Gi"),
        (7, (0, 0), (1, 0), "the kernel killed a child process of it for lack of memory below its limit of 4Gi"),
        (-9, (1, 0), (1, 1), None),
        (-9, (0, 0), (0, 0), None),
        (0, (0, 0), (1, 1), None),
        (-9, (None, None), (1, 1), None),
        (-9, (0, 0), (None, None), None),
    ],
)
def test_a_failure_with_a_higher_count_of_kills_is_a_kill_for_memory(
    code: int, before: Counted, after: Counted, clause: str | None
) -> None:
    found = enforcer.explain_group_kill(code, GroupCounters(*before), GroupCounters(*after), 4096)
    assert (found is None) is (clause is None)
    assert clause is None or (found is not None and found.startswith(clause))


def test_without_a_limit_only_a_sigkill_with_evidence_is_a_kill_for_memory() -> None:
    task_limit = MemoryEnforcer.open("worker-0", 0)
    evidence: str | None = "the machine had run out"
    task_limit._oom_kills = SimpleNamespace(explain=lambda _: evidence)  # type: ignore[assignment]
    assert task_limit.explain_memory_kill(-9) == "the machine had run out"
    assert task_limit.explain_memory_kill(1) is None
    evidence = None
    assert task_limit.explain_memory_kill(-9) is None


# --- The real groups of this machine's kernel.


@pytest.fixture
def place() -> CgroupParent:
    """Where groups can be created here."""
    found = find_cgroup_parent()
    if found is None:
        pytest.skip("no control group can be made here, of version 1 or 2: that takes root, or a delegated group")
    return found


Open = Callable[[str, int], MemoryEnforcer]
"""Opens a limit in MiB for a task of this name."""


@pytest.fixture
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens limits that a group enforces, or without any group; they are closed after the test."""
    kept_by = request.param
    if kept_by == "group":
        request.getfixturevalue("place")
    else:
        monkeypatch.setattr(enforcer, "_cgroup_parent", lambda: None)
    with contextlib.ExitStack() as stack:

        def open_limit(name: str, limit: int) -> MemoryEnforcer:
            task_limit = MemoryEnforcer.open(name, limit)
            stack.callback(task_limit.close)
            assert task_limit.kept_by == kept_by
            return task_limit

        yield open_limit


both_ways = pytest.mark.parametrize("opened", ["group", "watch"], indirect=True)
by_group = pytest.mark.parametrize("opened", ["group"], indirect=True)


def start(task_limit: MemoryEnforcer, program: str) -> subprocess.Popen[bytes]:
    """Start a Python program with that limit, as an agent starts one."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        preexec_fn=task_limit.enter,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    task_limit.place(process.pid, unexpected)
    return process


def run(
    task_limit: MemoryEnforcer, program: str, *, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
) -> int:
    """Run a Python program with that limit to its end and return its exit code. Its standard input ends after
    `meanwhile`.
    """

    async def life() -> int:
        with start(task_limit, program) as process:
            try:
                if meanwhile is not None:
                    await asyncio.to_thread(meanwhile, process)
                    assert process.stdin is not None
                    process.stdin.close()
                return await asyncio.to_thread(process.wait, LIMIT)
            finally:
                process.kill()

    return asyncio.run(life())


@by_group
def test_a_spawned_task_has_its_limit_before_its_program_starts(opened: Open, tmp_path: Path) -> None:
    task_limit = opened("worker-3", 100)
    with open(tmp_path / "groups", "w+") as output:
        task = ProcessSpec(
            name="worker-3",
            argv=("cat", "/proc/self/cgroup"),
            environment=os.environ,
            stdio=(0, output.fileno(), 2),
            before_exec=task_limit.enter,
        )
        os.waitpid(spawn(task), 0)
        output.seek(0)
        assert f"{task_cgroup.PREFIX}worker-3." in output.read()


def groups_of(place: CgroupParent, name: str) -> list[str]:
    """The groups of the task of that name in that place."""
    return [group for group in os.listdir(place.folder) if group.startswith(f"{task_cgroup.PREFIX}{name}.")]


@both_ways
def test_a_task_above_its_limit_is_killed_and_reported(opened: Open) -> None:
    task_limit = opened("worker-0", 100)
    code = run(task_limit, TAKE.format(mib=400) + "input()")
    assert code == -signal.SIGKILL
    found = str(task_limit.explain_memory_kill(code))
    assert found.startswith("it used ")
    assert "100Mi" in found


@both_ways
@pytest.mark.parametrize(
    ("limit", "mib", "near"), [pytest.param(400, 100, False, id="within"), pytest.param(300, 280, True, id="near")]
)
def test_a_task_below_its_limit_is_not_killed(opened: Open, limit: int, mib: int, near: bool) -> None:
    task_limit = opened("worker-0", limit)

    def look(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        assert mib < task_limit.usage() < limit
        assert task_limit.near_memory_limit is near

    code = run(task_limit, TAKE.format(mib=mib) + TAKEN, meanwhile=look)
    assert (code, task_limit.explain_memory_kill(code)) == (0, None)


@both_ways
def test_a_task_that_is_killed_is_not_always_killed_for_memory(opened: Open) -> None:
    task_limit = opened("worker-0", 400)
    code = run(task_limit, "input()", meanwhile=lambda process: process.kill())
    assert (code, task_limit.explain_memory_kill(code)) == (-signal.SIGKILL, None)


CHILD_TAKES = """\
import subprocess, sys
code = subprocess.call([sys.executable, "-c", {program!r}], stdin=subprocess.PIPE)
sys.exit(7 if code == -9 else 1)
"""


@both_ways
def test_the_memory_of_a_child_counts_for_its_task(opened: Open) -> None:
    task_limit = opened("worker-0", 100)
    code = run(task_limit, CHILD_TAKES.format(program=TAKE.format(mib=400) + "input()"))
    # A group of version 1 kills the child alone.
    assert code in ((7, -signal.SIGKILL) if task_limit.kept_by == "group" else (-signal.SIGKILL,))
    assert "100Mi" in str(task_limit.explain_memory_kill(code))


@by_group
def test_a_replacement_has_its_own_limit_and_group(opened: Open, place: CgroupParent) -> None:
    name = f"worker-{os.getpid()}"
    for limit, ended in ((100, -signal.SIGKILL), (400, 0)):
        task_limit = opened(name, limit)
        assert len(groups_of(place, name)) == 1
        assert run(task_limit, TAKE.format(mib=200)) == ended
        task_limit.close()
        assert groups_of(place, name) == []


def test_processes_that_a_task_has_left_in_its_group_are_killed(place: CgroupParent) -> None:
    group = TaskCgroup(place, "worker-0", 100)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stray:
        group.add(stray.pid)
        group.close()
        assert stray.wait(LIMIT) == -signal.SIGKILL
    assert not group.path.exists()


LAUNCHER = """\
import sys
sys.path.insert(0, {root!r})
from tf_ps_runner.memory.enforcer import GroupCounters, MemoryEnforcer
task_limit = MemoryEnforcer.open("ps-0", 64)
print(task_limit._group.path, flush=True)
input()
"""


def test_the_groups_of_a_killed_launcher_are_removed_by_the_next_and_those_of_a_living_one_are_not(
    place: CgroupParent,
) -> None:
    program = LAUNCHER.format(root=str(Path(__file__).parents[2]))
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        path = Path(launcher.stdout.readline().decode().strip())
        remove_leftover_groups(place)
        assert path.exists()
        launcher.kill()
    assert path.exists()
    remove_leftover_groups(place)
    assert not path.exists()


def test_a_group_that_another_launcher_removes_before_it_is_locked_is_created_again(
    place: CgroupParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cleared = os.mkdir, []

    def cleared_at_once(path: Path) -> None:
        make(path)
        if len(cleared) < 2:
            remove_leftover_groups(place)
            cleared.append(path)

    monkeypatch.setattr(task_cgroup.os, "mkdir", cleared_at_once)
    group = TaskCgroup(place, "worker-0", 100)
    assert [path.exists() for path in cleared] == [False, False]
    assert group.path.exists()
    group.close()


def test_without_a_group_the_memory_of_a_task_is_polled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(enforcer, "_cgroup_parent", lambda: CgroupParent(tmp_path / "gone", 1))
    assert MemoryEnforcer.open("worker-0", 100).kept_by == "watch"


def test_a_task_without_a_limit_is_not_limited() -> None:
    task_limit = MemoryEnforcer.open("worker-0", 0)
    assert task_limit.kept_by == "nothing"
    code = run(task_limit, TAKE.format(mib=50))
    assert (code, task_limit.explain_memory_kill(code), task_limit.near_memory_limit) == (0, None, False)
    task_limit.close()


# --- Polling.


def test_shared_pages_count_once_if_the_sum_exceeds_the_limit() -> None:
    program = (
        "import os, sys\n" + TAKE.format(mib=150) + "pids = []\n"
        "for _ in range(3):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    pids.append(pid)\n"
        "print('forked', flush=True)\n"
        "sys.stdin.read()\n"
        "for pid in pids:\n"
        "    os.waitpid(pid, 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        tree = below(process.pid)
        assert len(tree) == 4
        assert tree[0] == process.pid
        assert usage_of(tree, math.inf) > 500
        assert 140 < usage_of(tree, 300) < 300


def test_a_closed_watch_polls_no_more() -> None:
    async def life() -> int | None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            watch = ProcessTreeWatch(process.pid, 1, unexpected)
            watch.close()
            # Otherwise the event loop would run the first poll next.
            await asyncio.sleep(0)
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.to_thread(process.wait, LIMIT)
            return watch.exceeded_with

    assert asyncio.run(life()) is None


def unexpected(error: Exception) -> None:
    raise error


def test_an_error_of_a_check_is_reported_once_and_the_limit_is_enforced_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[Exception] = []
    monkeypatch.setattr(watch_module, "CHECK_INTERVAL", 0.0)

    def broken_at_first(pids: list[int], enough: float) -> int:
        if len(calls) < 3:
            calls.append(pids)
            raise ZeroDivisionError("planted")
        return usage_of(pids, enough)

    calls: list[list[int]] = []
    monkeypatch.setattr(watch_module, "usage_of", broken_at_first)

    async def life() -> tuple[int | None, int]:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            watch = ProcessTreeWatch(process.pid, 1, errors.append)
            code = await asyncio.to_thread(process.wait, LIMIT)
            return watch.exceeded_with, code

    used, code = asyncio.run(life())
    assert code == -signal.SIGKILL
    assert used
    assert [repr(error) for error in errors] == ["ZeroDivisionError('planted')"]


def test_an_error_of_the_look_at_the_memory_of_a_task_ends_neither_the_node_nor_the_looks() -> None:
    class Broken:
        @property
        def near_memory_limit(self) -> bool:
            raise ZeroDivisionError("planted")

    lines: list[str] = []
    later: list[str] = []
    task: Any = SimpleNamespace(over=False, start=SimpleNamespace(memory=Broken()))
    task.later = lambda name, seconds, what: later.append(name)
    tasks = object.__new__(TaskSupervisor)
    tasks._events = EventPrinter(lines.append)
    for _ in range(2):
        tasks._check_memory(task)
    assert later == ["memory", "memory"]
    (line,) = lines
    assert line.startswith("warning: the memory of a task cannot be read: internal error: ZeroDivisionError('planted')")


def test_a_process_that_has_exited_uses_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(LIMIT)
    assert usage_of([process.pid], 0) == 0


# --- Version 2, with a simulated kernel.

FILES = {
    "cgroup.procs": "",
    "cgroup.controllers": "memory",
    "cgroup.subtree_control": "",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.oom.group": "0",
    "memory.current": "0",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    "memory.stat": "anon 0\nactive_file 0\ninactive_file 0\n",
}


class Kernel2:
    """A hierarchy of version 2, in which this process is in /job, and a /proc that shows it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.tree = root / "proc", root / "tree"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/job\n")
        (self.proc / "self" / "mountinfo").write_text(f"30 23 0:28 / {self.tree} rw - cgroup2 cgroup2 rw\n")
        self.own = self.tree / "job"
        self.own.mkdir(parents=True)
        self.fill(self.own)
        self.put("cgroup.procs", f"{os.getpid()}\n")

    def fill(self, group: Path) -> None:
        """Create the files of a new group."""
        for name, text in FILES.items():
            (group / name).write_text(text)

    def put(self, name: str, text: str) -> None:
        """Write a file of our own group."""
        (self.own / name).write_text(text)

    @property
    def groups(self) -> list[Path]:
        """The groups below ours."""
        return sorted(path for path in self.own.iterdir() if path.is_dir())


@pytest.fixture
def kernel2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel2:
    """A simulated hierarchy: its files are created and removed with their directories."""
    kernel = Kernel2(tmp_path)
    make, remove = os.mkdir, os.rmdir

    def made(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        kernel.fill(Path(path))

    def removed(path: Path) -> None:
        for name in FILES:
            (Path(path) / name).unlink(missing_ok=True)
        remove(path)

    monkeypatch.setattr(task_cgroup.os, "mkdir", made)
    monkeypatch.setattr(task_cgroup.os, "rmdir", removed)
    return kernel


def test_a_group_of_version_2_has_its_limit_and_no_swap_and_is_killed_as_a_whole(kernel2: Kernel2) -> None:
    kernel2.put("cgroup.subtree_control", "cpu memory\n")
    place = find_cgroup_parent(kernel2.proc)
    assert place == CgroupParent(kernel2.own, 2)
    assert kernel2.groups == []
    group = TaskCgroup(place, "ps-0", 100)
    assert kernel2.groups == [group.path]
    assert group.path.name.startswith("tf-ps-run.ps-0.")
    assert (group.path / "memory.max").read_text() == str(100 << 20)
    assert (group.path / "memory.swap.max").read_text().startswith("0")
    assert (group.path / "memory.oom.group").read_text() == "1"
    group.add(4711)
    assert (group.path / "cgroup.procs").read_text() == "4711"
    (group.path / "cgroup.procs").write_text("")
    assert (group.kills, group.hits) == (0, 0)
    (group.path / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 1\n")
    (group.path / "memory.current").write_text(f"{80 << 20}\n")
    (group.path / "memory.stat").write_text(f"anon 1\nactive_file {10 << 20}\ninactive_file {20 << 20}\n")
    assert (group.kills, group.hits, group.usage) == (2, 3, 50)
    group.close()
    assert kernel2.groups == []


def test_a_launcher_alone_in_its_group_moves_into_a_child_group(kernel2: Kernel2) -> None:
    assert find_cgroup_parent(kernel2.proc) == CgroupParent(kernel2.own, 2)
    (aside,) = kernel2.groups
    assert aside.name.startswith("tf-ps-run.launcher.")
    assert (aside / "cgroup.procs").read_text() == str(os.getpid())
    assert (kernel2.own / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("cgroup.procs", f"1\n{os.getpid()}\n", id="other processes"),
        pytest.param("cgroup.controllers", "cpu hugetlb\n", id="no controller"),
        pytest.param("cgroup.subtree_control", "memory\n", id="no permission"),
    ],
)
def test_a_group_that_cannot_be_used_is_not_changed(
    kernel2: Kernel2, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    def refuse(path: Path, mode: int = 0o777) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    if name == "cgroup.subtree_control":
        monkeypatch.setattr(task_cgroup.os, "mkdir", refuse)
    kernel2.put(name, text)
    before = (kernel2.own / "cgroup.subtree_control").read_text()
    assert find_cgroup_parent(kernel2.proc) is None
    assert kernel2.groups == []
    assert (kernel2.own / "cgroup.subtree_control").read_text() == before


# --- The whole program, with a stand-in for TensorFlow.

TRAIN = """\
import json, os, signal, sys
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] == "ps":
    signal.pause()
sys.stdout.write("%s-%s begins\\n" % (os.environ["WORKER_TYPE"], os.environ["WORKER_ID"]))
sys.stdout.flush()
"""


def test_a_chief_that_is_killed_for_memory_is_restarted_with_twice_as_much(place: CgroupParent, tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text(TRAIN + TAKE.format(mib=150))
    root = Path(__file__).parents[2]
    flags = ("--workers=0", "--start-method=spawn", "--worker-memory=100Mi", "--max-restarts=0")
    done = run_python(
        "-m", "tf_ps_runner", *flags, str(tmp_path / "train.py"), PYTHONPATH=f"{root}{os.pathsep}{tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition("]:")[2] for line in done.stdout.splitlines()] == ["chief-0 begins", "chief-1 begins"]
    assert "was killed by SIGKILL: it used more than its memory limit of 100Mi; chief-1 takes its place" in done.stderr
