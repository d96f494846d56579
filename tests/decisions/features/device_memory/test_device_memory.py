"""What is ended before a round because it holds a device, and what is said of the rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_nvml import FakeNvml, FakeNvmlError
from support.harness import WAIT

from dlrover_run.devices import holders
from dlrover_run.events.records import DevicesFreed
from dlrover_run.features.device_memory.node import DeviceMemory
from dlrover_run.features.device_memory.users import ask_nvml, describe_left, find_others
from dlrover_run.processes import tree
from dlrover_run.processes.orphans import OrphanKiller

GIB = 1 << 30


class Nvml(FakeNvml):
    """Two GPUs, whose memory is used as in `used` by the processes in `pids`."""

    def __init__(self, used: int, pids: Collection[int] = ()) -> None:
        super().__init__(["GPU-a", "GPU-b"])
        self._used = used
        self._pids = pids

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=self._used if handle == "GPU-b" else 0, total=80 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self._pids] if handle == "GPU-b" else []


@pytest.mark.parametrize(
    ("used", "pids", "alone", "visible", "said"),
    [
        (61, [], True, None, "in use by a process that this container does not show"),
        (61, [], False, None, None),
        (4, [], True, None, None),
        (4, [1], True, None, "in use by process 1 ("),
        (4, [1], False, None, "in use by process 1 ("),
        (4, [7], False, None, None),
        (61, [1], True, "0", None),
    ],
)
def test_what_is_not_of_this_job_is_named(
    used: int, pids: list[int], alone: bool, visible: str | None, said: str | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    lines = find_others(Nvml(used * GIB, pids), environ, {7}, alone)
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"GPU 1 has {used} GiB of 80 GiB {said}")


def test_a_driver_that_fails_says_nothing() -> None:
    async def ask(nvml: FakeNvml) -> list[str]:
        return await ask_nvml({}, (), True, nvml)

    assert len(asyncio.run(ask(Nvml(61 * GIB)))) == 1
    absent = Nvml(61 * GIB)
    absent.init_error = FakeNvmlError(9, "Driver Not Loaded")
    assert asyncio.run(ask(absent)) == []


def test_a_process_that_cannot_be_ended_is_waited_for_with_a_limit_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stuck in the driver: here SIGKILL is not sent."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr(tree, "kill", lambda processes, spared: [])
    try:
        spared = {one.pid for one in tree.descendants()} - {child.pid}
        killer = OrphanKiller(lambda: spared)
        assert asyncio.run(killer.end(lambda one: one.pid == child.pid, 0.0)) == [child.pid]
        (line,) = describe_left([child.pid])
        assert line.startswith(f"process {child.pid} (")
        assert "cannot be ended" in line
    finally:
        child.kill()
        child.wait()
    assert describe_left([]) == []


def test_one_that_this_user_may_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr(tree, "send_signal", lambda pid, number: False)
    try:
        spared = {one.pid for one in tree.descendants()} - {child.pid}
        killer = OrphanKiller(lambda: spared)
        assert asyncio.run(killer.end(lambda one: one.pid == child.pid, WAIT)) == [child.pid]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("keeps", "sessions", "ends"), [(False, set(), True), (True, {4}, True), (True, {5}, False)])
def test_beside_workers_that_go_on_only_the_session_of_a_dead_one_is_ended(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, sessions: set[int], ends: bool
) -> None:
    monkeypatch.setattr(holders, "holds_device", lambda pid: True)
    ended, events = [], []

    class Orphans:
        def find(self, is_meant: Any) -> list[tree.ProcessInfo]:
            return [one for one in [tree.ProcessInfo(9, 1, 4, 0)] if is_meant(one)]

        async def end(self, is_meant: Any, timeout: float) -> list[int]:
            ended.append(timeout)
            return []

    services: Any = SimpleNamespace(orphans=Orphans(), events=SimpleNamespace(emit=events.append))
    tasks: Any = SimpleNamespace(running=keeps)
    feature = DeviceMemory(services, tasks)
    monkeypatch.setattr(feature, "_other_holders", no_lines)
    for pid in sessions:
        feature.worker_ended(SimpleNamespace(pid=pid))  # type: ignore[arg-type]
    asyncio.run(feature.before_cleanup())
    assert bool(ended) is ends
    assert [type(event) for event in events] == ([DevicesFreed] if ends else [])


async def no_lines(left: list[int], alone: bool) -> list[str]:
    return []
