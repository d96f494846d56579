"""What a user most likely meant by a word that names nothing: a command, a file, a flag or a key.

Only errors and warnings call this, so a launch does not wait for `difflib`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

_PYTHONS = ("python", "python3")

OTHER_NAMES = {
    "ps": "jobs", "list": "jobs", "ls": "jobs", "history": "jobs", "info": "status", "show": "status",
    "describe": "status", "get": "status", "watch": "top", "tail": "logs", "explain": "why", "kill": "stop",
    "cancel": "stop", "delete": "stop", "rm": "stop", "evict": "drain", "remove": "drain", "resize": "scale",
}  # fmt: skip
"""What other tools call a subcommand."""


def closest(word: str, candidates: Collection[str]) -> str | None:
    """The candidate that is most like the word; None if none is like it. Called for a flag, a key, a subcommand and a
    script that do not exist."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(candidates), n=1)), None)


def instead_of_script(script: str, args: Sequence[str], program: str, commands: Collection[str]) -> str | None:
    """What to do about a script that does not exist, as a clause, if what was meant can be guessed. `commands` are the
    subcommands of the program of that name."""
    if os.path.basename(script) in _PYTHONS and args:
        return f"{program} starts Python itself, so leave {script!r} out: `{program} {args[0]}`."
    if os.sep not in script:
        if script == "help":
            return f"`{program} --help` shows the commands and flags."
        if command := OTHER_NAMES.get(script) or closest(script, commands):
            return f"did you mean `{program} {command}`?"
    folder, name = os.path.split(script)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return None
    similar = closest(name, [entry for entry in names if entry.endswith(".py")])
    return f"did you mean {os.path.join(folder, similar)!r}?" if similar else None
