"""What this machine is called where people and other nodes are told of it."""

from __future__ import annotations

import functools
import os
import socket

from dlrover_run.spec import JobSpec

SLURM_VARIABLE = "SLURMD_NODENAME"

_LONGEST = 255
"""Characters of a name that may travel (`records.Name`)."""


@functools.cache
def host_name() -> str:
    """The name of this machine, in the bounds of what travels. It is read once: a node whose name changed while it runs
    would report failures of a host that the others do not know."""
    return socket.gethostname()[:_LONGEST]


def display_name(spec: JobSpec) -> str:
    """What a node is called in what people and other nodes are told: as its machine, unless it shares that with others
    of its job. Under Slurm it is the name that Slurm knows it by, since several of its nodes may be one machine."""
    given = os.environ.get(SLURM_VARIABLE, "")
    return spec.console_name or (given[:_LONGEST] if given.isprintable() else "") or host_name()
