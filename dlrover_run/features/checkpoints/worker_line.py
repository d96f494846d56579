"""The line to one worker: each of its requests is one message of JSON, and has one answer. A descriptor may come with
an answer. The worker's end is `training/memory_line`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_run.features.checkpoints.copies import Copies
from dlrover_run.features.checkpoints.held import HeldFile
from dlrover_run.features.checkpoints.memory import HeldMemory, Number
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
        self._reserved: dict[Number, int] = {}
        self._spare: tuple[Number, int] | None = None

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
        if self._spare is not None:
            self._memory.release(self._spare[0])

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
                self._reserve(int(message["size"]))
            case "keep":
                self._keep(message)
            case "release":
                self._reserved.pop(message["number"], None)
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

    def _has_request(self) -> bool:
        return bool(select.select([self._connection], [], [], 0)[0])

    def _reserve(self, size: int) -> None:
        spare = None
        if self._spare is not None:
            number, its_size = self._spare
            self._spare = None
            if its_size >= size:
                spare = number
            else:
                self._memory.release(number)
        room = self._memory.reserve(size, spare)
        if room is None:
            figures = self._memory.figures
            self._send({"number": None, "used": figures.used, "limit": figures.limit})
            return
        number, fd = room
        self._reserved[number] = size
        self._send({"number": number}, fd)

    def _keep(self, message: Mapping[str, Any]) -> None:
        number, size = message["number"], message["size"]
        if number not in self._reserved:
            raise ValueError("the room was not reserved")
        directory, file = _place(message)
        damaged = frozenset(each for name in message["damaged"] if (each := parse(name)) is not None)
        held = HeldFile(number, directory, file, size, message["keep"], damaged)
        whole = self._memory.add(held, message["local_ranks"])
        room = self._reserved.pop(number)
        try:
            self._send({"whole": whole})
        finally:
            self._memory.free_left()
        # The worker computes its next step meanwhile.
        spare = self._memory.prepare_spare(room, self._has_request)
        self._spare = None if spare is None else (spare, room)


def _place(message: Mapping[str, Any]) -> tuple[Path, SavedFile]:
    file = parse(message["name"])
    if file is None:
        raise ValueError("no name of a checkpoint")
    return Path(message["directory"]), file
