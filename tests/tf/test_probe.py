"""Whether a server answers: a fake one that is stopped, killed or of another kind, and one of TensorFlow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from interpreters import newest_tensorflow_first
from loops import in_loop

from dlrover_run.processes.ports import HeldPort
from tf_ps_runner.agent import liveness
from tf_ps_runner.agent.liveness import (
    FIRST_RETRY_PAUSE,
    MAX_MISSES,
    MAX_RETRY_PAUSE,
    PROBE_TIMEOUT,
    LivenessProbe,
    ProbeState,
    ServerMonitor,
)
from tf_ps_runner.cluster.model import Role, TaskKey

SERVER = TaskKey(Role.PS, 0)
PRETEND = Path(__file__).with_name("pretend_server.py")
TIMEOUT = 60.0

TF_SERVER = """
import sys
import tensorflow as tf
server = tf.distribute.Server({"ps": ["localhost:0"]}, job_name="ps", task_index=0)
print(server.target.rpartition(":")[2], flush=True)
sys.stdin.read()
"""


def answered() -> LivenessProbe:
    """A server that has answered."""
    server = LivenessProbe()
    assert server.state is ProbeState.STARTING
    server.record_answer()
    return server


def test_a_server_is_ready_with_its_first_answer_and_unresponsive_after_three_misses_in_a_row() -> None:
    server = answered()
    assert server.state is ProbeState.READY
    for _ in range(2):
        for _ in range(MAX_MISSES - 1):
            server.record_timeout(PROBE_TIMEOUT, 0.0)
        assert server.state is ProbeState.READY
        server.record_answer()
    server.record_timeout(1000.0, 0.0)
    assert server.state is ProbeState.READY, "one miss, however long it was"
    server.record_answer()
    for _ in range(MAX_MISSES):
        assert server.state is ProbeState.READY
        server.record_timeout(PROBE_TIMEOUT, 0.0)
    assert server.state is ProbeState.UNRESPONSIVE
    server.record_answer()
    assert server.state is ProbeState.UNRESPONSIVE, "that is final"


@pytest.mark.parametrize(
    ("miss", "times", "state"),
    [
        pytest.param(LivenessProbe.record_failure, MAX_MISSES - 1, ProbeState.READY, id="not reached twice"),
        pytest.param(LivenessProbe.record_failure, MAX_MISSES, ProbeState.UNRESPONSIVE, id="not reached"),
        # Time in which this process was stalled does not count, but a machine that is always busy detects the loss too.
        pytest.param(lambda s: s.record_timeout(3600.0, 3600.0), 100, ProbeState.READY, id="stalled"),
        pytest.param(
            lambda s: s.record_timeout(PROBE_TIMEOUT, PROBE_TIMEOUT / 2), 2 * MAX_MISSES, ProbeState.UNRESPONSIVE,
            id="busy",
        ),
    ],
)  # fmt: skip
def test_what_counts_as_a_miss(miss: Callable[[LivenessProbe], None], times: int, state: ProbeState) -> None:
    server = answered()
    for _ in range(times):
        miss(server)
    assert server.state is state


def test_a_server_that_has_not_answered_yet_is_probed_less_and_less_often() -> None:
    server = LivenessProbe()
    pauses = []
    for attempt in range(1000):
        pauses.append(server.pause(0.0))
        if attempt % 2:
            server.record_failure()
        else:
            server.record_timeout(PROBE_TIMEOUT, 0.0)
    assert server.state is ProbeState.STARTING
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_RETRY_PAUSE, MAX_RETRY_PAUSE)


def test_the_next_probe_comes_a_fixed_time_after_the_last_one_and_at_once_after_a_late_answer() -> None:
    server = answered()
    assert server.pause(0.5) == liveness.PROBE_INTERVAL - 0.5
    assert server.pause(100.0) == 0.0


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """States after three seconds instead of ten. The tests above cover how they are derived."""
    monkeypatch.setattr(liveness, "PROBE_TIMEOUT", 1.5)
    monkeypatch.setattr(liveness, "PROBE_INTERVAL", 0.1)
    monkeypatch.setattr(liveness, "UNRESPONSIVE_AFTER", 3.0)
    return monkeypatch


@contextlib.contextmanager
def pretended(how: str = "answer") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A fake server, and its port."""
    with started([sys.executable, str(PRETEND), how]) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


@contextlib.contextmanager
def started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Watcher:
    """A monitor whose states can be waited for."""

    def __init__(self) -> None:
        self.states: list[ProbeState] = []
        self.errors: list[Exception] = []
        self._more = asyncio.Event()
        self.monitor = ServerMonitor(self._on_state, self.errors.append)

    def _on_state(self, server: TaskKey, state: ProbeState) -> None:
        assert server == SERVER
        self.states.append(state)
        self._more.set()

    async def until(self, *states: ProbeState) -> None:
        """Wait for exactly these states."""
        while len(self.states) < len(states):
            await asyncio.wait_for(self._more.wait(), TIMEOUT)
            self._more.clear()
        assert self.states == list(states)


@contextlib.asynccontextmanager
async def watching(port: int, errors: Sequence[str] = ()) -> AsyncIterator[Watcher]:
    """Watches the server at a port, with these internal errors."""
    watcher = Watcher()
    watcher.monitor.watch(SERVER, port)
    try:
        yield watcher
    finally:
        await watcher.monitor.close()
    assert [repr(error) for error in watcher.errors] == list(errors)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@in_loop
async def test_a_server_that_is_stopped_or_exits_undetected_is_unresponsive(number: signal.Signals) -> None:
    """The port of a stopped server still accepts connections."""
    with pretended() as (server, port):
        async with watching(port) as watcher:
            await watcher.until(ProbeState.READY)
            server.send_signal(number)
            await watcher.until(ProbeState.READY, ProbeState.UNRESPONSIVE)


@in_loop
async def test_an_error_of_a_probe_is_reported_once_and_the_server_is_probed_again(
    hurried: pytest.MonkeyPatch,
) -> None:
    """Also one of what is called with a state: no state is lost."""
    ask, failures = ServerMonitor._ask, ["ask", "ask", "tell"]

    async def broken(self: ServerMonitor, call: object) -> object:
        if failures[:1] == ["ask"]:
            raise ZeroDivisionError(failures.pop(0))
        return await ask(self, call)

    def on_state(self: Watcher, server: TaskKey, state: ProbeState) -> None:
        if failures:
            raise ZeroDivisionError(failures.pop(0))
        told(self, server, state)

    told = Watcher._on_state
    hurried.setattr(ServerMonitor, "_ask", broken)
    hurried.setattr(Watcher, "_on_state", on_state)
    with pretended() as (server, port):
        async with watching(port, ["ZeroDivisionError('ask')"]) as watcher:
            await watcher.until(ProbeState.READY)
            assert not failures
            failures.append("tell")
            server.kill()
            await watcher.until(ProbeState.READY, ProbeState.UNRESPONSIVE)


@in_loop
async def test_a_port_that_is_only_held_is_probed_until_a_server_listens_on_it(hurried: pytest.MonkeyPatch) -> None:
    held = HeldPort()
    tried = asyncio.Event()
    looked = liveness._listens

    async def listens(address: str, port: int) -> bool:
        try:
            return await looked(address, port)
        finally:
            tried.set()

    hurried.setattr(liveness, "_listens", listens)
    async with watching(held.number) as watcher:
        await asyncio.wait_for(tried.wait(), TIMEOUT)
        assert watcher.states == []
        # Held until the server has it: no other process gets the port in between.
        code = PRETEND.read_text().replace("127.0.0.1:0", f"127.0.0.1:{held.number}")
        with started([sys.executable, "-c", code, "answer"]):
            await watcher.until(ProbeState.READY)
    held.release()


@in_loop
async def test_a_server_of_another_kind_never_counts_as_ready(hurried: pytest.MonkeyPatch) -> None:
    misses = asyncio.Semaphore(0)

    class Counted(LivenessProbe):
        def record_failure(self) -> None:
            super().record_failure()
            misses.release()

    hurried.setattr(liveness, "LivenessProbe", Counted)
    with pretended("refuse") as (_, port):
        async with watching(port) as watcher:
            for _ in range(MAX_MISSES + 1):
                await asyncio.wait_for(misses.acquire(), TIMEOUT)
    assert watcher.states == []


@in_loop
async def test_a_stall_of_this_process_does_not_count_against_a_server(hurried: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP: nothing of this process runs during each probe, and no answer is read."""
    asked = 0
    done = asyncio.Event()

    async def ask(self: ServerMonitor, call: object) -> object:
        nonlocal asked
        asked += 1
        if asked == 1:
            return None
        time.sleep(0.8)
        if asked > MAX_MISSES + 1:
            done.set()
        return self._grpc.StatusCode.DEADLINE_EXCEEDED

    hurried.setattr(ServerMonitor, "_ask", ask)
    with pretended() as (_, port):
        async with watching(port) as watcher:
            await asyncio.wait_for(done.wait(), TIMEOUT)
    assert watcher.states == [ProbeState.READY]


@pytest.mark.usefixtures("hurried")
@in_loop
async def test_no_thread_of_grpc_receives_the_signals_of_the_agent() -> None:
    before = set(os.listdir("/proc/self/task"))
    with pretended() as (_, port):
        async with watching(port) as watcher:
            await watcher.until(ProbeState.READY)
            for thread in set(os.listdir("/proc/self/task")) - before:
                with contextlib.suppress(OSError):
                    status = Path(f"/proc/self/task/{thread}/status").read_text()
                    (blocked,) = re.findall(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
                    assert int(blocked, 16) & 1 << signal.SIGTERM - 1, f"{status.split()[1]} takes SIGTERM"


@in_loop
async def test_a_server_that_is_removed_is_no_longer_probed() -> None:
    with pretended() as (_, port):
        async with watching(port) as watcher:
            watcher.monitor.forget(SERVER)
            watcher.monitor.forget(SERVER)
    assert watcher.states == []


@pytest.mark.tensorflow
@pytest.mark.usefixtures("hurried")
@newest_tensorflow_first
@in_loop
async def test_a_server_of_tensorflow_is_ready_and_unresponsive_when_stopped(tensorflow: Path) -> None:
    with started([str(tensorflow), "-c", TF_SERVER]) as server:
        assert server.stdout is not None
        async with watching(int(server.stdout.readline())) as watcher:
            await watcher.until(ProbeState.READY)
            server.send_signal(signal.SIGSTOP)
            await watcher.until(ProbeState.READY, ProbeState.UNRESPONSIVE)
