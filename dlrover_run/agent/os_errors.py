"""Explains errors of the operating system, with the limit to raise."""

from __future__ import annotations

import errno
import resource


def explain_os_error(error: OSError) -> str:
    """The error as a clause for the user: what failed, for which file if any, and what to do."""
    if error.errno == errno.EMFILE:
        return f"too many files are open; raise the limit with `ulimit -n` (it is {_limit(resource.RLIMIT_NOFILE)})"
    if error.errno == errno.EAGAIN:
        limit = _limit(resource.RLIMIT_NPROC)
        return f"no more processes are allowed; raise `ulimit -u` (it is {limit}) or the container's limit on processes"
    what = error.strerror or str(error)
    return what if error.filename is None else f"{what}: {error.filename}"


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
