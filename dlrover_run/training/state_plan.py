"""The bytes of a checkpoint file before they have a place: what torch writes, and storages that are copied later.

`torch.save` writes a file from its beginning to its end, and copies a storage of a device to ordinary memory first.
Here it gets a placeholder in place of each such storage, so that all storages are copied at once, straight to where
they belong. Where no checksum is wanted, torch never reads a placeholder, whose pages take no memory then.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END_BYTES, _END64_BYTES, _LOCATOR_BYTES = 22, 56, 20
_TAIL_BYTES = _END_BYTES + _END64_BYTES + _LOCATOR_BYTES


class Piece(NamedTuple):
    """What stands at an offset of the file: bytes, or a storage of torch, of which `size` bytes are copied."""

    offset: int
    size: int
    content: Any


class StatePlan:
    """What a file will hold. `is_remote` tells the storages that a device has to copy."""

    def __init__(self, is_remote: Callable[[Any], bool]) -> None:
        self.length = 0
        self._is_remote = is_remote
        self._pieces: list[Piece] = []
        self._sources: dict[tuple[int, int], Any] = {}
        """Storages by the address and the size of what torch writes of them."""
        self._placeholders: dict[int, Any] = {}
        self.remote: list[Any] = []
        """The storages that a device has to copy."""

    def write(self, data: bytes | memoryview) -> int:
        """Add bytes, which are copied now, or a storage of the state, which is not."""
        size = memoryview(data).nbytes
        source = self._sources.get((_address(data), size)) if self._sources and size else None
        content = source if source is not None else data if isinstance(data, bytes) else bytes(data)
        self.place(content, size)
        return size

    def place(self, content: Any, size: int) -> None:
        """Add bytes, or a storage of this size."""
        self._pieces.append(Piece(self.length, size, content))
        self.length += size

    def flush(self) -> None:
        pass

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @property
    def pickle_module(self) -> Any:
        """The argument of `torch.save` by which this plan learns of each storage."""
        plan = self

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                identify: Callable[[Any, Any], Any] = cls.persistent_id
                cls.persistent_id = lambda self, obj: plan._identify(functools.partial(identify, self), obj)  # type: ignore[method-assign]

        module = types.ModuleType("pickle")
        module.__dict__.update(pickle.__dict__, Pickler=Pickler)
        return module

    def fit_archive(self, size: int) -> None:
        """Make the archive that torch has written exactly `size` bytes long, by a gap before its directory: where the
        memory of an earlier save is used again, its file keeps its size. Raises ValueError for what is no archive."""
        tail = b"".join(bytes(piece.content) for piece in self._pieces[-8:] if isinstance(piece.content, bytes))
        end = tail[-_END_BYTES:]
        if not end.startswith(_END):
            raise ValueError("torch has written no zip archive")
        gap = size - self.length
        has_64 = tail[-_END_BYTES - _LOCATOR_BYTES :].startswith(_LOCATOR)
        start = struct.unpack_from("<I", end, 16)[0]
        patched: dict[bytes, bytes] = {}
        if has_64:
            locator, end64 = tail[-_END_BYTES - _LOCATOR_BYTES : -_END_BYTES], tail[-_TAIL_BYTES:][:_END64_BYTES]
            start = struct.unpack_from("<Q", end64, 48)[0]
            patched[end64] = end64[:48] + struct.pack("<Q", start + gap) + end64[56:]
            place = struct.unpack_from("<Q", locator, 8)[0]
            patched[locator] = locator[:8] + struct.pack("<Q", place + gap) + locator[16:]
        patched[end] = end[:16] + struct.pack("<I", min(start + gap, 2**32 - 1)) + end[20:]
        before = [piece for piece in self._pieces if piece.offset < start]
        after = [
            piece._replace(offset=piece.offset + gap, content=patched.get(piece.content, piece.content))
            for piece in self._pieces[len(before) :]
        ]
        self._pieces = [*before, Piece(start, gap, bytes(gap)), *after]
        self.length = size

    def clear(self) -> None:
        """Let go of the storages: torch's pickler keeps this plan until the garbage collector finds it."""
        self._pieces, self._sources, self._placeholders, self.remote = [], {}, {}, []

    def _identify(self, identify: Callable[[Any], Any], obj: Any) -> Any:
        """torch's identity of a storage, and None for what is none."""
        import torch

        untyped: Any = torch.UntypedStorage
        typed: Any = torch.storage.TypedStorage
        storage: Any
        if isinstance(obj, typed):
            storage = obj._untyped_storage
        elif torch.is_storage(obj):
            storage = obj
        else:
            return identify(obj)
        if storage.device.type == "meta":
            return identify(obj)
        if not self._is_remote(storage):
            self._sources[storage.data_ptr(), storage.nbytes()] = storage
            return identify(obj)
        placeholder = self._placeholders.get(storage._cdata)
        if placeholder is None:
            placeholder = self._placeholders[storage._cdata] = untyped(storage.nbytes())
            self._sources[placeholder.data_ptr(), placeholder.nbytes()] = storage
            self.remote.append(storage)
        stands_for = placeholder
        if storage is not obj:
            stands_for = typed(wrap_storage=placeholder, dtype=obj.dtype, _internal=True)
        kind, storage_type, key, _, numel = identify(stands_for)
        return kind, storage_type, key, torch.serialization.location_tag(storage), numel


class _Buffer(ctypes.Structure):
    """The beginning of CPython's Py_buffer, and room for the rest."""

    _fields_ = (("buf", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))


def _address(data: bytes | memoryview) -> int:
    """Where the bytes are."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
