"""The signals that another process sends to end this one."""

from __future__ import annotations

import signal

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
_STOPS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
# Python ignores both from its start on, and restores them in its children.
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}

TERMINATION_SIGNALS: frozenset[int] = frozenset(
    signal.valid_signals() - _FAULTS - _HARMLESS - _STOPS - _OF_PYTHON - {signal.SIGKILL}
)
"""Signals that another process sends and whose default action ends the receiver, the real-time signals among them."""
