"""What the ranks of a checkpoint agree on, over torch's process group; it is imported only when it is called for.

Without a process group a process agrees with itself, which is right for a program that only reads checkpoints.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from dlrover_run.failures.collective_errors import CLOSED


def has_group() -> bool:
    """Whether this process has joined the others."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def check_size(rank: int, world_size: int) -> None:
    """Raise ValueError unless these are the rank and the size of the process group."""
    import torch.distributed as dist

    found = dist.get_rank(), dist.get_world_size()
    if found != (rank, world_size):
        raise ValueError(
            f"rank and world_size are {rank} and {world_size}, but those of the process group are {found[0]} and "
            f"{found[1]}: give those of the process group"
        )


def rank_and_size() -> tuple[int, int]:
    """The rank and the size of the process group."""
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def first_proposal(key: str, proposal: str) -> str:
    """What the first rank has proposed under this key. No rank waits for another one."""
    from torch.distributed.distributed_c10d import _get_default_store

    agreed: bytes = _get_default_store().compare_set(f"dlrover_run/{key}", "", proposal)
    return agreed.decode()


def publish(key: str, value: str) -> None:
    """Show a value to the other ranks of this round."""
    from torch.distributed.distributed_c10d import _get_default_store

    _get_default_store().set(f"dlrover_run/{key}", value)


def published(key: str) -> str | None:
    """What a rank of this round has published under this key; None if none has yet."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.get(f"dlrover_run/{key}").decode() if store.check([f"dlrover_run/{key}"]) else None


def waits_for_device() -> bool:
    """Whether the process group has collectives that a device finishes: a rank that has lost another one then waits for
    its device, and an error does not always reach its script. gloo and MPI return with an error."""
    if not has_group():
        return False
    import torch.distributed as dist

    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    found = ((device, backend or device) for device, _, backend in pairs)
    # A group without a named backend has one for each kind of device, also for those that this machine lacks.
    return any(backend not in ("gloo", "mpi") and _is_available(device) for device, backend in found)


def _is_available(device: str) -> bool:
    import torch

    module = getattr(torch, device, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


class StoreRanks:
    """The ranks of the process group, as `StopAgreement` needs them: over torch's store."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return rank_and_size()[1]

    def synchronize(self) -> None:
        """Return when the device has finished what was enqueued."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif hasattr(torch, "accelerator") and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def add(self, key: str, amount: int) -> int:
        """Add to a number that all ranks share; the sum."""
        from torch.distributed.distributed_c10d import _get_default_store

        return int(_get_default_store().add(f"dlrover_run/{key}", amount))

    def first(self, key: str, proposal: str) -> str:
        """What the first rank has proposed under this key."""
        return first_proposal(key, proposal)

    def publish(self, key: str, value: str) -> None:
        """Show a value to the other ranks."""
        publish(key, value)

    def await_value(self, key: str, timeout: float) -> bool:
        """Whether a rank publishes a value under this key within `timeout` seconds."""
        from torch.distributed.distributed_c10d import _get_default_store

        try:
            _get_default_store().wait([f"dlrover_run/{key}"], timedelta(seconds=timeout))
        except RuntimeError:
            return False
        return True


def of_all(value: Any) -> list[Any]:
    """The value of each rank, in their order. All ranks call it."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective has failed because another rank has ended, or has left the group."""
    return isinstance(error, RuntimeError) and CLOSED.search(" ".join(f"RuntimeError: {error}".split())) is not None
