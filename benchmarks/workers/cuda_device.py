"""The functions of `device.py` on a GPU with NCCL, so that `stalling.py` has the same faults there.

All ranks share the first GPU that they see: NCCL believes that each has a host of its own. The main thread waits in
`item`, a function in C, on the script's own line. A file of each rank has its last operation and how many of that kind
it has launched, which is what NCCL counts.
"""

import mmap
import os
import struct

rank = os.environ["RANK"]
os.environ["NCCL_HOSTID"] = f"host{rank}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch  # noqa: E402 - NCCL reads its variables once
import torch.distributed as dist  # noqa: E402

BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = range(5)
"""The numbers of `device.py`, in which NCCL counts."""

BYTES = 4 << 20
"""Of one operation. Two ranks on one GPU take turns on it, so an operation takes some 50 ms."""

LAUNCHED = struct.Struct("qq")
ENDLESS = 10**15
PROBE = 10**8
"""Cycles of the kernels without an end, and of the one that says how long a cycle takes."""

torch.cuda.set_device(0)
dist.init_process_group("nccl")
_values = torch.ones(BYTES // 4, device="cuda")
_gathered = [torch.empty_like(_values) for _ in range(dist.get_world_size())]
_ready = torch.ones(1, device="cuda")
_counts = [0] * 5

_path = os.path.join(os.environ["BENCHMARK_RUN"], f"launched-{rank}")
with open(_path, "wb") as _file:
    _file.write(bytes(LAUNCHED.size))
with open(_path, "r+b") as _file:
    _launched = mmap.mmap(_file.fileno(), LAUNCHED.size)


def _cycles_of_a_second() -> float:
    torch.cuda._sleep(PROBE)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    torch.cuda._sleep(PROBE)
    ended.record()
    ended.synchronize()
    return PROBE / began.elapsed_time(ended) * 1000


_rate = _cycles_of_a_second()


def kernel(seconds: float) -> None:
    """Enqueue a kernel of so many seconds; a negative one never ends."""
    torch.cuda._sleep(ENDLESS if seconds < 0 else int(seconds * _rate))


def collective(group: int, kind: int, size: int) -> None:
    """Enqueue an operation of the default group."""
    _counts[kind] += 1
    LAUNCHED.pack_into(_launched, 0, kind, _counts[kind])
    if kind == ALL_GATHER:
        dist.all_gather(_gathered, _values)
    else:
        dist.all_reduce(_values[: max(1, size // 4)])


synchronize = _ready.item
"""Wait until all that was enqueued is done."""
