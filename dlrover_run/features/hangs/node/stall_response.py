"""What follows a stall of a round: a line on the console, events, the stacks in a file, and, on request, a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.activity import WAITS
from dlrover_run.coordination.model import Assignment, NodeReport
from dlrover_run.coordination.parts import with_part
from dlrover_run.features.events.records import WorkerResumed, WorkerStalled
from dlrover_run.features.hangs.node.round_stragglers import RoundStragglers
from dlrover_run.features.hangs.node.stall_report import StallReport, show_stacks
from dlrover_run.features.hangs.node.stall_watch import QuietNode, StallWatch
from dlrover_run.features.hangs.node.watch_health import WatchHealth
from dlrover_run.features.hangs.search.detector import Resumed
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.round_detectors import ENOUGH_WITNESSES, RoundDetectors
from dlrover_run.features.hangs.settings import HangSettings, StallAction
from dlrover_run.features.hangs.stacks.read import RoundStacks
from dlrover_run.features.hangs.stalls.model import MAX_SUSPECTS, StallAssignment, StallNodeReport, StallQuestion
from dlrover_run.features.observe.page import Progress
from dlrover_run.features.observe.records import Evidence
from dlrover_run.features.observe.sample import Sampler
from dlrover_run.features.observe.tick import Consumer, Tick
from dlrover_run.words.text import format_ranks
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker


def watch_stalls(
    workers: WorkerRound, settings: HangSettings, services: AgentServices, health: WatchHealth, pauses: LearnedPauses
) -> RoundStalls | None:
    """Watch the workers of a round for stalls, until `close`; None where they cannot be watched."""
    running, ranks = workers.group.running, workers.ranks
    if workers.group.ended or (ranks.nodes > 1 and not services.job.rendezvous.coordinated):
        # Static nodes do not communicate, and the rank that one of them names could be wrong.
        return None
    sampling = Sampler({one.spec.rank: one.pid for one in running}, ranks.store_port)
    stacks = RoundStacks(lambda: {one.spec.rank: one.pid for one in workers.group.running}, health.note_denied)
    response = StallResponse(workers, settings.action, services)
    detectors = RoundDetectors(settings.timeout, elsewhere=ranks.nodes > 1, earlier=pauses.rhythm)
    tick = services.tick

    def progress() -> Mapping[int, Progress]:
        """What the workers have done by the last sample."""
        known = ((one.spec.rank, tick.latest.get(one.spec.name)) for one in workers.group.running)
        return {rank: activity.progress for rank, activity in known if activity is not None}

    stragglers = RoundStragglers(workers, services.events, services.wake, progress) if ranks.world_size > 1 else None

    def keep_rhythm() -> None:
        pauses.rhythm = detectors.pauses

    stalls = RoundStalls(workers, services.wake, stragglers, detectors.witnesses, keep_rhythm)
    on_quiet = stalls.note_quiet if ranks.nodes > 1 else None
    watch = StallWatch(
        detectors,
        sampling,
        stacks,
        response.on_stall,
        response.on_resume,
        lambda: {rank: done.steps for rank, done in progress().items()},
        on_quiet,
        stalls.observe,
        health=health,
        pauses=pauses,
    )
    stalls.begin(watch, tick)
    return stalls


class RoundStalls:
    """The watch of one round, and what this node and the coordinator exchange about it. `wake` has a report built;
    `witnesses` is that of `RoundDetectors`, `on_close` is called when the watch ends."""

    def __init__(
        self,
        workers: WorkerRound,
        wake: Callable[[], None],
        stragglers: RoundStragglers | None = None,
        witnesses: Callable[[float], int] = lambda since: 0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._wake = wake
        self._stragglers = stragglers
        self._witnesses = witnesses
        self._on_close = on_close
        self._watch: StallWatch | None = None
        self._consumer: Consumer | None = None
        self._quiet: StallNodeReport | None = None
        self._confirmed = 0
        self._confirmed_alone = 0
        self._question = 0
        self._asked_at: float | None = None
        self._found = 0

    def begin(self, watch: StallWatch, tick: Tick) -> None:
        """Begin to watch, with the next sample of the workers."""
        self._watch = watch
        self._consumer = tick.add("hangs", lambda sample: watch.take())

    def note_end(self, worker: Worker) -> None:
        """A worker has ended. After a failure, or when workers are stopped, the others only wait for their own end."""
        if worker.code != 0 or worker.stopped_with is not None or not self._workers.group.running:
            self.close()
        elif self._watch is not None:
            self._watch.note_end(worker.spec.rank)

    def note_quiet(self, quiet: QuietNode | None) -> None:
        """Report that the workers of this node make no progress, or that they do again."""
        if quiet is None or len(quiet.suspects) > MAX_SUSPECTS:
            self._quiet = None
        else:
            self._quiet = StallNodeReport(quiet.number, quiet.trains, quiet.suspects, quiet.partly)
        self._wake()

    def observe(self, samples: Sequence[Evidence]) -> None:
        """Take the evidence of all workers at one time: answer the question of the coordinator as soon as workers have
        trained since."""
        if self._stragglers is not None:
            self._stragglers.observe(samples)
        if not self._question or self._found >= ENOUGH_WITNESSES:
            return
        if self._asked_at is None:
            self._asked_at = samples[0].at
        found = self._witnesses(self._asked_at)
        if found > self._found:
            self._found = found
            self._wake()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report of this node together with what the watch has found in the round that it is about."""
        if not report.in_round(self._workers.key):
            return report
        if self._stragglers is not None and self._consumer is not None:
            report = self._stragglers.add_to_report(report)
        part = self._quiet
        if self._found:
            part = msgspec.structs.replace(part or StallNodeReport(), answered=self._question, witnesses=self._found)
        if part is None:
            return report
        return msgspec.structs.replace(report, parts=with_part(report.parts, part))

    def follow(self, assignment: Assignment) -> None:
        """Take what the coordinator has found, each finding once."""
        if self._stragglers is not None and self._consumer is not None:
            self._stragglers.follow(assignment)
        part = StallAssignment.get(assignment.parts)
        self._take_question(part.question)
        found = part.finding
        # Without a quiet worker the finding crossed the report that the workers of this node make progress again.
        if self._watch is None or self._quiet is None or found is None or found.key != self._workers.key:
            return
        if found.alone and found.number != self._confirmed_alone:
            self._confirmed_alone = found.number
        elif not found.alone and found.number > self._confirmed:
            self._confirmed = found.number
        else:
            return
        self._watch.confirm(found.ranks, found.reasons, found.to_restart, found.nodes, found.alone)

    def _take_question(self, question: StallQuestion | None) -> None:
        number = 0 if question is None or question.key != self._workers.key else question.number
        if number != self._question:
            answered, self._question, self._asked_at, self._found = self._found, number, None, 0
            if answered:
                self._wake()

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._on_close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._quiet = None
        self._question = self._found = 0


class StallResponse:
    """The response to the stalls of one round. Each action includes those before it: report, dump, restart."""

    def __init__(self, workers: WorkerRound, action: StallAction, services: AgentServices) -> None:
        self._workers = workers
        self._action = action
        self._services = services

    def on_stall(self, report: StallReport) -> None:
        """Report a stall, and carry out the action. Workers that are being stopped have their own timeout."""
        stopping = any(worker.stopped_with is not None for worker in self._workers.group.running)
        if stopping or self._services.shutdown.wanted:
            return
        ranks = self._workers.ranks
        codes = [reason.code for reason in report.reasons]
        stalled = [
            worker
            for worker in self._workers.group.running
            if not report.is_alone or worker.spec.rank in report.stalled.ranks
        ]
        marks = {one.spec.rank: codes[0] if codes and one.spec.rank in report.guilty else WAITS for one in stalled}
        before = self._workers.stalled if report.is_alone else {}
        self._workers.stalled = {**before, **marks}
        for worker in stalled:
            if before.get(worker.spec.rank) == marks[worker.spec.rank]:
                continue
            guilty = worker.spec.rank in report.guilty
            self._services.events.emit(
                WorkerStalled(
                    round=ranks.round,
                    rank=worker.spec.rank,
                    local_rank=worker.spec.local_rank,
                    since=report.stalled.since,
                    reasons=report.reasons if guilty else (),
                    guilty=guilty,
                )
            )
        if report.is_alone and all(before.get(rank) == codes[0] for rank in report.guilty if rank in marks):
            # Another worker waits for them now.
            return
        self._services.console.info(report.line)
        if self._action in ("dump", "restart"):
            show_stacks(report, f"round {ranks.round}", self._services.run_dir, self._services.console)
        if self._action == "restart":
            here = [one.spec.rank for one in self._workers.group.running if one.spec.rank in report.to_restart]
            if here:
                self._services.console.info("the worker is killed, and its round ends (--stall-action=restart)")
                self._workers.kill(here, "--stall-action=restart, as it made no progress")

    def on_resume(self, resumed: Resumed) -> None:
        """Report that the workers make progress again. With `alone` some were quiet, and perhaps never reported."""
        before = self._workers.stalled
        ranks = before.keys() & set(resumed.ranks)
        if resumed.alone and not ranks:
            return
        self._workers.stalled = {rank: code for rank, code in before.items() if resumed.alone and rank not in ranks}
        for worker in self._workers.group.running:
            if not resumed.alone or worker.spec.rank in ranks:
                self._services.events.emit(
                    WorkerResumed(
                        round=self._workers.ranks.round, rank=worker.spec.rank, local_rank=worker.spec.local_rank
                    )
                )
        whose = format_ranks(tuple(sorted(ranks))) if resumed.alone else "the workers"
        verb = "makes" if resumed.alone and len(ranks) == 1 else "make"
        self._services.console.info(f"{whose} {verb} progress again, after {resumed.seconds:.0f} s")
