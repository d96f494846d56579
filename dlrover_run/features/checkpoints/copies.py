"""A copy of what is not on the disk yet, in the memory of one other node. Both ends of the connection are here.

The sender connects, and each end proves that it knows the key before a byte of a checkpoint is sent; as with a master
without TLS, the proof does not encrypt. Then come frames: a file, or the name of one that is on the disk by now. When
the connection ends, the other node writes to the disk what it still has: the node of the file is lost, or cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_run import linux
from dlrover_run.features.checkpoints.held import HeldFile
from dlrover_run.features.checkpoints.memory import SEALS, HeldMemory, Number
from dlrover_run.features.checkpoints.write_behind import copy
from dlrover_run.processes import unix_sockets
from dlrover_run.training.saved_steps import parse

COPY_TIMEOUT = 60.0
"""Seconds that the other node may take for its next step."""

RECONNECT_PAUSE = 5.0
"""Seconds after a connection has failed."""

NONCE_BYTES = 32
MAX_HEAD = 64 * 1024
MAX_SENDERS = 16
"""Connections at one time: one node sends here, and others whose connections have just ended."""

YES, NO = b"+", b"-"
_LENGTH = struct.Struct(">I")


class WrongKey(ConnectionError):
    """The other end does not know the key."""

    def __init__(self) -> None:
        super().__init__("it does not know the token of the job")


def proof(key: bytes, side: bytes, of_receiver: bytes, of_sender: bytes) -> bytes:
    """What one side proves itself by, for one connection."""
    return hmac.digest(key, side + of_receiver + of_sender, hashlib.sha256)


class Copies:
    """The two directions of this node. `secret` is the token of the job, empty for none; the workers add a key of
    their round to it."""

    def __init__(self, memory: HeldMemory, secret: str, tell: Callable[[str], None]) -> None:
        self._memory = memory
        self._secret = secret.encode()
        self._sender = CopySender(memory, tell)
        self._receiver: CopyReceiver | None = None
        self._lock = threading.Lock()

    def listen(self, address: str, key: str) -> int:
        """Take copies at this address; the port. Idempotent. Raises OSError."""
        with self._lock:
            if self._receiver is None or self._receiver.address != address:
                self._receiver = CopyReceiver(self._memory, address)
            self._receiver.key = self._key(key)
            return self._receiver.port

    def send_to(self, host: str, port: int, key: str) -> None:
        """Send copies to that node from now on. Idempotent."""
        self._sender.send_to(host, port, self._key(key))

    def _key(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), hashlib.sha256)


class CopySender:
    """Sends the own files of this node that are not on the disk yet, the newest step first; a step that was begun is
    finished. `tell` gets a sentence when that begins to fail."""

    def __init__(self, memory: HeldMemory, tell: Callable[[str], None], pause: float = RECONNECT_PAUSE) -> None:
        self._memory = memory
        self._tell = tell
        self._pause = pause
        self._target: tuple[str, int, bytes] | None = None
        self._changed = threading.Condition()
        self._failed = ""

    def send_to(self, host: str, port: int, key: bytes) -> None:
        """Send to that node from now on. Idempotent."""
        with self._changed:
            if self._target == (host, port, key):
                return
            first, self._target = self._target is None, (host, port, key)
            self._changed.notify_all()
        if first:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                assert self._target is not None, "it has begun with one"
                target = self._target
            try:
                self._send_until_changed(target)
            except OSError as error:
                self._note_failure(f"{target[0]}: {error.strerror or error}")
                with self._changed:
                    self._changed.wait_for(lambda target=target: self._target != target, self._pause)  # type: ignore[misc]
            self._memory.forget_copies()

    def _send_until_changed(self, target: tuple[str, int, bytes]) -> None:
        host, port, key = target
        with socket.create_connection((host, port), COPY_TIMEOUT) as connection:
            of_receiver, own = _read(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
            connection.sendall(own + proof(key, b"sender", of_receiver, own))
            if not hmac.compare_digest(_read(connection, NONCE_BYTES), proof(key, b"receiver", of_receiver, own)):
                raise WrongKey
            while self._target == target:
                held, fd = self._memory.next_for_peer()
                if fd is None:
                    _send_head(connection, {"drop": held.file.name, "directory": str(held.directory)})
                    continue
                try:
                    self._send_file(connection, held, fd)
                finally:
                    os.close(fd)

    def _note_failure(self, problem: str) -> None:
        if problem != self._failed:
            self._failed = problem
            self._tell(f"warning: no copy of the checkpoints in memory is on another node ({problem})")

    def _send_file(self, connection: socket.socket, held: HeldFile, fd: int) -> None:
        head = {"name": held.file.name, "directory": str(held.directory), "size": held.size, "keep": held.keep}
        _send_head(connection, head)
        # One that is refused is not offered again, and needs to be dropped as little.
        self._memory.note_copied(held.number)
        if _read(connection, 1) != YES:
            self._note_failure(f"{connection.getpeername()[0]}: there is no room for them")
            return
        writer = _HashingSocket(connection)
        copy(fd, held.size, writer)
        connection.sendall(writer.digest.digest())
        if _read(connection, 1) != YES:
            raise OSError("it was damaged on the way")
        self._failed = ""


class _HashingSocket:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        self._connection.sendall(data)
        return len(data)

    def flush(self) -> None:
        pass


class CopyReceiver:
    """Listens for the node whose copies are held here."""

    def __init__(self, memory: HeldMemory, address: str, key: bytes = b"") -> None:
        self._memory = memory
        self.address = address
        self.key = key
        """The key of the latest round. A connection that was made before it goes on."""
        self._listener = socket.create_server((address, 0), family=_family(address))
        self._senders = threading.BoundedSemaphore(MAX_SENDERS)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            connection = unix_sockets.accept(self._listener)
            if self._senders.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        received: set[Number] = set()
        key = self.key
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(COPY_TIMEOUT)
                own = os.urandom(NONCE_BYTES)
                connection.sendall(own)
                of_sender, shown = _read(connection, NONCE_BYTES), _read(connection, NONCE_BYTES)
                if not hmac.compare_digest(shown, proof(key, b"sender", own, of_sender)):
                    return
                connection.sendall(proof(key, b"receiver", own, of_sender))
                # Between two steps nothing is sent; the kernel tells of a machine that is gone.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, seconds in _KEEPALIVE:
                    connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
                while True:
                    self._take(connection, received)
        finally:
            self._senders.release()
            self._memory.adopt(received)

    def _take(self, connection: socket.socket, received: set[Number]) -> None:
        connection.settimeout(None)
        head = _read_head(connection)
        connection.settimeout(COPY_TIMEOUT)
        file, directory = parse(str(head.get("drop") or head["name"])), Path(head["directory"])
        if file is None:
            raise ValueError("no name of a checkpoint")
        if "drop" in head:
            self._memory.drop_copy(directory, file)
            return
        held = HeldFile(0, directory, file, int(head["size"]), int(head["keep"]), own=False, written=True)
        room = self._memory.reserve_copy(held.size)
        connection.sendall(NO if room is None else YES)
        if room is None:
            return
        number, fd = room
        try:
            digest = _fill(connection, fd, held.size)
            whole = hmac.compare_digest(_read(connection, digest.digest_size), digest.digest())
        except BaseException:
            self._memory.release(number)
            raise
        finally:
            os.close(fd)
        if whole:
            self._memory.add_copy(held, number)
            received.add(number)
        else:
            self._memory.release(number)
        connection.sendall(YES if whole else NO)


_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
"""A machine that is gone is noticed after 5 s."""


def _fill(connection: socket.socket, fd: int, size: int) -> Any:
    """Fill a memory file from the connection, and seal it; the hash of its bytes."""
    digest, buffer, left = hashlib.sha256(), memoryview(bytearray(1 << 20)), size
    while left:
        count = connection.recv_into(buffer[: min(left, len(buffer))])
        if not count:
            raise ConnectionResetError("it has ended in a file")
        digest.update(buffer[:count])
        os.write(fd, buffer[:count])
        left -= count
    fcntl.fcntl(fd, linux.F_ADD_SEALS, SEALS)
    return digest


def _send_head(connection: socket.socket, head: dict[str, Any]) -> None:
    data = json.dumps(head).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _read_head(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > MAX_HEAD:
        raise ValueError("a head is too long")
    head = json.loads(_read(connection, length))
    if not isinstance(head, dict):
        raise ValueError("a head is an object")
    return head


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := connection.recv(count - len(data))):
            raise ConnectionResetError("it has closed the connection")
        data += more
    return data


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
