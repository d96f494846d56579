"""What is free on a file system for this process."""

from __future__ import annotations

import os
from typing import NamedTuple


class DiskSpace(NamedTuple):
    """Bytes and files of a file system. `free` is what this user may still write, and root has the reserved blocks too.
    `free_files` is None where inodes are made on demand, as by btrfs."""

    free: int
    size: int
    free_files: int | None
    files: int
    is_read_only: bool


def disk_space(found: os.statvfs_result) -> DiskSpace:
    """What `os.statvfs` found. The node check asks before training, and the explanation of a failure after it."""
    is_root = os.geteuid() == 0
    return DiskSpace(
        free=(found.f_bfree if is_root else found.f_bavail) * found.f_frsize,
        size=found.f_blocks * found.f_frsize,
        # With inodes on demand the total is 0.
        free_files=(found.f_ffree if is_root else found.f_favail) if found.f_files else None,
        files=found.f_files,
        is_read_only=bool(found.f_flag & os.ST_RDONLY),
    )
