"""Reads the index of a checkpoint, as TensorFlow writes it: how long each data file must be, and which parts a variable
has.

The index is a LevelDB table: blocks of keys with shared prefixes, a checksum for each block, and a footer with the
place of the block of blocks. The first entry (with an empty key) has the number of data files, the others say where
each tensor is (`tensor_bundle.proto`). TensorFlow is not needed for that, and none of it is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
TRAILER = 5

MAX_SUMMED = 1 << 20
"""Bytes of an index whose checksums are compared: a tenth of a second in Python. That of a model with thousands of
variables is shorter."""


class DamagedIndex(ValueError):
    """The bytes are not a complete index; the text is a clause that says why."""


def lengths(index: bytes) -> list[int]:
    """The least length in bytes of each data file of a checkpoint, from its index. Raises DamagedIndex."""
    try:
        entries = list(_entries(index))
        if not entries or entries[0][0] != b"":
            raise DamagedIndex("its index does not begin as one")
        needed = [0] * _number(entries[0][1], 1)
        for _, entry in entries[1:]:
            shard, offset, size = (_number(entry, field) for field in (3, 4, 5))
            needed[shard] = max(needed[shard], offset + size)
    except (IndexError, struct.error, OverflowError, MemoryError):
        raise DamagedIndex("its index cannot be read") from None
    return needed


UNPARTITIONED: frozenset[tuple[int, ...]] = frozenset({()})
"""The parts of a variable that is saved in one piece."""


def parts(index: bytes) -> dict[str, frozenset[tuple[int, ...]]]:
    """Where each part of each variable begins in the whole, as an offset in each dimension; UNPARTITIONED for one that
    was saved in one piece. Raises DamagedIndex."""
    found = {}
    try:
        for key, entry in _entries(index):
            begins = frozenset(
                tuple(_number(extent, 1) for extent in _messages(part, 1)) for part in _messages(entry, 7)
            )
            if key:
                found[key.decode("utf-8", "replace")] = begins or UNPARTITIONED
    except (IndexError, struct.error, OverflowError, MemoryError):
        raise DamagedIndex("its index cannot be read") from None
    return found


def _entries(index: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(index) < FOOTER or struct.unpack_from("<Q", index, len(index) - 8)[0] != MAGIC:
        raise DamagedIndex("its index is cut off")
    footer = index[-FOOTER:]
    _, at = _varint(footer, 0)
    _, at = _varint(footer, at)
    summed = len(index) <= MAX_SUMMED
    for _, handle in _block(index, footer[at:], summed):
        yield from _block(index, handle, summed)


def _block(index: bytes, handle: bytes, summed: bool) -> Iterator[tuple[bytes, bytes]]:
    """The entries of one block."""
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    end = offset + size
    if end + TRAILER > len(index):
        raise DamagedIndex("its index is cut off")
    if index[end] != 0:
        raise DamagedIndex("its index is compressed in a way that no TensorFlow writes")
    if summed and struct.unpack_from("<I", index, end + 1)[0] != masked(crc32c(index[offset : end + 1])):
        raise DamagedIndex("its index has other sums than were written")
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


def _number(message: bytes, wanted: int) -> int:
    """A number of a protocol buffer message, by its field; 0 if it is left out, as such messages do."""
    numbers = [value for field, value in _fields(message) if field == wanted and isinstance(value, int)]
    return numbers[-1] if numbers else 0


def _messages(message: bytes, wanted: int) -> list[bytes]:
    """The messages in a message, by their field."""
    return [value for field, value in _fields(message) if field == wanted and isinstance(value, bytes)]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer message: numbers and those with a length; others are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            number, at = _varint(message, at)
            yield field, number
        elif kind == 2:
            length, at = _varint(message, at)
            yield field, message[at : at + length]
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise DamagedIndex("its index cannot be read")


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of the data, which Python's standard library does not have."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 255] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked(sum_: int) -> int:
    """A checksum as LevelDB stores it, so that checksums of checksums do not cancel out."""
    return (((sum_ >> 15) | (sum_ << 17)) + 0xA282EAD8) & 0xFFFFFFFF
