"""The event logs that agents keep without a flag, in the state directory of the user, so that `why` has an answer for a
job that is over. They are bounded and pruned, and where they cannot be written nobody is told: the job does not need
them.

A job that has a log elsewhere (`--journal`, `--log-dir`) has a symbolic link here. `--journal=/dev/null` keeps nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_run.features.events.records import FILE_NAME

MAX_BYTES = 1024 * 1024
"""The size at which a file here is rotated: some 3,000 events. One rotated file is kept."""

MAX_LOGS = 100
"""Logs that are kept, of the agents that wrote last."""

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
    """A file in the directory, and when it was written last."""

    name: str
    written: float


def superfluous(files: Sequence[KeptFile], running: Sequence[int]) -> list[str]:
    """The files to remove: those of all logs but the last ones, and never of an agent that runs, by its pid. Pure."""
    logs: dict[str, list[KeptFile]] = {}
    for file in files:
        if found := _PID.search(file.name):
            logs.setdefault(file.name[: found.end(1)], []).append(file)
    latest = sorted(logs, key=lambda log: max(file.written for file in logs[log]), reverse=True)
    return [
        file.name
        for log in latest[MAX_LOGS:]
        for file in logs[log]
        if (found := _PID.search(file.name)) and int(found[1]) not in running
    ]


def prune(directory: Path) -> None:
    """Remove the superfluous logs. Raises OSError if the directory cannot be read."""
    files = [KeptFile(entry.name, entry.stat(follow_symlinks=False).st_mtime) for entry in os.scandir(directory)]
    pids = {int(found[1]) for file in files if (found := _PID.search(file.name))}
    for name in superfluous(files, [pid for pid in pids if os.path.exists(f"/proc/{pid}")]):
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
