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

CLOSED = re.compile(
    r"connection closed by peer|connection reset by peer|remote process exited or there was a network error"
    r"|connection was likely closed|writev .{1,80}: broken pipe|pair is not connected \(",
    re.IGNORECASE,
)
"""The other side of a connection has gone."""
