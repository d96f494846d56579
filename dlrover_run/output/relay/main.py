"""The relay: a small process that copies the workers' output to the console.

It is a process, not a thread or a task of the agent's loop. A console may block for any time (a pager, Ctrl-S on a
terminal, a full pipe) and a busy worker writes 100 MB a second, while the agent has to notice a worker's death within a
millisecond. A thread would share the interpreter lock with the agent, and die with it. This process survives a SIGKILL
of the agent for long enough to write the workers' last output.

It has no state that a successor needs: the agent holds the pipes and the log files too, and bytes that were not read
stay in them. If the relay is killed, what it had read and not yet written is lost, and the next one goes on. It is a
fresh interpreter, which imports little (`relay_start`).

Relay and agent talk over a SOCK_SEQPACKET socket; the relay ends when the socket is closed. Each message is one JSON
object. The agent numbers the sources and its requests.

    agent -> relay, by the value of "do"
        pipe: source, out, prefix, whole    with the descriptors of a pipe and of the ring that keeps its end (no ring
                                            for OWN_MESSAGES): copy it to fd `out` (null: to none), line by line with
                                            `prefix` before each if it is not null, else in `whole` lines or unchanged
        log: source, path, out, prefix      with its descriptor: show a log file
        log: source, path, prefix, needles, filtered    copy its matching lines to the file `filtered`
        log: source, path                   search it for steps only
        read: number                        read all that the pipes hold now, so that the rings have it
        drain: number, end                  the same, write everything out, and forget the sources `end`
        forget: sources                     their worker has ended: write their output, then forget them
        own: path                           a directory to remove when the relay ends
    With steps: {regex, page} in a "pipe", or a "log" that is not shown, the lines that match are counted in the
    worker's progress page at that path.
    relay -> agent, by the value of "event"
        read: number                                    the rings have all that was written before the request
        forgotten: sources                              these have been shown in full and are closed
        progress; done: number; warning: text
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from dlrover_run import linux
from dlrover_run.output.messages import MAX_MESSAGE, OWN_MESSAGES
from dlrover_run.output.relay.sources import DRAIN_PIPE_BYTES, LogSource, PipeSource, Source, window_size
from dlrover_run.output.ring import RingWriter
from dlrover_run.output.sinks import Sink, console_sink, file_sink
from dlrover_run.processes import signals
from dlrover_run.workers.template.process_title import name_process

if TYPE_CHECKING:
    from dlrover_run.output.relay.log_steps import LogStepSearches
    from dlrover_run.output.relay.log_watcher import LogWatcher

ORPHAN_SECONDS = 0.3
"""Seconds that the relay continues after the agent's end, for workers that are being killed and a slow console: less
than the grace that the watchdog gives to the orphans of a dead agent."""

PROGRESS_SECONDS = 0.2
"""Minimum seconds between two progress messages while a drain is slow."""


_DESCRIPTORS = {"pipe": 2, "log": 1}
"""How many come with a message."""


def run() -> NoReturn:
    """Run a relay whose console is the descriptors 1 and 2 (see `relay_start` for its arguments)."""
    control, parent, shared, successor = (int(argument) for argument in sys.argv[1:5])
    connection = socket.socket(fileno=control)
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The relay ends when the agent does. SIGTTOU would stop the copying.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signals.ignore()
        signals.release()
        name_process("dlrover-relay")
        linux.raise_descriptor_limit()
        _Relay(connection, parent, shared=bool(shared), successor=bool(successor)).run()
        code = 0
    except BaseException as error:
        _send(connection, {"event": "warning", "text": f"the output relay failed: {type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    # This may block, but not for long: the agent's loop always reads, and a stopped agent needs no timely output.
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode())


class _Drain:
    """A request of the agent to write everything that the sources held when it was sent.

    `goals` is how far each log must be read. Once all are, `marks` is how many bytes each sink must write. The sources
    `end` are forgotten then.
    """

    def __init__(self, number: int, end: list[int], goals: dict[LogSource, int]) -> None:
        self.number = number
        self.end = end
        self.goals = goals
        self.marks: dict[Sink, int] | None = None


class _Relay:
    def __init__(self, control: socket.socket, parent: int, *, shared: bool, successor: bool) -> None:
        self.control = control
        err = console_sink(2, shared=shared)
        # After 2>&1 both are one queue, or one would break a line that the other has half written.
        out = err if os.path.sameopenfile(1, 2) else console_sink(1, shared=shared)
        self.consoles: dict[int, Sink] = {1: out, 2: err}
        self.sinks: list[Sink] = list(dict.fromkeys(self.consoles.values()))
        if successor:
            # The predecessor may have been killed within a line, whose rest is lost: what comes first begins a new one.
            for sink in self.sinks:
                sink.unfinished_by = self
        self.filtered: dict[str, Sink] = {}
        self.sources: dict[int, Source] = {}
        self.drains: list[_Drain] = []
        self.owned: list[str] = []
        self.deadline: float | None = None
        self.progress = (0, 0.0)
        """The bytes that all sinks had written at the last progress message, and when that was."""
        self.window_size = b""
        self.searches: LogStepSearches | None = None
        self.poller = select.epoll()
        self.watcher: LogWatcher | None = None
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
        """The outputs of workers, and last the launcher's messages: they come after what the workers wrote by then."""
        found = [source for source in self.sources.values() if isinstance(source, PipeSource)]
        return sorted(found, key=lambda pipe: pipe.number == OWN_MESSAGES)

    @property
    def logs(self) -> list[LogSource]:
        return [source for source in self.sources.values() if isinstance(source, LogSource)]

    def run(self) -> None:
        while not self._is_over():
            ready = {fd for fd, _ in self.poller.poll(self._timeout())}
            self._on_ready(ready)
            self._read_logs()
            self._read_pipes(ready)
            now = time.monotonic()
            for source in self.sources.values():
                source.show_unfinished(now)
            self._flush()
            self._advance_drains()
            self._update_poller()
        for source in self.sources.values():
            source.finish()
        self._flush()
        for path in self.owned:
            import shutil

            shutil.rmtree(path, ignore_errors=True)

    def _is_over(self) -> bool:
        if self.deadline is None:
            return False
        rest = any(pipe.fd >= 0 for pipe in self.pipes) or any(sink.pending for sink in self.sinks)
        return time.monotonic() >= self.deadline or not (rest or any(log.grown for log in self.logs))

    def _timeout(self) -> float | None:
        """Seconds until there is something to do without an event; None: no limit."""
        if any(log.can_read for log in self.logs):
            return 0
        unfinished = (source.lines.due for source in self.sources.values() if source.lines is not None)
        retries = (sink.retry_at for sink in self.sinks if sink.pending)
        logs = None if self.watcher is None else self.watcher.due
        times = [at for at in (self.deadline, logs, *unfinished, *retries) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_ready(self, ready: set[int]) -> None:
        if self.control.fileno() in ready:
            self._receive()
        if self.parent in ready:
            self._on_agent_gone()
        if self.watcher is not None and self.watcher.fd in ready:
            self.watcher.on_change(self.logs)

    def _read_logs(self) -> None:
        if self.watcher is None:
            return
        self.watcher.resume(self.logs)
        for log in self.logs:
            if log.can_read:
                log.read()
                if log.refused:
                    self.watcher.retry()

    def _read_pipes(self, ready: set[int]) -> None:
        for pipe in self.pipes:
            if pipe.fd not in ready or not pipe.has_room:
                continue
            if pipe.number == OWN_MESSAGES and not self._read_workers():
                continue
            pipe.read()
            if pipe.terminal and (size := window_size()) != self.window_size:
                self.window_size = size
                for each in self.pipes:
                    each.resize(size)

    def _read_workers(self) -> bool:
        """Write what the workers had written before a message of the launcher; whether the console took it."""
        for pipe in self.pipes[:-1]:
            left = DRAIN_PIPE_BYTES
            while left > 0 and pipe.has_room and (count := pipe.read()):
                left -= count
                self._flush()
        return all(pipe.has_room for pipe in self.pipes)

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 2)
        except OSError:
            data, fds = b"", []
        if not data:
            self._on_agent_gone()
            return
        message = json.loads(data)
        if len(fds) < _DESCRIPTORS.get(message["do"], 0) - (message.get("source") == OWN_MESSAGES):
            # The kernel drops what it cannot pass on. Another relay gets it again.
            raise OSError(errno.EMFILE, "too many files are open to take the output of a worker")
        match message["do"]:
            case "pipe":
                self._add_pipe(message, fds)
            case "log":
                self._add_log(message, fds)
            case "read":
                self._read_all(message["number"])
            case "drain":
                self._read_all(message["number"])
                # What was written before the request is no progress.
                self.progress = (self._written, self.progress[1])
                self._drain(message["number"], message["end"], everything=True)
            case "forget":
                # No request of the agent has the number 0.
                self._drain(0, message["sources"], everything=False)
            case "own":
                self.owned.append(message["path"])

    def _warn(self, text: str) -> None:
        _send(self.control, {"event": "warning", "text": text})

    @property
    def _written(self) -> int:
        return sum(sink.written_bytes for sink in self.sinks)

    def _add_pipe(self, message: dict[str, Any], fds: list[int]) -> None:
        number = message["source"]
        own = number == OWN_MESSAGES
        sink = self.consoles.get(message["out"])
        prefix = None if message["prefix"] is None else os.fsencode(message["prefix"])
        ring = None if own else RingWriter(fds[1])
        source = PipeSource(number, fds[0], ring, sink, self.poller, prefix, whole=message["whole"])
        self._add(source, message)

    def _add_log(self, message: dict[str, Any], fds: list[int]) -> None:
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
        log = LogSource(message["source"], fds[0], message["path"], sink, prefix, needles)
        self._add(log, message)
        if self.watcher is None:
            # Imported only for a job with log files that are read.
            from dlrover_run.output.relay.log_watcher import LogWatcher

            self.watcher = LogWatcher(self.poller, self._warn)
        self.watcher.add(log)

    def _add(self, source: Source, message: dict[str, Any]) -> None:
        self.sources[source.number] = source
        if steps := message.get("steps"):
            # Imported only for a job that counts steps by its log.
            from dlrover_run.output.relay.log_steps import LogStepSearches

            self.searches = self.searches or LogStepSearches(self._warn)
            source.search = self.searches.open(source.number, **steps)

    def _on_agent_gone(self) -> None:
        if self.deadline is not None:
            return
        self.deadline = time.monotonic() + ORPHAN_SECONDS
        for sink in self.sinks:
            sink.retry_now()
        self.poller.unregister(self.control.fileno())
        if self.parent >= 0:
            self.poller.unregister(self.parent)
        for log in self.logs:
            log.grown = True

    def _read_all(self, number: int) -> None:
        """Read all that the pipes hold, beyond the room that a stuck console leaves: the last output of a dead worker
        must be in its ring."""
        for pipe in self.pipes:
            pipe.read_all()
        _send(self.control, {"event": "read", "number": number})

    def _drain(self, number: int, end: Iterable[int], *, everything: bool) -> None:
        """Read the rest of the sources `end`, close their pipes, and begin to write out these or `everything`."""
        numbers = list(end)
        for pipe in self.pipes:
            if pipe.number in numbers:
                pipe.read_all()
                pipe.close()
        for sink in self.sinks:
            sink.retry_now()
        logs = [log for log in self.logs if everything or log.number in numbers]
        self.drains.append(_Drain(number, numbers, {log: log.size() for log in logs}))
        for log in logs:
            log.grown = True

    def _advance_drains(self) -> None:
        for drain in list(self.drains):
            if drain.marks is None:
                if any(log.fd >= 0 and log.behind(goal) for log, goal in drain.goals.items()):
                    continue
                self._finish(drain.end)
                drain.marks = {sink: sink.put_bytes for sink in self.sinks}
            # A full disk may stay full: nothing waits for it.
            if all(sink.written_bytes >= mark or sink.postponed for sink, mark in drain.marks.items()):
                self.drains.remove(drain)
                if drain.end:
                    _send(self.control, {"event": "forgotten", "sources": drain.end})
                _send(self.control, {"event": "done", "number": drain.number})
        written, now = self._written, time.monotonic()
        if self.drains and written != self.progress[0] and now - self.progress[1] >= PROGRESS_SECONDS:
            self.progress = (written, now)
            _send(self.control, {"event": "progress"})

    def _finish(self, numbers: Iterable[int]) -> None:
        """Forget these sources. They are finished; sinks may still have their output."""
        for number in numbers:
            source = self.sources.pop(number, None)
            if source is None:
                continue
            if isinstance(source, LogSource) and self.watcher is not None:
                self.watcher.remove(source, self.logs)
            source.finish()
            if source.search is not None and self.searches is not None:
                self.searches.close(number)
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
