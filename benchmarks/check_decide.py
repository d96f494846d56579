"""How long the coordinator takes to decide a node check of many nodes. See `benchmarks/README.md`.

No process is started and nothing is sent: the product's coordinator receives the reports of simulated nodes, and the
time is the processor time of its decisions.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# The simulated nodes are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import msgspec
from core.report import Table
from core.series import Kept, Series, measured
from support.node_truth import Truth

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    CheckTask,
    ComputeResult,
    LinkResults,
    NodeCheckAssignment,
    NodeCheckReport,
    NodeCheckState,
)
from dlrover_run.features.node_check.rules import CHECK_ONCE, NodeCheckRules

SIZES = (2_000, 20_000)
NOISE = 0.2
SLOWER = 4.0


class NoisyTruth(Truth):
    """Each measurement is off by up to 20 %."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._drawn = random.Random(seed)

    def compute(self, address: str, key: CheckKey = CheckKey()) -> ComputeResult:  # noqa: B008 (it is frozen)
        result = super().compute(address, key)
        devices = tuple(msgspec.structs.replace(one, tflops=one.tflops * self._noise()) for one in result.devices)
        return msgspec.structs.replace(result, devices=devices)

    def link(self, address: str, task: CheckTask) -> LinkResults:
        links = super().link(address, task)
        results = tuple(msgspec.structs.replace(one, gigabytes=one.gigabytes * self._noise()) for one in links.results)
        return msgspec.structs.replace(links, results=results)

    def _noise(self) -> float:
        return self._drawn.uniform(1 - NOISE, 1 + NOISE)


WORLDS = ("healthy", "a third links slowly", "a third has no network", "a third computes slowly")


def draw(nodes: int, world: str) -> NoisyTruth:
    """The state of the nodes, the same in each run."""
    truth = NoisyTruth(nodes)
    third = [f"n{node}.net" for node in random.Random(f"{world} {nodes}").sample(range(nodes), nodes // 3)]
    if world == "a third links slowly":
        truth.link_slowness = dict.fromkeys(third, SLOWER)
    elif world == "a third has no network":
        truth.cut = set(third)
    elif world == "a third computes slowly":
        truth.slowness = dict.fromkeys(third, SLOWER)
    return truth


class Key(NamedTuple):
    """One check."""

    nodes: int
    world: str


@dataclass
class Check:
    """One check: the seconds of each decision that changed the plan, and those of the text for waiting nodes."""

    key: Key
    decisions: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)
    rounds: int = 0
    named: int = 0

    def cells(self) -> list[str]:
        """Its row in the table."""
        times = (max(self.decisions), sum(self.decisions), max(self.shown, default=0.0))
        return [
            str(self.key.nodes),
            self.key.world,
            str(self.rounds),
            *(f"{value:.2f} s" for value in times),
            str(self.named),
        ]


def check(nodes: int, world: str) -> Check:
    """Let the nodes join, and answer all that the check asks of them, until they train."""
    truth = draw(nodes, world)
    # A third may be excluded.
    rules = JobRules(min_nodes=nodes // 2, max_nodes=nodes, parts=(NodeCheckRules(check=CHECK_ONCE),))
    coordinator = Coordinator(rules, 0.0, 1)
    reports: dict[NodeKey, NodeReport] = {}
    for node in range(nodes):
        name, address = f"n{node}", f"n{node}.net"
        health = NodeCheckReport(check_port=1, compute_result=truth.compute(address))
        report = NodeReport(
            node_id=name,
            incarnation="1",
            host=name,
            address=address,
            port=1,
            workers=1,
            preferred_rank=node,
            parts=(health,),
        )
        reports[report.key] = report
        coordinator.receive(report, 0.0)
    done = Check(Key(nodes, world))
    while coordinator.plan.phase is PlanPhase.GATHERING:
        began = time.process_time()
        while coordinator.advance(1.0):
            pass
        done.decisions.append(time.process_time() - began)
        began = time.process_time()
        coordinator.waiting(1.0)
        done.shown.append(time.process_time() - began)
        if NodeCheckState.get(coordinator.plan.parts).check is None:
            break
        done.rounds += 1
        for key, report in reports.items():
            task = NodeCheckAssignment.get(coordinator.view(key).parts).check_task
            if task is None:
                continue
            part = NodeCheckReport.get(report.parts)
            if task.compute:
                part = msgspec.structs.replace(part, compute_result=truth.compute(report.address, task.key))
            if task.links:
                part = msgspec.structs.replace(part, link_result=truth.link(report.address, task))
            report = msgspec.structs.replace(report, parts=(part,))
            reports[key] = report
            coordinator.receive(report, 1.0)
    done.named = sum(
        health.status.value in ("fault", "straggler") for health in NodeCheckState.get(coordinator.plan.parts).health
    )
    return done


HEAD = ("nodes", "world", "rounds", "longest decision", "all decisions", "longest table", "named")


def tables(kept: Sequence[Kept[Check]]) -> list[Table]:
    """The table of all checks."""
    runs = sorted((one.run for one in kept), key=lambda one: (one.key.nodes, WORLDS.index(one.key.world)))
    rows = [one.cells() for one in runs]
    return [Table("decide", measured(kept, "One check for each row"), HEAD, rows, text=(1,))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the checks; return 0."""
    parser = argparse.ArgumentParser(description="How long the coordinator takes to decide a node check.")
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="numbers of nodes (default: 2000 20000)")
    parser.add_argument("--only", action="append", choices=WORLDS, help="only this world; may be repeated")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    if min(options.nodes) < 2:
        parser.error("--nodes must be at least 2")
    wanted = [Key(nodes, world) for nodes in options.nodes for world in options.only or WORLDS]
    return SERIES.run(parser, options, wanted)


SERIES = Series(
    "Node check: time to decide",
    "node-check/decide",
    Check,
    lambda key: check(*key),
    tables,
    lambda one: " | ".join(one.cells()),
)

if __name__ == "__main__":
    sys.exit(main())
