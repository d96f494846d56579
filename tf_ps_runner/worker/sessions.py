"""How a session begins: workers wait at the gate, and a chief keeps a model that is whole.

TensorFlow's chief restores the newest checkpoint whenever there is one. A chief that was started again alone would so
roll back the model under the workers, who go on; here it does only where something in the servers has no value.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker import checkpoints
from tf_ps_runner.worker.channel import channel, note
from tf_ps_runner.worker.leaving import leave
from tf_ps_runner.worker.patching import Patch, assigns, place, set_default, takes, wrap
from tf_ps_runner.worker.servers import served_at
from tf_ps_runner.worker.task import task

POLL = 0.2
"""Seconds between two looks at a model that is not ready, where TensorFlow waits for 30."""

MAX_SKIPPED = 20
"""Checkpoints of which is told that they were skipped."""


@dataclasses.dataclass
class _Beginning:
    """How the chief's session of this thread came by its model."""

    how: str = "fresh"
    path: str | None = None
    skipped: list[str] = dataclasses.field(default_factory=list)


class _Here(threading.local):
    beginning: _Beginning | None = None


_here = _Here()
_told: set[str] = set()
"""`restored`, once it was said: a later session of a chief is one more, and not the one with the model."""


def change_session(module: Any) -> Sequence[Patch]:
    """Have workers wait at the gate. For `tensorflow.python.client.session`."""
    session = place(module, "BaseSession")
    takes(session.__init__, "target", "graph", "config")

    def begin(original: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        mine = task()
        if mine is None or served_at(target) is None:
            original(self, target, graph, config)
            return
        if mine.worker and mine.gated:
            pass_gate()
        original(self, target, graph, config)
        if mine.worker:
            channel().say_once("ready")
        elif mine.chief and _here.beginning is None and "restored" not in _told:
            # A script that makes its session by itself makes and restores its model by itself, too.
            _told.add("restored")
            note("this script makes its session without a SessionManager: its workers are let in at once")
            checkpoints.was_restored(None, 0, "fresh", [])

    return [wrap(session, "__init__", begin)]


def change_session_manager(module: Any) -> Sequence[Patch]:
    """Have a chief keep a whole model, and others look for it often. For `...python.training.session_manager`."""
    manager = place(module, "SessionManager")
    waits = set_default(manager, "__init__", "recovery_wait_secs", POLL, when=lambda: task() is not None)
    restore = _Restore(module)
    takes(manager.prepare_session, "master")

    def prepare(original: Any, self: Any, master: Any, *args: Any, **kwargs: Any) -> Any:
        mine = task()
        if mine is None or not mine.chief or served_at(master) is None:
            return original(self, master, *args, **kwargs)
        _here.beginning = beginning = _Beginning()
        try:
            session = original(self, master, *args, **kwargs)
        finally:
            _here.beginning = None
        _told.add("restored")
        skipped = [sentence[:500] for sentence in beginning.skipped][:MAX_SKIPPED]
        checkpoints.was_restored(beginning.path, step_in(session), beginning.how, skipped)
        return session

    return [waits, wrap(manager, "_restore_checkpoint", restore), wrap(manager, "prepare_session", prepare)]


def change_supervisor(module: Any) -> Sequence[Patch]:
    """The same for the older way of scripts. For `tensorflow.python.training.supervisor`."""
    supervisor = place(module, "Supervisor")
    return [set_default(supervisor, "__init__", "recovery_wait_secs", POLL, when=lambda: task() is not None)]


def pass_gate() -> None:
    """Wait until the chief has a whole model; leave where the cluster is about to change before that."""
    channel().wait_for(lambda order: order.open or order.pause or order.ending)
    if channel().order.pause:
        leave()


def step_in(session: Any) -> int:
    """The global step of the model in a session's servers; 0 where the graph has none."""
    from tensorflow.python.training import training_util

    with session.graph.as_default():
        step = training_util.get_global_step(session.graph)
    return 0 if step is None else max(0, int(training_util.global_step(session, step)))


class _Restore:
    """`SessionManager._restore_checkpoint` for a chief: makes a session, and says whether its model is there."""

    def __init__(self, module: Any) -> None:
        self._read = place(module, "_restore_checkpoint_and_maybe_run_saved_model_initializers")
        self._errors = place(module, "errors")
        self._management = place(module, "checkpoint_management")
        self._logging = place(module, "logging")
        manager = place(module, "SessionManager")
        place(manager, "_model_ready"), place(manager, "_model_ready_for_local_init")
        assigns(manager.__init__, "_ready_op", "_ready_for_local_init_op")
        place(self._errors, "DataLossError"), place(self._errors, "OutOfRangeError")
        takes(
            place(manager, "_restore_checkpoint"),
            *("master", "saver", "checkpoint_dir", "checkpoint_filename_with_path", "wait_for_checkpoint", "config"),
        )

    def __call__(
        self,
        original: Any,
        manager: Any,
        master: Any,
        saver: Any = None,
        checkpoint_dir: Any = None,
        checkpoint_filename_with_path: Any = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: Any = 7200,
        config: Any = None,
    ) -> tuple[Any, bool]:
        beginning = _here.beginning
        if beginning is None or wait_for_checkpoint:
            return original(  # type: ignore[no-any-return]
                manager,
                master,
                saver,
                checkpoint_dir,
                checkpoint_filename_with_path,
                wait_for_checkpoint,
                max_wait_secs,
                config,
            )
        session, _ = original(manager, master, config=config)
        if self._is_whole(manager, session):
            beginning.how = "live"
            if saver is not None and checkpoint_dir:
                self._remember(saver, checkpoint_dir)
            return session, True
        if saver is None or not (checkpoint_dir or checkpoint_filename_with_path):
            return session, False
        if checkpoint_filename_with_path:
            self._restore(session, saver, checkpoint_filename_with_path, beginning)
            return session, True
        if not self._restore_newest(session, saver, str(checkpoint_dir), beginning):
            return session, False
        self._remember(saver, checkpoint_dir)
        return session, True

    def _is_whole(self, manager: Any, session: Any) -> bool:
        """Whether all that a chief makes has a value in the servers of this version."""
        if manager._ready_for_local_init_op is not None:
            return bool(manager._model_ready_for_local_init(session)[0])
        return manager._ready_op is not None and bool(manager._model_ready(session)[0])

    def _restore_newest(self, session: Any, saver: Any, directory: str, beginning: _Beginning) -> bool:
        damaged: list[str] = []
        while True:
            path, skipped = checkpoints.newest_whole(directory, damaged)
            beginning.skipped += [sentence for sentence in skipped if sentence not in beginning.skipped]
            if path is None:
                return False
            try:
                self._restore(session, saver, path, beginning)
                return True
            except (self._errors.DataLossError, self._errors.OutOfRangeError) as error:
                damaged.append(path)
                words = str(error).splitlines()[0][:200]
                beginning.skipped.append(f"{path} is not whole ({words})")

    def _restore(self, session: Any, saver: Any, path: str, beginning: _Beginning) -> None:
        if self._logging.get_verbosity() > self._logging.INFO:
            note(f"Restoring parameters from {path}")
        self._read(session, saver, path)
        beginning.how, beginning.path = "checkpoint", path

    def _remember(self, saver: Any, directory: Any) -> None:
        """Let the saver know the older checkpoints, so that it deletes them in turn as before."""
        state = self._management.get_checkpoint_state(directory)
        if state is not None:
            saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
