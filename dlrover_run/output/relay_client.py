"""The agent's side of the relay: start it, hand it what it shall copy, hear how a worker's output ended.

Everything is non-blocking on the agent's loop, without threads. The agent keeps its own copy of the reading end of
every worker's pipe until the round ends. That costs a descriptor a worker and buys this: if the relay is killed, the
pipes do not break, so no worker dies of SIGPIPE; the agent then reads them itself, so no worker waits on a full pipe
either. It only remembers the end of what it reads, for it must not write to a console that may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

from dlrover_run.descent import lifeline
from dlrover_run.failures import process_end
from dlrover_run.output.relay_lines import MAX_MESSAGE, Ring, pieces_of
from dlrover_run.output.streams import tail_text

DRAIN_TIMEOUT = 5.0
"""Seconds in which the console takes not one byte before a drain gives up, once somebody wants an end."""

STUCK_TIMEOUT = 0.5
"""The same for a console that is known to take nothing; the relay's answers need a few milliseconds."""

CLOSE_TIMEOUT = 2.0
"""Seconds that the relay gets to end once its socket is closed, before it is killed; it needs 0.3 at most."""

PIPE_BYTES = 1024 * 1024
"""The size of a worker's pipe, the most that any user may ask for: 10 ms of a worker that writes 100 MB a second."""

READ_BYTES = 256 * 1024

SAY_CHARACTERS = 4096
"""Characters of one message that `say` sends: JSON may need twelve bytes for each."""


class _Wait:
    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.moved = False
        self.tails: dict[str, str] = {}


class Relay:
    """A running relay. `start` it before there is a loop or a thread, `attach` it inside the loop, `close` it last.

    `closed` is done as soon as the relay process is gone. Its result is empty after `close`; otherwise it is a sentence
    that says that the relay ended of itself.
    """

    closed: asyncio.Future[str]
    _on_warning: Callable[[str], None]

    def __init__(self, pid: int, control: socket.socket, console: tuple[int, int]) -> None:
        self.pid = pid
        self._control = control
        self._console = console
        self.one_console = _one_file(console)
        """Whether both descriptors of the console lead to one place, in which the order of all bytes can be seen."""
        self._closing = False
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._waits: dict[int, _Wait] = {}
        self._count = 0
        self._kept: dict[str, int] = {}
        self._orphans: dict[str, Ring] = {}
        self._hurried = False
        self._stuck = False

    @classmethod
    def start(cls, console: tuple[int, int] = (1, 2), *, shared: bool = False, secrets: Collection[str] = ()) -> Relay:
        """Fork the relay. It writes to `console`, the descriptors to use as standard output and standard error.

        Where relays of other nodes write there as well, `shared`, it writes so that no line breaks one of theirs.
        It keeps none of the `secrets` that this process knows.
        """
        parent = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            # Imported in the child alone: the agent never runs this code and starts sooner without it.
            from dlrover_run.descent.scrub import scrub
            from dlrover_run.output.relay import main

            scrub(secrets)
            main(theirs, parent, console, shared)
        theirs.close()
        ours.setblocking(False)
        return cls(pid, ours, console)

    def attach(self, on_warning: Callable[[str], None]) -> None:
        """Join the running loop; `on_warning` is called with sentences that a person should read."""
        loop = asyncio.get_running_loop()
        self._on_warning = on_warning
        self.closed = loop.create_future()
        loop.add_reader(self._control.fileno(), self._hear)
        lifeline.watch_child(self.pid, self._reap)

    def open_stderr(self, key: str, *, show: bool, prefix: str | None = None, whole_lines: bool = False) -> int:
        """A descriptor for one worker's standard error, shown on the console if `show`; close it once it is passed on.

        Where there is `one_console`, the worker's standard output may go there too, and keeps its place in the order.

        What it is given is shown as it is, or in `whole_lines` where other workers write to the console too, or, with a
        `prefix`, line by line and with that before each. `key` names the worker in `end_round`, which answers what the
        worker wrote.

        It is a pseudo-terminal where our own standard error is one, so that the worker still sees a terminal; but not
        with a `prefix`, for a worker that moves the cursor would write over the lines of others.
        """
        return self._open(key, 2 if show else None, prefix, whole_lines)

    def open_stdout(self, key: str, prefix: str | None) -> int:
        """The same for a standard output that is shown line by line and that does not share the way of the standard
        error. Nobody asks for the end of it."""
        return self._open(f"{key} stdout", 1, prefix, True)

    def _open(self, key: str, out: Literal[1, 2] | None, prefix: str | None, whole_lines: bool) -> int:
        terminal = out is not None and prefix is None and os.isatty(self._console[out - 1])
        read_end, write_end = _pseudo_terminal(self._console[out - 1]) if out and terminal else _pipe()
        self._add_pipe(key, read_end, out, prefix, whole_lines)
        return write_end

    def _add_pipe(self, key: str, fd: int, out: Literal[1, 2] | None, prefix: str | None, whole_lines: bool) -> None:
        """Let the relay read `fd`, which belongs to this object from now on."""
        if key in self._kept:
            self._drop(key)
        self._kept[key] = fd
        if self.closed.done():
            self._read_myself(key, fd)
        else:
            self._send({"do": "pipe", "key": key, "out": out, "prefix": prefix, "whole": whole_lines}, fd)

    def add_tail(
        self,
        path: str,
        out: Literal[1, 2],
        prefix: str,
        needles: Collection[str] = (),
        filtered: str | None = None,
        start: int = 0,
    ) -> None:
        """Show a log file line by line on descriptor `out`; lines with a needle go to the file `filtered` as well.

        The first `start` bytes of the log file are left out.
        """
        where = filtered and os.path.abspath(filtered)
        told = {"do": "tail", "path": os.path.abspath(path), "out": out, "prefix": prefix, "start": start}
        self._send({**told, "needles": list(needles), "filtered": where})

    def say(self, text: str) -> None:
        """Write `text` to the console's standard error, after what the workers have written; never waits for it."""
        if self.closed.done() or self._closing:
            # There is nobody left to write it for us, and a console that has gone is no reason to fail.
            with contextlib.suppress(OSError):
                os.write(self._console[1], text.encode(errors="backslashreplace"))
        for piece in pieces_of(text, SAY_CHARACTERS):
            self._send({"do": "say", "text": piece})

    def remove_at_end(self, path: str) -> None:
        """Name a directory that the relay removes when it ends, so that even SIGKILL leaves nothing in /tmp."""
        self._send({"do": "own", "path": os.path.abspath(path)})

    async def drain(self, timeout: float | None = DRAIN_TIMEOUT) -> None:
        """Have all output written that is there now.

        Gives up when the console takes nothing for `timeout` seconds, not when there is only much to write. None waits
        for as long as it takes, as a program does that writes to its console itself, until somebody says `hurry`.
        """
        await self._drain((), timeout, end=False)

    async def tails(self, keys: Collection[str]) -> dict[str, str]:
        """The end of the standard error of each worker in `keys` that is known, though it may not be shown yet: a
        console that takes nothing is not waited for."""
        with self._asking("tails", keys) as wait:
            await asyncio.wait({wait.done}, timeout=STUCK_TIMEOUT)
        return self._tails_heard(wait, keys)

    async def end_round(self, keys: Collection[str] = (), timeout: float | None = DRAIN_TIMEOUT) -> dict[str, str]:
        """`drain`, and the round's pipes and log files are forgotten; partial lines are completed.

        Answers the end of the standard error of each worker in `keys` that is known.

        Where the console was too slow, the relay goes on with the log files whenever it takes bytes again.
        """
        try:
            return await self._drain(keys, timeout, end=True)
        finally:
            for key in list(self._kept):
                self._drop(key)
            self._orphans.clear()

    def forget(self, keys: Collection[str], paths: Collection[str] = ()) -> None:
        """Let go of the pipes of workers that have ended, and of their log files, while others go on. What they have
        been given is still shown."""
        names = [name for key in keys for name in (key, f"{key} stdout")]
        for name in names:
            if name in self._kept:
                self._drop(name)
            self._orphans.pop(name, None)
        self._send({"do": "forget", "keys": names, "paths": [os.path.abspath(path) for path in paths]})

    def hurry(self) -> None:
        """Somebody wants an end: drains that wait now give up, and later ones wait `DRAIN_TIMEOUT` at most.

        A console that took nothing in the last drain gets `STUCK_TIMEOUT`, so that the time-outs do not add up.
        """
        self._hurried = True
        for wait in self._waits.values():
            if not wait.done.done():
                wait.done.set_result(None)

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the relay and wait for its end."""
        self._closing = True
        if self._control.fileno() >= 0 and not self.closed.done():
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            asyncio.get_running_loop().remove_writer(self._control.fileno())
            self._control.close()
        await asyncio.wait({self.closed}, timeout=timeout)
        if not self.closed.done():
            os.kill(self.pid, signal.SIGKILL)
            await self.closed
        for key in list(self._kept):
            self._drop(key)

    async def _drain(self, keys: Collection[str], timeout: float | None, *, end: bool) -> dict[str, str]:
        with self._asking("drain", keys, end=end) as wait:
            while not wait.done.done():
                wait.moved = False
                patience = timeout
                if timeout is None and self._hurried:
                    patience = STUCK_TIMEOUT if self._stuck else DRAIN_TIMEOUT
                await asyncio.wait({wait.done}, timeout=patience)
                self._stuck = not (wait.moved or wait.done.done())
                if self._stuck:
                    break
        return self._tails_heard(wait, keys)

    @contextlib.contextmanager
    def _asking(self, what: str, keys: Collection[str], **more: bool) -> Iterator[_Wait]:
        """Ask the relay, and listen for its answer until the end of this context."""
        self._count += 1
        number = self._count
        wait = self._waits[number] = _Wait(asyncio.get_running_loop().create_future())
        try:
            if self.closed.done():
                wait.done.set_result(None)
            self._send({"do": what, "number": number, "keys": list(keys), **more})
            yield wait
        finally:
            del self._waits[number]

    def _tails_heard(self, wait: _Wait, keys: Collection[str]) -> dict[str, str]:
        # What the relay said before it died is newer than nothing, and older than what was read after its death.
        return {**wait.tails, **self._own_tails(keys)}

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send in order, now or when the socket takes it. Raises `ValueError` for a message beyond `MAX_MESSAGE`."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes to the output relay is over the limit of {MAX_MESSAGE}")
        if self.closed.done() or self._closing:
            return
        self._outbox.append((data, [] if fd is None else [fd]))
        if len(self._outbox) == 1:
            self._flush()

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
                self._outbox.clear()  # The relay is gone; `_reap` hears of it by itself.
                break
            self._outbox.popleft()
        loop.remove_writer(self._control.fileno())

    def _hear(self) -> None:
        while True:
            try:
                data = self._control.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._control.fileno())
                return
            head, _, payload = data.partition(b"\n")
            message = json.loads(head)
            what, wait = message["tell"], self._waits.get(message.get("number", 0))
            if what == "warning":
                self._on_warning(message["text"])
            elif what == "progress":
                for each in self._waits.values():
                    each.moved = True
            elif what == "tail" and wait is not None:
                wait.tails[message["key"]] = tail_text(payload, message["cut"])
            elif what == "done" and wait is not None and not wait.done.done():
                wait.done.set_result(None)

    def _reap(self) -> None:
        """The relay process has ended."""
        loop = asyncio.get_running_loop()
        status = 0
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
        if self._control.fileno() >= 0:
            self._hear()
            loop.remove_reader(self._control.fileno())
            loop.remove_writer(self._control.fileno())
            self._control.close()
        self._outbox.clear()
        epitaph = "" if self._closing else _epitaph(os.waitstatus_to_exitcode(status))
        self.closed.set_result(epitaph)
        if epitaph:
            self._on_warning(epitaph)
        self.hurry()
        for key, fd in list(self._kept.items()):
            self._read_myself(key, fd)

    def _read_myself(self, key: str, fd: int) -> None:
        os.set_blocking(fd, False)
        self._orphans[key] = Ring()
        asyncio.get_running_loop().add_reader(fd, self._take, key, fd)

    def _take(self, key: str, fd: int) -> bool:
        """Read once from a pipe that has lost its relay; whether there was something."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # The end of a pseudo-terminal.
        if data:
            self._orphans[key].add(data)
        else:
            asyncio.get_running_loop().remove_reader(fd)
        return bool(data)

    def _own_tails(self, keys: Collection[str]) -> dict[str, str]:
        tails: dict[str, str] = {}
        for key in keys:
            if key in self._orphans and key in self._kept:
                # As much as the pipe can hold: what a dead worker left there, and no more of a live one.
                for _ in range(PIPE_BYTES // READ_BYTES + 1):
                    if not self._take(key, self._kept[key]):
                        break
                if content := self._orphans[key].content():
                    tails[key] = tail_text(content, self._orphans[key].cut)
        return tails

    def _drop(self, key: str) -> None:
        fd = self._kept.pop(key)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def _epitaph(code: int) -> str:
    consequence = "the workers go on, but their output is no longer shown, only written to log files"
    return f"the output relay {process_end(code)}; {consequence}"


def _one_file(console: tuple[int, int]) -> bool:
    with contextlib.suppress(OSError):
        # In /dev/null no order can be seen.
        return os.path.sameopenfile(*console) and os.fstat(console[0]).st_rdev != os.stat(os.devnull).st_rdev
    return False


def _pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # Over the user's share of pipe memory: a small pipe works too.
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(read_end, False)
    return read_end, write_end


def _pseudo_terminal(console: int) -> tuple[int, int]:
    """A raw pseudo-terminal as large as the console: bytes pass unchanged, and programs see a terminal."""
    import termios
    import tty

    master, slave = os.openpty()
    tty.setraw(slave)
    with contextlib.suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))
    os.set_blocking(master, False)
    return master, slave
