"""Generated traces of the workers of a round: what each does, second by second, and a detector that looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlrover_run.features.hangs.search.detector import UNLEARNED_LIMIT, AskStacks, Decision, Detector, Stalled
from dlrover_run.features.hangs.search.round_detectors import RoundDetectors
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic

INTERVAL = 0.5

PROBED = 20
"""Stacks of a busy worker that are read after each sample."""


@dataclass
class Worker:
    """A worker of a generated trace: what it does in each second."""

    rank: int
    bytes: int = 0
    cpu: float = 0.0
    faults: int = 0
    written: int = 0
    read: int = 0
    state: str = "S"
    traced: bool = False
    at_store: bool = True
    data_age: float | None = None
    queued: float = 0.0
    children: dict[int, ProcessFigures] = field(default_factory=dict)
    stack: Callable[[float], tuple[str, ...]] = lambda _: ("train.py:1:wait",)

    def evidence(self, at: float, full: bool = True) -> Evidence:
        figures_of = (self.cpu, self.faults, self.read, self.written, self.queued)
        own = ProcessFigures(self.rank + 100, "python", self.state, 1, *figures_of)
        figures = WorkerFigures(own, tuple(self.children.values()), "", self.traced) if full else None
        traffic = Traffic(self.bytes, self.bytes, at_store=self.at_store, data_age=self.data_age)
        return Evidence(self.rank, at, traffic, figures)


class Trace:
    """Drives a detector as the agent does, in time of its own."""

    def __init__(self, ranks: int = 2, detector: Detector | None = None) -> None:
        self.workers = [Worker(rank) for rank in range(ranks)]
        self.detector = detector or Detector()
        self.now = 0.0

    def run(self, seconds: float, each: Callable[[Sequence[Worker], float], None]) -> Stalled | None:
        """Run for a time; the first stall that was reported. One that was found early names no rank for certain."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            each(self.workers, INTERVAL)
            decision = self.sample()
            if isinstance(decision, AskStacks):
                moments = [self.now + 0.01 * number for number in range(PROBED)]
                stacks = {rank: [self.workers[rank].stack(at) for at in moments] for rank in decision.ranks}
                self.note_stacks(stacks)
            elif isinstance(decision, Stalled) and decision.early:
                self.detector.postpone(UNLEARNED_LIMIT)
            elif isinstance(decision, Stalled):
                return decision
        return None

    def sample(self) -> Decision:
        return self.detector.observe([one.evidence(self.now) for one in self.workers])

    def note_stacks(self, stacks: dict[int, list[tuple[str, ...]]]) -> None:
        self.detector.note_stacks(stacks)

    def train(self, seconds: float = 20, period: float = 0.5) -> None:
        """Steps, each followed by an all-reduce."""
        due = self.now + period

        def step(workers: Sequence[Worker], _: float) -> None:
            nonlocal due
            if self.now >= due:
                due += period
                for one in workers:
                    one.bytes += 1_000_000
                    one.cpu += 0.2

        assert self.run(seconds, step) is None


class RoundTrace(Trace):
    """The same for all detectors of a round, which take samples with the figures of processes only where they want
    them. Workers count `steps`."""

    def __init__(self, ranks: int, timeout: float | None = None, *, elsewhere: bool = False) -> None:
        super().__init__(ranks)
        self.round = RoundDetectors(timeout, elsewhere=elsewhere)
        self.steps: dict[int, int] = {}

    def sample(self) -> Decision:
        full = self.round.needs_figures
        return self.round.observe([one.evidence(self.now, full) for one in self.workers], self.steps)

    def note_stacks(self, stacks: dict[int, list[tuple[str, ...]]]) -> None:
        self.round.note_stacks(stacks)

    def training(
        self, *ranks: int, counts: bool = True, data: bool = False, period: float = 0.5
    ) -> Callable[[Sequence[Worker], float], None]:
        """What makes these workers train."""
        due = self.now + period

        def step(workers: Sequence[Worker], _: float) -> None:
            nonlocal due
            if self.now >= due:
                due += period
                for rank in ranks:
                    workers[rank].cpu += 0.2
                    workers[rank].bytes += 1000 * data
                    if counts:
                        self.steps[rank] = self.steps.get(rank, 0) + 1

        return step


def together(*parts: Callable[[Sequence[Worker], float], None]) -> Callable[[Sequence[Worker], float], None]:
    """All of them at once."""

    def each(workers: Sequence[Worker], seconds: float) -> None:
        for part in parts:
            part(workers, seconds)

    return each


def idle(_: Sequence[Worker], __: float) -> None: ...


def spin(workers: Sequence[Worker], seconds: float) -> None:
    workers[1].cpu += seconds


def spin_overloaded(workers: Sequence[Worker], seconds: float) -> None:
    workers[1].cpu += 0.05 * seconds
    workers[1].queued += 0.95 * seconds


def checkpoint(workers: Sequence[Worker], _: float) -> None:
    workers[0].written += 10_000_000


def evaluation(workers: Sequence[Worker], seconds: float) -> None:
    workers[0].cpu += seconds
    workers[0].stack = lambda now: (f"model.py:{int(now * 50) % 7}:layer{int(now * 50) % 7}", "train.py:9:evaluate")


def small_evaluation(workers: Sequence[Worker], seconds: float) -> None:
    """Nearly always in one layer or in the loop around it."""
    workers[0].cpu += seconds

    def stack(now: float) -> tuple[str, ...]:
        moment = round(now * 100) % 50
        return ("relu.py:3:relu" if moment == 7 else "linear.py:4:forward" if moment % 3 else "train.py:9:evaluate",)

    workers[0].stack = stack


def long_operations(workers: Sequence[Worker], seconds: float) -> None:
    """It is in one place for two seconds, and then in another one."""
    workers[0].cpu += seconds
    workers[0].stack = lambda now: (f"train.py:{int(now / 2) % 9}:part{int(now / 2) % 9}",)


def compilation(workers: Sequence[Worker], seconds: float) -> None:
    for one in workers:
        one.cpu += seconds
        one.faults += 5000


def compiler_processes(workers: Sequence[Worker], seconds: float) -> None:
    child = workers[0].children.get(500, ProcessFigures(500, "cc1plus", "S", 100, 0, 0, 0, 0))
    workers[0].children[500] = child._replace(cpu=child.cpu + seconds)


def download(workers: Sequence[Worker], _: float) -> None:
    workers[1].bytes += 5000


def debugger(workers: Sequence[Worker], _: float) -> None:
    workers[1].traced = True


def overloaded(workers: Sequence[Worker], seconds: float) -> None:
    evaluation(workers, 0.05 * seconds)
    workers[0].queued += 0.95 * seconds


def starved(workers: Sequence[Worker], _: float) -> None:
    """It waits for a processor all the time, and then does a little."""
    evaluation(workers, 0.0)
    workers[0].state = "R"


def overloaded_compilation(workers: Sequence[Worker], seconds: float) -> None:
    for one in workers:
        one.cpu += 0.05 * seconds
        one.queued += 0.95 * seconds
        one.faults += 20


def overloaded_loader(workers: Sequence[Worker], seconds: float) -> None:
    child = workers[0].children.get(500, ProcessFigures(500, "python", "S", 100, 0, 0, 0, 0))
    workers[0].children[500] = child._replace(cpu=child.cpu + 0.01 * seconds, queued=child.queued + 0.9 * seconds)


HARMLESS = [
    small_evaluation,
    long_operations,
    overloaded,
    starved,
    overloaded_compilation,
    overloaded_loader,
    checkpoint,
    evaluation,
    compilation,
    compiler_processes,
    download,
    debugger,
]
