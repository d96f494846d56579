"""The relay: a small process that copies the workers' output to the console.

It is a process, not a thread or a task of the agent's loop. A console may block for any time (a pager, Ctrl-S on a
terminal, a full pipe) and a busy worker writes 100 MB a second, while the agent has to notice a worker's death within a
millisecond. A thread would share the interpreter lock with the agent, make forking unsafe, and die with the agent. This
process survives a SIGKILL of the agent for long enough to write the workers' last output.

The first relay is forked from the agent before the agent has an event loop. A relay that is killed is replaced by a
fresh interpreter, which continues where it was: each source has a file, and a cursor in memory that the agent holds
too (`cursors`). Relay and agent talk over a SOCK_SEQPACKET socket; the relay ends when the socket is closed. Each
message is one line of JSON; a newline and raw bytes may follow. The agent numbers the sources.

    agent -> relay, by the value of "do"
        cursors (first)                     the descriptor of the cursor table
        pipe: source, out, prefix, whole    with the descriptors of a memory file and of the pipe to empty into it (none
                                            for OWN_MESSAGES): copy it to fd `out` (null: to none), line by line with
                                            `prefix` before each if it is not null, else in `whole` lines or unchanged
        message                             the memory file of OWN_MESSAGES has grown
        log: source, path, out, prefix      show a log file
        log: source, path, prefix, needles, filtered    copy its matching lines to the file `filtered`
        log: source, path                   search it for steps only
        tails: number, tails                send the ends of these pipes' output
        drain: number, tails, end           the same, write everything out, and forget the sources `end`
        forget: sources                     their worker has ended: write their output, then forget them
        own: path                           a directory to remove when the relay ends
        begin                               a new relay has all that its predecessor had, and may write
    With steps: {regex, page} in a "pipe", or a "log" that is not shown, the lines that match are counted in the
    worker's progress page at that path.
    relay -> agent, by the value of "event"
        tail: number, source, cut; and bytes            the end of one pipe's output
        forgotten: sources                              these have been shown in full and are closed
        progress; done: number; warning: text
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from dlrover_run import linux
from dlrover_run.output.cursors import OWN_MESSAGES, CursorTable
from dlrover_run.output.log_watcher import LogWatcher
from dlrover_run.output.sinks import Sink, console_sink, file_sink
from dlrover_run.output.sources import PipeSource, Source, window_size
from dlrover_run.output.streams import MAX_MESSAGE
from dlrover_run.processes import signals, tree

if TYPE_CHECKING:
    from dlrover_run.output.log_steps import LogStepSearches

ORPHAN_SECONDS = 0.3
"""Seconds that the relay continues after the agent's end, for workers that are being killed and a slow console: less
than the grace that the watchdog gives to the orphans of a dead agent."""

PROGRESS_SECONDS = 0.2
"""Minimum seconds between two progress messages while a drain is slow."""


def run() -> NoReturn:
    """Run a relay in an interpreter of its own, whose console is its descriptors 1 and 2."""
    control, parent, shared = (int(argument) for argument in sys.argv[1:4])
    main(socket.socket(fileno=control), parent, None, bool(shared))


def main(control: socket.socket, parent: int, console: tuple[int, int] | None, shared: bool) -> NoReturn:
    """Run a relay, which has been forked if it gets a `console`. Never returns into the code that the agent was running
    when it forked."""
    code = 70
    try:
        if console is not None:
            _drop_inherited(control, console)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The relay ends when the agent does. SIGTTOU would stop the copying.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signals.ignore()
        signals.release()
        tree.name_process("dlrover-relay")
        linux.raise_descriptor_limit()
        _Relay(control, parent, shared).run()
        code = 0
    except BaseException as error:
        _send(control, {"event": "warning", "text": f"the output relay failed: {type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _drop_inherited(control: socket.socket, console: tuple[int, int]) -> None:
    """Give up what a fork inherits: collectable objects, descriptors, signal handlers."""
    # Collecting an object of the agent here would close a descriptor number that is the relay's by now.
    gc.disable()
    gc.freeze()
    for target, fd in zip((1, 2), console, strict=True):
        if fd != target:
            os.dup2(fd, target, inheritable=False)
    linux.close_from(3, kept=control.fileno())
    signal.set_wakeup_fd(-1)


def _send(control: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    # This may block, but not for long: the agent's loop always reads, and a stopped agent needs no timely output.
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode() + b"\n" + payload)


class _Drain(msgspec.Struct):
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
        err = console_sink(2, shared=shared)
        # After 2>&1 both are one queue, or one would break a line that the other has half written.
        out = err if os.path.sameopenfile(1, 2) else console_sink(1, shared=shared)
        self.consoles: dict[int, Sink] = {1: out, 2: err}
        self.sinks: list[Sink] = list(dict.fromkeys(self.consoles.values()))
        self.filtered: dict[str, Sink] = {}
        self.cursors: CursorTable
        self.sources: dict[int, Source] = {}
        self.drains: list[_Drain] = []
        self.owned: list[str] = []
        self.begun = False
        self.deadline: float | None = None
        self.progress = (0, 0.0)
        """The bytes that all sinks had written at the last progress message, and when that was."""
        self.warned_of_loss = False
        self.window_size = b""
        self.searches: LogStepSearches | None = None
        self.poller = select.epoll()
        self.watcher = LogWatcher(self.poller, self._warn)
        control.setblocking(True)
        self.poller.register(control.fileno(), select.EPOLLIN)
        # The agent's end is noticed even if another process holds a copy of its end of the socket.
        self.parent = -1
        with contextlib.suppress(OSError):
            self.parent = linux.pidfd_open(parent)
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
        return sorted(self.sources.values(), key=lambda source: source.number == OWN_MESSAGES)

    def run(self) -> None:
        while not self._is_over():
            for fd, _ in self.poller.poll(self._timeout()):
                self._on_ready(fd)
            if not self.begun:
                continue
            self.watcher.resume(self.logs)
            for source in self.all:
                if source.can_copy:
                    source.copy()
                    if source.refused:
                        self.watcher.retry()
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
        unfinished = (source.lines.due for source in self.all if source.lines is not None)
        retries = (sink.retry_at for sink in self.sinks if sink.pending)
        times = [at for at in (self.deadline, self.watcher.due, *unfinished, *retries) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_ready(self, fd: int) -> None:
        if fd == self.control.fileno():
            self._receive()
        elif fd == self.parent:
            self._on_agent_gone()
        elif fd == self.watcher.fd:
            self.watcher.on_change(self.logs)
        elif pipe := next((each for each in self.pipes if each.pipe == fd), None):
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
        if not fds and message["do"] in ("cursors", "pipe"):
            # The kernel drops what it cannot pass on. Another relay gets it again.
            raise OSError(errno.EMFILE, "too many files are open to take the output of a worker")
        match message["do"]:
            case "cursors":
                self.cursors = CursorTable(fds[0])
            case "pipe":
                self._add_pipe(message, *fds)
            case "message":
                self.sources[OWN_MESSAGES].grown = True
            case "log":
                self._add_log(message)
            case "tails":
                self._send_tails(message)
                _send(self.control, {"event": "done", "number": message["number"]})
            case "drain":
                self._send_tails(message)
                # What was written before the request is no progress.
                self.progress = (self._written, self.progress[1])
                self._drain(message["number"], message["end"], everything=True)
            case "forget":
                # No request of the agent has the number 0.
                self._drain(0, message["sources"], everything=False)
            case "own":
                self.owned.append(message["path"])
            case "begin":
                self._begin()

    def _begin(self) -> None:
        """Complete the write in which the predecessor was killed, before anything else is written.

        Whatever is written first would break the line that the write had reached. And how much of the write is in a
        file can only be seen until the file grows again: a relay that is killed in turn must leave it recorded.
        """
        self.begun = True
        for source in self.all:
            source.resume()

    def _warn(self, text: str) -> None:
        _send(self.control, {"event": "warning", "text": text})

    @property
    def _written(self) -> int:
        return sum(sink.written_bytes for sink in self.sinks)

    def _add_pipe(self, message: dict[str, Any], spool: int, pipe: int = -1) -> None:
        sink, number, whole = self.consoles.get(message["out"]), message["source"], message["whole"]
        prefix = None if message["prefix"] is None else os.fsencode(message["prefix"])
        source = PipeSource(number, spool, pipe, sink, self.cursors, self.poller, prefix, whole=whole)
        self._add(source, message)

    def _add_log(self, message: dict[str, Any]) -> None:
        path, number = message["path"], message["source"]
        try:
            # Worker and relay may open the file in either order, so each of them creates it.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(f"cannot read {path}, so it is not shown: {error.strerror}")
            _send(self.control, {"event": "forgotten", "sources": [number]})
            return
        needles = None
        sink = self.consoles.get(message.get("out", 0))
        prefix = os.fsencode(message["prefix"]) if "prefix" in message else None
        if filtered := message.get("filtered"):
            needles = tuple(os.fsencode(needle) for needle in message["needles"])
            if filtered not in self.filtered:
                self.filtered[filtered] = file_sink(filtered)
                self.sinks.append(self.filtered[filtered])
            sink = self.filtered[filtered]
        # A source of its own for each sink, so that a stuck console does not hold up the filtered file.
        log = Source(number, fd, sink, self.cursors, prefix, needles)
        log.path = path
        self._add(log, message)
        self.watcher.add(log)

    def _add(self, source: Source, message: dict[str, Any]) -> None:
        self.sources[source.number] = source
        if steps := message.get("steps"):
            # Imported only for a job that counts steps by its log.
            from dlrover_run.output.log_steps import LogStepSearches

            self.searches = self.searches or LogStepSearches(self._warn)
            source.steps = self.searches.open(**steps)

    def _on_agent_gone(self) -> None:
        if self.deadline is not None:
            return
        if not self.begun:
            self._begin()
        self.deadline = time.monotonic() + ORPHAN_SECONDS
        for sink in self.sinks:
            sink.retry_now()
        self.poller.unregister(self.control.fileno())
        if self.parent >= 0:
            self.poller.unregister(self.parent)
        for source in self.all:
            source.grown = True

    def _send_tails(self, message: dict[str, Any]) -> None:
        for pipe in self.pipes:
            # Beyond the room that a stuck console leaves: the last output of a dead worker must be included.
            pipe.fill_all()
            if pipe.number in message["tails"]:
                content, cut = pipe.tail()
                head = {"event": "tail", "number": message["number"], "source": pipe.number, "cut": cut}
                _send(self.control, head, content)

    def _drain(self, number: int, end: Iterable[int], *, everything: bool) -> None:
        """Read the rest of the sources `end`, close their pipes, and begin to write out these or `everything`."""
        ended = [self.sources[number] for number in end if number in self.sources]
        for source in ended:
            if isinstance(source, PipeSource):
                source.fill_all()
                source.close()
        sources = self.all if everything else ended
        for sink in self.sinks:
            sink.retry_now()
        self.drains.append(_Drain(number, ended, {source: source.size() for source in sources}))
        for source in sources:
            source.grown = True

    def _advance_drains(self) -> None:
        for drain in list(self.drains):
            if drain.marks is None:
                if any(source in self.all and source.behind(goal) for source, goal in drain.goals.items()):
                    continue
                self._finish(drain.end)
                drain.marks = {sink: sink.put_bytes for sink in self.sinks}
            # A full disk may stay full: nothing waits for it.
            if all(sink.written_bytes >= mark or sink.postponed for sink, mark in drain.marks.items()):
                self.drains.remove(drain)
                if drain.end:
                    _send(self.control, {"event": "forgotten", "sources": [source.number for source in drain.end]})
                _send(self.control, {"event": "done", "number": drain.number})
        written, now = self._written, time.monotonic()
        if self.drains and written != self.progress[0] and now - self.progress[1] >= PROGRESS_SECONDS:
            self.progress = (written, now)
            _send(self.control, {"event": "progress"})

    def _finish(self, ended: list[Source]) -> None:
        for source in ended:
            if self.sources.pop(source.number, None) is not None:
                source.finish()
                self.watcher.remove(source, self.logs)
                if source.steps is not None and self.searches is not None:
                    self.searches.close(source.steps)
        self._flush()
        for path, sink in list(self.filtered.items()):
            if all(log.sink is not sink for log in self.logs):
                self.sinks.remove(self.filtered.pop(path))
                sink.close()

    def _flush(self) -> None:
        for sink in self.sinks:
            sink.flush()
            if sink.postponed and sink.refused_with is not None and not sink.reported:
                sink.reported = True
                why = sink.refused_with.strerror
                self._warn(f"{sink.name} takes no output now ({why}); it is tried again, and the workers go on")
            if sink.error is not None and not sink.reported:
                sink.reported = True
                self._warn(f"{sink.name} takes no more output ({sink.error.strerror}); the workers go on")

    def _update_poller(self) -> None:
        """Wait for the pipes that may be read and for the consoles that have to take more."""
        for pipe in self.pipes:
            pipe.wait()
        for sink in self.sinks:
            wants = sink.pending and sink.waits and not sink.postponed
            if wants and not sink.watched:
                self.poller.register(sink.fd, select.EPOLLOUT)
            elif sink.watched and not wants:
                self.poller.unregister(sink.fd)
            sink.watched = wants
