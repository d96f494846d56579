"""The line from a worker to the process of its node that holds checkpoints in memory.

One message of JSON each way over a unix socket that a variable names; memory comes as a descriptor. Only the standard
library is needed, and nothing of the launcher is imported; the other end is `features/checkpoints/worker_line.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from dlrover_run.training.device_copies import TORCH_COPIES, DeviceCopies
from dlrover_run.training.mapped_memory import MappedMemory
from dlrover_run.training.saved_steps import SavedFile, parse
from dlrover_run.training.state_plan import StatePlan

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

_SPARE_ROOM = 1 << 16
"""Bytes beyond a state that are reserved, and an eighth of a hundred of it: numbers in the next state may be longer."""

_PAGE = 4096


class NotHeld(Exception):
    """The state is not in memory and has to be saved in another way; the message is a clause with the reason."""


class MemoryLine:
    """This worker's end. Any method but `save` returns what holds without such a process when that is gone."""

    def __init__(self, environment: Mapping[str, str] = os.environ, copies: DeviceCopies = TORCH_COPIES) -> None:
        self._copies = copies
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
        self._mapping = threading.Lock()
        self._mapped: dict[int, MappedMemory] = {}
        """The memory that this process has mapped, by the number that the other end knows it by."""
        self._could_register = True

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
        dump: Callable[[StatePlan], None],
        fit: Callable[[StatePlan, int], None],
        keep: int,
        damaged: Collection[SavedFile] = (),
    ) -> bool:
        """Have a state held, which `dump` plans and `fit` brings to a size; whether all ranks of this node hold the
        step now. Raises NotHeld."""
        if not self._address:
            raise NotHeld("dlrover-run has not started this process")
        self._forget_parent()
        plan = StatePlan(self._copies.is_remote)
        try:
            dump(plan)
            return self._save(directory, file, plan, fit, keep, damaged)
        finally:
            plan.clear()

    def _save(
        self,
        directory: Path,
        file: SavedFile,
        plan: StatePlan,
        fit: Callable[[StatePlan, int], None],
        keep: int,
        damaged: Collection[SavedFile],
    ) -> bool:
        size = _with_spare(plan.length)
        with self._mapping:
            number, buffer, memory = self._room({"do": "reserve", "least": plan.length, "size": size}, size)
        device = plan.remote[0].device if plan.remote else None
        try:
            memory.wanted = True
            with memory.lock:
                fit(plan, memory.size)
                self._register(memory, device)
                memory.fill(plan)
        except BaseException as error:
            # A device may still write to it.
            with self._mapping:
                self._mapped.pop(buffer, None)
            with contextlib.suppress(NotHeld):
                self._ask({"do": "release", "number": number})
            if isinstance(error, OSError):
                raise NotHeld(f"the kernel gives no memory ({error.strerror})") from None
            raise
        length, ranks = memory.size, self._local_ranks
        message = {"do": "keep", "number": number, "size": length, "keep": keep, "local_ranks": ranks}
        answer, _ = self._ask({**message, **_place(directory, file), "damaged": [each.name for each in damaged]})
        self._may_hold = True
        if answer["spare"]:
            # The next save does not wait for the kernel, which needs longer to find memory than the copy takes.
            prepare = partial(self._prepare, length, device)
            threading.Thread(target=prepare, name="dlrover-run memory", daemon=True).start()
        return bool(answer["whole"])

    def _room(self, message: Mapping[str, Any], size: int) -> tuple[int, int, MappedMemory]:
        """The number of room for a file, and its memory. Raises NotHeld."""
        answer, fd = self._ask(message)
        # Not closed: another thread may use it until it has noticed.
        self._mapped = {buffer: memory for buffer, memory in self._mapped.items() if buffer in answer["buffers"]}
        if answer["number"] is None:
            raise NotHeld(_no_room(answer, size))
        number, buffer = int(answer["number"]), int(answer["buffer"])
        if fd is not None:
            try:
                self._mapped[buffer] = MappedMemory(fd, size, self._copies)
            except OSError as error:
                with contextlib.suppress(NotHeld):
                    self._ask({"do": "release", "number": number})
                raise NotHeld(f"the kernel gives no memory ({error.strerror})") from None
            finally:
                os.close(fd)
        return number, buffer, self._mapped[buffer]

    def _prepare(self, size: int, device: Any) -> None:
        """Map the memory of the next save, while the worker trains."""
        with contextlib.suppress(NotHeld, OSError):
            with self._mapping:
                _, _, memory = self._room({"do": "spare", "size": size}, size)
                memory.lock.acquire()
            try:
                self._register(memory, device)
                memory.populate()
            finally:
                memory.lock.release()

    def _register(self, memory: MappedMemory, device: Any) -> None:
        if device is None or not self._could_register:
            return
        if problem := memory.register(device):
            self._could_register = False
            logger.warning(
                "The memory of checkpoints cannot be pinned (%s), so a save in memory takes longer; see `ulimit -l`",
                problem,
            )

    def _forget_parent(self) -> None:
        """A forked child has neither the mappings of its parent nor its connection, whose answers it must not take."""
        if self._pid not in (0, os.getpid()):
            self._pid, self._socket, self._mapped = 0, None, {}
            self._lock, self._mapping = threading.Lock(), threading.Lock()

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
        self._forget_parent()
        try:
            with self._lock:
                if self._socket is None:
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
        # The process at the other end may be another one, which counts anew.
        self._mapped = {}
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


def _with_spare(length: int) -> int:
    """The bytes to reserve for a state, so that the next one fits too."""
    return -(-(length + length // 800 + _SPARE_ROOM) // _PAGE) * _PAGE


def _place(directory: Path, file: SavedFile) -> dict[str, str]:
    return {"directory": str(directory), "name": file.name}


def _no_room(answer: Mapping[str, Any], size: int) -> str:
    used, limit, wanted = (f"{number / 2**20:.0f}" for number in (answer["used"], answer["limit"], size))
    if answer["used"] + size <= answer["limit"]:
        return f"the machine has no {wanted} MiB of free memory"
    return f"{used} of {limit} MiB are used (--checkpoint-memory), {wanted} are needed"
