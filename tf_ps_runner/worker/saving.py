"""Notice what TensorFlow's savers write, and have all of TensorFlow see whole checkpoints alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker import checkpoints
from tf_ps_runner.worker.channel import channel, note
from tf_ps_runner.worker.patching import Patch, assigns, place, takes, wrap
from tf_ps_runner.worker.task import task
from tf_ps_runner.worker.wholeness import STATE, look

_noted: set[str] = set()


def change_saver(module: Any) -> Sequence[Patch]:
    """Tell of each checkpoint that the chief writes. For `tensorflow.python.training.saver`."""
    saver = place(module, "Saver")
    training_util = place(module, "training_util")
    takes(saver.save, "sess", "save_path", "global_step", "write_state")
    assigns(saver.__init__, "_pad_step_number")
    place(training_util, "global_step")

    def save(
        original: Any, self: Any, sess: Any, save_path: Any, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        mine = task()
        # What is not noted in the state file is no checkpoint to go on from, but a part of an export.
        if mine is None or not mine.chief or sess is None or kwargs.get("write_state") is False:
            return original(self, sess, save_path, global_step, *args, **kwargs)
        path = os.fspath(save_path)
        if global_step is not None:
            global_step = int(training_util.global_step(sess, global_step) if _is_read(global_step) else global_step)
            digits = "08d" if getattr(self, "_pad_step_number", False) else "d"
            path = f"{path}-{global_step:{digits}}"
        checkpoints.save_begins(path)
        written = original(self, sess, save_path, global_step, *args, **kwargs)
        if written:
            checkpoints.was_saved(str(written), checkpoints.step_of(str(written)))
        return written

    return [wrap(saver, "save", save)]


def change_checkpoint_state(module: Any) -> Sequence[Patch]:
    """Have `latest_checkpoint` and all that asks for the newest one get a whole one. For
    `tensorflow.python.checkpoint.checkpoint_management`."""
    place(module, "latest_checkpoint")
    state_of = place(module, "CheckpointState")
    takes(place(module, "get_checkpoint_state"), "checkpoint_dir", "latest_filename")

    def get(original: Any, checkpoint_dir: Any, latest_filename: Any = None) -> Any:
        mine = task()
        if mine is not None and mine.role == "evaluator":
            # It looks for checkpoints again and again, from its beginning on.
            channel().say_once("ready")
        if mine is None or latest_filename not in (None, STATE):
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
        # One that is not whole is not kept count of, so that it is not deleted in its turn either.
        if len(kept) != len(state.all_model_checkpoint_paths):
            del state.all_model_checkpoint_timestamps[:]
            del state.all_model_checkpoint_paths[:]
            state.all_model_checkpoint_paths.extend(kept)
        return state

    return [wrap(module, "get_checkpoint_state", get)]


def _is_read(step: Any) -> bool:
    """Whether a step is a tensor, a variable or a name, which is read in the session."""
    return isinstance(step, str) or hasattr(step, "graph") or hasattr(step, "op")
