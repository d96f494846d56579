"""The records of a job in a key-value store: JSON that is validated when it is decoded, compressed if it is long. Pure.

| key below the job's own prefix | written by | lease |
|---|---|---|
| `nodes/ID` | that node: its report | the node's |
| `leader` | the agent that is elected; its create revision is the fence | the same |
| `plan` | the leader: rules and plan, for its successor | a day, 20 s once the job is over |
| `messages/BUCKET` | the leader: the assignments of the nodes of that bucket | that of the plan |
| `wanted` | the leader of a job that chooses its size: how many nodes it wants | the same |
| `over` | the leader, once the job is over | the same |
| `unaware` | the leader, if a disconnected member may come back to learn of the end | the same |
| `requests/ID` | an operator's program: its request; the leader writes the answer in its place | the program's |
| `stack_requests/ID` | an operator's program: its question for stacks, which the nodes answer | the program's |
| `stacks/ID/NODE` | that node: the answer, which the program deletes with its lease | the program's |
| `last_write` | the leader: the number of its last write | the same |

A node reads only `leader` and the messages of its own bucket. The plan of 512 nodes is 60 KB, and each of them would
receive all of it; its bucket has 2 KB.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.node_views import EMPTY_VIEW, common_assignment, with_view
from dlrover_run.coordination.programs import job_program
from dlrover_run.coordination.records.assignment import Assignment, AssignmentPart, NodeView, Waiting, join, split
from dlrover_run.coordination.records.parts import combine
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.features.registry import decode_part
from dlrover_run.transport.messages import InvalidMessage, RuleValues, encode_rules

BUCKETS = 64
"""The number of keys over which the assignments of all nodes are distributed. With the plan they fit into one
transaction, for which etcd's default limit is 128 operations."""

COMPRESS_FROM = 32 * 1024
"""Bytes from which on a value is compressed. etcd accepts 1.5 MB in one request; a plan of 20,000 nodes has 2.2 MB."""

MAX_DECODED = 64 * 1024 * 1024
"""Maximum bytes of a decompressed value: a value in etcd must not exhaust a node's memory."""


class StoredPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state with which the next leader continues."""

    rules: RuleValues
    plan: Plan


class BucketMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The assignments of the nodes of one bucket.

    `common` is the part that all nodes have in common. `views` are the parts of single nodes of the bucket, by node id
    and incarnation; a node without tasks waits, for `waiting`. What the engine assigns to all nodes alike is in
    `common` only. `program` is what the nodes of the round run, and `full` whether it has all that it may have.
    """

    rules: RuleValues
    common: Assignment
    waiting: Waiting | None = None
    views: tuple[tuple[str, str, NodeView], ...] = ()
    program: str = ""
    full: bool = False

    def assignment(self, key: NodeKey) -> Assignment:
        own = next((view for *process, view in self.views if tuple(process) == key), EMPTY_VIEW)
        if own.parts and self.common.parts:
            own = msgspec.structs.replace(own, parts=join(own.parts, self.common.parts))
        return with_view(self.common, own, self.waiting)


class Keys:
    """The names of one job's keys. A run id may hold any character; it is quoted, so the keys of two jobs differ.
    `store` is what messages call the store."""

    def __init__(self, prefix: str, run_id: str, store: str = "etcd") -> None:
        self.store = store
        self.job = f"{prefix}/{quote(run_id, safe='')}/"
        self.nodes = f"{self.job}nodes/"
        self.all_messages = f"{self.job}messages/"
        self.requests = f"{self.job}requests/"
        self.stack_requests = f"{self.job}stack_requests/"
        self.leader = f"{self.job}leader"
        self.plan = f"{self.job}plan"
        self.wanted = f"{self.job}wanted"
        self.over = f"{self.job}over"
        self.unaware = f"{self.job}unaware"
        self.last_write = f"{self.job}last_write"

    def node(self, node_id: str) -> str:
        return f"{self.nodes}{node_id}"

    def stacks(self, request: str) -> str:
        """Below which the nodes answer the question of this id."""
        return f"{self.job}stacks/{request}/"

    def messages(self, bucket: int) -> str:
        return f"{self.all_messages}{bucket:02}"


class RequestAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the leader writes in place of an operator's request: what the job does now, or why it does not."""

    answer: str = ""
    refusal: str = ""


def wanted_value(plan: Plan) -> bytes | None:
    """How many nodes a job wants that chooses its size, as a number in digits; None in any other job. What an operator
    has fixed is what it wants."""
    choice = plan.size_choice
    if choice is None or choice.noun != "node":
        return None
    fixed = plan.desired is not None and plan.desired.fixed
    wanted = plan.desired.max_nodes if plan.desired is not None and fixed else choice.wanted_nodes
    return str(wanted or len(plan.members)).encode()


def bucket_of(node_id: str) -> int:
    """The bucket of a node: the same wherever it is computed."""
    return zlib.crc32(node_id.encode()) % BUCKETS


Record = TypeVar("Record", bound=msgspec.Struct)


def encode_record(record: msgspec.Struct) -> bytes:
    """The value of a key: JSON, compressed from COMPRESS_FROM bytes on. Called by all that writes a record to the
    store."""
    data = msgspec.json.encode(record)
    return zlib.compress(data, 1) if len(data) >= COMPRESS_FROM else data


def decode_record(data: bytes, kind: type[Record]) -> Record:
    """The record of a value. Called for each value that is read. Raises InvalidMessage."""
    try:
        # Our JSON begins with a brace, and a zlib stream never does.
        if not data.startswith(b"{"):
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(data, MAX_DECODED)
            if unpacking.unconsumed_tail:
                raise InvalidMessage("longer than any record of ours")
        return msgspec.json.decode(data, type=kind, dec_hook=decode_part)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"no record of ours: {error}") from None


def messages_by_bucket(
    coordinator: Coordinator, waiting: Waiting, mismatched: Iterable[str] = ()
) -> dict[int, BucketMessage]:
    """The messages for the buckets that nodes read; `waiting` is for nodes that wait. `mismatched` are the ids of nodes
    that the coordinator does not know.

    `waiting` is left out where no node waits, so that a bucket is not written again when a node joins elsewhere.
    """
    plan = coordinator.plan
    known = {*coordinator.nodes, *(member.key for member in plan.members)}
    buckets = {bucket_of(node_id) for node_id in (*mismatched, *(key.node_id for key in known))}
    if plan.phase in OVER:
        # A node that was lost long ago may come back to learn that the job is over.
        buckets = set(range(BUCKETS))
    views: dict[int, list[tuple[str, str, NodeView]]] = {bucket: [] for bucket in sorted(buckets)}
    waiting_buckets: set[int] = set()
    shared: tuple[AssignmentPart, ...] = ()
    for key in known:
        view = coordinator.view(key)
        if view.waits and plan.phase not in OVER:
            waiting_buckets.add(bucket_of(key.node_id))
        if view.parts:
            common_parts, own = split(view.parts)
            shared = combine(shared, common_parts)
            view = msgspec.structs.replace(view, parts=own)
        if view != EMPTY_VIEW:
            views[bucket_of(key.node_id)].append((*key, view))

    def by_rank(entry: tuple[str, str, NodeView]) -> tuple[float, str, str]:
        node_id, incarnation, view = entry
        return math.inf if view.ranks is None else view.ranks.node_rank, node_id, incarnation

    rules = encode_rules(coordinator.rules)
    program = job_program(plan, coordinator.nodes)
    full = coordinator.is_full()
    common = msgspec.structs.replace(common_assignment(plan), parts=shared)
    return {
        bucket: BucketMessage(
            rules,
            common,
            waiting if bucket in waiting_buckets else None,
            tuple(sorted(entries, key=by_rank)),
            program,
            full,
        )
        for bucket, entries in views.items()
    }
