"""Checkpoints as TensorFlow writes and looks for them: who is notified, and that only complete ones are used."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from tf_ps_runner.worker.agent_connection import agent, note
from tf_ps_runner.worker.checkpoint_integrity import STATE, look
from tf_ps_runner.worker.checkpoint_integrity import newest_complete as newest_complete
from tf_ps_runner.worker.patching import Patch, require_attr, require_instance_attrs, require_params, wrap
from tf_ps_runner.worker.task import task

NAMES = ("global_step", "step", "train_step", "iterations", "_iterations")
"""The usual names of a step counter in scripts and optimizers; the first one found nearest to the top counts."""

MAX_DEPTH = 3
"""How far below a checkpoint to look: checkpoint, model, optimizer, variable."""

MAX_INSPECTED = 2000
"""Parts of a checkpoint to look at."""

_noted: set[str] = set()


def change_saver(module: Any) -> Sequence[Patch]:
    """Report each checkpoint that the chief writes. For `tensorflow.python.training.saver`."""
    saver = require_attr(module, "Saver")
    training_util = require_attr(module, "training_util")
    require_params(saver.save, "sess", "save_path", "global_step", "write_state")
    require_instance_attrs(saver.__init__, "_pad_step_number")
    require_attr(training_util, "global_step")

    def save(
        original: Any, self: Any, sess: Any, save_path: Any, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        own_task = task()
        # A checkpoint that is not recorded in the state file is not one to continue from, but a part of an export.
        if own_task is None or not own_task.chief or sess is None or kwargs.get("write_state") is False:
            return original(self, sess, save_path, global_step, *args, **kwargs)
        path = os.fspath(save_path)
        if global_step is not None:
            global_step = int(training_util.global_step(sess, global_step) if _is_read(global_step) else global_step)
            digits = "08d" if getattr(self, "_pad_step_number", False) else "d"
            path = f"{path}-{global_step:{digits}}"
        save_begins(path)
        written = original(self, sess, save_path, global_step, *args, **kwargs)
        if written:
            was_saved(str(written), step_of(str(written)))
        return written

    return [wrap(saver, "save", save)]


def change_checkpoint_state(module: Any) -> Sequence[Patch]:
    """Have `latest_checkpoint` and every other search for the newest checkpoint find a complete one. For
    `tensorflow.python.checkpoint.checkpoint_management`."""
    require_attr(module, "latest_checkpoint")
    state_of = require_attr(module, "CheckpointState")
    require_params(require_attr(module, "get_checkpoint_state"), "checkpoint_dir", "latest_filename")

    def get(original: Any, checkpoint_dir: Any, latest_filename: Any = None) -> Any:
        own_task = task()
        if own_task is not None and own_task.role == "evaluator":
            # An evaluator looks for checkpoints again and again, from its beginning on.
            agent().report_once("ready")
        if own_task is None or latest_filename not in (None, STATE):
            return original(checkpoint_dir, latest_filename)
        try:
            state = original(checkpoint_dir, latest_filename)
        except ValueError:
            state = None
        newest, skipped = look(os.fspath(checkpoint_dir))
        for path, why in skipped:
            if path not in _noted:
                _noted.add(path)
                note(f"{path} is not whole ({why}), and is not used" if path else why)
        if newest is None:
            return None
        state = state_of() if state is None else state
        damaged = {path for path, _ in skipped}
        kept = [path for path in state.all_model_checkpoint_paths if path not in damaged]
        state.model_checkpoint_path = newest
        # A damaged one is left out of the list, so that it is not deleted in its turn either.
        if len(kept) != len(state.all_model_checkpoint_paths):
            del state.all_model_checkpoint_timestamps[:]
            del state.all_model_checkpoint_paths[:]
            state.all_model_checkpoint_paths.extend(kept)
        return state

    return [wrap(module, "get_checkpoint_state", get)]


def _is_read(step: Any) -> bool:
    """Whether a step is a tensor, a variable or a name, which has to be read in the session."""
    return isinstance(step, str) or hasattr(step, "graph") or hasattr(step, "op")


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
    """Have `listener(path, step)` called once a checkpoint is written; the step is -1 if unknown."""
    _saved.append(listener)


def on_restored(listener: Restored) -> None:
    """Have `listener(path, step, how)` called when the chief has a complete model, before the workers are let in.

    `how` is `checkpoint` (of `path`), `live` (the servers had all of it: nothing was read) or `fresh`. The step is -1
    if the script has no step counter that can be found.
    """
    _restored.append(listener)


def save_begins(path: str) -> None:
    """Notify the listeners that a checkpoint is about to be written."""
    for listener in _save_begin:
        try:
            listener(path)
        except Exception as error:
            note(f"what goes with {path} could not be made ready: {type(error).__name__}: {error}")


def was_saved(path: str, step: int) -> None:
    """Notify the listeners, then the agent, that a checkpoint was written."""
    for listener in _saved:
        try:
            listener(path, step)
        except Exception as error:
            note(f"what goes with {path} was not written: {type(error).__name__}: {error}")
    if step >= 0:
        agent().report("saved", step=step, path=path)


def was_restored(path: str | None, step: int, how: str, skipped: list[str]) -> None:
    """Notify the listeners, then the agent, that the chief has a complete model; that opens the gate for the workers.

    An exception of a listener is passed on: the workers must not be let in to data that does not belong to the model.
    """
    for listener in _restored:
        listener(path, step, how)
    agent().report("restored", step=step, path=path, how=how, skipped=skipped)


def step_of(path: str) -> int:
    """The step at the end of a checkpoint's name; -1 for none."""
    found = re.search(r"-(\d+)$", path)
    return int(found.group(1)) if found else -1


def read_step(managers: Iterable[Any], saved: Iterable[Any]) -> int | None:
    """The step that the model is at, by the variable of the script's checkpoints that counts steps; None without
    one."""
    for manager in managers:
        counter = getattr(manager, "_step_counter", None)
        if counter is not None:
            return max(0, int(counter.numpy()))
    for checkpoint in saved:
        variable = _find(checkpoint)
        if variable is not None:
            return max(0, int(variable.numpy()))
    return None


def _find(root: Any) -> Any:
    waiting = deque([(root, 0)])
    seen = {id(root)}
    while waiting and len(seen) < MAX_INSPECTED:
        parent, depth = waiting.popleft()
        children: dict[str, Any] = {}
        with suppress(Exception):
            children = parent._trackable_children()
        for name in NAMES:
            if _counts(children.get(name)):
                return children[name]
        for child in children.values():
            if depth < MAX_DEPTH and id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, depth + 1))
    return None


def _counts(variable: Any) -> bool:
    """Whether it is a whole number in a variable."""
    with suppress(Exception):
        return bool(variable.dtype.is_integer) and variable.shape.rank == 0 and hasattr(variable, "numpy")
    return False
