"""The process group of torch that can be formed in place, and all calls that this takes: they are private to torch, and
experimental (2.14 and later). torch is imported only when it is called for.

gloo 2.15 has no way to interrupt a collective: `abort` and `shutdown` have no effect on one that waits for another
rank, and a rank that leaves its group keeps its connections. So a worker would wait for one that takes part in the next
group already, until the timeout of the collective. The end of a connection is what each side notices at once, so the
connections of the group are closed here, by the addresses at which its members listen.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

from dlrover_run import linux
from dlrover_run.training import peers

_NEEDED = ("_reconfigure", "_get_reconfigure_handle", "_supports_reconfigure")


_NCCL2 = "TORCH_DIST_USE_NCCL2"
"""The variable by which torch chooses between its two NCCL backends: 0 is the default in 2.14, and 1 in 2.15."""

_MARK = "#"
"""Divides the handle of torch from the addresses at which gloo listens, which torch does not name."""


class ReconfigurableGroup:
    """The default process group of this worker, of that backend: one name, as torch forms no group of several in
    place; None leaves the choice to torch."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self._is_open = False
        self._own: set[Address] = set()
        self._others: set[Address] = set()

    @property
    def version(self) -> str:
        """The version of torch."""
        import torch

        return str(torch.__version__)

    @property
    def able(self) -> bool:
        """Whether this torch can form a group in place."""
        return all(hasattr(_c10d(), name) for name in _NEEDED)

    def open_as_in_any_script(self) -> None:
        """Join the others by the variables of the environment. The group stays as it is until the worker ends. One that
        was opened for a handle, and has no members yet, is given up."""
        if self._is_open:
            _distributed().destroy_process_group()
            self._is_open = False
        _distributed().init_process_group(self._backend)

    def handle(self, address: str, port: int, rank: int, world_size: int) -> str:
        """A fresh handle, which is good for one `form`. The first call opens the group, which has no members yet, with
        the store there. Raises RuntimeError if the store does not answer, or the backend cannot be formed in place."""
        if not self._is_open:
            dist = _distributed()
            before = listening()
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
            with _nccl_in_place(self._backend):
                dist.init_process_group(
                    self._backend, store=store, rank=rank, world_size=world_size, enable_reconfigure=True
                )
            self._is_open = True
            # A backend that does not listen can abort.
            self._own = listening() - before
            if not _c10d()._supports_reconfigure():
                raise RuntimeError(unfit_backend(self._backend))
        return _MARK.join([str(_c10d()._get_reconfigure_handle()), *(f"{host} {port}" for host, port in self._own)])

    def form(self, uuid: int, handles: Sequence[str], timeout: float) -> None:
        """Form the group of the workers with these handles, in the order of their ranks. Raises RuntimeError if they do
        not all come within `timeout` seconds."""
        split = [handle.split(_MARK) for handle in handles]
        ends = (end.partition(" ") for _, *listens in split for end in listens)
        self._others = {(host, int(port)) for host, _, port in ends} - self._own
        work = _c10d()._reconfigure(uuid, [first for first, *_ in split], timeout=timedelta(seconds=timeout))
        if work is not None:
            work.wait()

    def abort(self) -> None:
        """Let collectives that wait for another rank fail, here and on the other ranks. The group is good for nothing
        but another `form`."""
        if self._own:
            close_connections(self._own, self._others)
        else:
            _c10d()._get_default_group().abort()

    def of_all(self, value: Any) -> list[Any]:
        """The value of each rank, in their order. All ranks call it."""
        return peers.of_all(value)

    def of_rank(self, value: Any, source: int) -> Any:
        """The value of the rank `source`. All ranks call it."""
        values = [value]
        _distributed().broadcast_object_list(values, src=source)
        return values[0]


def unfit_backend(backend: str | None) -> str:
    """The sentence for a backend of this torch that cannot form a process group in place."""
    what = f"backend {backend} cannot form a process group in place"
    if backend is None or "nccl" not in backend:
        return f"{what}: use gloo or nccl"
    if backend != "nccl" or os.environ.get(_NCCL2) == "0":
        return f"{what}: use the backend nccl, without {_NCCL2}=0"
    return f"{what}: start the workers with {_NCCL2}=1, which torch 2.14 needs, or use torch 2.15"


@contextlib.contextmanager
def _nccl_in_place(backend: str | None) -> Iterator[None]:
    """Select the NCCL backend that can be formed in place, unless the user has: torch 2.14 has another one by default.
    Only meanwhile, because a group that forms as in any script is also of workers that select nothing."""
    if backend != "nccl" or _NCCL2 in os.environ:
        yield
        return
    os.environ[_NCCL2] = "1"
    try:
        yield
    finally:
        del os.environ[_NCCL2]


def _distributed() -> Any:
    import torch.distributed as dist

    return dist


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


Address = tuple[str, int]


def listening() -> set[Address]:
    """The addresses at which this process listens."""
    found = (one for one in _sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return {_address(one.getsockname()) for one in found}


def close_connections(own: Collection[Address], others: Collection[Address]) -> int:
    """End the connections that were accepted at the addresses `own`, and those to the addresses `others`; return how
    many there were."""
    closed = 0
    for one in _sockets():
        with contextlib.suppress(OSError):
            there = _address(one.getpeername())
            if there in others or _address(one.getsockname()) in own:
                one.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def _sockets() -> Iterator[socket.socket]:
    """Copies of this process's sockets of IPv4 and IPv6. What is done to a copy is done to the same connection, though
    another thread may have closed its number meanwhile."""
    for fd in linux.open_descriptors():
        try:
            copy = os.dup(fd)
        except OSError:
            continue  # It was closed meanwhile.
        try:
            one = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # It is no socket.
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield one


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """The address and the port; an address of IPv4 as such, and without a scope."""
    return name[0].partition("%")[0].removeprefix("::ffff:"), name[1]
