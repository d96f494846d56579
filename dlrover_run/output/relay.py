"""The relay: a small process that copies the workers' output to our console.

Why a process and not a thread or a task of the agent's loop: a console can stop taking bytes for as long as it likes
(a pager, a terminal with Ctrl-S, a full pipe), a busy worker writes 100 MB a second, and the agent must meanwhile see a
death within a millisecond. A thread would share the interpreter lock with the agent, keep it from forking safely, and
die with it; this process survives a SIGKILL of the agent for as long as it takes to write out the workers' last words.

It is forked from the agent before the agent has a loop, talks with it over one SOCK_SEQPACKET socket, and ends when
that socket does. Each message is one line of JSON, which a newline and raw bytes may follow.

    agent -> relay
        {"do": "pipe", "key", "out", "prefix", "whole"} and a descriptor   remember the last of its bytes; copy them to
                                                         fd `out`, null for nowhere: line by line and with `prefix`
                                                         before each where it is not null, else in `whole` lines or as
                                                         they come
        {"do": "say", "text"}                            a word of the agent's own for fd 2
        {"do": "tail", "path", "out", "prefix", "needles", "filtered"}   show a log file
        {"do": "tails", "number", "keys"}                tell the ends of what these pipes were given
        {"do": "drain", "number", "keys", "end"}         the same, and write all out; `end`: and forget the sources
        {"do": "forget", "keys", "paths"}                these pipes and log files are of a worker that has ended: what
                                                         they were given goes out, and they are let go of
        {"do": "own", "path"}                            a directory to remove when the relay ends
    relay -> agent
        {"tell": "tail", "number", "key", "cut"} and bytes   the end of what one pipe was given
        {"tell": "progress"}, {"tell": "done", "number"}, {"tell": "warning", "text"}
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import time
from typing import Any, NoReturn

from dlrover_run.descent import lineage, signals
from dlrover_run.output.relay_lines import MAX_MESSAGE
from dlrover_run.output.relay_ports import Inotify, LineWriter, Pipe, Sink, Tail, console_sink, file_sink

ORPHAN_SECONDS = 0.3
"""How long the relay goes on after the agent's end, for workers that are being killed and a console that is slow.

Less than the grace that the guard gives to what a dead agent has left behind.
"""

LOOK_SECONDS = 0.1
"""How often log files are looked at where the kernel has no inotify watch left for us."""

GATHER_SECONDS = 0.005
"""After log files have grown, how long further growth is gathered before it is looked at again.

The first line is shown at once; a worker that writes line by line would otherwise wake the relay for every line and be
slowed down by it to a third of its speed.
"""

PROGRESS_SECONDS = 0.2
"""The least time between two words to the agent that a drain is slow but moves."""

DRAIN_PIPE_BYTES = 2 * 1024 * 1024
"""The most that a drain reads from one pipe: more than a pipe holds, so only a live writer can have more."""


def main(control: socket.socket, parent: int, console: tuple[int, int], shared: bool) -> NoReturn:
    """The child's whole life; it must never return into the code that the agent was running when it forked."""
    code = 70
    try:
        _leave_the_agent(control, console)
        _Relay(control, parent, shared).run()
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            _tell(control, {"tell": "warning", "text": f"the output relay failed: {type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _leave_the_agent(control: socket.socket, console: tuple[int, int]) -> None:
    """Give up what a fork inherits: collectable objects, descriptors, signal handlers, the name."""
    # An object of the agent's that was collected here would close a descriptor number that is ours by now.
    gc.disable()
    gc.freeze()
    for target, fd in zip((1, 2), console, strict=True):
        if fd != target:
            os.dup2(fd, target, inheritable=False)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The relay ends when the agent does. SIGTTOU would stop the copying.
    for number in (*signals.SENDABLE, signal.SIGPIPE, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signals.release()
    lineage.name_process("dlrover-relay")


def _tell(control: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    # This may block: the agent's loop always reads, and while the agent is stopped there is nobody to be quick for.
    control.send(json.dumps(message).encode() + b"\n" + payload)


class _Drain:
    """A wish of the agent's to have everything written that was there when it asked.

    `goals` says how far each log file is to be read. Once all are, `marks` says how many bytes each sink must take.
    """

    def __init__(self, number: int, end: bool, goals: dict[Tail, int]) -> None:
        self.number = number
        self.end = end
        self.goals = goals
        self.marks: dict[Sink, int] | None = None


class _Relay:
    def __init__(self, control: socket.socket, parent: int, shared: bool) -> None:
        self.control = control
        same = False
        with contextlib.suppress(OSError):
            same = os.path.sameopenfile(1, 2)
        err = console_sink(2, shared=shared)
        # After 2>&1 both are one queue, or a line half written by one would be broken by the other.
        self.consoles: dict[int, Sink] = {1: err if same else console_sink(1, shared=shared), 2: err}
        self.sinks: list[Sink] = list(dict.fromkeys(self.consoles.values()))
        self.files: dict[str, Sink] = {}
        self.pipes: list[Pipe] = []
        self.tails: list[Tail] = []
        self.drains: list[_Drain] = []
        self.inotify: Inotify | None = None
        self.listen_at: float | None = None
        self.look = False
        self.owned: list[str] = []
        self.deadline: float | None = None
        self.progress = (0, 0.0)
        self.warned: set[Sink] = set()
        self.window_size = b""
        self.poller = select.epoll()
        self.writable: set[Sink] = set()
        control.setblocking(True)
        self.poller.register(control.fileno(), select.EPOLLIN)
        self._watch_parent(parent)

    def _watch_parent(self, parent: int) -> None:
        """See the agent's end even where some other process holds a copy of its end of the socket."""
        self.parent = -1
        with contextlib.suppress(OSError):
            self.parent = os.pidfd_open(parent)
            self.poller.register(self.parent, select.EPOLLIN)
        if os.getppid() != parent:
            self._agent_is_gone()

    def run(self) -> None:
        while not self._over():
            for fd, _ in self.poller.poll(self._wait()):
                self._ready(fd)
            self._listen_again()
            for tail in self.tails:
                if self.look:
                    tail.grown = True
                if tail.can_copy:
                    tail.copy()
            for lines in self._line_writers():
                lines.show_unfinished(time.monotonic())
            self._flush()
            self._advance_drains()
            self._choose_what_to_wait_for()
        for pipe in self.pipes:
            pipe.close()
        for tail in self.tails:
            tail.finish()
        self._flush()
        for path in self.owned:
            shutil.rmtree(path, ignore_errors=True)

    def _line_writers(self) -> list[LineWriter]:
        return [pipe.lines for pipe in self.pipes if pipe.lines is not None] + [tail.lines for tail in self.tails]

    def _over(self) -> bool:
        if self.deadline is None:
            return False
        rest = any(pipe.fd >= 0 for pipe in self.pipes) or any(sink.pending for sink in self.sinks)
        return time.monotonic() >= self.deadline or not (rest or any(tail.grown for tail in self.tails))

    def _wait(self) -> float | None:
        """Seconds until there is something to do without an event; None is for ever."""
        if any(tail.can_copy for tail in self.tails):
            return 0
        waits = [LOOK_SECONDS] if self.look and self.tails else []
        unfinished = (lines.due for lines in self._line_writers())
        times = [at for at in (self.deadline, self.listen_at, *unfinished) if at is not None]
        return min(waits + [max(0.0, at - time.monotonic()) for at in times], default=None)

    def _listen_again(self) -> None:
        """Wait for log files to grow again, once enough may have been gathered."""
        if self.inotify is not None and self.listen_at is not None and time.monotonic() >= self.listen_at:
            self.listen_at = None
            self.poller.modify(self.inotify.fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _ready(self, fd: int) -> None:
        if fd == self.control.fileno():
            self._hear()
        elif fd == self.parent:
            self._agent_is_gone()
        elif self.inotify is not None and fd == self.inotify.fd:
            self.listen_at = time.monotonic() + GATHER_SECONDS
            changed = self.inotify.changed()
            for tail in self.tails:
                tail.grown = tail.grown or changed is None or tail.watch in changed
        else:
            for pipe in self.pipes:
                if pipe.fd == fd:
                    pipe.take()
                    if pipe.terminal:
                        self._copy_window_size()

    def _hear(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self._agent_is_gone()
            return
        message = json.loads(data)
        what = message["do"]
        if what == "pipe":
            self._add_pipe(message, fds[0])
        elif what == "say":
            # Text that was read from somewhere may hold what no encoding has.
            self.consoles[2].put(message["text"].encode(errors="backslashreplace"))
        elif what == "tail":
            self._add_tail(message)
        elif what == "tails":
            self._tell_tails(message)
            self._tell_end(message["number"])
        elif what == "drain":
            self._start_drain(message)
        elif what == "forget":
            self._forget_some(message)
        elif what == "own":
            self.owned.append(message["path"])

    def _add_pipe(self, message: dict[str, Any], fd: int) -> None:
        os.set_blocking(fd, False)
        sink = None if message["out"] is None else self.consoles[message["out"]]
        prefix = message["prefix"]
        lines = None
        if sink is not None and (prefix is not None or message["whole"]):
            lines = LineWriter(sink, os.fsencode(prefix or ""), keep_returns=prefix is None)
        self.pipes.append(Pipe(message["key"], fd, sink, self.poller, lines))

    def _add_tail(self, message: dict[str, Any]) -> None:
        path, prefix = message["path"], os.fsencode(message["prefix"])
        wanted: list[tuple[Sink, tuple[bytes, ...] | None]] = [(self.consoles[message["out"]], None)]
        if message["needles"] and message["filtered"]:
            filtered = message["filtered"]
            if filtered not in self.files:
                self.files[filtered] = file_sink(filtered)
                self.sinks.append(self.files[filtered])
            wanted.append((self.files[filtered], tuple(os.fsencode(needle) for needle in message["needles"])))
        for sink, needles in wanted:
            # Each has a place in the file of its own, so that a console that is stuck does not hold the filtered file.
            try:
                tail = Tail(path, sink, prefix, needles, message["start"])
            except OSError as error:
                self._warn(f"cannot read {path}, so it is not shown: {error.strerror}")
                return
            self.tails.append(tail)
            try:
                if self.inotify is None:
                    self.inotify = Inotify()
                    self.poller.register(self.inotify.fd, select.EPOLLIN | select.EPOLLONESHOT)
                tail.watch = self.inotify.watch(path)
            except OSError as error:
                if not self.look:
                    self._warn(f"no inotify watch for log files ({error.strerror}): they are read every 0.1 s instead")
                self.look = True

    def _warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            _tell(self.control, {"tell": "warning", "text": text})

    def _agent_is_gone(self) -> None:
        if self.deadline is not None:
            return
        self.deadline = time.monotonic() + ORPHAN_SECONDS
        self.poller.unregister(self.control.fileno())
        if self.parent >= 0:
            self.poller.unregister(self.parent)
        for tail in self.tails:
            tail.grown = True

    def _tell_tails(self, message: dict[str, Any]) -> None:
        for pipe in self.pipes:
            # Beyond what a stuck console leaves room for: a dead worker's last words must be in its ring.
            left = DRAIN_PIPE_BYTES
            while left > 0 and (count := pipe.take(left)):
                left -= count
            if pipe.key in message["keys"]:
                with contextlib.suppress(OSError):
                    told = {"tell": "tail", "number": message["number"], "key": pipe.key, "cut": pipe.ring.cut}
                    _tell(self.control, told, pipe.ring.content())

    def _tell_end(self, number: int) -> None:
        with contextlib.suppress(OSError):
            _tell(self.control, {"tell": "done", "number": number})

    def _start_drain(self, message: dict[str, Any]) -> None:
        number, end = message["number"], message["end"]
        self._tell_tails(message)
        if end:
            for pipe in self.pipes:
                pipe.close()
            self.pipes = []
        # What was written before the wish is no progress.
        self.progress = (self._written(), self.progress[1])
        self.drains.append(_Drain(number, end, {tail: tail.size() for tail in self.tails}))
        for tail in self.tails:
            tail.grown = True

    def _forget_some(self, message: dict[str, Any]) -> None:
        keys, paths = set(message["keys"]), set(message["paths"])
        for pipe in [pipe for pipe in self.pipes if pipe.key in keys]:
            left = DRAIN_PIPE_BYTES
            while left > 0 and (count := pipe.take(left)):
                left -= count
            pipe.close()
            self.pipes.remove(pipe)
        goals = {tail: tail.size() for tail in self.tails if tail.path in paths}
        for tail in goals:
            tail.grown = True
        if goals:
            # Nobody waits for this one, and its number is nobody's.
            self.drains.append(_Drain(0, True, goals))

    def _advance_drains(self) -> None:
        for drain in list(self.drains):
            if drain.marks is None:
                if any(tail in self.tails and tail.behind(goal) for tail, goal in drain.goals.items()):
                    continue
                if drain.end:
                    self._forget(drain.goals)
                drain.marks = {sink: sink.put_bytes for sink in self.sinks}
            if all(sink.written_bytes >= mark for sink, mark in drain.marks.items()):
                self.drains.remove(drain)
                self._tell_end(drain.number)
        self._say_progress()

    def _say_progress(self) -> None:
        if not self.drains:
            return
        written, now = self._written(), time.monotonic()
        if written != self.progress[0] and now - self.progress[1] >= PROGRESS_SECONDS:
            self.progress = (written, now)
            with contextlib.suppress(OSError):
                _tell(self.control, {"tell": "progress"})

    def _written(self) -> int:
        return sum(sink.written_bytes for sink in self.sinks)

    def _forget(self, ended: dict[Tail, int]) -> None:
        for tail in ended:
            if tail in self.tails:
                tail.finish()
                self.tails.remove(tail)
                if self.inotify is not None and tail.watch >= 0 and all(t.watch != tail.watch for t in self.tails):
                    self.inotify.forget(tail.watch)
        self._flush()
        for path, sink in list(self.files.items()):
            if all(tail.sink is not sink for tail in self.tails):
                self.sinks.remove(self.files.pop(path))
                sink.close()

    def _flush(self) -> None:
        for sink in self.sinks:
            sink.flush()
            if sink.error is not None and sink not in self.warned:
                self.warned.add(sink)
                name = {id(s): f"descriptor {n}" for n, s in self.consoles.items()}.get(id(sink), "the filtered log")
                self._warn(f"{name} takes no more output ({sink.error.strerror}); the workers go on")

    def _choose_what_to_wait_for(self) -> None:
        for pipe in self.pipes:
            pipe.watch()
        for sink in self.consoles.values():
            wants = sink.pending and sink.waits
            if wants != (sink in self.writable):
                if wants:
                    self.poller.register(sink.fd, select.EPOLLOUT)
                    self.writable.add(sink)
                else:
                    self.poller.unregister(sink.fd)
                    self.writable.discard(sink)

    def _copy_window_size(self) -> None:
        """Make the workers' pseudo-terminals as large as the console.

        Done with each copy: no signal tells us, for the agent and so the relay are not in the console's session.
        """
        import fcntl
        import termios

        with contextlib.suppress(OSError):
            size = fcntl.ioctl(2 if os.isatty(2) else 1, termios.TIOCGWINSZ, bytes(8))
            if size != self.window_size:
                self.window_size = size
                for each in self.pipes:
                    if each.terminal and each.fd >= 0:
                        fcntl.ioctl(each.fd, termios.TIOCSWINSZ, size)
