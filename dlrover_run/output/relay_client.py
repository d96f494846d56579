"""The agent's side of the relay: give it outputs to show, wait until they are shown, read how an output ended.

The agent holds everything that a relay works with: the reading end of each worker's pipe, so that no worker dies of
SIGPIPE when the relay is killed; the memory files into which the pipes are emptied; and the cursors, which record how
far each one has been shown. A relay that is killed is replaced (`relay_process`), and the next one continues at the
same position. This costs two descriptors a pipe. A pseudo-terminal cannot be emptied into a file by the kernel: of its
output, one buffer at most is lost, which the killed relay had just read. If no relay can live, training continues
without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import resource
import select
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from dlrover_run import linux
from dlrover_run.output.cursors import OWN_MESSAGES, create_cursor_table, release_memory, reset_cursor
from dlrover_run.output.relay_process import CLOSE_TIMEOUT, RelayProcess
from dlrover_run.output.sinks import is_writable
from dlrover_run.output.streams import TAIL_BYTES, tail_text

DRAIN_TIMEOUT = 5.0
"""Seconds without a byte written after which a drain gives up, once `stop_waiting` was called."""

STUCK_TIMEOUT = 0.5
"""The same for a console that is known to take nothing; the relay's replies need a few milliseconds."""

PAGE = 4096

PIPE_BYTES = 1024 * 1024
"""The size of a worker's pipe, the maximum for an unprivileged user: 10 ms of a worker that writes 100 MB a second."""

DISCARD_BYTES = 64 * 1024
"""Bytes of one read of output that no relay can show, so that the agent's loop has other work done in between."""


class StepSearch(NamedTuple):
    """The lines that match `regex` are counted as steps in the progress page at `page`."""

    regex: str
    page: str


class _Request(msgspec.Struct):
    """`moved`: the relay has reported progress. `tails` are the ends of outputs that it has sent, by key."""

    done: asyncio.Future[None]
    message: dict[str, Any]
    moved: bool = False
    tails: dict[str, str] = msgspec.field(default_factory=dict)

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class _ShownOutput(msgspec.Struct):
    """An output that the relay shows; its `message` is sent again to a replacement. `fds` are the memory file and the
    pipe of a worker's output; the pipe is closed when the source has `ended`. `tail` is the end of discarded output."""

    key: str
    message: dict[str, Any]
    fds: list[int]
    ended: bool = False
    tail: bytes = b""


class RelayClient:
    """Shows output through the relay. Create it before there is an event loop or a thread, which forks the relay,
    `attach` it inside the loop, and `close` it last.

    The relay writes to `console`, the descriptors to use as standard output and standard error. `shared`: relays of
    other nodes write there too, so no write may break one of their lines. The relay keeps none of the `secrets` that
    this process knows.
    """

    def __init__(
        self, console: tuple[int, int] = (1, 2), *, shared: bool = False, secrets: Collection[str] = ()
    ) -> None:
        callbacks = (self._on_start, self._on_message, self._on_give_up)
        self._process = RelayProcess(console, shared, secrets, *callbacks)
        self._console = console
        is_null = os.fstat(console[0]).st_rdev == os.stat(os.devnull).st_rdev
        self.single_console = os.path.sameopenfile(*console) and not is_null
        """Whether both descriptors of the console lead to one place, where the order of all bytes can be seen."""
        self._requests: dict[int, _Request] = {}
        self._count = 0
        self._cursors = create_cursor_table()
        self._messages = linux.memfd_create("dlrover-run messages")
        self._sources: dict[int, _ShownOutput] = {}
        self._ended: dict[str, int] = {}
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
        self._process.send({"do": "cursors"}, self._cursors)
        messages = {"do": "pipe", "source": OWN_MESSAGES, "out": 2, "prefix": None, "whole": False}
        self._process.send(messages, self._messages)
        for path in self._owned:
            self._process.send({"do": "own", "path": path})
        for source in self._sources.values():
            self._process.send(source.message, *source.fds)
        self._process.send({"do": "begin"})
        ended = [number for number, source in self._sources.items() if source.ended]
        self._process.send({"do": "forget", "sources": ended})
        for request in self._requests.values():
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
        read_end, write_end = self._terminal_or_pipe(console) if terminal else _pipe()
        # A worker that was started again under this key has a new pipe.
        self._end(self._live([key]))
        spool = linux.memfd_create("dlrover-run output")
        message = {"do": "pipe", "out": out, "prefix": prefix, "whole": whole_lines}
        self._add(key, {**message, "steps": steps and steps._asdict()}, 0, spool, read_end)
        return write_end

    def _terminal_or_pipe(self, console: int) -> tuple[int, int]:
        """A pseudo-terminal, or a pipe where the system gives none: a container without /dev/pts, or with too few."""
        try:
            return _pseudo_terminal(console)
        except OSError as error:
            if not self._warned_of_pipes:
                self._warned_of_pipes = True
                self._on_warning(
                    f"no pseudo-terminal can be opened ({error.strerror}): the workers write to a pipe, and may show "
                    "colours and progress bars as they do without a terminal"
                )
            return _pipe()

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
        message = {"do": "log", "path": os.path.abspath(path), "prefix": prefix}
        self._add(message["path"], {**message, "out": out}, start)
        if needles and filtered:
            filtered = os.path.abspath(filtered)
            self._add(message["path"], {**message, "needles": list(needles), "filtered": filtered}, start)

    def search_log(self, path: str, steps: StepSearch, start: int = 0) -> None:
        """Search a log file for steps from byte `start` on; it is not shown."""
        path = os.path.abspath(path)
        self._add(path, {"do": "log", "path": path, "steps": steps._asdict()}, start)

    def _add(self, key: str, message: dict[str, Any], start: int, *fds: int) -> None:
        number = next(number for number in itertools.count(OWN_MESSAGES + 1) if number not in self._sources)
        reset_cursor(self._cursors, number, start)
        source = self._sources[number] = _ShownOutput(key, {**message, "source": number}, list(fds))
        self._process.send(source.message, *fds)
        if self._process.gave_up and fds:
            self._discard_from_now(source)

    def write(self, text: str) -> None:
        """Write `text` to the console's standard error, after the output of the workers so far; never blocks while
        there is a relay."""
        data = text.encode(errors="backslashreplace")
        if not self._process.over and self._has_room(len(data)):
            os.write(self._messages, data)
            self._process.send({"do": "message"})
            return
        # A console that was closed is no reason to fail.
        with contextlib.suppress(OSError):
            if self._process.over and not self._process.gave_up:
                os.write(self._console[1], data)
                return
            while data and is_writable(self._console[1]):
                data = data[os.write(self._console[1], data[: select.PIPE_BUF]) :]

    def _has_room(self, count: int) -> bool:
        """Whether the file of messages, which grows with the job, stays within `ulimit -f`; beyond that they are
        written at once, before output that still waits."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return limit == resource.RLIM_INFINITY or os.fstat(self._messages).st_size + count <= limit

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
        with self._request("drain", keys, end=list(end)) as request:
            while not request.done.done():
                request.moved = False
                limit = timeout
                if timeout is None and self._hurried:
                    limit = STUCK_TIMEOUT if self._stuck else DRAIN_TIMEOUT
                await asyncio.wait({request.done}, timeout=limit)
                self._stuck = not (request.moved or request.done.done())
                if self._stuck:
                    break
        return request.tails

    async def tails(self, keys: Collection[str]) -> dict[str, str]:
        """The end of the standard error of each worker in `keys` that is known, shown or not: a console that takes
        nothing is not waited for."""
        with self._request("tails", keys) as request:
            await asyncio.wait({request.done}, timeout=STUCK_TIMEOUT)
        return request.tails

    async def end_round(self, keys: Collection[str] = (), timeout: float | None = DRAIN_TIMEOUT) -> dict[str, str]:
        """`drain`, then forget the round's pipes and log files; unfinished lines are completed.

        Returns the end of the standard error of each worker in `keys` that is known. If the console was too slow, the
        relay continues with the log files whenever it takes bytes again.
        """
        live = [number for number, source in self._sources.items() if not source.ended]
        try:
            return await self.drain(timeout, keys, live)
        finally:
            self._close_pipes(live)

    def release(self, keys: Collection[str], paths: Collection[str] = ()) -> None:
        """Close the pipes and log files of workers that have ended while others go on. Their output is still shown."""
        names = {name for key in keys for name in (key, f"{key} stdout")} | {os.path.abspath(path) for path in paths}
        self._end(self._live(names))

    def _live(self, keys: Collection[str]) -> list[int]:
        """The numbers of the outputs with these keys that have not ended."""
        return [number for number, source in self._sources.items() if source.key in keys and not source.ended]

    def _end(self, numbers: Collection[int]) -> None:
        if numbers:
            self._process.send({"do": "forget", "sources": list(numbers)})
            self._close_pipes(numbers)

    def _close_pipes(self, numbers: Collection[int]) -> None:
        """Keep of these sources only what a successor of the relay would still have to show."""
        for number in numbers:
            source = self._sources.get(number)
            if source is not None and self._process.gave_up:
                self._drop(number)
            elif source is not None and not source.ended:
                source.ended = True
                for fd in source.fds[1:]:
                    os.close(fd)
                del source.fds[1:]

    def kept(self, key: str) -> list[int]:
        """The memory files of the outputs with this key, the latest last, which stay open until the next await: what is
        shown now, and before it the end of an output of that key that has ended."""
        live = [source.fds[0] for source in self._sources.values() if source.key == key and source.fds]
        return [*([self._ended[key]] if key in self._ended else []), *live]

    def _keep(self, source: _ShownOutput) -> None:
        """Keep the end of an output that is forgotten, in place of an earlier one of its key."""
        spool = source.fds.pop(0)
        before = self._ended.pop(source.key, -1)
        if before >= 0:
            os.close(before)
        unused = (os.fstat(spool).st_size - TAIL_BYTES) // PAGE * PAGE
        if unused > 0:
            release_memory(spool, 0, unused)
        self._ended[source.key] = spool

    def _drop(self, number: int) -> None:
        source = self._sources.pop(number, None)
        if source is not None and source.fds and self._cursors >= 0 and not self._closing:
            self._keep(source)
        for fd in source.fds if source is not None else ():
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def stop_waiting(self) -> None:
        """The job is to end: current drains give up now, and later ones wait at most `DRAIN_TIMEOUT`.

        A console that took nothing in the last drain gets `STUCK_TIMEOUT`, so that the timeouts do not add up.
        """
        self._hurried = True
        for request in self._requests.values():
            request.finish()

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        await self._process.close(timeout)
        self._closing = True
        # A relay that was not killed has removed them already.
        for path in self._owned:
            shutil.rmtree(path, ignore_errors=True)
        for number in list(self._sources):
            self._drop(number)
        for fd in {self._cursors, self._messages, *self._ended.values()} - {-1}:
            os.close(fd)
        self._cursors = self._messages = -1
        self._ended.clear()

    @contextlib.contextmanager
    def _request(self, what: str, keys: Collection[str], **more: list[int]) -> Iterator[_Request]:
        """Send a request to the relay, and take its replies until the end of this context."""
        self._count += 1
        number = self._count
        message = {"do": what, "number": number, "tails": self._live(keys), **more}
        request = self._requests[number] = _Request(asyncio.get_running_loop().create_future(), message)
        try:
            if self._process.ended.done():
                self._reply_without_relay(request)
            self._process.send(message)
            yield request
        finally:
            del self._requests[number]

    def _on_message(self, message: dict[str, Any], payload: bytes) -> None:
        event, request = message["event"], self._requests.get(message.get("number", 0))
        if event == "progress":
            for each in self._requests.values():
                each.moved = True
        elif event == "tail" and request is not None:
            source = self._sources.get(message["source"])
            if source is not None:
                request.tails[source.key] = tail_text(payload, message["cut"])
        elif event == "forgotten":
            for number in message["sources"]:
                self._drop(number)
        elif event == "done" and request is not None:
            request.finish()

    def _on_give_up(self) -> None:
        for number, source in list(self._sources.items()):
            if source.ended or not source.fds:
                self._drop(number)
            else:
                self._discard_from_now(source)
        for request in self._requests.values():
            self._reply_without_relay(request)

    def _reply_without_relay(self, request: _Request) -> None:
        for number in request.message["tails"]:
            source = self._sources.get(number)
            if source is not None and self._process.gave_up:
                left = 2 * PIPE_BYTES  # More than a pipe holds, so only a live writer can have more.
                while left > 0 and (count := self._discard(source)):
                    left -= count
                request.tails[source.key] = tail_text(source.tail[-TAIL_BYTES:], len(source.tail) > TAIL_BYTES)
        request.finish()

    def _discard_from_now(self, source: _ShownOutput) -> None:
        """Read output that no relay can show, so that its worker does not wait for a full pipe for ever. The end of it
        is kept: it may have the reason why the worker died."""
        spool, pipe = source.fds
        source.tail = os.pread(spool, TAIL_BYTES + 1, max(0, os.fstat(spool).st_size - TAIL_BYTES - 1))
        asyncio.get_running_loop().add_reader(pipe, self._discard, source)

    def _discard(self, source: _ShownOutput) -> int:
        pipe = source.fds[1]
        try:
            data = os.read(pipe, DISCARD_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the last writer has closed the pseudo-terminal.
        if not data:
            asyncio.get_running_loop().remove_reader(pipe)
        source.tail = (source.tail + data)[-TAIL_BYTES - 1 :]
        return len(data)


def _pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # The user's limit on pipe memory is reached: a small pipe works too.
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(read_end, False)
    return read_end, write_end


def _pseudo_terminal(console: int) -> tuple[int, int]:
    """A raw pseudo-terminal of the console's size: bytes pass unchanged, and programs see a terminal.

    Raises OSError."""
    import termios
    import tty

    master, slave = os.openpty()
    try:
        tty.setraw(slave)
    except termios.error as error:
        os.close(master)
        os.close(slave)
        raise OSError(*error.args) from error
    with contextlib.suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))
    os.set_blocking(master, False)
    return master, slave
