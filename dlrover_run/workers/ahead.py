"""A process that was forked ahead of a round, as the agent sees it: it prepares itself, waits, and becomes a worker.

`template/ahead.py` is what runs in it. It is a child of the agent, and ends with it, or when its socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dlrover_run.background import TimeLimit
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.processes import event_loop, tree
from dlrover_run.processes.unix_sockets import messages
from dlrover_run.workers.template_client import MAX_ANSWER, TemplateError, send_request

PREPARE_TIMEOUT = 300.0
"""Seconds for its imports and its device, as for those of a template."""

TAKE_TIMEOUT = 5.0
"""Seconds for its answer to the command that makes it a worker, which takes a millisecond. It waits for nothing else:
more means, also on a busy machine, that it was stopped or is stuck. Its worker is forked in its place."""

END_TIMEOUT = 5.0
"""Seconds for its end after SIGKILL. One that the driver of a device holds for longer delays no start of a worker."""


class WorkerAhead:
    """Such a process. `closed` is done when it has ended before it became a worker; from then on it is watched by the
    owner of the worker. `on_end` is called when it has ended by itself before."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.on_end: Callable[[str], None] = lambda how: None
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._is_worker = self._is_closed = False
        self._answer: asyncio.Future[bytes] | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(line.fileno(), self._readable)
        event_loop.watch_child(pid, self._ended)

    async def prepare(self) -> dict[str, Any]:
        """Let it begin, and return what it has prepared. Raises TemplateError, whose text follows its name, if it
        cannot be a worker; it has ended then."""
        try:
            answer: dict[str, Any] = json.loads(await self._ask(lambda: self._line.send(b"g"), PREPARE_TIMEOUT))
            if "unfit" in answer:
                raise TemplateError(f"cannot be used: {answer['unfit']}")
        except BaseException:
            await self.close()
            raise
        return answer

    async def become(self, request: Mapping[str, Any], streams: Sequence[int], until: Awaitable[Any] | None) -> bool:
        """Have it become the worker of this request (`template_client.fork_request`), which begins when `until` is
        done. Returns False if it cannot, or does not answer; it has been killed then."""
        try:
            await self._ask(lambda: send_request(self._line, request, streams), TAKE_TIMEOUT)
            if until is not None:
                await until
            if not self.closed.done():
                self._line.send(b"g")
                self._is_worker = True
        except (TemplateError, OSError):
            pass
        finally:
            await self.close()
        return self._is_worker

    async def close(self) -> None:
        """End it, unless it is a worker, and return when it has ended."""
        self._is_closed = True
        self._close_line()
        if not self._is_worker:
            if not self.closed.done():
                tree.send_signal(self.pid, signal.SIGKILL)
            await asyncio.wait([self.closed], timeout=END_TIMEOUT)

    async def _ask(self, send: Callable[[], object], timeout: float) -> bytes:
        if self.closed.done() or self._is_closed:
            raise TemplateError("has ended")
        self._answer = self._loop.create_future()
        try:
            async with TimeLimit(timeout):
                send()
                return await self._answer
        except TimeoutError:
            raise TemplateError(f"did not answer within {timeout:g} seconds") from None
        except OSError:
            raise TemplateError("has ended") from None
        finally:
            self._answer = None

    def _readable(self) -> None:
        for packet in messages(self._line, MAX_ANSWER):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(packet)

    def _ended(self) -> None:
        if self._is_worker:
            return
        try:
            how = describe_exit_code(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        except ChildProcessError:
            how = "ended"
        self._close_line()
        self.closed.set_result(None)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TemplateError(how))
        elif not self._is_closed:
            self.on_end(how)

    def _close_line(self) -> None:
        if self._line.fileno() >= 0:
            self._loop.remove_reader(self._line.fileno())
            with contextlib.suppress(OSError):
                self._line.close()
