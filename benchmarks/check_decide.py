"""How long the coordinator takes to decide a node check of many nodes: `python benchmarks/check_decide.py`.

No process is started and nothing is sent: the coordinator of the product is told what simulated nodes report, and the
time is the processor time that it spends deciding. `benchmarks/README.md` tells more.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# The simulated nodes are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import msgspec
from comparison import machine
from node_truth import Truth

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import NodeKey, NodeReport, PlanPhase
from dlrover_run.coordination.rules import CHECK_ONCE, JobRules
from dlrover_run.policies.health.model import CheckKey, CheckTask, ComputeResult, LinkResults

HERE = Path(__file__).resolve().parent
SIZES = (2_000, 20_000)
LIMIT = 300.0
"""Seconds of processor time after which a check is cut off."""

NOISE = 0.2
SLOWER = 4.0


class Noisy(Truth):
    """Each measurement is off by up to 20 %."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._drawn = random.Random(seed)

    def compute(self, address: str, key: CheckKey = CheckKey()) -> ComputeResult:  # noqa: B008 (it is frozen)
        """What comes of computing on that node."""
        said = super().compute(address, key)
        devices = tuple(msgspec.structs.replace(one, tflops=one.tflops * self._off()) for one in said.devices)
        return msgspec.structs.replace(said, devices=devices)

    def link(self, address: str, task: CheckTask) -> LinkResults:
        """What the node finds of the links of its task."""
        said = super().link(address, task)
        tried = tuple(msgspec.structs.replace(one, gigabytes=one.gigabytes * self._off()) for one in said.results)
        return msgspec.structs.replace(said, results=tried)

    def _off(self) -> float:
        return self._drawn.uniform(1 - NOISE, 1 + NOISE)


WORLDS = ("healthy", "a third links slowly", "a third has no network", "a third computes slowly")


def draw(nodes: int, world: str) -> Noisy:
    """The truth about so many nodes, the same for each run."""
    truth = Noisy(nodes)
    third = random.Random(f"{world} {nodes}").sample([_address(node) for node in range(nodes)], nodes // 3)
    if world == "a third links slowly":
        truth.link_slowness = dict.fromkeys(third, SLOWER)
    elif world == "a third has no network":
        truth.cut = set(third)
    elif world == "a third computes slowly":
        truth.slowness = dict.fromkeys(third, SLOWER)
    return truth


def _address(node: int) -> str:
    return f"n{node}.net"


class CutOff(Exception):
    """The check took longer than the limit."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise CutOff inside after so many seconds of processor time."""

    def cut_off(*_: object) -> None:
        raise CutOff

    before = signal.signal(signal.SIGPROF, cut_off)
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass
class Run:
    """One check. `decisions` are the seconds of each decision that led to another plan, `shown` those that the words
    for a waiting node took; `done` says that the check came to its end."""

    nodes: int
    world: str
    decisions: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)
    rounds: int = 0
    named: int = 0
    done: bool = False

    @property
    def total(self) -> float:
        """Seconds of all decisions."""
        return sum(self.decisions)


def check(nodes: int, world: str, limit: float) -> Run:
    """Have the nodes come, and answer all that they are asked until they train."""
    truth = draw(nodes, world)
    # A third may be dismissed.
    rules = JobRules(min_nodes=nodes // 2, max_nodes=nodes, check=CHECK_ONCE)
    coordinator = Coordinator(rules, 0.0, 1)
    statuses: dict[NodeKey, NodeReport] = {}
    for node in range(nodes):
        status = NodeReport(
            node_id=f"n{node}",
            incarnation="1",
            host=f"n{node}",
            address=_address(node),
            port=1,
            workers=1,
            preferred_rank=node,
            check_port=1,
            compute_result=truth.compute(_address(node)),
        )
        statuses[status.key] = status
        coordinator.receive(status, 0.0)
    run = Run(nodes, world)
    while coordinator.plan.phase is PlanPhase.GATHERING:
        began = time.process_time()
        try:
            with limited(limit - run.total):
                while coordinator.advance(1.0):
                    pass
        except CutOff:
            run.decisions.append(time.process_time() - began)
            return run
        run.decisions.append(time.process_time() - began)
        began = time.process_time()
        coordinator.waiting(1.0)
        run.shown.append(time.process_time() - began)
        if coordinator.plan.check is None:
            break
        run.rounds += 1
        for key, status in statuses.items():
            task = coordinator.view(key).check_task
            if task is None:
                continue
            if task.compute:
                status = msgspec.structs.replace(status, compute_result=truth.compute(status.address, task.key))
            if task.links:
                status = msgspec.structs.replace(status, link_result=truth.link(status.address, task))
            statuses[key] = status
            coordinator.receive(status, 1.0)
    run.named = sum(checkup.status.value in ("fault", "straggler") for checkup in coordinator.plan.health)
    run.done = True
    return run


HEAD = "| nodes | world | rounds | longest decision | all decisions | longest table | named |"


def line(run: Run) -> str:
    """A line of the table."""
    longest, total = (f"{'' if run.done else '> '}{value:.2f} s" for value in (max(run.decisions), run.total))
    shown = f"{max(run.shown):.2f} s" if run.shown else "-"
    named = str(run.named) if run.done else "-"
    return f"| {run.nodes} | {run.world} | {run.rounds} | {longest} | {total} | {shown} | {named} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and write `decide.json` and `decide.md`."""
    parser = argparse.ArgumentParser(description="How long the coordinator takes to decide a node check.")
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="how many nodes (default: 2000 and 20000)")
    parser.add_argument("--only", action="append", choices=WORLDS, help="only this world; may be repeated")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of deciding a check may take ({LIMIT:g})")
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / "node-check", help="directory for the results"
    )
    options = parser.parse_args(arguments)
    if min(options.nodes) < 2:
        parser.error("--nodes must be at least 2")
    where = machine.look(HERE.parent)
    lines = [HEAD, "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
    print(*lines, sep="\n", flush=True)
    runs = []
    for nodes in options.nodes:
        for world in options.only or WORLDS:
            runs.append(check(nodes, world, options.limit))
            lines.append(line(runs[-1]))
            print(lines[-1], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    document = {"commit": where.commit, "date": where.date, "runs": [asdict(run) for run in runs]}
    (options.output / "decide.json").write_text(json.dumps(document, indent=2) + "\n")
    about = f"One check for each line; {where.date}; commit {where.commit}."
    (options.output / "decide.md").write_text("\n".join(["# Node check: time to decide", "", about, "", *lines, ""]))
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
