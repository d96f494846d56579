"""How a worker is started: spawned, or forked from the template, with the reason told when forking is not possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..spec import JobSpec
from .process import WorkerStart, spawn


class Starter:
    """Starts the workers of every round of a job. `say` tells the person why forking was given up."""

    def __init__(self, spec: JobSpec, parent: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._spec = spec

    @property
    def pids(self) -> set[int]:
        return set()

    async def start(self, start: WorkerStart) -> int:
        return spawn(start)

    def learn_later(self) -> None: ...

    async def close(self) -> None: ...
