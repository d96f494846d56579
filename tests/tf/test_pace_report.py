"""When a node reads the steps and the load of its tasks for a job that chooses its own size. In virtual time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from support.virtual_loop import run_virtually

from dlrover_run.devices.capacity import usable_memory, usable_processors
from tf_ps_runner.agent.pace import PaceReport, SeenTask
from tf_ps_runner.cluster.model import Role
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks, Pace, ServerLoad
from tf_ps_runner.memory.watch import cpu_seconds

BOOT = 10**12
"""The clock of the machine, in nanoseconds, when the loop begins."""


class Node:
    """A node with two processors and 1000 MiB, whose chief makes two steps a second, and whose servers each use 0.75
    processors and 100 MiB, the second of a limit of 125 MiB."""

    def __init__(self, *roles: Role) -> None:
        self.roles = roles
        self.version = 1
        self.woken = 0
        self.errors: list[Exception] = []
        self.is_broken = False
        self.pace = PaceReport(
            self.seen,
            self.wake,
            self.errors.append,
            lambda: BOOT + int(self.now * 1e9),
            processors=lambda: 2.0,
            memory=lambda: 1000,
            cpu=lambda pid: 0.75 * self.now,
        )

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wake(self) -> None:
        self.woken += 1

    def seen(self) -> list[SeenTask]:
        if self.is_broken:
            raise OSError("unreadable")
        step = int(2 * self.now)
        at = BOOT + int(step * 0.5e9)
        return [
            SeenTask(role, self.version, pid, step, at, lambda: 100, 125 * (pid == 1))
            if role is not Role.PS
            else SeenTask(role, self.version, pid, -1, None, lambda: 100, 125 * (pid == 1))
            for pid, role in enumerate(self.roles)
        ]

    def follow(self, interval: float, version: int = 1, shutting_down: bool = False) -> None:
        self.pace.follow(NodeOrder(version=version, report_interval=interval), shutting_down)

    def part(self) -> NodeTasks:
        return self.pace.add_to(NodeTasks())


def test_a_node_that_is_not_asked_reports_nothing() -> None:
    async def run() -> None:
        node = Node(Role.CHIEF, Role.PS)
        node.follow(0.0)
        await asyncio.sleep(100)
        assert (node.woken, node.part()) == (0, NodeTasks())

    run_virtually(run())


def test_the_node_of_the_chief_reports_steps_with_seconds_of_its_own() -> None:
    async def run() -> None:
        node = Node(Role.CHIEF)
        node.follow(5.0)
        await asyncio.sleep(5.2)
        assert node.part() == NodeTasks(pace=Pace(1, 10, 0.0, 0.0))
        await asyncio.sleep(5)
        assert node.part() == NodeTasks(pace=Pace(1, 20, 5.0, 0.0))
        assert node.woken == 2

    run_virtually(run())


def test_a_node_without_the_chief_reports_no_steps() -> None:
    async def run() -> None:
        node = Node(Role.WORKER)
        node.follow(5.0)
        await asyncio.sleep(20)
        assert node.part() == NodeTasks()

    run_virtually(run())


def test_a_node_reports_what_its_servers_use_from_the_second_look_on() -> None:
    async def run() -> None:
        node = Node(Role.PS, Role.PS)
        node.follow(5.0)
        await asyncio.sleep(5.2)
        assert node.part().load is None
        await asyncio.sleep(5)
        # 1.5 of 2 processors; and 100 of 125 MiB, which is more of it than 200 of 1000.
        assert node.part().load == ServerLoad(1, 75, 80)

    run_virtually(run())


def test_what_was_read_of_another_version_is_not_reported() -> None:
    async def run() -> None:
        node = Node(Role.CHIEF, Role.PS)
        node.follow(5.0)
        await asyncio.sleep(10.2)
        node.follow(5.0, version=2)
        assert node.part() == NodeTasks()
        node.version = 2
        await asyncio.sleep(5)
        part = node.part()
        assert part.pace is not None
        assert (part.pace.version, part.pace.seconds) == (2, 0.0)

    run_virtually(run())


def test_a_reading_that_fails_is_reported_once_and_does_not_end_the_others() -> None:
    async def run() -> None:
        node = Node(Role.CHIEF)
        node.is_broken = True
        node.follow(5.0)
        await asyncio.sleep(10.2)
        assert (len(node.errors), node.part()) == (1, NodeTasks())
        node.is_broken = False
        await asyncio.sleep(5)
        assert (len(node.errors), node.part()) == (1, NodeTasks(pace=Pace(1, 30, 0.0, 0.0)))

    run_virtually(run())


def test_it_ends_with_the_node() -> None:
    async def run() -> None:
        node = Node(Role.CHIEF)
        node.follow(5.0)
        await asyncio.sleep(5.2)
        node.follow(5.0, shutting_down=True)
        await asyncio.sleep(50)
        assert node.woken == 1

    run_virtually(run())


def test_a_report_with_pace_and_load_travels() -> None:
    part = NodeTasks(pace=Pace(1, 20, 5.0, 0.5), load=ServerLoad(1, 75, 80))
    assert msgspec.json.decode(msgspec.json.encode(part), type=NodeTasks) == part


@pytest.mark.parametrize(
    ("kind", "file", "text", "expected"),
    [
        ("cgroup2", "cpu.max", "50000 100000", 0.5),
        ("cgroup2", "cpu.max", "max 100000", None),
        ("cgroup", "cpu.cfs_quota_us", "50000", 0.5),
        ("cgroup", "cpu.cfs_quota_us", "-1", None),
    ],
)
def test_processors_are_those_that_the_group_may_use(
    kind: str, file: str, text: str, expected: float | None, tmp_path: Path
) -> None:
    controllers = "cpu,cpuacct" if kind == "cgroup" else ""
    proc, group = machine(tmp_path, kind, controllers)
    (group / file).write_text(f"{text}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_processors(proc) == (expected or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("kind", "file"), [("cgroup2", "memory.max"), ("cgroup", "memory.limit_in_bytes")])
def test_memory_is_what_the_group_may_use(kind: str, file: str, tmp_path: Path) -> None:
    proc, group = machine(tmp_path, kind, "memory" if kind == "cgroup" else "")
    (proc / "meminfo").write_text("MemTotal: 1048576 kB\n")
    assert usable_memory(proc) == 1 << 30
    (group / file).write_text(f"{64 << 20}\n")
    assert usable_memory(proc) == 64 << 20


def machine(tmp_path: Path, kind: str, controllers: str) -> tuple[Path, Path]:
    """A /proc of a process in a control group of that kind, and the group."""
    proc, mount = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (mount / "job").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"1:{controllers}:/job\n")
    (proc / "self" / "mountinfo").write_text(f"30 20 0:1 / {mount} rw - {kind} {kind} rw,{controllers}\n")
    return proc, mount / "job"


def test_seconds_of_processors_are_counted() -> None:
    before = cpu_seconds([os.getpid()])
    while cpu_seconds([os.getpid()]) < before + 0.05:
        sum(range(1000))
    assert cpu_seconds([2**22 + 1]) == 0
