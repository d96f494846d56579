"""The disk of a state directory: journals in memory, with the faults of a disk, and fencing of a former master."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.registry import decode_part
from dlrover_run.master.journal import FORMAT, Journal, JournalContents, JournalHeader, JournalReplaced, encode
from simulation.invariants import Invariants
from simulation.timeline import Timeline


class Disk:
    """The records that outlive masters. `full` makes every write fail. Each durable plan is passed to the
    invariants."""

    def __init__(self, invariants: Invariants, timeline: Timeline) -> None:
        self.invariants = invariants
        self.timeline = timeline
        self.stories: dict[str, JournalContents] = {}
        self.owners: dict[str, int] = {}
        # When the plan of each journal was decided.
        self.decided: dict[str, float] = {}
        # The journal as it was when its job had just ended.
        self.over: JournalContents | None = None
        self.full = False
        self.tickets = itertools.count(1)

    def restore_end(self, job: str) -> None:
        """As if every machine had been lost just after the end of that job was stored."""
        if self.over is not None:
            self.stories[job] = self.over
            self.decided[job] = self.timeline.now


class DiskJournal:
    """Replaces `dlrover_run.master.journal.Journal`, whose own tests show that it behaves like this.

    `burn` is called before and after each write, and may end the process that writes.
    """

    def __init__(self, directory: tuple[Disk, Callable[[], None]], job: str) -> None:
        disk, burn = directory
        self.path = Path(f"/state/{job}")
        self._disk = disk
        self._job = job
        self._burn = burn
        self._ticket = -1
        self.durable: Plan | None = None
        self.plan_age = 0.0
        self.repaired = False

    def exists(self) -> bool:
        return self._job in self._disk.stories

    def take_over(self, rules: JobRules, epoch: int) -> JournalContents:
        self._write()
        before = self._disk.stories.get(self._job)
        if before is None:
            story = JournalContents(JournalHeader(format=FORMAT, job=self._job, epoch=epoch, rules=rules))
        else:
            # The function of the product, which needs no file.
            story = Journal._next_contents(cast(Journal, self), encode(before), epoch)
        self._ticket = next(self._disk.tickets)
        self._disk.owners[self._job] = self._ticket
        self._disk.stories[self._job] = story
        self.durable = story.plan
        self._burn()
        self.plan_age = self._disk.timeline.now - self._disk.decided.get(self._job, self._disk.timeline.now)
        return story

    def append(self, plan: Plan) -> None:
        self._look()
        self._burn()
        self._write()
        self._disk.invariants.writing(self._disk.owners.get(self._job) == self._ticket)
        # Every plan is encoded and decoded, as on a disk.
        plan = msgspec.json.decode(msgspec.json.encode(plan), type=Plan, dec_hook=decode_part)
        story = self._disk.stories[self._job]
        self._disk.stories[self._job] = JournalContents(story.header, plan)
        self._disk.decided[self._job] = self._disk.timeline.now
        if plan.phase in OVER:
            self._disk.over = self._disk.stories[self._job]
        self._disk.invariants.storing(story.plan, plan, self._disk.timeline.now)
        self.durable = plan
        self._burn()

    def remove(self) -> None:
        if self._disk.owners.get(self._job) == self._ticket:
            del self._disk.stories[self._job], self._disk.owners[self._job]
            self._disk.decided.pop(self._job, None)
            self._disk.invariants.forgetting()

    def close(self) -> None:
        pass

    def _look(self) -> None:
        if self._disk.owners.get(self._job) != self._ticket:
            raise JournalReplaced(f"another master has taken over the journal {self.path}")

    def _write(self) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
