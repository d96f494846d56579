"""Reports the steps of a session, and leaves between two steps when the agent orders it; the chief saves first.

The hook is put into each MonitoredSession on the cluster, also those of Estimator, so that no script has to change. It
acts inside `run`, after the step: what a script does after its loop (an export, a last evaluation, a final message)
must not happen when the training merely moves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_ps_runner.worker import shards
from tf_ps_runner.worker.agent_connection import TaskOrder, agent, note, noted
from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, require_instance_attrs, require_params, wrap
from tf_ps_runner.worker.sessions import server_at, step_in
from tf_ps_runner.worker.task import leave, report_used_data, task

REPORT_INTERVAL = 0.05
"""Seconds between two reports of the global step: with a server, unreported steps of up to that long are lost. A report
is one short line to the agent, some tens of microseconds."""

STEP_TIMEOUT = 1.0
"""Seconds that a process which is to leave has to reach the end of a step. A process between two steps for that long
waits for data, or does something else of unknown length, and leaves from there."""


@patch_module(
    "tensorflow.python.training.monitored_session",
    without="nothing is saved before the servers change, and no steps are reported",
)
def change_monitored_session(module: Any) -> Sequence[Patch]:
    """Put the hook into each session on the cluster."""
    monitored = require_attr(module, "_MonitoredSession")
    require_params(monitored.__init__, "session_creator", "hooks", "should_recover", "stop_grace_period_secs")
    require_attr(module, "basic_session_run_hooks.CheckpointSaverHook._save")
    require_instance_attrs(
        require_attr(module, "ChiefSessionCreator").__init__, "_master", "_checkpoint_dir", "_scaffold"
    )
    require_instance_attrs(require_attr(module, "WorkerSessionCreator").__init__, "_master")
    require_attr(module, "session_run_hook.SessionRunArgs")
    read_step = require_attr(module, "basic_session_run_hooks.training_util._get_or_create_global_step_read")

    def create(
        original: Any,
        self: Any,
        session_creator: Any,
        hooks: Any,
        should_recover: bool,
        stop_grace_period_secs: Any = 120,
    ) -> None:
        own_task = task()
        # Predictions and evaluations in the same process have a session of their own, on no server.
        elsewhere = hasattr(session_creator, "_master") and server_at(session_creator._master) is None
        trains = own_task is not None and (own_task.chief or own_task.worker)
        if own_task is not None and trains and session_creator is not None and not elsewhere:
            hooks = [*(hooks or ())]
            hooks.append(StepHook(own_task.chief, module, session_creator, hooks[:], read_step))
        original(self, session_creator, hooks, should_recover, stop_grace_period_secs)

    return [wrap(monitored, "__init__", create)]


class StepHook:
    """A SessionRunHook except for its base class; the last one of its session."""

    def __init__(
        self, chief: bool, module: Any, creator: Any, others: Sequence[Any], read_step: Callable[[], Any]
    ) -> None:
        self._chief = chief
        self._module = module
        self._creator = creator
        self._others = others
        self._read_step = read_step
        # The global step as a part of the graph; None for a graph without one.
        self._step: Any = None
        self._latest = -1
        self._reported_at = float("-inf")
        self._session: Any = None
        self._between_steps = threading.RLock()
        self._running = False
        self._finished = False
        self._watching = False

    def begin(self) -> None:
        """Find the global step; a graph without one, or one that is finalized, is trained without reports."""
        with contextlib.suppress(RuntimeError, ValueError):
            self._step = self._read_step()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Keep the session, which may be a new one after an error."""
        self._session, self._running = session, False
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="tf-ps-run: orders", daemon=True).start()

    def before_run(self, context: Any) -> Any:
        """Have the global step read with each step: reading it only sometimes would make another graph for the
        servers."""
        with self._between_steps:
            self._running = True
        return self._module.session_run_hook.SessionRunArgs(self._step) if self._step is not None else None

    def after_run(self, context: Any, values: Any) -> None:
        """Report the step; leave, or end the script's loop, if the agent orders it."""
        with self._between_steps:
            self._running = False
            step = int(values.results) if values.results is not None else 0
            shards.made_step()
            if self._step is not None:
                self._latest = max(0, step)
                if time.monotonic() - self._reported_at >= REPORT_INTERVAL:
                    self._report()
            self._leave_if_ordered()
        if agent().order.ending and not self._chief:
            context.request_stop()

    def end(self, session: Any) -> None:
        """The script has finished, and is left to end by itself."""
        with self._between_steps:
            self._finished = True

    def _must_leave(self, order: TaskOrder) -> bool:
        return order.save if self._chief else order.pause

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        agent().report("step", step=self._latest)

    def _leave_if_ordered(self) -> None:
        if not self._must_leave(agent().order):
            return
        if self._latest >= 0:
            # The coordinator counts lost steps up to the last one reported.
            self._report()
        if self._chief:
            # First the used data is reported, then its state is taken, then the model is saved.
            report_used_data()
            self._save()
        leave(self._session)

    def _watch(self) -> None:
        """Leave from between two steps if the next one does not come soon."""
        if not agent().wait_for(self._must_leave):
            return
        threading.Event().wait(STEP_TIMEOUT)
        with self._between_steps:
            if not self._running and not self._finished and self._session is not None:
                self._leave_if_ordered()

    def _save(self) -> None:
        """Save at the current step, even if that was saved before: a step of a worker may have changed the model since
        without changing the number."""
        with noted("no checkpoint could be saved before the servers change"):
            step = step_in(self._session)
            with self._session.graph.as_default():
                if not self._save_checkpoints(step):
                    note(f"this script saves no checkpoints: step {step} is lost with the servers")
            for hook in self._others:
                with contextlib.suppress(Exception):
                    hook._summary_writer.flush()

    def _save_checkpoints(self, step: int) -> bool:
        """Save with each saver hook, else with the session's own saver; False if there is none."""
        saver_hook = self._module.basic_session_run_hooks.CheckpointSaverHook
        savers = [hook for hook in self._others if isinstance(hook, saver_hook)]
        for hook in savers:
            hook._save(self._session, step)
        directory = getattr(self._creator, "_checkpoint_dir", None)
        saver = getattr(getattr(self._creator, "_scaffold", None), "saver", None)
        if not savers and directory and saver is not None:
            saver.save(self._session, os.path.join(str(directory), "model.ckpt"), global_step=step)
            return True
        return bool(savers)
