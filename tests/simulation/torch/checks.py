"""The part of simulated nodes in a node check: they compute, and try links, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec
from support.node_truth import Truth
from support.policy_parts import check_report

from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    CheckTask,
    ComputeResult,
    HealthStatus,
    LinkEnd,
    LinkResult,
    LinkResults,
)
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE
from simulation.loop import LoopProcess
from simulation.timeline import demand

CHECK_TIMEOUT = 60.0
"""Seconds of a round of a check. A link has a quarter of that, as in the product."""

EACH = 3
"""One of this many seeds has a node check."""

HOPELESS = ("crashing", "wrong", "silent")
"""Planted problems of nodes that every check finds, however few other nodes there are."""

ALLOWED_STATUSES = {
    "": {HealthStatus.PASSED, HealthStatus.UNCHECKED},
    "slow": {HealthStatus.PASSED, HealthStatus.STRAGGLER},
    "cut": {HealthStatus.PASSED, HealthStatus.FAULT},
    "flaky": {HealthStatus.PASSED, HealthStatus.FAULT},
    **{kind: {HealthStatus.FAULT} for kind in HOPELESS},
}
"""The statuses that a check may give to a node with each planted problem. A flaky node fails once, and may count as
failed twice if it sends nothing for long. A problem that only a comparison shows may stay undetected."""

Meeting = tuple[CheckKey, frozenset[str]]


@dataclass
class Health:
    """The true health of all nodes, and the links that they try. Nodes in `silent`, by address, never answer, nodes in
    `flaky` fail their first computation, and nodes in `unasked` were started without the flag. `planted` has the
    processes with a problem; processes in `stubborn` stay when they are dismissed."""

    random: Random
    mode: int
    exclude: int
    truth: Truth = field(default_factory=Truth)
    silent: set[str] = field(default_factory=set)
    flaky: set[str] = field(default_factory=set)
    unasked: set[str] = field(default_factory=set)
    stubborn: set[NodeKey] = field(default_factory=set)
    planted: dict[NodeKey, str] = field(default_factory=dict)
    over: bool = False
    _waiting: dict[Meeting, list[Callable[[], None]]] = field(default_factory=dict)

    @property
    def checks(self) -> bool:
        """Whether nodes are checked in this run."""
        return self.mode != CHECK_NEVER

    def plant(self, key: NodeKey, address: str) -> None:
        """Draw the problem of a new node, if it has one."""
        if not self.checks or self.over:
            return
        if self.random.random() < 0.08:
            self.unasked.add(address)
            return
        if self.random.random() < 0.75:
            return
        kind = self.random.choice((*HOPELESS, "cut", "slow", "flaky"))
        self.planted[key] = kind
        if self.random.random() < 0.2:
            self.stubborn.add(key)
        if kind == "slow":
            self.truth.slowness[address] = 5.0
        elif kind in ("silent", "flaky"):
            getattr(self, kind).add(address)
        else:
            getattr(self.truth, kind).add(address)

    def compute(self, address: str, key: CheckKey) -> ComputeResult:
        """Return the result of a computation on that node."""
        if address in self.flaky:
            self.flaky.remove(address)
            return ComputeResult(key, problem="its check process was killed by SIGSEGV")
        return self.truth.compute(address, key)

    def meet(self, meeting: Meeting, met: Callable[[], None]) -> None:
        """Wait for the other end of a link; `met` is called for both ends when it is present."""
        waiting = self._waiting.setdefault(meeting, [])
        waiting.append(met)
        if len(waiting) == len(meeting[1]):
            for call in self._waiting.pop(meeting):
                call()


def health_of(seed: int) -> Health:
    """Draw the health of nodes with a generator of its own, so that seeds without a check stay the same runs."""
    random = Random(f"health of {seed}")
    mode = random.choice((CHECK_ONCE, CHECK_ONCE, CHECK_ALWAYS)) if random.randrange(EACH) == 0 else CHECK_NEVER
    return Health(random, mode, random.randint(0, 1))


class CheckPart:
    """The part of one node. `notify` is called when there is something new to report."""

    def __init__(self, process: LoopProcess, health: Health, address: str, notify: Callable[[], None]) -> None:
        self._process = process
        self._health = health
        self._address = address
        self._notify = notify
        self._key: CheckKey | None = None
        self._computed: ComputeResult | None = None
        self._linked: LinkResults | None = None

    def begin(self) -> None:
        """Compute without a task."""
        if self._address not in self._health.silent | self._health.unasked:
            self._compute(CheckKey())

    def follow(self, task: CheckTask | None) -> None:
        """Do each task once."""
        demand(
            task is None or self._address not in self._health.unasked, "a node that takes no part in checks has no task"
        )
        if task is None or task.key == self._key or self._address in self._health.silent:
            return
        self._key = task.key
        self._process.note(f"is asked by the check: round {task.key.round}, computes {task.compute}")
        if task.compute:
            self._compute(task.key)
        if task.links:
            self._try(task, ())

    def add_to_report(self, status: NodeReport) -> NodeReport:
        """Return the report of the node with its results."""
        if self._address in self._health.unasked:
            return status
        return msgspec.structs.replace(
            status,
            parts=(
                msgspec.structs.replace(
                    check_report(status), compute_result=self._computed, link_result=self._linked, check_port=1
                ),
            ),
        )

    def _compute(self, key: CheckKey) -> None:
        def done() -> None:
            if key == CheckKey() and self._computed is not None:
                return
            self._computed = self._health.compute(self._address, key)
            self._notify()

        self._process.call_later(self._health.random.uniform(0.1, 3.0), done)

    def _try(self, task: CheckTask, tried: tuple[LinkResult, ...]) -> None:
        if task.key != self._key:
            return
        if len(tried) == len(task.links):
            self._linked = LinkResults(task.key, tried)
            self._notify()
            return
        ends = task.links[len(tried)]
        settled = False

        def settle(found: LinkResult) -> None:
            nonlocal settled
            if not settled:
                settled = True
                self._try(task, (*tried, found))

        def met() -> None:
            found = self._health.truth.link(self._address, _only(task, ends)).results[0]
            self._process.call_later(self._health.random.uniform(0.05, 0.5), settle, found)

        self._health.meet((task.key, frozenset(end.address for end in ends)), met)
        other = next((end.node for end in ends if end.node != task.node), task.node)
        late = LinkResult(other, problem="the other end did not come")
        self._process.call_later(task.timeout / 4, settle, late)


def _only(task: CheckTask, ends: tuple[LinkEnd, ...]) -> CheckTask:
    return msgspec.structs.replace(task, links=(ends,))
