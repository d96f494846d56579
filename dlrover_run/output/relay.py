"""The relay: a small process that copies the workers' output to our console.

Why a process and not a thread or a task of the agent's loop: a console can stop taking bytes for as long as it likes
(a pager, a terminal with Ctrl-S, a full pipe), a busy worker writes 100 MB a second, and the agent must meanwhile see a
death within a millisecond. A thread would share the interpreter lock with the agent, keep it from forking safely, and
die with it; this process survives a SIGKILL of the agent for as long as it takes to write out the workers' last words.

The first is forked from the agent before the agent has a loop. One that is killed is replaced by a fresh interpreter,
which goes on where it was: every source has a file and a position in `relay_marks`, which the agent holds as well. A
relay talks with the agent over one SOCK_SEQPACKET socket, and ends when that socket does. Each message is one line of
JSON, which a newline and raw bytes may follow. Sources go by numbers that the agent gives.

    agent -> relay
        {"do": "marks"} and a descriptor                 the file of `relay_marks`; the first message
        {"do": "pipe", "source", "out", "prefix", "whole"} and one or two descriptors    a memory file, and the pipe to
                                                         empty into it; copy it to fd `out`, null for nowhere: line by
                                                         line behind `prefix` where it is not null, else in `whole`
                                                         lines or as it is
        {"do": "say", "source"}                          the agent's own words, for fd 2, are in the file of that source
        {"do": "tail", "source", "path", "out", "prefix"}    show a log file
        {"do": "tail", "source", "path", "prefix", "needles", "filtered"}    copy lines of it to the file `filtered`
        {"do": "tails", "number", "tails"}               tell the ends of what these pipes were given
        {"do": "drain", "number", "tails", "end"}        the same, and write all out, and forget the sources `end`
        {"do": "forget", "sources"}                      they are of a worker that has ended: what they were given goes
                                                         out, and they are let go of
        {"do": "own", "path"}                            a directory to remove when the relay ends
    relay -> agent
        {"tell": "tail", "number", "source", "cut"} and bytes    the end of what one pipe was given
        {"tell": "gone", "sources"}                      these are shown in full, and forgotten
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
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from dlrover_run.output.cursors import CursorTable
from dlrover_run.output.lines import MAX_MESSAGE
from dlrover_run.output.sinks import Inotify, Sink, console_sink, file_sink
from dlrover_run.output.sources import PipeSource, Source
from dlrover_run.process_tree import signals, tree

ORPHAN_SECONDS = 0.3
"""How long the relay goes on after the agent's end, for workers that are being killed and a console that is slow.

Less than the grace that the watchdog gives to what a dead agent has left behind.
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
    """A forked relay's whole life; it must never return into the code that the agent was running when it forked."""
    _live(control, parent, shared, lambda: _leave_the_agent(control, console))


def run() -> NoReturn:
    """The whole life of a relay with an interpreter of its own, whose console is its descriptors 1 and 2."""
    control, parent, shared = (int(word) for word in sys.argv[1:4])
    _live(socket.socket(fileno=control), parent, bool(shared), _ignore_signals)


def _live(control: socket.socket, parent: int, shared: bool, begin: Callable[[], None]) -> NoReturn:
    code = 70
    try:
        begin()
        tree.name_process("dlrover-relay")
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
    _ignore_signals()


def _ignore_signals() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The relay ends when the agent does. SIGTTOU would stop the copying.
    for number in (*signals.TERMINATION_SIGNALS, signal.SIGPIPE, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signals.release()


def _tell(control: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    # This may block: the agent's loop always reads, and while the agent is stopped there is nobody to be quick for.
    control.send(json.dumps(message).encode() + b"\n" + payload)


class _Drain:
    """A wish of the agent's to have everything written that was there when it asked.

    `goals` says how far each source is to be read. Once all are, `marks` says how many bytes each sink must take. The
    sources `end` are forgotten then.
    """

    def __init__(self, number: int, end: Iterable[Source], goals: dict[Source, int]) -> None:
        self.number = number
        self.end = list(end)
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
        self.marks: CursorTable
        self.sources: dict[int, Source] = {}
        self.words: Source | None = None
        self.drains: list[_Drain] = []
        self.inotify: Inotify | None = None
        self.listen_at: float | None = None
        self.look = False
        self.owned: list[str] = []
        self.deadline: float | None = None
        self.progress = (0, 0.0)
        self.warned: set[Sink] = set()
        self.told_of_loss = False
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

    @property
    def pipes(self) -> list[PipeSource]:
        return [source for source in self.sources.values() if isinstance(source, PipeSource)]

    @property
    def tails(self) -> list[Source]:
        return [source for source in self.sources.values() if source.path]

    @property
    def all(self) -> list[Source]:
        """All sources; the agent's own words come after what workers had written by then."""
        return [*self.sources.values(), *([self.words] if self.words is not None else [])]

    def run(self) -> None:
        while not self._over():
            for fd, _ in self.poller.poll(self._wait()):
                self._ready(fd)
            self._listen_again()
            for source in self.all:
                if self.look and source.path:
                    source.grown = True
                if source.can_copy:
                    source.copy()
                source.show_unfinished(time.monotonic())
            self._flush()
            self._advance_drains()
            self._choose_what_to_wait_for()
        for pipe in self.pipes:
            pipe.close()
        for source in self.all:
            source.finish()
        self._flush()
        for path in self.owned:
            shutil.rmtree(path, ignore_errors=True)

    def _over(self) -> bool:
        if self.deadline is None:
            return False
        rest = any(pipe.pipe >= 0 for pipe in self.pipes) or any(sink.pending for sink in self.sinks)
        return time.monotonic() >= self.deadline or not (rest or any(source.grown for source in self.all))

    def _wait(self) -> float | None:
        """Seconds until there is something to do without an event; None is for ever."""
        if any(source.can_copy for source in self.all):
            return 0
        waits = [LOOK_SECONDS] if self.look and self.tails else []
        unfinished = (source.lines.due for source in self.all if source.lines is not None)
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
                if pipe.pipe == fd:
                    pipe.fill()
                    if pipe.lost is not None and not self.told_of_loss:
                        self.told_of_loss = True
                        self._warn(f"no memory file takes output ({pipe.lost.strerror}): some is not shown")
                    if pipe.terminal:
                        self._copy_window_size()

    def _hear(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 2)
        except OSError:
            data, fds = b"", []
        if not data:
            self._agent_is_gone()
            return
        message = json.loads(data)
        what = message["do"]
        if what == "marks":
            self.marks = CursorTable(fds[0])
        elif what == "pipe":
            self._add_pipe(message, *fds)
        elif what == "say":
            if fds:
                self.words = PipeSource(message["source"], fds[0], -1, self.consoles[2], self.marks, self.poller)
            elif self.words is not None:
                self.words.grown = True
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

    def _add_pipe(self, message: dict[str, Any], spool: int, pipe: int = -1) -> None:
        sink = None if message["out"] is None else self.consoles[message["out"]]
        prefix = None if message["prefix"] is None else os.fsencode(message["prefix"])
        number = message["source"]
        whole = message["whole"]
        self.sources[number] = PipeSource(number, spool, pipe, sink, self.marks, self.poller, prefix, whole=whole)

    def _add_tail(self, message: dict[str, Any]) -> None:
        path, number = message["path"], message["source"]
        needles = None
        sink = self.consoles.get(message.get("out", 0))
        try:
            if sink is None:
                filtered, needles = message["filtered"], tuple(os.fsencode(needle) for needle in message["needles"])
                if filtered not in self.files:
                    self.files[filtered] = file_sink(filtered)
                    self.sinks.append(self.files[filtered])
                sink = self.files[filtered]
            # The order in which the worker's end and ours open the file does not matter, so either may create it.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(f"cannot read {path}, so it is not shown: {error.strerror}")
            self._tell_gone([number])
            return
        # Each has a place in the file of its own, so that a console that is stuck does not hold the filtered file.
        tail = self.sources[number] = Source(number, fd, sink, self.marks, os.fsencode(message["prefix"]), needles)
        tail.path = path
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
        for source in self.all:
            source.grown = True

    def _tell_tails(self, message: dict[str, Any]) -> None:
        for pipe in self.pipes:
            # Beyond what a stuck console leaves room for: a dead worker's last words must be there.
            _empty(pipe)
            if pipe.number in message["tails"]:
                content, cut = pipe.tail()
                with contextlib.suppress(OSError):
                    told = {"tell": "tail", "number": message["number"], "source": pipe.number, "cut": cut}
                    _tell(self.control, told, content)

    def _tell_end(self, number: int) -> None:
        with contextlib.suppress(OSError):
            _tell(self.control, {"tell": "done", "number": number})

    def _tell_gone(self, numbers: list[int]) -> None:
        with contextlib.suppress(OSError):
            _tell(self.control, {"tell": "gone", "sources": numbers})

    def _start_drain(self, message: dict[str, Any]) -> None:
        self._tell_tails(message)
        # What was written before the wish is no progress.
        self.progress = (self._written(), self.progress[1])
        self._drain(message["number"], self._end(message["end"]), self.all)

    def _forget_some(self, message: dict[str, Any]) -> None:
        # Nobody waits for this one, and its number is nobody's.
        ended = self._end(message["sources"])
        self._drain(0, ended, ended)

    def _end(self, numbers: Iterable[int]) -> list[Source]:
        """Take the last from these sources."""
        ended = [self.sources[number] for number in numbers if number in self.sources]
        for source in ended:
            if isinstance(source, PipeSource):
                _empty(source)
                source.close()
        return ended

    def _drain(self, number: int, end: list[Source], sources: list[Source]) -> None:
        self.drains.append(_Drain(number, end, {source: source.size() for source in sources}))
        for source in sources:
            source.grown = True

    def _advance_drains(self) -> None:
        for drain in list(self.drains):
            if drain.marks is None:
                here = self.all
                if any(source in here and source.behind(goal) for source, goal in drain.goals.items()):
                    continue
                self._finish(drain.end)
                drain.marks = {sink: sink.put_bytes for sink in self.sinks}
            if all(sink.written_bytes >= mark for sink, mark in drain.marks.items()):
                self.drains.remove(drain)
                if drain.end:
                    self._tell_gone([source.number for source in drain.end])
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

    def _finish(self, ended: list[Source]) -> None:
        for source in ended:
            if self.sources.pop(source.number, None) is None:
                continue
            source.finish()
            if self.inotify is not None and source.watch >= 0 and all(t.watch != source.watch for t in self.tails):
                self.inotify.forget(source.watch)
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
            pipe.wait()
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
                    if each.terminal and each.pipe >= 0:
                        fcntl.ioctl(each.pipe, termios.TIOCSWINSZ, size)


def _empty(pipe: PipeSource) -> None:
    left = DRAIN_PIPE_BYTES
    while left > 0 and (count := pipe.fill(left)):
        left -= count
