"""The commands of a client of torch's store, read from the bytes of its connection. Pure.

A command is one byte, an integer if it has one, byte strings with their lengths before them, and another integer if it
has one. All integers are little-endian. What the real client sends was observed; `tests/torchrun/test_tcp_store.py`
compares the answers with those of torch's own server.
"""

from __future__ import annotations

import struct

MAX_KEY_BYTES = 64 * 1024
"""The longest key. Torch's own server accepts 8 KiB."""

MAX_VALUE_BYTES = 256 * 1024 * 1024
"""The longest value in a command. Torch's own server accepts 8 MiB."""

MAX_COUNT = 128 * 1024
"""The most keys in a command."""

MAX_COMMAND_BYTES = 2 * MAX_VALUE_BYTES
"""The longest command: what one connection can make the server hold before it is answered."""

MAGIC = 0x3C85F7CE
"""What a client sends with `VALIDATE`, its first command (TCPStoreBackend.hpp)."""

NODE_ENDED = 0xDE000000
"""What an agent sends with `VALIDATE` instead, plus its node rank: the workers of that node have ended."""

MAX_NODE_RANK = 0xFFFFFF

(
    VALIDATE,
    SET,
    COMPARE_SET,
    GET,
    ADD,
    CHECK,
    WAIT,
    NUM_KEYS,
    DELETE,
    APPEND,
    MULTI_GET,
    MULTI_SET,
    CANCEL_WAIT,
    PING,
    QUEUE_PUSH,
    QUEUE_POP,
    QUEUE_LEN,
    LIST_KEYS,
    BARRIER,
) = range(19)

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")


class ProtocolError(Exception):
    """A client has sent what is no command, or what is too large; its connection is closed."""


class _Layout:
    """What follows the byte of a command. With `counted`, the integer `head` says how often the strings are repeated.
    The first string of each repetition is a key."""

    def __init__(
        self,
        strings: int = 0,
        head: struct.Struct | None = None,
        tail: struct.Struct | None = None,
        counted: bool = False,
    ) -> None:
        self.strings = strings
        self.head = head
        self.tail = tail
        self.counted = counted


_LAYOUTS = {
    VALIDATE: _Layout(head=U32),
    SET: _Layout(2),
    COMPARE_SET: _Layout(3),
    GET: _Layout(1),
    ADD: _Layout(1, tail=I64),
    CHECK: _Layout(1, head=U64, counted=True),
    WAIT: _Layout(1, head=U64, counted=True),
    NUM_KEYS: _Layout(),
    DELETE: _Layout(1),
    APPEND: _Layout(2),
    MULTI_GET: _Layout(1, head=U64, counted=True),
    MULTI_SET: _Layout(2, head=U64, counted=True),
    CANCEL_WAIT: _Layout(),
    PING: _Layout(head=U32),
    QUEUE_PUSH: _Layout(2),
    QUEUE_POP: _Layout(1),
    QUEUE_LEN: _Layout(1),
    LIST_KEYS: _Layout(),
    BARRIER: _Layout(1, tail=I64),
}


class Command:
    """One command: its code, its strings, and its integer, 0 without one."""

    __slots__ = ("code", "number", "strings")

    def __init__(self, code: int, strings: list[bytes], number: int = 0) -> None:
        self.code = code
        self.strings = strings
        self.number = number


class CommandParser:
    """Reads the commands of one connection, in whatever pieces its bytes arrive. What has been read of a command is
    not read again, so that one of many keys costs no more in small pieces than at once."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._needed = 1
        self._command: Command | None = None
        self._layout = _LAYOUTS[NUM_KEYS]
        self._head: struct.Struct | None = None
        self._left = 0
        self._bytes = 0

    def feed(self, data: bytes) -> list[Command]:
        """The commands that are complete with these bytes. Raises ProtocolError."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        commands = []
        at, size = 0, len(data)
        while True:
            command = self._command
            if command is None:
                if at == size:
                    self._needed = 1
                    break
                command = self._begin(data[at])
                at += 1
            if self._head is not None:
                if size - at < self._head.size:
                    self._needed = self._head.size
                    break
                (number,) = self._head.unpack_from(data, at)
                at += self._head.size
                self._take_head(command, number)
            end = at
            while self._left:
                if size - at < 8:
                    self._needed = 8
                    break
                (length,) = U64.unpack_from(data, at)
                self._check(command, length)
                end = at + 8 + length
                if end > size:
                    self._needed = 8 + length
                    break
                command.strings.append(data[at + 8 : end])
                self._bytes += length
                self._left -= 1
                at = end
            if self._left:
                break
            tail = self._layout.tail
            if tail is not None:
                if size - at < tail.size:
                    self._needed = tail.size
                    break
                (command.number,) = tail.unpack_from(data, at)
                at += tail.size
            commands.append(command)
            self._command = None
        if at < size:
            self._rest += memoryview(data)[at:]
        return commands

    def _begin(self, code: int) -> Command:
        layout = _LAYOUTS.get(code)
        if layout is None:
            raise ProtocolError(f"{code} is no command")
        self._layout = layout
        self._head = layout.head
        self._left = 0 if layout.counted else layout.strings
        self._bytes = 0
        self._command = command = Command(code, [])
        return command

    def _take_head(self, command: Command, number: int) -> None:
        self._head = None
        if not self._layout.counted:
            command.number = number
        elif number > MAX_COUNT:
            raise ProtocolError(f"{number} keys in a command, more than {MAX_COUNT}")
        else:
            self._left = number * self._layout.strings

    def _check(self, command: Command, length: int) -> None:
        is_key = len(command.strings) % self._layout.strings == 0
        limit = MAX_KEY_BYTES if is_key else MAX_VALUE_BYTES
        if length > limit or self._bytes + length > MAX_COMMAND_BYTES:
            raise ProtocolError(f"a {'key' if is_key else 'value'} of {length} bytes")
