"""A position in an epoch that is valid for any world size: it counts samples, not steps.

An epoch is one permutation of the dataset, determined by the seed and the epoch. All ranks together consume it from the
front: a global batch is its next contiguous slice, distributed to the ranks round-robin. So one number, the samples
that all ranks together have used, determines the rest, for any number of ranks. Nothing is padded and nothing is
dropped: in the last global batch the ranks' shares differ by at most one sample, and a share may be empty.

The ranks must still call the same collectives, and the average gradient must not weight a small share like a full one.
`ElasticBatchSampler` gives every rank the same number of batches, the last one possibly empty. A loss that is summed,
then multiplied by `num_replicas / global_batch_size(...)`, makes DistributedDataParallel's average over the ranks the
mean over the samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from dlrover_run.observe import page

logger = logging.getLogger(__name__)


class ElasticDistributedSampler(DistributedSampler[int]):
    """This rank's samples of an epoch, from the position of all ranks together; replaces `DistributedSampler`.

    `num_replicas` and `rank` come from torch.distributed unless they are given. With `drop_last` the ranks get the same
    number of samples, and fewer than `num_replicas` samples of the epoch are unused; without it every sample is used
    once.

    `completed_num` changes only when the training loop calls `advance`: batches that a loader has prefetched are not
    used yet. `epochs` is how many epochs the job trains, if that is known: then the launcher knows how much is left.
    `num_samples`, `total_size` and `len()` describe the rest of the epoch: the largest share of a rank, all ranks
    together, and this rank.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        super().__init__(cast("Dataset[Any]", dataset), num_replicas, rank, shuffle, seed, drop_last)
        self.dataset_size = len(dataset)
        self.epochs = epochs
        self._move_to(epoch=0, completed_num=0)

    def _move_to(self, epoch: int, completed_num: int) -> None:
        left = self.dataset_size - completed_num
        self.epoch = epoch
        self.completed_num = completed_num
        self.total_size = left - left % self.num_replicas if self.drop_last else left
        self.num_samples = math.ceil(self.total_size / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # Sliced before it becomes a list: Python integers need far more memory than the tensor.
        mine = slice(self.completed_num + self.rank, self.completed_num + self.total_size, self.num_replicas)
        if not self.shuffle:
            return iter(range(self.dataset_size)[mine])
        # The same permutation as DistributedSampler's, so that changing samplers does not change an experiment's order.
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        indices: list[int] = torch.randperm(self.dataset_size, generator=generator)[mine].tolist()
        return iter(indices)

    def __len__(self) -> int:
        return len(range(self.rank, self.total_size, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; in the current epoch the position is kept."""
        if epoch != self.epoch:
            self._move_to(epoch, completed_num=0)

    def global_batch_size(self, batch_size: int) -> int:
        """How many samples all ranks together use in the next step, when each takes at most `batch_size`."""
        return min(batch_size * self.num_replicas, self.total_size)

    def advance(self, samples: int) -> None:
        """Record that all ranks together have used the next `samples` samples of the epoch.

        Raises ValueError when the epoch has fewer left.
        """
        if not 0 <= samples <= self.total_size:
            raise ValueError(
                f"cannot advance by {samples} samples: epoch {self.epoch} has {self.total_size} left "
                f"of {self.dataset_size}"
            )
        self._move_to(self.epoch, self.completed_num + samples)
        # This rank's share: the figures of all ranks add up to the samples of the job.
        own = len(range(self.rank, samples, self.num_replicas))
        page.add(page.StepSource.SAMPLER, 1, own, left=self._left())

    def _left(self) -> int | None:
        """How many samples all ranks have still to use, in this epoch and in those that follow."""
        if self.epochs is None:
            return None
        return max(0, self.epochs - self.epoch) * self.dataset_size - min(self.completed_num, self.dataset_size)

    def state_dict(self) -> dict[str, int]:
        """The position, the same on every rank and for every world size."""
        return {"epoch": self.epoch, "completed_num": self.completed_num}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position. Raises ValueError when this dataset has no such position."""
        epoch, completed_num = state["epoch"], state["completed_num"]
        if epoch < 0 or not 0 <= completed_num <= self.dataset_size:
            raise ValueError(
                f"the saved position (epoch {epoch}, {completed_num} samples completed) does not fit this dataset "
                f"of {self.dataset_size} samples; resume with the dataset that the checkpoint was made with"
            )
        self._move_to(epoch, completed_num)
        logger.info("Load epoch = %d, completed num = %d, num_samples = %d", epoch, completed_num, self.num_samples)


class ElasticBatchSampler:
    """This rank's batches for what is left of the epoch; every rank gets the same number of them.

    Only the last batch may be short, and it may be empty on some ranks. Pass it to a DataLoader as `batch_sampler`,
    with a `collate_fn` that accepts an empty batch.
    """

    def __init__(self, sampler: ElasticDistributedSampler, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.sampler = sampler
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # The length is read first: the sampler advances while a loader draws from this iterator.
        batches = len(self)
        indices = list(self.sampler)
        for start in range(0, batches * self.batch_size, self.batch_size):
            yield indices[start : start + self.batch_size]

    def __len__(self) -> int:
        return math.ceil(self.sampler.num_samples / self.batch_size)
