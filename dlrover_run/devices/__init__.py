"""Devices: how many a node has, which CPUs are near each one, and what is wrong with the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeProblem:
    """One problem of a machine: `text` is a sentence with the measured value and the remedy, without a full stop.

    `severe` means that training on this machine would fail, hang or compute a wrong result, according to its driver:
    the node is faulty and leaves the job. Anything that may only be a nuisance is not severe, because a healthy node
    must never be sent away.
    """

    text: str
    severe: bool = False
