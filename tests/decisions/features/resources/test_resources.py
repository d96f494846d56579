"""What workers use: read from real processes and from a stand-in for NVML, kept, shown, sent and logged."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.golden import assert_screens

from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.resource_use import (
    MAX_TASKS,
    DeviceUse,
    NodeUse,
    TaskUse,
    rounded,
)
from dlrover_run.devices.use import read_devices, used_by
from dlrover_run.events.records import Event, Events, WorkerExited, WorkerKept, WorkerResources, WorkerStarted
from dlrover_run.events.stream import EventStream
from dlrover_run.features.operate.display.text import render_status
from dlrover_run.features.operate.web.metrics import JobFigures, render_metrics
from dlrover_run.features.resources import devices, monitor, processes
from dlrover_run.features.resources.devices import DeviceReader, visible_indices
from dlrover_run.features.resources.monitor import LOG_INTERVAL, SAMPLE_INTERVAL, ResourceMonitor
from dlrover_run.features.resources.processes import ProcessUse, WorkerMeter
from dlrover_run.job_status.status import (
    JobState,
    JobStatus,
    NodeCondition,
    NodeStatus,
)
from dlrover_run.observe.activity_report import ActivityReport

MIB = 2**20
GIB = 2**30

HOLDS = """
import os, subprocess, sys
held = bytearray(b"x") * (128 << 20)
script = "held = bytearray(b'y') * (64 << 20); print('ready', flush=True); input()"
subprocess.run([sys.executable, "-c", script])
"""

SHARES = """
import os
held = bytearray(b"x") * (256 << 20)
if os.fork() == 0:
    os.fork()
os.write(1, b"r")
os.read(0, 1)
"""


@pytest.fixture
def holder() -> Iterator[int]:
    """A process that holds 128 MiB, with a child that holds 64."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_the_memory_of_a_worker_is_that_of_its_children_too(holder: int) -> None:
    meter = WorkerMeter(holder, limit=1 << 40)
    first = meter.read(100.0)
    assert first is not None
    assert 192 * MIB < first.memory < 300 * MIB
    assert len(first.pids) == 2
    assert first.processors is None, "nothing is known before the second sample"
    second = meter.read(110.0)
    assert second is not None
    assert second.processors is not None
    assert second.processors < 10


def test_processors_are_the_time_since_the_sample_before() -> None:
    meter = WorkerMeter(os.getpid(), limit=1 << 40)
    assert meter.read(0.0) is not None
    began = sum(os.times()[:2])
    while sum(os.times()[:2]) - began < 0.2:
        pass
    spent = meter.read(0.1)
    assert spent is not None
    assert spent.processors is not None
    assert spent.processors >= 1.9, "0.2 seconds of a processor in what is said to be 0.1"
    assert (meter.read(1000.0) or spent).processors == pytest.approx(0, abs=0.01)


def test_pages_that_a_worker_shares_with_its_children_count_once_near_the_limit() -> None:
    process = subprocess.Popen([sys.executable, "-c", SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.read(3) == b"rrr"
        far, near = WorkerMeter(process.pid, limit=1 << 40).read(0.0), WorkerMeter(process.pid, limit=GIB).read(0.0)
        assert far is not None
        assert near is not None
        assert far.memory > 700 * MIB
        assert 256 * MIB < near.memory < 400 * MIB
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_a_worker_that_has_ended_is_not_read() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert WorkerMeter(process.pid, limit=GIB).read(0.0) is None


def test_a_process_that_was_left_out_of_the_sample_before_has_not_used_all_of_its_time_since(
    monkeypatch: pytest.MonkeyPatch, holder: int
) -> None:
    """As one beyond MAX_PROCESSES that enters when another one ends: this process has run since the tests began."""
    below = [[holder], [holder, os.getpid()]]
    meter = WorkerMeter(holder, limit=1 << 40)
    monkeypatch.setattr(meter, "_below", lambda: below.pop(0))
    monkeypatch.setattr(processes, "MAX_PROCESSES", 1)
    assert meter.read(0.0) is not None
    began = sum(os.times()[:2])
    assert began > 0.1
    second = meter.read(0.01)
    assert second is not None
    assert second.pids == {holder, os.getpid()}
    assert second.processors is not None
    assert second.processors < began / 0.01 / 2


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class StandInNvml:
    """A stand-in for NVML: two GPUs; on the first a process computes for 40 % of the time beside an unknown one."""

    NVMLError = NvmlError

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: Sequence[tuple[int, int, int]] | None = [(pid, 20, 40), (pid, 10, 90), (7, 20, 50), (0, 20, 3000)]
        self.asked: list[tuple[int, int]] = []
        self.lacks: set[str] = set()

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        raise NvmlError(3)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._supported("rates")
        return SimpleNamespace(gpu=[99, 0][handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=[50 * GIB, 0][handle], total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 412_300

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == 0
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._supported("processes")
        pairs = [[(self.pid, 30 * GIB), (7, 20 * GIB)], []][handle]
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in pairs]

    def nvmlDeviceGetProcessUtilization(self, handle: int, seen: int) -> list[Any]:
        self._supported("shares")
        self.asked.append((handle, seen))
        if handle or self.samples is None:
            raise NvmlError(6)
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=share) for pid, at, share in self.samples]

    def _supported(self, what: str) -> None:
        if what in self.lacks:
            raise NvmlError(3)


WHOLE = DeviceUse(0, None, None, 0.99, 50 * GIB, 80 * GIB, 61, 412.3)


def test_each_process_on_a_device_has_its_share_and_its_memory() -> None:
    nvml, seen = StandInNvml(11), dict[int, int]()
    found = read_devices(nvml, seen)
    assert used_by(found, {11, 12}) == [msgspec.structs.replace(WHOLE, share=0.4, memory=30 * GIB)]
    assert used_by(found, {12}) == []
    assert used_by(found, {11, 7}) == [msgspec.structs.replace(WHOLE, share=0.9, memory=50 * GIB)]
    nvml.samples = None
    assert used_by(read_devices(nvml, seen), {11})[0].share == 0, "no process has computed since"
    assert [at for handle, at in nvml.asked if handle == 0] == [0, 20]


def test_what_a_driver_does_not_report_is_left_out() -> None:
    nvml = StandInNvml(11)
    nvml.lacks = {"rates", "shares"}
    (use,) = used_by(read_devices(nvml, {}), {11})
    assert (use.busy, use.share, use.memory) == (None, None, 30 * GIB)
    nvml.lacks = {"processes"}
    assert used_by(read_devices(nvml, {}), {11}) == []


def test_a_lost_gpu_leaves_the_figures_of_the_others() -> None:
    class Lost(StandInNvml):
        def nvmlDeviceGetCount(self) -> int:
            return 3

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 0:
                raise NvmlError(15)
            return index - 1

    nvml = Lost(11)
    found = read_devices(nvml, {})
    assert [device.whole.index for device in found] == [1, 2]
    assert used_by(found, {11}) == [msgspec.structs.replace(WHOLE, index=1, share=0.4, memory=30 * GIB)]
    assert visible_indices(nvml, {}) == [1, 2]


def reading(nvml: StandInNvml) -> DeviceReader:
    """A reader that has read once."""
    reader = DeviceReader(nvml)
    reader.ask()
    while not reader.latest:
        assert reader._thread.is_alive()
    reader.close()
    reader._thread.join()
    return reader


def test_where_the_driver_names_no_process_a_worker_has_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that does not share the pids of its host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(devices.holders, "holds_device", lambda pid: pid == 11)
    nvml = StandInNvml(11)
    nvml.lacks = {"processes"}
    reader = reading(nvml)
    assert reader.used_by({11}, 1) == [WHOLE]
    assert reader.used_by({12}, 0) == [], "it holds no device"
    assert reader.used_by({11}, 2) == []
    assert reader.used_by({11}, None) == []
    named = reading(StandInNvml(os.getpid()))
    assert named.used_by({11}, 1) == [], "the driver knows the processes of this container"


def test_a_driver_that_is_gone_leaves_no_figures_and_no_thread() -> None:
    class Gone(StandInNvml):
        def nvmlInit(self) -> None:
            raise NvmlError(9)

    reader = DeviceReader(Gone(1))
    reader._thread.join()
    assert reader.latest == ()


class Log(Events):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def figures(self) -> list[WorkerResources]:
        return [event for event in self.events if isinstance(event, WorkerResources)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def started(rank: int, pid: int, round_: int = 1) -> WorkerStarted:
    return WorkerStarted(round=round_, rank=rank, local_rank=rank, pid=pid)


def exited(rank: int, pid: int, code: int, peak: int = 0, stopped_with: str = "") -> WorkerExited:
    return WorkerExited(
        round=1, rank=rank, local_rank=rank, pid=pid, code=code, peak_memory=peak, stopped_with=stopped_with
    )


Watched = tuple[ResourceMonitor, Log, Clock]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(monitor, "usable_memory", lambda: 32 * GIB)
    monkeypatch.setattr(monitor, "READ_TIMEOUT", 600.0)
    log, clock = Log(), Clock()
    return ResourceMonitor(log.emit, lambda: None, clock), log, clock


def take(here: ResourceMonitor) -> None:
    asyncio.run(here.take())


def sample(here: ResourceMonitor) -> NodeUse | None:
    asyncio.run(here.sample())
    return here.use


def test_a_read_that_hangs_delays_neither_the_loop_nor_the_exit(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a process that holds its memory map: the agent goes on, and the figures come when the read is done."""
    here, _, clock = watched
    may_end, threads = threading.Event(), list[threading.Thread]()
    read = WorkerMeter.read

    def hang(meter: WorkerMeter, now: float) -> ProcessUse | None:
        threads.append(threading.current_thread())
        may_end.wait(20)
        return read(meter, now)

    monkeypatch.setattr(WorkerMeter, "read", hang)
    monkeypatch.setattr(monitor, "READ_TIMEOUT", 0.0)
    here.note(started(0, os.getpid()))
    for _ in range(3):
        take(here)
        assert here.use is None
        clock.now += SAMPLE_INTERVAL
    reading = here._reading
    assert reading is not None
    may_end.set()
    reading.result()
    monkeypatch.setattr(monitor, "READ_TIMEOUT", 600.0)
    take(here)
    assert here.use is not None
    here.close()
    (thread,) = set(threads)
    assert thread.daemon
    thread.join()


def test_figures_are_written_each_minute_while_programs_ask_each_second(watched: Watched) -> None:
    here, log, clock = watched
    here.note(started(0, os.getpid()))
    for _ in range(int(LOG_INTERVAL) + 1):
        sample(here)
        take(here)
        clock.now += 1
    assert len(log.figures) == 2


def test_what_a_read_fails_with_is_raised_once_also_if_a_program_had_asked(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(meter: WorkerMeter, now: float) -> None:
        raise OSError("no /proc")

    here, _, clock = watched
    here.note(started(0, os.getpid()))
    with monkeypatch.context() as patched:
        patched.setattr(WorkerMeter, "read", fail)
        assert sample(here) is None
        with pytest.raises(OSError, match="no /proc"):
            take(here)
        take(here)
    clock.now += SAMPLE_INTERVAL
    take(here)
    assert here.use is not None


def test_a_limit_that_cannot_be_read_is_read_again_with_the_next_sample(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_limit() -> int:
        raise OSError("no /proc/meminfo")

    here, _, _ = watched
    here.note(started(0, os.getpid()))
    with monkeypatch.context() as patched:
        patched.setattr(monitor, "usable_memory", no_limit)
        with pytest.raises(OSError, match="no /proc/meminfo"):
            take(here)
    take(here)
    assert here.use is not None
    assert here.use.memory_limit == 32 * GIB


def test_figures_are_written_each_minute_and_when_a_worker_fails(watched: Watched, holder: int) -> None:
    here, log, clock = watched
    here.note(started(0, holder))
    here.note(started(1, os.getpid()))
    take(here)
    assert [one.rank for one in log.figures] == [0, 1]
    assert log.figures[0].processes == 2
    assert log.figures[0].memory > 192 * MIB
    assert log.figures[0].limit == 32 * GIB
    for _ in range(int(LOG_INTERVAL / SAMPLE_INTERVAL)):
        assert len(log.figures) == 2
        clock.now += SAMPLE_INTERVAL
        take(here)
    assert len(log.figures) == 4
    assert log.figures[2].processors is not None
    here.note(exited(0, holder, -9, peak=30 * GIB))
    ended, other = log.figures[4:]
    assert (ended.rank, ended.ended, ended.peak, ended.pid) == (0, True, 30 * GIB, holder)
    assert ended.memory == log.figures[2].memory
    assert (other.rank, other.ended, other.peak) == (1, False, 0)
    here.note(exited(1, os.getpid(), -15, stopped_with="SIGTERM"))
    assert len(log.figures) == 6, "it was stopped, and has not failed"
    assert here.use is None


def test_a_worker_that_fails_before_the_first_sample_has_its_peak(watched: Watched) -> None:
    here, log, _ = watched
    here.note(started(0, 11))
    here.note(exited(0, 11, 1, peak=GIB))
    (ended,) = log.figures
    assert (ended.memory, ended.peak, ended.limit) == (0, GIB, 32 * GIB)


def test_a_worker_that_is_kept_has_its_new_rank(watched: Watched) -> None:
    here, _, clock = watched
    here.note(started(3, os.getpid()))
    take(here)
    here.note(WorkerKept(round=2, rank=1, local_rank=0, pid=os.getpid()))
    clock.now += SAMPLE_INTERVAL
    take(here)
    assert here.use is not None
    assert [task.name for task in here.use.tasks] == ["rank 1"]


def test_programs_that_ask_at_once_get_one_sample(watched: Watched) -> None:
    here, _, clock = watched
    here.note(started(0, os.getpid()))
    first = sample(here)
    assert sample(here) == first, "in no time the kernel counts no ticks"
    clock.now += 1
    again = sample(here)
    assert again is not None
    assert again.processors is not None


def test_a_failure_of_the_monitor_ends_nothing(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc() -> int:
        raise OSError("no /proc")

    here, log, _ = watched
    monkeypatch.setattr(monitor, "usable_memory", no_proc)
    stream = EventStream(log)
    stream.listen(here.note)
    stream.emit(started(0, 11))
    stream.emit(exited(0, 11, 1))
    assert [type(event) for event in log.events] == [WorkerStarted, WorkerExited]


def test_devices_are_closed_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[DeviceReader] = []

    def open_devices() -> DeviceReader:
        readers.append(DeviceReader(StandInNvml(os.getpid())))
        return readers[-1]

    monkeypatch.setattr(monitor, "READ_TIMEOUT", 600.0)
    log, clock = Log(), Clock()
    here = ResourceMonitor(log.emit, open_devices, clock)
    for _ in range(2):
        here.note(started(0, os.getpid()))
        take(here)
        while not readers[-1].latest:
            pass
        clock.now += SAMPLE_INTERVAL
        take(here)
        assert here.use is not None
        assert [one.index for one in here.use.tasks[0].devices] == [0]
        here.note(exited(0, os.getpid(), 0))
        readers[-1]._thread.join()
    assert len(readers) == 2


def use(number: int, **changes: Any) -> NodeUse:
    tasks = tuple(TaskUse(f"rank {rank}", (rank + 1) * GIB, 0.98, 9, **changes) for rank in range(number))
    return NodeUse(sum(task.memory for task in tasks), 32 * GIB, 0.98 * number, tasks)


def status(*uses: NodeUse | None) -> JobStatus:
    nodes = tuple(
        NodeStatus(
            node=number, host=f"n{number}", node_id=str(number), state=NodeCondition.TRAINING, seconds=3.0,
            workers=2, first_rank=2 * number, use=one,
        )
        for number, one in enumerate(uses)
    )  # fmt: skip
    return JobStatus(
        job="j", state=JobState.TRAINING, seconds=3.0, age=4.0, epoch=1, round=1, min_nodes=1, max_nodes=1,
        round_nodes=len(uses), node_counts={"training": len(uses)}, nodes=nodes,
    )  # fmt: skip


def test_a_status_shows_what_nodes_and_workers_use() -> None:
    device = DeviceUse(3, 0.4, 30 * GIB, 0.99, 50 * GIB, 80 * GIB, 61, 412.3)
    in_container = msgspec.structs.replace(device, share=None, memory=None)
    screens = {
        "two nodes, and nothing is known of the second": render_status(status(use(2), None)),
        "a worker with a GPU": render_status(status(use(1, devices=(device,)))),
        "its share is not known in a container": render_status(status(use(1, devices=(in_container,)))),
        "the table of a large job is that of its nodes": render_status(status(use(20), use(20))),
        "nothing is known": render_status(status(None)),
    }
    assert_screens(Path(__file__).with_name("resources.txt"), screens)
    assert [title for title, text in screens.items() if "\nWORKER" not in text] == list(screens)[3:]


def test_metrics_have_each_worker_and_each_device_once() -> None:
    device = DeviceUse(3, 0.4, 30 * GIB, 0.99, 50 * GIB, 80 * GIB, 61, 412.3)
    text = render_metrics([JobFigures(status(use(2, devices=(device,))), {})], 0.0)
    found = {
        (sample.name, sample.labels.get("worker"), sample.labels.get("device")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["dlrover_worker_processors", "rank 1", None] == 0.98
    assert found["dlrover_worker_memory_bytes", "rank 1", None] == 2 * GIB
    assert found["dlrover_worker_device_use_ratio", "rank 0", "3"] == 0.4
    assert found["dlrover_worker_device_memory_bytes", "rank 0", "3"] == 30 * GIB
    assert found["dlrover_device_use_ratio", None, "3"] == 0.99
    assert found["dlrover_device_temperature_celsius", None, "3"] == 61
    assert found["dlrover_device_power_watts", None, "3"] == 412.3
    assert found["dlrover_node_memory_limit_bytes", None, None] == 32 * GIB
    assert text.count("dlrover_device_power_watts{") == 1


def test_what_is_sent_is_bounded_and_changes_only_with_its_digits() -> None:
    device = DeviceUse(0, 0.4, 30 * GIB + 12345, 0.99, 50 * GIB, 80 * GIB, 61, 412.345)
    noisy = use(1, devices=(device,))
    assert rounded(noisy) == rounded(msgspec.structs.replace(noisy, memory=noisy.memory + 1000, processors=0.9812))
    assert rounded(noisy).tasks[0].processors == 0.98
    most = use(MAX_TASKS, devices=(device,) * 8)
    sent = msgspec.json.encode(NodeActivity((), use=rounded(most)))
    assert msgspec.json.decode(sent, type=NodeActivity).use == rounded(most)
    assert len(sent) < 128 * 1024
    typical = msgspec.json.encode(rounded(use(8, devices=(device,))))
    assert len(typical) < 2048
    for bad in ({"memory": -1, "memory_limit": 0}, {"memory": 0, "memory_limit": 0, "tasks": [{"name": "x"}] * 65}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({"tasks": [], "use": bad}), type=NodeActivity)


def test_a_log_may_have_figures_of_a_device_that_are_not_known_and_a_report_may_not() -> None:
    device = DeviceUse(3, 0.4, 30 * GIB, 0.99, 50 * GIB, 80 * GIB, 61, 412.3)
    event = WorkerResources(round=1, rank=0, local_rank=0, pid=7, devices=(device,))
    line = msgspec.json.encode(event).replace(b'"power":', b'"fan":30,"power":')
    read = msgspec.json.decode(line, type=WorkerResources).devices[0]
    assert msgspec.structs.asdict(read) == msgspec.structs.asdict(device)
    with pytest.raises(msgspec.ValidationError, match="fan"):
        msgspec.json.decode(line, type=TaskUseLine)


class TaskUseLine(msgspec.Struct):
    """The devices of a line, as a report has them."""

    devices: tuple[DeviceUse, ...]


def test_use_alone_is_reported_at_the_rate_of_steps() -> None:
    report = ActivityReport(refresh=5.0)
    take: Callable[[float, NodeUse], bool] = lambda now, one: report.take({}, {}, now, use=one)  # noqa: E731
    assert take(0.0, use(1))
    assert not take(2.0, use(2))
    assert take(5.0, use(2))
    assert not take(10.0, use(2)), "nothing has changed"


def test_a_large_job_shows_sums_for_the_nodes_after_the_first_ones() -> None:
    from dlrover_run.job_status.status import MAX_TASKS_USED, _with_tasks_used

    nodes = status(*[use(8)] * 300).nodes
    shown = _with_tasks_used(nodes)
    with_tasks = [node for node in shown if node.use is not None and node.use.tasks]
    assert len(with_tasks) == MAX_TASKS_USED // 8
    assert all(node.use is not None and node.use.memory == 36 * GIB for node in shown)
