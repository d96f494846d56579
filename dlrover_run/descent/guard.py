"""The outer half of the launcher: the process that the user sees, signals and waits for.

It does nothing but watch. The agent is its child, so the two can outlive each other by a moment only: when the agent is
killed, its orphans come to the guard, which ends them; when the guard is killed, the agent reads the end of the
lifeline and ends all.

The guard alone takes signals. It writes each of them to the lifeline, with who sent it, because the agent ignores what
is sent to it directly: a scheduler that signals every process of a job step would be obeyed twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from dlrover_run.descent import lineage, signals

_MESSAGE = struct.Struct("=B?I")
# Linux's `si_code` of kill(2), sigqueue(3) and tgkill(2); above zero the kernel itself is the sender.
_FROM_KERNEL = 0

DEPTH = 64
"""How many ancestors of the guard are looked at for the sender of a signal."""


class Received(NamedTuple):
    """A signal that has come to the guard. `sender` is the pid that the kernel names, 0 for the kernel itself and for a
    process outside this pid namespace; `above` says that it is an ancestor of the guard, or outside."""

    number: int
    above: bool
    sender: int


def block(handled: Iterable[int]) -> frozenset[int]:
    """Hold back the signals that the guard waits for, and SIGCHLD, so that none is lost before it is ready.

    Returns those signals: the `handled` ones and all others that would end it, without what is ignored already (as
    after nohup). Real-time signals that nobody handles are ignored.
    """
    # Where our parent ignored it, the kernel would tell us of no end and keep no exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wanted = set(signals.NAMED) | set(handled)
    awaited = frozenset(number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*signals.SENDABLE, *awaited, signal.SIGCHLD})
    return awaited


@contextlib.contextmanager
def signals_for_this_thread() -> Iterator[None]:
    """Start threads in here that never take a signal, so that `block` in this one still holds all of them back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch(agent: int, awaited: Collection[int], lifeline: int) -> int:
    """Write blocked `awaited` signals to the agent's `lifeline` until it has ended, then end whatever it left behind.

    Returns the agent's exit code, or minus the number of the signal that killed it.
    The agent has a session of its own, so a Ctrl-C in the terminal reaches it through here, and exactly once.
    """
    os.set_blocking(lifeline, False)
    # Only now, for the agent's programs would inherit what is ignored before it is forked.
    signals.ignore(awaited)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*awaited, signal.SIGCHLD})
    while True:
        came = signal.sigwaitinfo({*awaited, signal.SIGCHLD})
        if came.si_signo != signal.SIGCHLD:
            tell(lifeline, _received(came))
            with contextlib.suppress(ProcessLookupError):
                # An agent that somebody has stopped would hear of it when he is long gone.
                os.kill(agent, signal.SIGCONT)
            continue
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid == agent:
            break
        lineage.reap({agent})
    lineage.end_children()
    return os.waitstatus_to_exitcode(status)


def tell(lifeline: int, received: Received) -> None:
    """Write one signal to a lifeline, whose reader `read` understands it."""
    # A pipe that is full has more signals in it than an agent needs that does not read them.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(lifeline, _MESSAGE.pack(*received))


def read(lifeline: int) -> list[Received] | None:
    """The signals that have been written to a lifeline; None at its end, when its holder is gone."""
    data = os.read(lifeline, _MESSAGE.size * 256)
    return [Received(*each) for each in _MESSAGE.iter_unpack(data)] if data else None


def _received(came: signal.struct_siginfo) -> Received:
    if came.si_code > _FROM_KERNEL:
        # A key of the terminal: for the foreground group, in which nothing else of ours is.
        return Received(came.si_signo, False, 0)
    sender = came.si_pid
    return Received(came.si_signo, sender == 0 or sender in lineage.ancestors(DEPTH), sender)
