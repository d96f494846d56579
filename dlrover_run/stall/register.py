"""Registers `faulthandler` in a worker before its script begins, so that the agent can ask for its stacks.

The handler is C code that needs neither the interpreter's lock nor memory, so that it works in a worker that spins in
C, and needs no right to trace processes. The worker needs this module and the standard library only.
"""

from __future__ import annotations

import fcntl
import os
import signal

VARIABLE = "DLROVER_STACKS"
"""The variable of a worker that holds the path of the file to which it writes its stacks."""

FIRST_SIGNAL = 7
"""Signals below SIGRTMAX where the search for a free one begins. C libraries use the first real-time signals, other
programs SIGUSR1 and SIGUSR2."""

SIGNALS = 8
"""Signals that are tried. If the worker has a handler for each, or ignores each, its stacks cannot be asked for."""

MIN_DESCRIPTOR = 200
"""Programs that close descriptors that they do not know, or expect a low number, meet the file at a high one."""

MARKER = 0x5AFE
"""The first field of the first line of the file; then follow the signal's number and the descriptor."""


def install(path: str) -> int | None:
    """Register a free signal and write its number and the descriptor to the file. The number; None if none is free or
    the file cannot be opened."""
    import faulthandler

    number = free_signal()
    if number is None:
        return None
    try:
        low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, MIN_DESCRIPTOR)
    except OSError:
        # The limit on descriptors is below that number.
        fd = os.dup(low)
    os.close(low)
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    os.write(fd, f"{MARKER} {number} {fd}\n".encode())
    return number


def free_signal() -> int | None:
    """The first signal that this process leaves to the kernel's default."""
    first = signal.SIGRTMAX - FIRST_SIGNAL
    for number in range(first, max(first - SIGNALS, signal.SIGRTMIN), -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return None
