"""Checkpoints as TensorFlow writes and searches for them: they are reported to the agent with the state of the data,
and only complete ones are used."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from tf_ps_runner.worker import partitioning, shard_state
from tf_ps_runner.worker.agent_connection import agent, note, noted
from tf_ps_runner.worker.checkpoint_integrity import STATE, find_newest
from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, require_instance_attrs, require_params, wrap
from tf_ps_runner.worker.task import is_chief, task

STEP_NAMES = ("global_step", "step", "train_step", "iterations", "_iterations")
"""The usual names of a step counter in scripts and optimizers; the first one found nearest to the top counts."""

MAX_DEPTH = 3
"""How far below a checkpoint to look: checkpoint, model, optimizer, variable."""

MAX_INSPECTED = 2000
"""Parts of a checkpoint to look at."""

MAX_SKIPPED = 20
"""Skipped checkpoints that are reported."""

_noted: set[str] = set()


class RestoredModel:
    """How the chief got its model: `how` is `checkpoint` (of `path`), `live` (the servers had all of it: nothing was
    read) or `fresh`. `skipped` are sentences about checkpoints that could not be used."""

    def __init__(self) -> None:
        self.how = "fresh"
        self.path: str | None = None
        self.skipped: list[str] = []
        self._damaged: list[str] = []

    def newest(self, directory: str) -> str | None:
        """The newest complete checkpoint of a directory; None if there is none."""
        path, skipped = find_newest(directory, self._damaged)
        self.skipped += [sentence for _, sentence in skipped if sentence not in self.skipped]
        return path

    def skip(self, path: str, error: Exception) -> str:
        """Pass over a checkpoint from now on that TensorFlow could not read; returns a sentence about it."""
        self._damaged.append(path)
        self.skipped.append(f"{path} is not complete ({str(error).splitlines()[0][:200]})")
        return self.skipped[-1]

    def report(self, step: int) -> None:
        """Restore the state of the data that belongs to the model, then report to the agent that the chief has a
        complete model; that lets the workers in. The step is -1 if no step counter of the script can be found.

        Exceptions are passed on: the workers must not be let in to data that does not belong to the model.
        """
        shard_state.restore(self.path, step, self.how)
        partitioning.has_model(self.path)
        skipped = [sentence[:500] for sentence in self.skipped[:MAX_SKIPPED]]
        agent().report("restored", step=step, path=self.path, how=self.how, skipped=skipped)


@patch_module("tensorflow.python.training.saver", without="no checkpoints are reported")
def change_saver(module: Any) -> Sequence[Patch]:
    """Report each checkpoint that the chief writes."""
    saver = require_attr(module, "Saver")
    read_step = require_attr(module, "training_util.global_step")
    require_params(saver.save, "sess", "save_path", "global_step", "write_state")
    require_instance_attrs(saver.__init__, "_pad_step_number")

    def save(
        original: Any, self: Any, sess: Any, save_path: Any, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # A checkpoint that is not recorded in the state file is not one to continue from, but a part of an export.
        if not is_chief() or sess is None or kwargs.get("write_state") is False:
            return original(self, sess, save_path, global_step, *args, **kwargs)
        path = os.fspath(save_path)
        if global_step is not None:
            in_session = isinstance(global_step, str) or hasattr(global_step, "graph") or hasattr(global_step, "op")
            global_step = int(read_step(sess, global_step) if in_session else global_step)
            digits = "08d" if getattr(self, "_pad_step_number", False) else "d"
            path = f"{path}-{global_step:{digits}}"
        before_save(path)
        written = original(self, sess, save_path, global_step, *args, **kwargs)
        if written:
            after_save(str(written), step_of(str(written)))
        return written

    return [wrap(saver, "save", save)]


@patch_module(
    "tensorflow.python.checkpoint.checkpoint_management", without="a checkpoint that is not complete may be used"
)
def change_checkpoint_state(module: Any) -> Sequence[Patch]:
    """Have `latest_checkpoint` and every other search for the newest checkpoint find a complete one."""
    require_attr(module, "latest_checkpoint")
    state_of = require_attr(module, "CheckpointState")
    require_params(require_attr(module, "get_checkpoint_state"), "checkpoint_dir", "latest_filename")

    def get(original: Any, checkpoint_dir: Any, latest_filename: Any = None) -> Any:
        own_task = task()
        if own_task is None or latest_filename not in (None, STATE):
            return original(checkpoint_dir, latest_filename)
        try:
            state = original(checkpoint_dir, latest_filename)
        except ValueError:
            state = None
        newest, skipped = find_newest(os.fspath(checkpoint_dir))
        for path, sentence in skipped:
            if sentence not in _noted:
                _noted.add(sentence)
                note(f"{sentence}, and is not used" if path else sentence)
        if newest is None:
            return None
        state = state_of() if state is None else state
        damaged = {path for path, _ in skipped}
        kept = [path for path in state.all_model_checkpoint_paths if path not in damaged]
        state.model_checkpoint_path = newest
        # A damaged one is left out of the list, so that TensorFlow does not delete it in its turn.
        if len(kept) != len(state.all_model_checkpoint_paths):
            del state.all_model_checkpoint_timestamps[:]
            del state.all_model_checkpoint_paths[:]
            state.all_model_checkpoint_paths.extend(kept)
        return state

    return [wrap(module, "get_checkpoint_state", get)]


def before_save(path: str) -> None:
    """Take the state of the data before the variables of the checkpoint `path` (DIRECTORY/model.ckpt-N) are read."""
    with noted(f"the state of the data for {path} was not taken"):
        shard_state.take(path)


def after_save(path: str, step: int) -> None:
    """Store the state of the data beside a checkpoint that was written, and report it; the step is -1 if unknown."""
    with noted(f"the state of the data was not stored beside {path}"):
        shard_state.store(path, step)
    if step >= 0:
        agent().report("saved", step=step, path=path)


def step_of(path: str) -> int:
    """The step at the end of a checkpoint's name; -1 for none."""
    found = re.search(r"-(\d+)$", path)
    return int(found.group(1)) if found else -1


def read_step(managers: Iterable[Any], saved: Iterable[Any]) -> int | None:
    """The step of the model, by the variable in the script's checkpoints that counts steps; None without one."""
    counters = [getattr(manager, "_step_counter", None) for manager in managers]
    for counter in [*counters, *map(_find_counter, saved)]:
        if counter is not None:
            return max(0, int(counter.numpy()))
    return None


def _find_counter(root: Any) -> Any:
    waiting = deque([(root, 0)])
    seen = {id(root)}
    while waiting and len(seen) < MAX_INSPECTED:
        parent, depth = waiting.popleft()
        children: dict[str, Any] = {}
        with suppress(Exception):
            children = parent._trackable_children()
        for name in STEP_NAMES:
            if _is_integer_variable(children.get(name)):
                return children[name]
        for child in children.values():
            if depth < MAX_DEPTH and id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, depth + 1))
    return None


def _is_integer_variable(variable: Any) -> bool:
    with suppress(Exception):
        return bool(variable.dtype.is_integer) and variable.shape.rank == 0 and hasattr(variable, "numpy")
    return False
