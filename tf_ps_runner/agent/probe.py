"""Asks each server of this node whether it still answers, without TensorFlow: an empty `GetStatus` of its gRPC service.

To be imported only where there are servers, for it loads gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from dlrover_run.policies.parameter_servers.model import TaskKey
from dlrover_run.process_tree import signals
from dlrover_run.rendezvous.failure_detector import StallMonitor
from dlrover_run.transport import grpc_setup
from tf_ps_runner.agent.vigil import ANSWER_TIMEOUT, Verdict, Vigil

METHOD = "/tensorflow.WorkerService/GetStatus"
"""Its request may be empty, and 81 bytes come back; the same in TensorFlow 2.15 and 2.21."""

_OPTIONS: grpc_setup.Options = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Each question has to find out for itself.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", int(1000 * ANSWER_TIMEOUT)),
]


class Probe:
    """Watches servers of this node. `on_verdict` is called when one is READY, and when one is SILENT.

    To be used in the thread of a running loop. `watch` loads gRPC when it is called first, which takes a moment.
    """

    def __init__(self, on_verdict: Callable[[TaskKey, Verdict], None]) -> None:
        self._on_verdict = on_verdict
        self._grpc: Any = None
        self._watches: dict[TaskKey, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._punctuality = StallMonitor(time.monotonic())
        self._late = 0.0
        self._beating: asyncio.TimerHandle | None = None

    def watch(self, server: TaskKey, port: int, address: str = "127.0.0.1") -> None:
        """Ask the server there from now on. One that is watched already goes on being so."""
        if server in self._watches:
            return
        if self._grpc is None:
            self._grpc = grpc_setup.load_grpc()
        if self._beating is None:
            self._punctuality = StallMonitor(time.monotonic())
            self._beat()
        self._watches[server] = self._loop.create_task(self._watch(server, address, port))

    def forget(self, server: TaskKey) -> None:
        """Ask it no more; harmless when nobody does."""
        watching = self._watches.pop(server, None)
        if watching is not None:
            watching.cancel()
        if not self._watches and self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def close(self) -> None:
        """Ask nobody any more, and return when all connections are closed."""
        watches = list(self._watches.values())
        for server in list(self._watches):
            self.forget(server)
        if watches:
            await asyncio.wait(watches)

    def _beat(self) -> None:
        self._note_lateness()
        self._beating = self._loop.call_at(self._punctuality.next_beat, self._beat)

    def _note_lateness(self) -> None:
        self._late += self._punctuality.late(time.monotonic())

    async def _watch(self, server: TaskKey, address: str, port: int) -> None:
        vigil = Vigil()
        while not await _listens(address, port):
            vigil.fail()
            await asyncio.sleep(vigil.pause(0.0))
        kind = "ipv6" if ":" in address else "ipv4"
        target = f"{kind}:[{address}]:{port}" if ":" in address else f"{kind}:{address}:{port}"
        # gRPC's threads begin here, and no signal may go to one of them.
        with signals.blocked_in_new_threads():
            channel = self._grpc.aio.insecure_channel(target, options=_OPTIONS)
        try:
            call = channel.unary_unary(METHOD)
            while vigil.verdict is not Verdict.SILENT:
                before, begun, late = vigil.verdict, time.monotonic(), self._late
                error = await self._ask(call)
                self._note_lateness()
                took = time.monotonic() - begun
                if error is None:
                    vigil.answer()
                elif error is self._grpc.StatusCode.DEADLINE_EXCEEDED:
                    vigil.miss(took, self._late - late)
                else:
                    vigil.fail()
                if vigil.verdict is not before:
                    self._on_verdict(server, vigil.verdict)
                await asyncio.sleep(vigil.pause(took))
        finally:
            await channel.close()

    async def _ask(self, call: Any) -> Any:
        """Ask once; None for an answer, else gRPC's word for why there is none."""
        try:
            with signals.blocked_in_new_threads():
                asked = call(b"", timeout=ANSWER_TIMEOUT)
            await asked
        except self._grpc.RpcError as error:
            return error.code()
        except self._grpc.aio.BaseError:
            return self._grpc.StatusCode.UNKNOWN
        return None


async def _listens(address: str, port: int) -> bool:
    """Whether somebody listens there, on this machine: it says so at once, and costs less than gRPC's own attempts."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError, asyncio.TimeoutError), socket.socket(family, socket.SOCK_STREAM) as knock:
        knock.setblocking(False)
        # Where many connections wait to be accepted it would be tried for two minutes.
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(knock, (address, port)), ANSWER_TIMEOUT)
        return True
    return False
