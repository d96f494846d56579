"""What is free on a file system, from what the kernel returns."""

from __future__ import annotations

import os

import pytest

from dlrover_run.devices.disks import DiskSpace, disk_space


@pytest.mark.parametrize(("user", "free", "free_files"), [(0, 5 * 4096, 7), (1000, 2 * 4096, 3)])
def test_only_root_has_the_reserved_blocks(
    monkeypatch: pytest.MonkeyPatch, user: int, free: int, free_files: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = os.statvfs_result((1, 4096, 10, 5, 2, 20, 7, 3, os.ST_RDONLY, 255))
    assert disk_space(found) == DiskSpace(free, 10 * 4096, free_files, 20, True)


def test_a_file_system_that_makes_inodes_on_demand_is_not_short_of_them() -> None:
    assert disk_space(os.statvfs_result((1, 1, 10, 5, 5, 0, 0, 0, 0, 255))).free_files is None
