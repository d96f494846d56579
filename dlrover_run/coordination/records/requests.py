"""The requests of an operator as records: drain a node, change the size of the job, or stop it. What follows from a
request is in `rounds.requested_changes`."""

from __future__ import annotations

import enum

import msgspec

from dlrover_run.coordination.records.bounds import Count, Name
from dlrover_run.coordination.records.parts import Part


class Action(enum.StrEnum):
    """What an operator requests."""

    DRAIN = "drain"
    SCALE = "scale"
    STOP = "stop"


class RequestPart(Part):
    """The part of `OperatorRequest`: another size of a job that is not a number of nodes."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """What is requested, for people."""
        return ""


class OperatorRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request. `node` names the node to drain: its rank, its host or its id. `min_nodes` and `max_nodes` are the size
    to scale to, with 0 for the `min_nodes` that the job was started with; without it the size is fixed, with no size at
    all it is the whole range again. `part` is the size of a job whose size is no number of nodes. `by` is who
    requests it, for people."""

    action: Action
    node: Name = ""
    by: Name = ""
    min_nodes: Count = 0
    max_nodes: Count = 0
    part: RequestPart | None = None

    def __str__(self) -> str:
        size = f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes else str(self.max_nodes or "auto")
        size = size if self.part is None else self.part.text
        what = size if self.action is Action.SCALE else self.node
        return f"{self.by or 'an operator'} requests: {self.action.value} {what}".rstrip()


JUST_BEGUN = "the coordinator of the job has just begun; try again in a moment"


class RequestFailed(Exception):
    """A request that the job cannot carry out; the message is a clause."""
