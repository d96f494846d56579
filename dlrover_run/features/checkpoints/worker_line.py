"""The line to one worker: each of its requests is one message of JSON, and has one answer. A descriptor may come with
an answer. The worker's end is `training/memory_line`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_run.features.checkpoints.copies import Copies
from dlrover_run.features.checkpoints.held import HeldFile
from dlrover_run.features.checkpoints.memory import HeldMemory, Number, Owner, Room
from dlrover_run.training.memory_line import MAX_MESSAGE, WRITE_TIMEOUT
from dlrover_run.training.saved_steps import SavedFile, parse

HELLO_TIMEOUT = 10.0
"""Seconds that a new connection has to prove itself."""


MAX_NAMES = 1000
"""Files of a directory in one answer, the newest."""


class WorkerLine:
    """One connection of a worker. What it has reserved and not filled is given back when it ends."""

    def __init__(self, connection: socket.socket, memory: HeldMemory, copies: Copies, token: str) -> None:
        self._connection = connection
        self._memory = memory
        self._copies = copies
        self._token = token
        self._reserved: set[Number] = set()
        self._owner = Owner()

    def serve(self) -> None:
        """Answer until the worker ends, or sends what is no request."""
        with self._connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._connection.settimeout(HELLO_TIMEOUT)
            if not self._proves_itself(self._receive()):
                return
            self._connection.settimeout(None)
            self._send({})
            while (message := self._receive()) is not None:
                self._answer(message)
        for number in self._reserved:
            self._memory.release(number)
        self._memory.disconnect(self._owner)

    def _proves_itself(self, message: Mapping[str, Any] | None) -> bool:
        from hmac import compare_digest

        return message is not None and compare_digest(str(message.get("token")).encode(), self._token.encode())

    def _receive(self) -> dict[str, Any] | None:
        data = self._connection.recv(MAX_MESSAGE)
        message = json.loads(data) if data else None
        if message is not None and not isinstance(message, dict):
            raise ValueError("a message is an object")
        return message

    def _send(self, message: Mapping[str, Any], fd: int | None = None) -> None:
        data = json.dumps(message).encode()
        if fd is None:
            self._connection.sendall(data)
            return
        try:
            socket.send_fds(self._connection, [data], [fd])
        finally:
            os.close(fd)

    def _answer(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "reserve":
                self._reserve(int(message["least"]), int(message["size"]))
            case "spare":
                self._send_room(self._memory.prepare_spare(int(message["size"]), self._owner))
            case "keep":
                self._keep(message)
            case "release":
                self._reserved.discard(message["number"])
                self._memory.release(message["number"])
                self._send({})
            case "names":
                self._send({"names": self._memory.names(Path(message["directory"]))[-MAX_NAMES:]})
            case "open":
                fd = self._memory.open(*_place(message))
                self._send({"found": fd is not None}, fd)
            case "write":
                self._send({"written": self._memory.wait_until_written(*_place(message), WRITE_TIMEOUT)})
            case "forget":
                self._memory.forget(*_place(message))
                self._send({})
            case "listen":
                try:
                    self._send({"port": self._copies.listen(message["address"], message["key"])})
                except OSError as error:
                    self._send({"problem": error.strerror or str(error)})
            case "copy_to":
                self._copies.send_to(message["host"], message["port"], message["key"])
                self._send({})
            case other:
                raise ValueError(f"no request: {other}")

    def _reserve(self, least: int, size: int) -> None:
        room = self._memory.reserve(least, size, self._owner)
        if room is not None:
            self._reserved.add(room.number)
        self._send_room(room)

    def _send_room(self, room: Room | None) -> None:
        buffers = self._memory.buffers_of(self._owner)
        if room is None:
            figures = self._memory.figures
            self._send({"number": None, "buffers": buffers, "used": figures.used, "limit": figures.limit})
        else:
            self._send({"number": room.number, "buffer": room.buffer, "buffers": buffers}, room.fd)

    def _keep(self, message: Mapping[str, Any]) -> None:
        number, size = message["number"], message["size"]
        if number not in self._reserved:
            raise ValueError("the room was not reserved")
        directory, file = _place(message)
        damaged = frozenset(each for name in message["damaged"] if (each := parse(name)) is not None)
        held = HeldFile(number, directory, file, size, message["keep"], damaged)
        whole = self._memory.add(held, message["local_ranks"])
        self._reserved.remove(number)
        try:
            self._send({"whole": whole, "spare": self._memory.wants_spare(self._owner)})
        finally:
            self._memory.free_left()


def _place(message: Mapping[str, Any]) -> tuple[Path, SavedFile]:
    file = parse(message["name"])
    if file is None:
        raise ValueError("no name of a checkpoint")
    return Path(message["directory"]), file
