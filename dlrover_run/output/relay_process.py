"""The relay's process, as the agent sees it: started, sent messages, replaced when it dies.

Everything is non-blocking on the agent's event loop, without threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.output.messages import MAX_MESSAGE
from dlrover_run.output.relay_start import StartedRelay, start_relay
from dlrover_run.processes import event_loop
from dlrover_run.processes.unix_sockets import messages

CLOSE_TIMEOUT = 2.0
"""Seconds between closing the relay's socket and SIGKILL; the relay needs 0.3 at most."""

REPLACE_PAUSE = 1.0
"""Seconds before the replacement of a relay that lived no longer than that, or that could not be started."""

STEADY_SECONDS = 10.0
"""Seconds after which a relay counts as running; the count of failures starts again."""

MAX_FAILURES = 30
"""Relays in a row that died younger than that, or were not started, before the agent gives up. Until then a worker
that writes much waits, and so does the end of the job."""


class RelayProcess:
    """One relay process at a time, at first one that was `started`; `attach` it in the loop.

    `on_start` is called for the first relay and for each replacement, which has received nothing yet; `on_message` with
    each message; `on_give_up` when no relay can live.
    """

    ended: asyncio.Future[None]
    """Done once the relay has ended for good: by `close`, or because the agent gave up."""
    _on_warning: Callable[[str], None]

    def __init__(
        self,
        started: StartedRelay,
        console: tuple[int, int],
        shared: bool,
        on_start: Callable[[], None],
        on_message: Callable[[dict[str, Any]], None],
        on_give_up: Callable[[], None],
    ) -> None:
        self.closing = False
        self.gave_up = False
        """Whether no relay can live."""
        self._console = console
        self._shared = shared
        self._on_start = on_start
        self._on_message = on_message
        self._on_give_up = on_give_up
        self._running = True
        self._started_at = time.monotonic()
        self._replacing: asyncio.TimerHandle | None = None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._warned = ""
        self._failures = 0
        self.pid, self._control = started
        """The pid of the relay; that of one that has ended until it is replaced."""

    def attach(self, on_warning: Callable[[str], None]) -> None:
        """Join the running event loop; `on_warning` is called with sentences for the user."""
        self._on_warning = on_warning
        self.ended = asyncio.get_running_loop().create_future()
        self._join()

    @property
    def over(self) -> bool:
        """Whether nothing is sent any more."""
        return self.closing or self.ended.done()

    def _join(self) -> None:
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._receive)
        event_loop.watch_child(self.pid, self._on_exit)
        self._on_start()

    def send(self, message: dict[str, Any], *fds: int) -> None:
        """Send in order, now or when the socket takes it. Raises ValueError for a message beyond `MAX_MESSAGE`.

        Nothing is sent while there is no relay: `on_start` sends everything to the replacement.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes to the output relay is over the limit of {MAX_MESSAGE}")
        if self.over or not self._running:
            return
        self._outbox.append((data, [os.dup(fd) for fd in fds]))
        if len(self._outbox) == 1:
            self._flush()

    async def close(self, timeout: float) -> None:
        if self.ended.done():
            return
        self.closing = True
        if self._replacing is not None:
            self._replacing.cancel()
        if not self._running:
            self.ended.set_result(None)
            return
        self._close_control()
        await asyncio.wait({self.ended}, timeout=timeout)
        if not self.ended.done():
            os.kill(self.pid, signal.SIGKILL)
            await self.ended

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError:
                self._clear_outbox()  # The relay has ended; `_on_exit` follows.
                break
            _close_all(fds)
            self._outbox.popleft()
        loop.remove_writer(self._control.fileno())

    def _receive(self) -> None:
        for data in messages(self._control, MAX_MESSAGE):
            message = json.loads(data)
            if message["event"] == "warning":
                self._on_warning(message["text"])
            else:
                self._on_message(message)

    def _on_exit(self) -> None:
        status = 0
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
        if self._control.fileno() >= 0:
            self._receive()
        self._running = False
        self._close_control()
        self._clear_outbox()
        if self.closing:
            self.ended.set_result(None)
            return
        lived = time.monotonic() - self._started_at
        if lived >= STEADY_SECONDS:
            self._failures = 0
        sentence = f"the output relay {describe_exit_code(os.waitstatus_to_exitcode(status))}"
        if not self._give_up(sentence):
            # Without a pause a relay that cannot live, perhaps for want of memory, would be started again and again.
            self._replace_after(0.0 if lived >= REPLACE_PAUSE else REPLACE_PAUSE)
            self._on_warning(f"{sentence}; another one continues; what it had read and not shown is missing")

    def _give_up(self, sentence: str) -> bool:
        """Count a failure; whether that was one too many, so that no relay is started any more."""
        self._failures += 1
        if self._failures < MAX_FAILURES:
            return False
        self.gave_up = True
        self.ended.set_result(None)
        self._on_give_up()
        self._on_warning(f"{sentence}, as did others before: output is not shown any more; the workers go on")
        return True

    def _replace_after(self, pause: float) -> None:
        self._replacing = asyncio.get_running_loop().call_later(pause, self._replace)

    def _replace(self) -> None:
        self._replacing = None
        self._started_at = time.monotonic()
        try:
            started = start_relay(self._console, shared=self._shared, successor=True)
        except OSError as error:
            sentence = f"no output relay can be started ({error.strerror})"
            if not self._give_up(sentence):
                self._replace_after(REPLACE_PAUSE)
                if sentence != self._warned:
                    self._warned = sentence
                    self._on_warning(f"{sentence}: output is shown as soon as one can be")
            return
        (self.pid, self._control), self._running, self._warned = started, True, ""
        self._join()

    def _close_control(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            asyncio.get_running_loop().remove_writer(self._control.fileno())
            self._control.close()

    def _clear_outbox(self) -> None:
        for _, fds in self._outbox:
            _close_all(fds)
        self._outbox.clear()


def _close_all(fds: Collection[int]) -> None:
    for fd in fds:
        os.close(fd)
