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

from tf_ps_runner.worker import checkpoints, files
from tf_ps_runner.worker.agent_connection import AgentGone, agent, note

SUFFIX = ".shards.json"

MAX_STATE = 65_536
"""Bytes of a state: more than one line of it can contain."""

_NUMBERED = re.compile(r"(.*)-(\d+)")

_taken: dict[str, Any] = {}
"""The state for each checkpoint that is being written."""

_listening = False


def keep() -> None:
    """From here on store the state beside each checkpoint, and restore it with the model; only a chief reports
    checkpoints. A second call does nothing."""
    global _listening
    if not _listening:
        _listening = True
        checkpoints.on_save_begin(take)
        checkpoints.on_saved(write)
        checkpoints.on_restored(give_back)


def take(path: str) -> None:
    """Request the state that belongs to the checkpoint `path`."""
    _taken.pop(path, None)
    try:
        state = agent().request("snapshot").get("state")
    except AgentGone:
        return
    if state and state.get("queues"):
        _taken[path] = state


def write(path: str, step: int) -> None:
    """Put the state beside the checkpoint that is being written. Raises OSError."""
    state, target = _taken.pop(path, None), path + SUFFIX
    if state is None:
        # A file there belongs to an earlier checkpoint of the same name.
        with contextlib.suppress(FileNotFoundError):
            files.remove(target)
    else:
        files.write(target, json.dumps({**state, "step": step}).encode())
    _forget_older(path)


def give_back(path: str | None, step: int, how: str) -> None:
    """Have the queues go back to the state of the model: that of a checkpoint, or the beginning for a fresh model. With
    a live model the queues stay as they are. Raises RuntimeError."""
    if how == "live":
        return
    state, sentence = read(path, step) if path is not None else (None, None)
    if sentence is not None:
        note(sentence)
    try:
        _roll_back(path, state)
    except AgentGone:
        # There is no agent to hand out data, and a script without DataShards continues.
        return


def _roll_back(path: str | None, state: Any) -> None:
    answer = agent().request("rollback", state=state)
    if answer.get("error") and state is not None:
        note(f"{path}{SUFFIX} cannot be gone back to ({answer['error']}): all data is used from the beginning")
        answer = agent().request("rollback", state=None)
    if answer.get("error"):
        raise RuntimeError(f"the data cannot go back to the checkpoint {path}: {answer['error']}")


def read(path: str, step: int) -> tuple[Any, str | None]:
    """The state that belongs to the checkpoint `path` of that step, None for the beginning; and a sentence if it is not
    its own.

    No checkpoint of that name has a state if the script had no DataShards; then there is no sentence.
    """
    own, clause = _read(path + SUFFIX)
    if own is not None:
        return own.queues, None
    if clause is None and not _states(path):
        return None, None
    sentence = f"the state of the data beside {path} {clause or 'is missing'}"
    older = _newest_older(path, step)
    if older is None:
        return None, f"{sentence}: all data is used from the beginning, and nothing is lost"
    name, kept = older
    return kept.queues, f"{sentence}: that of {name[: -len(SUFFIX)]} is taken, and nothing is lost"


class _Kept(NamedTuple):
    """What a file says: the state of the queues as the agent gave it, and the step that the model was at; -1 where that
    was not known."""

    queues: Any
    step: int


def _read(name: str) -> tuple[_Kept | None, str | None]:
    """What a file says; None with a clause that says why it says nothing, if it exists at all."""
    try:
        text = files.read(name, MAX_STATE + 1).decode()
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeError) as error:
        return None, f"cannot be read ({error})"
    try:
        state = json.loads(text)
    except ValueError:
        return None, "is damaged"
    if len(text) > MAX_STATE or not isinstance(state, dict) or not isinstance(state.get("queues"), dict):
        return None, "is damaged"
    step = state.pop("step", -1)
    return _Kept(state, step if isinstance(step, int) else -1), None


def _newest_older(path: str, step: int) -> tuple[str, _Kept] | None:
    """The state of the newest older checkpoint of the same name, by step: a script may number them as it likes."""
    found = []
    for name in _states(path):
        kept = _read(name)[0]
        if kept is not None and 0 <= kept.step < step:
            found.append((os.path.basename(name), kept))
    return max(found, key=lambda one: one[1].step, default=None)


def _states(path: str) -> list[str]:
    """The states of all checkpoints of the same name."""
    own = _NUMBERED.fullmatch(path)
    if own is None:
        return []
    directory, stem = os.path.split(own[1])
    found = []
    for name in _listed(directory or os.curdir):
        numbered = _NUMBERED.fullmatch(name.removesuffix(SUFFIX))
        # `model-best-7` is a checkpoint of another name than `model-7`.
        if name.endswith(SUFFIX) and numbered is not None and numbered[1] == stem:
            found.append(os.path.join(directory, name))
    return found


def _listed(directory: str) -> list[str]:
    try:
        return files.listed(directory)
    except OSError:
        return []


def _forget_older(path: str) -> None:
    """Remove the states of checkpoints that the script's saver has removed."""
    if not files.exists(path + ".index"):
        return
    for name in _states(path):
        if not files.exists(name[: -len(SUFFIX)] + ".index"):
            with contextlib.suppress(OSError):
                files.remove(name)
