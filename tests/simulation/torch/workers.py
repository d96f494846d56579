"""The workers of all nodes: they connect to the stores of their rounds, work, fail, and detect lost peers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from dlrover_run.coordination.records.round import PlannedChange, RankAssignment, RoundKey
from dlrover_run.failures.worker_exit import WorkerExit
from simulation.timeline import Timeline, demand

OWN_WORDS = "Traceback (most recent call last):\n  File 'a.py'\nValueError: loss is nan\n"
PEER_WORDS = "Traceback (most recent call last):\n  File 'a.py'\nRuntimeError: Connection closed by peer [10.0.0.1]\n"


class Group:
    """The workers of one node in one round, as `build_report` reads them. `on_end` is called when they succeed or
    fail, and `on_news` when they have marked a checkpoint."""

    def __init__(
        self, workers: Workers, ranks: RankAssignment, on_end: Callable[[], None], on_news: Callable[[], None]
    ) -> None:
        self.ranks = ranks
        self.key = ranks.key
        self.live = False
        self.succeeded = False
        self.failure: WorkerExit | None = None
        self.has_trained = False
        self.saves = False
        self.saved_for: PlannedChange | None = None
        self.change: PlannedChange | None = None
        self.on_end = on_end
        self.on_news = on_news
        self._workers = workers

    @property
    def group(self) -> Group:
        """The group itself: `build_report` reads the group of a round."""
        return self

    @property
    def checkpoints(self) -> Group:
        """The group itself: `build_report` reads what its workers have marked."""
        return self

    def start(self) -> None:
        """Start the workers, which wait for their peers at the store."""
        self.live = True
        self._workers.meet(self)

    def mark(self) -> None:
        """One of them marks a checkpoint."""
        self.saves = True
        self.saved_for = self.change or self.saved_for

    def fail(self, words: str = OWN_WORDS, killed: bool = False) -> None:
        """Let one worker fail; the agent stops the other workers of the node only in the next step."""
        if self.live and self.failure is None and not self.succeeded:
            code = -signal.SIGKILL if killed else 1
            self.failure = WorkerExit(self.ranks.first_rank, 0, 1, code, 0.0, stderr_tail="" if killed else words)
            if words is not PEER_WORDS:
                self._workers.failed.add(self.key)
            self._workers.part(self)
            self.on_end()

    def succeed(self) -> None:
        if self.live and self.failure is None:
            self.succeeded = True
            self.live = False
            self.on_end()

    def stop(self) -> None:
        if self.live:
            self.live = False
            if self.failure is None:
                self._workers.part(self)


@dataclass
class Meeting:
    """The workers that have connected to one store."""

    key: RoundKey
    nodes: int
    groups: dict[int, Group] = field(default_factory=dict)
    complete: bool = False
    ended: bool = False


class Workers:
    """The stores of all rounds. A complete round works for `work` seconds and then succeeds, node by node.

    Most workers that lose a peer notice it soon, by a broken connection. Some hang until they are stopped, or until
    their own timeout `patience` expires. At the store they wait for `late` seconds more. That is longer than a node
    needs to reach the store, because a worker that gives up before that does not fail because of a change of
    membership. In every complete round rank 0 saves each
    `marks_every` seconds, if that is not 0; `marks` counts that. `failed` has the rounds in which a worker failed for a
    reason of its own.
    """

    def __init__(self, timeline: Timeline, work: float, patience: float) -> None:
        self._timeline = timeline
        self._work = work
        self.patience = patience
        self.late = 0.0
        self._meetings: dict[tuple[str, int, RoundKey | None], Meeting] = {}
        self.fixed_store = False
        self.marks_every = 0.0
        self.marks: dict[RoundKey, int] = {}
        self.failed: set[RoundKey] = set()
        self.completed: list[RoundKey] = []

    @property
    def start_patience(self) -> float:
        """The seconds for which workers wait for their peers at the store."""
        return self.patience + self.late

    def meet(self, group: Group) -> None:
        """Connect the workers of a node to the store."""
        ranks = group.ranks
        # At an address that the user has chosen, the rounds follow each other, each with a store of its own.
        place = (ranks.store_address, ranks.store_port, ranks.key if self.fixed_store else None)
        meeting = self._meetings.setdefault(place, Meeting(ranks.key, ranks.nodes))
        demand(meeting.key == ranks.key and meeting.nodes == ranks.nodes, "workers of two rounds connect to one store")
        demand(ranks.node_rank not in meeting.groups, f"two nodes connect to a store with rank {ranks.node_rank}")
        meeting.groups[ranks.node_rank] = group
        if meeting.ended:
            self._strand(group)
        elif len(meeting.groups) == ranks.nodes:
            meeting.complete = True
            self.completed.append(ranks.key)
            self._timeline.note("workers", f"of round {ranks.key.number} have met")
            for one in meeting.groups.values():
                one.has_trained = True
            if self.marks_every:
                self._timeline.after(self.marks_every, lambda: self._mark(meeting))
            self._timeline.after(self._work, lambda: self._finish(meeting))
        else:
            self._timeline.after(self.start_patience, lambda: None if meeting.complete else group.fail(PEER_WORDS))

    def _mark(self, meeting: Meeting) -> None:
        """The workers of rank 0 mark a checkpoint, and again after a while."""
        first = meeting.groups[0]
        if not meeting.ended and first.live:
            self.marks[meeting.key] = self.marks.get(meeting.key, 0) + 1
            first.mark()
            self._timeline.note("workers", f"of round {meeting.key.number} have saved")
            first.on_news()
            self._timeline.after(self.marks_every, lambda: self._mark(meeting))

    def part(self, group: Group) -> None:
        """Disconnect the workers of a node that have ended before their work was done."""
        for meeting in self._meetings.values():
            if group in meeting.groups.values() and not meeting.ended:
                meeting.ended = True
                for other in meeting.groups.values():
                    if other is not group and not other.succeeded:
                        self._strand(other)

    def _strand(self, group: Group) -> None:
        random = self._timeline.random
        delay = random.uniform(0.01, random.choice((0.05, 1.5))) if random.random() < 0.8 else self.patience
        self._timeline.after(delay, lambda: group.fail(PEER_WORDS))

    def _finish(self, meeting: Meeting) -> None:
        if not meeting.ended:
            for group in meeting.groups.values():
                # After the last collective each of them ends at its own time, independent of the others.
                self._timeline.after(self._timeline.random.uniform(0, 2), group.succeed)
