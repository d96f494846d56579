"""This machine: its name in messages and reports, and explanations of its errors."""

from __future__ import annotations

import errno
import functools
import os
import resource
import socket

from dlrover_run.spec import JobSpec

SLURM_VARIABLE = "SLURMD_NODENAME"

CLUSTER_VARIABLE = "DLROVER_LOCAL_CLUSTER"
"""The variable with the pid of the supervisor of local nodes, which distinguishes two local clusters on one machine."""

_LONGEST = 255
"""Characters of the longest name in a record (`bounds.Name`)."""


@functools.cache
def host_name() -> str:
    """The name of this machine, cut to the bound of a record. It is read once: a node whose name changed while it runs
    would report failures of a host that the others do not know."""
    return socket.gethostname()[:_LONGEST]


def display_name(spec: JobSpec) -> str:
    """The name of a node in messages and reports: that of its machine, unless several nodes of the job share the
    machine. Under Slurm it is the name in Slurm, of whose nodes several may be one machine."""
    given = os.environ.get(SLURM_VARIABLE, "")
    return spec.console_name or (given[:_LONGEST] if given.isprintable() else "") or host_name()


def launcher_pid(spec: JobSpec) -> int:
    """The pid of the command that started the job here, for its agent."""
    if not spec.console_name:
        return os.getppid()
    # A node with a name on its console is one of several that one launcher has started here.
    return int(os.environ.get(CLUSTER_VARIABLE, "0"))


def explain_os_error(error: OSError) -> str:
    """The error as a clause for the user: what failed, for which file if any, and what to do."""
    if error.errno == errno.EMFILE:
        return f"too many files are open; raise the limit with `ulimit -n` (it is {_limit(resource.RLIMIT_NOFILE)})"
    if error.errno == errno.EAGAIN:
        limit = _limit(resource.RLIMIT_NPROC)
        return f"no more processes are allowed; raise `ulimit -u` (it is {limit}) or the container's limit on processes"
    what = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOEXEC) and (problem := _first_line_problem(error)):
        return problem
    return what if error.filename is None else f"{what}: {error.filename}"


def _first_line_problem(error: OSError) -> str | None:
    """Why the kernel does not execute a file that exists: a clause on its first line, which names its interpreter."""
    try:
        with open(error.filename, "rb") as file:
            first = file.readline(_LONGEST).rstrip(b"\n")
    except (OSError, TypeError, ValueError):
        return None
    name = os.fsdecode(error.filename)
    if error.errno == errno.ENOEXEC:
        return f"{name} is no program: its first line names no interpreter, as #!/bin/bash would (it is {first!r})"
    if not first.startswith(b"#!"):
        return None  # A program for another dynamic loader.
    ending = "; remove the carriage returns of its lines" if first.endswith(b"\r") else ""
    return f"{name} exists, and the interpreter that its first line names does not: {first!r}{ending}"


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
