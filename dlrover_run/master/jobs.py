"""All jobs of a master. A job begins with its first node, decides once per turn of the event loop for all reports that
arrived in it, and is deleted when no node can need it any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import JUST_BEGUN, OperatorRequest, RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.coordination.take_over import misfit
from dlrover_run.job_status import stacks
from dlrover_run.job_status.history import JobHistory
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.status import JobStatus
from dlrover_run.master.job import JobHost, NodeConnection, RequestRefused
from dlrover_run.master.journal import Journal, JournalDamaged
from dlrover_run.rendezvous.failure_detector import PauseDetector
from dlrover_run.transport.messages import Answered, InvalidMessage, Join, Refused, Welcome, decode_rules
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.words.reasons import render
from dlrover_run.words.text import counted

MAX_JOBS = 1000
"""Maximum jobs that a master coordinates at a time."""

MAX_ENDED = 1000
"""Names of ended jobs that a master remembers, for nodes that come back later."""

MOVED_RETENTION = 15.0
"""Seconds for which a master sends the nodes of a job to its successor, which repeats every `RECALL_INTERVAL` that it
has the job."""

LOG_STALLS_FROM = 3.0
"""Seconds from which on a stall of the master is logged."""


OF_MASTER = " of the master"
"""Where an internal error is, in its text: a node prints it too."""


def _moved_text(name: str, address: str) -> str:
    return f"the job {name!r} goes on with a master on {address}"


class Jobs:
    """The jobs and their timers. `started_ms` is the Unix time in ms at which the master started: it makes the
    coordinators of this master later than those of its predecessor. `on_change` is called when a node connects or
    disconnects or a job is deleted. For `log` and `log_to_launcher` see `JobHost`.
    """

    def __init__(
        self,
        state_dir: Path | None,
        started_ms: int,
        log: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        log_to_launcher: Callable[[str], None] = lambda line: None,
        names_successors: bool = False,
        lost: LostMaster | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._state_dir = state_dir
        # Two successive jobs of one name must not have a round in common.
        self._epochs = itertools.count(started_ms)
        self._log = log
        self._on_change = on_change
        self._log_to_launcher = log_to_launcher
        self._jobs: dict[str, JobHost] = {}
        self._listeners: list[Callable[[], None]] = []
        self._on_end: Callable[[JobStatus, JobHistory], None] = lambda status, history: None
        self._due: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._taken_over: set[str] = set()
        self._ended: dict[str, int] = {}
        self._moved: dict[str, tuple[str, float]] = {}
        self._names_successors = names_successors
        self._lost = lost
        self._last_problem = ""
        self._pauses = PauseDetector(self._loop.time())
        self._pause_timer: asyncio.TimerHandle | None = None
        self.last_one_over = False

    @property
    def connected(self) -> int:
        return sum(job.connected for job in self._jobs.values())

    @property
    def empty(self) -> bool:
        """Whether no job is here. The master asks with each change of its jobs, and when it ends."""
        return not self._jobs

    @property
    def keeps_result(self) -> bool:
        """Whether a job is over whose result a disconnected node may still ask for, for at most RESULT_RETENTION."""
        return any(job.over for job in self._jobs.values())

    def join(self, name: str, connection: NodeConnection, join: Join) -> tuple[JobHost, Welcome]:
        """Add a node to the job of that name; the first node begins the job. Raises RequestRefused."""
        try:
            rules = decode_rules(join.rules)
        except InvalidMessage as error:
            raise RequestRefused(str(error)) from None
        if 0 < join.report.epoch <= self._ended.get(name, 0):
            # Its tasks belong to that job, and are not to begin another one of this name, nor to be part of it.
            raise RequestRefused(f"the job {name!r} has ended while this node was not connected to it", over=True)
        now = self._now()
        job = self._jobs.get(name)
        moved, until = self._moved.get(name, ("", 0.0))
        if now < until:
            raise RequestRefused(_moved_text(name, moved), retry=True, moved=moved)
        if job is None:
            job = self._begin(name, rules, now)
            if job.over and not join.report.epoch and job.is_unneeded(now):
                # The masters before this one have kept the result for long enough. A node of that job still gets it.
                self._delete(job, now)
                job = self._begin(name, rules, now)
        self._schedule(name)
        welcome = job.join(connection, join.report, rules, now)
        self._on_change()
        return job, welcome

    def receive(self, job: JobHost, connection: NodeConnection, report: NodeReport) -> None:
        before = job.activity_changes
        if job.receive(connection, report, self._now()):
            self._schedule(job.name)
        elif job.activity_changes != before:
            self._notify()

    def disconnect(self, job: JobHost, connection: NodeConnection, key: NodeKey) -> None:
        job.disconnect(connection, key, self._now())
        if self._jobs.get(job.name) is job:
            self._schedule(job.name)
            self._on_change()

    def answer(self, name: str, request: OperatorRequest | None) -> Answered:
        """Answer an operator, after carrying out the request, if there is one."""
        now = self._now()
        job = self._jobs.get(name)
        if job is None:
            return self._no_job(name)
        refusal, answer = "", ""
        if request is not None:
            number = job.request(request, now)
            self._due.add(name)
            self._step()
            if (answered := job.answer(number)) is not None:
                refusal, answer = answered.refusal, render(answered.answer)
            elif job.write_error:
                refusal = f"{job.write_error}; it is carried out if this master can do so before it ends"
            else:
                refusal = job.stepped_down or JUST_BEGUN
        status = msgspec.structs.replace(job.status(now), answer=answer)
        return Answered(msgspec.Raw(msgspec.json.encode(status)), refusal)

    async def stacks(self, name: str, query: StackQuery) -> Answered:
        """The stacks of the workers of a job, from the nodes that answer in time."""
        job = self._jobs.get(name)
        if job is None:
            return self._no_job(name)
        done = asyncio.Event()
        try:
            request = job.ask_for_stacks(query, done.set)
        except RequestFailed as failed:
            return Answered(msgspec.Raw(msgspec.json.encode(job.status(self._now()))), str(failed))
        try:
            with contextlib.suppress(TimeoutError):
                async with TimeLimit(stacks.NODE_TIMEOUT):
                    await done.wait()
        finally:
            found = job.end_stacks(request)
        return Answered(stacks=msgspec.Raw(msgspec.json.encode(found)))

    def log_frames(self, error: Exception) -> None:
        """Log with LOGLEVEL=DEBUG where an internal error of a session was raised, after its text."""
        log_frames(self._log, error)

    def move(self, name: str, address: str) -> Answered:
        """Leave a job to the successor at that address, and send its nodes there. The session of a successor that asks
        for it (`Ask.moved`) calls it."""
        if name not in self._moved and len(self._moved) >= MAX_JOBS:
            del self._moved[next(iter(self._moved))]
        self._moved[name] = (address, self._now() + MOVED_RETENTION)
        job = self._jobs.get(name)
        if job is not None:
            text = _moved_text(name, address)
            self._log(text)
            self._drop(job)
            job.close(Refused(text, retry=True, moved=address))
            self._on_change()
        return Answered()

    def _no_job(self, name: str) -> Answered:
        known = ", ".join(map(repr, sorted(self._jobs)[:3]))
        return Answered(refusal=f"no job {name!r} runs here" + (f", but {known}" if known else ""))

    def names(self) -> list[str]:
        return sorted(self._jobs)

    def report(self, name: str) -> tuple[JobStatus, JobHistory] | None:
        """The status and the history of a job; None if there is none of that name."""
        job = self._jobs.get(name)
        return None if job is None else (job.status(self._now()), job.history)

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after each step of a job, and when what its nodes do has changed; returns what ends that."""
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)

    def on_end(self, call: Callable[[JobStatus, JobHistory], None]) -> None:
        """Call that with the last status and history of each job that is over, when nothing else knows it any more."""
        self._on_end = call

    def close(self, reason: str) -> None:
        """End every stream; the journals stay, for a successor."""
        for job in list(self._jobs.values()):
            self._drop(job)
            job.close(Refused(reason, retry=True))
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None

    def _begin(self, name: str, rules: JobRules, now: float) -> JobHost:
        if len(self._jobs) >= MAX_JOBS:
            raise RequestRefused(f"this master coordinates {MAX_JOBS} jobs and takes no more", retry=True)
        if self._state_dir is None:
            journal = None
            coordinator = Coordinator(
                rules,
                now,
                next(self._epochs),
                names_successors=self._names_successors,
                lost=self._lost,
            )
        else:
            journal = Journal(self._state_dir, name)
            coordinator = self._take_over(name, journal, rules, now)
        if coordinator.plan.key.number == 0:
            least = f"{rules.min_nodes} to " if rules.max_nodes != rules.min_nodes else ""
            size = rules.size_text or least + counted(rules.max_nodes, "node")
            self._log(f"job {name!r}: begins, for {size}")
        job = self._jobs[name] = JobHost(
            name,
            coordinator,
            journal,
            now,
            self._log,
            self._log_to_launcher,
            plan_age=0.0 if journal is None else journal.plan_age,
        )
        self.last_one_over = False
        if self._pause_timer is None:
            self._pauses = PauseDetector(now)
            self._check_for_pause()
        return job

    def _take_over(self, name: str, journal: Journal, rules: JobRules, now: float) -> Coordinator:
        if name in self._taken_over and journal.path.exists():
            raise RequestRefused(
                "another master has taken this job over; point the nodes to its address, or restart this master to "
                "take the job back",
                retry=True,
            )
        try:
            contents = journal.take_over(rules, next(self._epochs))
        except (JournalDamaged, OSError) as error:
            journal.close()
            problem, retry = str(error), isinstance(error, OSError)
            if isinstance(error, OSError):
                problem = f"the master cannot use {journal.path}: {error.strerror}"
            self._refuse_journal(name, problem, retry)
        if contents.plan is not None and (unfit := misfit(contents.header.rules, contents.plan)):
            journal.close()
            self._refuse_journal(
                name,
                f"the journal {journal.path} has {unfit}. Move it away: the round is then recovered from the nodes "
                "of the job that still run; without any the job starts again",
                retry=False,
            )
        self._taken_over.discard(name)
        if contents.plan is not None:
            self._log(f"job {name!r}: continues from {journal.path}, round {contents.plan.key.number}")
        return Coordinator(
            contents.header.rules,
            now,
            contents.header.epoch,
            contents.plan,
            names_successors=self._names_successors,
            lost=self._lost,
        )

    def _refuse_journal(self, name: str, problem: str, retry: bool) -> NoReturn:
        """Refuse a node because of the job's journal. Raises RequestRefused."""
        line = f"job {name!r}: {problem}"
        # Logged once, not for each of the job's nodes and their attempts.
        if line != self._last_problem:
            self._last_problem = line
            self._log(line)
        raise RequestRefused(problem, retry=retry) from None

    def _now(self) -> float:
        """The time. Subtracts the time for which this process was stalled from all timeouts."""
        now = self._loop.time()
        stalled = self._pauses.paused_for(now)
        if stalled:
            for job in self._jobs.values():
                job.compensate_stall(stalled, now)
            if stalled >= LOG_STALLS_FROM:
                self._log(f"this master was stopped or overloaded for {stalled:.1f} s; its nodes get as much more time")
        return now

    def _check_for_pause(self) -> None:
        self._now()
        self._pause_timer = self._loop.call_at(self._pauses.next_check, self._check_for_pause) if self._jobs else None

    def _schedule(self, name: str) -> None:
        """Step this job after all reports that arrive in this turn of the event loop."""
        if not self._due:
            self._loop.call_soon(self._step)
        self._due.add(name)

    def _step(self) -> None:
        now = self._now()
        names, self._due = self._due, set()
        for name in names & self._jobs.keys():
            job = self._jobs[name]
            self._cancel_timer(name)
            try:
                job.step(now)
            except Exception as error:
                # A defect in one job must not end the others. Its nodes continue training and reconnect.
                # It is also sent to the nodes, because a launched master has no console.
                text = internal_error(error, OF_MASTER)
                self._log(f"job {name!r}: {text}")
                self.log_frames(error)
                self._drop(job)
                job.close(Refused(text, retry=True))
                continue
            if job.stepped_down is not None:
                self._drop(job)
                if job.replaced:
                    self._taken_over.add(name)
            elif job.is_unneeded(now):
                self._delete(job, now)
            elif (time := job.wake_at()) is not None:
                self._timers[name] = self._loop.call_at(time, self._schedule, name)
        self._on_change()
        self._notify()

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def _delete(self, job: JobHost, now: float) -> None:
        """Delete a job that no node needs any more, with its journal."""
        self._drop(job)
        job.delete()
        self.last_one_over = job.over
        if job.over:
            self._on_end(job.status(now), job.history)
            self._note_ended(job)

    def _note_ended(self, job: JobHost) -> None:
        self._ended[job.name] = job.epoch
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _drop(self, job: JobHost) -> None:
        del self._jobs[job.name]
        self._cancel_timer(job.name)

    def _cancel_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
