"""What a scenario needs to know of the program whose job it runs: torch rounds, or parameter servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from dlrover_run.coordination.rules import JobRules
from simulation.laws import Laws
from simulation.nodes import Node

if TYPE_CHECKING:
    from simulation.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """What a run came to, so that a test can see that something happened in it.

    A torch job has `rounds`, those `completed` by all their workers, `checks`, and nodes `dismissed` by them. A job
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
    """The program of one run: its nodes, tasks, faults and laws. It draws from the random numbers of the run only in
    the methods below, so that a seed stays the same run."""

    flag = ""
    """What selects it on the command line of the simulation."""

    laws: Laws
    always_durable = False
    """Whether the records of such a job are never lost."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.timeline = scenario.timeline

    @abstractmethod
    def rules(self, random: Random) -> JobRules:
        """The rules of the job."""

    @abstractmethod
    def make_laws(self, durable: bool, nodes_stay: bool) -> Laws:
        """The laws of this run."""

    @abstractmethod
    def furnish(self) -> None:
        """Choose how tasks behave."""

    @abstractmethod
    def slow_stops(self, seconds: float) -> None:
        """Tasks may take that long to end."""

    @abstractmethod
    def first_nodes(self) -> int:
        """How many nodes there are in the beginning."""

    @abstractmethod
    def new_node(self, name: str, number: int, is_return: bool) -> Node:
        """A process begins to be a node. No other one of the run has its number."""

    @abstractmethod
    def faults(self) -> list[Callable[[], None]]:
        """The faults of tasks."""

    @abstractmethod
    def calm(self) -> None:
        """No task fails any more without a cause."""

    @abstractmethod
    def replenish(self, staying: set[str]) -> None:
        """All faults are over, and these nodes stay: add those that the job needs to come to its end."""

    @abstractmethod
    def demand_progress(self) -> None:
        """Within a bounded time after the last fault the job makes progress, or is over."""

    @abstractmethod
    def demand_end(self) -> None:
        """The job ends, and all nodes learn of it."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """What the run came to."""
