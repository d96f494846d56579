"""A job in virtual time for tests of decisions: nodes are names, and the test writes every report and every second.

Its program is torch (`virtual_torch.py`) or parameter servers (`virtual_servers.py`): what nodes report when they
join, and what they do by themselves. Time, connections, operators, coordinators and the format of scripts are here,
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import codes, render

MAX_STEPS = 1000
"""The decisions and answers of nodes, one after the other, after which a job is said never to come to rest."""

Event = Callable[[Any, list[str]], object]
Fact = Callable[[Any], list[str]]


class VirtualJob:
    """A coordinator and the last report of each node, of which those that are *away* have no connection to it.

    A node that is *deaf* receives nothing.
    """

    EVENTS: ClassVar[Mapping[str, Event]]
    FACTS: ClassVar[Mapping[str, Fact]]

    def __init__(self, rules: JobRules, epoch: int) -> None:
        self.rules = rules
        self.now = 1000.0
        self.coordinator = Coordinator(rules, self.now, epoch)
        self.statuses: dict[str, NodeReport] = {}
        self.lines: list[str] = []
        self.away: set[str] = set()
        self.deaf: set[str] = set()
        self.stored: list[Plan] = []
        self._ports = itertools.count(2000)

    @property
    def plan(self) -> Plan:
        return self.coordinator.plan

    @property
    def is_over(self) -> bool:
        return self.plan.phase in OVER

    @property
    def present(self) -> list[str]:
        """The nodes with a connection."""
        return [name for name in self.statuses if name not in self.away]

    def key(self, name: str) -> NodeKey:
        return self.statuses[name].key

    def send(self, name: str, **changes: Any) -> None:
        """Change the report of a node. It is received unless the connection of the node has ended."""
        self.statuses[name] = msgspec.structs.replace(self.statuses[name], **changes)
        if name not in self.away:
            self.coordinator.receive(self.statuses[name], self.now)
            self.settle()

    def report_leaving(self, name: str, phase: NodePhase) -> None:
        """A node is asked to leave, or has left."""
        self.send(name, phase=phase)

    def lose(self, *names: str) -> None:
        """The connections of these nodes end."""
        for name in names:
            self.away.add(name)
            self.coordinator.disconnect(self.statuses[name].key, self.now)
        self.settle()

    def come_back(self, *names: str) -> None:
        """These nodes reconnect, with their last reports."""
        for name in names:
            self.away.discard(name)
            self.coordinator.receive(self.statuses[name], self.now)
        self.settle()

    def wait(self, seconds: float) -> None:
        """Let time pass, with a decision at every deadline of the coordinator."""
        end = self.now + seconds
        while (due := self.coordinator.wake_at()) is not None and due <= end:
            assert due > self.now - 1e-6, "the next decision is due in the past"
            self.now = max(due, self.now + 1e-6)
            self.settle()
        self.now = end
        self.settle()

    def stall(self, seconds: float) -> None:
        """Stop the coordinator for that long; it notices the stall."""
        self.now += seconds
        self.coordinator.compensate_stall(seconds)
        self.settle()

    def request(self, action: Action, node: str = "", **fields: Any) -> str:
        """An operator, ann, requests this; returns the answer. Raises RequestFailed."""
        answer = render(self.coordinator.request(OperatorRequest(action, node, by="ann", **fields), self.now))
        self.settle()
        return answer

    def settle(self) -> None:
        """Decide until nothing changes, and no node has anything to answer."""
        for _ in range(MAX_STEPS):
            if self.coordinator.advance(self.now):
                self.stored.append(self.plan)
                continue
            self.lines += self.coordinator.take_log_lines()
            if not self.answer():
                return
        raise AssertionError("deciding never comes to rest")

    def works(self, name: str) -> bool:
        """Whether the plan has work for a node, or dismisses it."""
        raise NotImplementedError

    def answer(self) -> bool:
        """Let the nodes do what they do at once, by themselves. Return whether that changed anything."""
        return False


COMMON_EVENTS: dict[str, Event] = {
    "lose": lambda job, names: job.lose(*names),
    "back": lambda job, names: job.come_back(*names),
    "leaving": lambda job, names: [job.report_leaving(name, NodePhase.LEAVING) for name in names],
    "left": lambda job, names: [job.report_leaving(name, NodePhase.LEFT) for name in names],
    "away": lambda job, names: job.away.update(names),
    "deaf": lambda job, names: job.deaf.update(names),
    "wait": lambda job, seconds: job.wait(float(seconds[0])),
    "stall": lambda job, seconds: job.stall(float(seconds[0])),
}
"""The events that a script may have with each program, with the names of nodes or a time."""

COMMON_FACTS: dict[str, Fact] = {
    "phase": lambda job: [job.plan.phase.value],
    "number": lambda job: [str(job.plan.key.number)],
    "epoch": lambda job: [str(job.plan.epoch)],
    "due": lambda job: [] if (due := job.coordinator.wake_at()) is None else [f"{due - job.now:.0f}"],
    "because": lambda job: list(codes(job.plan.reasons)),
}
"""The facts that a script may check with each program. The `number` is that of a round, or of a cluster's version. A
decision is `due` in that many seconds."""

Job = TypeVar("Job", bound=VirtualJob)


def play(job: Job, script: str) -> Job:
    """Carry out the events and check the facts of a script such as `lose b; wait 2; round 2 a c`, in their order."""
    for step in filter(None, map(str.strip, script.split(";"))):
        verb, *words = step.split()
        if verb in job.EVENTS:
            job.EVENTS[verb](job, words)
        else:
            assert job.FACTS[verb](job) == words, f"{step!r} does not hold"
    return job


def texts(job: VirtualJob) -> str:
    """Return what people read of a job, for a golden file: the reason of each plan that was stored, what a node without
    work waits for, and the lines that the coordinator logs."""
    lines = list(dict.fromkeys(plan.reason for plan in job.stored))
    staying = [name for name in job.present if job.statuses[name].phase not in (NodePhase.LEAVING, NodePhase.LEFT)]
    if not job.is_over and not all(map(job.works, staying)):
        waiting = job.coordinator.waiting(job.now)
        left = "" if waiting.seconds is None else f" ({waiting.seconds:.0f} s)"
        lines.append(f"waiting: {waiting.text}{left}")
    return "\n".join([*lines, *(f"log: {line}" for line in job.lines)])
