"""The agent's side of the relay: start it, hand it what it shall copy, hear how a worker's output ended.

Everything is non-blocking on the agent's loop, without threads. The agent holds what a relay works with: the reading
end of every worker's pipe, so that no worker dies of SIGPIPE when the relay is killed; the memory files into which the
pipes are emptied; and how far each of them has been shown. So a relay that is killed is replaced, and its successor
goes on where it was. That costs two descriptors a pipe. Of a terminal's output, which the kernel does not move into a
file, it loses what the killed one had just read: one buffer of a pseudo-terminal at most. Where no relay can live,
training goes on without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dlrover_run import launch_request
from dlrover_run.failures import describe_exit_code
from dlrover_run.output.cursors import create_cursor_table, reset_cursor
from dlrover_run.output.lines import MAX_MESSAGE
from dlrover_run.output.streams import tail_text
from dlrover_run.output.unshown import Unshown
from dlrover_run.process_tree import ends, signals

DRAIN_TIMEOUT = 5.0
"""Seconds in which the console takes not one byte before a drain gives up, once somebody wants an end."""

STUCK_TIMEOUT = 0.5
"""The same for a console that is known to take nothing; the relay's answers need a few milliseconds."""

CLOSE_TIMEOUT = 2.0
"""Seconds that the relay gets to end once its socket is closed, before it is killed; it needs 0.3 at most."""

PIPE_BYTES = 1024 * 1024
"""The size of a worker's pipe, the most that any user may ask for: 10 ms of a worker that writes 100 MB a second."""

OWN_MESSAGES = 0
"""The number of the source that has the agent's own words."""

REPLACE_PAUSE = 1.0
"""Seconds before a relay is replaced that lived no longer than that, or could not be started."""

STEADY_SECONDS = 10.0
"""Seconds after which a relay counts as one that can live."""

MAX_FAILURES = 30
"""How many relays in a row may die younger than that, or not be started, before there is none any more. Until then a
worker that writes much waits, and so does the end of the job."""


class _Wait:
    def __init__(self, done: asyncio.Future[None], message: dict[str, Any]) -> None:
        self.done = done
        self.message = message
        self.moved = False
        self.tails: dict[str, str] = {}


@dataclass
class _Source:
    """What the relay was given to show, and is given again if it is replaced. `fds` are the memory file and the pipe of
    a worker's output; the pipe is let go of when the source has `ended`."""

    key: str
    message: dict[str, Any]
    fds: list[int]
    ended: bool = False


class RelayClient:
    """A running relay. `start` it before there is a loop or a thread, `attach` it inside the loop, `close` it last.

    A relay process that dies is replaced. `closed` is done once it has been ended by `close`, or once no relay can
    live: then output is not shown any more, but nobody waits for that.
    """

    closed: asyncio.Future[None]
    _on_warning: Callable[[str], None]

    def __init__(self, pid: int, control: socket.socket, console: tuple[int, int], shared: bool) -> None:
        self.pid = pid
        """The process that is the relay now; one that has ended until it is replaced."""
        self._control = control
        self._console = console
        self._shared = shared
        self.single_console = _one_file(console)
        """Whether both descriptors of the console lead to one place, in which the order of all bytes can be seen."""
        self._closing = False
        self._lives = True
        self._began = time.monotonic()
        self._replacing: asyncio.TimerHandle | None = None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._waits: dict[int, _Wait] = {}
        self._count = 0
        self._marks = create_cursor_table()
        self._words = os.memfd_create("dlrover-run words", os.MFD_CLOEXEC)
        self._sources: dict[int, _Source] = {}
        self._owned: list[str] = []
        self._hurried = False
        self._stuck = False
        self._told = ""
        self._failed = 0
        self._unshown: Unshown | None = None

    @classmethod
    def start(
        cls, console: tuple[int, int] = (1, 2), *, shared: bool = False, secrets: Collection[str] = ()
    ) -> RelayClient:
        """Fork the relay. It writes to `console`, the descriptors to use as standard output and standard error.

        Where relays of other nodes write there as well, `shared`, it writes so that no line breaks one of theirs.
        It keeps none of the `secrets` that this process knows.
        """
        parent = os.getpid()
        ours, theirs = _socket_pair()
        pid = os.fork()
        if pid == 0:
            # Imported in the child alone: the agent never runs this code and starts sooner without it.
            from dlrover_run.output.relay import main
            from dlrover_run.process_tree.scrub import scrub

            scrub(secrets)
            main(theirs, parent, console, shared)
        theirs.close()
        return cls(pid, ours, console, shared)

    def attach(self, on_warning: Callable[[str], None]) -> None:
        """Join the running loop; `on_warning` is called with sentences that a person should read."""
        self._on_warning = on_warning
        self.closed = asyncio.get_running_loop().create_future()
        self._join()

    def _join(self) -> None:
        """Give a relay that was just started all that it needs, which is all that its predecessor had."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._hear)
        ends.watch_child(self.pid, self._reap)
        self._send({"do": "marks"}, self._marks)
        self._send({"do": "say", "source": OWN_MESSAGES}, self._words)
        for path in self._owned:
            self._send({"do": "own", "path": path})
        for source in self._sources.values():
            self._send(source.message, *source.fds)
        ended = [number for number, source in self._sources.items() if source.ended]
        if ended:
            self._send({"do": "forget", "sources": ended})
        for wait in self._waits.values():
            self._send(wait.message)

    def open_stderr(self, key: str, *, show: bool, prefix: str | None = None, whole_lines: bool = False) -> int:
        """A descriptor for one worker's standard error, shown on the console if `show`; close it once it is passed on.

        With a `single_console` the worker's standard output may go there too, and keeps its place in the order.

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
        self._end([number for number, source in self._sources.items() if source.key == key and not source.ended])
        os.set_blocking(fd, False)
        spool = os.memfd_create("dlrover-run output", os.MFD_CLOEXEC)
        self._add(key, {"do": "pipe", "out": out, "prefix": prefix, "whole": whole_lines}, 0, spool, fd)

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
        told = {"do": "tail", "path": os.path.abspath(path), "prefix": prefix}
        self._add(told["path"], {**told, "out": out}, start)
        if needles and filtered:
            self._add(told["path"], {**told, "needles": list(needles), "filtered": os.path.abspath(filtered)}, start)

    def _add(self, key: str, message: dict[str, Any], start: int, *fds: int) -> None:
        number = next(number for number in itertools.count(OWN_MESSAGES + 1) if number not in self._sources)
        reset_cursor(self._marks, number, start)
        self._sources[number] = _Source(key, {**message, "source": number}, list(fds))
        self._send(self._sources[number].message, *fds)
        if self._unshown is not None and fds:
            self._unshown.read(fds[1], fds[0])

    def write(self, text: str) -> None:
        """Write `text` to the console's standard error, after what the workers have written; never waits for it."""
        data = text.encode(errors="backslashreplace")
        if self.closed.done() or self._closing:
            # There is nobody left to write it for us, and a console that has gone is no reason to fail.
            with contextlib.suppress(OSError):
                if self._unshown is None:
                    os.write(self._console[1], data)
                while self._unshown is not None and data and _takes_some(self._console[1]):
                    data = data[os.write(self._console[1], data[: select.PIPE_BUF]) :]
            return
        os.write(self._words, data)
        self._send({"do": "say"})

    def remove_at_end(self, path: str) -> None:
        """Name a directory that the relay removes when it ends, so that even SIGKILL leaves nothing in /tmp."""
        self._owned.append(os.path.abspath(path))
        self._send({"do": "own", "path": self._owned[-1]})

    async def drain(self, timeout: float | None = DRAIN_TIMEOUT) -> None:
        """Have all output written that is there now.

        Gives up when the console takes nothing for `timeout` seconds, not when there is only much to write. None waits
        for as long as it takes, as a program does that writes to its console itself, until somebody says `hurry`.
        """
        await self._drain((), timeout, [])

    async def tails(self, keys: Collection[str]) -> dict[str, str]:
        """The end of the standard error of each worker in `keys` that is known, though it may not be shown yet: a
        console that takes nothing is not waited for."""
        with self._asking("tails", keys) as wait:
            await asyncio.wait({wait.done}, timeout=STUCK_TIMEOUT)
        return wait.tails

    async def end_round(self, keys: Collection[str] = (), timeout: float | None = DRAIN_TIMEOUT) -> dict[str, str]:
        """`drain`, and the round's pipes and log files are forgotten; partial lines are completed.

        Answers the end of the standard error of each worker in `keys` that is known.

        Where the console was too slow, the relay goes on with the log files whenever it takes bytes again.
        """
        live = [number for number, source in self._sources.items() if not source.ended]
        try:
            return await self._drain(keys, timeout, live)
        finally:
            self._let_go(live)

    def release(self, keys: Collection[str], paths: Collection[str] = ()) -> None:
        """Let go of the pipes of workers that have ended, and of their log files, while others go on. What they have
        been given is still shown."""
        names = {name for key in keys for name in (key, f"{key} stdout")} | {os.path.abspath(path) for path in paths}
        self._end([number for number, source in self._sources.items() if source.key in names and not source.ended])

    def _end(self, numbers: Collection[int]) -> None:
        if numbers:
            self._send({"do": "forget", "sources": list(numbers)})
            self._let_go(numbers)

    def _let_go(self, numbers: Collection[int]) -> None:
        """Hold only what a successor of the relay would still have to show of these sources."""
        for number in numbers:
            source = self._sources.get(number)
            if source is not None and self._unshown is not None:
                self._drop(number)
            elif source is not None and not source.ended:
                source.ended = True
                for fd in source.fds[1:]:
                    os.close(fd)
                del source.fds[1:]

    def _drop(self, number: int) -> None:
        source = self._sources.pop(number, None)
        for fd in source.fds if source is not None else ():
            if self._unshown is not None:
                self._unshown.forget(fd)
            os.close(fd)

    def stop_waiting(self) -> None:
        """Somebody wants an end: drains that wait now give up, and later ones wait `DRAIN_TIMEOUT` at most.

        A console that took nothing in the last drain gets `STUCK_TIMEOUT`, so that the time-outs do not add up.
        """
        self._hurried = True
        for wait in self._waits.values():
            if not wait.done.done():
                wait.done.set_result(None)

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the relay and wait for its end."""
        if not self.closed.done():
            self._closing = True
            if self._replacing is not None:
                self._replacing.cancel()
            if self._lives:
                self._close_control()
                await asyncio.wait({self.closed}, timeout=timeout)
                if not self.closed.done():
                    os.kill(self.pid, signal.SIGKILL)
                    await self.closed
            else:
                self.closed.set_result(None)
        # A relay that ended as it should has removed them.
        for path in self._owned:
            shutil.rmtree(path, ignore_errors=True)
        for number in list(self._sources):
            self._drop(number)
        for fd in {self._marks, self._words} - {-1}:
            os.close(fd)
        self._marks = self._words = -1

    async def _drain(self, keys: Collection[str], timeout: float | None, end: Collection[int]) -> dict[str, str]:
        with self._asking("drain", keys, end=list(end)) as wait:
            while not wait.done.done():
                wait.moved = False
                patience = timeout
                if timeout is None and self._hurried:
                    patience = STUCK_TIMEOUT if self._stuck else DRAIN_TIMEOUT
                await asyncio.wait({wait.done}, timeout=patience)
                self._stuck = not (wait.moved or wait.done.done())
                if self._stuck:
                    break
        return wait.tails

    @contextlib.contextmanager
    def _asking(self, what: str, keys: Collection[str], **more: list[int]) -> Iterator[_Wait]:
        """Ask the relay, and listen for its answer until the end of this context."""
        self._count += 1
        tails = [number for number, source in self._sources.items() if source.key in keys and not source.ended]
        number = self._count
        message = {"do": what, "number": number, "tails": tails, **more}
        wait = self._waits[number] = _Wait(asyncio.get_running_loop().create_future(), message)
        try:
            if self.closed.done():
                self._answer_without_relay(wait)
            self._send(message)
            yield wait
        finally:
            del self._waits[number]

    def _answer_without_relay(self, wait: _Wait) -> None:
        for number in wait.message["tails"]:
            source = self._sources.get(number)
            if self._unshown is not None and source is not None:
                wait.tails[source.key] = self._unshown.end(source.fds[1])
        if not wait.done.done():
            wait.done.set_result(None)

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        """Send in order, now or when the socket takes it. Raises `ValueError` for a message beyond `MAX_MESSAGE`.

        Nothing is sent while there is no relay: its successor is given all anew.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes to the output relay is over the limit of {MAX_MESSAGE}")
        if self.closed.done() or self._closing or not self._lives:
            return
        self._outbox.append((data, [os.dup(fd) for fd in fds]))
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
                self._clear_outbox()  # The relay is gone; `_reap` hears of it by itself.
                break
            _close_all(fds)
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
                source = self._sources.get(message["source"])
                if source is not None:
                    wait.tails[source.key] = tail_text(payload, message["cut"])
            elif what == "gone":
                for number in message["sources"]:
                    self._drop(number)
            elif what == "done" and wait is not None and not wait.done.done():
                wait.done.set_result(None)

    def _reap(self) -> None:
        """The relay process has ended."""
        status = 0
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
        if self._control.fileno() >= 0:
            self._hear()
        self._lives = False
        self._close_control()
        self._clear_outbox()
        if self._closing:
            self.closed.set_result(None)
            return
        code = os.waitstatus_to_exitcode(status)
        lived = time.monotonic() - self._began
        if lived >= STEADY_SECONDS:
            self._failed = 0
        sentence = f"the output relay {describe_exit_code(code)}"
        if self._give_up(sentence):
            return
        # A relay that cannot live, for want of memory perhaps, is not started again without a pause.
        pause = 0.0 if lived >= REPLACE_PAUSE else REPLACE_PAUSE
        self._replacing = asyncio.get_running_loop().call_later(pause, self._replace)
        self._on_warning(f"{sentence}; another one goes on where it was")

    def _give_up(self, sentence: str) -> bool:
        """Whether too many relays have failed, the last one as `sentence` says; then nobody waits for one any more."""
        self._failed += 1
        if self._failed < MAX_FAILURES:
            return False
        self._unshown = Unshown()
        for number, source in list(self._sources.items()):
            if source.ended or not source.fds:
                self._drop(number)
            else:
                self._unshown.read(source.fds[1], source.fds[0])
        self.closed.set_result(None)
        for wait in self._waits.values():
            self._answer_without_relay(wait)
        self._on_warning(f"{sentence}, as did others before: output is not shown any more; the workers go on")
        return True

    def _replace(self) -> None:
        """Start another relay: a fresh interpreter, since this process may have threads by now and cannot be forked."""
        self._replacing = None
        self._began = time.monotonic()
        ours, theirs = _socket_pair()
        command = launch_request.command(theirs.fileno(), "dlrover_run.output.relay")
        try:
            with theirs, signals.held_back():
                process = subprocess.Popen(
                    [*command, str(os.getpid()), str(int(self._shared))],
                    stdin=subprocess.DEVNULL,
                    stdout=self._console[0],
                    stderr=self._console[1],
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            sentence = f"no output relay can be started ({error.strerror})"
            if self._give_up(sentence):
                return
            self._replacing = asyncio.get_running_loop().call_later(REPLACE_PAUSE, self._replace)
            if sentence != self._told:
                self._told = sentence
                self._on_warning(f"{sentence}: output is shown as soon as one can be")
            return
        # It is collected through a pidfd; with a return code set, Popen does not warn that it is still running.
        process.returncode = 0
        self.pid, self._control, self._lives, self._told = process.pid, ours, True, ""
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


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _takes_some(fd: int) -> bool:
    """Whether a write of as much as a pipe takes at once would not wait."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


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
