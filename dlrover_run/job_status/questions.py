"""What an operator asks the nodes of a job about their workers: their stacks, or the last of their output. Pure.

A question for output takes the way of one for stacks: to the nodes that it concerns, and back in one bounded answer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Count, Name, Total

MAX_NODE_BYTES = 64 * 1024
"""Bytes of output in the answer of one node."""


MAX_JOB_BYTES = 192 * 1024
"""Bytes of output in the answer of a job; what has no room comes with the next question of a reader that follows."""


MAX_CURSORS = 128
"""Streams that a reader can follow."""


MAX_WAIT = 3.0
"""Seconds that a node waits for new output, less than `stacks.NODE_TIMEOUT`."""


Worker = Total | Name


class LogCursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How far a reader has read a stream of a worker: to `offset` in the file with the inode `source`."""

    worker: Worker
    stream: Name
    source: Total
    offset: Total


class LogRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A question for output. Without a cursor of a stream its last `lines` are meant, 0 for all that is kept; with
    `wait` the answer comes when there is something new, or after these seconds. `worker` is one rank or task.
    With `previous` the output is that of the worker that ran in its place before the last restart."""

    worker: Name = ""
    lines: Count = 0
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT)] = 0.0
    after: Annotated[tuple[LogCursor, ...], Meta(max_length=MAX_CURSORS)] = ()
    previous: bool = False


class LogPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a stream, which ends at the cursor. `is_cut`: what was written before it is not kept any more."""

    cursor: LogCursor
    data: Annotated[bytes, Meta(max_length=MAX_NODE_BYTES)]
    is_cut: bool = False


class StackQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A question for the stacks of a job's workers: of all, of the worker with this `rank`, or of those of one `node`,
    named as in a request. With `logs` it is their output that is asked for."""

    rank: Total | None = None
    node: Name = ""
    logs: LogRequest | None = None
