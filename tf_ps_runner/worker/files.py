"""The files of a checkpoint: a path with a scheme (`hdfs://`, `s3://`) is read and written by TensorFlow's `gfile`.

Failures of `gfile` are raised as OSError, and as FileNotFoundError for a missing file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


def _local_stat(path: str) -> Any:
    found = os.stat(path)
    return SimpleNamespace(length=found.st_size, mtime_nsec=found.st_mtime_ns)


_LOCAL = SimpleNamespace(
    GFile=open,
    remove=os.remove,
    rename=lambda source, target, overwrite: os.replace(source, target),
    stat=_local_stat,
    listdir=os.listdir,
)
"""What is used of `gfile`, for local paths."""


def tensorflow() -> Any:
    """TensorFlow if the script has imported it; else None."""
    return sys.modules.get("tensorflow")


def read(path: str, most: int = -1) -> bytes:
    """The first `most` bytes of a file, all of them for -1."""
    with _file_system(path) as fs, fs.GFile(path, "rb") as file:
        content: bytes = file.read(most)
        return content


def write(path: str, content: bytes) -> None:
    """Write a file that exists as a whole or not at all: it is renamed from a temporary name beside it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with _file_system(path) as fs:
            with fs.GFile(temporary, "wb") as file:
                file.write(content)
                if fs is _LOCAL:
                    file.flush()
                    os.fsync(file.fileno())
            fs.rename(temporary, path, overwrite=True)
    except OSError:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def remove(path: str) -> None:
    with _file_system(path) as fs:
        fs.remove(path)


def size(path: str) -> int | None:
    """The bytes of a file; None if it cannot be found."""
    with contextlib.suppress(Exception), _file_system(path) as fs:
        return int(fs.stat(path).length)
    return None


def exists(path: str) -> bool:
    """Whether a file exists and can be found."""
    return size(path) is not None


def modified(path: str) -> float:
    """When a file was last written, in nanoseconds; 0 if it cannot be found."""
    with contextlib.suppress(Exception), _file_system(path) as fs:
        return float(fs.stat(path).mtime_nsec)
    return 0.0


def list_names(directory: str) -> list[str]:
    """The names in a directory; none if it cannot be read."""
    with contextlib.suppress(Exception), _file_system(directory) as fs:
        return list(fs.listdir(directory))
    return []


@contextlib.contextmanager
def _file_system(path: str) -> Iterator[Any]:
    """`gfile` for a path with a scheme; its errors become those of the operating system."""
    if "://" not in path:
        yield _LOCAL
        return
    module = tensorflow()
    if module is None:
        raise OSError(f"{path} can only be reached by TensorFlow, which is not imported")
    try:
        yield module.io.gfile
    except module.errors.NotFoundError as error:
        raise FileNotFoundError(str(error).partition("\n")[0][:500]) from None
    except module.errors.OpError as error:
        raise OSError(str(error).partition("\n")[0][:500]) from None
