"""The line of an instruction, by the table of its code object. Pure; the tables are those of CPython."""

from __future__ import annotations

from dlrover_run.stacks.layouts import Lines

_NO_LOCATION, _LONG, _NO_COLUMN = 15, 14, 13
_FIRST_ONE_LINE = 10
_UNIT = 2
"""Bytes of an instruction without its caches."""


def line_of(kind: Lines, table: bytes, first_line: int, position: int) -> int:
    """The line of the instruction at that position in bytes; 0 if it has none."""
    if kind is Lines.LOCATIONS:
        return _by_locations(table, first_line, position)
    return (_by_ranges if kind is Lines.RANGES else _by_steps)(table, first_line, position)


def _by_locations(table: bytes, line: int, position: int) -> int:
    # An entry: one byte with its kind and the number of instructions, and what follows from the kind.
    at = covered = 0
    while at < len(table):
        head = table[at]
        kind, units = head >> 3 & 0xF, (head & 7) + 1
        at += 1
        if kind in (_LONG, _NO_COLUMN):
            delta, at = _signed(table, at)
            line += delta
            if kind == _LONG:
                for _ in range(3):
                    _, at = _number(table, at)
        elif _FIRST_ONE_LINE <= kind < _NO_COLUMN:
            line += kind - _FIRST_ONE_LINE
            at += 2
        elif kind < _FIRST_ONE_LINE:
            at += 1
        covered += units * _UNIT
        if position < covered:
            return 0 if kind == _NO_LOCATION else line
    return 0


def _by_ranges(table: bytes, line: int, position: int) -> int:
    covered = 0
    for at in range(0, len(table) - 1, 2):
        delta = table[at + 1] - (256 if table[at + 1] > 127 else 0)
        has_line = delta != -128
        line += delta if has_line else 0
        covered += table[at]
        if position < covered:
            return line if has_line else 0
    return line


def _by_steps(table: bytes, line: int, position: int) -> int:
    begun = 0
    for at in range(0, len(table) - 1, 2):
        begun += table[at]
        if begun > position:
            break
        line += table[at + 1] - (256 if table[at + 1] > 127 else 0)
    return line


def _number(table: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(table):
        byte = table[at]
        at += 1
        value |= (byte & 0x3F) << shift
        shift += 6
        if not byte & 0x40:
            break
    return value, at


def _signed(table: bytes, at: int) -> tuple[int, int]:
    value, at = _number(table, at)
    return (-(value >> 1) if value & 1 else value >> 1), at
