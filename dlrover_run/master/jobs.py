"""All jobs of a master. A job begins with its first node, decides once per turn of the loop for all reports that came
in it, and is deleted when no node can need it any more."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import NodeKey, NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.master.handshake import RequestRefused, internal_error
from dlrover_run.master.job import Job, NodeConnection
from dlrover_run.master.journal import Journal, JournalDamaged
from dlrover_run.policies.parameter_servers.text import job_size
from dlrover_run.rendezvous.failure_detector import StallDetector
from dlrover_run.transport.messages import InvalidMessage, Join, Refused, Welcome, decode_rules

MAX_JOBS = 1000
"""Jobs that a master coordinates at a time."""

REPORT_STALLS_FROM = 3.0
"""Seconds of stall from which on the master prints a line."""


class Jobs:
    """The jobs, and the timers that they need. `started_ms` is the Unix time in ms at which the master began: with it
    the coordinators of one master are later than those of the one before. `on_change` is called when a node came or
    went or a job was forgotten. `report` has lines about jobs that are for whoever started the master.
    """

    def __init__(
        self,
        state_dir: Path | None,
        started_ms: int,
        say: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._state_dir = state_dir
        # Two successive jobs of one name must not have a round in common.
        self._epochs = itertools.count(started_ms)
        self._say = say
        self._on_change = on_change
        self._report = report
        self._jobs: dict[str, Job] = {}
        self._unsettled: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._given_up: set[str] = set()
        self._complaint = ""
        self._stalls = StallDetector(self._loop.time())
        self._beat: asyncio.TimerHandle | None = None
        self.last_one_over = False

    @property
    def lines(self) -> int:
        """How many nodes are connected, over all jobs."""
        return sum(job.lines for job in self._jobs.values())

    @property
    def empty(self) -> bool:
        """Whether there is no job."""
        return not self._jobs

    def join(self, name: str, line: NodeConnection, join: Join) -> tuple[Job, Welcome]:
        """Take a node into the job of that name, which begins with its first one. Raises RequestRefused."""
        try:
            rules = decode_rules(join.rules)
        except InvalidMessage as error:
            raise RequestRefused(str(error)) from None
        now = self._now()
        job = self._jobs.get(name)
        if job is None:
            if join.status.cluster is not None and join.status.cluster.is_client:
                raise RequestRefused(f"no node of a job {name!r} is here")
            job = self._begin(name, rules, now)
        self._settle_soon(name)
        welcome = job.admit(line, join.status, rules, now)
        self._on_change()
        return job, welcome

    def hear(self, job: Job, line: NodeConnection, status: NodeReport) -> None:
        """Take a node's latest status. Raises RequestRefused."""
        if job.hear(line, status, self._now()):
            self._settle_soon(job.name)

    def part(self, job: Job, line: NodeConnection, key: NodeKey) -> None:
        """A node's stream has ended."""
        job.part(line, key, self._now())
        if self._jobs.get(job.name) is job:
            self._settle_soon(job.name)
            self._on_change()

    def close(self, reason: str) -> None:
        """End every stream; the journals stay, for a successor."""
        for job in list(self._jobs.values()):
            self._drop(job)
            job.close(Refused(reason, retry=True))
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def _begin(self, name: str, rules: JobRules, now: float) -> Job:
        if len(self._jobs) >= MAX_JOBS:
            raise RequestRefused(f"this master coordinates {MAX_JOBS} jobs and takes no more", retry=True)
        journal, coordinator = None, None
        if self._state_dir is not None:
            journal = Journal(self._state_dir, name)
            coordinator = self._take_over(name, journal, rules, now)
        if coordinator is None:
            coordinator = Coordinator(rules, now, next(self._epochs))
        if coordinator.plan.key.number == 0:
            nodes = (
                f"{rules.min_nodes}"
                if rules.min_nodes == rules.max_nodes
                else f"{rules.min_nodes} to {rules.max_nodes}"
            )
            size = f"{nodes} nodes" if rules.cluster is None else job_size(rules.cluster)
            self._say(f"job {name!r}: begins, for {size}")
        job = Job(name, coordinator, journal, now, self._say, self._report)
        self._jobs[name] = job
        self.last_one_over = False
        if self._beat is None:
            self._stalls = StallDetector(now)
            self._on_beat()
        return job

    def _take_over(self, name: str, journal: Journal, rules: JobRules, now: float) -> Coordinator:
        if name in self._given_up and journal.exists():
            raise RequestRefused(
                "another master has taken this job over; make its address known to the nodes, or start this master "
                "again to have the job back",
                retry=True,
            )
        try:
            story = journal.take_over(rules, next(self._epochs))
        except JournalDamaged as damage:
            journal.close()
            self._complain(f"job {name!r}: {damage}")
            raise RequestRefused(str(damage)) from None
        except OSError as error:
            journal.close()
            reason = f"the master cannot use {journal.path}: {error.strerror}"
            self._complain(f"job {name!r}: {reason}")
            raise RequestRefused(reason, retry=True) from None
        self._given_up.discard(name)
        if story.plan is not None:
            self._say(f"job {name!r}: goes on from {journal.path}, round {story.plan.key.number}")
        return Coordinator(story.header.rules, now, story.header.epoch, story.plan)

    def _complain(self, line: str) -> None:
        """Print once why a job cannot begin, not for each of its nodes and their attempts."""
        if line != self._complaint:
            self._complaint = line
            self._say(line)

    def _now(self) -> float:
        """The time. Subtracts the time for which this process was stalled from all timeouts."""
        now = self._loop.time()
        late = self._stalls.stalled_for(now)
        if late:
            for job in self._jobs.values():
                job.excuse(late, now)
            if late >= REPORT_STALLS_FROM:
                self._say(f"this master was stopped or overloaded for {late:.1f} s; its nodes get as much more time")
        return now

    def _on_beat(self) -> None:
        self._now()
        self._beat = self._loop.call_at(self._stalls.next_check, self._on_beat) if self._jobs else None

    def _settle_soon(self, name: str) -> None:
        if not self._unsettled:
            # After all that comes in this turn of the loop.
            self._loop.call_soon(self._settle)
        self._unsettled.add(name)

    def _settle(self) -> None:
        now = self._now()
        names, self._unsettled = self._unsettled, set()
        for name in names & self._jobs.keys():
            job = self._jobs[name]
            try:
                job.settle(now)
            except Exception as defect:
                # A defect in one job must not end the others. Its nodes train on and reconnect.
                sentence = internal_error(defect)
                self._say(f"job {name!r}: {sentence}")
                self._drop(job)
                job.close(Refused(sentence, retry=True))
                continue
            if job.stepped_down is not None:
                self._drop(job)
                if job.replaced:
                    self._given_up.add(name)
            elif job.forgettable(now):
                self._drop(job)
                job.forget()
                self.last_one_over = job.over
            else:
                self._wake(job)
        self._on_change()

    def _wake(self, job: Job) -> None:
        timer = self._timers.pop(job.name, None)
        if timer is not None:
            timer.cancel()
        time = job.wake_at()
        if time is not None:
            self._timers[job.name] = self._loop.call_at(time, self._settle_soon, job.name)

    def _drop(self, job: Job) -> None:
        del self._jobs[job.name]
        timer = self._timers.pop(job.name, None)
        if timer is not None:
            timer.cancel()
