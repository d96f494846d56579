"""Who wants to know when a checkpoint is written or read, and which is the newest whole one (`wholeness`)."""

from __future__ import annotations

import re
from collections.abc import Callable

from tf_ps_runner.worker import channel
from tf_ps_runner.worker.wholeness import newest_whole as newest_whole

SaveBegin = Callable[[str], None]
Saved = Callable[[str, int], None]
Restored = Callable[..., None]

_save_begin: list[SaveBegin] = []
_saved: list[Saved] = []
_restored: list[Restored] = []


def on_save_begin(listener: SaveBegin) -> None:
    """Have `listener(path)` called before the variables of the checkpoint `path` (DIRECTORY/model.ckpt-N) are read."""
    _save_begin.append(listener)


def on_saved(listener: Saved) -> None:
    """Have `listener(path, step)` called once a checkpoint is written; the step is -1 where none is known."""
    _saved.append(listener)


def on_restored(listener: Restored) -> None:
    """Have `listener(path, step, how)` called when the chief has a whole model, and before the workers are let in.

    `how` is `checkpoint` (of `path`), `live` (the servers had all of it: nothing was read) or `fresh`. The step is -1
    where the script counts none that can be found.
    """
    _restored.append(listener)


def save_begins(path: str) -> None:
    """Tell the listeners that a checkpoint is about to be written."""
    for listener in _save_begin:
        try:
            listener(path)
        except Exception as error:
            channel.note(f"what goes with {path} could not be made ready: {type(error).__name__}: {error}")


def was_saved(path: str, step: int) -> None:
    """Tell the listeners, then the agent, that a checkpoint was written."""
    for listener in _saved:
        try:
            listener(path, step)
        except Exception as error:
            channel.note(f"what goes with {path} was not written: {type(error).__name__}: {error}")
    if step >= 0:
        channel.channel().say("saved", step=step, path=path)


def was_restored(path: str | None, step: int, how: str, skipped: list[str]) -> None:
    """Tell the listeners, then the agent, that the chief has a whole model; that opens the gate for the workers.

    What a listener raises goes through: the workers must not be let in to data that does not belong to the model.
    """
    for listener in _restored:
        listener(path, step, how)
    channel.channel().say("restored", step=step, path=path, how=how, skipped=skipped)


def step_of(path: str) -> int:
    """The step that a checkpoint's name ends with; -1 for none."""
    found = re.search(r"-(\d+)$", path)
    return int(found.group(1)) if found else -1
