"""Reads the index of a checkpoint, as TensorFlow writes it: how long each data file must be, and which parts a variable
has.

The index is a LevelDB table: blocks of keys with shared prefixes, a checksum for each block, and a footer with the
place of the block of blocks. The first entry (with an empty key) has the number of data files, each other one the place
of a tensor (`tensor_bundle.proto`). TensorFlow is not needed for this, and its own readers do not return the parts.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
TRAILER = 5

MAX_SUMMED = 1 << 20
"""Bytes of an index whose checksums are compared: a tenth of a second in Python. That of a model with thousands of
variables is shorter."""

Begins = frozenset[tuple[int, ...]]
"""Where the parts of a variable begin in the whole, as an offset in each dimension."""

UNPARTITIONED: Begins = frozenset({()})
"""The parts of a variable that is saved in one piece."""


class DamagedIndex(ValueError):
    """The bytes are not a complete index; the text is a clause with the cause."""


class CheckpointIndex(NamedTuple):
    """The least length in bytes of each data file, and the parts of each variable."""

    lengths: list[int]
    parts: dict[str, Begins]


def read_index(index: bytes) -> CheckpointIndex:
    """The contents of an index. Raises DamagedIndex."""
    parts: dict[str, Begins] = {}
    try:
        entries = _entries(index)
        key, header = next(entries, (None, b""))
        if key != b"":
            raise DamagedIndex("its index has no header")
        lengths = [0] * _number(_fields(header), 1)
        for key, entry in entries:
            fields = _fields(entry)
            shard = _number(fields, 3)
            lengths[shard] = max(lengths[shard], _number(fields, 4) + _number(fields, 5))
            begins = [tuple(_number(_fields(extent), 1) for extent in _fields(part)[1]) for part in fields[7]]
            parts[key.decode("utf-8", "replace")] = frozenset(begins) or UNPARTITIONED
    except (IndexError, TypeError, struct.error, OverflowError, MemoryError):
        raise DamagedIndex("its index cannot be read") from None
    return CheckpointIndex(lengths, parts)


def _entries(index: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(index) < FOOTER or struct.unpack_from("<Q", index, len(index) - 8)[0] != MAGIC:
        raise DamagedIndex("its index is cut off")
    footer = index[-FOOTER:]
    _, at = _varint(footer, 0)
    _, at = _varint(footer, at)
    for _, handle in _block(index, footer[at:]):
        yield from _block(index, handle)


def _block(index: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    end = offset + size
    if end + TRAILER > len(index):
        raise DamagedIndex("its index is cut off")
    if index[end] != 0:
        raise DamagedIndex("its index is compressed in a way that no TensorFlow writes")
    (checksum,) = struct.unpack_from("<I", index, end + 1)
    if len(index) <= MAX_SUMMED and checksum != masked(crc32c(index[offset : end + 1])):
        raise DamagedIndex("its index does not have the checksums that were written")
    (restarts,) = struct.unpack_from("<I", index, end - 4)
    end -= 4 * (restarts + 1)
    key, at = b"", offset
    while at < end:
        shared, at = _varint(index, at)
        own, at = _varint(index, at)
        length, at = _varint(index, at)
        key = key[:shared] + index[at : at + own]
        at += own
        yield key, index[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7


def _number(fields: dict[int, list[Any]], field: int) -> int:
    """A number of a message; 0 if it is left out, as such messages do."""
    return int((fields[field] or [0])[-1])


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The values of each field of a protocol buffer message: numbers, and bytes with a length; others are skipped."""
    found: dict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            number, at = _varint(message, at)
            found[field].append(number)
        elif kind == 2:
            length, at = _varint(message, at)
            found[field].append(message[at : at + length])
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise DamagedIndex("its index cannot be read")
    return found


def _crc_table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of the data, which Python's standard library does not have."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC_TABLE[(value ^ byte) & 255] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """A checksum as LevelDB stores it, so that checksums of checksums do not cancel out."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF
