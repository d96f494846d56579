"""What a task may take: read from the kernel of this machine where it lets us, from a made-up one where it does not."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover_run.policies.parameter_servers import text as words
from dlrover_run.supervisor.process import ProcessSpec, spawn
from tf_ps_runner.memory import cgroups, enforcer
from tf_ps_runner.memory.cgroups import CgroupParent, TaskCgroup, find_cgroup_parent, remove_leftover_groups
from tf_ps_runner.memory.enforcer import MemoryEnforcer
from tf_ps_runner.memory.process_tree import ProcessTreeWatch, processes_of, usage_of

LIMIT = 60.0
"""Seconds that a process of a test may take before the test gives up."""

TAKE = "held = [b'x' * (1 << 20) for _ in range({mib})]\n"
"""What takes so many MiB and touches them all."""

TAKEN = "import sys; print('taken', flush=True); sys.stdin.read()"
"""What says that, and keeps it until its standard input ends."""


def test_words_of_a_limit_are_those_that_a_flag_takes() -> None:
    assert [words.memory_size(mib) for mib in (0, 100, 1024, 1536, 4096)] == ["0Mi", "100Mi", "1Gi", "1536Mi", "4Gi"]


def test_a_task_is_swollen_above_nine_tenths_of_a_limit_that_it_has() -> None:
    assert enforcer.is_near_limit(91, 100)
    assert not enforcer.is_near_limit(90, 100)
    assert not enforcer.is_near_limit(10**6, 0)


@pytest.mark.parametrize(
    ("code", "before", "after", "words"),
    [
        (-9, 0, 1, "was killed for memory: it used more than its limit of 4Gi"),
        (7, 2, 3, "exited with code 7 after a child of it was killed for memory"),
        (-6, 0, 1, "was ended by SIGABRT"),
        (-9, 1, 1, None),
        (-9, 0, 0, None),
        (0, 0, 1, None),
        (-9, None, 1, None),
        (-9, 0, None, None),
    ],
)
def test_the_count_of_kills_and_a_bad_end_together_are_an_end_for_memory(
    code: int, before: int | None, after: int | None, words: str | None
) -> None:
    said = enforcer.explain_end(code, before, after, 4096)
    assert (said is None) is (words is None)
    assert words is None or (said is not None and said.startswith(words))


def test_without_a_limit_only_a_sigkill_with_evidence_is_an_end_for_memory() -> None:
    held = MemoryEnforcer.open("worker-0", 0)
    evidence: str | None = "the machine had run out"
    held._machine = SimpleNamespace(explain=lambda: evidence)  # type: ignore[assignment]
    assert held.killed_for_memory(-9) == "was killed for memory: the machine had run out"
    assert held.killed_for_memory(1) is None
    evidence = None
    assert held.killed_for_memory(-9) is None


# --- Groups of the kernel that is here.


@pytest.fixture
def place() -> CgroupParent:
    """Where groups can be made here."""
    found = find_cgroup_parent()
    if found is None:
        pytest.skip("no control group can be made here, of version 1 or 2: that takes root, or a delegated group")
    return found


@pytest.fixture
def by_group(place: CgroupParent) -> Callable[[str, int], MemoryEnforcer]:
    """Opens a hold that is a group."""

    def opened(name: str, limit: int) -> MemoryEnforcer:
        held = MemoryEnforcer.open(name, limit)
        assert held.kept_by == "group"
        return held

    return opened


@pytest.fixture
def by_watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], MemoryEnforcer]:
    """Opens a hold on a machine where no group can be made."""
    monkeypatch.setattr(enforcer, "_cgroup_parent", lambda: None)

    def opened(name: str, limit: int) -> MemoryEnforcer:
        held = MemoryEnforcer.open(name, limit)
        assert held.kept_by == "watch"
        return held

    return opened


@pytest.fixture(params=["by_group", "by_watch"])
def opened(request: pytest.FixtureRequest) -> Callable[[str, int], MemoryEnforcer]:
    """Opens a hold, in both ways one after the other."""
    found: Callable[[str, int], MemoryEnforcer] = request.getfixturevalue(request.param)
    return found


def start(held: MemoryEnforcer, program: str) -> subprocess.Popen[bytes]:
    """A Python program under that hold, as an agent starts one."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        preexec_fn=held.enter,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    held.place(process.pid)
    return process


def run(
    held: MemoryEnforcer, program: str, *, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
) -> int:
    """Run a Python program under that hold to its end; its exit code. Its standard input ends after `meanwhile`."""

    async def life() -> int:
        with start(held, program) as process:
            try:
                if meanwhile is not None:
                    await asyncio.to_thread(meanwhile, process)
                    assert process.stdin is not None
                    process.stdin.close()
                return await asyncio.to_thread(process.wait, LIMIT)
            finally:
                process.kill()

    return asyncio.run(life())


def test_a_spawned_task_is_under_its_limit_before_its_program_begins(
    by_group: Callable[[str, int], MemoryEnforcer], tmp_path: Path
) -> None:
    held = by_group("worker-3", 100)
    with open(tmp_path / "groups", "w+") as output:
        stdio = (0, output.fileno(), 2)
        task = ProcessSpec(
            name="worker-3",
            argv=("cat", "/proc/self/cgroup"),
            environment=os.environ,
            stdio=stdio,
            before_exec=held.enter,
        )
        os.waitpid(spawn(task), 0)
        held.close()
        output.seek(0)
        assert f"{cgroups.PREFIX}worker-3." in output.read()


def groups_of(place: CgroupParent, name: str) -> list[str]:
    """The groups of the task of that name in that place."""
    return [group for group in os.listdir(place.folder) if group.startswith(f"{cgroups.PREFIX}{name}.")]


def test_a_task_that_takes_too_much_is_killed_and_that_is_said(opened: Callable[[str, int], MemoryEnforcer]) -> None:
    held = opened("worker-0", 100)
    code = run(held, TAKE.format(mib=400) + "input()")
    said = held.killed_for_memory(code)
    held.close()
    assert code == -signal.SIGKILL
    assert said is not None
    assert said.startswith("was killed for memory: it used ")
    assert "100Mi" in said


def test_a_task_within_its_limit_is_left_alone(opened: Callable[[str, int], MemoryEnforcer]) -> None:
    held = opened("worker-0", 400)

    def ask(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        assert 100 < held.usage() < 200
        assert not held.near_memory_limit

    code = run(held, TAKE.format(mib=100) + TAKEN, meanwhile=ask)
    assert (code, held.killed_for_memory(code)) == (0, None)
    held.close()


def test_a_task_near_its_limit_is_swollen(opened: Callable[[str, int], MemoryEnforcer]) -> None:
    held = opened("ps-0", 220)

    def ask(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        assert held.near_memory_limit

    assert run(held, TAKE.format(mib=195) + TAKEN, meanwhile=ask) == 0
    held.close()


def test_a_task_that_somebody_kills_has_not_ended_for_memory(opened: Callable[[str, int], MemoryEnforcer]) -> None:
    held = opened("worker-0", 400)
    code = run(held, "input()", meanwhile=lambda process: process.kill())
    assert (code, held.killed_for_memory(code)) == (-signal.SIGKILL, None)
    held.close()


CHILD_TAKES = """\
import subprocess, sys
code = subprocess.call([sys.executable, "-c", {program!r}], stdin=subprocess.PIPE)
sys.exit(7 if code == -9 else 1)
"""


def test_a_task_whose_child_alone_was_killed_has_ended_for_memory(
    by_group: Callable[[str, int], MemoryEnforcer],
) -> None:
    held = by_group("worker-0", 100)
    code = run(held, CHILD_TAKES.format(program=TAKE.format(mib=400)))
    said = held.killed_for_memory(code)
    held.close()
    # Version 2 kills all of the group.
    assert code in (7, -signal.SIGKILL)
    assert said is not None
    assert "killed for memory" in said


def test_the_memory_of_a_child_counts_for_a_task_that_is_watched(
    by_watch: Callable[[str, int], MemoryEnforcer],
) -> None:
    held = by_watch("worker-0", 100)
    code = run(held, CHILD_TAKES.format(program=TAKE.format(mib=400) + "input()"))
    assert code == -signal.SIGKILL
    assert held.killed_for_memory(code) is not None
    held.close()


def test_the_last_limit_before_a_replacement_is_forgotten_with_its_group(
    by_group: Callable[[str, int], MemoryEnforcer], place: CgroupParent
) -> None:
    name = f"worker-{os.getpid()}"
    for limit, ended in ((100, -signal.SIGKILL), (400, 0)):
        held = by_group(name, limit)
        assert len(groups_of(place, name)) == 1
        assert run(held, TAKE.format(mib=200)) == ended
        held.close()
        assert groups_of(place, name) == []


def test_what_a_task_has_left_in_its_group_ends_with_it(place: CgroupParent) -> None:
    group = TaskCgroup(place, "worker-0", 100)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stray:
        group.add(stray.pid)
        group.close()
        assert stray.wait(LIMIT) == -signal.SIGKILL
    assert not group.path.exists()


LAUNCHER = """\
import sys
sys.path.insert(0, {root!r})
from tf_ps_runner.memory.enforcer import MemoryEnforcer
held = MemoryEnforcer.open("ps-0", 64)
print(held._group.path, flush=True)
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


def test_a_group_that_others_clear_away_before_it_is_locked_is_made_again(
    place: CgroupParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cleared = os.mkdir, []

    def cleared_at_once(path: Path) -> None:
        make(path)
        if len(cleared) < 2:
            remove_leftover_groups(place)
            cleared.append(path)

    monkeypatch.setattr(cgroups.os, "mkdir", cleared_at_once)
    group = TaskCgroup(place, "worker-0", 100)
    assert [path.exists() for path in cleared] == [False, False]
    assert group.path.exists()
    group.close()


def test_a_group_that_cannot_be_made_leaves_a_hold_that_watches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(enforcer, "_cgroup_parent", lambda: CgroupParent(tmp_path / "gone", 1))
    assert MemoryEnforcer.open("worker-0", 100).kept_by == "watch"


def test_a_task_without_a_limit_is_held_by_nothing() -> None:
    held = MemoryEnforcer.open("worker-0", 0)
    assert held.kept_by == "nothing"
    code = run(held, TAKE.format(mib=50))
    assert (code, held.killed_for_memory(code), held.near_memory_limit) == (0, None, False)
    held.close()


# --- Watching.


def test_pages_that_processes_have_in_common_count_once_where_that_matters() -> None:
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
        tree = list(processes_of(process.pid))
        assert len(tree) == 4
        assert tree[0] == process.pid
        assert usage_of(tree, math.inf) > 500
        assert 140 < usage_of(tree, 300) < 300


def test_a_watch_that_is_closed_looks_no_more() -> None:
    async def life() -> int | None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            watch = ProcessTreeWatch(process.pid, 1)
            watch.close()
            # The first look would have been the next thing that the loop does.
            await asyncio.sleep(0)
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.to_thread(process.wait, LIMIT)
            return watch.exceeded_with

    assert asyncio.run(life()) is None


def test_a_process_that_is_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(LIMIT)
    assert usage_of([process.pid], 0) == 0


# --- Version 2, as a made-up kernel shows it.

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
        """Give a new group its files."""
        for name, text in FILES.items():
            (group / name).write_text(text)

    def put(self, name: str, text: str) -> None:
        """Have a file of our own group say that."""
        (self.own / name).write_text(text)

    @property
    def groups(self) -> list[Path]:
        """The groups below ours."""
        return sorted(path for path in self.own.iterdir() if path.is_dir())


@pytest.fixture
def kernel2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel2:
    """A made-up hierarchy whose directories come with files and go with them."""
    kernel = Kernel2(tmp_path)
    make, remove = os.mkdir, os.rmdir

    def made(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        kernel.fill(Path(path))

    def removed(path: Path) -> None:
        for name in FILES:
            (Path(path) / name).unlink(missing_ok=True)
        remove(path)

    monkeypatch.setattr(cgroups.os, "mkdir", made)
    monkeypatch.setattr(cgroups.os, "rmdir", removed)
    return kernel


def test_a_group_of_version_2_has_its_limit_no_swap_and_dies_as_one(kernel2: Kernel2) -> None:
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
    assert group.kills == 0
    (group.path / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 1\n")
    (group.path / "memory.current").write_text(f"{80 << 20}\n")
    (group.path / "memory.stat").write_text(f"anon 1\nactive_file {10 << 20}\ninactive_file {20 << 20}\n")
    assert (group.kills, group.usage) == (2, 50)
    group.close()
    assert kernel2.groups == []


def test_a_launcher_alone_in_its_group_steps_aside_so_that_limits_can_be_handed_down(kernel2: Kernel2) -> None:
    assert find_cgroup_parent(kernel2.proc) == CgroupParent(kernel2.own, 2)
    (aside,) = kernel2.groups
    assert aside.name.startswith("tf-ps-run.launcher.")
    assert (aside / "cgroup.procs").read_text() == str(os.getpid())
    assert (kernel2.own / "cgroup.subtree_control").read_text() == "+memory"


def test_a_group_that_others_are_in_is_left_as_it_is(kernel2: Kernel2) -> None:
    kernel2.put("cgroup.procs", f"1\n{os.getpid()}\n")
    assert find_cgroup_parent(kernel2.proc) is None
    assert kernel2.groups == []
    assert (kernel2.own / "cgroup.subtree_control").read_text() == ""


def test_a_group_without_the_controller_is_no_place(kernel2: Kernel2) -> None:
    kernel2.put("cgroup.controllers", "cpu hugetlb\n")
    assert find_cgroup_parent(kernel2.proc) is None


def test_a_group_that_may_not_be_written_to_is_no_place(kernel2: Kernel2, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel2.put("cgroup.subtree_control", "memory\n")

    def refuse(path: Path, mode: int = 0o777) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cgroups.os, "mkdir", refuse)
    assert find_cgroup_parent(kernel2.proc) is None


# --- The whole program, with something that only looks like TensorFlow.

TRAIN = """\
import json, os, signal, sys
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] == "ps":
    signal.pause()
sys.stdout.write("%s-%s begins\\n" % (os.environ["WORKER_TYPE"], os.environ["WORKER_ID"]))
sys.stdout.flush()
"""


def test_a_chief_that_is_killed_for_memory_comes_back_with_twice_as_much(place: CgroupParent, tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text(TRAIN + TAKE.format(mib=150))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tf_ps_runner",
            "--workers=0",
            "--start-method=spawn",
            "--worker-memory=100Mi",
            "--max-restarts=0",
            str(tmp_path / "train.py"),
        ],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition("]:")[2] for line in done.stdout.splitlines()] == ["chief-0 begins", "chief-1 begins"]
    assert "was killed for memory: it used more than its limit of 100Mi; chief-1 takes its place" in done.stderr
