"""Nodes: the product's `Standing`, `statement`, `reconcile` and `Search`, in a process with simulated workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from policy_parts import check_part, check_rules

from dlrover_run.agent.node_state import NodeState, build_report, leave_report
from dlrover_run.agent.reconcile import DesiredTask, Start, TaskState, reconcile
from dlrover_run.coordination.model import OVER, Assignment, NodeKey, NodeReport, RoundKey
from dlrover_run.rendezvous.reconnect import RemoteClient
from dlrover_run.spec import Entrypoint, JobSpec
from simulation.checks import CheckPart, Health
from simulation.laws import Laws
from simulation.loop import LoopProcess
from simulation.network import Link, Weather
from simulation.timeline import Timeline
from simulation.workers import Group, Workers

PROBE_TIME = 0.05
"""Seconds from a probe of a machine to its answer, or to the certainty that there is none."""


class NodeClient(Protocol):
    """A rendezvous client as a simulated agent sees it, and what may become of its connections."""

    @property
    def assignment(self) -> Assignment: ...

    @property
    def problem(self) -> str | None: ...

    @property
    def may_give_up(self) -> bool:
        """Whether it finds out if the node is cut off, or has."""
        ...

    def report(self, status: NodeReport) -> None:
        """Report the node's latest status."""
        ...

    def close(self, on_closed: Callable[[], None]) -> None:
        """Let the last status be stored, and say when that is over."""
        ...

    def break_off(self, silent: bool) -> None:
        """The process is gone; its kernel ends the connections, unless the machine is gone too."""
        ...

    def cut(self) -> None:
        """The connections break, for both ends."""
        ...


@dataclass(frozen=True)
class Place:
    """All that a node finds around it. `answers` says whether the machine at an address answers a node.
    `open_client` opens its rendezvous client; `slow_stop` and `slow_start` are seconds that its workers take at
    most."""

    timeline: Timeline
    open_client: Callable[[Node, JobSpec, Callable[[], None]], NodeClient]
    workers: Workers
    laws: Laws
    slow_stop: float
    slow_start: float
    weather: Weather
    health: Health
    answers: Callable[[Node, str], bool]


class Node(LoopProcess):
    """One agent with its workers. `spec` says who it is; each incarnation is another process.

    `fuse` counts down with each step that the agent does in etcd; at 0 `on_fuse` happens to it.
    """

    def __init__(self, place: Place, spec: JobSpec, host: str, incarnation: str) -> None:
        super().__init__(place.timeline, host)
        self.place = place
        self.address = spec.local_addr or ""
        self.machine_lost = False
        self.link = Link()
        self.key = NodeKey(spec.node_id, incarnation)
        self.group: Group | None = None
        self.left = False
        self.fuse: int | None = None
        self.on_fuse: Callable[[], None] = self.kill
        self._standing = NodeState(spec)
        self._standing._incarnation = incarnation
        self._standing._host = host
        self._epoch = 0
        self._leaving = False
        self._busy = False
        self._check = CheckPart(self, place.health, spec.local_addr or "", lambda: self._hear())
        self.rendezvous: NodeClient
        self.run(lambda: self._begin(spec))

    def ask_to_go(self) -> None:
        """SIGTERM."""
        self.note("is asked to go")
        self.run(self._begin_to_leave)

    def kill(self, silent: bool = False) -> None:
        """SIGKILL of agent and workers; `silent` is the loss of the machine, of which nobody hears."""
        if self.alive:
            self.note("vanishes with its machine" if silent else "is killed")
            self.end()
            self.machine_lost = silent
            self.rendezvous.break_off(silent)
            if self.group is not None:
                self.group.stop()

    def died(self) -> None:
        raise AssertionError("a node is killed by kill()")

    async def reaches(self, address: str, port: int) -> bool:
        """Whether the machine at that address answers this node within a moment."""
        await asyncio.sleep(PROBE_TIME)
        answered = self.place.answers(self, address)
        if answered:
            self.place.laws.reaching(self.key, self.timeline.now)
        return answered

    def burn(self) -> None:
        """One step nearer to what is set to happen."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                self.note("has come to the end of its fuse")
                self.on_fuse()

    @property
    def works(self) -> bool:
        """Whether the workers of its round run."""
        return self.group is not None and self.group.live and self.group.key == self._standing.round

    @property
    def is_leaving(self) -> bool:
        """Whether it was asked to go."""
        return self._leaving

    @property
    def seated_in(self) -> RoundKey | None:
        """The round in which it has a seat."""
        return self._standing.round

    def _begin(self, spec: JobSpec) -> None:
        self.rendezvous = self.place.open_client(self, spec, self._hear)
        self.note("begins")
        self._follow()
        if check_rules(spec.rules).check:
            self._check.begin()

    def _hear(self) -> None:
        """The client has changed: also while workers start or end, it is taken and answered."""
        self.call_soon(self._report)
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self.call_soon(self._follow)

    def _begin_to_leave(self) -> None:
        self._leaving = True
        self._hear()

    def _report(self) -> None:
        if self.left:
            return
        wanted = self.rendezvous.assignment
        if not self._leaving:
            self.place.laws.taking(self.key, wanted)
            if wanted.epoch != self._epoch:
                self._epoch = wanted.epoch
                self.note(f"obeys the coordinator of epoch {wanted.epoch}")
            self._standing.accept(wanted)
            self._check.follow(check_part(wanted).check_task)
        self.rendezvous.report(self._check.said(build_report(self._standing, cast(Any, self.group), self._leaving)))

    def _follow(self) -> None:
        if self._busy or self.left:
            return
        self._report()
        group = self.group
        ends = self._leaving or self._is_over or self.rendezvous.problem is not None
        live, wanted = group is not None and group.live, self._standing.round
        if ends and not live:
            self._leave()
            return
        desired = [] if wanted is None else [DesiredTask(wanted, "devices")]
        states = [] if group is None else [TaskState(group.key, "devices", live=live, ended=not live)]
        here = [state for state in states if live or state.key == wanted]
        for action in reconcile(desired, here, ends):
            if isinstance(action, Start):
                self._start()
            else:
                assert group is not None, "only workers can be stopped"
                random = self.timeline.random
                self._after(random.uniform(0, self.place.slow_stop) * random.random(), group.stop)

    @property
    def _is_over(self) -> bool:
        wanted = self.rendezvous.assignment
        dismissed = check_part(wanted).health is not None and check_part(wanted).health.dismissed
        return wanted.phase in OVER or (dismissed and self.key not in self.place.health.stubborn)

    def _start(self) -> None:
        seat = self._standing.ranks
        assert seat is not None, "only a seat is a reason to start"
        self._standing.take_port()
        group = self.group = Group(self.place.workers, seat, self._note_end)

        def start() -> None:
            if self._standing.round == seat.key and not self._leaving:
                self.note(f"starts the workers of round {seat.key.number}, rank {seat.node_rank} of {seat.nodes}")
                group.start()

        self._after(self.timeline.random.uniform(0.01, self.place.slow_start), start)

    def _after(self, delay: float, act: Callable[[], None]) -> None:
        def go_on() -> None:
            act()
            self._busy = False
            self._wake()

        self._busy = True
        self.call_later(delay, go_on)

    def _note_end(self) -> None:
        group = self.group
        assert group is not None, "workers that end were started"
        if group.succeeded:
            self.place.laws.succeeding(self.key, group.seat)
        self.note("its workers succeed" if group.succeeded else "a worker fails")
        self.run(self._hear)

    def _leave(self) -> None:
        self.left = True
        self.note(f"leaves: {self.rendezvous.problem or self.rendezvous.assignment.reason}")
        over = self._is_over
        if over or self.group is None or not self.group.succeeded:
            gave_up = None if over or self._leaving else RuntimeError(self.rendezvous.problem)
            self.rendezvous.report(leave_report(self._standing, gave_up))
        self.rendezvous.close(self.end)


def job_spec(node_id: str, address: str, workers: int, role: str, wish: int | None, rules: Any) -> JobSpec:
    """What a person said to this node."""
    return JobSpec(
        entrypoint=Entrypoint("script", "a.py"),
        run_id="job",
        rules=rules,
        node_id=node_id,
        local_addr=address,
        workers_per_node=workers,
        role=role,
        node_rank=wish,
    )


class ReachWatch(RemoteClient):
    """The laws around what a client concludes from those that it reaches, and from those that it does not."""

    _node: Node

    def _note_connected(self) -> None:
        self._node.place.laws.reaching(self._node.key, self._node.timeline.now)
        super()._note_connected()

    def _give_up(self, problem: str, is_user_error: bool = False) -> None:
        if self.is_cut_off:
            self._node.place.laws.giving_up(self._node.key, self._cut_off_timeout, self._node.timeline.now)
        super()._give_up(problem, is_user_error)
