"""Measures how fast the processes of a link gather each other's data, and checks the data.

They connect to a store, agree on a backend (gloo if two of them share a device), and form a process group. Data is
gathered once to measure how long that takes, then as often as all have agreed on. Each part begins with a barrier, so
that waiting for a late partner is not measured. The speed is the bus bandwidth of an allgather: the bytes that each
process receives, (n-1)/n of all data, by the time.

A process may fail in a link and try the next one. Gloo gives up after its timeout, or as soon as a partner's connection
ends. The library of an accelerator may not return from a collective that hangs, or may abort the process: so after
`timeout` a thread replies and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so.

from .accelerators import Accelerator
from .protocol import Link, first_line

GATHERED = {"cpu": 8 * 2**20}
"""Bytes that all processes of a link gather together, for a device type that is not an accelerator."""

ACCELERATOR_GATHERED = 256 * 2**20
"""The same for an accelerator: enough that the bandwidth and not the latency is measured."""

TOGETHER = 4
"""Allgathers between two barriers, each into a tensor of its own, so that each can be checked afterwards."""

LONG_ENOUGH = 0.25
"""Seconds for which data is gathered."""

MAX_PARTS = 200
"""Maximum parts of `TOGETHER` allgathers; a link that does as many in that time is as fast as memory."""

RETRY_INTERVAL = 0.05
"""Seconds between two attempts to reach a store whose host may not listen yet; nothing reports that it does."""

GIVE_UP_AFTER = 5.0
"""Seconds after `timeout` at which gloo, which should have given up by itself, counts as hanging. The process then
replies and ends itself."""

LIBRARY_TIMEOUT = 600.0
"""Seconds after `timeout` at which the library of an accelerator would abort the process. That never happens, because
this process has ended by then. An aborted process would look like a fault of its node."""

LOOPBACK = "127.0.0.1"
"""The address of a store that this process hosts itself."""

STRIDE = 1_000_003
"""The difference between the data of two consecutive ranks."""


class LinkProblem(Exception):
    """The link could not be tested, or failed; the message is a clause."""


class WrongData(LinkProblem):
    """The received data is not the data that was sent."""


class Offer(NamedTuple):
    """What a process of a link has: the library that connects its device, and the UUID of that, empty if not known."""

    backend: str
    device: str


class Agreed(NamedTuple):
    """How a link is measured: with which library, and whether processes of it share a device."""

    backend: str
    shared: bool


class Speed(NamedTuple):
    """The bus bandwidth of a link in GB/s, and whether processes of it share a device."""

    gigabytes: float
    shared: bool


def agreed(offers: Sequence[Offer]) -> Agreed:
    """How a link of these processes is measured: with their library if it is the same for all, and with gloo if not, or
    if two have one device, which NCCL refuses. Pure."""
    devices = [offer.device for offer in offers if offer.device]
    shared = len(set(devices)) < len(devices)
    backends = {offer.backend for offer in offers}
    return Agreed("gloo" if shared or len(backends) > 1 else backends.pop(), shared)


class Stores:
    """The stores that this process hosts until it ends, one for each port.

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

    def open(self, request: Link, timeout: float) -> Store:
        """Connect to the store of a link, with a prefix of its own for the keys. Raises LinkProblem."""
        address = request.address
        if request.host:
            address = LOOPBACK
            self.host(request.port, timeout)
        try:
            wait = timedelta(seconds=_await_listener(address, request.port, timeout))
            client = TCPStore(address, request.port, is_master=False, timeout=wait, wait_for_workers=False)
        except Exception as error:
            where, limit = f"{request.address}:{request.port}", f"{request.timeout:g} seconds"
            raise LinkProblem(f"no connection to {where} within {limit}: {first_line(error)}") from error
        return PrefixStore(request.name, client)


def _await_listener(address: str, port: int, timeout: float) -> float:
    """Wait until the store listens; return the remaining seconds. Raises OSError after `timeout` seconds.

    The store's own client waits longer after each attempt, and was seen to give up after 2.5 times its timeout.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), max(deadline - time.monotonic(), RETRY_INTERVAL)).close()
            return max(deadline - time.monotonic(), RETRY_INTERVAL)
        except OSError:
            if time.monotonic() + RETRY_INTERVAL >= deadline:
                raise
            time.sleep(RETRY_INTERVAL)


def measure_link(accelerator: Accelerator, request: Link, stores: Stores, give_up: Callable[[str], None]) -> Speed:
    """Test a link together with its other processes; return its speed.

    `give_up`, which replies with a clause and ends the process, is called from another thread when the link hangs, and
    from this one when the process cannot recover. Raises LinkProblem otherwise.
    """
    deadline = time.monotonic() + request.timeout
    slow = f"it was not done within {request.timeout:g} seconds"
    timer = _start_timer(request.timeout + GIVE_UP_AFTER, lambda: give_up(slow))
    try:
        store = stores.open(request, request.timeout)
        own = Offer(accelerator.backend, getattr(accelerator, "uuid", ""))
        backend, shared = agreed(_exchange_offers(own, request, store, deadline))
        if backend == "gloo":
            with _group(backend, request, store, deadline, None, give_up):
                return Speed(_gather(torch.device("cpu"), request, lambda: None), shared)
        timer.cancel()
        timer = _start_timer(max(deadline - time.monotonic(), 0.0), lambda: give_up(slow))
        try:
            with _group(backend, request, store, deadline + LIBRARY_TIMEOUT, accelerator.device, give_up):
                return Speed(_gather(accelerator.device, request, accelerator.synchronize), shared)
        except WrongData:
            raise
        except Exception as error:
            give_up(f"{backend} failed: {first_line(error)}")
            raise
    finally:
        timer.cancel()


def _start_timer(seconds: float, act: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def _exchange_offers(own: Offer, request: Link, store: Store, deadline: float) -> list[Offer]:
    """The offers of all processes of the link, in the order of their ranks.

    Waits for all of them, so that one that never joins can be named. Raises LinkProblem.
    """
    store.set(f"offer/{request.rank}", " ".join(own))
    offers = []
    for rank in range(request.world):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"offer/{rank}"], timedelta(seconds=left))
            backend, _, device = store.get(f"offer/{rank}").decode().partition(" ")
            offers.append(Offer(backend, device))
        except Exception as error:
            if time.monotonic() >= deadline:
                raise LinkProblem(
                    f"rank {rank} of its {request.world} processes did not join within {request.timeout:g} seconds"
                ) from error
            raise LinkProblem(f"the store at {request.address}:{request.port} was lost: {first_line(error)}") from error
    return offers


@contextlib.contextmanager
def _group(
    backend: str,
    request: Link,
    store: Store,
    deadline: float,
    device: torch.device | None,
    give_up: Callable[[str], None],
) -> Iterator[None]:
    """Join the process group of the link. Raises LinkProblem if gloo fails."""
    timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    # NCCL's watchdog would abort the process after a partner's death, before it could reply.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=request.rank,
            world_size=request.world,
            timeout=timeout,
            # With a device NCCL connects now, where failures can be reported; a device without an index is refused.
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
        # After a failure of an accelerator's library, which would hang here, the process has ended.
        if dist.is_initialized():
            dist.destroy_process_group()


def _reset_group_number(give_up: Callable[[str], None]) -> None:
    """Make torch number the next process group of this process 0, like that of a partner that was just started.

    Torch numbers the groups of a process, and the number is part of their keys in the store: processes with different
    numbers wait for each other until they time out. It restarts at 0 when the default group is destroyed. A group that
    could not be created was numbered and cannot be destroyed, so a group of this process alone is destroyed instead.
    """
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    except Exception as error:
        give_up(f"gloo cannot make a process group of one process: {first_line(error)}")
        raise


def _gather(device: torch.device, request: Link, synchronize: Callable[[], None]) -> float:
    """Gather data for about `LONG_ENOUGH` seconds; GB/s. Raises WrongData, or what torch raises."""
    together = GATHERED.get(device.type, ACCELERATOR_GATHERED)
    length = together // request.world // 4
    whole = torch.arange(length, dtype=torch.int32, device=device)
    expected = torch.cat([whole + rank * STRIDE for rank in range(request.world)])
    sent = whole + request.rank * STRIDE
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
                parts = zip(place.chunk(request.world), expected.chunk(request.world), strict=True)
                wrong.update(rank for rank, (got, right) in enumerate(parts) if not torch.equal(got, right))
        return taken

    part(received[:1])
    parts = _agree_on_parts(part(received[:1]) * TOGETHER, device, request.world)
    taken = sum(part(received) for _ in range(parts))
    # No process leaves before all have received everything.
    dist.barrier(device_ids=[device.index] if device.index is not None else None)
    if wrong:
        ranks = ", ".join(str(rank) for rank in sorted(wrong))
        raise WrongData(f"data of rank {ranks} of its {request.world} processes is wrong")
    gathered = parts * TOGETHER * expected.nbytes * (request.world - 1) / request.world
    return gathered / taken / 1e9


def _allgather() -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Torch's allgather into one tensor, by its name in this version of torch."""
    newer: Callable[[torch.Tensor, torch.Tensor], object] | None = getattr(dist, "all_gather_single", None)
    return newer or dist.all_gather_into_tensor


def _agree_on_parts(seconds: float, device: torch.device, world: int) -> int:
    """The number of parts of that many seconds that all processes do, by the slowest one: if one stopped early, the
    others would wait."""
    times = torch.empty(world, dtype=torch.float32, device=device)
    _allgather()(times, torch.tensor([seconds], dtype=torch.float32, device=device))
    slowest = float(times.max().item())
    return max(1, min(MAX_PARTS, round(LONG_ENOUGH / slowest))) if slowest > 0 else MAX_PARTS
