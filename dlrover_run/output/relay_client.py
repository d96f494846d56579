"""The agent's side of the relay: give it outputs to show, wait until they are shown, read how an output ended.

The agent holds everything that a relay works with: the reading end of each worker's pipe, the open log files, and the
rings into which the relay writes the end of each output. A relay that is killed is replaced (`relay_process`), and the
next one gets all of it again: what was not read is still there. This costs two descriptors a pipe, and one or two a log
file that is shown. If no relay can live, training continues without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Literal, NamedTuple

import msgspec

from dlrover_run.background import beside
from dlrover_run.output import ring
from dlrover_run.output.channels import MessagePipe, open_pipe, open_terminal
from dlrover_run.output.messages import OWN_MESSAGES
from dlrover_run.output.relay_process import CLOSE_TIMEOUT, RelayProcess
from dlrover_run.output.relay_start import StartedRelay, start_relay
from dlrover_run.output.shown_outputs import ShownOutputs
from dlrover_run.output.sinks import is_writable

DRAIN_TIMEOUT = 5.0
"""Seconds without a byte written after which a drain gives up, once `stop_waiting` was called."""

STUCK_TIMEOUT = 0.5
"""The same for a console that is known to take nothing; the relay's replies need a few milliseconds."""


class StepSearch(NamedTuple):
    """The lines that match `regex` are counted as steps in the progress page at `page`."""

    regex: str
    page: str


class _Request(msgspec.Struct):
    """`outputs` are the numbers of those whose `tails` it returns, by key; None until they are read. `sent`: the relay
    has got it. `moved`: the relay has reported progress."""

    done: asyncio.Future[None]
    message: dict[str, Any]
    outputs: list[int]
    tails: dict[str, str] | None = None
    sent: bool = False
    moved: bool = False

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class RelayClient:
    """Shows output through the relay: `attach` it inside the event loop, and `close` it last.

    The relay writes to `console`, the descriptors to use as standard output and standard error. `shared`: relays of
    other nodes write there too, so no write may break one of their lines. `started` is a relay for that console which
    runs already; without it, one is started. Raises OSError.
    """

    def __init__(
        self, console: tuple[int, int] = (1, 2), *, shared: bool = False, started: StartedRelay | None = None
    ) -> None:
        callbacks = (self._on_start, self._on_message, self._on_give_up)
        self._process = RelayProcess(started or start_relay(console, shared=shared), console, shared, *callbacks)
        self._console = console
        self._shared = shared
        is_null = os.fstat(console[0]).st_rdev == os.stat(os.devnull).st_rdev
        self.single_console = os.path.sameopenfile(*console) and not is_null
        """Whether both descriptors of the console lead to one place, where the order of all bytes can be seen."""
        self._requests: dict[int, _Request] = {}
        self._count = 0
        self._messages = MessagePipe()
        self._outputs = ShownOutputs()
        self._closing = False
        self._owned: list[str] = []
        self._hurried = False
        self._stuck = False
        self._on_warning: Callable[[str], None] = lambda text: None
        self._warned_of_pipes = False

    @property
    def pid(self) -> int:
        """The pid of the relay process; that of one that has ended until it is replaced."""
        return self._process.pid

    def attach(self, on_warning: Callable[[str], None]) -> None:
        """Join the running event loop; `on_warning` is called with sentences for the user."""
        self._on_warning = on_warning
        self._process.attach(on_warning)

    def _on_start(self) -> None:
        """Send a new relay everything that its predecessor had."""
        messages = {"do": "pipe", "source": OWN_MESSAGES, "out": 2, "prefix": None, "whole": self._shared}
        self._process.send(messages, self._messages.read_end)
        for path in self._owned:
            self._process.send({"do": "own", "path": path})
        for output in self._outputs:
            self._process.send(output.message, *output.fds)
        if ended := self._outputs.ended():
            self._process.send({"do": "forget", "sources": ended})
        for request in self._requests.values():
            if request.sent:
                self._process.send(request.message)

    def open_stderr(
        self,
        key: str,
        *,
        show: bool,
        prefix: str | None = None,
        whole_lines: bool = False,
        steps: StepSearch | None = None,
    ) -> int:
        """A descriptor for one worker's standard error, shown on the console if `show`; close it once it is passed on.
        With a `single_console` the worker's standard output may go there too, and keeps its place in the order.

        The output is shown unchanged; or in `whole_lines`, if other workers write to the console too; or line by line
        with a `prefix` before each. `key` names the worker in `end_round`, which returns the end of the output.

        It is a pseudo-terminal if our own standard error is a terminal, so that the worker still sees one; but not with
        a `prefix`, because a worker that moves the cursor would overwrite the lines of others.
        """
        return self._open(key, 2 if show else None, prefix, whole_lines, steps)

    def open_stdout(self, key: str, prefix: str | None, *, show: bool = True, steps: StepSearch | None = None) -> int:
        """The same for a standard output that is shown line by line and does not share the descriptor of the standard
        error. Its end is not kept."""
        return self._open(f"{key} stdout", 1 if show else None, prefix, True, steps)

    def _open(self, key: str, out: int | None, prefix: str | None, whole_lines: bool, steps: StepSearch | None) -> int:
        console = self._console[out - 1] if out else -1
        terminal = prefix is None and os.isatty(console)
        read_end, write_end = self._terminal_or_pipe(console) if terminal else open_pipe()
        # A worker that was started again under this key has a new pipe.
        self._end(self._outputs.live([key]))
        message = {"do": "pipe", "out": out, "prefix": prefix, "whole": whole_lines}
        self._add(key, {**message, "steps": steps and steps._asdict()}, read_end, ring.create_ring())
        return write_end

    def _terminal_or_pipe(self, console: int) -> tuple[int, int]:
        """A pseudo-terminal, or a pipe where the system gives none: a container without /dev/pts, or with too few."""
        try:
            return open_terminal(console)
        except OSError as error:
            if not self._warned_of_pipes:
                self._warned_of_pipes = True
                self._on_warning(
                    f"no pseudo-terminal can be opened ({error.strerror}): the workers write to a pipe, and may show "
                    "colours and progress bars as they do without a terminal"
                )
            return open_pipe()

    def add_tail(
        self,
        path: str,
        out: Literal[1, 2],
        prefix: str,
        needles: Collection[str] = (),
        filtered: str | None = None,
        start: int = 0,
    ) -> None:
        """Show a log file from byte `start` on, line by line, on descriptor `out`; lines with one of the `needles` also
        go to the file `filtered`."""
        path = os.path.abspath(path)
        message = {"do": "log", "path": path, "prefix": prefix}
        self._add_log(path, {**message, "out": out}, start)
        if needles and filtered:
            filtered = os.path.abspath(filtered)
            self._add_log(path, {**message, "needles": list(needles), "filtered": filtered}, start)

    def search_log(self, path: str, steps: StepSearch, start: int = 0) -> None:
        """Search a log file for steps from byte `start` on; it is not shown."""
        path = os.path.abspath(path)
        self._add_log(path, {"do": "log", "path": path, "steps": steps._asdict()}, start)

    def _add_log(self, path: str, message: dict[str, Any], start: int) -> None:
        try:
            # Worker and agent may open the file in either order, so each of them creates it. Without waiting: a plug-in
            # may name a named pipe. Each source has an open file of its own, and with it a position of its own.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            try:
                os.lseek(fd, start, os.SEEK_SET)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            self._on_warning(f"cannot read {path}, so it is not shown: {error.strerror}")
            return
        self._add(path, message, fd)

    def _add(self, key: str, message: dict[str, Any], fd: int, ring: int = -1) -> None:
        output = self._outputs.add(key, message, fd, ring)
        self._process.send(output.message, *output.fds)
        if self._process.gave_up and ring >= 0:
            output.discard_from_now()

    def write(self, text: str) -> None:
        """Write `text` to the console's standard error, after the output of the workers so far; never blocks while
        there is a relay."""
        data = text.encode(errors="backslashreplace")
        if not self._closing and not self._process.over:
            self._messages.write(data)
        else:
            self._write_directly(data)

    def _write_directly(self, data: bytes) -> None:
        # A console that was closed is no reason to fail.
        with contextlib.suppress(OSError):
            if not self._process.gave_up:
                os.write(self._console[1], data)
                return
            while data and is_writable(self._console[1]):
                data = data[os.write(self._console[1], data[: select.PIPE_BUF]) :]

    def remove_at_end(self, path: str) -> None:
        """Have the relay remove a directory when it ends, so that even SIGKILL leaves nothing in /tmp."""
        self._owned.append(os.path.abspath(path))
        self._process.send({"do": "own", "path": self._owned[-1]})

    async def drain(
        self, timeout: float | None = DRAIN_TIMEOUT, keys: Collection[str] = (), end: Collection[int] = ()
    ) -> dict[str, str]:
        """Have all output written that exists now, and the sources `end` forgotten. Returns as `tails` does.

        Gives up when the console takes nothing for `timeout` seconds, not when there is merely much to write. None
        waits for any time, as a program does that writes to its console itself, until `stop_waiting` is called.
        """
        async with self._request("drain", keys, end=list(end)) as request:
            while not request.done.done():
                request.moved = False
                limit = timeout
                if timeout is None and self._hurried:
                    limit = STUCK_TIMEOUT if self._stuck else DRAIN_TIMEOUT
                await asyncio.wait({request.done}, timeout=limit)
                self._stuck = not (request.moved or request.done.done())
                if self._stuck:
                    break
            return self._read_tails(request)

    async def tails(self, keys: Collection[str]) -> dict[str, str]:
        """The end of the standard error of each worker in `keys` that is known, shown or not: a console that takes
        nothing is not waited for. It ends where the relay has read if the relay does not answer."""
        async with self._request("read", keys) as request:
            await asyncio.wait({request.done}, timeout=STUCK_TIMEOUT)
            return self._read_tails(request)

    def _read_tails(self, request: _Request) -> dict[str, str]:
        """The ends of the outputs of a request, from the time when the relay had read all of them."""
        if request.tails is None:
            request.tails = self._outputs.tails(request.outputs)
        return request.tails

    async def end_round(self, keys: Collection[str] = (), timeout: float | None = DRAIN_TIMEOUT) -> dict[str, str]:
        """`drain`, then forget the round's pipes and log files; unfinished lines are completed.

        Returns the end of the standard error of each worker in `keys` that is known. If the console was too slow, the
        relay continues with the log files whenever it takes bytes again.
        """
        live = self._outputs.live()
        try:
            return await self.drain(timeout, keys, live)
        finally:
            self._note_end(live)

    def release(self, keys: Collection[str], paths: Collection[str] = ()) -> None:
        """Close the pipes and log files of workers that have ended while others go on. Their output is still shown."""
        names = {name for key in keys for name in (key, f"{key} stdout")} | {os.path.abspath(path) for path in paths}
        self._end(self._outputs.live(names))

    def _end(self, numbers: Collection[int]) -> None:
        if numbers:
            self._process.send({"do": "forget", "sources": list(numbers)})
            self._note_end(numbers)

    def _note_end(self, numbers: Collection[int]) -> None:
        if self._process.gave_up:
            for number in numbers:
                self._outputs.drop(number)
        else:
            self._outputs.mark_ended(numbers)

    def kept(self, key: str) -> list[int]:
        """The rings of the outputs with this key, the latest last, as `ShownOutputs.rings`."""
        return self._outputs.rings(key)

    def stop_waiting(self) -> None:
        """The job is to end: current drains give up now, and later ones wait at most `DRAIN_TIMEOUT`.

        A console that took nothing in the last drain gets `STUCK_TIMEOUT`, so that the timeouts do not add up.
        """
        self._hurried = True
        for request in self._requests.values():
            request.finish()

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        self._closing = True
        self._messages.close()
        await self._process.close(timeout)
        # A relay that was not killed has removed them already.
        for path in self._owned:
            shutil.rmtree(path, ignore_errors=True)
        self._outputs.close()

    @contextlib.asynccontextmanager
    async def _request(self, what: str, keys: Collection[str], **more: list[int]) -> AsyncIterator[_Request]:
        """Send a request to the relay, and take its replies until the end of this context."""
        self._count += 1
        number = self._count
        message = {"do": what, "number": number, **more}
        request = _Request(asyncio.get_running_loop().create_future(), message, self._outputs.live(keys))
        self._requests[number] = request
        try:
            if self._process.ended.done():
                self._reply_without_relay(request)
            elif what == "drain" and not self._messages.sent.is_set():
                async with beside(self._send_after_messages(request)):
                    yield request
                return
            else:
                self._send_request(request)
            yield request
        finally:
            del self._requests[number]

    async def _send_after_messages(self, request: _Request) -> None:
        await self._messages.sent.wait()
        self._send_request(request)

    def _send_request(self, request: _Request) -> None:
        request.sent = True
        self._process.send(request.message)

    def _on_message(self, message: dict[str, Any]) -> None:
        event, request = message["event"], self._requests.get(message.get("number", 0))
        if event == "progress":
            for each in self._requests.values():
                each.moved = True
        elif event == "read" and request is not None:
            self._read_tails(request)
            if request.message["do"] == "read":
                request.finish()
        elif event == "forgotten":
            for number in message["sources"]:
                self._outputs.drop(number)
        elif event == "done" and request is not None:
            request.finish()

    def _on_give_up(self) -> None:
        for number in self._outputs.ended():
            self._outputs.drop(number)
        for output in self._outputs:
            if output.ring >= 0:
                output.discard_from_now()
        self._write_directly(self._messages.take_back())
        for request in self._requests.values():
            self._reply_without_relay(request)

    def _reply_without_relay(self, request: _Request) -> None:
        self._outputs.discard(request.outputs)
        self._read_tails(request)
        request.finish()
