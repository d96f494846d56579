"""What torch's flight recorder shows of one worker, as positions. Pure.

A dump is JSON, or what torch's pickler makes of dictionaries, lists, strings and numbers. No file of a worker is
trusted: the reader knows these types only.
"""

from __future__ import annotations

import ast
import io
import math
import pickle
from collections.abc import Iterable
from typing import Any

import msgspec

from dlrover_run.features.hangs.collectives.positions import (
    MAX_DTYPE,
    MAX_GROUP,
    MAX_NAME,
    MAX_OPERATION,
    MAX_POSITIONS,
    Position,
    Source,
)
from dlrover_run.features.hangs.collectives.rank_sets import pack

MAX_DUMP = 64 * 1024 * 1024
"""Bytes of a dump that are read: 2,000 entries with stacks are 3 MB."""

MAX_ENTRIES = 20_000

MAX_MEMBERS_TEXT = 1_000_000
"""Characters of the list of the ranks of a group."""

UNDESCRIBED = "undefined"
"""How torch describes groups for which the script has no description."""

ITEM_BYTES = {
    "Bool": 1,
    "Byte": 1,
    "Char": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}
"""Bytes of an element by torch's name of its type; those of one byte with 8 in their name are Float8 types."""

OPERATION_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
"""What scripts call some operations."""


class _BasicTypes(pickle.Unpickler):
    """Makes no object of a class, and calls no function, of what it reads."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no basic type")

    def persistent_load(self, reference: Any) -> Any:
        raise pickle.UnpicklingError("a reference is no basic type")


def read_dump(data: bytes) -> dict[str, Any] | None:
    """A dump as a dictionary; None if the bytes are none, or not yet all of one."""
    if len(data) > MAX_DUMP:
        return None
    try:
        found = msgspec.json.decode(data) if data[:1] == b"{" else _BasicTypes(io.BytesIO(data)).load()
    except Exception:
        # Whatever the bytes are: pickle raises errors of many kinds for damaged data.
        return None
    return found if isinstance(found, dict) and isinstance(found.get("entries"), list) else None


def recorder_positions(dump: dict[str, Any], rank: int) -> tuple[Position, ...]:
    """The positions of the worker with this global rank, in the groups that it used last."""
    entries = [one for one in dump["entries"][-MAX_ENTRIES:] if isinstance(one, dict)]
    by_group: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for one in entries:
        by_group.setdefault((_group(one), bool(one.get("is_p2p"))), []).append(one)
    found = []
    for (group, is_p2p), own in by_group.items():
        position = _between_two(dump, group, own, rank) if is_p2p else _in_group(dump, group, own)
        if position is not None:
            found.append((entries.index(own[-1]), position))
    return tuple(position for _, position in sorted(found, key=lambda one: -one[0])[:MAX_POSITIONS])


def _in_group(dump: dict[str, Any], group: str, entries: list[dict[str, Any]]) -> Position | None:
    numbered = [(number, one) for one in entries if (number := _count(one.get("collective_seq_id"))) is not None]
    if not numbered:
        return None
    status = _status(dump, entries[-1])
    entered = max(max(number for number, _ in numbered), _count(status.get("last_enqueued_collective")) or 0)
    done = [number for number, one in numbered if one.get("state") == "completed"]
    completed = max((*done, _count(status.get("last_completed_collective")) or 0))
    number = min(completed + 1, entered)
    one = next((one for other, one in numbered if other == number), numbered[-1][1])
    return _position(dump, group, one, entered=entered, number=number, completed=min(completed, entered))


def _between_two(dump: dict[str, Any], group: str, entries: list[dict[str, Any]], rank: int) -> Position | None:
    numbered = [(number, one) for one in entries if (number := _count(one.get("p2p_seq_id"))) is not None]
    open_ones = [(number, one) for number, one in numbered if one.get("state") != "completed"]
    if not numbered:
        return None
    number, one = open_ones[0] if open_ones else numbered[-1]
    peer = _peer(one, _members(dump, group), rank)
    if peer is None:
        return None
    entered = numbered[-1][0]
    return _position(
        dump, group, one, entered=entered, number=number, completed=number - 1 if open_ones else entered, peer=peer
    )


def _position(
    dump: dict[str, Any],
    group: str,
    one: dict[str, Any],
    *,
    entered: int,
    number: int,
    completed: int,
    peer: int | None = None,
) -> Position:
    members = _members(dump, group)
    dtypes = one.get("input_dtypes")
    dtype = dtypes[0] if isinstance(dtypes, list) and dtypes and isinstance(dtypes[0], str) else ""
    described = one.get("process_group")
    name = described[1] if isinstance(described, (list, tuple)) and len(described) > 1 else ""
    return Position(
        _printable(f"{group}:{min(members, default=0)}x{len(members)}")[-MAX_GROUP:],
        Source.FLIGHT_RECORDER,
        _operation(one),
        entered=entered,
        number=number,
        completed=completed,
        name="" if name == UNDESCRIBED else _printable(str(name))[:MAX_NAME],
        size=len(members),
        members=pack(members),
        bytes=_bytes(one.get("input_sizes"), dtype),
        dtype=_printable(dtype)[:MAX_DTYPE],
        peer=peer,
    )


def _group(one: dict[str, Any]) -> str:
    described = one.get("process_group")
    if isinstance(described, (list, tuple)) and described and isinstance(described[0], str):
        return described[0]
    return str(one.get("pg_id", ""))


def _status(dump: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """What torch counts for the group of an entry, by the number of the group in this process."""
    all_groups = dump.get("pg_status")
    found = all_groups.get(str(one.get("pg_id"))) if isinstance(all_groups, dict) else None
    return found if isinstance(found, dict) else {}


def _members(dump: dict[str, Any], group: str) -> frozenset[int]:
    """The global ranks of a group, which torch writes as the text of a list."""
    groups = dump.get("pg_config")
    found = groups.get(group) if isinstance(groups, dict) else None
    text = found.get("ranks") if isinstance(found, dict) else None
    if not isinstance(text, str) or len(text) > MAX_MEMBERS_TEXT:
        return frozenset()
    try:
        ranks = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return frozenset()
    return (
        frozenset(ranks) if isinstance(ranks, list) and all(_count(one) is not None for one in ranks) else frozenset()
    )


def _peer(one: dict[str, Any], members: Iterable[int], rank: int) -> int | None:
    """The other rank of a send `nccl:send 0->1` or a receive `nccl:recv 1<-0`, which have ranks of the group."""
    _, _, ends = str(one.get("profiling_name", "")).partition(" ")
    own, arrow, other = ends.partition("->") if "->" in ends else ends.partition("<-")
    if not arrow or not own.isdecimal() or not other.isdecimal():
        return None
    ranks = sorted(members)
    index = int(other)
    peer = ranks[index] if index < len(ranks) else None
    return None if peer == rank else peer


def _operation(one: dict[str, Any]) -> str:
    name = str(one.get("profiling_name", "")).partition(" ")[0].rpartition(":")[2]
    return _printable(OPERATION_NAMES.get(name, name))[:MAX_OPERATION]


def _bytes(sizes: Any, dtype: str) -> int | None:
    """The bytes of all tensors that go into an operation; None if that is not known."""
    item = 1 if "Float8" in dtype else ITEM_BYTES.get(dtype)
    if item is None or not isinstance(sizes, list):
        return None
    total = 0
    for size in sizes:
        if not isinstance(size, list) or not all(_count(one) is not None for one in size) or len(size) > 64:
            return None
        total += math.prod(size) * item
    return total if total < 2**53 else None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if is_count else None


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
