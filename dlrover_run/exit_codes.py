"""The exit codes of `dlrover-run`, in one place; the README's table says the same to the user."""

from __future__ import annotations

SUCCESS = 0
COMPAT_FAILURE = 1
"""What torchrun answers to every failure; `--compat-exit-codes` gives it back."""
PEER_FAILED = 1
"""A worker of another node failed first; the report says which."""
BAD_COMMAND_LINE = 2
INTERNAL_ERROR = 70
"""The launcher itself failed (sysexits' EX_SOFTWARE): please report it."""
CANNOT_START = 71
"""The machine did not let us start or stop the workers (sysexits' EX_OSERR)."""
CANNOT_JOIN = 72
"""This node could take no part in the job, or no further one: no master was found, or it refused."""
FAULTY_NODE = 73
"""The node check found that this node is broken: put another machine in its place."""
STRAGGLER = 74
"""The node check found that this node is much slower than the others, and `--exclude-straggler` was given."""
TOO_FEW_NODES = 75
"""Fewer nodes came, or were left, than the job needs (sysexits' EX_TEMPFAIL): another try may find them."""


def of_signal(number: int) -> int:
    """The code of a process that a signal ended, as a shell reports it."""
    return 128 + number


def of_failure(code: int, compat: bool) -> int:
    """The code of a launch that failed with `code`, which is torchrun's own when that was asked for."""
    return COMPAT_FAILURE if compat else code
