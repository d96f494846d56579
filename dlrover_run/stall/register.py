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
"""The first field of the first line of the file; then follow the number of the signal for all threads, that of the one
for the main thread alone, 0 for none, and the descriptor."""


def install(path: str) -> int | None:
    """Register free signals and write their numbers and the descriptor to the file. The number of the first; None if
    none is free or the file cannot be opened."""
    import faulthandler

    free = free_signals()
    if not free:
        return None
    number, main = (*free, 0)[:2]
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
    if main:
        # Of many threads only the latest hundred are written, and the main thread is the oldest. A signal for the
        # process is handled by its main thread, unless that blocks it.
        faulthandler.register(main, file=fd, all_threads=False, chain=False)
    os.write(fd, f"{MARKER} {number} {main} {fd}\n".encode())
    return number


def free_signals() -> list[int]:
    """The first two signals that this process leaves to the kernel's default."""
    first = signal.SIGRTMAX - FIRST_SIGNAL
    tried = range(first, max(first - SIGNALS, signal.SIGRTMIN), -1)
    return [number for number in tried if signal.getsignal(number) == signal.SIG_DFL][:2]
