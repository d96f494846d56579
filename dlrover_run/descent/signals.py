"""Which signals end a process that does nothing about them, and how a process of the launcher ignores those.

A scheduler signals every process of a job step: the launcher's own processes get what is meant for the workers. Only
the guard acts on signals; all other processes of the launcher ignore them and end when the process that owns them does.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from dlrover_run.template.sendable import SENDABLE as SENDABLE

NAMED: frozenset[signal.Signals] = frozenset(
    number for number in signal.Signals if number in SENDABLE and number not in (signal.SIGRTMIN, signal.SIGRTMAX)
)
"""Those of SENDABLE that have a name and so a meaning: where nothing handles them, they end the launcher."""


def ignore(own: Collection[int] = ()) -> None:
    """Ignore every signal of SENDABLE but the process's `own`. A program that this process starts would ignore them
    too, so only a process that starts none may call this."""
    for number in SENDABLE - set(own):
        signal.signal(number, signal.SIG_IGN)


def catch(handler: Callable[[int], None], but: Collection[int] = ()) -> None:
    """Call `handler` with each signal of SENDABLE that comes, `but` for these and those that are ignored already (as
    after nohup).

    For a process that starts programs: what is caught has its default action in a new program, what is ignored stays
    ignored there.
    """
    for number in SENDABLE - set(but):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: handler(number))


@contextmanager
def held_back() -> Iterator[None]:
    """Block the signals of SENDABLE in this thread and in each process that is started in here, until that calls
    `release`: it is then never without protection."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENDABLE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """Take signals as they come again; a mask is inherited through fork and exec."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
