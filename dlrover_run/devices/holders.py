"""Which processes hold an accelerator: those that have a device file of it open."""

from __future__ import annotations

import glob
import os

PREFIX = "/dev/nvidia"
"""How the names of the device files begin. A test points to other files."""


def is_present() -> bool:
    """Whether this machine has such a device, so that a process can hold one."""
    return bool(glob.glob(glob.escape(PREFIX) + "*"))


def holds_device(pid: int) -> bool:
    """Whether a process has such a file open; False for one that has ended or may not be looked at."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}").startswith(PREFIX):
                return True
        except OSError:
            continue  # It was closed meanwhile.
    return False
