"""The messages between a node and the master: JSON of limited size, validated when it is decoded.

A node opens a connection with `Hello`. The master answers with a `Challenge`; the node sends a `Proof` and, without
waiting, `Join`. The master answers the node's proof with its own `Proof`, so only a node that knows the token gets one.
Then it sends `Welcome` once, and `Assigned` after each `Join` and `Report` and whenever the assignment changes. The
node sends a `Report` whenever its state changes, and at least once in each keep-alive interval of the job. `Notice`
is a line for the console of the node. `Refused` is the last message of the master on a connection.

An operator's program, which is no node, proves the token in the same way and sends `Ask` in place of `Join`, as often
as it likes. The master answers each with `Answered`. Only a request of an operator changes the plan. For the stacks of
workers the master sends `ReadStacks` to the nodes and answers with what each `StacksFound` has.

A node that is done sends a last `Report`, half-closes the connection and reads on until the master ends it. If it
closed the connection instead, messages that the master has not read would be lost.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import Name, NodeId, Total
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.registry import decode_part
from dlrover_run.job_status.questions import LogRequest, StackQuery

PROTOCOL = 8
"""The version of this protocol, increased with each incompatible change."""

METHOD = "/dlrover_run.Master/Session"
"""The only method of the service: a stream of bytes in both directions."""

MAX_NODE_MESSAGE = 256 * 1024
"""Maximum bytes of a message from a node: more than the longest possible report."""

MAX_MASTER_MESSAGE = 1024 * 1024
"""Maximum bytes of a message from an authenticated master: more than the addresses of the largest job."""

MAX_NUMBER = 1_000_000_000
"""The highest number that a rule may have, more than any job needs."""

JobId = Annotated[str, Meta(min_length=1, max_length=255)]
Nonce = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Mac = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Sentence = Annotated[str, Meta(max_length=2000)]
RuleValues = dict[str, int | float]


NULL = msgspec.Raw(b"null")


class InvalidMessage(ValueError):
    """Bytes that are not a message of this protocol; the text is the reason."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Which node wants to join which job. `nonce` is random and new for each connection."""

    protocol: int
    job: JobId
    node_id: NodeId
    incarnation: NodeId
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof", forbid_unknown_fields=True):
    """Proves that the sender knows the job's token; empty without a token."""

    mac: Mac


class Join(msgspec.Struct, frozen=True, tag="join", forbid_unknown_fields=True):
    """The node's first report, and the rules that it was started with."""

    report: NodeReport
    rules: RuleValues


class Report(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """The node's latest report, which is also a heartbeat."""

    report: NodeReport


class StacksFound(msgspec.Struct, frozen=True, tag="stacks_found", forbid_unknown_fields=True):
    """The answer to the `ReadStacks` of this number. `stacks` is a `NodeStacks` as JSON, whose class is imported only
    where it is needed."""

    number: Total
    stacks: msgspec.Raw


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True, omit_defaults=True):
    """A question for the status of the job, after `request` has been taken, if there is one; with `stacks` a question
    for the stacks of its workers. With `moved`, the address of a successor, it is no question: the master sends the
    nodes of the job there."""

    request: OperatorRequest | None = None
    stacks: StackQuery | None = None
    moved: Name = ""


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """A random text that both proofs must cover."""

    nonce: Nonce


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The node has joined. `rules` are those of the job; `notice` is a sentence for the user of this node, such as that
    it was started with other rules."""

    rules: RuleValues
    notice: Sentence = ""


class Assigned(msgspec.Struct, frozen=True, tag="assigned", forbid_unknown_fields=True):
    """What the node is to do."""

    assignment: Assignment


class Notice(msgspec.Struct, frozen=True, tag="notice", forbid_unknown_fields=True):
    """A sentence about the job for the user of this node, whose master may have no console that this user reads."""

    text: Sentence


class ReadStacks(msgspec.Struct, frozen=True, tag="stacks_wanted", forbid_unknown_fields=True, omit_defaults=True):
    """The node is to send the stacks of its workers, or of that with this `rank`; with `logs` their output."""

    number: Total
    rank: Total | None = None
    logs: LogRequest | None = None


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The answer to `Ask`. `status` is a `JobStatus` as JSON, and `stacks` a `JobStacks`, whose classes no node has to
    import; null without such a job, and without that question. `refusal` is a clause about that, or about a request
    that cannot be carried out."""

    status: msgspec.Raw = NULL
    refusal: Sentence = ""
    stacks: msgspec.Raw = NULL


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The connection ends here. `retry`: another attempt may succeed a little later. `over`: the job that the node was
    part of has ended. `moved` is the address of the successor that has the job, empty for none."""

    reason: Sentence
    retry: bool = False
    over: bool = False
    moved: Name = ""


NodeMessage = Hello | Proof | Join | Report | StacksFound | Ask
MasterMessage = Challenge | Proof | Welcome | Assigned | Notice | ReadStacks | Answered | Refused
Message = TypeVar("Message")

_encoder = msgspec.json.Encoder()
_from_node: msgspec.json.Decoder[NodeMessage] = msgspec.json.Decoder(NodeMessage, dec_hook=decode_part)
_from_master: msgspec.json.Decoder[MasterMessage] = msgspec.json.Decoder(MasterMessage, dec_hook=decode_part)


def encode(message: NodeMessage | MasterMessage) -> bytes:
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> NodeMessage:
    return _decode(_from_node, data, MAX_NODE_MESSAGE)


def decode_from_master(data: bytes) -> MasterMessage:
    return _decode(_from_master, data, MAX_MASTER_MESSAGE)


def _decode(decoder: msgspec.json.Decoder[Message], data: bytes, most: int) -> Message:
    if len(data) > most:
        raise InvalidMessage(f"a message of {len(data)} bytes is longer than {most}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidMessage(f"not a message of this protocol: {error}") from None


def encode_rules(rules: JobRules) -> RuleValues:
    """Rules as sent in a message; those of a feature begin with its name and a dot. A store that flags name is not
    sent: such a job has no master. Called for a node that joins, for the welcome, and for the record of a plan."""
    values = {name: getattr(rules, name) for name in _PLAIN}
    for part in rules.parts:
        assert isinstance(part, msgspec.Struct), "each part is a struct"
        values |= {f"{part.feature}.{name}": value for name, value in msgspec.structs.asdict(part).items()}
    return values


def decode_rules(values: RuleValues) -> JobRules:
    """Decode the rules of a message. Raises InvalidMessage for an unknown name, a wrong type or an invalid number.
    Called by the coordinator's side for a join, by a node for the welcome, and for a stored plan."""
    plain: dict[str, object] = {name: value for name, value in values.items() if "." not in name}
    unknown = plain.keys() - _PLAIN
    if unknown:
        raise InvalidMessage(f"unknown rules: {', '.join(sorted(unknown))[:200]}")
    parts: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        feature, dot, field = name.partition(".")
        if dot:
            parts.setdefault(feature, {"type": feature})[field] = value
    plain["parts"] = [parts[name] for name in sorted(parts)]
    try:
        rules = msgspec.convert(plain, JobRules, dec_hook=decode_part)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"not the rules of a job: {error}") from None
    # A number that is too large could not be sent back to the nodes.
    large = (name for name, value in values.items() if isinstance(value, int) and value > MAX_NUMBER)
    problem = rules.problem() or next((f"{name} is too large for the rule of a job" for name in large), None)
    if problem is not None:
        raise InvalidMessage(problem)
    return rules


_PLAIN = frozenset(JobRules.__struct_fields__) - {"store", "parts"}
