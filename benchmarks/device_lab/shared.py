"""What the processes of a job share about their devices and collectives, as `device.h` lays it out."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

MAX_RANKS, MAX_GROUPS, HISTORY = 64, 8, 4

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""The kinds of operations by their numbers, which are those of NCCL's counters."""


class Entry(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_int64), ("operation", ctypes.c_int64))


class Rank(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("address", ctypes.c_uint32),
        ("port", ctypes.c_int32),
        ("heard_at", ctypes.c_double),
        ("busy", ctypes.c_double),
        ("busy_since", ctypes.c_double),
        ("idle_since", ctypes.c_double),
        ("works", ctypes.c_int64),
        ("memory", ctypes.c_uint64),
        ("launched", (ctypes.c_uint64 * len(OPERATIONS)) * MAX_GROUPS),
        ("entered", ctypes.c_uint64 * MAX_GROUPS),
        ("completed", ctypes.c_uint64 * MAX_GROUPS),
        ("history", (Entry * HISTORY) * MAX_GROUPS),
        ("keepalives", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
    )


class Shared(ctypes.Structure):
    _fields_ = (
        ("changes", ctypes.c_uint32),
        ("world", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("members", ctypes.c_uint64 * MAX_GROUPS),
        ("ranks", Rank * MAX_RANKS),
    )


NAMES = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
"""What torch calls them."""


def awaited_operation(shared: Shared, guilty: int) -> str:
    """The operation of the default group in which ranks other than the guilty one wait, and how many of its kind they
    have launched with it; empty if none waits."""
    for number in range(shared.world):
        one = shared.ranks[number]
        entered = one.entered[0]
        if number != guilty and entered > one.completed[0]:
            operation = one.history[0][entered % HISTORY].operation
            return f"{NAMES[operation]} {one.launched[0][operation]}"
    return ""


def read_shared(folder: Path) -> Shared:
    """What is shared now by the processes of the round in that folder. Raises OSError if none has begun."""
    with open(folder / "device", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return Shared.from_buffer_copy(memory)
