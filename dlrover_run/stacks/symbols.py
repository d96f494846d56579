"""Finds exported variables of a program or a library in the memory of a process.

Its dynamic symbols are in memory, so that no file is read: a file may have been replaced since, or be in a container.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from dlrover_run.stacks.memory import ProcessMemory, Unreadable

MAX_CHAIN = 4096
"""Symbols of one bucket of a hash table."""

MAX_DYNAMIC = 256
"""Entries of a dynamic section."""

_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_EXECUTABLE = 2
_LOAD, _DYNAMIC = 1, 2
_STRTAB, _SYMTAB, _GNU_HASH = 5, 6, 0x6FFFFEF5
# After e_ident: type, and then the position, size and number of the program headers.
_HEADER = struct.Struct("=H14xQ14xHH")
_PROGRAM = struct.Struct("=II8xQ")
_PAIR = struct.Struct("=qQ")
_HASH_HEADER = struct.Struct("=IIII")
_SYMBOL = struct.Struct("=IBBHQQ")
_NUMBER = struct.Struct("=I")


class Module:
    """A program or library whose first bytes are at `start`. Raises Unreadable if it is none."""

    def __init__(self, memory: ProcessMemory, start: int) -> None:
        self._memory = memory
        self._base = start
        self._tables: dict[int, int] = {}
        header = memory.read(start, 64)
        if not header.startswith(_ELF_64_LITTLE):
            raise Unreadable
        kind, position, size, count = _HEADER.unpack_from(header, 16)
        if kind == _EXECUTABLE:
            self._base = 0
        programs = memory.read(start + position, size * count)
        for number in range(count):
            what, _, address = _PROGRAM.unpack_from(programs, number * size)
            if what == _LOAD and kind != _EXECUTABLE and not number:
                self._base = start - (address & ~0xFFF)
            if what == _DYNAMIC:
                self._tables = dict(self._entries(self._base + address))

    def find(self, name: str) -> int:
        """The address of a variable; 0 if it is not exported. Raises Unreadable."""
        if not {_GNU_HASH, _SYMTAB, _STRTAB} <= self._tables.keys():
            return 0
        encoded = name.encode() + b"\0"
        wanted = _hash(encoded[:-1])
        table = self._tables[_GNU_HASH]
        buckets, first, bloom, _ = _HASH_HEADER.unpack(self._memory.read(table, _HASH_HEADER.size))
        if not buckets:
            return 0
        bucket = table + _HASH_HEADER.size + 8 * bloom
        number = self._number(bucket + 4 * (wanted % buckets))
        chain = bucket + 4 * buckets
        for _ in range(MAX_CHAIN):
            if number < first:
                return 0
            value = self._number(chain + 4 * (number - first))
            if value | 1 == wanted | 1:
                symbol = self._memory.read(self._tables[_SYMTAB] + _SYMBOL.size * number, _SYMBOL.size)
                text, _, _, section, address, _ = _SYMBOL.unpack(symbol)
                if section and self._memory.read(self._tables[_STRTAB] + text, len(encoded)) == encoded:
                    return int(self._base + address)
            if value & 1:
                return 0
            number += 1
        return 0

    def _entries(self, address: int) -> Iterator[tuple[int, int]]:
        for _ in range(MAX_DYNAMIC):
            tag, value = _PAIR.unpack(self._memory.read(address, _PAIR.size))
            if not tag:
                return
            if tag in (_STRTAB, _SYMTAB, _GNU_HASH):
                # glibc writes addresses in place of positions, musl does not.
                yield tag, value if value >= self._base else self._base + value
            address += _PAIR.size

    def _number(self, address: int) -> int:
        found: int = _NUMBER.unpack(self._memory.read(address, _NUMBER.size))[0]
        return found


def _hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
