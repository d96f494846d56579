"""The relay: a small process that copies the workers' output to the console.

It is a process, not a thread or a task of the agent's loop. A console may block for any time (a pager, Ctrl-S on a
terminal, a full pipe) and a busy worker writes 100 MB a second, while the agent has to notice a worker's death within a
millisecond. A thread would share the interpreter lock with the agent, make forking unsafe, and die with the agent. This
process survives a SIGKILL of the agent for long enough to write the workers' last output.

The first relay is forked from the agent before the agent has an event loop. A relay that is killed is replaced by a
fresh interpreter, which continues where it was: each source has a file, and a cursor in memory that the agent holds
too (`cursors`). Relay and agent talk over a SOCK_SEQPACKET socket; the relay ends when the socket is closed. Each
message is one line of JSON; a newline and raw bytes may follow. The agent numbers the sources.

    agent -> relay
        {"do": "cursors"} and a descriptor               the cursor table; the first message
        {"do": "pipe", "source", "out", "prefix", "whole"} and one or two descriptors    a memory file, and the pipe to
                                                         empty into it; copy it to fd `out` (null: to none), line by
                                                         line with `prefix` before each if it is not null, else in
                                                         `whole` lines or unchanged
        {"do": "message", "source"} and perhaps a descriptor    the launcher's own messages, for fd 2; the descriptor is
                                                         their memory file, sent once
        {"do": "log", "source", "path", "out", "prefix"}    show a log file
        {"do": "log", "source", "path", "prefix", "needles", "filtered"}    copy matching lines to the file `filtered`
        {"do": "log", "source", "path"}                  search a log file for steps only
        {"do": "tails", "number", "tails"}               send the ends of these pipes' output
        {"do": "drain", "number", "tails", "end"}        the same, write everything out, and forget the sources `end`
        {"do": "forget", "sources"}                      their worker has ended: write their output, then forget them
        {"do": "own", "path"}                            a directory to remove when the relay ends
        {"do": "begin"}                                  a new relay has all that its predecessor had, and may write
    A "pipe", and a "log" that is not shown, may have "steps", {"regex", "page"}: the lines that match are counted in
    the worker's progress page at that path.
    relay -> agent
        {"event": "tail", "number", "source", "cut"} and bytes    the end of one pipe's output
        {"event": "forgotten", "sources"}                these have been shown in full and are closed
        {"event": "progress"}, {"event": "done", "number"}, {"event": "warning", "text"}
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dlrover_run.output.cursors import CursorTable
from dlrover_run.output.log_watcher import POLL_SECONDS, LogWatcher
from dlrover_run.output.sinks import Sink, console_sink, file_sink
from dlrover_run.output.sources import PipeSource, Source, window_size
from dlrover_run.output.streams import MAX_MESSAGE
from dlrover_run.process_tree import signals, tree

if TYPE_CHECKING:
    from dlrover_run.progress.log_steps import Budget

ORPHAN_SECONDS = 0.3
"""Seconds that the relay continues after the agent's end, for workers that are being killed and a slow console.

Less than the grace that the watchdog gives to the orphans of a dead agent.
"""

PROGRESS_SECONDS = 0.2
"""Minimum seconds between two progress messages while a drain is slow."""

DRAIN_PIPE_BYTES = 2 * 1024 * 1024
"""Maximum bytes that a drain reads from one pipe: more than a pipe holds, so only a live writer can have more."""


def main(control: socket.socket, parent: int, console: tuple[int, int], shared: bool) -> NoReturn:
    """Run a forked relay. Never returns into the code that the agent was running when it forked."""
    _run(control, parent, shared, lambda: _drop_inherited(control, console))


def run() -> NoReturn:
    """Run a relay in an interpreter of its own, whose console is its descriptors 1 and 2."""
    control, parent, shared = (int(argument) for argument in sys.argv[1:4])
    _run(socket.socket(fileno=control), parent, bool(shared), _ignore_signals)


def _run(control: socket.socket, parent: int, shared: bool, begin: Callable[[], None]) -> NoReturn:
    code = 70
    try:
        begin()
        tree.name_process("dlrover-relay")
        _Relay(control, parent, shared).run()
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            _send(control, {"event": "warning", "text": f"the output relay failed: {type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _drop_inherited(control: socket.socket, console: tuple[int, int]) -> None:
    """Give up what a fork inherits: collectable objects, descriptors, signal handlers, the process name."""
    # Collecting an object of the agent here would close a descriptor number that is the relay's by now.
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


def _send(control: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    # This may block, but not for long: the agent's loop always reads, and a stopped agent needs no timely output.
    control.send(json.dumps(message).encode() + b"\n" + payload)


@dataclass
class _Drain:
    """A request of the agent to write everything that the sources held when it was sent.

    `goals` is how far each source must be read. Once all are, `marks` is how many bytes each sink must write. The
    sources `end` are forgotten then.
    """

    number: int
    end: list[Source]
    goals: dict[Source, int]
    marks: dict[Sink, int] | None = None


class _Relay:
    def __init__(self, control: socket.socket, parent: int, shared: bool) -> None:
        self.control = control
        same = False
        with contextlib.suppress(OSError):
            same = os.path.sameopenfile(1, 2)
        err = console_sink(2, shared=shared)
        # After 2>&1 both are one queue, or one would break a line that the other has half written.
        self.consoles: dict[int, Sink] = {1: err if same else console_sink(1, shared=shared), 2: err}
        self.sinks: list[Sink] = list(dict.fromkeys(self.consoles.values()))
        self.filtered: dict[str, Sink] = {}
        self.cursors: CursorTable
        self.sources: dict[int, Source] = {}
        self.messages: Source | None = None
        self.drains: list[_Drain] = []
        self.owned: list[str] = []
        self.begun = False
        self.deadline: float | None = None
        self.progress = (0, 0.0)
        self.warned: set[Sink] = set()
        self.warned_of_loss = False
        self.window_size = b""
        self.search_budget: Budget | None = None
        self.poller = select.epoll()
        self.writable: set[Sink] = set()
        self.watcher = LogWatcher(self.poller, self._warn)
        control.setblocking(True)
        self.poller.register(control.fileno(), select.EPOLLIN)
        self._watch_parent(parent)

    def _watch_parent(self, parent: int) -> None:
        """Notice the agent's end even if another process holds a copy of its end of the socket."""
        self.parent = -1
        with contextlib.suppress(OSError):
            self.parent = os.pidfd_open(parent)
            self.poller.register(self.parent, select.EPOLLIN)
        if os.getppid() != parent:
            self._on_agent_gone()

    @property
    def pipes(self) -> list[PipeSource]:
        return [source for source in self.sources.values() if isinstance(source, PipeSource)]

    @property
    def logs(self) -> list[Source]:
        return [source for source in self.sources.values() if source.path]

    @property
    def all(self) -> list[Source]:
        """All sources. The launcher's messages come last, after what the workers had written by then."""
        return [*self.sources.values(), *([self.messages] if self.messages is not None else [])]

    def run(self) -> None:
        while not self._is_over():
            for fd, _ in self.poller.poll(self._timeout()):
                self._on_ready(fd)
            if not self.begun:
                continue
            self.watcher.resume()
            for source in self.all:
                if self.watcher.polling and source.path:
                    source.grown = True
                if source.can_copy:
                    source.copy()
                source.show_unfinished(time.monotonic())
            self._flush()
            self._advance_drains()
            self._update_poller()
        for pipe in self.pipes:
            pipe.close()
        for source in self.all:
            source.finish()
        self._flush()
        for path in self.owned:
            shutil.rmtree(path, ignore_errors=True)

    def _is_over(self) -> bool:
        if self.deadline is None:
            return False
        rest = any(pipe.pipe >= 0 for pipe in self.pipes) or any(sink.pending for sink in self.sinks)
        return time.monotonic() >= self.deadline or not (rest or any(source.grown for source in self.all))

    def _timeout(self) -> float | None:
        """Seconds until there is something to do without an event; None: no limit."""
        if not self.begun:
            return None
        if any(source.can_copy for source in self.all):
            return 0
        waits = [POLL_SECONDS] if self.watcher.polling and self.logs else []
        unfinished = (source.lines.due for source in self.all if source.lines is not None)
        times = [at for at in (self.deadline, self.watcher.due, *unfinished) if at is not None]
        return min(waits + [max(0.0, at - time.monotonic()) for at in times], default=None)

    def _on_ready(self, fd: int) -> None:
        if fd == self.control.fileno():
            self._receive()
        elif fd == self.parent:
            self._on_agent_gone()
        elif fd == self.watcher.fd:
            self.watcher.on_change(self.logs)
        else:
            for pipe in self.pipes:
                if pipe.pipe == fd:
                    pipe.fill()
                    if pipe.lost is not None and not self.warned_of_loss:
                        self.warned_of_loss = True
                        self._warn(f"no memory file takes output ({pipe.lost.strerror}): some is not shown")
                    if pipe.terminal and (size := window_size()) != self.window_size:
                        self.window_size = size
                        for each in self.pipes:
                            each.resize(size)

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 2)
        except OSError:
            data, fds = b"", []
        if not data:
            self._on_agent_gone()
            return
        message = json.loads(data)
        what = message["do"]
        if what == "cursors":
            self.cursors = CursorTable(fds[0])
        elif what == "pipe":
            self._add_pipe(message, *fds)
        elif what == "message":
            if fds:
                number = message["source"]
                self.messages = PipeSource(number, fds[0], -1, self.consoles[2], self.cursors, self.poller)
            elif self.messages is not None:
                self.messages.grown = True
        elif what == "log":
            self._add_log(message)
        elif what == "tails":
            self._send_tails(message)
            self._reply({"event": "done", "number": message["number"]})
        elif what == "drain":
            self._send_tails(message)
            # What was written before the request is no progress.
            self.progress = (sum(sink.written_bytes for sink in self.sinks), self.progress[1])
            self._drain(message["number"], self._end(message["end"]), self.all)
        elif what == "forget":
            ended = self._end(message["sources"])
            self._drain(0, ended, ended)  # No request of the agent has the number 0.
        elif what == "own":
            self.owned.append(message["path"])
        elif what == "begin":
            self._begin()

    def _begin(self) -> None:
        """Complete the write in which the predecessor was killed, before anything else is written.

        Whatever is written first would break the line that the write had reached. And how much of the write is in a
        file can only be seen until the file grows again: a relay that is killed in turn must leave it recorded.
        """
        self.begun = True
        for source in self.all:
            source.resume()

    def _reply(self, message: dict[str, Any], payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            _send(self.control, message, payload)

    def _warn(self, text: str) -> None:
        self._reply({"event": "warning", "text": text})

    def _add_pipe(self, message: dict[str, Any], spool: int, pipe: int = -1) -> None:
        sink = None if message["out"] is None else self.consoles[message["out"]]
        prefix = None if message["prefix"] is None else os.fsencode(message["prefix"])
        number, whole = message["source"], message["whole"]
        source = PipeSource(number, spool, pipe, sink, self.cursors, self.poller, prefix, whole=whole)
        self._search(source, message)
        self.sources[number] = source

    def _add_log(self, message: dict[str, Any]) -> None:
        path, number = message["path"], message["source"]
        needles = None
        sink = self.consoles.get(message.get("out", 0))
        prefix = None if "steps" in message else os.fsencode(message["prefix"])
        try:
            if sink is None and "filtered" in message:
                filtered, needles = message["filtered"], tuple(os.fsencode(needle) for needle in message["needles"])
                if filtered not in self.filtered:
                    self.filtered[filtered] = file_sink(filtered)
                    self.sinks.append(self.filtered[filtered])
                sink = self.filtered[filtered]
            # Worker and relay may open the file in either order, so each of them creates it.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(f"cannot read {path}, so it is not shown: {error.strerror}")
            self._reply({"event": "forgotten", "sources": [number]})
            return
        # A source of its own for each sink, so that a stuck console does not hold up the filtered file.
        log = self.sources[number] = Source(number, fd, sink, self.cursors, prefix, needles)
        log.path = path
        self._search(log, message)
        self.watcher.add(log)

    def _search(self, source: Source, message: dict[str, Any]) -> None:
        """Have the steps of the source's worker counted, if the message requests it. Its outputs share a counter."""
        if "steps" not in message:
            return
        # Imported only for a job that counts steps by its log.
        from dlrover_run.progress import log_steps

        page, regex = message["steps"]["page"], message["steps"]["regex"]
        counters = {each.steps.counter.identity: each.steps.counter for each in self.sources.values() if each.steps}
        counter = None
        with contextlib.suppress(OSError):
            counter = counters.get(log_steps.page_identity(page)) or log_steps.open_counter(page)
        if counter is not None:
            self.search_budget = self.search_budget or log_steps.Budget()
            source.steps = log_steps.LogSteps(regex, counter, self.search_budget, self._warn)

    def _on_agent_gone(self) -> None:
        if self.deadline is not None:
            return
        if not self.begun:
            self._begin()
        self.deadline = time.monotonic() + ORPHAN_SECONDS
        self.poller.unregister(self.control.fileno())
        if self.parent >= 0:
            self.poller.unregister(self.parent)
        for source in self.all:
            source.grown = True

    def _send_tails(self, message: dict[str, Any]) -> None:
        for pipe in self.pipes:
            # Beyond the room that a stuck console leaves: the last output of a dead worker must be included.
            _empty(pipe)
            if pipe.number in message["tails"]:
                content, cut = pipe.tail()
                number = message["number"]
                self._reply({"event": "tail", "number": number, "source": pipe.number, "cut": cut}, content)

    def _end(self, numbers: Iterable[int]) -> list[Source]:
        """Read the rest of these sources and close their pipes."""
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
                    self._reply({"event": "forgotten", "sources": [source.number for source in drain.end]})
                self._reply({"event": "done", "number": drain.number})
        written, now = sum(sink.written_bytes for sink in self.sinks), time.monotonic()
        if self.drains and written != self.progress[0] and now - self.progress[1] >= PROGRESS_SECONDS:
            self.progress = (written, now)
            self._reply({"event": "progress"})

    def _finish(self, ended: list[Source]) -> None:
        for source in ended:
            if self.sources.pop(source.number, None) is not None:
                source.finish()
                self.watcher.remove(source, self.logs)
                if (steps := source.steps) is not None and all(
                    each.steps is None or each.steps.counter is not steps.counter for each in self.sources.values()
                ):
                    steps.counter.close()
        self._flush()
        for path, sink in list(self.filtered.items()):
            if all(log.sink is not sink for log in self.logs):
                self.sinks.remove(self.filtered.pop(path))
                sink.close()

    def _flush(self) -> None:
        for sink in self.sinks:
            sink.flush()
            if sink.error is not None and sink not in self.warned:
                self.warned.add(sink)
                name = {id(s): f"descriptor {n}" for n, s in self.consoles.items()}.get(id(sink), "the filtered log")
                self._warn(f"{name} takes no more output ({sink.error.strerror}); the workers go on")

    def _update_poller(self) -> None:
        """Wait for the pipes that may be read and for the consoles that have to take more."""
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


def _empty(pipe: PipeSource) -> None:
    left = DRAIN_PIPE_BYTES
    while left > 0 and (count := pipe.fill(left)):
        left -= count
