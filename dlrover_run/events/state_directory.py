"""The event logs that agents keep without a flag, in the state directory of the user, so that `why` has an answer for a
job that is over. They are bounded and pruned, and where they cannot be written no line says so: the job does not need
them.

A job that has a log elsewhere (`--journal`, `--log-dir`) has a symbolic link here. `--journal=/dev/null` keeps nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_run.events.records import FILE_NAME

MAX_BYTES = 1024 * 1024
"""The size at which a file here is rotated: some 3,000 events. One rotated file is kept."""

KEPT_LOGS = 100
"""Logs that are kept for any time, of the agents that wrote last."""

MAX_LOGS = 5000
"""Logs that are kept for MAX_AGE, so that `why` in the morning finds the job of the night beside many short ones."""

MAX_AGE = 14 * 24 * 3600.0
"""Seconds for which logs beyond KEPT_LOGS are kept."""

MAX_TOTAL_BYTES = 256 * 1024 * 1024
"""Bytes of all logs that are kept, more than KEPT_LOGS have at most. The log of a short job has some 4 KiB."""

CLOSE_TIMEOUT = 1.0
"""Seconds that the end of an agent waits for a home directory that does not take its last events."""

MAX_NAME = 100
"""Characters of a job's id, and of a host, in a file's name."""

_PID = re.compile(r"\.(\d+)\.events\.jsonl(?:\.\d+)?\Z")


def state_directory(environ: Mapping[str, str]) -> Path | None:
    """The directory of these logs, by XDG_STATE_HOME or the home of the user; None without a home."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = os.path.expanduser("~")
        # Root with the home of another user must not leave a directory there that this user cannot write to. A user
        # without a name, as in OpenShift, has none.
        if not os.path.isabs(home) or not _is_own(home):
            return None
        state = os.path.join(home, ".local", "state")
    return Path(state, "dlrover-run", "events")


def _is_own(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


def file_name(job: str, host: str, pid: int) -> str:
    """The name of an agent's log in a directory that agents share. A job's id may be any text."""
    return f"{_component(job)[:MAX_NAME]}.{_component(host)[:MAX_NAME]}.{pid}.{FILE_NAME}"


def name_prefix(job: str) -> str:
    """What the names of the logs of a job begin with."""
    return f"{_component(job)[:MAX_NAME]}."


def _component(text: str) -> str:
    """A text as a part of a file's name, which is one component of a path of at most 255 bytes."""
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)


class KeptFile(NamedTuple):
    """A file in the directory, when it was written last, and its size."""

    name: str
    written: float
    size: int = 0


def superfluous(files: Sequence[KeptFile], runs: Callable[[int], bool], now: float) -> list[str]:
    """The files to remove: of the logs beyond KEPT_LOGS those that are too old, or too many, or too large together, and
    never that of an agent whose pid `runs`. Pure."""
    logs: dict[str, list[KeptFile]] = {}
    for file in files:
        if found := _PID.search(file.name):
            logs.setdefault(file.name[: found.end(1)], []).append(file)
    written = {log: max(file.written for file in logs[log]) for log in logs}
    removed: list[str] = []
    total = 0
    for place, log in enumerate(sorted(logs, key=lambda log: written[log], reverse=True)):
        total += sum(file.size for file in logs[log])
        is_beyond = place >= MAX_LOGS or total > MAX_TOTAL_BYTES or now - written[log] > MAX_AGE
        found = _PID.search(logs[log][0].name)
        if place >= KEPT_LOGS and is_beyond and found is not None and not runs(int(found[1])):
            removed += [file.name for file in logs[log]]
    return removed


def prune(directory: Path) -> None:
    """Remove the superfluous logs. Raises OSError if the directory cannot be read."""
    entries = list(os.scandir(directory))
    if len(entries) <= KEPT_LOGS:
        return
    files = []
    for entry in entries:
        # Another agent may have removed it.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            files.append(KeptFile(entry.name, status.st_mtime, status.st_size))
    for name in superfluous(files, lambda pid: os.path.exists(f"/proc/{pid}"), time.time()):
        with contextlib.suppress(OSError):
            os.unlink(directory / name)


def prepare(directory: Path, link: str = "", target: Path | None = None) -> None:
    """Make the directory, for this user alone, prune it, and note there a log elsewhere. Raises OSError."""
    # The mode is that of the last directory alone.
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    prune(directory)
    if target is not None:
        (directory / link).symlink_to(target)
