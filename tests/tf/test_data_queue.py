"""The data queues: no offset is lost, in whatever order tasks take parts, die and roll back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tf_ps_runner.agent.protocol import MAX_LINE, Rollback, read_line
from tf_ps_runner.data.order import Part, Shuffle
from tf_ps_runner.data.queue import (
    MAX_OPEN,
    MAX_QUEUES,
    MAX_SHARDS,
    STATE_VERSION,
    QueueError,
    QueueSpec,
    QueueState,
    SavedState,
    ShardQueue,
    ShardQueues,
    StateError,
    finished_waiters,
)

SPECS = {
    "train": QueueSpec(size=23, shard=4, epochs=2, seed=7, shuffle=True),
    "test": QueueSpec(size=6, shard=10),
}
BLOCKS = {
    (name, epoch, block): 0
    for name, spec in SPECS.items()
    for epoch in range(spec.epochs)
    for block in range(spec.size)
}


class Job(RuleBasedStateMachine):
    """Workers that take, use, report and die, a model that counts what was used for it, and checkpoints of both."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: ShardQueues[int] = ShardQueues()
        self.model = Counter[tuple[str, int, int]]()
        self.held: dict[int, tuple[str, Part, int, int]] = {}
        self.ids = itertools.count()
        self.saved: tuple[SavedState | None, Counter[tuple[str, int, int]]] = (None, Counter())
        self.repeated = Counter[tuple[str, int, int]]()

    @rule(name=st.sampled_from(sorted(SPECS)))
    def take(self, name: str) -> None:
        worker = next(self.ids)
        part = self.queues.take(worker, name, SPECS[name])
        if part is not None:
            assert 0 <= part.begin < part.end <= SPECS[name].size
            self.held[worker] = (name, part, part.begin, part.begin)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), report=st.booleans())
    def use(self, data: st.DataObject, report: bool) -> None:
        """A worker trains on a few more blocks, and reports it or is about to."""
        worker = data.draw(st.sampled_from(sorted(self.held)))
        name, part, reported, used = self.held[worker]
        until = data.draw(st.integers(used, part.end))
        for block in range(used, until):
            self.model[name, part.epoch, block] += 1
        if not report:
            self.held[worker] = (name, part, reported, until)
            return
        self.queues.use(worker, name, part.number, until)
        self.held[worker] = (name, part, until, until)
        if until == part.end:
            del self.held[worker]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.held)))
        name, part, reported, used = self.held.pop(worker)
        for block in range(reported, used):
            self.repeated[name, part.epoch, block] += 1
        self.queues.give_back(worker)
        with pytest.raises(QueueError) as refused:
            self.queues.use(worker, name, part.number, part.end)
        assert refused.value.lost

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """The state is taken first; what is used before the checkpoint is written is in the model all the same."""
        state = read_back(self.queues.snapshot())
        for _ in range(data.draw(st.integers(0, 3)) if self.held else 0):
            if self.held:
                self.use(data=data, report=True)
        self.saved = (state, Counter(self.model))

    @rule()
    def lose_a_server(self) -> None:
        """All tasks are restarted, with the model and the queues of the last checkpoint."""
        state, model = self.saved
        self.queues.roll_back(state)
        self.model = Counter(model)
        self.held.clear()
        # Blocks that are in the model and not in the state are used again, and no others.
        left = blocks_left(state)
        self.repeated = Counter({block: self.model[block] + (block in left) - 1 for block in BLOCKS})

    @invariant()
    def nothing_is_used_more_often_than_it_was_given_back(self) -> None:
        for block, times in self.model.items():
            assert times <= 1 + self.repeated[block]

    def teardown(self) -> None:
        """The rest is used, and the workers that hold something report their progress."""
        for worker, (name, part, _, used) in self.held.items():
            for block in range(used, part.end):
                self.model[name, part.epoch, block] += 1
            self.queues.use(worker, name, part.number, part.end)
        for name, spec in SPECS.items():
            while (part := self.queues.take(-1, name, spec)) is not None:
                for block in range(part.begin, part.end):
                    self.model[name, part.epoch, block] += 1
                self.queues.use(-1, name, part.number, part.end)
            queue = self.queues.named(name)
            assert queue is not None
            assert queue.all_given
            assert not queue.holders
        assert set(self.model) == set(BLOCKS), "a block was lost"
        for block in BLOCKS:
            assert 1 <= self.model[block] <= 1 + self.repeated[block]


def blocks_left(state: SavedState | None) -> set[tuple[str, int, int]]:
    """All blocks to be used from there on."""
    queues: ShardQueues[str] = ShardQueues()
    queues.roll_back(state)
    return {
        (name, part.epoch, block)
        for name, spec in SPECS.items()
        for part in use_up(queues.open(name, spec))
        for block in range(part.begin, part.end)
    }


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def read_back(state: SavedState) -> SavedState:
    """As a chief stores the state next to a checkpoint and returns it, through the JSON of its own interpreter."""
    fields = json.loads(msgspec.json.encode(state))
    line = json.dumps({"request": 1, "type": "rollback", "state": fields}).encode()
    assert len(line) < MAX_LINE
    request = read_line(line)
    assert isinstance(request, tuple)
    assert isinstance(request[1], Rollback)
    assert request[1].state is not None
    return request[1].state


def use_up(queue: ShardQueue[str], holder: str = "worker") -> list[Part]:
    parts = []
    while (part := queue.take(holder)) is not None:
        parts.append(part)
        queue.use(holder, part.number, part.end)
    return parts


specs = st.builds(
    QueueSpec,
    size=st.integers(1, 200),
    shard=st.integers(1, 250),
    epochs=st.integers(1, 4),
    seed=st.integers(-5, 5),
    shuffle=st.booleans(),
)


@given(specs)
def test_a_queue_without_faults_hands_out_each_offset_once_an_epoch(spec: QueueSpec) -> None:
    parts = use_up(ShardQueue(spec))
    assert [part.epoch for part in parts] == sorted(part.epoch for part in parts)
    used = Counter((part.epoch, block) for part in parts for block in range(part.begin, part.end))
    assert used == Counter({(epoch, block): 1 for epoch in range(spec.epochs) for block in range(spec.size)})


@given(specs, st.data())
def test_the_order_is_the_same_after_a_restored_state(spec: QueueSpec, data: st.DataObject) -> None:
    queue: ShardQueue[str] = ShardQueue(spec)
    for _ in range(data.draw(st.integers(0, spec.total))):
        part = queue.take("worker")
        assert part is not None
        queue.use("worker", part.number, part.end)
    state = queue.state()
    assert use_up(ShardQueue(spec, state)) == use_up(queue)


def test_the_rest_of_a_part_is_returned_and_handed_out_before_all_others() -> None:
    queue: ShardQueue[str] = ShardQueue(QueueSpec(size=30, shard=10))
    first, second = queue.take("a"), queue.take("b")
    assert first is not None
    assert second is not None
    queue.use("a", first.number, 4)
    queue.use("b", second.number, 13)
    queue.give_back("b")
    queue.give_back("a")
    assert queue.take("c") == Part(0, 4, 10, 0)
    assert queue.take("c") == Part(1, 13, 20, 0)
    assert queue.take("c") == Part(2, 20, 30, 0)
    assert queue.take("c") is None
    assert queue.holders


def test_a_part_is_used_forwards_within_its_end_and_by_its_holder() -> None:
    queue: ShardQueue[str] = ShardQueue(QueueSpec(size=30, shard=10))
    part = queue.take("a")
    assert part is not None
    queue.use("a", part.number, 5)
    for holder, offset, lost in (("a", 4, False), ("a", 11, False), ("b", 6, True)):
        with pytest.raises(QueueError) as refused:
            queue.use(holder, part.number, offset)
        assert refused.value.lost is lost
    queue.use("a", part.number, 5)
    assert queue.take("a") == Part(1, 10, 20, 0)


def test_the_shuffle_depends_on_seed_and_epoch_alone_in_every_interpreter() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        shuffle = Shuffle(100, seed, epoch)
        return [shuffle.at(place) for place in range(100)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25
    # The order is stored with checkpoints: another one would use some blocks twice and others never.
    assert order(1, 0)[:8] == FIRST
    code = "from tf_ps_runner.data.order import Shuffle; s = Shuffle(100, 1, 0); print([s.at(i) for i in range(8)])"
    printed = subprocess.run([sys.executable, "-R", "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == FIRST


FIRST = [20, 26, 22, 32, 85, 66, 43, 9]


@given(st.integers(1, 3000), st.integers(), st.integers(0, 3))
def test_a_shuffle_has_each_number_once(parts: int, seed: int, epoch: int) -> None:
    shuffle = Shuffle(parts, seed, epoch)
    assert sorted(shuffle.at(place) for place in range(parts)) == list(range(parts))


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_a_shuffle_of_few_parts_has_all_orders_about_equally_often(parts: int) -> None:
    orders = list(itertools.permutations(range(parts)))
    found = Counter()
    seeds = 300 * len(orders)
    for seed in range(min(seeds, 12_000)):
        shuffle = Shuffle(parts, seed, 0)
        found[tuple(shuffle.at(place) for place in range(parts))] += 1
    expected = min(seeds, 12_000) / len(orders)
    assert set(found) == set(orders)
    # 300 are expected of each (100 of the 120 orders of five), give or take 17 (10).
    assert all(0.5 * expected < times < 1.5 * expected for times in found.values())


def test_another_spec_for_a_queue_is_an_error_that_names_both() -> None:
    queues: ShardQueues[str] = ShardQueues()
    assert queues.take("a", "train", QueueSpec(size=10, shard=5)) is not None
    with pytest.raises(QueueError, match="queue train exists already and hands out 10 in parts of 5, in order, not"):
        queues.take("b", "train", QueueSpec(size=10, shard=5, seed=3, shuffle=True))
    assert queues.take("b", "train", QueueSpec(size=10, shard=5)) == Part(1, 5, 10, 0)


def test_queues_of_several_names_are_independent() -> None:
    queues: ShardQueues[str] = ShardQueues()
    spec = QueueSpec(size=10, shard=10)
    assert queues.take("a", "train", spec) == queues.take("a", "test", spec) == Part(0, 0, 10, 0)
    queues.use("a", "train", 0, 10)
    queues.give_back("a")
    assert queues.take("b", "train", spec) is None
    assert queues.take("b", "test", spec) == Part(0, 0, 10, 0)


def test_the_number_of_queues_and_open_parts_is_limited() -> None:
    queues: ShardQueues[int] = ShardQueues()
    spec = QueueSpec(size=2**50, shard=2**10)
    for number in range(MAX_QUEUES):
        queues.open(f"queue-{number:02}" + "x" * 92, spec)
    with pytest.raises(QueueError, match="16 queues at most"):
        queues.open("one-more", spec)
    parts = 0
    while queues.take(parts, f"queue-{parts % MAX_QUEUES:02}" + "x" * 92, spec) is not None:
        parts += 1
    assert parts == MAX_OPEN
    state = read_back(queues.snapshot())
    queues.give_back(17)
    assert queues.take(-1, "queue-01" + "x" * 92, spec) is not None, "a returned part already counts as open"
    queues.roll_back(state)
    assert queues.snapshot() == state


def test_the_longest_state_fits_into_one_line() -> None:
    spec = QueueSpec(size=2**50, shard=2**10, epochs=1, seed=-(2**53), shuffle=True)
    each = MAX_OPEN // MAX_QUEUES
    opened = tuple((MAX_SHARDS - 1 - number, spec.shard - 1) for number in range(each))
    queues = {f"{number:03}" + "x" * 97: QueueState(spec, MAX_SHARDS, opened) for number in range(MAX_QUEUES)}
    state = SavedState(STATE_VERSION, queues)
    state.check()
    longest = SavedState(
        STATE_VERSION,
        {
            name: QueueState(spec, MAX_SHARDS, tuple((MAX_SHARDS, MAX_SHARDS) for _ in range(each + 1)))
            for name in queues
        },
    )
    read_back(longest)


def test_a_queue_of_many_parts_needs_little_time_and_memory() -> None:
    queue: ShardQueue[str] = ShardQueue(QueueSpec(size=2**50, shard=2**10, seed=3, shuffle=True))
    parts = [queue.take("a") for _ in range(5)]
    assert len({part.begin for part in parts if part is not None}) == 5
    assert len(msgspec.json.encode(queue.state())) < 300


SPEC = QueueSpec(size=25, shard=10, epochs=2)


@pytest.mark.parametrize(
    ("state", "clause"),
    [
        (SavedState(2, {}), "it has version 2"),
        (SavedState(1, {"a": QueueState(QueueSpec(2**50, 1), 0)}), "too many parts"),
        (SavedState(1, {"a": QueueState(SPEC, 7)}), "more parts were handed out than there are"),
        (SavedState(1, {"a": QueueState(SPEC, 2, ((2, 0),))}), "never handed out"),
        (SavedState(1, {"a": QueueState(SPEC, 2, ((1, 0), (1, 3)))}), "or is so twice"),
        (SavedState(1, {"a": QueueState(SPEC, 3, ((2, 5),))}), "a part of 5 is open of which 5 have been used"),
        (
            SavedState(
                1, {name: QueueState(QueueSpec(9999, 1), 1000, tuple((n, 0) for n in range(1000))) for name in "ab"}
            ),
            "are open in it",
        ),
    ],
)
def test_an_invalid_state_is_refused_and_changes_nothing(state: SavedState, clause: str) -> None:
    queues: ShardQueues[str] = ShardQueues()
    queues.take("a", "train", SPEC)
    before = queues.snapshot()
    with pytest.raises(StateError, match=clause):
        queues.roll_back(state)
    assert queues.snapshot() == before


def test_a_rollback_to_the_beginning_removes_all_queues() -> None:
    queues: ShardQueues[str] = ShardQueues()
    queues.take("a", "train", SPEC)
    queues.roll_back(None)
    assert queues.snapshot() == SavedState(STATE_VERSION, {})
    with pytest.raises(QueueError) as refused:
        queues.use("a", "train", 0, 5)
    assert refused.value.lost
    assert queues.take("a", "train", QueueSpec(size=1, shard=1)) == Part(0, 0, 1, 0)


@given(st.sets(st.integers(0, 5)), st.lists(st.integers(0, 5)), st.none() | st.integers(0, 5))
def test_waiting_tasks_finish_at_the_end_unless_they_may_be_needed(
    holders: set[int], waiting: list[int], preferred: int | None
) -> None:
    finished = finished_waiters(holders, waiting, preferred)
    assert finished <= set(waiting)
    if holders - set(waiting):
        assert not finished, "a task that does not wait may die, and its part be needed"
    stays = set(waiting) - finished
    if holders and not holders - set(waiting):
        assert len(stays) <= 1, "tasks that hold something and wait for each other would wait for ever"
        if len(set(waiting)) > 1:
            assert stays, "one task must take over what comes back"
        for one in stays:
            assert holders - {one}
    if not holders:
        assert not stays


def test_the_chief_stays_for_the_last_parts_unless_it_holds_them_itself() -> None:
    assert finished_waiters({1, 2}, [1, 2, 0], preferred=0) == {1, 2}
    assert finished_waiters({0, 1}, [1, 0, 2], preferred=0) == {1, 2}
    assert finished_waiters({0}, [0, 1], preferred=0) == {0}
    assert finished_waiters({0}, [0], preferred=0) == {0}
