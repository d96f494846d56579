"""What this machine is called where people and other nodes are told of it."""

from __future__ import annotations

import os
import socket

from dlrover_run.spec import JobSpec

SLURM_VARIABLE = "SLURMD_NODENAME"

_LONGEST = 255
"""Characters of a name that may travel (`records.Name`)."""


def host_name() -> str:
    """The name of this machine, in the bounds of what travels; under Slurm the name that Slurm knows it by, since
    several of its nodes may be one machine."""
    given = os.environ.get(SLURM_VARIABLE, "")
    return (given if given and given.isprintable() else socket.gethostname())[:_LONGEST]


def told_name(spec: JobSpec) -> str:
    """What a node is called in what people and other nodes are told: as its machine, unless it shares that with others
    of its job."""
    return spec.console_name or host_name()
