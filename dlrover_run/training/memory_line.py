"""The line from a worker to the process of its node that holds checkpoints in memory.

One message of JSON each way over a unix socket that a variable names; memory comes as a descriptor. Only the standard
library is needed, and nothing of the launcher is imported; the other end is `features/checkpoints/worker_line.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dlrover_run import linux
from dlrover_run.training.saved_steps import SavedFile, parse
from dlrover_run.training.whole_files import StateWriter

logger = logging.getLogger(__name__)

LINE_VARIABLE = "DLROVER_CHECKPOINT_MEMORY"
"""The variable with the address of that process, `@` and an abstract name. A worker that `dlrover-run` has not started
has none."""

TOKEN_VARIABLE = "DLROVER_CHECKPOINT_MEMORY_TOKEN"
"""The variable with what a worker proves itself by."""

USED_VARIABLE = "DLROVER_CHECKPOINT_MEMORY_USED"
"""The variable that says that something may be held. Without it, a worker that only loads need not ask."""

NODES_VARIABLE = "DLROVER_CHECKPOINT_MEMORY_NODES"
"""The variable that says that the job may have other nodes, which do not see this memory."""

ANSWER_TIMEOUT = 30.0
"""Seconds that an answer may take, also the first one, for which a process has to start."""

WRITE_TIMEOUT = 600.0
"""Seconds that the disk has to take what other nodes have to read."""

MAX_MESSAGE = 128 * 1024

_SEALS = linux.F_SEAL_WRITE | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL

_SPARE_ROOM = 1 << 20
"""Bytes beyond the tensors of a state that are reserved: its names and plain values."""

_ROOM_OF_TENSOR = 4096


class NotHeld(Exception):
    """The state is not in memory and has to be saved in another way; the message is a clause with the reason."""


class MemoryLine:
    """This worker's end. Any method but `save` returns what holds without such a process when that is gone."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get(LINE_VARIABLE, "")
        self._token = environment.get(TOKEN_VARIABLE, "")
        self._local_ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        self._may_hold = bool(environment.get(USED_VARIABLE))
        self.has_other_nodes = bool(environment.get(NODES_VARIABLE))
        """Whether the job may have other nodes, which do not see this memory."""
        self._socket: socket.socket | None = None
        self._pid = 0
        # A script may save in a thread.
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Have the process that holds checkpoints start, if it does not run yet: a save that is urgent does not wait
        for it then."""
        if self._address:
            with contextlib.suppress(NotHeld):
                self._ask({"do": "names", "directory": ""})

    def save(
        self,
        directory: Path,
        file: SavedFile,
        size: int,
        dump: Callable[[StateWriter], None],
        keep: int,
        damaged: Collection[SavedFile] = (),
    ) -> bool:
        """Have a state of about `size` bytes held, which `dump` writes; whether all ranks of this node hold the step
        now. Raises NotHeld."""
        if not self._address:
            raise NotHeld("dlrover-run has not started this process")
        answer, fd = self._ask({"do": "reserve", "size": size})
        if fd is None:
            raise NotHeld(_no_room(answer, size))
        number = answer["number"]
        try:
            length = _fill(fd, size, dump)
        except BaseException:
            with contextlib.suppress(NotHeld):
                self._ask({"do": "release", "number": number})
            raise
        finally:
            os.close(fd)
        message = {"do": "keep", "number": number, "size": length, "keep": keep, "local_ranks": self._local_ranks}
        answer, _ = self._ask({**message, **_place(directory, file), "damaged": [each.name for each in damaged]})
        self._may_hold = True
        return bool(answer["whole"])

    def held(self, directory: Path) -> list[SavedFile]:
        """The files of a directory that this node holds."""
        answer, _ = self._ask_if_used({"do": "names", "directory": str(directory)})
        return [file for name in answer.get("names", []) if (file := parse(name)) is not None]

    def open(self, directory: Path, file: SavedFile) -> BinaryIO | None:
        """A file that this node holds, for reading; None if it does not hold it."""
        _, fd = self._ask_if_used({"do": "open", **_place(directory, file)})
        if fd is None:
            return None
        try:
            # Another position than that of other readers, which have the same descriptor.
            return open(f"/proc/self/fd/{fd}", "rb")
        finally:
            os.close(fd)

    def write(self, directory: Path, file: SavedFile) -> bool:
        """Whether a file that this node holds is on the disk, after waiting for it."""
        answer, _ = self._ask_if_used({"do": "write", **_place(directory, file)}, WRITE_TIMEOUT + ANSWER_TIMEOUT)
        return bool(answer.get("written"))

    def forget(self, directory: Path, file: SavedFile) -> None:
        """Have a file dropped that is saved in another way, so that no earlier state of this step is written over
        it."""
        self._ask_if_used({"do": "forget", **_place(directory, file)}, WRITE_TIMEOUT + ANSWER_TIMEOUT)

    def listen(self, address: str, key: str) -> int:
        """Have this node take copies of files of other nodes that know the key; the port. Raises NotHeld."""
        if not self._address:
            raise NotHeld("dlrover-run has not started this process")
        answer, _ = self._ask({"do": "listen", "address": address, "key": key})
        self._may_hold = True
        if "port" not in answer:
            raise NotHeld(str(answer.get("problem")))
        return int(answer["port"])

    def copy_to(self, host: str, port: int, key: str) -> None:
        """Have the files of this node copied to that one. Raises NotHeld."""
        self._ask({"do": "copy_to", "host": host, "port": port, "key": key})

    def _ask_if_used(
        self, message: Mapping[str, Any], timeout: float = ANSWER_TIMEOUT
    ) -> tuple[dict[str, Any], int | None]:
        if self._address and self._may_hold:
            with contextlib.suppress(NotHeld):
                return self._ask(message, timeout)
        return {}, None

    def _ask(self, message: Mapping[str, Any], timeout: float = ANSWER_TIMEOUT) -> tuple[dict[str, Any], int | None]:
        try:
            with self._lock:
                # A forked child has the connection of its parent, whose answers it must not take.
                if self._socket is None or self._pid != os.getpid():
                    self._connect()
                return self._exchange(message, timeout)
        except (OSError, ValueError) as error:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            raise NotHeld(f"the process that holds checkpoints does not answer ({error})") from None

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.getpid()
        self._socket.settimeout(ANSWER_TIMEOUT)
        self._socket.connect("\0" + self._address.removeprefix("@"))
        self._exchange({"token": self._token}, ANSWER_TIMEOUT)

    def _exchange(self, message: Mapping[str, Any], timeout: float) -> tuple[dict[str, Any], int | None]:
        assert self._socket is not None, "it is connected"
        self._socket.settimeout(timeout)
        self._socket.sendall(json.dumps(message).encode())
        data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 1)
        if not data:
            raise ConnectionResetError("it has ended")
        return json.loads(data), fds[0] if fds else None


class _MemoryWriter:
    """Writes to a memory file as far as room was reserved."""

    def __init__(self, fd: int, room: int) -> None:
        self._fd = fd
        self._room = room
        self.length = 0

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data).cast("B")
        if self.length + len(left) > self._room:
            raise NotHeld(f"the state has more than the {self._room} bytes that were expected")
        while left:
            count = os.write(self._fd, left)
            left = left[count:]
            self.length += count
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


def _fill(fd: int, room: int, dump: Callable[[StateWriter], None]) -> int:
    """Fill and seal a memory file; the bytes that it has."""
    writer = _MemoryWriter(fd, room)
    try:
        dump(writer)
        os.ftruncate(fd, writer.length)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise NotHeld(f"the kernel gives no memory ({error.strerror})") from None
    return writer.length


def state_size(state: object) -> int:
    """The bytes to reserve for a state: those of its tensors, each storage once, of its strings, and something more."""
    seen: set[int] = set()

    def size_of(value: Any) -> int:
        if hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()
            key = storage.data_ptr() or id(storage)
            if key in seen:
                return _ROOM_OF_TENSOR
            seen.add(key)
            return int(storage.nbytes()) + _ROOM_OF_TENSOR
        if isinstance(value, dict):
            return sum(size_of(key) + size_of(each) for key, each in value.items())
        if isinstance(value, (list, tuple, set, frozenset)):
            return sum(map(size_of, value)) + 16
        if isinstance(value, (str, bytes)):
            # A character may take four bytes.
            return 4 * len(value) + 16
        return 16

    return size_of(state) + _SPARE_ROOM


def _place(directory: Path, file: SavedFile) -> dict[str, str]:
    return {"directory": str(directory), "name": file.name}


def _no_room(answer: Mapping[str, Any], size: int) -> str:
    used, limit, wanted = (f"{number / 2**20:.0f}" for number in (answer["used"], answer["limit"], size))
    if answer["used"] + size <= answer["limit"]:
        return f"the machine has no {wanted} MiB of free memory"
    return f"{used} of {limit} MiB are used (--checkpoint-memory), {wanted} are needed"
