"""Whether a server answers: a pretended one that is stopped, killed or of another kind, and TensorFlow's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import python_215, python_221

from dlrover_run.policies.parameter_servers.model import Role, TaskKey
from dlrover_run.supervisor.ports import HeldPort
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

SERVER = TaskKey(Role.PS, 0)
PRETEND = Path(__file__).with_name("pretend_server.py")
PATIENCE = 60.0

TF_SERVER = """
import sys
import tensorflow as tf
server = tf.distribute.Server({"ps": [f"localhost:{sys.argv[1]}"]}, job_name="ps", task_index=0)
sys.stdin.read()
"""


def test_a_server_is_ready_with_its_first_answer_and_silent_after_three_misses_in_a_row() -> None:
    server = LivenessProbe()
    assert server.state is ProbeState.STARTING
    server.record_answer()
    assert server.state is ProbeState.READY
    for _ in range(MAX_MISSES - 1):
        server.record_timeout(PROBE_TIMEOUT, 0.0)
    server.record_answer()
    for _ in range(MAX_MISSES - 1):
        server.record_timeout(PROBE_TIMEOUT, 0.0)
    assert server.state is ProbeState.READY
    server.record_timeout(PROBE_TIMEOUT, 0.0)
    assert server.state is ProbeState.UNRESPONSIVE
    server.record_answer()
    assert server.state is ProbeState.UNRESPONSIVE


def test_a_server_that_cannot_be_reached_is_silent_after_as_many_failures() -> None:
    server = LivenessProbe()
    server.record_answer()
    for _ in range(MAX_MISSES):
        assert server.state is ProbeState.READY
        server.record_failure()
    assert server.state is ProbeState.UNRESPONSIVE


def test_a_server_that_has_not_answered_yet_is_never_silent_and_is_tried_ever_more_rarely() -> None:
    server = LivenessProbe()
    pauses = []
    for attempt in range(1000):
        pauses.append(server.pause(0.0))
        if attempt % 2:
            server.record_failure()
        else:
            server.record_timeout(PROBE_TIMEOUT, 0.0)
    assert server.state is ProbeState.STARTING
    assert pauses[0] == FIRST_RETRY_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_RETRY_PAUSE


def test_time_in_which_we_were_late_ourselves_is_not_charged() -> None:
    server = LivenessProbe()
    server.record_answer()
    for _ in range(100):
        server.record_timeout(3600.0, 3600.0)
    assert server.state is ProbeState.READY


def test_a_server_that_is_silent_is_found_out_on_a_machine_that_is_always_busy_too() -> None:
    server = LivenessProbe()
    server.record_answer()
    for _ in range(2 * MAX_MISSES):
        server.record_timeout(PROBE_TIMEOUT, PROBE_TIMEOUT / 2)
    assert server.state is ProbeState.UNRESPONSIVE


def test_the_next_question_comes_a_fixed_time_after_the_last_one_and_at_once_after_a_late_answer() -> None:
    server = LivenessProbe()
    server.record_answer()
    assert server.pause(0.5) == liveness.PROBE_INTERVAL - 0.5
    assert server.pause(100.0) == 0.0


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts in three seconds instead of ten. What they follow from is tested above."""
    monkeypatch.setattr(liveness, "PROBE_TIMEOUT", 1.5)
    monkeypatch.setattr(liveness, "PROBE_INTERVAL", 0.1)
    monkeypatch.setattr(liveness, "UNRESPONSIVE_AFTER", 3.0)


@contextlib.contextmanager
def pretended(how: str = "answer") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A pretended server, and its port."""
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
    """A probe whose verdicts can be waited for."""

    def __init__(self) -> None:
        self.verdicts: list[ProbeState] = []
        self._more = asyncio.Event()
        self.probe = ServerMonitor(self._hear)

    def _hear(self, server: TaskKey, state: ProbeState) -> None:
        assert server == SERVER
        self.verdicts.append(state)
        self._more.set()

    async def until(self, *verdicts: ProbeState) -> None:
        """Wait for exactly these."""
        while len(self.verdicts) < len(verdicts):
            await asyncio.wait_for(self._more.wait(), PATIENCE)
            self._more.clear()
        assert self.verdicts == list(verdicts)


def test_a_server_that_is_stopped_is_silent_though_its_port_accepts_connections(hurried: None) -> None:
    async def watch() -> None:
        watcher = Watcher()
        with pretended() as (server, port):
            watcher.probe.watch(SERVER, port)
            await watcher.until(ProbeState.READY)
            server.send_signal(signal.SIGSTOP)
            await watcher.until(ProbeState.READY, ProbeState.UNRESPONSIVE)
            server.send_signal(signal.SIGCONT)
            await watcher.probe.close()

    asyncio.run(watch())


def test_a_server_that_ends_unnoticed_is_silent_too(hurried: None) -> None:
    async def watch() -> None:
        watcher = Watcher()
        with pretended() as (server, port):
            watcher.probe.watch(SERVER, port)
            await watcher.until(ProbeState.READY)
            server.kill()
            await watcher.until(ProbeState.READY, ProbeState.UNRESPONSIVE)
            await watcher.probe.close()

    asyncio.run(watch())


def test_a_port_that_is_only_held_is_asked_until_a_server_comes_to_it(hurried: None) -> None:
    async def watch() -> None:
        watcher = Watcher()
        held = HeldPort()
        tried = asyncio.Event()
        looked = liveness._listens

        async def listens(address: str, port: int) -> bool:
            try:
                return await looked(address, port)
            finally:
                tried.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(liveness, "_listens", listens)
            watcher.probe.watch(SERVER, held.number)
            await asyncio.wait_for(tried.wait(), PATIENCE)
            assert watcher.verdicts == []
            held.release()
            code = PRETEND.read_text().replace("127.0.0.1:0", f"127.0.0.1:{held.number}")
            with started([sys.executable, "-c", code, "answer"]):
                await watcher.until(ProbeState.READY)
                await watcher.probe.close()

    asyncio.run(watch())


def test_a_server_of_another_kind_never_counts_as_ready(hurried: None) -> None:
    async def watch() -> None:
        watcher = Watcher()
        misses = 0
        more = asyncio.Event()

        class Counted(LivenessProbe):
            def record_failure(self) -> None:
                nonlocal misses
                super().record_failure()
                misses += 1
                if misses > MAX_MISSES:
                    more.set()

        with pretended("refuse") as (_, port), pytest.MonkeyPatch.context() as patch:
            patch.setattr(liveness, "LivenessProbe", Counted)
            watcher.probe.watch(SERVER, port)
            await asyncio.wait_for(more.wait(), PATIENCE)
            await watcher.probe.close()
        assert watcher.verdicts == []

    asyncio.run(watch())


def test_our_own_stop_is_not_laid_to_the_charge_of_a_server(hurried: None) -> None:
    """As under SIGSTOP: nothing of this process runs while each question is under way, and no answer is taken."""

    async def watch() -> None:
        watcher = Watcher()
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

        with pretended() as (_, port), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServerMonitor, "_ask", ask)
            watcher.probe.watch(SERVER, port)
            await asyncio.wait_for(done.wait(), PATIENCE)
            await watcher.probe.close()
        assert watcher.verdicts == [ProbeState.READY]

    asyncio.run(watch())


def test_no_thread_of_grpc_takes_the_signals_of_the_agent(hurried: None) -> None:
    async def watch() -> None:
        watcher = Watcher()
        with pretended() as (_, port):
            watcher.probe.watch(SERVER, port)
            await watcher.until(ProbeState.READY)
            main = threading.main_thread().native_id
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):
                    status = Path(f"/proc/self/task/{thread}/status").read_text()
                    name = status.split()[1]
                    blocked = int(
                        next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16
                    )
                    if int(thread) != main and thread not in before:
                        assert blocked & 1 << signal.SIGTERM - 1, f"{name} takes SIGTERM"
            await watcher.probe.close()

    before = set(os.listdir("/proc/self/task"))
    asyncio.run(watch())


def test_a_server_that_is_forgotten_is_not_asked_any_more() -> None:
    async def watch() -> None:
        watcher = Watcher()
        with pretended() as (_, port):
            watcher.probe.watch(SERVER, port)
            watcher.probe.forget(SERVER)
            watcher.probe.forget(SERVER)
            await watcher.probe.close()
        assert watcher.verdicts == []

    asyncio.run(watch())


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "find", [pytest.param(python_221, id="2.21"), pytest.param(python_215, id="2.15", marks=pytest.mark.long)]
)
def test_a_server_of_tensorflow_is_ready_and_silent_when_stopped(find: object, hurried: None) -> None:
    python = find()  # type: ignore[operator]

    async def watch() -> None:
        watcher = Watcher()
        held = HeldPort()
        with started([str(python), "-c", TF_SERVER, str(held.number)]) as server:
            # TensorFlow binds without SO_REUSEADDR's help only once we have let go.
            held.release()
            watcher.probe.watch(SERVER, held.number)
            await watcher.until(ProbeState.READY)
            server.send_signal(signal.SIGSTOP)
            await watcher.until(ProbeState.READY, ProbeState.UNRESPONSIVE)
            await watcher.probe.close()

    asyncio.run(watch())
