"""The files of a checkpoint: a path with a scheme (`hdfs://`, `s3://`) is read and written by TensorFlow's `gfile`.

Failures of `gfile` are raised as OSError, and as FileNotFoundError for a missing file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


def tensorflow() -> Any:
    """TensorFlow if the script has imported it; else None."""
    return sys.modules.get("tensorflow")


def read(path: str, most: int = -1) -> bytes:
    """The first `most` bytes of a file, all of them for -1."""
    with _translated(path) as remote:
        if remote is None:
            with open(path, "rb") as file:
                return file.read(most)
        with remote.GFile(path, "rb") as file:
            content: bytes = file.read(most)
            return content


def write(path: str, content: bytes) -> None:
    """Write a file that exists as a whole or not at all: it is renamed from a temporary name beside it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with _translated(path) as remote:
            if remote is None:
                with open(temporary, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            else:
                with remote.GFile(temporary, "wb") as file:
                    file.write(content)
                remote.rename(temporary, path, overwrite=True)
    except OSError:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def remove(path: str) -> None:
    """Remove a file."""
    with _translated(path) as remote:
        (os.remove if remote is None else remote.remove)(path)


def size(path: str) -> int | None:
    """The bytes of a file; None if it cannot be found."""
    try:
        with _translated(path) as remote:
            return os.path.getsize(path) if remote is None else int(remote.stat(path).length)
    except Exception:
        return None


def exists(path: str) -> bool:
    """Whether a file exists and can be found."""
    return size(path) is not None


def modified(path: str) -> float:
    """When a file was last written, in nanoseconds; 0 if it cannot be found."""
    try:
        with _translated(path) as remote:
            return float(os.stat(path).st_mtime_ns if remote is None else remote.stat(path).mtime_nsec)
    except Exception:
        return 0.0


def list_names(directory: str) -> list[str]:
    """The names in a directory; none if it cannot be read."""
    try:
        with _translated(directory) as remote:
            return list(os.listdir(directory) if remote is None else remote.listdir(directory))
    except Exception:
        return []


@contextlib.contextmanager
def _translated(path: str) -> Iterator[Any]:
    """`gfile` for a path with a scheme, None for a local path; errors of `gfile` become those of the operating
    system."""
    if "://" not in path:
        yield None
        return
    module = tensorflow()
    if module is None:
        raise OSError(f"{path} can only be reached by TensorFlow, which is not imported")
    try:
        yield module.io.gfile
    except module.errors.NotFoundError as error:
        raise FileNotFoundError(_first_line(error)) from None
    except module.errors.OpError as error:
        raise OSError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:500]
