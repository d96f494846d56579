"""The interface between a scenario and the program whose job it runs: torch rounds, or parameter servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from dlrover_run.coordination.records.rules import JobRules
from simulation.invariants import Invariants
from simulation.nodes import Node

if TYPE_CHECKING:
    from simulation.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """The result of a run, so that a test can assert that something happened in it.

    A torch job has `rounds`, rounds `completed` by all their workers, `checks`, and nodes `dismissed` by checks. A job
    with parameter servers has `versions`, of which some were `planned` changes that lost no step.
    """

    phase: str
    coordinators: int
    ended_at: float
    restarts: int = 0
    rounds: int = 0
    completed: int = 0
    checks: int = 0
    dismissed: int = 0
    versions: int = 0
    planned: int = 0


class Program(ABC):
    """The program of one run: its nodes, tasks, faults and invariants. It draws from the random generator of the run
    only in the methods below, so that a seed stays the same run."""

    flag = ""
    """The flag that selects it on the command line of the simulation."""

    invariants: Invariants
    always_durable = False
    """Whether the records of such a job are always durable."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.timeline = scenario.timeline

    @abstractmethod
    def rules(self, random: Random) -> JobRules:
        """Draw the rules of the job."""

    @abstractmethod
    def make_invariants(self, durable: bool, nodes_stay: bool) -> Invariants:
        """Return the invariants of this run."""

    @abstractmethod
    def furnish(self) -> None:
        """Draw how tasks behave."""

    def begin(self, until: float) -> None:  # noqa: B027 (a job needs no operator)
        """Start what acts on the job besides its nodes and the faults, until that time."""

    @abstractmethod
    def slow_stops(self, seconds: float) -> None:
        """Let tasks take up to that many seconds to end."""

    @abstractmethod
    def first_nodes(self) -> int:
        """Return the number of nodes at the beginning."""

    @abstractmethod
    def new_node(self, name: str, number: int, is_return: bool) -> Node:
        """Start a process that becomes a node. Its number is unique in the run."""

    @abstractmethod
    def faults(self) -> list[Callable[[], None]]:
        """Return the faults of tasks."""

    @abstractmethod
    def calm(self) -> None:
        """Let no task fail any more by itself."""

    @abstractmethod
    def replenish(self, staying: set[str]) -> None:
        """After the last fault, add the nodes that the job needs to end, beside the nodes that stay."""

    @abstractmethod
    def demand_progress(self) -> None:
        """Demand that the job makes progress, or is over, within a bounded time after the last fault."""

    @abstractmethod
    def demand_end(self) -> None:
        """Demand that the job ends, and that all nodes receive its end."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """Return the result of the run."""
