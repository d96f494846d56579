"""Takes secrets out of this process's environment, so that nothing it starts inherits them and `ps` shows none."""

from __future__ import annotations

import os
from collections.abc import Sequence

_BLOT = b"*"


def conceal(names: Sequence[str]) -> None:
    """Remove these variables, and overwrite the values with which this process was started.

    Removing alone would not do: the kernel goes on showing the first environment of a process, and of all that are
    forked from it. Where it lets nobody write there the values stay readable for this user, as they are for other
    programs.
    """
    held = [os.fsencode(name) for name in names if os.environ.pop(name, None) is not None]
    if held:
        try:
            _overwrite(held)
        except (OSError, ValueError, IndexError):
            return


def _overwrite(names: Sequence[bytes]) -> None:
    with open("/proc/self/stat", "rb") as stat:
        text = stat.read()
    # The second field is the name in parentheses and may hold anything; the third field has index 0 here, and the 50th
    # is where the environment begins.
    position = int(text[text.rindex(b")") + 2 :].split()[50 - 3])
    with open("/proc/self/environ", "rb") as environment:
        entries = environment.read().split(b"\0")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for entry in entries:
            name, equals, value = entry.partition(b"=")
            if equals and name in names:
                memory.seek(position + len(name) + len(equals))
                memory.write(_BLOT * len(value))
            position += len(entry) + 1
