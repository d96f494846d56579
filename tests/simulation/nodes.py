"""Nodes: the process of an agent with the rendezvous client of the product, independent of its tasks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed, RendezvousClient
from dlrover_run.rendezvous.reconnect import RemoteClient
from dlrover_run.spec import Entrypoint, JobSpec
from simulation.invariants import Invariants
from simulation.loop import LoopProcess
from simulation.network import Link, Weather
from simulation.timeline import Timeline, demand, demand_no_internal_error

ASK_TIMEOUT = 10.0
"""Seconds that an operator waits for the answer to a request."""

PROBE_TIME = 0.05
"""Seconds from a probe of a machine to its answer, or to the timeout."""


class NodeClient:
    """A rendezvous client as a simulated agent sees it, and the faults of its connections."""

    client: RendezvousClient
    leaving = 5.0
    """Maximum seconds until an agent that leaves has ended: if the place of the records answers, and if it does not."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def assignment(self) -> Assignment:
        return self.client.assignment

    @property
    def problem(self) -> str | None:
        problem = self.client.problem
        demand_no_internal_error(problem)
        return problem

    @property
    def may_give_up(self) -> bool:
        """Whether the client detects that the node is cut off, or has detected it."""
        return getattr(self.client, "_cut_off_watch", None) is not None

    def report(self, status: NodeReport) -> None:
        self.client.report(status)

    def close(self, on_closed: Callable[[], None]) -> None:
        """Let the last report be stored, then call `on_closed`."""
        self._node.create_task(self.client.close()).add_done_callback(lambda _: on_closed())
        # A process that was stopped in the meantime gets time to process what has arrived.
        self._node.call_later(self.leaving, self._node.call_later, 1.0, self._demand_end)

    def break_off(self, silent: bool) -> None:
        """End the connections of a process that has ended, as its kernel does; not if its machine is lost too."""

    def cut(self) -> None:
        """Break the connections, for both ends."""

    def _demand_end(self) -> None:
        demand(not self._node.alive, "an agent that leaves ends in a bounded time")


@dataclass(frozen=True)
class Place:
    """The environment of a node. `answers` tells whether the machine at an address answers a node; `open_client` opens
    its rendezvous client."""

    timeline: Timeline
    open_client: Callable[[Node, JobSpec, Callable[[], None]], NodeClient]
    invariants: Invariants
    weather: Weather
    answers: Callable[[Node, str], bool]


class Node(LoopProcess, ABC):
    """One agent with its tasks. `spec` has its identity; each incarnation is another process.

    `fuse` counts down with each step of the agent in etcd; at 0 `on_fuse` is called.
    """

    def __init__(self, place: Place, spec: JobSpec, host: str, incarnation: str) -> None:
        self.place = place
        super().__init__(place.timeline, host)
        self.address = spec.local_addr or ""
        self.machine_lost = False
        self.link = Link()
        self.key = NodeKey(spec.node_id, incarnation)
        self.left = False
        self.fuse: int | None = None
        self.on_fuse: Callable[[], None] = self.kill
        self._state = NodeState(spec)
        self._state._incarnation = incarnation
        self._state.host = host
        self._leaving = False
        # What operators on its machine got.
        self.answers: list[JobStatus | AskFailed] = []
        self.rendezvous: NodeClient
        self.run(lambda: self._begin(spec))

    def note(self, what: str) -> None:
        if self.alive and not self.place.invariants.internal_errors_allowed:
            demand_no_internal_error(what)
        super().note(what)

    def ask_to_go(self) -> None:
        """SIGTERM."""
        self.note("is asked to go")
        self.run(self._begin_to_leave)

    def request(self, request: OperatorRequest | None) -> None:
        """An operator requests something of the job on this machine."""
        self.run(lambda: self.create_task(self._ask(request)))

    async def _ask(self, request: OperatorRequest) -> None:
        answer: JobStatus | AskFailed
        self.place.invariants.asking(request)
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                answer = await self.rendezvous.client.ask(request)
        except AskFailed as failed:
            answer = failed
        except TimeoutError:
            answer = AskFailed("there is no answer", no_job=True)
        self.answers.append(answer)
        self.place.invariants.answered(request, answer)
        self.note(f"{request}: {answer if isinstance(answer, AskFailed) else answer.answer or 'accepted'}")

    def kill(self, silent: bool = False) -> None:
        """Kill agent and workers with SIGKILL. If `silent`, the machine is lost, and no other process is notified."""
        if self.alive:
            self.note("vanishes with its machine" if silent else "is killed")
            self.end()
            self.machine_lost = silent
            self.rendezvous.break_off(silent)
            self._end_tasks()

    def died(self) -> None:
        raise AssertionError("a node is killed by kill()")

    async def reaches(self, address: str, port: int) -> bool:
        """Whether the machine at that address answers this node in time."""
        await asyncio.sleep(PROBE_TIME)
        answered = self.place.answers(self, address)
        if answered:
            self.place.invariants.reaching(self.key, self.timeline.now)
        return answered

    def burn(self) -> None:
        """Count the fuse down, if one is set."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                self.note("has come to the end of its fuse")
                self.on_fuse()

    @property
    def is_leaving(self) -> bool:
        return self._leaving

    def _begin(self, spec: JobSpec) -> None:
        self.rendezvous = self.place.open_client(self, spec, self._receive)
        self.note("begins")
        self._follow()

    @abstractmethod
    def _receive(self) -> None:
        """Handle a change of the client."""

    @abstractmethod
    def _follow(self) -> None:
        """Take the next steps."""

    @abstractmethod
    def _end_tasks(self) -> None:
        """End all tasks, together with their agent."""

    def _begin_to_leave(self) -> None:
        self._leaving = True
        self._receive()

    def _close(self) -> None:
        """Leave the job after everything has been reported."""
        self.left = True
        self.rendezvous.close(self.end)


def job_spec(node_id: str, address: str, workers: int, role: str, node_rank: int | None, rules: Any) -> JobSpec:
    """Return the job specification that the user has given to this node."""
    return JobSpec(
        entrypoint=Entrypoint("script", "a.py"),
        run_id="job",
        rules=rules,
        node_id=node_id,
        local_addr=address,
        workers_per_node=workers,
        role=role,
        node_rank=node_rank,
    )


class WatchedClient(RemoteClient):
    """The master or etcd client of the product, with checks of the invariants for what it receives and which machines
    it reaches."""

    def __init__(self, node: Node, *given: Any, **more: Any) -> None:
        self._node = node
        super().__init__(*given, **more)

    def _take(self, assignment: Assignment) -> None:
        if assignment.epoch >= self._assignments.assignment.epoch:
            self._node.place.invariants.receiving(self._node.key, assignment)
        super()._take(assignment)

    def _note_connected(self) -> None:
        self._node.place.invariants.reaching(self._node.key, self._node.timeline.now)
        super()._note_connected()

    def _give_up(self, problem: str, is_user_error: bool = False) -> None:
        if self.is_cut_off:
            self._node.place.invariants.giving_up(self._node.key, self._cut_off_timeout, self._node.timeline.now)
        super()._give_up(problem, is_user_error)
