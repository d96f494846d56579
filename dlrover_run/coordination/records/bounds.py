"""The bounds of what travels: whatever a record holds is one of these, so that no reader meets a surprise."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_WHAT = 2000
"""Characters of the sentence about how a worker ended."""

MAX_TRACE = 8000
"""Characters of a worker's traceback that travel to the other nodes."""

MAX_TASK_NAME = 64
"""Characters of the name of a process, such as `chief-0`."""

MAX_WORKERS = 100_000
"""More workers than any node has."""

MAX_TOTAL = 2**53
"""The highest count of something that only grows."""

# Without control characters: a name comes into the environment of other nodes' workers, which cannot hold a NUL.
Name = Annotated[str, Meta(max_length=255, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
NodeId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
# A sum of counts, or one that only grows: no report of one node may make it too large to be sent.
Total = Annotated[int, Meta(ge=0, le=MAX_TOTAL)]
Port = Annotated[int, Meta(ge=0, le=65535)]
ExitStatus = Annotated[int, Meta(ge=0, le=255)]
SignalName = Annotated[str, Meta(pattern=r"\A[A-Z0-9]{0,16}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
