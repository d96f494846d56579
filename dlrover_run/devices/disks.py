"""What is free on a file system for this process, and whether other machines share it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_NETWORK_DISKS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs"}
    | {"pvfs2", "smb3", "virtiofs", "wekafs"}
)
"""Types of file systems that several machines may share."""

_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.ntfs", "fuse.portal"})
"""Those of FUSE that are on one machine; the others (JuiceFS, GlusterFS, s3fs, gcsfuse) are on a network."""


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


def network_disk(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the network file system that has this path, such as `nfs4`; empty for a local disk, and where the
    mounts cannot be read. The path need not exist."""
    found, longest = "", -1
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    for line in lines:
        # 36 35 98:0 / /mnt/data rw,noatime shared:1 - nfs4 server:/data rw
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        # A later mount on the same point hides an earlier one.
        if len(point) >= longest and (real == point or real.startswith(point.rstrip("/") + "/")):
            found, longest = after.split(" ")[0], len(point)
    is_shared = found in _NETWORK_DISKS or (found.startswith("fuse") and found not in _LOCAL_FUSE)
    return found if is_shared else ""
