"""The file in which a worker records its exception, in the format of torch's `@record`.

A worker may write anything there, so no content can make the launcher fail.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_run.failures.worker_exit import RecordedError, WorkerExit

MAX_BYTES = 1 << 20
"""An error file larger than this is not read."""

_STAMP_LAG = 2.0
"""Seconds between the whole second in the record and the writing of the file."""


def read_error_file(path: str | Path) -> RecordedError | None:
    """The error that a worker recorded; None if the file is missing, damaged, too large or no such record.

    The time in the record has whole seconds only. The file's modification time is the same moment to the nanosecond,
    and is used if it fits; otherwise the result has a whole number of seconds.
    """
    try:
        data, modified = _load(path)
    except (OSError, ValueError, RecursionError):
        return None
    message = data.get("message")
    if isinstance(message, str):
        return RecordedError(_printable(message), "", _moment(data.get("timestamp"), modified))
    if not isinstance(message, Mapping):
        return None
    text, extra = message.get("message"), message.get("extraInfo")
    extra = extra if isinstance(extra, Mapping) else {}
    stack = extra.get("py_callstack")
    return RecordedError(_printable(text), _printable(stack), _moment(extra.get("timestamp"), modified))


def copy_root_cause(root: WorkerExit, dest: str | Path) -> str | None:
    """Copy the record of the first failure to the launcher's own error file, as torchrun does. Returns None, or a
    sentence on why nothing was written.

    `dest` is the launcher's `TORCHELASTIC_ERROR_FILE`. The worker's exit code (minus the signal's number for a signal,
    as in torch) is added as `errorCode`, because a worker cannot know it. An older file at `dest` is replaced
    atomically.
    """
    if root.error_file is None:
        return f"Rank {root.rank} recorded no error, so nothing was written to {dest}."
    try:
        data, _ = _load(root.error_file)
    except (OSError, ValueError, RecursionError) as problem:
        return f"The error file of rank {root.rank} cannot be read, so nothing was written to {dest} ({problem})."
    message = data.get("message")
    if isinstance(message, dict) and root.code != 0:
        message["errorCode"] = root.code
    # A unique name in the same directory, so that the rename is atomic; the permissions are those of any new file.
    partial = f"{dest}.{os.getpid()}.tmp"
    try:
        with open(partial, "x", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(partial, dest)
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        return f"The error file of rank {root.rank} could not be copied to {dest}: {problem.strerror}."
    return None


def _load(path: str | Path) -> tuple[dict[str, Any], float]:
    """The JSON object in a file and when the file was written. Raises OSError, ValueError, RecursionError."""
    # Non-blocking, because a worker may have put a named pipe there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    data = json.loads(content)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data, status.st_mtime


def _printable(text: object) -> str:
    """A string that can be encoded as UTF-8 (JSON may hold a lone surrogate); empty for anything else."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""


def _moment(stamp: object, modified: float) -> float:
    try:
        recorded = float(stamp)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return modified
    if not math.isfinite(recorded) or 0 <= modified - recorded < _STAMP_LAG:
        return modified
    return recorded
