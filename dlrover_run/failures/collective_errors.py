"""The messages of gloo, NCCL and torch's store for a collective that failed because of another worker.

They are torch's exact wording: other packages have similar messages for timeouts of locks and connections of their own.
"""

from __future__ import annotations

import re

TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms for (?:send|recv)|(?:wait|barrier) timeout after \d+ ?ms|error: socket timeout\b"
    r"|waitForInput: socket .* timed out after|timed out after \d+ seconds waiting for clients"
    r"|watchdog caught collective operation timeout|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
"""A process group or its store timed out waiting for another worker."""

# Where torch, gloo or NCCL speak: a source file with its line, the begin of gloo's text, or a name of theirs.
_OURS = (
    r"\w\.(?:cc|cpp|cu|h|hpp):\d+\b|Read error \[|ProcessGroup|\bNCCL\b|TCPStore|\bgloo\b|\bc10d\b"
    r"|Dist(?:Network|Store|Backend)?Error"
)

CLOSED = re.compile(
    rf"(?:{_OURS}).{{0,400}}?connection (?:closed|reset) by (?:remote )?peer"
    # An error of Python's own sockets has another class.
    r"|\bRuntimeError: (?:connection|socket) (?:closed|reset) by (?:remote )?peer"
    r"|remote process exited or there was a network error"
    r"|connection was likely closed|writev .{1,80}: broken pipe|pair is not connected \(",
    re.IGNORECASE,
)
"""The other side of a connection between workers has gone. `connection reset by peer` alone is the error of any
connection of the script's own (object store, database), so it counts only in the context of torch, gloo or NCCL. Lines
are joined by spaces before."""
