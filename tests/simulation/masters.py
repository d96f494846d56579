"""Masters: `Jobs` and `NodeSession` of the product in a process that may be stopped or killed at any moment; and the
start of the next master."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.master.job import JobHost, NodeConnection
from dlrover_run.master.jobs import Jobs
from dlrover_run.master.server import IdleShutdown
from dlrover_run.master.session import NodeSession
from dlrover_run.rendezvous.master_client.launcher import IDLE_TIMEOUT
from dlrover_run.transport.connection import ConnectionLost
from dlrover_run.transport.messages import Join, Welcome
from simulation.disk import Disk, DiskJournal
from simulation.invariants import Invariants
from simulation.loop import LoopProcess
from simulation.network import END, TO_MASTER, TO_NODE, Stream, is_repeatable
from simulation.timeline import Killed, Timeline, demand_no_internal_error

JOB = "job"


class Inbox:
    """The messages that have arrived at one end of a stream, for a task of its process."""

    def __init__(self, process: LoopProcess) -> None:
        self._process = process
        self._messages: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> bytes:
        """Return the next message. Raises ConnectionLost after the last message."""
        while not self._messages:
            self._waiting = self._process.create_future()
            await self._waiting
        if self._messages[0] is END:
            raise ConnectionLost("it ended the connection")
        data: bytes = self._messages.popleft()
        return data


class Master(LoopProcess):
    """One master. `fuse` counts down with each write to the disk and each assignment sent; at 0 the process is killed.

    With `disk` None the master has no state directory. If `launched`, it exits by itself as a node's master does.
    """

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        disk: Disk | None,
        started_ms: int,
        invariants: Invariants,
        launched: bool = False,
    ) -> None:
        super().__init__(timeline, name)
        self._launched = launched
        self.fuse: int | None = None
        self.invariants = invariants
        self._streams: list[Stream] = []
        self.run(lambda: self._begin(disk, started_ms))

    def accept(self, stream: Stream) -> None:
        self._streams.append(stream)
        connection = MastersConnection(self, stream)
        self.run(lambda: self._serve(stream, connection))

    def kill(self, silent: bool = False) -> None:
        """Send SIGKILL. If `silent`, the whole machine is lost."""
        self.note("is killed" if not silent else "vanishes with its machine")
        self._go(silent)

    def died(self) -> None:
        self._go(False)

    def note(self, what: str) -> None:
        if not self.invariants.internal_errors_allowed:
            demand_no_internal_error(what)
        super().note(what)

    def burn(self) -> None:
        """Count the fuse down, if one is set."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed

    @property
    def job(self) -> JobHost | None:
        """The only job, if it has begun."""
        return self.jobs._jobs.get(JOB)

    def check_stored(self, wanted: Assignment) -> None:
        """Check that the plan of an assignment is on the disk before the assignment is sent."""
        job = self.job
        if job is None or job._coordinator._recovering_until is not None or not isinstance(job._journal, DiskJournal):
            # There is no journal, or the assignment is not new.
            return
        self.invariants.sending(job._journal.durable, wanted)

    def _begin(self, disk: Disk | None, started_ms: int) -> None:
        # The journal is simulated, and so is its directory.
        directory: Any = None if disk is None else (disk, self.burn)
        idle = IdleShutdown(IDLE_TIMEOUT if self._launched else None, self._exit)
        self.jobs = WatchedJobs(self, directory, started_ms, lambda: idle.follow(self.jobs))
        idle.follow(self.jobs)

    def _exit(self, reason: str) -> None:
        if self.alive:
            self.note(f"exits: {reason}")
            self._go(False)

    def _serve(self, stream: Stream, connection: MastersConnection) -> None:
        session = WatchedSession(self, connection)
        serving = self.create_task(session.run(lambda: None, lambda reason: self.note(f"refuses it: {reason}")))
        serving.add_done_callback(lambda _: stream.close(TO_NODE))

    def _go(self, silent: bool) -> None:
        self.end()
        for stream in self._streams:
            stream.close(TO_NODE, silent=silent, reset=self.timeline.random.random() < 0.3)


class MastersConnection:
    """The master's end of a stream, as `transport.connection.ServerConnection`."""

    def __init__(self, master: Master, stream: Stream) -> None:
        self._master = master
        self._stream = stream
        self._inbox = Inbox(master)
        stream.listen(TO_MASTER, master, self._inbox.put)

    async def send(self, data: bytes) -> None:
        if is_repeatable(data):
            self._master.burn()
        self._stream.send(TO_NODE, data)

    async def receive(self) -> bytes:
        return await self._inbox.get()


class WatchedSession(NodeSession):
    """The session of the product, with the invariant that a plan is stored before it is sent."""

    def __init__(self, master: Master, connection: MastersConnection) -> None:
        self._master = master
        super().__init__(connection, master.jobs, "")

    def send_assignment(self, assignment: Assignment) -> None:
        self._master.check_stored(assignment)
        super().send_assignment(assignment)


class WatchedJobs(Jobs):
    """The jobs of the product, with checks of the invariants for the reports that they accept."""

    def __init__(self, master: Master, directory: Any, started_ms: int, on_change: Callable[[], None]) -> None:
        self._master = master
        super().__init__(directory, started_ms, master.note, on_change)

    def join(self, name: str, connection: NodeConnection, join: Join) -> tuple[JobHost, Welcome]:
        self._master.note(f"hears {join.report.node_id} join")
        job, welcome = super().join(name, connection, join)
        self._master.note(f"in epoch {job._coordinator.plan.epoch}, it said {join.report.epoch}")
        self._master.invariants.admitting(join.report, job._coordinator.nodes)
        return job, welcome

    def receive(self, job: JobHost, connection: NodeConnection, report: NodeReport) -> None:
        super().receive(job, connection, report)
        self._master.invariants.admitting(report, job._coordinator.nodes)


class Masters:
    """Starts masters one after the other, and resolves the master for nodes.

    With `two_places` a master that does not answer is replaced while it may still be running, and some nodes are sent
    to the old master for a while. If `launched`, a node that finds no master starts one.
    """

    def __init__(
        self,
        timeline: Timeline,
        invariants: Invariants,
        disk: Disk | None,
        two_places: bool,
        clock_jumps: bool,
        launched: bool = False,
    ) -> None:
        self._timeline = timeline
        self._invariants = invariants
        self._disk = disk
        self._two_places = two_places
        self._clock_jumps = clock_jumps
        self._launched = launched
        self._unix_ms = 1_700_000_000_000
        self._number = 0
        self._ended = False
        self.all: list[Master] = []
        self.begin()

    @property
    def current(self) -> Master:
        return self.all[-1]

    @property
    def living(self) -> list[Master]:
        return [master for master in self.all if master.alive]

    def begin(self, behind: float = 0.0) -> None:
        """Start a master, with a clock that is that many seconds behind."""
        random = self._timeline.random
        self._number += 1
        self._unix_ms += random.randint(1, 5000)
        started = self._unix_ms + int(self._timeline.now * 1000)
        started -= int(behind * 1000)
        if self._clock_jumps and random.random() < 0.5:
            started -= random.randint(0, 10_000_000)
        self.all.append(
            Master(self._timeline, f"master{self._number}", self._disk, started, self._invariants, self._launched)
        )
        self.current.note("begins")

    def find(self) -> Master | None:
        """Return the master that a node finds when it looks for one."""
        random = self._timeline.random
        if self._launched and not self.current.alive:
            self.begin()
        if self._two_places and random.random() < 0.2:
            return random.choice(self.living) if self.living else None
        return self.current if self.current.alive else None

    def keep_up(self, most: float) -> None:
        """From now on start another master after a master has died, within that many seconds."""
        self._timeline.after(self._timeline.random.uniform(0.05, most), lambda: self._look(most))

    def _look(self, most: float) -> None:
        if self._ended:
            return
        if not self.current.alive or (self._two_places and self.current.stopped):
            self.begin()
        self.keep_up(most)

    def end(self) -> None:
        """Kill all masters, and start none in their place any more."""
        self._ended = True
        for master in self.living:
            master.kill()

    def settle(self) -> None:
        """End all faults: the latest master runs, and the others have ended."""
        for master in self.living:
            if master is not self.current:
                master.kill()
        if self.current.alive:
            self.current.resume()
            self.current.fuse = None
        if not self.current.alive:
            self.begin()
        if self._disk is not None:
            self._disk.full = False
