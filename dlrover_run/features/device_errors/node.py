"""Errors of devices as a feature of a node: which of them explain a failure, and when the node has to leave."""

from __future__ import annotations

from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult, NodeRefused
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.devices import holders
from dlrover_run.devices.gpu_state import GpuState
from dlrover_run.devices.xids import XidClass, classify
from dlrover_run.events.records import DeviceErrorSeen
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.failures.worker_exit import DeviceError
from dlrover_run.features.device_errors.explain import explain, gpu_of, memory_errors_of
from dlrover_run.features.device_errors.listener import DriverListener
from dlrover_run.features.device_errors.messages import WatchedGpu, XidSeen
from dlrover_run.observe.tick import SAMPLE_INTERVAL, Activities
from dlrover_run.processes import tree
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker

MAX_ERRORS = 1000
"""Errors of one round that are kept: one fault may be reported hundreds of times."""

MAX_PRINTED = 8
"""Errors of one round that are printed."""

MAX_LOOK_INTERVAL = 64.0
"""Seconds between two looks at which workers hold a device, at most: they open it once, after their imports."""

MAX_PIDS = 64
"""Processes of one worker that are compared with those that the driver names."""


class DeviceErrors(WorkersFeature):
    """Listens to the driver from the first round on. A failure that is explained by an error after which a GPU cannot
    be used makes this node leave: it would fail again, and the others go on without a charge."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._listener = DriverListener(self._note_error, self._note_watching)
        self._round: WorkerRound | None = None
        self._errors: list[XidSeen] = []
        self._printed = 0
        self._warned = False
        self._before: dict[int, GpuState] = {}
        """The states of the GPUs when the round began."""
        self._users: dict[int, frozenset[int]] = {}
        """The workers that were seen to hold a device, by pid, with the processes below them."""
        self._explained: dict[int, DeviceError] = {}
        self._look_after = SAMPLE_INTERVAL
        services.tick.add("which workers hold a device", self._look, first=SAMPLE_INTERVAL)

    @property
    def pids(self) -> set[int]:
        return self._listener.pids

    def round_begins(self, workers: WorkerRound) -> None:
        self._round = workers
        self._errors, self._printed, self._explained, self._users = [], 0, {}, {}
        self._look_after = SAMPLE_INTERVAL
        workers.explain_by_devices(self._find)

    def round_runs(self, workers: WorkerRound) -> None:
        # Not earlier: no worker waits for it, and none uses a device before it has imported its framework.
        try:
            self._listener.start()
        except OSError as error:
            self._services.console.info(f"warning: errors of devices are not seen: {error.strerror or error}")
        self._services.start(self._read_states())

    def add_to_report(self, report: NodeReport) -> NodeReport:
        failure = report.failure
        error = None if failure is None else self._explained.get(failure.rank)
        if failure is not None and error is not None and error.remedy:
            raise NodeRefused(
                f"rank {failure.rank} {failure.exit_text}; this node leaves the job: {error.remedy}",
                ExitReason.FAULTY_NODE,
            )
        return report

    async def close(self, result: JobResult) -> None:
        await self._listener.close()

    async def _read_states(self) -> None:
        self._before = await self._listener.states()

    def _note_watching(self, gpus: tuple[WatchedGpu, ...]) -> None:
        self._services.start(self._read_states())
        refused = [gpu for gpu in gpus if gpu.problem]
        if refused and not self._warned:
            self._warned = True
            names = ", ".join(str(gpu.index) for gpu in refused)
            self._services.console.info(
                f"warning: the driver reports no errors of GPU {names} to this user (NVML: {refused[0].problem}): only "
                "its state after a failure is known"
            )

    def _note_error(self, error: XidSeen) -> None:
        kind, text, _ = classify(error.number)
        self._look_at_workers()
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(error)
            self._services.events.emit(DeviceErrorSeen(device=error.index, number=error.number, kind=kind.value))
        if kind not in (XidClass.NOTE, XidClass.PROGRAM) and self._printed < MAX_PRINTED:
            self._printed += 1
            self._services.console.info(f"warning: Xid {error.number} of GPU {error.index} ({text}): {kind}")

    def _look(self, sample: Activities) -> float:
        """Which workers hold a device. A worker that has ended cannot be looked at any more."""
        self._look_at_workers()
        if self._round is not None and {one.pid for one in self._round.group.running} <= self._users.keys():
            return MAX_LOOK_INTERVAL
        self._look_after = min(MAX_LOOK_INTERVAL, 2 * self._look_after)
        return self._look_after

    def _look_at_workers(self) -> None:
        for worker in () if self._round is None else self._round.group.running:
            if worker.pid not in self._users:
                below = tree.below(worker.pid, MAX_PIDS)
                if any(holders.holds_device(pid) for pid in below):
                    self._users[worker.pid] = frozenset(below)

    async def _find(self, worker: Worker) -> DeviceError | None:
        """What explains the end of a worker (`cause_collector.FindDeviceError`)."""
        # The answer comes after what was reported before it.
        states = await self._listener.states()
        errors = list(self._errors)
        pids = self._users.get(worker.pid, frozenset({worker.pid}))
        named = next((error for error in errors if not pids.isdisjoint(error.pids)), None)
        if named is None and worker.pid not in self._users:
            # It may have used no device at all.
            return None
        visible = worker.spec.environment.get("CUDA_VISIBLE_DEVICES")
        index = gpu_of(self._listener.gpus, visible, worker.spec.local_rank, named, pids)
        if index is None:
            return None
        found = explain(index, worker.ended_at, errors, states.get(index), memory_errors_of(self._before, index))
        if found is not None:
            self._explained[worker.spec.rank] = found
        return found


NODE = DeviceErrors
