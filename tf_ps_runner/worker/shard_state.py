"""The state of the data, stored beside each checkpoint: `model.ckpt-126.shards.json`.

The state is taken before the variables are read, so that what was used between the two is used again after a rollback,
and nothing is left out. It becomes visible once the checkpoint is there, by a rename. A checkpoint without its state
uses that of the newest older one, because what was used by then is in the model; if there is none at all, the
beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any, NamedTuple

from tf_ps_runner.worker import files
from tf_ps_runner.worker.agent_connection import AgentGone, agent, note

SUFFIX = ".shards.json"

MAX_STATE = 65_536
"""Bytes of a state: more than one line to the agent may have."""

_NUMBERED = re.compile(r"(.*)-(\d+)")

_taken: dict[str, Any] = {}
"""The state for each checkpoint that is being written."""


def take(path: str) -> None:
    """Request the state that belongs to the checkpoint `path`, which is about to be written."""
    _taken.pop(path, None)
    with contextlib.suppress(AgentGone):
        state = agent().request("snapshot").get("state")
        if state and state.get("queues"):
            _taken[path] = state


def store(path: str, step: int) -> None:
    """Write the state beside the checkpoint `path`, which was written. Raises OSError."""
    state, target = _taken.pop(path, None), path + SUFFIX
    if state is None:
        # A file there belongs to an earlier checkpoint of the same name.
        with contextlib.suppress(FileNotFoundError):
            files.remove(target)
    else:
        files.write(target, json.dumps({**state, "step": step}).encode())
    if not files.exists(path + ".index"):
        return
    for name in _states(path):
        # Those of checkpoints that the script's saver has removed.
        if not files.exists(name[: -len(SUFFIX)] + ".index"):
            with contextlib.suppress(OSError):
                files.remove(name)


def restore(path: str | None, step: int, how: str) -> None:
    """Have the queues go back to the state of the model: that of a checkpoint, or the beginning for a fresh model. With
    a live model the queues stay as they are. Raises RuntimeError."""
    if how == "live":
        return
    state, sentence = _state_of(path, step) if path is not None else (None, None)
    if sentence is not None:
        note(sentence)
    # Without an agent there is no data to request, and a script without DataShards continues.
    with contextlib.suppress(AgentGone):
        answer = agent().request("rollback", state=state)
        if answer.get("error") and state is not None:
            note(f"{path}{SUFFIX} cannot be restored ({answer['error']}): all data is used from the beginning")
            answer = agent().request("rollback", state=None)
        if answer.get("error"):
            raise RuntimeError(f"the data cannot go back to the checkpoint {path}: {answer['error']}")


def _state_of(path: str, step: int) -> tuple[Any, str | None]:
    """The state that belongs to the checkpoint `path` of that step, None for the beginning; and a sentence if it is not
    its own.

    If the script had no DataShards, no checkpoint of that name has a state; then there is no sentence.
    """
    own, clause = _read(path + SUFFIX)
    if own is not None:
        return own.queues, None
    names = _states(path)
    if clause is None and not names:
        return None, None
    sentence = f"the state of the data beside {path} {clause or 'is missing'}"
    # Older by the step: a script may number its checkpoints in any way.
    states = [(stored, name) for name in names if (stored := _read(name)[0]) is not None and 0 <= stored.step < step]
    if not states:
        return None, f"{sentence}: all data is used from the beginning, and nothing is lost"
    older, name = max(states, key=lambda found: found[0].step)
    return older.queues, f"{sentence}: that of {os.path.basename(name)[: -len(SUFFIX)]} is used, and nothing is lost"


class _Stored(NamedTuple):
    """The contents of a file: the state of the queues as the agent sent it, and the step of the model; -1 if that was
    unknown."""

    queues: Any
    step: int


def _read(name: str) -> tuple[_Stored | None, str | None]:
    """The contents of a file. None without a clause for a missing file, and with one for a file that cannot be used."""
    try:
        text = files.read(name, MAX_STATE + 1).decode()
        state = json.loads(text)
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeError) as error:
        return None, f"cannot be read ({error})"
    except ValueError:
        return None, "is damaged"
    if len(text) > MAX_STATE or not isinstance(state, dict) or not isinstance(state.get("queues"), dict):
        return None, "is damaged"
    step = state.pop("step", -1)
    return _Stored(state, step if isinstance(step, int) else -1), None


def _states(path: str) -> list[str]:
    """The states of all checkpoints of the same name."""
    own = _NUMBERED.fullmatch(path)
    if own is None:
        return []
    directory, stem = os.path.split(own[1])
    found = []
    for name in files.list_names(directory or os.curdir):
        numbered = _NUMBERED.fullmatch(name[: -len(SUFFIX)]) if name.endswith(SUFFIX) else None
        # `model-best-7` is a checkpoint of another name than `model-7`.
        if numbered is not None and numbered[1] == stem:
            found.append(os.path.join(directory, name))
    return found
