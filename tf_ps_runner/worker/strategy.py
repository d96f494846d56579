"""`ParameterServerStrategy` with a `ClusterCoordinator`: only the chief runs the script, the others serve it.

The chief counts and reports the closures that were run, and leaves when the agent says so: closures that no worker has
begun are dropped, running ones are waited for, and every `CheckpointManager` of the script saves. So no step is lost,
and what was dropped is scheduled again by the script in the next version. If a server is gone, the chief waits to be
ended, because the script cannot continue without it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tf_ps_runner.worker import checkpoints, live_model, shards
from tf_ps_runner.worker.agent_connection import TaskOrder, agent, note
from tf_ps_runner.worker.patching import Patch, after_import, require_attr, require_instance_attrs, require_params, wrap
from tf_ps_runner.worker.task import leave, task

BETWEEN_STEPS = 0.05
"""Seconds between two reports of the step: with a server, unreported steps of up to that long are lost."""

SERVER_GONE = 30.0
"""Seconds that a chief waits to be ended after TensorFlow has reported that a server does not answer. The agent knows a
dead server at once, and an unresponsive one within a few probes. After that the error is the script's own."""

MAX_SKIPPED = 20
"""Skipped checkpoints that are reported."""


class _Chief:
    """What the chief of this process knows of its training."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clusters: list[Any] = []
        self.managers: list[Any] = []
        self.plain: tuple[Any, str] | None = None
        self.path: str | None = None
        self.skipped: list[str] = []
        self.damaged: list[str] = []
        self.begun = False
        self.counted = False
        self.done = 0
        self.step = 0
        self.told = 0.0

    @property
    def checkpoints(self) -> list[Any]:
        """What the script saves: each `tf.train.Checkpoint` that was seen."""
        plain = [self.plain[0]] if self.plain is not None else []
        return [*(manager.checkpoint for manager in self.managers), *plain]

    def look(self) -> None:
        """Read the step of the model; if the script has no step counter, closures are counted."""
        found = checkpoints.read_step(self.managers, self.checkpoints)
        with self.lock:
            self.counted = found is not None
            if found is not None:
                self.step, self.done = found, 0
            elif not self.begun:
                self.step = max(0, checkpoints.step_of(self.path or ""))

    def finished(self) -> None:
        """One closure was run."""
        with self.lock:
            self.done += 1
            now = time.monotonic()
            if now < self.told + BETWEEN_STEPS:
                return
            self.told = now
            step = self.step + self.done
        agent().report("step", step=step)


_chief = _Chief()
_scheduling = threading.local()
_leaving = threading.Lock()


def register() -> None:
    """Have the modules of TensorFlow patched once they are imported."""
    lost = "a chief with ParameterServerStrategy goes back to its last checkpoint whenever it is started again"
    steps = "a planned change of servers loses the steps since the last checkpoint"
    after_import("tensorflow.python.ops.resource_variable_ops", lost, live_model.change_variables)
    after_import("tensorflow.python.distribute.parameter_server_strategy_v2", lost, change_strategy)
    after_import("tensorflow.python.distribute.coordinator.cluster_coordinator", steps, change_coordinator)
    after_import("tensorflow.python.distribute.coordinator.values", steps, change_values)
    after_import("tensorflow.python.checkpoint.checkpoint_management", steps, change_management)
    after_import("tensorflow.python.checkpoint.checkpoint", steps, change_checkpoint)


def change_strategy(module: Any) -> Sequence[Patch]:
    """Look for a live model once connected. For `...distribute.parameter_server_strategy_v2`."""
    strategy = require_attr(module, "ParameterServerStrategyV2")

    def connect(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        operations, device, _ = _parts()
        live_model.look(operations, device)
        if _leads():
            # Without the patches of the coordinator this process may have nothing else to send.
            agent().report_missing_patches()

    return [wrap(strategy, "_connect_to_cluster", connect)]


def change_coordinator(module: Any) -> Sequence[Patch]:
    """Count, leave and wait. For `...distribute.coordinator.cluster_coordinator`."""
    coordinator, closure = require_attr(module, "ClusterCoordinator"), require_attr(module, "Closure")
    resource, cluster = require_attr(module, "ResourceClosure"), require_attr(module, "Cluster")
    queue = require_attr(module, "_CoordinatedClosureQueue")
    errors = require_attr(module, "errors")
    for name in ("CancelledError", "UnavailableError", "AbortedError"):
        require_attr(errors, name)
    # What `_drop` and `_leave` use when the chief has to save: then it would be too late to find it missing.
    require_attr(queue, "inflight_closure_count")
    require_instance_attrs(
        queue.__init__,
        *("_queue", "_queue_lock", "_queue_free_slot_condition"),
        *("_stop_waiting_condition", "_no_inflight_closure_condition"),
    )
    require_attr(closure, "mark_cancelled")
    require_instance_attrs(cluster.__init__, "closure_queue")

    def make_cluster(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _leads():
            if not _chief.clusters:
                # The queues go back to the state of the model before a part is taken.
                shards.before_take(_before_take)
            _chief.clusters.append(self)

    def make_closure(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tf_ps_batches = getattr(_scheduling, "batches", None) or []
        _scheduling.batches = []

    def execute(original: Any, self: Any, worker: Any) -> None:
        original(self, worker)
        if not isinstance(self, resource) and _leads():
            for batch in self._tf_ps_batches:
                batch.used()
            _chief.finished()

    def schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _leads():
            return original(self, *args, **kwargs)
        _leave_if_told()
        _scheduling.batches = shards.claim()
        found = _until_told(errors, original, self, *args, **kwargs)
        _begin()
        return found

    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _leads():
            return original(self, *args, **kwargs)
        _leave_if_told()
        found = _until_told(errors, original, self, *args, **kwargs)
        _leave_if_told()
        return found

    return [
        wrap(cluster, "__init__", make_cluster),
        wrap(closure, "__init__", make_closure),
        wrap(closure, "execute_on", execute),
        wrap(coordinator, "schedule", schedule),
        wrap(coordinator, "join", call),
        wrap(coordinator, "done", call),
        wrap(coordinator, "fetch", call),
    ]


def change_values(module: Any) -> Sequence[Patch]:
    """Leave while waiting for a result that never comes. For `...distribute.coordinator.values`."""
    value, errors = require_attr(module, "RemoteValueImpl"), require_attr(module, "errors")
    for name in ("CancelledError", "UnavailableError", "AbortedError"):
        require_attr(errors, name)

    def wait(original: Any, self: Any) -> None:
        # The coordinator's threads for the workers call this as well, and must not leave.
        if threading.current_thread() is not threading.main_thread() or not _leads():
            original(self)
            return
        _until_told(errors, original, self)

    return [wrap(value, "_wait_and_maybe_error", wait)]


def change_management(module: Any) -> Sequence[Patch]:
    """Find the script's checkpoint managers. For `tensorflow.python.checkpoint.checkpoint_management`."""
    manager = require_attr(module, "CheckpointManager")
    require_params(manager.__init__, "checkpoint", "directory", "max_to_keep")
    require_params(manager.save, "check_interval")
    require_attr(manager, "checkpoint"), require_attr(manager, "directory")
    require_instance_attrs(manager.__init__, "_step_counter")

    def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _leads():
            _chief.managers.append(self)
            _newest(self.directory)

    return [wrap(manager, "__init__", make)]


def change_checkpoint(module: Any) -> Sequence[Patch]:
    """Follow what is saved and restored. For `tensorflow.python.checkpoint.checkpoint`."""
    checkpoint, errors = require_attr(module, "Checkpoint"), require_attr(module, "errors_impl")
    for name in ("_write", "read", "save", "_trackable_children"):
        require_attr(checkpoint, name)
    require_attr(errors, "DataLossError"), require_attr(errors, "OutOfRangeError")

    def write(original: Any, self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if not _leads() or not _chief.clusters:
            return original(self, file_prefix, *args, **kwargs)
        with _chief.lock:
            path = os.fspath(file_prefix)
            checkpoints.save_begins(path)
            _chief.look()
            step = _chief.step + _chief.done
            written = original(self, file_prefix, *args, **kwargs)
            checkpoints.was_saved(path, step)
            return written

    def save(original: Any, self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if _leads():
            _chief.plain = self, os.fspath(file_prefix)
        return original(self, file_prefix, *args, **kwargs)

    def read(original: Any, self: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not _leads() or not save_path:
            return original(self, save_path, *args, **kwargs)
        path = os.fspath(save_path)
        while True:
            try:
                status = original(self, path, *args, **kwargs)
            except (errors.DataLossError, errors.OutOfRangeError) as error:
                words = f"{path} is not whole ({str(error).splitlines()[0][:200]})"
                note(words)
                _chief.skipped.append(words)
                _chief.damaged.append(path)
                older = _newest(os.path.dirname(path))
                if older is None:
                    raise
                path = older
            else:
                _chief.path = path
                if not live_model.found():
                    note(f"Restoring parameters from {path}")
                return status

    return [wrap(checkpoint, "_write", write), wrap(checkpoint, "save", save), wrap(checkpoint, "read", read)]


def save_all() -> int:
    """Save everything that the script saves, and return the number of checkpoints."""
    with _chief.lock:
        for manager in _chief.managers:
            manager.save(check_interval=False)
        if not _chief.managers and _chief.plain is not None:
            checkpoint, prefix = _chief.plain
            checkpoint.save(prefix)
            return 1
        return len(_chief.managers)


def leads_coordinator() -> bool:
    """Whether this process is a chief with a coordinator."""
    return _leads() and bool(_chief.clusters)


def _leads() -> bool:
    own_task = task()
    return own_task is not None and own_task.chief


def _told(order: TaskOrder) -> bool:
    return order.pause or order.save


def _begin() -> None:
    """The first closure is on its way, or data for it is requested: the model is complete."""
    if _chief.begun:
        return
    operations, device, constant = _parts()
    differs = live_model.begin(operations, device, constant)
    if differs is not None:
        note(f"the model on the servers is not that of this script ({differs}): it is left for the newest checkpoint")
        leave()
    _chief.look()
    _chief.begun = True
    how, path = ("checkpoint", _chief.path) if _chief.path is not None else ("fresh", None)
    if live_model.found():
        how, path = "live", None
        note(f"this chief goes on in the live model{f', at step {_chief.step}' if _chief.counted else ''}")
    # The number in a checkpoint's name may be that of an epoch.
    step = _chief.step if _chief.counted or how == "fresh" else -1
    checkpoints.was_restored(path, step, how, [words[:500] for words in _chief.skipped][:MAX_SKIPPED])
    if not _chief.checkpoints:
        note("this script has no CheckpointManager: what it learns is lost when a parameter server is")
    threading.Thread(target=_watch, name="tf-ps-run-order", daemon=True).start()


def _before_take() -> None:
    _begin()
    _leave_if_told()


def _watch() -> None:
    """Drop what no worker has begun once the chief has to leave, so that the threads which wait for it continue. A
    thread may wait for a part of the data until some of that is used, which now never happens: the chief leaves from
    there."""
    if agent().wait_for(_told):
        for cluster in _chief.clusters:
            _drop(cluster.closure_queue)
        if shards.is_taking():
            _leave()


def _drop(queue: Any) -> None:
    with queue._queue_lock:
        while not queue._queue.empty():
            queue._queue.get(block=False).mark_cancelled()
        queue._queue_free_slot_condition.notify_all()
        queue._stop_waiting_condition.notify_all()


def _finish(queue: Any) -> None:
    """Wait for the running closures, and drop the others."""
    while True:
        # A closure of a worker that is gone comes back into the queue.
        _drop(queue)
        with queue._queue_lock:
            if queue.inflight_closure_count == 0:
                return
            queue._no_inflight_closure_condition.wait()


def _leave_if_told() -> None:
    if _told(agent().order):
        _leave()


def _leave() -> NoReturn:
    """Wait for running closures, save, and end this process. Only the first thread that comes here does it."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    try:
        for cluster in _chief.clusters:
            _finish(cluster.closure_queue)
    except Exception as error:
        # The model is saved all the same: it may lack the steps that are running now.
        note(f"the steps that run now are not waited for: {type(error).__name__}: {str(error)[:500]}")
    try:
        if save_all() == 0:
            note("this script has no CheckpointManager, so that nothing was saved")
    except Exception as error:
        note(f"the model could not be saved: {type(error).__name__}: {str(error)[:500]}")
    leave()


def _until_told(errors: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the original, and do not come back with the error of a server that has gone, or of a closure that was
    dropped: this process leaves."""
    try:
        return original(*args, **kwargs)
    except errors.CancelledError:
        _leave_if_told()
        raise
    except (errors.UnavailableError, errors.AbortedError):
        note("a parameter server does not answer; waiting for the cluster to change")
        version = int(os.environ.get("TF_PS_VERSION") or agent().order.version)
        if agent().wait_for(lambda order: order.version != version or _told(order), SERVER_GONE) or agent().gone:
            leave()
        raise


def _newest(directory: str) -> str | None:
    """The newest complete checkpoint. Skipped ones were reported when TensorFlow looked for it."""
    path, skipped = checkpoints.newest_complete(directory, _chief.damaged)
    _chief.skipped += [words for words in skipped if words not in _chief.skipped]
    return path


def _parts() -> tuple[Any, Any, Any]:
    """TensorFlow's operations on variables, its `device`, and how to make a constant text."""
    from tensorflow.python.framework import constant_op, dtypes, ops
    from tensorflow.python.ops import gen_resource_variable_ops

    return gen_resource_variable_ops, ops.device, lambda value: constant_op.constant(value, dtypes.string)
