"""The messages between a TensorFlow process and its agent: JSON lines of bounded size and checked shape.

A process reports events and requests data; a request has a number (`request`). The agent sends its orders, and answers
with the number of the request (`answer`). The process's interpreter may not have msgspec, so its side uses plain JSON.
A process of another node requests data with the same lines.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Total
from dlrover_run.transport.messages import JobId, Mac, Nonce
from tf_ps_runner.cluster.model import Role, ServerBounds
from tf_ps_runner.data.queue import QueueName, QueueSpec, SavedState

MAX_LINE = 64 * 1024
"""Bytes of one line with its newline: more than the state of all queues of a job needs."""

MAX_TEXT = 1000
"""Characters of one line for the user; a longer text is cut."""

MAX_SKIPPED = 1000
"""Checkpoints that a chief may report as skipped."""

Text = Annotated[str, Meta(max_length=16_384)]
Path = Annotated[str, Meta(max_length=8192)]

RequestId = Annotated[int, Meta(ge=0, le=2**53)]


class ProtocolError(ValueError):
    """A line that is not a valid message; the text is a clause with the cause. `request` is the number of the request
    that it would have been, because that can be answered."""

    def __init__(self, clause: str, request: int | None = None) -> None:
        super().__init__(clause)
        self.request = request


class ProcessHello(msgspec.Struct, frozen=True, tag_field="type", tag="hello", forbid_unknown_fields=True):
    """The first line of a process, with the token that it was given. `pid` is what the process takes its own to be; as
    an event it has the pid that the kernel knows, and no token."""

    token: Annotated[str, Meta(max_length=200)]
    pid: int


class Ready(msgspec.Struct, frozen=True, tag_field="type", tag="ready", forbid_unknown_fields=True):
    """A worker is past the gate, or a task that waits for no other, such as an evaluator, has begun."""


class Restored(msgspec.Struct, frozen=True, tag_field="type", tag="restored", forbid_unknown_fields=True):
    """The chief has a complete model, of global step `step`: from the checkpoint at `path`, a live one, or a fresh one.
    The step is -1 if the script has no step counter that can be found. `skipped` are sentences about checkpoints that
    could not be used."""

    step: Annotated[int, Meta(ge=-1, le=2**53)]
    how: Annotated[str, Meta(pattern=r"\A(checkpoint|live|fresh)\Z")]
    path: Path | None = None
    skipped: Annotated[tuple[Text, ...], Meta(max_length=MAX_SKIPPED)] = ()


class Step(msgspec.Struct, frozen=True, tag_field="type", tag="step", forbid_unknown_fields=True):
    step: Total


class Saved(msgspec.Struct, frozen=True, tag_field="type", tag="saved", forbid_unknown_fields=True):
    """The chief has written the checkpoint at `path`, of global step `step`."""

    step: Total
    path: Path


class Note(msgspec.Struct, frozen=True, tag_field="type", tag="note", forbid_unknown_fields=True):
    """One line for the user. `server_bounds` reports what the tables of a chief require of the number of servers."""

    text: Text
    server_bounds: ServerBounds | None = None


class Disconnected(msgspec.Struct, frozen=True):
    """The connection of the process has ended, mostly with the process. Never sent, only observed."""


TaskMessage = ProcessHello | Ready | Restored | Step | Saved | Note
TaskEvent = TaskMessage | Disconnected


class Take(msgspec.Struct, frozen=True, tag_field="type", tag="take"):
    """Request the next part of a queue. The first task that names a queue creates it, with this spec."""

    queue: QueueName
    spec: QueueSpec


class Used(msgspec.Struct, frozen=True, tag_field="type", tag="used"):
    """A part was used up to the offset `next`, the first one that was not used."""

    queue: QueueName
    shard: Total
    next: Total


class Snapshot(msgspec.Struct, frozen=True, tag_field="type", tag="snapshot"):
    """Request the state of all queues, to be stored beside a checkpoint that is written after the answer."""


class Rollback(msgspec.Struct, frozen=True, tag_field="type", tag="rollback"):
    """Go back to the state beside the checkpoint that was restored; None for the very beginning."""

    state: SavedState | None


Request = Take | Used | Snapshot | Rollback


class QueueAccess(msgspec.Struct, frozen=True):
    """What a process needs to reach the queues of its job on another node: their address, and how it proves that it is
    the task `role`-`id` of that version of the cluster (see `data.access`)."""

    endpoint: str
    job: str
    version: int
    role: str
    id: int
    token: str


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a request. To a take: the offsets from `begin` to before `end` are the task's, under the number
    `shard`, or all is `over`. To a snapshot: `state`. `error` is a sentence for the script's user; with `lost` the part
    does not belong to the task any more, and the task takes another one. With `queue`, the queues are on another node,
    and the process has to ask there."""

    shard: int | None = None
    begin: int | None = None
    end: int | None = None
    epoch: int | None = None
    over: bool = False
    state: SavedState | None = None
    error: str = ""
    lost: bool = False
    queue: QueueAccess | None = None


class OrderMessage(msgspec.Struct, frozen=True, tag_field="type", tag="order"):
    """What the cluster asks of the process, as in `NodeOrder`: `open` lets workers in, `pause` has them leave after the
    current step, `save` has the chief save and leave, `ending` means that the chief has succeeded."""

    version: int
    open: bool = False
    pause: bool = False
    save: bool = False
    ending: bool = False


class QueueHello(msgspec.Struct, frozen=True, tag_field="type", tag="queue", forbid_unknown_fields=True):
    """The first line of a process to the queues on another node. `session` is random and the same for all connections
    of the process, `nonce` is new with each."""

    protocol: int
    job: JobId
    version: Total
    role: Role
    id: Total
    session: Nonce
    nonce: Nonce


class Challenge(msgspec.Struct, frozen=True, tag_field="type", tag="challenge"):
    """What the proof of that process has to cover."""

    nonce: str


class QueueProof(msgspec.Struct, frozen=True, tag_field="type", tag="proof", forbid_unknown_fields=True):
    """The second line: that the process has the token of its task."""

    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag_field="type", tag="welcome"):
    """Lets that process ask, with this side's own proof."""

    mac: str


class Refused(msgspec.Struct, frozen=True, tag_field="type", tag="refused"):
    """Turns that process away; the same may be granted a little later."""

    reason: str


class QueueRequest(NamedTuple):
    """A later line. The process has received all answers to requests before `oldest`."""

    number: int
    oldest: int
    ask: Take | Used


class _Kind(msgspec.Struct, frozen=True):
    request: RequestId | None = None
    oldest: RequestId = 0


_kind = msgspec.json.Decoder(_Kind)
_event: msgspec.json.Decoder[TaskMessage] = msgspec.json.Decoder(TaskMessage)
_request: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_queue_opening: msgspec.json.Decoder[QueueHello | QueueProof] = msgspec.json.Decoder(QueueHello | QueueProof)
_queue_request: msgspec.json.Decoder[Take | Used] = msgspec.json.Decoder(Take | Used)
_encoder = msgspec.json.Encoder()


def read_line(line: bytes) -> TaskMessage | tuple[int, Request]:
    """A message of a process, or the number of its request and the request. Raises ProtocolError."""
    kind = _decode(_kind, line)
    if kind.request is None:
        event: TaskMessage = _decode(_event, line)
        return event
    try:
        return kind.request, _decode(_request, line)
    except ProtocolError as bad:
        raise ProtocolError(str(bad), kind.request) from None


def read_queue_line(line: bytes) -> QueueHello | QueueProof | QueueRequest:
    """A line of a process of another node. Raises ProtocolError."""
    kind = _decode(_kind, line)
    if kind.request is not None:
        return QueueRequest(kind.request, kind.oldest, _decode(_queue_request, line))
    opening: QueueHello | QueueProof = _decode(_queue_opening, line)
    return opening


def encode_line(message: OrderMessage | Challenge | Welcome | Refused) -> bytes:
    return _encoder.encode(message) + b"\n"


def answer_line(number: int, answer: Answer) -> bytes:
    return _encoder.encode({"answer": number, **msgspec.to_builtins(answer)}) + b"\n"


def printable(text: str) -> str:
    """A text of a process as it may be shown on a terminal: one line, of bounded length, without control characters."""
    words = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * MAX_TEXT])
    return " ".join(words.split())[:MAX_TEXT]


def sanitize(message: TaskMessage) -> TaskMessage:
    """The same message, with its texts as they may be shown on a terminal."""
    # Only the texts are replaced, so that no field can be lost on the way.
    if isinstance(message, Note):
        bounds = message.server_bounds
        if bounds is not None:
            bounds = msgspec.structs.replace(bounds, table=_plain_path(bounds.table))
        return msgspec.structs.replace(message, text=printable(message.text), server_bounds=bounds)
    if isinstance(message, Restored):
        skipped = tuple(printable(sentence) for sentence in message.skipped)
        path = None if message.path is None else _plain_path(message.path)
        return msgspec.structs.replace(message, path=path, skipped=skipped)
    if isinstance(message, Saved):
        return msgspec.structs.replace(message, path=_plain_path(message.path))
    return message


def _plain_path(path: str) -> str:
    return path if path.isprintable() else printable(path)


def _decode(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(str(error)[:200]) from None
