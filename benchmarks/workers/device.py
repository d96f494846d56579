"""The device of a worker, without one: see `device_lab/device.c`. A script calls its functions from its own lines, with
no Python between, as it calls those of torch that wait for a device.

BENCHMARK_DEVICE has the library and the options: `tcp` (1: data on connections), `wait` (0: spins, 1: sleeps),
`copies` (1: in the background), `shared` (1: all ranks have one device), `ras` (1: it answers at NCCL_RAS_ADDR).
"""

import ctypes
import os
import threading
import time

import torch.distributed as dist

HEARTBEAT = 1.0
"""Seconds between two questions to the store, as torch's thread for NCCL asks whether another rank wants a dump."""

BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = range(5)
BYTES = 16 << 20
"""Of one operation, as the ranks agree about it. What goes through a connection is less."""

path, *_options = os.environ["BENCHMARK_DEVICE"].split()
options = {name: int(value) for name, value in (option.split("=") for option in _options)}
library = ctypes.CDLL(path)
library.device_kernel.argtypes = [ctypes.c_double]
library.device_kernel.restype = None
library.device_collective.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long]
library.device_collective.restype = None
library.device_group.argtypes = [ctypes.c_int, ctypes.c_uint64]

kernel = library.device_kernel
"""Enqueue a kernel of so many seconds; a negative one never ends."""
collective = library.device_collective
"""Enqueue an operation: the number of the group, the kind, the bytes."""
synchronize = library.device_synchronize
"""Wait until all that was enqueued is done."""

_rank, _world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_store, _, _ = next(dist.rendezvous("env://"))


def _heartbeat() -> None:
    while True:
        time.sleep(HEARTBEAT)
        _store.check(["exception_dump"])


def _open() -> None:
    folder = os.path.join(os.environ["BENCHMARK_RUN"], f"round-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    os.makedirs(folder, exist_ok=True)
    number = 0 if options["shared"] else int(os.environ["LOCAL_RANK"])
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    ras = os.environ.get("NCCL_RAS_ADDR", "") if options["ras"] else ""
    flags = (options["tcp"], options["wait"], options["copies"], options["shared"])
    if library.device_open(folder.encode(), _rank, _world, number, interface.encode(), ras.encode(), *flags):
        raise OSError("the device cannot be opened")
    threading.Thread(target=_heartbeat, daemon=True).start()


_open()
