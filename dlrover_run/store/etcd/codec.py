"""The protobuf messages of etcd's v3 API, from the package etcd3, and the encoding of operations in them.

Release 0.12.0 of etcd3, the last one, cannot be imported with protobuf 4 or later. Its description of the API is still
right, so its descriptors are read as text and put into a separate pool. There they conflict neither with those of
another client of etcd that a user's program imports into the same process nor with the pure-Python protobuf, which
would make TensorFlow's parsing 250 times slower.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_run.spec import SpecError
from dlrover_run.store.operations import (
    Absent,
    Change,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    LeaseIs,
    ModRevisionIs,
    Put,
    Range,
    Txn,
    TxnResult,
)
from dlrover_run.transport import grpc_setup

INSTALL = "pip install 'dlrover-run[etcd]'"

_UNIMPORTABLE = "0.12.0"
"""The release whose files are read but not imported. The version number decides, because an import that fails leaves
half of its messages in the shared pool."""

_FILES = ("kv", "auth", "rpc")
"""Each needs those before it."""


class PackageMissing(SpecError):
    """The client's packages are missing or incomplete; the message is a sentence with the remedy."""


class Method(NamedTuple):
    """One method of the API: its path for gRPC, and the classes of its request and response."""

    path: str
    request: Any
    response: Any


class Api:
    """The messages and methods that a pool of descriptors has."""

    def __init__(self, pool: Any) -> None:
        from google.protobuf import message_factory

        self._pool = pool
        self._class_of = message_factory.GetMessageClass

    def message(self, name: str) -> Any:
        """The class of a message, by its name in the API such as `TxnRequest`."""
        return self._class_of(self._pool.FindMessageTypeByName(f"etcdserverpb.{name}"))

    def method(self, name: str) -> Method:
        """A method, by the names of its service and its own such as `KV.Txn`."""
        service, _, own = name.partition(".")
        found = self._pool.FindServiceByName(f"etcdserverpb.{service}").methods_by_name[own]
        path = f"/etcdserverpb.{service}/{own}"
        return Method(path, self._class_of(found.input_type), self._class_of(found.output_type))


@functools.cache
def load() -> Api:
    """The API as the installed etcd3 describes it. Raises PackageMissing."""
    try:
        release = importlib.metadata.version("etcd3")
        pool = _read_pool() if release == _UNIMPORTABLE else _import_pool()
        return Api(pool)
    except ImportError as error:
        # A PackageNotFoundError is an ImportError too.
        raise PackageMissing(f"What a client of etcd needs is not installed ({error}): {INSTALL}") from None


def _read_pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    found = importlib.util.find_spec("etcd3")
    folders = [] if found is None else found.submodule_search_locations or []
    for name in _FILES:
        described = _read_literal([Path(folder, "etcdrpc", f"{name}_pb2.py") for folder in folders])
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(described))
    return pool


def _read_literal(places: list[Path]) -> bytes:
    """The serialized description of a generated file, which is one literal on a line of its own."""
    for place in places:
        if place.is_file():
            line = re.search(r"^ *serialized_pb=_b\(('.*')\)", place.read_text("utf-8"), re.MULTILINE)
            if line is not None:
                text: str = ast.literal_eval(line[1])
                return text.encode("latin1")
    raise PackageMissing(
        f"The package etcd3 {_UNIMPORTABLE} is damaged, perhaps by etcd3-py, which has the same name inside: "
        f"pip uninstall etcd3-py etcd3, then {INSTALL}"
    )


def _import_pool() -> Any:
    # It imports grpc, which has to be set up first.
    grpc_setup.load_grpc()
    try:
        return importlib.import_module("etcd3.etcdrpc.rpc_pb2").DESCRIPTOR.pool
    except ImportError:
        raise
    except Exception as error:
        # Generated code refuses a protobuf that it was not made for with whatever exception its release chose.
        raise PackageMissing(
            f"The installed etcd3 and protobuf do not work together ({error}): pip install etcd3=={_UNIMPORTABLE}"
        ) from None


_EVERYTHING = b"\0"
"""As both ends of a range, all keys; as the first one, the smallest key."""


def write_txn(api: Api, txn: Txn) -> Any:
    return api.message("TxnRequest")(
        compare=[_write_condition(api, condition) for condition in txn.conditions],
        success=[_write_operation(api, operation) for operation in txn.then],
        failure=[_write_operation(api, operation) for operation in txn.otherwise],
    )


def read_outcome(response: Any) -> TxnResult:
    found = {value.key: value for value in _found(response)}
    return TxnResult(response.succeeded, response.header.revision, found)


def write_watch(api: Api, range: Range, revision: int) -> Any:
    """The WatchRequest for the changes of a range from a revision on."""
    return api.message("WatchRequest")(create_request={**_bounds(range), "start_revision": revision})


def read_changes(events: Sequence[Any]) -> list[Change]:
    return [Change(_text(e.kv.key), None if e.type == e.DELETE else _key_value(e.kv)) for e in events]


def _write_condition(api: Api, condition: Absent | CreateRevisionIs | ModRevisionIs | LeaseIs) -> Any:
    compare = functools.partial(api.message("Compare"), result="EQUAL")
    match condition:
        case Absent(range):
            # A key that does not exist counts as created at 0, and so does a range without any.
            return compare(**_bounds(range), target="CREATE", create_revision=0)
        case CreateRevisionIs(key, revision):
            return compare(key=key.encode(), target="CREATE", create_revision=revision)
        case ModRevisionIs(key, revision):
            return compare(key=key.encode(), target="MOD", mod_revision=revision)
        case LeaseIs(key, lease):
            return compare(key=key.encode(), target="LEASE", lease=lease)


def _write_operation(api: Api, operation: Get | Put | Delete | Txn) -> Any:
    wrap = api.message("RequestOp")
    match operation:
        case Get(range):
            return wrap(request_range=_bounds(range))
        case Delete(range):
            return wrap(request_delete_range=_bounds(range))
        case Put(key, value, lease):
            return wrap(request_put={"key": key.encode(), "value": value, "lease": lease})
        case Txn():
            return wrap(request_txn=write_txn(api, operation))


def _found(response: Any) -> Iterator[KeyValue]:
    for part in response.responses:
        kind = part.WhichOneof("response")
        if kind == "response_range":
            yield from map(_key_value, part.response_range.kvs)
        elif kind == "response_txn":
            yield from _found(part.response_txn)


def _bounds(range: Range) -> dict[str, bytes]:
    key = range.key.encode()
    if not range.prefix:
        return {"key": key}
    if not key:
        return {"key": _EVERYTHING, "range_end": _EVERYTHING}
    # UTF-8 has no byte 255, so the last one can always be raised.
    return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(_text(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _text(key: bytes) -> str:
    # Another program may have put a key below our prefix that is not text.
    return key.decode(errors="replace")
