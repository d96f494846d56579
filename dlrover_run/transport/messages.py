"""The messages of one stream between a node and the master, as JSON of bounded size and checked shape.

A node opens the stream with `Hello`. The master answers with a `Challenge`, the node with a `Proof` and, without
waiting, `Join`. The master answers the node's proof with a `Proof` of its own, so that only a node that knows the token
gets one; then it says `Welcome` once, and an `Assigned` after every `Join` and `Report` and whenever the assignment has
changed. The node sends a `Report` whenever its status has changed, and at least once in each
keep-alive interval of the job. `Refused` is the master's last word on a stream.

A node that is done says so in a last `Report`, half-closes the stream and reads on until the master ends it. A stream
that is cancelled instead takes along what was not heard yet.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from dlrover_run.coordination.bounds import NodeId
from dlrover_run.coordination.model import Assignment, NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.parameter_servers.rules import ClusterRules

PROTOCOL = 3
"""Raised when two versions of this program could not understand each other."""

METHOD = "/dlrover_run.Master/Session"
"""The one method of the service: a stream of bytes in both directions."""

MAX_NODE_MESSAGE = 256 * 1024
"""Bytes of a message from a node: more than the longest status that there can be."""

MAX_MASTER_MESSAGE = 1024 * 1024
"""Bytes of a message from the master, who has proved himself: more than the addresses of a job of the most tasks."""

CLUSTER_PREFIX = "cluster."
"""What the names of the rules of parameter servers begin with as they travel. A job without has none of them."""

MAX_NUMBER = 1_000_000_000
"""The highest count that a rule may give, which is more than any job needs."""

JobId = Annotated[str, Meta(min_length=1, max_length=255)]
Nonce = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Mac = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Sentence = Annotated[str, Meta(max_length=2000)]
RuleValues = dict[str, int | float]


class InvalidMessage(ValueError):
    """Bytes that are none of the messages expected here; the text says what is wrong with them."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Who wants to join which job. `nonce` is random and new with each stream."""

    protocol: int
    job: JobId
    node_id: NodeId
    incarnation: NodeId
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof", forbid_unknown_fields=True):
    """That the sender knows the job's token; empty when it has none."""

    mac: Mac


class Join(msgspec.Struct, frozen=True, tag="join", forbid_unknown_fields=True):
    """The node's first status, and the rules that it was started with."""

    status: NodeReport
    rules: RuleValues


class Report(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """The node's latest status, and a sign of life."""

    status: NodeReport


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """A random text that both proofs have to cover."""

    nonce: Nonce


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The node is heard from now on. `rules` are those of the job; `notice` is a sentence for the person who started
    the node, such as that the node was started with other rules."""

    rules: RuleValues
    notice: Sentence = ""


class Assigned(msgspec.Struct, frozen=True, tag="assigned", forbid_unknown_fields=True):
    """What the coordinator wants of the node."""

    assignment: Assignment


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The stream ends here. `retry` says that the same may be granted a little later."""

    reason: Sentence
    retry: bool = False


NodeMessage = Hello | Proof | Join | Report
MasterMessage = Challenge | Proof | Welcome | Assigned | Refused
Message = TypeVar("Message")

_encoder = msgspec.json.Encoder()
_from_node: msgspec.json.Decoder[NodeMessage] = msgspec.json.Decoder(NodeMessage)
_from_master: msgspec.json.Decoder[MasterMessage] = msgspec.json.Decoder(MasterMessage)


def encode(message: NodeMessage | MasterMessage) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> NodeMessage:
    """What a node said. Raises InvalidMessage."""
    return _decode(_from_node, data, MAX_NODE_MESSAGE)


def decode_from_master(data: bytes) -> MasterMessage:
    """What a master said. Raises InvalidMessage."""
    return _decode(_from_master, data, MAX_MASTER_MESSAGE)


def _decode(decoder: msgspec.json.Decoder[Message], data: bytes, most: int) -> Message:
    if len(data) > most:
        raise InvalidMessage(f"a message of {len(data)} bytes is longer than {most}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidMessage(f"not a message of this protocol: {error}") from None


def encode_rules(rules: JobRules) -> RuleValues:
    """Rules as they travel. A store that flags name does not: such a job has no master."""
    values = {field.name: getattr(rules, field.name) for field in fields(JobRules) if field.name not in _APART}
    return values if rules.cluster is None else values | _cluster_values(rules.cluster)


def _cluster_values(rules: ClusterRules) -> RuleValues:
    return {f"{CLUSTER_PREFIX}{field.name}": getattr(rules, field.name) for field in fields(ClusterRules)}


def decode_rules(values: RuleValues) -> JobRules:
    """Rules that have travelled. Raises InvalidMessage for an unknown name, a wrong type or an impossible number."""
    unknown = values.keys() - _KNOWN
    if unknown:
        raise InvalidMessage(f"unknown rules: {', '.join(sorted(unknown))[:200]}")
    plain = {name: value for name, value in values.items() if not name.startswith(CLUSTER_PREFIX)}
    nested = {
        name.removeprefix(CLUSTER_PREFIX): value for name, value in values.items() if name.startswith(CLUSTER_PREFIX)
    }
    try:
        rules = msgspec.convert({**plain, "cluster": nested} if nested else plain, JobRules)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"not the rules of a job: {error}") from None
    problem = rules.problem() or _too_large(encode_rules(rules))
    if problem is not None:
        raise InvalidMessage(problem)
    return rules


def _too_large(values: RuleValues) -> str | None:
    """A sentence about a number that could not travel back to the nodes."""
    names = (name for name, value in values.items() if isinstance(value, int) and value > MAX_NUMBER)
    return next((f"{name} is too large for the rule of a job" for name in names), None)


_APART = frozenset({"store", "cluster"})
_KNOWN = encode_rules(JobRules(cluster=ClusterRules())).keys()
