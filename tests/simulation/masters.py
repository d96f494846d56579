"""Masters: the product's `Jobs` in a process that may be stopped or killed at any moment, and who starts the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dlrover_run.coordination.records import OVER, Assignment, NodeKey
from dlrover_run.master.handshake import RequestRefused
from dlrover_run.master.job import Job
from dlrover_run.master.jobs import Jobs
from dlrover_run.transport.messages import Assigned, Join, Refused, Report
from simulation.disk import Disk, DiskJournal
from simulation.laws import Laws
from simulation.network import END, TO_MASTER, TO_NODE, Stream
from simulation.timeline import Killed, Process, Timeline, demand

JOB = "job"


class Master(Process):
    """One master. `fuse` counts down with each write to the disk and each word to a node; at 0 the process is killed.

    `disk` None is a master without a state directory.
    """

    def __init__(self, timeline: Timeline, name: str, disk: Disk | None, started_ms: int, laws: Laws) -> None:
        super().__init__(timeline, name)
        self.fuse: int | None = None
        self.laws = laws
        self._streams: list[Session] = []
        self._with_loop(lambda: self._begin(disk, started_ms))

    def accept(self, stream: Stream) -> None:
        """A node opens a stream; its first message is `Join`."""
        self._streams.append(Session(self, stream))

    def kill(self, silent: bool = False) -> None:
        """SIGKILL; `silent` is the loss of its whole machine."""
        self.note("is killed" if not silent else "vanishes with its machine")
        self._go(silent)

    def died(self) -> None:
        self._go(False)

    def burn(self) -> None:
        """One step nearer to the end, where one is set."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed

    @property
    def job(self) -> Job | None:
        """The one job, when it was begun."""
        return self.jobs._jobs.get(JOB)

    def may_tell(self, wanted: Assignment) -> None:
        """Nobody is told of a plan that is not on the disk."""
        job = self.job
        if job is None or job._coordinator._adopting_until is not None or not isinstance(job._journal, DiskJournal):
            # No journal, or nobody is told anything new.
            return
        if wanted.check_task is not None or wanted.health is not None:
            known = job._journal.durable
            demand(known is not None, "a check is stored before anybody is told")
            assert known is not None
            asked = (
                known.check is not None and wanted.check_task is not None and known.check.key == wanted.check_task.key
            )
            demand(asked or wanted.check_task is None, "a check is stored before anybody is told")
            demand(wanted.health is None or wanted.health in known.health, "a verdict is stored before it is told")
        if wanted.key.number or wanted.phase in OVER:
            known = job._journal.durable
            demand(known is not None, "a plan is stored before anybody is told")
            assert known is not None
            same = (known.key, known.phase, known.restart_count) == (wanted.key, wanted.phase, wanted.restart_count)
            demand(same, "a plan is stored before anybody is told")

    def _begin(self, disk: Disk | None, started_ms: int) -> None:
        # A stand-in takes the place of the journal, and with it of the directory.
        directory: Any = None if disk is None else (disk, self.burn)
        self.jobs = Jobs(directory, started_ms, self.note)

    def _with_loop(self, act: Callable[[], None]) -> None:
        """`Jobs` asks once which loop it lives in."""
        loop: Any = self
        asyncio._set_running_loop(loop)
        try:
            act()
        finally:
            asyncio._set_running_loop(None)

    def _go(self, silent: bool) -> None:
        self.end()
        for session in self._streams:
            session.stream.close(TO_NODE, silent=silent, reset=self.timeline.random.random() < 0.3)


class Session:
    """The master's end of one stream, after its handshake; also the `Line` by which a job reaches the node."""

    def __init__(self, master: Master, stream: Stream) -> None:
        self.stream = stream
        self._master = master
        self._joined: tuple[Job, NodeKey] | None = None
        self._ended = False
        stream.listen(TO_MASTER, master, self._receive)

    def tell(self, wanted: Assignment) -> None:
        self._master.burn()
        self._master.may_tell(wanted)
        self.stream.send(TO_NODE, Assigned(wanted))

    def end(self, last_word: Refused | None) -> None:
        if self._ended:
            return
        self._ended = True
        if last_word is not None:
            self.stream.send(TO_NODE, last_word)
        self.stream.close(TO_NODE)
        # The stream's own task tells the job in another turn of the loop.
        self._master.call_soon(self._part)

    def _receive(self, message: Any) -> None:
        jobs = self._master.jobs
        if self._ended:
            return
        try:
            if message is END:
                self.end(None)
            elif isinstance(message, Join):
                self._master.note(f"hears {message.status.node_id} join")
                job, welcome = jobs.join(JOB, self, message)
                self._joined = job, message.status.key
                self._master.note(f"in epoch {job._coordinator.plan.epoch}, it said {message.status.epoch}")
                self.stream.send(TO_NODE, welcome)
            elif isinstance(message, Report) and self._joined is not None:
                jobs.hear(self._joined[0], self, message.status)
            self._check(message)
        except RequestRefused as refusal:
            self._master.note(f"refuses it: {refusal}")
            self.end(refusal.last_word)

    def _check(self, message: Any) -> None:
        if self._joined is not None and isinstance(message, (Join, Report)):
            self._master.laws.admitting(message.status, self._joined[0]._coordinator._present)

    def _part(self) -> None:
        if self._joined is not None:
            job, key = self._joined
            self._master.jobs.part(job, self, key)


class Masters:
    """Starts masters one after the other, and knows where nodes find one.

    With `two_places` a master that does not answer is replaced while it may still live, and some nodes are sent to the
    old one for a while.
    """

    def __init__(self, timeline: Timeline, laws: Laws, disk: Disk | None, two_places: bool, clock_jumps: bool) -> None:
        self._timeline = timeline
        self._laws = laws
        self._disk = disk
        self._two_places = two_places
        self._clock_jumps = clock_jumps
        self._unix_ms = 1_700_000_000_000
        self._number = 0
        self.all: list[Master] = []
        self.begin()

    @property
    def current(self) -> Master:
        """The one that was started last."""
        return self.all[-1]

    @property
    def living(self) -> list[Master]:
        """All that are there, whether they run or not."""
        return [master for master in self.all if master.alive]

    def begin(self) -> None:
        """Start one."""
        random = self._timeline.random
        self._number += 1
        self._unix_ms += random.randint(1, 5000)
        started = self._unix_ms + int(self._timeline.now * 1000)
        if self._clock_jumps and random.random() < 0.5:
            started -= random.randint(0, 10_000_000)
        self.all.append(Master(self._timeline, f"master{self._number}", self._disk, started, self._laws))
        self.current.note("begins")

    def find(self) -> Master | None:
        """Where a node that looks for a master is sent to."""
        random = self._timeline.random
        if self._two_places and random.random() < 0.2:
            return random.choice(self.living) if self.living else None
        return self.current if self.current.alive else None

    def keep_up(self, most: float) -> None:
        """From now on a master that has died is followed by another one, within that many seconds."""
        self._timeline.after(self._timeline.random.uniform(0.05, most), lambda: self._look(most))

    def _look(self, most: float) -> None:
        if not self.current.alive or (self._two_places and self.current.stopped):
            self.begin()
        self.keep_up(most)

    def settle(self) -> None:
        """All faults are over: the latest master runs, and the others are gone."""
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
