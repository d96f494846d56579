"""The checks of the experiments find no fault in a correct history, and each fault in a modified one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.history import (
    Began,
    Done,
    Record,
    Resumed,
    Saved,
    Saving,
    Step,
    effective_steps,
    find_faults,
    read,
    rounds_of,
)


@cache
def order(size: int, epoch: int) -> Sequence[int]:
    return random.Random(size * 1000 + epoch).sample(range(size), size)


@dataclass
class Trainer:
    """Trains as the example does, and records it as its workers do."""

    size: int
    batch_size: int
    every: int
    epochs: int
    records: list[Record] = field(default_factory=list)
    checkpoint: tuple[int, int, int] = (0, 0, 0)

    def train(self, world: int, steps: int, last_words: int = 0) -> None:
        """One round that is killed after this many steps, when this many ranks have begun the next one."""
        name = f"round-{len(self.records)}"
        step, epoch, completed = self.checkpoint
        self.records += [Began(at=0, round=name, rank=r, world=world, pid=r, node=r) for r in range(world)]
        self.records += [
            Resumed(at=0, round=name, rank=r, step=step, epoch=epoch, completed=completed) for r in range(world)
        ]
        for number in range(steps + 1):
            if completed == self.size:
                epoch, completed = epoch + 1, 0
            if epoch == self.epochs:
                return
            batch = order(self.size, epoch)[completed : completed + world * self.batch_size]
            ranks = range(world if number < steps else min(last_words, world))
            self.records += [
                Step(at=0, round=name, rank=r, step=step, epoch=epoch, world=world, samples=tuple(batch[r::world]))
                for r in ranks
            ]
            if number == steps:
                return
            self.records += [Done(at=0, round=name, rank=r, step=step) for r in ranks]
            step, completed = step + 1, completed + len(batch)
            if step % self.every == 0 or completed == self.size:
                self.records += [
                    Saving(at=0, round=name, rank=0, step=step),
                    Saved(at=0, round=name, rank=0, step=step),
                ]
                self.checkpoint = step, epoch, completed

    def faults(self) -> list[str]:
        return self.violations(self.records)

    def violations(self, records: Sequence[Record]) -> list[str]:
        return find_faults(records, self.size, self.epochs, lambda epoch: order(self.size, epoch))


@st.composite
def trainings(draw: st.DrawFn) -> Trainer:
    trainer = Trainer(
        draw(st.integers(1, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    )
    kills = st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(0, 5))
    for world, steps, last_words in draw(st.lists(kills, max_size=5)):
        trainer.train(world, steps, last_words)
    trainer.train(draw(st.integers(1, 5)), steps=1000)
    return trainer


@given(trainings())
def test_a_history_of_kills_and_changes_of_the_world_size_is_correct(trainer: Trainer) -> None:
    assert trainer.faults() == []


@given(trainings())
def test_each_sample_of_each_epoch_is_effective_once(trainer: Trainer) -> None:
    seen = sorted(
        (share.epoch, sample)
        for each, step in effective_steps(rounds_of(trainer.records))
        for share in each.steps[step].values()
        for sample in share.samples
    )
    assert seen == [(epoch, sample) for epoch in range(trainer.epochs) for sample in range(trainer.size)]


@given(trainings(), st.data())
def test_a_change_of_any_effective_share_is_found(trainer: Trainer, data: st.DataObject) -> None:
    """A sample is missing, different or repeated; or the share is of another epoch, or was never reported."""
    counted = {(each.name, step) for each, step in effective_steps(rounds_of(trainer.records))}
    places = [
        number
        for number, record in enumerate(trainer.records)
        if isinstance(record, Step) and (record.round, record.step) in counted and record.samples
    ]
    place = data.draw(st.sampled_from(places))
    share = trainer.records[place]
    assert isinstance(share, Step)
    first, *others = share.samples
    spoiled: list[list[Record]] = [
        [],
        [msgspec.structs.replace(share, samples=tuple(others))],
        [msgspec.structs.replace(share, samples=((first + 1) % (trainer.size + 1), *others))],
        [msgspec.structs.replace(share, samples=(first, first, *others))],
        [msgspec.structs.replace(share, epoch=share.epoch + 1)],
        [msgspec.structs.replace(share, world=share.world + 1)],
    ]
    records = [*trainer.records[:place], *data.draw(st.sampled_from(spoiled)), *trainer.records[place + 1 :]]
    assert trainer.violations(records) != []


def interrupted() -> Trainer:
    """Two epochs of 10 samples, a checkpoint after every second step; four nodes, then three. The first round was
    killed in its fourth step.
    """
    trainer = Trainer(size=10, batch_size=1, every=2, epochs=2)
    trainer.train(world=4, steps=4, last_words=2)
    trainer.train(world=3, steps=1000)
    return trainer


def test_the_rounds_of_a_history_show_which_nodes_took_part() -> None:
    first, second = rounds_of(interrupted().records)
    assert (first.world, first.nodes, first.start, first.end) == (4, {0: 0, 1: 1, 2: 2, 3: 3}, 0, 4)
    # Three steps are an epoch of ten samples, after which there was a checkpoint, and one after step 4.
    assert (second.world, second.start, second.end) == (3, 4, 6)


def changed(change: Callable[[Record], Record | None]) -> list[str]:
    trainer = interrupted()
    return trainer.violations([new for record in trainer.records if (new := change(record)) is not None])


def resumed_at(record: Record, rank: int | None, **place: int) -> Record:
    if isinstance(record, Resumed) and record.step and rank in (None, record.rank):
        return msgspec.structs.replace(record, **place)
    return record


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda r: resumed_at(r, None, step=3, epoch=0, completed=10), "the newest checkpoint was of step 4"),
        (lambda r: resumed_at(r, 1, step=3), "went on from different places"),
        (lambda r: resumed_at(r, None, completed=7), "it was resumed with 7 samples of epoch 1, 4 of 1 were"),
        (lambda r: None if isinstance(r, Done) and r.step == 5 else r, "the training ended in epoch 1 after 7 of 10"),
        (lambda r: None if isinstance(r, Saved | Saving) and r.step == 4 else r, "the newest checkpoint was of step 3"),
    ],
)
def test_each_wrong_way_to_resume_is_reported(change: Callable[[Record], Record | None], fault: str) -> None:
    assert any(fault in each for each in changed(change)), changed(change)


def test_a_checkpoint_whose_writer_died_before_reporting_it_may_be_used() -> None:
    assert changed(lambda r: None if isinstance(r, Saved) and r.step == 4 else r) == []


def test_an_older_round_that_still_trains_is_reported() -> None:
    trainer = interrupted()
    late = next(record for record in trainer.records if isinstance(record, Done))
    assert any("still trained" in each for each in trainer.violations([*trainer.records, late]))


def test_a_training_that_ends_early_is_reported() -> None:
    assert replace(interrupted(), epochs=3).faults() == [
        "the training ended in epoch 1 after 10 of 10 samples, and 3 epochs were due"
    ]


def test_an_invalid_record_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        read(b'{"type": "done", "at": 1.0, "round": "a"}')
    assert read(b'{"type": "done", "at": 1.0, "round": "a", "rank": 2, "step": 3}') == Done(
        at=1.0, round="a", rank=2, step=3
    )
