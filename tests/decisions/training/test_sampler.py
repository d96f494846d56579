"""The elastic sampler: every sample of an epoch exactly once, whatever happens to the world size."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dlrover_run.training import ElasticBatchSampler, ElasticDistributedSampler


def world_of(world_size: int, dataset_size: int, **options: Any) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(range(dataset_size), world_size, rank, **options) for rank in range(world_size)]


def next_global_batches(samplers: list[ElasticDistributedSampler], batch_size: int) -> list[list[list[int]]]:
    """Per step the share of each rank; fails when the ranks do not have the same number of steps."""
    batches = [ElasticBatchSampler(sampler, batch_size) for sampler in samplers]
    assert len({len(each) for each in batches}) == 1
    steps = [list(each) for each in zip(*batches, strict=True)]
    assert len(steps) == len(batches[0])
    return steps


generations = st.lists(
    st.tuples(
        st.integers(1, 9),  # world size
        st.integers(1, 8),  # batch size of one rank
        st.integers(1, 5),  # steps from one checkpoint to the next
        st.integers(0, 40),  # steps until the kill
    ),
    max_size=12,
)


@settings(deadline=None)
@given(dataset_size=st.integers(1, 300), seed=st.integers(0, 5), shuffle=st.booleans(), generations=generations)
def test_each_epoch_uses_each_sample_once_over_any_sequence_of_world_sizes_and_kills(
    dataset_size: int, seed: int, shuffle: bool, generations: list[tuple[int, int, int, int]]
) -> None:
    epochs = 3
    used: list[list[int]] = [[] for _ in range(epochs)]
    saved = {"epoch": 0, "completed_num": 0}
    # The last run is never killed, so that every epoch ends.
    for world_size, batch_size, checkpoint_steps, steps_to_live in [*generations, (2, 5, 3, -1)]:
        samplers = world_of(world_size, dataset_size, seed=seed, shuffle=shuffle)
        for sampler in samplers:
            sampler.load_state_dict(saved)
        # Work since the last checkpoint is lost with the weights, so its samples do not count as used.
        used[saved["epoch"]] = used[saved["epoch"]][: saved["completed_num"]]
        for later in range(saved["epoch"] + 1, epochs):
            used[later] = []
        steps = 0
        for epoch in range(saved["epoch"], epochs):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            for shares in next_global_batches(samplers, batch_size):
                if steps == steps_to_live:
                    break
                samples = samplers[0].global_batch_size(batch_size)
                assert samples == sum(map(len, shares)) > 0
                assert max(map(len, shares)) - min(map(len, shares)) <= 1
                used[epoch] += [sample for share in shares for sample in share]
                for sampler in samplers:
                    sampler.advance(samples)
                steps += 1
                if steps % checkpoint_steps == 0:
                    saved = samplers[0].state_dict()
            if steps == steps_to_live:
                break
        assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
    for epoch in range(epochs):
        assert Counter(used[epoch]) == Counter(range(dataset_size))


@settings(deadline=None)
@given(dataset_size=st.integers(0, 100), world_size=st.integers(1, 8), seed=st.integers(0, 9), epoch=st.integers(0, 9))
def test_uses_the_same_permutation_as_torch(dataset_size: int, world_size: int, seed: int, epoch: int) -> None:
    size = dataset_size * world_size  # divisible, so that torch's sampler neither pads nor drops
    dataset = TensorDataset(torch.empty(size))
    for rank in range(world_size):
        theirs: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, seed=seed)
        ours = ElasticDistributedSampler(range(size), world_size, rank, seed=seed)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@settings(deadline=None)
@given(dataset_size=st.integers(0, 200), world_size=st.integers(1, 8), completed=st.integers(0, 200))
def test_lengths_describe_the_rest_of_the_epoch(dataset_size: int, world_size: int, completed: int) -> None:
    completed = min(completed, dataset_size)
    samplers = world_of(world_size, dataset_size)
    for sampler in samplers:
        sampler.load_state_dict({"epoch": 0, "completed_num": completed})
        assert len(sampler) == len(list(sampler))
        assert sampler.total_size == dataset_size - completed
    assert samplers[0].num_samples == max(len(sampler) for sampler in samplers)


@settings(deadline=None)
@given(dataset_size=st.integers(0, 100), world_size=st.integers(1, 8), batch_size=st.integers(1, 9))
def test_drop_last_gives_equal_shares_and_drops_less_than_one_sample_per_rank(
    dataset_size: int, world_size: int, batch_size: int
) -> None:
    samplers = world_of(world_size, dataset_size, drop_last=True)
    used: list[int] = []
    for shares in next_global_batches(samplers, batch_size):
        assert len(set(map(len, shares))) == 1
        used += [sample for share in shares for sample in share]
        samples = samplers[0].global_batch_size(batch_size)
        for sampler in samplers:
            sampler.advance(samples)
        assert samplers[0].completed_num == len(used)
    assert len(used) == len(set(used)) == dataset_size - dataset_size % world_size
    assert all(sampler.total_size == 0 for sampler in samplers)


def test_a_global_batch_is_the_next_slice_of_the_permutation() -> None:
    order = list(ElasticDistributedSampler(range(50), 1, 0, seed=3))
    samplers = world_of(4, 50, seed=3)
    position = 0
    for shares in next_global_batches(samplers, 5):
        batch = [sample for share in shares for sample in share]
        assert sorted(batch) == sorted(order[position : position + len(batch)])
        position += len(batch)


def test_prefetching_does_not_change_the_position() -> None:
    sampler = ElasticDistributedSampler(range(100), 2, 1, shuffle=False)
    dataset: Any = range(100)
    batch_sampler = ElasticBatchSampler(sampler, 10)
    loader: DataLoader[int] = DataLoader(dataset, batch_sampler=batch_sampler, num_workers=1, prefetch_factor=4)
    batches = iter(loader)
    next(batches)
    sampler.advance(sampler.global_batch_size(10))
    assert sampler.state_dict() == {"epoch": 0, "completed_num": 20}
    assert next(batches).tolist() == list(range(21, 40, 2))
    assert len(list(batches)) == 3


def test_set_epoch_keeps_the_position_only_in_the_same_epoch() -> None:
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    sampler.load_state_dict({"epoch": 4, "completed_num": 6})
    sampler.set_epoch(4)
    assert sampler.state_dict() == {"epoch": 4, "completed_num": 6}
    sampler.set_epoch(5)
    assert sampler.state_dict() == {"epoch": 5, "completed_num": 0}


def test_logs_its_position_on_resume(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ElasticDistributedSampler(range(60_000), 6, 5)
    with caplog.at_level(logging.INFO, logger="dlrover_run.training.sampler"):
        sampler.load_state_dict({"epoch": 0, "completed_num": 51_200})
    assert caplog.messages == ["Load epoch = 0, completed num = 51200, num_samples = 1467"]


@pytest.mark.parametrize("state", [{"epoch": 0, "completed_num": 11}, {"epoch": -1, "completed_num": 0}])
def test_refuses_a_position_that_the_dataset_does_not_have(state: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="dataset of 10 samples"):
        ElasticDistributedSampler(range(10), 2, 0).load_state_dict(state)


def test_reports_what_is_left_of_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int | None] = []
    monkeypatch.setattr("dlrover_run.observe.page.add", lambda *counts, left: reported.append(left))
    for epochs in (2, None):
        sampler = ElasticDistributedSampler(range(10), num_replicas=2, rank=1, epochs=epochs)
        sampler.advance(4)
        sampler.advance(6)
        sampler.set_epoch(1)
        sampler.advance(4)
    assert reported == [16, 10, 6, None, None, None]


def test_refuses_to_advance_past_the_end() -> None:
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    sampler.advance(8)
    with pytest.raises(ValueError, match="epoch 0 has 2 left"):
        sampler.advance(3)


def test_weighting_by_the_global_batch_gives_the_gradient_of_one_worker() -> None:
    """Summed losses, scaled as the module's docstring says and averaged over ranks, equal the mean over the samples."""
    inputs = torch.arange(21, dtype=torch.float64).reshape(7, 3)
    world_size = 4

    def gradient(weight: torch.Tensor, share: list[int], factor: float) -> torch.Tensor:
        loss = ((inputs[share] @ weight) ** 2).sum() * factor
        return torch.autograd.grad(loss, weight)[0]

    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    samplers = world_of(world_size, 7)
    (shares,) = next_global_batches(samplers, 2)
    factor = world_size / samplers[0].global_batch_size(2)
    averaged = torch.stack([gradient(weight, share, factor) for share in shares]).mean(0)
    assert torch.allclose(averaged, gradient(weight, list(range(7)), 1 / 7))
