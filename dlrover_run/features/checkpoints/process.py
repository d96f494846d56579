"""The process that holds checkpoints in memory for one agent. It begins with the first worker that connects, and ends
with the agent: with SIGKILL if that is killed, and otherwise when everything is on the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dlrover_run import linux
from dlrover_run.devices.capacity import PROC, available_memory, usable_memory
from dlrover_run.features.checkpoints.copies import Copies
from dlrover_run.features.checkpoints.memory import Figures, HeldMemory
from dlrover_run.features.checkpoints.worker_line import WorkerLine
from dlrover_run.features.checkpoints.write_behind import WriteBehind
from dlrover_run.processes import unix_sockets
from dlrover_run.workers.template import process_title

MAX_CONTROL = 64 * 1024

DEFAULT_SHARE = 4
"""Without `--checkpoint-memory`, checkpoints take at most this part of the memory, the fourth."""

KEPT_FREE = 256 * 1024 * 1024
"""Bytes that stay free when room for a checkpoint is given: the workers allocate meanwhile."""

MAX_NAMED = 3
"""Steps that one sentence names."""


class ControlLine:
    """The line to the agent: settings and the end come in, figures and sentences for the user go out. A message that
    the agent is too slow to read is dropped: figures follow, and a sentence comes rarely."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the agent has ended."""
        with contextlib.suppress(OSError):
            data = self._connection.recv(MAX_CONTROL)
            return json.loads(data) if data else None
        return None

    def send_figures(self, figures: Figures) -> None:
        """Tell the agent what is held."""
        self._send({"figures": dataclasses.asdict(figures)})

    def tell(self, sentence: str) -> None:
        """Have the agent print a line."""
        self._send({"sentence": sentence})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)


def run() -> int:
    """Hold checkpoints. The first argument is the descriptor of the control line, on which the descriptor of the
    listening socket comes, with the settings."""
    process_title.name_process("dlrover-memory")
    # Each checkpoint that is held takes one.
    linux.raise_descriptor_limit()
    control = socket.socket(fileno=int(sys.argv[1]))
    data, fds, _, _ = socket.recv_fds(control, MAX_CONTROL, 1)
    settings = json.loads(data)
    listener = socket.socket(fileno=fds[0])
    line = ControlLine(control)
    limit = default_limit() if settings["limit"] is None else settings["limit"]
    memory = HeldMemory(limit, free_bytes, line.send_figures)
    line.send_figures(memory.figures)
    copies = Copies(memory, settings["secret"], line.tell)
    start = partial(_start, line)
    start(WriteBehind(memory, line.tell).run)
    start(lambda: accept(listener, lambda each: start(WorkerLine(each, memory, copies, settings["token"]).serve)))
    if line.receive() is None:
        # The agent was killed; the job of this node is over.
        os._exit(1)
    refused = memory.drain()
    if refused:
        steps = ", ".join(str(step) for step in sorted({each.file.step for each in refused})[-MAX_NAMED:])
        line.tell(
            f"warning: what was saved of step {steps} could not be written to {refused[-1].directory}, and is lost"
        )
    os._exit(1 if refused else 0)


def default_limit(proc: Path = PROC) -> int:
    """The limit without a flag, in bytes."""
    return usable_memory(proc) // DEFAULT_SHARE


def free_bytes(proc: Path = PROC) -> int:
    """The bytes that checkpoints may still take now."""
    return max(0, available_memory(proc) - KEPT_FREE)


def accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Have each worker served that connects."""
    while True:
        connection = unix_sockets.accept(listener)
        if unix_sockets.peer_of(connection).uid in (os.geteuid(), 0):
            serve(connection)
        else:
            connection.close()


def _start(line: ControlLine, work: Callable[[], None]) -> None:
    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            # Half of this process would hold what it does not serve; without it, the workers save to the disk.
            line.tell(f"internal error: the process that holds checkpoints in memory has failed: {error!r}; report it")
            os._exit(1)

    threading.Thread(target=guarded, daemon=True).start()
