"""Lets the processes of a machine that share a device compute on it one after the other.

Together each would reach a part of the speed of the device, and look like a slow one. They may be local ranks of one
node or of several nodes on this machine. The turn is a name that one process at a time can bind, which the kernel frees
with that process. Nothing else is held, so nothing is left of one that is killed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

MAX_WAIT = 30.0
"""Seconds to wait for a turn. After that the device is used beside the others, as a stranger may hold the name."""

RETRY_INTERVAL = 0.02
"""Seconds between two attempts: nothing reports that the name is free."""


@contextlib.contextmanager
def turn(device: str, max_wait: float = MAX_WAIT) -> Iterator[None]:
    """Hold the turn of the device with this UUID during the block; of one without a UUID nothing is known."""
    if not device:
        yield
        return
    until = time.monotonic() + max_wait
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        while True:
            try:
                name.bind(f"\0dlrover-run-check-{device}")
                break
            except OSError:
                if time.monotonic() >= until:
                    break
            time.sleep(RETRY_INTERVAL)
        yield
