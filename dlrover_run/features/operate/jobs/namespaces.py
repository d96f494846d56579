"""Pids of processes in another pid namespace, as of a container beside, as they are seen from here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class _Process(NamedTuple):
    """A process by /proc: its parent, and its pids in each pid namespace from this one to its own."""

    parent: int
    pids: tuple[str, ...]


def ancestor_here(process: int, pid: int, proc: Path = Path("/proc")) -> int:
    """The pid here of the ancestor of a process which has this `pid` in the pid namespace of that process; 0 if it
    cannot be seen."""
    own = _read(process, proc)
    current = own
    while own is not None and current is not None and current.parent > 0:
        number = current.parent
        current = _read(number, proc)
        if current is not None and len(current.pids) == len(own.pids) and current.pids[-1] == str(pid):
            return number
    return 0


def _read(process: int, proc: Path) -> _Process | None:
    try:
        text = (proc / str(process) / "status").read_text(errors="replace")
    except OSError:
        return None
    fields = dict(line.partition(":")[::2] for line in text.splitlines())
    try:
        return _Process(int(fields["PPid"]), tuple(fields["NSpid"].split()))
    except (KeyError, ValueError):
        return None
