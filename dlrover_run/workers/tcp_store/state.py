"""The keys, queues and waiting clients of a store, and its answer to each command. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable

from dlrover_run.workers.tcp_store import parser
from dlrover_run.workers.tcp_store.parser import I64, U32, U64, Command

MAX_STORED_BYTES = 4 * 1024**3
"""The most bytes in all keys and values."""

JOINED_BYTES = 16 * 1024
"""Values shorter than this are sent together with their length."""

READY, NOT_READY = b"\0", b"\1"
"""The answers to CHECK."""

STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
"""The answers to WAIT and BARRIER, and to CANCEL_WAIT."""

_NUMBER = re.compile(rb"\s*([+-]?[0-9]+)")

Replies = list[tuple[Hashable, bytes]]


class CommandRefused(Exception):
    """The connection of the client is closed, as by torch's own server."""


class StoreState:
    """All that a store holds. A client is whatever the caller tells connections apart by.

    A client that waits is woken for each key once: if a key is deleted before the others of the same wait are set, that
    does not prolong the wait. The wait of a client ends with its next wait, CANCEL_WAIT, or `forget`.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiters: dict[bytes, list[Hashable]] = {}
        self._barriers: dict[bytes, list[Hashable]] = {}
        self._awaited: dict[Hashable, int] = {}
        self._waits_for: dict[Hashable, list[bytes]] = {}
        self._size = 0
        self._methods = {
            parser.SET: self._set,
            parser.COMPARE_SET: self._compare_set,
            parser.GET: self._get,
            parser.ADD: self._add,
            parser.CHECK: self._check,
            parser.WAIT: self._wait,
            parser.NUM_KEYS: self._num_keys,
            parser.DELETE: self._delete,
            parser.APPEND: self._append,
            parser.MULTI_GET: self._multi_get,
            parser.MULTI_SET: self._multi_set,
            parser.CANCEL_WAIT: self._cancel_wait,
            parser.PING: self._ping,
            parser.QUEUE_PUSH: self._queue_push,
            parser.QUEUE_POP: self._queue_pop,
            parser.QUEUE_LEN: self._queue_len,
            parser.LIST_KEYS: self._list_keys,
            parser.BARRIER: self._barrier,
        }

    def execute(self, client: Hashable, command: Command) -> Replies:
        """Carry out a command; return what is to be sent, to this client and to those that it wakes. Raises
        CommandRefused."""
        method = self._methods.get(command.code)
        if method is None:
            raise CommandRefused(f"command {command.code} out of place")
        return method(client, command)

    def forget(self, client: Hashable) -> None:
        """A connection has ended."""
        self._awaited.pop(client, None)
        for key in self._waits_for.pop(client, ()):
            for table in (self._waiters, self._barriers):
                if (waiting := table.get(key)) is not None:
                    table[key] = left = [one for one in waiting if one != client]
                    if not left:
                        del table[key]

    def _store(self, key: bytes, value: bytes) -> None:
        before = self._values.get(key)
        size = self._size + len(value) - (-len(key) if before is None else len(before))
        if size > MAX_STORED_BYTES:
            raise CommandRefused(f"more than {MAX_STORED_BYTES} bytes in the store")
        self._size = size
        self._values[key] = value

    def _wake(self, key: bytes) -> Replies:
        woken: Replies = []
        for client in self._waiters.pop(key, ()):
            self._note_key(client, woken)
        return woken

    def _note_key(self, client: Hashable, woken: Replies) -> None:
        left = self._awaited.get(client, 0) - 1
        if left > 0:
            self._awaited[client] = left
        elif left == 0:
            del self._awaited[client]
            del self._waits_for[client]
            woken.append((client, STOP_WAITING))

    def _has(self, key: bytes) -> bool:
        return key in self._values or key in self._queues

    def _set(self, client: Hashable, command: Command) -> Replies:
        key, value = command.strings
        self._store(key, value)
        return self._wake(key)

    def _multi_set(self, client: Hashable, command: Command) -> Replies:
        strings = command.strings
        woken: Replies = []
        for key, value in zip(strings[::2], strings[1::2], strict=True):
            self._store(key, value)
            woken += self._wake(key)
        return woken

    def _append(self, client: Hashable, command: Command) -> Replies:
        key, value = command.strings
        self._store(key, self._values.get(key, b"") + value)
        return self._wake(key)

    def _compare_set(self, client: Hashable, command: Command) -> Replies:
        key, expected, desired = command.strings
        value = self._values.get(key)
        if value is None:
            # Nothing is stored if another value than none is expected, and who waits is woken all the same (as torch).
            value = expected or desired
            if not expected:
                self._store(key, desired)
        elif value == expected:
            value = desired
            self._store(key, desired)
        return [*_sized(client, value), *self._wake(key)]

    def _get(self, client: Hashable, command: Command) -> Replies:
        return _sized(client, self._values.get(command.strings[0], b""))

    def _multi_get(self, client: Hashable, command: Command) -> Replies:
        found: list[bytes] = []
        for key in command.strings:
            value = self._values.get(key, b"")
            found += (U64.pack(len(value)), value)
        return [(client, b"".join(found))]

    def _count_up(self, key: bytes, amount: int) -> int:
        value = self._values.get(key)
        total = amount
        if value is not None:
            number = _NUMBER.match(value)
            before = 2**63 if number is None else int(number[1][:32])
            if not -(2**63) <= before < 2**63:
                raise CommandRefused("the value of the key is no number")
            total += before
        total = (total + 2**63) % 2**64 - 2**63
        self._store(key, b"%d" % total)
        return total

    def _add(self, client: Hashable, command: Command) -> Replies:
        key = command.strings[0]
        return [(client, I64.pack(self._count_up(key, command.number))), *self._wake(key)]

    def _check(self, client: Hashable, command: Command) -> Replies:
        return [(client, READY if all(self._has(key) for key in command.strings) else NOT_READY)]

    def _wait(self, client: Hashable, command: Command) -> Replies:
        missing = [key for key in command.strings if not self._has(key)]
        if not missing:
            return [(client, STOP_WAITING)]
        self.forget(client)
        self._awaited[client] = len(missing)
        self._waits_for[client] = missing
        for key in missing:
            self._waiters.setdefault(key, []).append(client)
        return []

    def _barrier(self, client: Hashable, command: Command) -> Replies:
        key, world = command.strings[0], command.number
        count = self._count_up(key, 1)
        woken = self._wake(key)
        if count < world:
            self.forget(client)
            self._awaited[client] = 1
            self._waits_for[client] = [key]
            self._barriers.setdefault(key, []).append(client)
            return woken
        for other in self._barriers.pop(key, ()):
            self._note_key(other, woken)
        return [(client, STOP_WAITING), *woken]

    def _cancel_wait(self, client: Hashable, command: Command) -> Replies:
        self.forget(client)
        return [(client, WAIT_CANCELED)]

    def _ping(self, client: Hashable, command: Command) -> Replies:
        return [(client, U32.pack(command.number))]

    def _num_keys(self, client: Hashable, command: Command) -> Replies:
        return [(client, I64.pack(len(self._values)))]

    def _list_keys(self, client: Hashable, command: Command) -> Replies:
        listed = [U64.pack(len(self._values))]
        for key in self._values:
            listed += (U64.pack(len(key)), key)
        return [(client, b"".join(listed))]

    def _delete(self, client: Hashable, command: Command) -> Replies:
        key = command.strings[0]
        value = self._values.pop(key, None)
        if value is not None:
            self._size -= len(key) + len(value)
        return [(client, I64.pack(int(value is not None)))]

    def _queue_push(self, client: Hashable, command: Command) -> Replies:
        key, value = command.strings
        if self._size + len(value) > MAX_STORED_BYTES:
            raise CommandRefused(f"more than {MAX_STORED_BYTES} bytes in the store")
        self._size += len(value)
        self._queues.setdefault(key, deque()).append(value)
        # One entry is for one client.
        woken: Replies = []
        if (waiting := self._waiters.get(key)) is not None:
            self._note_key(waiting.pop(0), woken)
            if not waiting:
                del self._waiters[key]
        return woken

    def _queue_pop(self, client: Hashable, command: Command) -> Replies:
        key = command.strings[0]
        queue = self._queues.get(key)
        if queue is None:
            return [(client, U64.pack(0))]
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        self._size -= len(value)
        return [(client, U64.pack(1)), *_sized(client, value)]

    def _queue_len(self, client: Hashable, command: Command) -> Replies:
        return [(client, I64.pack(len(self._queues.get(command.strings[0], ()))))]


def _sized(client: Hashable, value: bytes) -> Replies:
    if len(value) < JOINED_BYTES:
        return [(client, U64.pack(len(value)) + value)]
    # A large value is not copied for each client that waits for it.
    return [(client, U64.pack(len(value))), (client, value)]
