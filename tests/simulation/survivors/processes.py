"""Worker processes one by one, and the process groups of torch: a model of what `_reconfigure` needs and does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.survivors.model import Formation, Store
from simulation.timeline import Timeline, demand
from simulation.torch.workers import OWN_WORDS, PEER_WORDS, Workers

if TYPE_CHECKING:
    from simulation.survivors.nodes import SurvivorNode

BLOCK, OLDER, WITHOUT = "block", "older", "without"
"""The kinds of nodes: their script has a block of `Survivor`; the same with an older torch; started without the flag.
"""


@dataclass
class Order:
    """The latest order of an agent to a worker: offer a handle, or, with a formation, form the group."""

    key: RoundKey
    rank: int
    world: int
    timeout: float
    formation: Formation | None = None


@dataclass(eq=False)
class Group:
    """Processes that train together, or wait for each other until all of them are here. `members` are by rank."""

    key: RoundKey
    size: int
    in_place: bool
    members: dict[int, WorkerProcess] = field(default_factory=dict)
    complete: bool = False
    ended: bool = False


class Line:
    """One direction of the line between a worker and its agent: messages take a moment, and none overtakes another."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._arrival = 0.0

    def send(self, deliver: Callable[[], None]) -> None:
        self._arrival = self._groups.deliver(self._arrival, deliver)


class WorkerProcess:
    """One process of a worker. It reports to its node by `say`, with a word and the round that it is about. A `deaf`
    process answers no order any more: its collective hangs, or its interpreter does. One that is `finishing` has left
    its block, and is about to succeed."""

    def __init__(self, groups: Groups, node: SurvivorNode, local_rank: int, store: Store | None) -> None:
        self.pid = next(groups.pids)
        self.node = node
        self.local_rank = local_rank
        self.store = store
        self.alive = True
        self.deaf = False
        self.finishing = False
        self.handle = ""
        self.order: Order | None = None
        self.group: Group | None = None
        self.in_place = True
        self._groups = groups
        self._to_worker = Line(groups)
        self._to_agent = Line(groups)

    def begin(self, first: Order) -> None:
        """Reach the place in the script at which it joins the others."""
        if self.alive:
            self.order = first
            if self.node.kind == WITHOUT:
                self._groups.join_by_the_store_of_the_round(self, first)
            else:
                self.say("hello", first.key)

    def send(self, order: Order) -> None:
        """Send the process an order of its agent."""
        self._to_worker.send(lambda: self._obey(order))

    def _obey(self, order: Order) -> None:
        if not self.alive or self.finishing:
            return
        self.deaf = self.deaf or self._groups.draws_deafness()
        if self.deaf:
            self._groups.leave_unanswered(self, order)
            return
        self.order = order
        if order.formation is None:
            self._groups.leave(self)
            self._groups.later(self._groups.time_to_answer(order), lambda: self._offer(order))
        elif not order.formation.in_place:
            self.in_place = False
            self._groups.join_by_the_store_of_the_round(self, order)
        else:
            self._groups.reconfigure(self, order, order.formation)

    def say(self, word: str, key: RoundKey, text: str = "") -> None:
        self._to_agent.send(lambda: self.node.hear(self, word, key, text))

    def lose(self, group: Group) -> None:
        """Notice that a group has lost a member, unless the process has left that group."""
        if self.group is not group:
            return
        self.group = None
        if not self.alive or (self.deaf and self.in_place):
            return
        if self.in_place and self.node.kind == BLOCK:
            self.say("lost", group.key)
        else:
            self.end(1, PEER_WORDS)

    def end(self, code: int, words: str = "") -> None:
        """End, with that exit code."""
        if self.alive:
            self.alive = False
            self._groups.leave(self)
            self.node.note_end(self, code, words)

    def _offer(self, order: Order) -> None:
        if self.alive and not self.deaf and self.order is order:
            self.handle = f"gloo:{order.rank}:{self.pid}:{next(self._groups.handles)}"
            self._groups.owners[self.handle] = self
            self.say("offer", order.key, self.handle)


class Groups:
    """All groups of a run. `formed` is called with each that is complete. A complete one works for a time, and then its
    members succeed one by one."""

    def __init__(self, timeline: Timeline, seed: int, workers: Workers, work: float) -> None:
        self.random = Random(f"survivors {seed}")
        self.pids = itertools.count(1)
        self.handles = itertools.count(1)
        self.owners: dict[str, WorkerProcess] = {}
        self.used_handles: set[str] = set()
        self.unanswered: set[RoundKey] = set()
        self.deafness = self.random.choice((0.0, 0.0, 0.02, 0.1))
        self.calm = False
        self.formed: Callable[[Group], None] = lambda group: None
        self.is_alive: Callable[[Store], bool] = lambda store: True
        self._uuids: dict[int, tuple[str, ...]] = {}
        self._by_uuid: dict[int, Group] = {}
        self._by_round: dict[RoundKey, Group] = {}
        self._timeline = timeline
        self._workers = workers
        self._work = work

    @property
    def all(self) -> list[Group]:
        return [*self._by_uuid.values(), *self._by_round.values()]

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timeline.after(self.random.uniform(0, seconds), call)

    def deliver(self, not_before: float, call: Callable[[], None]) -> float:
        """Call after a moment, but not before that time; returns when."""
        at = max(not_before, self._timeline.now + self.random.uniform(0, 0.01))
        self._timeline.at(at, call)
        return at

    def draws_deafness(self) -> bool:
        return not self.calm and self.random.random() < self.deafness

    def time_to_answer(self, order: Order) -> float:
        """Most answer soon; some take almost the time that they have."""
        return self.random.choice((0.05, 0.05, 1.0, 0.9 * order.timeout))

    def reconfigure(self, process: WorkerProcess, order: Order, formation: Formation) -> None:
        """`torch.distributed._reconfigure`."""
        uuid, handles = formation.uuid, formation.handles
        demand(self._uuids.setdefault(uuid, handles) == handles, "a uuid is used for two groups")
        demand(process.handle in handles, "a worker forms no group without its own handle")
        demand(handles.index(process.handle) == order.rank, "the ranks follow the order of the handles")
        demand(order.key not in self._by_round, "all workers of a round form their group in the same way")
        group = self._by_uuid.setdefault(uuid, Group(order.key, len(handles), in_place=True))
        demand(order.rank not in group.members, "a worker forms a group once by a uuid")
        demand(process.handle not in self.used_handles, "a handle is good for one group")
        self._join(group, order.rank, process)
        # The process passes on half of its time.
        self._timeline.after(order.timeout / 2, lambda: None if group.complete else self._give_up(group, process))

    def join_by_the_store_of_the_round(self, process: WorkerProcess, order: Order) -> None:
        """`init_process_group`, as in any script."""
        demand(
            not any(group.key == order.key for group in self._by_uuid.values()),
            "all workers of a round form their group in the same way",
        )
        group = self._by_round.setdefault(order.key, Group(order.key, order.world, in_place=False))
        demand(group.size == order.world and order.rank not in group.members, "two worlds in one round")
        self._join(group, order.rank, process)
        self._timeline.after(self._workers.start_patience, lambda: self._fail_to_form(group, process))

    def leave_unanswered(self, process: WorkerProcess, order: Order) -> None:
        """Note an order to a process that hangs. Only an order to offer or to form in place has a limit in the agent;
        as in any script, torch's own timeout ends what hangs in another group."""
        self.unanswered.add(order.key)
        if order.formation is not None and not order.formation.in_place:
            process.in_place = False
            self._timeline.after(self._workers.patience, lambda: self._end_hung(process, order))

    def _end_hung(self, process: WorkerProcess, order: Order) -> None:
        if process.alive:
            # As in `_fail_to_form`: a failure of its own.
            self._workers.failed.add(order.key)
            process.end(1, PEER_WORDS)

    def leave(self, process: WorkerProcess) -> None:
        """Close the connections of a process; the others notice it, most of them soon."""
        group, process.group = process.group, None
        if group is None or group.ended:
            return
        if not group.complete:
            # The others wait for it, as long as they would for one that never comes.
            return
        group.ended = True
        for other in group.members.values():
            if other is not process and other.alive:
                soon = self.random.random() < 0.8
                self._timeline.after(
                    self.random.uniform(0.01, 1.5) if soon else self._workers.patience, partial(other.lose, group)
                )

    def fail(self, process: WorkerProcess, killed: bool) -> None:
        """Let a worker fail for a reason of its own."""
        process.end(-9 if killed else 1, "" if killed else OWN_WORDS)

    def _join(self, group: Group, rank: int, process: WorkerProcess) -> None:
        demand(process.group is None, "a worker is in one world at a time")
        process.group = group
        group.members[rank] = process
        here = [one for one in group.members.values() if one.alive and one.group is group]
        if len(here) < group.size:
            return
        stores = {one.store for one in here} if group.in_place else set()
        demand(len(stores) <= 1, "the workers of a group share one store")
        if not all(store is not None and self.is_alive(store) for store in stores):
            return
        group.complete = True
        self.used_handles.update(one.handle for one in here if group.in_place)
        self._workers.completed.append(group.key)
        self._timeline.note("workers", f"of round {group.key.number} form a group of {group.size}")
        self.formed(group)
        for one in here:
            one.say("formed", group.key)
        self._timeline.after(self._work, lambda: self._finish(group))

    def _give_up(self, group: Group, process: WorkerProcess) -> None:
        if process.group is group:
            process.lose(group)

    def _fail_to_form(self, group: Group, process: WorkerProcess) -> None:
        if not group.complete and process.group is group:
            if group.key in self.unanswered:
                # A worker hangs: a failure of its own, which no change of membership explains.
                self._workers.failed.add(group.key)
            process.lose(group)

    def _finish(self, group: Group) -> None:
        if not group.ended:
            group.ended = True
            for process in group.members.values():
                process.finishing = True
                self.later(2.0, partial(process.end, 0))
