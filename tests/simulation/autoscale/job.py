"""A job in a world, second by second as far as it matters: it trains, changes its size, loses and gains nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import msgspec

from dlrover_run.features.autoscale.decide import decide, find_record
from dlrover_run.features.autoscale.model import AutoscaleState, Condition, FailureAtSize, Sizes, SizeView, StepsReport
from dlrover_run.features.autoscale.observer import BLOCKS_PER_REPORT
from dlrover_run.features.autoscale.rules import STRONG, WEAK, AutoscaleRules
from simulation.autoscale.published import INTERVAL, Controller, log_line
from simulation.autoscale.worlds import HOUR, World

TICK = 10.0
"""Seconds between two reports of a node."""

CHECKPOINT = 60.0
"""Seconds within which a planned change takes effect."""

CRASH_AFTER = 20.0
"""Seconds that workers train which then fail at a size."""

MAX_RECORD = 16_384
"""Bytes of the state of the autoscaler in a plan."""


class Chooser(Protocol):
    """A rule that chooses the size of a job. One that follows events looks as soon as the nodes or the round change."""

    follows_events: bool

    def look(self, job: Job, now: float) -> int:
        """How many nodes the job should have."""

    def interval(self, job: Job) -> float:
        """Seconds until the next look, if nothing happens but that the job trains."""


@dataclass
class Job:
    """The job, and what nodes report of it. `wanted` is what the rule wants, and `size` what trains, 0 in a pause."""

    world: World
    wanted: int = 0
    size: int = 0
    round: int = 0
    steps: float = 0.0
    stepped_at: float = 0.0
    step_seconds: float = 0.0
    failure: FailureAtSize | None = None
    failures: int = 0
    present: int = 0


@dataclass
class Account:
    """What came of a job. `share` is its utility in the last quarter of the time, of the best one. `changes` are the
    times at which the rule changed the size, `ended_with` the last size, `outside` a size that is not allowed."""

    world: World
    share: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)
    ended_with: int = 0
    outside: int | None = None
    failures: int = 0
    chooser: Chooser | None = None


class Ours:
    """The autoscaler, with its state in the plan of a job."""

    follows_events = True

    def __init__(self, world: World, max_batch: float = 0.0) -> None:
        self.rules = AutoscaleRules(scaling=STRONG if world.strong else WEAK, max_batch=max_batch)
        range_ = world.sizes
        self.sizes: Sizes = self.rules.allowed(range_.fewest, range_.most, range_.unit)
        self.state = AutoscaleState()
        self.log: list[tuple[float, int, str]] = []
        self.most_changes, self._changes = 0, 0
        self._looked_at = 0.0
        self.random = Random(f"coordinator {world.seed}")

    def look(self, job: Job, now: float) -> int:
        world = job.world
        seconds, self._looked_at = now - self._looked_at, now
        if self.random.random() < world.taken_over * seconds / HOUR:
            stored = msgspec.json.encode(self.state)
            assert len(stored) < MAX_RECORD, "the state of the autoscaler is too large for a plan"
            self.state = msgspec.json.decode(stored, type=AutoscaleState)
        if now - seconds < world.lost_at <= now:
            self.state, self._changes = AutoscaleState(), 0
        progress = None
        if job.steps >= 1 and job.size:
            samples = int(job.steps) * (64 if world.strong else 8 * job.size) if world.samples else None
            progress = StepsReport(int(job.steps), round(job.stepped_at, 3), samples)
        view = SizeView(
            round=job.round,
            size=job.size,
            present=job.present,
            progress=progress,
            failure=job.failure,
            remaining=max(0.0, world.hours * HOUR - now) if world.tells_end else None,
        )
        before = self.state
        self.state = decide(self.rules, self.sizes, before, view, now)
        if self.state.target != before.target or self.state.condition != before.condition:
            self.log.append((now, self.state.target, f"{self.state.condition} {self.state.reasons[0]}"))
        self._count(before)
        return self.state.target

    def interval(self, job: Job) -> float:
        record = find_record(self.state, job.size)
        is_known = self.state.condition.is_quiet and record is not None and record.blocks > 0
        return self.rules.block * BLOCKS_PER_REPORT if is_known else TICK

    def _count(self, before: AutoscaleState) -> None:
        """Count the changes of a search, by what is wanted and not by what the autoscaler has counted itself. That no
        size is wanted changes none: all nodes that are here train then."""
        if before.condition.is_quiet and not self.state.condition.is_quiet:
            self._changes = 0
        if before.target and self.state.target not in (0, before.target):
            self._changes += 1
        self.most_changes = max(self.most_changes, self._changes)

    @property
    def has_settled(self) -> bool:
        """Whether the search is over."""
        return self.state.condition in (Condition.BEST, Condition.LARGEST)


class Published:
    """The published rule. It begins with the fewest nodes, as its document does."""

    follows_events = False

    def __init__(self, world: World) -> None:
        self.controller = Controller()
        self.replicas = world.sizes.fewest
        self.random = Random(f"log {world.seed}")

    def look(self, job: Job, now: float) -> int:
        sizes = job.world.sizes
        pending = job.present < self.replicas
        if not pending and (not job.step_seconds or job.size != self.replicas // sizes.unit * sizes.unit):
            # It waits until all pods run, and has nothing to read before that.
            return self.replicas
        line = log_line(1, int(job.steps) % 1000, min(job.step_seconds, 99.0))
        self.replicas = self.controller.look(
            "job", self.replicas, sizes.fewest, sizes.most, pending, job.failures > 0, line
        )
        return self.replicas

    def interval(self, job: Job) -> float:
        return INTERVAL


def run(world: World, chooser: Callable[[World], Chooser] = Ours, efficiency: float = 0.5) -> Account:
    """Let the job train, with the sizes that the rule chooses."""
    random = Random(f"noise {world.seed}")
    rule = chooser(world)
    job = Job(world, wanted=world.start)
    account = Account(world, chooser=rule)
    if chooser is Published:
        job.wanted = world.sizes.fewest
    unit = world.sizes.unit
    deviation, wave = math.sqrt(1 - world.correlation**2) * world.noise, 0.0
    starts_at, planned_at, plan = 0.0, None, 0
    end = world.hours * HOUR
    gained = 0.0
    best = world.utility(world.best(efficiency), efficiency)
    trained_for = 0.0
    now, looks_at, saw = 0.0, 0.0, (0, 0, 0, 0)
    while now < end:
        now += TICK
        job.present = world.present(now)
        possible = min(job.present, job.wanted) // unit * unit
        wave = world.correlation * wave + deviation * random.gauss(0, 1)
        if job.size and possible != job.size and job.present >= job.size:
            # A planned change, which waits for a checkpoint.
            if planned_at is None or plan != possible:
                planned_at, plan = now + random.uniform(0, CHECKPOINT), possible
            changes = now >= planned_at
        else:
            # A node is lost, or the job has none.
            changes = possible != job.size
            planned_at = None
        if changes:
            job.size, planned_at = possible if possible >= world.sizes.fewest else 0, None
            job.round, job.steps, job.step_seconds, trained_for = job.round + 1, 0.0, 0.0, 0.0
            starts_at = now + world.pause * random.uniform(0.8, 1.2)
            if job.size and (not account.changes or account.changes[-1][1] != job.size):
                account.changes.append((now, job.size))
            if job.size and job.size not in world.sizes:
                account.outside = job.size
        if job.size and now >= starts_at:
            seconds = world.step_seconds(job.size, now) * math.exp(-wave)
            if random.random() < world.outliers:
                seconds *= 10
            if trained_for < TICK:
                # The first steps compile, load and connect.
                seconds *= 5
            trained_for += TICK
            before = int(job.steps)
            job.steps += TICK / seconds
            job.step_seconds = seconds
            if int(job.steps) > before:
                job.stepped_at = now - (job.steps - int(job.steps)) * seconds
            fails_once = world.fails_at <= now < world.fails_at + TICK
            if fails_once or (job.size in world.failing and trained_for > CRASH_AFTER):
                job.failure = FailureAtSize(job.round, job.size)
                job.failures += 1
                # The rule may choose another size before the next round.
                job.size = 0
        if now > end * 0.75:
            gained += TICK * world.utility(job.size if now >= starts_at else 0, efficiency)
        sees = job.round, job.size, job.present, job.failures
        if now >= looks_at or (sees != saw and rule.follows_events):
            wanted = rule.look(job, now)
            if wanted:
                job.wanted = wanted
            looks_at, saw = now + rule.interval(job), sees
    account.share = gained / (end * 0.25 * best)
    account.ended_with = job.size
    account.failures = job.failures
    return account
