"""A cluster whose processes take their data from queues, as an agent keeps them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

from scripted_cluster import Process, ScriptedCluster

from dlrover_run.policies.parameter_servers.model import Role, TaskKey
from tf_ps_runner.agent.protocol import Answer, answer_line, read_line
from tf_ps_runner.agent.queue_service import QueueService


class DataCluster(ScriptedCluster):
    """The queues begin anew with each version, as those of the chief's agent."""

    def __init__(self, python: Path, script: str, folder: Path, **more: Any) -> None:
        super().__init__(python, script, folder, **more)
        self._service = QueueService()
        self._lock = threading.Lock()

    def new_version(self, servers: int) -> None:
        """A new set of servers, and new queues."""
        super().new_version(servers)
        with self._lock:
            self._service.reset()

    def on_request(self, process: Process, line: socket.socket, text: bytes) -> None:
        """Answer for the queues."""
        message = read_line(text)
        assert isinstance(message, tuple), text
        number, request = message

        def reply(answer: Answer) -> None:
            try:
                line.sendall(answer_line(number, answer))
            except OSError:
                return

        with self._lock:
            self._service.ask(self._key(process), request, reply)

    def on_disconnect(self, process: Process) -> None:
        """The parts that it held go back."""
        with self._lock:
            self._service.gone(self._key(process))

    def _key(self, process: Process) -> TaskKey:
        return TaskKey(Role(process.name.split("-")[0]), self._processes.index(process))
