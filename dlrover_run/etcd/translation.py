"""The operations of a store in the messages of etcd, and what etcd answers in those of a store. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dlrover_run.etcd.messages import Api
from dlrover_run.etcd.operations import (
    Absent,
    Change,
    Changed,
    Created,
    Delete,
    Get,
    KeyValue,
    Outcome,
    Put,
    Range,
    Txn,
    Under,
)

_EVERYTHING = b"\0"
"""As both ends of a range, all keys; as the first one, the smallest key."""


def write_txn(api: Api, txn: Txn) -> Any:
    """A transaction as a TxnRequest."""
    return api.message("TxnRequest")(
        compare=[_write_condition(api, condition) for condition in txn.conditions],
        success=[_write_operation(api, operation) for operation in txn.then],
        failure=[_write_operation(api, operation) for operation in txn.otherwise],
    )


def read_outcome(response: Any) -> Outcome:
    """What a TxnResponse says."""
    found = {value.key: value for value in _found(response)}
    return Outcome(response.succeeded, response.header.revision, found)


def write_watch(api: Api, range: Range, revision: int) -> Any:
    """The WatchRequest for the changes of a range from a revision on."""
    create = api.message("WatchCreateRequest")(**_bounds(range), start_revision=revision)
    return api.message("WatchRequest")(create_request=create)


def read_changes(events: Sequence[Any]) -> list[Change]:
    """The changes that the events of a WatchResponse stand for."""
    return [Change(_text(e.kv.key), None if e.type == e.DELETE else _key_value(e.kv)) for e in events]


def _write_condition(api: Api, condition: Absent | Created | Changed | Under) -> Any:
    compare = api.message("Compare")
    if isinstance(condition, Absent):
        # A key that does not exist counts as created at 0, and so does a range without any.
        bounds = _bounds(condition.range)
        return compare(**bounds, target=compare.CREATE, result=compare.EQUAL, create_revision=0)
    key = _bytes(condition.key)
    if isinstance(condition, Under):
        return compare(key=key, target=compare.LEASE, result=compare.EQUAL, lease=condition.lease)
    if isinstance(condition, Created):
        return compare(key=key, target=compare.CREATE, result=compare.EQUAL, create_revision=condition.revision)
    return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=condition.revision)


def _write_operation(api: Api, operation: Get | Put | Delete | Txn) -> Any:
    wrap = api.message("RequestOp")
    if isinstance(operation, Get):
        return wrap(request_range=api.message("RangeRequest")(**_bounds(operation.range)))
    if isinstance(operation, Delete):
        return wrap(request_delete_range=api.message("DeleteRangeRequest")(**_bounds(operation.range)))
    if isinstance(operation, Put):
        key, value, lease = operation
        return wrap(request_put=api.message("PutRequest")(key=_bytes(key), value=value, lease=lease))
    return wrap(request_txn=write_txn(api, operation))


def _found(response: Any) -> Iterator[KeyValue]:
    for part in response.responses:
        kind = part.WhichOneof("response")
        if kind == "response_range":
            yield from map(_key_value, part.response_range.kvs)
        elif kind == "response_txn":
            yield from _found(part.response_txn)


def _bounds(range: Range) -> dict[str, bytes]:
    key = _bytes(range.key)
    if not range.prefix:
        return {"key": key}
    if not key:
        return {"key": _EVERYTHING, "range_end": _EVERYTHING}
    # UTF-8 has no byte 255, so the last one can always be raised.
    return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(_text(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _bytes(key: str) -> bytes:
    return key.encode()


def _text(key: bytes) -> str:
    # Somebody else may have put a key below our prefix that is no text.
    return key.decode(errors="replace")
