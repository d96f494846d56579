"""A launch request: the job that one process passes to a launcher process, and the descriptors for both directions."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from dlrover_run import linux
from dlrover_run.spec import JobSpec


class LaunchRequest(msgspec.Struct, frozen=True):
    """A job for a launcher that is started with `command`.

    `parent_pipe` is a descriptor of the parent-death pipe of the requesting process. The launcher writes its JobResult
    as JSON to the descriptor `result_fd`.
    """

    spec: JobSpec
    parent_pipe: int
    result_fd: int


T = TypeVar("T")


def encode(record: msgspec.Struct) -> bytes:
    """A record for another process of this machine, as JSON. Arguments and paths are bytes for the kernel: those that
    are no UTF-8 are surrogates in Python, which msgspec's own JSON refuses."""
    return json.dumps(msgspec.to_builtins(record, str_keys=True)).encode()


def decode(data: bytes, type: type[T], dec_hook: Callable[[Any, Any], Any] | None = None) -> T:
    """The record of `encode`. Raises ValueError, also for a part of one."""
    return msgspec.convert(json.loads(data), type, str_keys=True, dec_hook=dec_hook)


def command(request_fd: int, module: str = "dlrover_run.launch") -> list[str]:
    """The command of a process that calls `run` of `module`, which reads a LaunchRequest from this descriptor.

    The process gets the search path of this one. With `-m` a `random.py` in the user's working directory would replace
    Python's own.
    """
    path = [each for each in sys.path if isinstance(each, str)]
    code = f"import sys; sys.path[:] = {path}; from {module} import run; sys.exit(run())"
    return [sys.executable, "-c", code, str(request_fd)]


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """An anonymous file with this content, for a child process; its descriptor, at the beginning.

    No other program can see the content, and it is freed when the last holder of a descriptor ends.
    """
    fd = linux.memfd_create("dlrover-run")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
