"""The watchdog: the outer process of the launcher, which the user sees, signals and waits for.

It only watches. The agent is its child, and neither outlives the other by more than a moment: when the agent is
killed, its orphans are inherited by the watchdog, which ends them; when the watchdog is killed, the agent reads the end
of the parent-death pipe and ends everything.

Only the watchdog acts on signals. It writes each one with its sender to the parent-death pipe. The agent only notes
that it got a signal itself: a scheduler that signals every process of a job step would otherwise be obeyed twice, and
what the agent has got as well, its workers have got too (`agent.shutdown`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from dlrover_run.processes import signals, tree

_MESSAGE = struct.Struct("=B?Id")
# Linux's `si_code` of kill(2), sigqueue(3) and tgkill(2); above zero the kernel itself is the sender.
_FROM_KERNEL = 0

MAX_ANCESTORS = 64
"""How many ancestors of the watchdog are compared with the sender of a signal."""


class ReceivedSignal(NamedTuple):
    """A signal that the watchdog received. `sender` is the pid that the kernel reports, 0 for the kernel itself and for
    a process outside this pid namespace; `above` is true for an ancestor of the watchdog, or a sender outside. `at` is
    when the watchdog received it, in seconds of `time.monotonic`: the agent may read it later."""

    number: int
    above: bool
    sender: int
    at: float


def block_signals(handled: Collection[int]) -> frozenset[int]:
    """Block the signals that the watchdog waits for, and SIGCHLD, so that none is lost before it waits.

    Returns those signals: the `handled` ones and all others that would end it, without those that stay ignored (see
    `signals.stays_ignored`). Real-time signals that are not handled are ignored.
    """
    # If our parent ignored SIGCHLD, the kernel would report no end and keep no exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wanted = set(signals.NAMED) | set(handled)
    awaited = frozenset(number for number in wanted if not signals.stays_ignored(number, handled))
    signal.pthread_sigmask(signal.SIG_BLOCK, {*signals.TERMINATION_SIGNALS, *awaited, signal.SIGCHLD})
    signals.restore(handled)
    return awaited


def watch(agent: int, awaited: Collection[int], parent_pipe: int, tell: Callable[[str], None]) -> int:
    """Write blocked `awaited` signals to the agent's `parent_pipe` until the agent has ended, then end what it left.

    `tell` gets a line about processes that cannot be ended. Returns the agent's exit code, or minus the number of the
    signal that killed it. The agent has a session of its own, so a Ctrl-C in the terminal reaches it through here, and
    exactly once.
    """
    os.set_blocking(parent_pipe, False)
    # Only now, because the agent's programs would inherit what is ignored before it is forked.
    signals.ignore(awaited)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*awaited, signal.SIGCHLD})
    while True:
        info = signal.sigwaitinfo({*awaited, signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            send(parent_pipe, _received(info, time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                # A stopped agent would read the signal only after it is continued, which may be too late.
                os.kill(agent, signal.SIGCONT)
            continue
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid == agent:
            break
        tree.reap({agent})
    if refused := tree.end_children():
        tell(tree.describe_refused(refused))
    return os.waitstatus_to_exitcode(status)


def send(parent_pipe: int, received: ReceivedSignal) -> None:
    """Write one signal to a parent-death pipe, whose reader calls `receive`."""
    # A full pipe holds more signals than an agent needs that does not read them.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(parent_pipe, _MESSAGE.pack(*received))


def receive(parent_pipe: int) -> list[ReceivedSignal] | None:
    """The signals that have been written to a parent-death pipe; None at its end, when its writer has ended."""
    data = os.read(parent_pipe, _MESSAGE.size * 256)
    return [ReceivedSignal(*each) for each in _MESSAGE.iter_unpack(data)] if data else None


def _received(info: signal.struct_siginfo, at: float) -> ReceivedSignal:
    if info.si_code > _FROM_KERNEL:
        # A key of the terminal: it signals the foreground group, in which no other process of the launcher is.
        return ReceivedSignal(info.si_signo, False, 0, at)
    sender = info.si_pid
    return ReceivedSignal(info.si_signo, sender == 0 or sender in tree.ancestors(MAX_ANCESTORS), sender, at)
