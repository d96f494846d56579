"""The watch over the workers of one round, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.features.hangs.collectives.evidence import CollectiveReader
from dlrover_run.features.hangs.collectives.recorder_files import RecorderFiles
from dlrover_run.features.hangs.node.device_use import DeviceUseReader
from dlrover_run.features.hangs.node.diagnosis import CoordinatedDiagnosis, Diagnosis, LocalDiagnosis
from dlrover_run.features.hangs.node.round_stragglers import RoundStragglers
from dlrover_run.features.hangs.node.stall_response import StallResponse
from dlrover_run.features.hangs.node.stall_watch import Sources, StallWatch
from dlrover_run.features.hangs.node.watch_health import WatchHealth
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.round_detectors import RoundDetectors
from dlrover_run.features.hangs.settings import HangSettings
from dlrover_run.observe.page import Progress
from dlrover_run.observe.sample import Sampler
from dlrover_run.observe.tick import Consumer, Tick
from dlrover_run.stacks.read import RoundStacks
from dlrover_run.stacks.wait import read_wait
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker


def watch_round(
    workers: WorkerRound,
    settings: HangSettings,
    services: AgentServices,
    health: WatchHealth,
    pauses: LearnedPauses,
    ras_address: str | None = None,
    recorder: RecorderFiles | None = None,
) -> RoundWatch | None:
    """Watch the workers of a round, until `close`; None where they cannot be watched. NCCL answers for them at
    `ras_address`, and torch by the files of `recorder`. `features.hangs.node` calls it once they run."""
    running, ranks = workers.group.running, workers.ranks
    if workers.group.ended or (ranks.nodes > 1 and not services.job.rendezvous.coordinated):
        # Static nodes do not communicate, and the rank that one of them names could be wrong.
        return None
    tick = services.tick

    def progress() -> Mapping[int, Progress]:
        """What the workers have done by the last sample."""
        known = ((worker.spec.rank, tick.latest.get(worker.spec.name)) for worker in workers.group.running)
        return {rank: activity.progress for rank, activity in known if activity is not None}

    detectors = RoundDetectors(settings.timeout, elsewhere=ranks.nodes > 1, earlier=pauses.rhythm)

    def pids() -> dict[int, int]:
        return {worker.spec.rank: worker.pid for worker in workers.group.running}

    collectives = CollectiveReader(pids, ranks, ras_address, services.events, recorder)
    devices = DeviceUseReader()
    response = StallResponse(workers, settings.action, services, lambda: collectives.latest)
    diagnosis: Diagnosis
    if ranks.nodes > 1:
        diagnosis = CoordinatedDiagnosis(
            workers.key, services.wake, detectors.witnesses, response.on_stall, response.on_resume, pauses
        )
    else:
        diagnosis = LocalDiagnosis(detectors, response.on_stall, response.on_resume, pauses)
    stragglers = RoundStragglers(workers, services.events, services.wake, progress) if ranks.world_size > 1 else None
    sources = Sources(
        Sampler({worker.spec.rank: worker.pid for worker in running}, ranks.store_port),
        RoundStacks(pids, health.note_denied),
        lambda: {rank: done.steps for rank, done in progress().items()},
        waits=lambda: {rank: read_wait(pid) for rank, pid in pids().items()},
        positions=collectives.read,
        devices=lambda: devices.read(pids()),
    )
    on_sample = None if stragglers is None else stragglers.observe
    stall_watch = StallWatch(detectors, sources, diagnosis, pauses, on_sample, health)

    def keep_rhythm() -> None:
        pauses.rhythm = detectors.pauses

    watch = RoundWatch(workers, stall_watch, diagnosis, stragglers, keep_rhythm, lambda: response.awaited)
    watch.begin(tick)
    return watch


class RoundWatch:
    """The watch of one round: for stalls, and for stragglers if there are others to wait for them. `on_close` is called
    when it ends, after the end of the round or with the first failure. `awaited` is that of the response."""

    def __init__(
        self,
        workers: WorkerRound,
        watch: StallWatch,
        diagnosis: Diagnosis,
        stragglers: RoundStragglers | None = None,
        on_close: Callable[[], None] = lambda: None,
        awaited: Callable[[], str] = lambda: "",
    ) -> None:
        self._workers = workers
        self._watch = watch
        self._diagnosis = diagnosis
        self._stragglers = stragglers
        self._on_close = on_close
        self._awaited = awaited
        self._consumer: Consumer | None = None

    def begin(self, tick: Tick) -> None:
        """Begin to watch, with the next sample of the workers."""
        self._consumer = tick.add("hangs", lambda sample: self._watch.take())

    @property
    def awaited(self) -> str:
        """The operation in which workers wait that make no progress; empty if they make some, or it is not known."""
        return self._awaited()

    def note_end(self, worker: Worker) -> None:
        """A worker has ended. After a failure, or when workers are stopped, the others only wait for their own end."""
        if worker.code != 0 or worker.stopped_with is not None or not self._workers.group.running:
            self.close()
        elif self._consumer is not None:
            self._watch.note_end(worker.spec.rank)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report of this node together with what the watch has found in the round that it is about."""
        if self._consumer is None or not report.in_round(self._workers.key):
            return report
        if self._stragglers is not None:
            report = self._stragglers.add_to_report(report)
        return self._diagnosis.add_to_report(report)

    def follow(self, assignment: Assignment) -> None:
        """Take what the coordinator has found and what it asks."""
        if self._consumer is None:
            return
        if self._stragglers is not None:
            self._stragglers.follow(assignment)
        self._diagnosis.follow(assignment)

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._on_close()
            self._watch.close()
