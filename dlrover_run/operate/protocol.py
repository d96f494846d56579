"""What an operator's program asks an agent on its own machine: one line of JSON each way (see `sockets`)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.requests import OperatorRequest
from dlrover_run.coordination.status import JobStatus

MAX_REPLY = 4 * 1024 * 1024
"""The longest line that an operator's program reads: more than a status of `status.MAX_SHOWN` nodes."""


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is asked: always which agent it is, with `status` also the status of its job, after `request` was taken."""

    status: bool = False
    request: OperatorRequest | None = None


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One agent. `log` is its event log, empty if it keeps none."""

    job: str
    program: str
    backend: str
    host: str
    node_id: str
    pid: int
    log: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an agent. `problem` is a clause if there is no status though it was asked for; with `no_job`, the
    coordinator does not know the job."""

    agent: AgentInfo
    status: JobStatus | None = None
    problem: Annotated[str, Meta(max_length=4000)] = ""
    no_job: bool = False
