"""How fast the processes of a link gather each other's data, and whether it arrives right.

They meet at a store, tell each other how they can talk, and form a process group. Data is gathered a few times to see
how long that takes, then for as long as all have agreed upon; each part begins when all have come, so that nobody's
waiting for a late partner is measured. The speed is the bus bandwidth of an allgather: what comes in at each process,
(n-1)/n of all data, by the time.

A process may fail in a link and try the next one. Gloo gives up after its time-out, or as soon as a partner's
connection ends. The libraries of accelerators cannot be relied upon to come back from a collective that hangs, nor to
leave the process alive: so after `timeout` a thread answers the order and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so.

from .accelerators import Accelerator
from .answers import first_line
from .orders import Link

GATHERED = {"cpu": 8 * 2**20}
"""Bytes that all processes of a link gather together, for a kind of device that is not an accelerator."""

ACCELERATOR_GATHERED = 256 * 2**20
"""The same for an accelerator: enough for the bandwidth to matter and not the delay."""

TOGETHER = 4
"""Allgathers between two barriers, each into a place of its own, so that each can be checked afterwards."""

LONG_ENOUGH = 0.25
"""Seconds for which data is gathered."""

MOST_PARTS = 200
"""Parts of `TOGETHER` allgathers at most; a link that does as many in that time is as fast as memory."""

KNOCK_INTERVAL = 0.05
"""Seconds between two attempts to reach a store whose host may not have come yet: nobody can tell of that sooner."""

GIVE_UP_AFTER = 5.0
"""Seconds after `timeout` at which gloo, which should have given up by itself, counts as hanging. The process then
answers and ends itself."""

LIBRARY_PATIENCE = 600.0
"""Seconds after `timeout` at which the library of an accelerator would end the process by itself: never, because this
process has answered and ended by then. A process that was aborted would look like one whose node is at fault."""

LOOPBACK = "127.0.0.1"
"""Where a process reaches the store that it hosts itself."""

STRIDE = 1_000_003
"""How far apart the numbers of two ranks are."""


class LinkProblem(Exception):
    """The link could not be tried, or failed; the message is a clause."""


class Stores:
    """The stores that this process hosts, one for each port, for as long as it lives.

    Their port is held by the agent, which has bound it and does not listen: with SO_REUSEADDR on both, the store may
    bind and listen there too.
    """

    def __init__(self) -> None:
        self._hosted: dict[int, TCPStore] = {}

    def host(self, port: int, timeout: float) -> None:
        """Host the store at a port, unless this process does so already. Raises LinkProblem."""
        if port in self._hosted:
            return
        wait = timedelta(seconds=timeout)
        try:
            self._hosted[port] = TCPStore(LOOPBACK, port, is_master=True, timeout=wait, wait_for_workers=False)
        except Exception as error:
            raise LinkProblem(f"port {port} could not be listened on: {first_line(error)}") from error

    def open(self, order: Link, timeout: float) -> Store:
        """A connection to the store of a link, under the link's own names. Raises LinkProblem."""
        address = order.address
        if order.host:
            address = LOOPBACK
            self.host(order.port, timeout)
        try:
            wait = timedelta(seconds=_await_listener(address, order.port, timeout))
            client = TCPStore(address, order.port, is_master=False, timeout=wait, wait_for_workers=False)
        except Exception as error:
            raise LinkProblem(
                f"no connection to {order.address}:{order.port} within {order.timeout:g} seconds: {first_line(error)}"
            ) from error
        return PrefixStore(order.name, client)


def _await_listener(address: str, port: int, timeout: float) -> float:
    """Wait until somebody listens there; the seconds that are left. Raises OSError after `timeout` seconds.

    The store's own client rests longer after each attempt, and was seen to give up after 2.5 times its time-out.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), max(deadline - time.monotonic(), KNOCK_INTERVAL)).close()
            return max(deadline - time.monotonic(), KNOCK_INTERVAL)
        except OSError:
            if time.monotonic() + KNOCK_INTERVAL >= deadline:
                raise
            time.sleep(KNOCK_INTERVAL)


def measure_link(accelerator: Accelerator, order: Link, stores: Stores, give_up: Callable[[str], None]) -> float:
    """Try one link with all its other processes; the bus bandwidth in GB/s.

    `give_up`, which answers with a clause and ends the process, is called from another thread when the link hangs, and
    from this one when the process is of no use any more. Raises LinkProblem otherwise.
    """
    deadline = time.monotonic() + order.timeout
    slow = f"it was not done within {order.timeout:g} seconds"
    guard = _start_guard(order.timeout + GIVE_UP_AFTER, lambda: give_up(slow))
    try:
        store = stores.open(order, order.timeout)
        backend = _agree_on_backend(accelerator.backend, order, store, deadline)
        if backend == "gloo":
            with _group(backend, order, store, deadline, None, give_up):
                return _gather(torch.device("cpu"), order, lambda: None)
        guard.cancel()
        guard = _start_guard(max(deadline - time.monotonic(), 0.0), lambda: give_up(slow))
        try:
            with _group(backend, order, store, deadline + LIBRARY_PATIENCE, accelerator.device, give_up):
                return _gather(accelerator.device, order, accelerator.synchronize)
        except WrongData:
            raise
        except Exception as error:
            give_up(f"{backend} failed: {first_line(error)}")
            raise
    finally:
        guard.cancel()


class WrongData(LinkProblem):
    """What arrived was not what was sent."""


def _start_guard(seconds: float, act: Callable[[], None]) -> threading.Timer:
    guard = threading.Timer(seconds, act)
    guard.daemon = True
    guard.start()
    return guard


def _agree_on_backend(own: str, order: Link, store: Store, deadline: float) -> str:
    """What all processes of the link can talk with: what each has, when it is the same for all, else gloo.

    It is also where all wait for each other, so that one that never comes can be named. Raises LinkProblem.
    """
    store.set(f"backend/{order.rank}", own)
    offered = {own}
    for rank in range(order.world):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"backend/{rank}"], timedelta(seconds=left))
            offered.add(store.get(f"backend/{rank}").decode())
        except Exception as error:
            if time.monotonic() >= deadline:
                raise LinkProblem(
                    f"rank {rank} of its {order.world} processes did not come within {order.timeout:g} seconds"
                ) from error
            raise LinkProblem(f"the store at {order.address}:{order.port} was lost: {first_line(error)}") from error
    return own if len(offered) == 1 else "gloo"


@contextlib.contextmanager
def _group(
    backend: str,
    order: Link,
    store: Store,
    deadline: float,
    device: torch.device | None,
    give_up: Callable[[str], None],
) -> Iterator[None]:
    """Be one of the processes of a process group. Raises LinkProblem when gloo fails."""
    timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    # A watchdog of NCCL's would abort the process over a partner's death, before it could say so.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=order.rank,
            world_size=order.world,
            timeout=timeout,
            # With its device NCCL connects now, where failures can be told; without an index it would be refused.
            device_id=device if device is not None and device.index is not None else None,
        )
        yield
    except LinkProblem:
        raise
    except Exception as error:
        if backend != "gloo":
            raise
        if not dist.is_initialized():
            _reset_group_number(give_up)
        raise LinkProblem(first_line(error)) from error
    finally:
        # Not after a failure of an accelerator's library, which hangs here: its process is ended instead.
        if dist.is_initialized():
            dist.destroy_process_group()


def _reset_group_number(give_up: Callable[[str], None]) -> None:
    """Have the next process group of this process numbered 0, as that of a partner which has just been started.

    Torch numbers the groups of a process, and the number is part of their keys in the store: processes with different
    numbers wait for each other until their time-out. It begins again at 0 when the default group is destroyed. A group
    that could not be made was numbered and cannot be destroyed, so a group of this process alone is, in its place.
    """
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    except Exception as error:
        give_up(f"gloo cannot make a process group of one process: {first_line(error)}")
        raise


def _gather(device: torch.device, order: Link, synchronize: Callable[[], None]) -> float:
    """Gather data for about `LONG_ENOUGH` seconds; GB/s. Raises WrongData, or what torch raises."""
    together = GATHERED.get(device.type, ACCELERATOR_GATHERED)
    length = together // order.world // 4
    whole = torch.arange(length, dtype=torch.int32, device=device)
    expected = torch.cat([whole + rank * STRIDE for rank in range(order.world)])
    sent = whole + order.rank * STRIDE
    received = [torch.empty_like(expected) for _ in range(TOGETHER)]
    wrong: set[int] = set()
    gather = _allgather()

    def part(places: list[torch.Tensor]) -> float:
        for place in places:
            place.fill_(-1)
        dist.barrier(device_ids=[device.index] if device.index is not None else None)
        synchronize()
        began = time.perf_counter()
        for place in places:
            gather(place, sent)
        synchronize()
        taken = time.perf_counter() - began
        for place in places:
            if not torch.equal(place, expected):
                parts = zip(place.chunk(order.world), expected.chunk(order.world), strict=True)
                wrong.update(rank for rank, (came, right) in enumerate(parts) if not torch.equal(came, right))
        return taken

    part(received[:1])
    parts = _agree_on_parts(part(received[:1]) * TOGETHER, device, order.world)
    taken = sum(part(received) for _ in range(parts))
    # Nobody leaves before all have everything.
    dist.barrier(device_ids=[device.index] if device.index is not None else None)
    if wrong:
        ranks = ", ".join(str(rank) for rank in sorted(wrong))
        raise WrongData(f"data of rank {ranks} of its {order.world} processes arrived wrong")
    gathered = parts * TOGETHER * expected.nbytes * (order.world - 1) / order.world
    return gathered / taken / 1e9


def _allgather() -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Torch's allgather into one tensor, under its name in this version of torch."""
    newer: Callable[[torch.Tensor, torch.Tensor], object] | None = getattr(dist, "all_gather_single", None)
    return newer or dist.all_gather_into_tensor


def _agree_on_parts(seconds: float, device: torch.device, world: int) -> int:
    """How many parts of so many seconds all shall do: as the slowest says, since one that stops early leaves others
    waiting."""
    times = torch.empty(world, dtype=torch.float32, device=device)
    _allgather()(times, torch.tensor([seconds], dtype=torch.float32, device=device))
    slowest = float(times.max().item())
    return max(1, min(MOST_PARTS, round(LONG_ENOUGH / slowest))) if slowest > 0 else MOST_PARTS
