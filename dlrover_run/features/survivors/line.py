"""The messages between an agent and its workers that can outlive their round: JSON lines of bounded size and checked
shape. The side of the worker, which may lack msgspec, is `training/agent_line.py`.

The worker sends what holds for it, each with the round that it is about. The agent sends its order, of which the latest
counts: so a message that was lost with a connection is repeated by the state, not by a protocol.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dlrover_run.coordination.records.bounds import (
    Count,
    Name,
    Port,
    Seconds,
    Total,
)
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.survivors.model import Handle, Handles, SurvivorsAssignment, Uuid
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.features.survivors.worker_record import WorkerRecord

MAX_LINE = 4096
"""Bytes of one line of a worker with its newline."""

Round = tuple[Annotated[int, Meta(ge=0)], Total]
"""The epoch and the number of a round."""


class WorkerHello(msgspec.Struct, frozen=True, tag_field="type", tag="hello", forbid_unknown_fields=True):
    """The first line of a worker, with the token that it was given. `able` says whether its torch can form a group in
    place, and `torch` is the version."""

    token: Annotated[str, Meta(max_length=200)]
    pid: Total
    able: bool
    torch: Name


class Offer(msgspec.Struct, frozen=True, tag_field="type", tag="offer", forbid_unknown_fields=True):
    """The worker has left its last group; the handle is good for the group of that round."""

    round: Round
    handle: Handle


class Formed(msgspec.Struct, frozen=True, tag_field="type", tag="formed", forbid_unknown_fields=True):
    """The worker is in the group of that round."""

    round: Round


class Lost(msgspec.Struct, frozen=True, tag_field="type", tag="lost", forbid_unknown_fields=True):
    """The group of that round has lost a member, or could not be formed; the worker waits for the next one."""

    round: Round


WorkerMessage = WorkerHello | Offer | Formed | Lost


class WorkerOrder(msgspec.Struct, frozen=True, tag_field="type", tag="order"):
    """See `training.agent_line.Order`."""

    round: Round
    rank: Total
    world_size: Total
    address: Name
    port: Port
    timeout: Seconds
    start_timeout: Seconds
    uuid: Uuid | None = None
    handles: Handles = ()


_decoder: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)


def read_message(line: bytes) -> WorkerMessage:
    """The message of a worker. Raises ValueError with a clause for a line that is none."""
    try:
        message: WorkerMessage = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)[:200]) from None
    return message


def order_line(ranks: RankAssignment, local_rank: Count, part: SurvivorsAssignment, forms: bool) -> bytes:
    """The order for a worker in the round of `ranks`: to offer a handle or, with `forms`, to form the group."""
    formation = part.formation if forms else None
    assert formation is not None or not forms, "it is known how the group forms"
    order = WorkerOrder(
        round=(ranks.key.epoch, ranks.key.number),
        rank=ranks.first_rank + local_rank,
        world_size=ranks.world_size,
        address="" if part.store is None else part.store.address,
        port=0 if part.store is None else part.store.port,
        timeout=part.timeout,
        start_timeout=part.start_timeout,
        uuid=None if formation is None else formation.uuid,
        handles=() if formation is None else formation.handles,
    )
    return msgspec.json.encode(order) + b"\n"


def after_message(worker: WorkerRecord, message: WorkerMessage, now: float) -> WorkerRecord:
    """What the agent knows of a worker after its message."""
    if isinstance(message, WorkerHello):
        if message.able:
            return worker.note_hello()
        return replace(worker, unable=(SurvivorsCode.OLDER_TORCH(version=message.torch),))
    key = RoundKey(*message.round)
    if isinstance(message, Offer):
        return worker.note_offer(key, message.handle)
    if isinstance(message, Formed):
        return worker.note_formed(key)
    return worker.note_lost(key, now)
