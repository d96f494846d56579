"""The pages of the workers of this node, as the agent has them."""

from __future__ import annotations

import fcntl
import os

from dlrover_run import linux
from dlrover_run.observe.page import AREA_BYTES, PAGE_BYTES, STOP_OFFSET, Area, Progress, Stop, decode, is_blank

READ_ATTEMPTS = 3
"""Reads of an area whose writer fills both slots in the middle of each read; then the page is read another time."""

_SEALS = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL
"""A process that has mapped a file dies of SIGBUS when another one truncates it."""


class ProgressPages:
    """One page for each local rank. Nothing is on a disk, and nothing reads a page unless it is asked for."""

    def __init__(self, local_ranks: int) -> None:
        self._fds = [_create_page(rank) for rank in range(local_ranks)]

    def path(self, local_rank: int) -> str:
        """The path at which a process of this user opens the page; it needs no inherited descriptor."""
        return f"/proc/{os.getpid()}/fd/{self._fds[local_rank]}"

    def renew(self, local_rank: int) -> None:
        """Make a blank page for another process in the place of that local rank."""
        page = _create_page(local_rank)
        os.close(self._fds[local_rank])
        self._fds[local_rank] = page

    def read(self, local_rank: int) -> Progress | None:
        """What the worker has done; None as long as it has reported nothing. A report of the worker itself takes
        precedence over what its log says. None too after `close`."""
        if not self._fds:
            return None
        fd = self._fds[local_rank]
        return _read(fd, Area.WORKER) or _read(fd, Area.LOG)

    def stop_of(self, local_rank: int) -> Stop:
        """What a stop finds the worker in, as it has noted."""
        noted = os.pread(self._fds[local_rank], 1, STOP_OFFSET) if self._fds else b"\0"
        return Stop(noted[0]) if noted[0] <= max(Stop) else Stop.NO_BLOCK

    def close(self) -> None:
        """Free the memory. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def _create_page(local_rank: int) -> int:
    fd = linux.memfd_create(f"dlrover-run progress {local_rank}", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
    return fd


def _read(fd: int, area: Area) -> Progress | None:
    for _ in range(READ_ATTEMPTS):
        # Not mapped: a read needs no trust in what other processes do with the file.
        data = os.pread(fd, AREA_BYTES, area)
        if (progress := decode(data)) is not None or is_blank(data):
            return progress
    return None
