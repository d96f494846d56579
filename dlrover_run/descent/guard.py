"""The outer half of the launcher: the process that the user sees, signals and waits for.

It does nothing but watch. The agent is its child, so the two can outlive each other by a moment only: when the agent is
killed, its orphans come to the guard, which ends them; when the guard is killed, the agent reads the end of the
lifeline and ends all.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from dlrover_run.descent import lineage


def block(signals: Iterable[signal.Signals]) -> None:
    """Hold `signals` and SIGCHLD back until they are waited for, so that none is lost before the guard is ready."""
    # Where our parent ignored it, the kernel would tell us of no end and keep no exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*signals, signal.SIGCHLD})


def unblock() -> None:
    """Take signals as they come again; a mask is inherited through fork and exec, so the agent calls this first."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


@contextlib.contextmanager
def signals_for_this_thread() -> Iterator[None]:
    """Start threads in here that never take a signal, so that `block` in this one still holds all of them back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch(agent: int, signals: Iterable[signal.Signals]) -> int:
    """Pass blocked `signals` on to the agent until it has ended, then end whatever it left behind.

    Returns the agent's exit code, or minus the number of the signal that killed it.
    The agent has a session of its own, so a Ctrl-C in the terminal reaches it through here, and exactly once.
    """
    awaited = {*signals, signal.SIGCHLD}
    while True:
        number = signal.Signals(signal.sigwaitinfo(awaited).si_signo)
        if number is not signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, number)
                # An agent that somebody has stopped would hear of it when he is long gone.
                os.kill(agent, signal.SIGCONT)
            continue
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid == agent:
            break
        lineage.reap({agent})
    lineage.end_children()
    return os.waitstatus_to_exitcode(status)
