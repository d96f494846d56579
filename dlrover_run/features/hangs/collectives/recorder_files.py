"""Has torch dump its flight recorder in each worker of this node, and reads the dumps.

torch makes a pipe for each process that uses NCCL, and writes a file when a byte comes. It prints some lines meanwhile,
so only jobs whose user wants evidence have such pipes. It is asked only once workers make no progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from dlrover_run.background import TimeLimit
from dlrover_run.features.hangs.collectives.recorder import MAX_DUMP, read_dump

PIPE_VARIABLES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_PIPE_FILE")
"""How the name of the pipe begins; the rank follows. The first one is set here, as each torch knows it."""

FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The same for the file. torch 2.11 and later know the first one, and warn of the second."""

RECORDER_TIMEOUT = 3.0
"""Seconds for all dumps: torch looks at the pipe ten times a second, and writes some megabytes. A process that is
stopped writes none."""

LOOK_INTERVAL = 0.1
"""Seconds between two looks for the files: nothing tells when torch has written one."""

FOLDER = "flight-recorder"
"""The folder in the directory of the run for pipes and files."""


class RecorderFiles:
    """The pipes and files of the workers of this node, over all rounds of a job, in the directory of its run. Those
    that the user has named in the environment are used instead."""

    def __init__(self, environ: Mapping[str, str], run_dir: str) -> None:
        self._given_pipe = _first(environ, PIPE_VARIABLES)
        self._given_file = _first(environ, FILE_VARIABLES)
        self._folder: str | None = os.path.join(run_dir, FOLDER)

    @property
    def variables(self) -> dict[str, str]:
        """What a worker needs in its environment. torch ends a process that cannot make its pipe, so the folder is made
        first; without it there are none."""
        if self._folder is None:
            return {}
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError:
            self._folder = None
            return {}
        own = {} if self._given_pipe else {PIPE_VARIABLES[0]: self._pipe_stem}
        return own if self._given_file else {**own, FILE_VARIABLES[0]: self._file_stem}

    @property
    def _pipe_stem(self) -> str:
        return self._given_pipe or os.path.join(self._folder or "", "pipe-")

    @property
    def _file_stem(self) -> str:
        return self._given_file or os.path.join(self._folder or "", "rank-")

    async def read(self, ranks: Iterable[int], timeout: float = RECORDER_TIMEOUT) -> dict[int, dict[str, Any]]:
        """The dumps of these workers, of each that writes one in time."""
        if self._folder is None and not (self._given_pipe and self._given_file):
            return {}
        before = {rank: self._written_at(rank) for rank in ranks}
        waiting = {rank: mark for rank, mark in before.items() if self._ask(rank)}
        found: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(timeout):
                while waiting:
                    await asyncio.sleep(LOOK_INTERVAL)
                    for rank, mark in list(waiting.items()):
                        dump = await asyncio.to_thread(_read_new, f"{self._file_stem}{rank}", mark)
                        if dump is not None:
                            found[rank] = dump
                            del waiting[rank]
        return found

    def _written_at(self, rank: int) -> int:
        """The time of the dump of an earlier incident, 0 without one."""
        with contextlib.suppress(OSError):
            return os.stat(f"{self._file_stem}{rank}").st_mtime_ns
        return 0

    def _ask(self, rank: int) -> bool:
        """Write to the pipe of a worker; False if it has none, as before it uses NCCL."""
        try:
            pipe = os.open(f"{self._pipe_stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
                return False
            os.write(pipe, b"1")
        except OSError:
            return False
        finally:
            os.close(pipe)
        return True


def _first(environ: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _read_new(path: str, mark: int) -> dict[str, Any] | None:
    """A dump that is newer than that time, once all of it is there."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mtime_ns == mark or status.st_uid != os.geteuid() or status.st_size > MAX_DUMP:
                return None
            return read_dump(file.read(MAX_DUMP + 1))
    except OSError:
        return None
