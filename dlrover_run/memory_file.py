"""What is handed to a child process by a descriptor: no other program sees it, and it is gone with its holders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """An anonymous file with this content, at its beginning; its descriptor."""
    fd = os.memfd_create("dlrover-run")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
