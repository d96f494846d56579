"""What the ranks of a function launch return, carried in memory files."""

from __future__ import annotations

import os


class ResultFiles:
    """One anonymous memory file for each local rank of a round; nothing of it is ever on a disk."""

    def __init__(self, local_ranks: int) -> None:
        self._fds = [os.memfd_create(f"dlrover-run result {rank}") for rank in range(local_ranks)]

    def path(self, local_rank: int) -> str:
        """The path at which the worker opens its file; it needs no inherited descriptor."""
        return f"/proc/{os.getpid()}/fd/{self._fds[local_rank]}"

    def read(self, local_rank: int) -> bytes:
        """What the worker has written."""
        fd = self._fds[local_rank]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def close(self) -> None:
        """Give the memory back."""
        for fd in self._fds:
            os.close(fd)
