"""The keys of a job in etcd, and what stands in them: JSON of checked shape, packed where it is long.

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
"""

from __future__ import annotations

import zlib
from typing import TypeVar
from urllib.parse import quote

import msgspec

from dlrover_run.coordination.cluster.account import joined
from dlrover_run.coordination.parts import NOBODY, Part, with_part
from dlrover_run.coordination.records import Assignment, NodeKey, NodeStatus, Plan, Waiting
from dlrover_run.coordination.rules import Rules
from dlrover_run.wire.messages import BadMessage, RuleValues, rules_from

BUCKETS = 64
"""Into so many keys the words for all nodes are parted. With the plan they fit into one transaction, for which etcd's
default bound is 128 operations."""

PACKED_FROM = 32 * 1024
"""Bytes from which on a value is compressed. etcd takes 1.5 MB in one request; a plan of 20,000 nodes has 2.2 MB."""

MOST_UNPACKED = 64 * 1024 * 1024
"""Bytes that a packed value may come to: what stands in etcd must not make a node run out of memory."""


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next elected agent goes on with."""

    rules: RuleValues
    plan: Plan


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the nodes of one bucket shall do.

    `wanted` is what all nodes are told. `parts` are what concerns single ones of the bucket, by node id and
    incarnation; a node without anything to do waits, as `waiting` says. Where `wanted` has an order with the addresses
    of a cluster, the orders among the parts are without them.
    """

    rules: RuleValues
    wanted: Assignment
    waiting: Waiting | None = None
    parts: tuple[tuple[str, str, Part], ...] = ()

    def assignment(self, key: NodeKey) -> Assignment:
        """What one of the nodes shall do."""
        own = next((part for *process, part in self.parts if tuple(process) == key), NOBODY)
        if own.cluster is not None and self.wanted.cluster is not None:
            own = msgspec.structs.replace(own, cluster=joined(self.wanted.cluster, own.cluster))
        return with_part(self.wanted, own, self.waiting if own.waits else None)


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
        """Where a node's status stands."""
        return f"{self.nodes}{node_id}"

    def words(self, bucket: int) -> str:
        """Where the word for a bucket stands."""
        return f"{self.all_words}{bucket:02}"


def bucket_of(node_id: str) -> int:
    """The bucket of a node: the same wherever it is computed."""
    return zlib.crc32(node_id.encode()) % BUCKETS


Record = TypeVar("Record", NodeStatus, Stored, Word)


def pack(record: NodeStatus | Stored | Word) -> bytes:
    """The bytes of a record."""
    data = msgspec.json.encode(record)
    return zlib.compress(data, 1) if len(data) >= PACKED_FROM else data


def unpack(data: bytes, kind: type[Record]) -> Record:
    """The record that was packed. Raises BadMessage."""
    try:
        # JSON of ours begins with a brace, which no stream of zlib does.
        if not data.startswith(b"{"):
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(data, MOST_UNPACKED)
            if unpacking.unconsumed_tail:
                raise BadMessage("longer than any record of ours")
        return msgspec.json.decode(data, type=kind)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"no record of ours: {error}") from None


def rules_of(record: Stored | Word) -> Rules:
    """The job's rules. Raises BadMessage."""
    return rules_from(record.rules)
