"""Whether each parameter server of this node answers: the agent sends it an empty `GetStatus`.

A server that hangs or is stopped gives no error to its clients, so only its agent can find out. `LivenessProbe` is
pure; `ServerMonitor` asks, without TensorFlow. gRPC is loaded when the first server is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import time
from collections.abc import Callable
from typing import Any

from dlrover_run.background import Background, TimeLimit
from dlrover_run.processes import signals
from dlrover_run.rendezvous.failure_detector import PAUSE_CHECK_INTERVAL, PauseDetector
from dlrover_run.transport import grpc_setup
from tf_ps_runner.cluster.model import TaskKey

FIRST_RETRY_PAUSE = 0.05
"""Seconds between the first two attempts to reach a server that was just started."""

MAX_RETRY_PAUSE = 0.5
"""The longest pause in seconds between two such attempts; a server may be found ready this much later."""

PROBE_INTERVAL = 2.0
"""Seconds from one probe to the next, once a server has answered."""

PROBE_TIMEOUT = 2.5
"""Seconds until a probe, which takes 3 ms, counts as missed."""

MAX_MISSES = 3
"""Misses in a row after which a server is unresponsive: one may be a moment in which the machine was overloaded."""

UNRESPONSIVE_AFTER = 6.0
"""Seconds without an answer, beside the misses, after which a server is unresponsive. Time in which this process was
stopped or starved does not count: the answer may have been there."""


class ProbeState(enum.Enum):
    """What is known of a server: it has not answered yet, READY, or alive and UNRESPONSIVE, which is final."""

    STARTING = "awaited"
    READY = "ready"
    UNRESPONSIVE = "silent"


class LivenessProbe:
    """The answers of one server. `reported` is the state that the owner of the monitor knows."""

    def __init__(self) -> None:
        self.state = self.reported = ProbeState.STARTING
        self._attempts = 0
        self._misses = 0
        self._listened = 0.0

    def record_answer(self) -> None:
        self._misses, self._listened = 0, 0.0
        if self.state is ProbeState.STARTING:
            self.state = ProbeState.READY

    def record_timeout(self, took: float, late: float) -> None:
        """It did not answer for `took` seconds, in which this process was stalled for `late` seconds."""
        # A stall is measured as up to one interval shorter than it was.
        self._note_miss(max(0.0, took - late - PAUSE_CHECK_INTERVAL) if late else took)

    def record_failure(self) -> None:
        """It could not be reached: that is certain, however stalled this process was."""
        self._note_miss(PROBE_TIMEOUT)

    def _note_miss(self, listened: float) -> None:
        if self.state is ProbeState.STARTING:
            # It is still starting, and how long that may take is not decided here.
            self._attempts += 1
            return
        self._misses += 1
        self._listened += listened
        if self._misses >= MAX_MISSES and self._listened >= UNRESPONSIVE_AFTER:
            self.state = ProbeState.UNRESPONSIVE

    def pause(self, took: float) -> float:
        """Seconds until the next probe, if the last one took that many."""
        if self.state is ProbeState.STARTING:
            return min(MAX_RETRY_PAUSE, FIRST_RETRY_PAUSE * 1.5 ** min(self._attempts, 16))
        return max(0.0, PROBE_INTERVAL - took)


LOOPBACK = "127.0.0.1"

METHOD = "/tensorflow.WorkerService/GetStatus"
"""Its request may be empty, and 81 bytes come back; the same in TensorFlow 2.15 and 2.21."""

_OPTIONS: grpc_setup.Options = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Each probe has to find out for itself.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", int(1000 * PROBE_TIMEOUT)),
]


class ServerMonitor:
    """Watches servers of this node. `on_state` is called when one is READY, and when one is UNRESPONSIVE. An internal
    error does not end the watch: `failed` is called with the first one of a server, and the server is probed again.

    To be used in the thread of a running loop. The first `watch` loads gRPC, which takes a moment.
    """

    def __init__(self, on_state: Callable[[TaskKey, ProbeState], None], failed: Callable[[Exception], None]) -> None:
        self._on_state = on_state
        self._failed = failed
        self._grpc: Any = None
        self._background = Background(failed)
        self._watches: dict[TaskKey, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._pauses = PauseDetector(time.monotonic())
        self._late = 0.0
        self._beating: asyncio.TimerHandle | None = None

    def watch(self, server: TaskKey, port: int) -> None:
        """Probe the server at that port of this machine from now on. One that is watched already stays so."""
        if server in self._watches:
            return
        if self._grpc is None:
            self._grpc = grpc_setup.load_grpc()
        if self._beating is None:
            self._pauses = PauseDetector(time.monotonic())
            self._beat()
        self._watches[server] = self._background.start(self._keep_watching(server, port))

    def forget(self, server: TaskKey) -> None:
        """Stop probing it; does nothing for a server that is not watched."""
        watching = self._watches.pop(server, None)
        if watching is not None:
            watching.cancel()
        if not self._watches and self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def close(self) -> None:
        """Stop all probes, and return when all connections are closed."""
        for server in list(self._watches):
            self.forget(server)
        await self._background.close()

    def _beat(self) -> None:
        self._note_stall()
        self._beating = self._loop.call_at(self._pauses.next_check, self._beat)

    def _note_stall(self) -> None:
        self._late += self._pauses.paused_for(time.monotonic())

    async def _keep_watching(self, server: TaskKey, port: int) -> None:
        liveness, has_failed = LivenessProbe(), False
        while True:
            try:
                return await self._watch(server, port, liveness)
            except Exception as error:
                if not has_failed:
                    self._failed(error)
                has_failed = True
            await asyncio.sleep(PROBE_INTERVAL)

    async def _watch(self, server: TaskKey, port: int, liveness: LivenessProbe) -> None:
        while liveness.state is ProbeState.STARTING and not await _listens(LOOPBACK, port):
            liveness.record_failure()
            await asyncio.sleep(liveness.pause(0.0))
        # gRPC's threads begin here, and no signal may go to one of them.
        with signals.blocked_in_new_threads():
            channel = self._grpc.aio.insecure_channel(f"ipv4:{LOOPBACK}:{port}", options=_OPTIONS)
        try:
            call = channel.unary_unary(METHOD)
            while liveness.reported is not ProbeState.UNRESPONSIVE:
                begun, late = time.monotonic(), self._late
                error = await self._ask(call)
                self._note_stall()
                took = time.monotonic() - begun
                if error is None:
                    liveness.record_answer()
                elif error is self._grpc.StatusCode.DEADLINE_EXCEEDED:
                    liveness.record_timeout(took, self._late - late)
                else:
                    liveness.record_failure()
                if liveness.state is not liveness.reported:
                    self._on_state(server, liveness.state)
                    liveness.reported = liveness.state
                await asyncio.sleep(liveness.pause(took))
        finally:
            await channel.close()

    async def _ask(self, call: Any) -> Any:
        """Send one probe; None for an answer, else gRPC's code for why there is none."""
        try:
            with signals.blocked_in_new_threads():
                asked = call(b"", timeout=PROBE_TIMEOUT)
            await asked
        except self._grpc.RpcError as error:
            return error.code()
        except self._grpc.aio.BaseError:
            return self._grpc.StatusCode.UNKNOWN
        return None


async def _listens(address: str, port: int) -> bool:
    """Whether a process listens there: the kernel answers at once, and it costs less than gRPC's attempts."""
    with contextlib.suppress(OSError, TimeoutError), socket.socket() as knock:
        knock.setblocking(False)
        # With a full accept queue the kernel would try for two minutes.
        async with TimeLimit(PROBE_TIMEOUT):
            await asyncio.get_running_loop().sock_connect(knock, (address, port))
        return True
    return False
