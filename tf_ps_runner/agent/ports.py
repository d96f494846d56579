"""The ports of this node's tasks: one for each role and rank, which a replacement takes over, for whoever has its
address would look for it there."""

from __future__ import annotations

from collections.abc import Container

from dlrover_run.policies.parameter_servers.model import Role
from dlrover_run.supervisor.ports import HeldPort


class PortBook:
    """Holds every port that was ever given out until it is closed. Held ports are bound and not listened on, so that a
    task can have its own, and nobody else is given it between the end of one task and the start of the next."""

    def __init__(self) -> None:
        self._held: dict[tuple[Role, int], list[HeldPort]] = {}

    def take(self, role: Role, rank: int, in_use: Container[int]) -> int:
        """The port for a task: the first of that role and rank that is not in use, and a new one where all are, as for
        the server of a version to come beside that of the present one. Raises OSError when there is none."""
        ports = self._held.setdefault((role, rank), [])
        for port in ports:
            if port.number not in in_use:
                return port.number
        ports.append(HeldPort())
        return ports[-1].number

    def close(self) -> None:
        """Let go of all."""
        for ports in self._held.values():
            for port in ports:
                port.release()
        self._held.clear()
