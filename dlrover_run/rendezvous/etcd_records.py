"""The keys of a job in etcd and their values: JSON that is validated when it is decoded, compressed if it is long.

| key below the job's own prefix | written by | under |
|---|---|---|
| `nodes/ID` | that node: its status | the node's lease |
| `leader` | the agent that is elected; its create revision is the fence | the same lease |
| `plan` | the elected agent: rules and plan, for its successor | a lease of a day, of 20 s once the job is over |
| `words/BUCKET` | the elected agent: what the nodes of that bucket shall do | the same as the plan |
| `over` | the elected agent, once the job is over | the same |
| `unaware` | the elected agent, if a member was away then that may come back to learn of it | the same |
| `turn` | the elected agent: which of its writes was the last | the same |

A node reads only `leader` and the words of its own bucket. The plan of 512 nodes is 60 KB, and each of them would have
to be sent all of it; its bucket has 2 KB.


What the elected agent has to say to all nodes, parted so that each of them reads little. Pure."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from dlrover_run.coordination.assignment import EMPTY_VIEW, NodeView, with_view
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import OVER, Assignment, NodeKey, NodeReport, Plan, Waiting, common_assignment
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.parameter_servers.model import NodeOrder
from dlrover_run.policies.parameter_servers.policy import join_order, split_order
from dlrover_run.transport.messages import InvalidMessage, RuleValues, decode_rules, encode_rules

BUCKETS = 64
"""The number of keys over which the assignments of all nodes are distributed. With the plan they fit into one
transaction, for which etcd's default limit is 128 operations."""

COMPRESS_FROM = 32 * 1024
"""Bytes from which on a value is compressed. etcd accepts 1.5 MB in one request; a plan of 20,000 nodes has 2.2 MB."""

MAX_DECODED = 64 * 1024 * 1024
"""Maximum bytes of a decompressed value: a value in etcd must not exhaust a node's memory."""


class StoredPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next elected agent goes on with."""

    rules: RuleValues
    plan: Plan


class BucketMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the nodes of one bucket shall do.

    `wanted` is what all nodes are told. `parts` are what concerns single ones of the bucket, by node id and
    incarnation; a node without anything to do waits, as `waiting` says. Where `wanted` has an order with the addresses
    of a cluster, the orders among the parts are without them.
    """

    rules: RuleValues
    wanted: Assignment
    waiting: Waiting | None = None
    parts: tuple[tuple[str, str, NodeView], ...] = ()

    def assignment(self, key: NodeKey) -> Assignment:
        """What one of the nodes shall do."""
        own = next((part for *process, part in self.parts if tuple(process) == key), EMPTY_VIEW)
        if own.cluster is not None and self.wanted.cluster is not None:
            own = msgspec.structs.replace(own, cluster=join_order(self.wanted.cluster, own.cluster))
        return with_view(self.wanted, own, self.waiting if own.waits else None)


class Keys:
    """The names of one job's keys. A run id may hold any character, and none of it makes one job's keys another's."""

    def __init__(self, prefix: str, run_id: str) -> None:
        self.job = f"{prefix}/{quote(run_id, safe='')}/"
        self.nodes = f"{self.job}nodes/"
        self.all_words = f"{self.job}words/"
        self.leader = f"{self.job}leader"
        self.plan = f"{self.job}plan"
        self.over = f"{self.job}over"
        self.unaware = f"{self.job}unaware"
        self.turn = f"{self.job}turn"

    def node(self, node_id: str) -> str:
        """The key of a node's status."""
        return f"{self.nodes}{node_id}"

    def words(self, bucket: int) -> str:
        """Where the word for a bucket stands."""
        return f"{self.all_words}{bucket:02}"


def bucket_of(node_id: str) -> int:
    """The bucket of a node: the same wherever it is computed."""
    return zlib.crc32(node_id.encode()) % BUCKETS


Record = TypeVar("Record", NodeReport, StoredPlan, BucketMessage)


def encode_record(record: NodeReport | StoredPlan | BucketMessage) -> bytes:
    """The bytes of a record."""
    data = msgspec.json.encode(record)
    return zlib.compress(data, 1) if len(data) >= COMPRESS_FROM else data


def decode_record(data: bytes, kind: type[Record]) -> Record:
    """Decode a record. Raises InvalidMessage."""
    try:
        # Our JSON begins with a brace, and a zlib stream never does.
        if not data.startswith(b"{"):
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(data, MAX_DECODED)
            if unpacking.unconsumed_tail:
                raise InvalidMessage("longer than any record of ours")
        return msgspec.json.decode(data, type=kind)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"no record of ours: {error}") from None


def rules_of(record: StoredPlan | BucketMessage) -> JobRules:
    """The job's rules. Raises InvalidMessage."""
    return decode_rules(record.rules)


def messages_by_bucket(
    coordinator: Coordinator, waiting: Waiting, strangers: Iterable[str] = ()
) -> dict[int, BucketMessage]:
    """The words for each bucket that somebody reads; `waiting` is for nodes that wait. The coordinator does not know of
    the `strangers`, by their node ids.

    Where none does it is left out, so that a bucket is not written again whenever somebody joins elsewhere.
    """
    plan = coordinator.plan
    known = {*coordinator.members, *(member.key for member in plan.members)}
    # Who was lost long ago may be back just in time to learn that the job is over.
    buckets = (
        range(BUCKETS)
        if plan.phase in OVER
        else {bucket_of(node_id) for node_id in (*strangers, *(key.node_id for key in known))}
    )
    told: dict[int, list[tuple[str, str, NodeView]]] = {bucket: [] for bucket in buckets}
    somebody_waits: set[int] = set()
    alike: NodeOrder | None = None
    for key in known:
        part = coordinator.view(key)
        if part.waits and plan.phase not in OVER:
            somebody_waits.add(bucket_of(key.node_id))
        if part.cluster is not None:
            of_all, own = split_order(part.cluster)
            # A visitor is told less than all others are.
            alike = of_all if of_all.hint is not None else alike
            part = msgspec.structs.replace(part, cluster=own)
        if part != EMPTY_VIEW:
            told[bucket_of(key.node_id)].append((*key, part))
    rules = encode_rules(coordinator.rules)
    wanted = msgspec.structs.replace(common_assignment(plan, None), cluster=alike)
    return {
        bucket: BucketMessage(
            rules, wanted, waiting if bucket in somebody_waits else None, tuple(sorted(parts, key=_rank))
        )
        for bucket, parts in sorted(told.items())
    }


def _rank(told: tuple[str, str, NodeView]) -> tuple[float, str, str]:
    node_id, incarnation, part = told
    return math.inf if part.ranks is None else part.ranks.node_rank, node_id, incarnation
