"""What this machine is called where people and other nodes are told of it."""

from __future__ import annotations

import socket

_LONGEST = 255
"""Characters of a name that may travel (`records.Name`)."""


def host_name() -> str:
    """The name of this machine, in the bounds of what travels."""
    return socket.gethostname()[:_LONGEST]
