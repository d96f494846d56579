"""Which signals end a process that does not handle them, and how processes of the launcher ignore or block those.

A scheduler signals every process of a job step, so the launcher's own processes receive what is meant for the workers.
Only the watchdog acts on signals; all other processes of the launcher ignore them and end when their owner ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from dlrover_run.workers.template.termination_signals import TERMINATION_SIGNALS as TERMINATION_SIGNALS

NAMED: frozenset[signal.Signals] = frozenset(
    number
    for number in signal.Signals
    if number in TERMINATION_SIGNALS and number not in (signal.SIGRTMIN, signal.SIGRTMAX)
)
"""The signals of TERMINATION_SIGNALS that have a name and so a meaning: unhandled, they end the launcher."""


def stays_ignored(number: int, handled: Collection[int]) -> bool:
    """Whether a signal that this process was started with as ignored stays so: SIGHUP, as after nohup, and what is not
    `handled` on request.

    The others are handled as torchrun does. A shell without job control starts each background command with SIGINT and
    SIGQUIT ignored, which is no request of its user.
    """
    if signal.getsignal(number) is not signal.SIG_IGN:
        return False
    return number == signal.SIGHUP or number not in handled


def restore(handled: Collection[int]) -> None:
    """Give the `handled` signals that are ignored and do not stay so their default action, which the programs started
    from here inherit."""
    for number in handled:
        if signal.getsignal(number) is signal.SIG_IGN and not stays_ignored(number, handled):
            signal.signal(number, signal.SIG_DFL)


def ignore(own: Collection[int] = ()) -> None:
    """Ignore every signal of TERMINATION_SIGNALS except the process's `own`.

    Only for a process that starts no program: a program would inherit the ignored signals.
    """
    for number in TERMINATION_SIGNALS - set(own):
        signal.signal(number, signal.SIG_IGN)


def catch(handler: Callable[[int], None], but: Collection[int] = ()) -> None:
    """Call `handler` with each signal of TERMINATION_SIGNALS that is received, except `but` and those that are
    ignored already (as after nohup).

    For a process that starts programs: a caught signal has its default action in a new program, while an ignored one
    stays ignored there.
    """
    for number in TERMINATION_SIGNALS - set(but):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: handler(number))


@contextmanager
def held_back(numbers: Iterable[int] = TERMINATION_SIGNALS) -> Iterator[None]:
    """Block these signals in this thread and in each process started inside this block.

    A started process keeps them blocked until it calls `release`, so no signal finds it unprepared.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def blocked_in_new_threads() -> AbstractContextManager[None]:
    """Block all signals in threads that are started inside this block, so that only this thread receives signals.
    Called
    around what starts a thread: one of ours, or a library that starts its own (gRPC, NVML, the resolver)."""
    return held_back(signal.valid_signals())


def release() -> None:
    """Unblock all signals; a mask is inherited through fork and exec."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
