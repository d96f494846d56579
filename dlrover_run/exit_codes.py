"""The exit codes of both programs that are not those of a worker; docs/launcher.md has the same table."""

from __future__ import annotations

SUCCESS = 0
COMPAT_FAILURE = 1
"""torchrun's exit code for every failure, which `--exit-codes=torchrun` selects."""
PEER_FAILED = 1
"""A worker of another node failed first; the report names it."""
BAD_COMMAND_LINE = 2
INTERNAL_ERROR = 70
"""The launcher itself failed (sysexits' EX_SOFTWARE): please report it."""
CANNOT_START = 71
"""The operating system refused to start or stop processes (sysexits' EX_OSERR)."""
CANNOT_JOIN = 72
"""This node could not join or rejoin the job: no master was found, or it refused the node."""
FAULTY_NODE = 73
"""This node is faulty: the node check found that, or a worker failed because of a GPU that cannot be used any more."""
STRAGGLER = 74
"""The node check found that this node is much slower than the others, and `--exclude-straggler` was given."""
CUT_OFF = 76
"""This node could reach neither the master or etcd nor another node for `cut_off_timeout`: put another in its place."""
TOO_FEW_NODES = 75
"""The job has fewer nodes than it needs (sysexits' EX_TEMPFAIL): a later start may find more."""


STOPPED_ON_REQUEST = 143
"""`stop` ended the job: as if SIGTERM had ended each of its launchers."""


def of_signal(number: int) -> int:
    """The exit code for a process that a signal ended, as a shell reports it."""
    return 128 + number
