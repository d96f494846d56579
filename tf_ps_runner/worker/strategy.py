"""`ParameterServerStrategy` with a `ClusterCoordinator`: only the chief runs the script, the others serve it.

The chief counts and reports the closures that were run, and leaves when the agent orders it: closures that no worker
has begun are dropped, running ones are waited for, and every `CheckpointManager` of the script saves. So no step is
lost, and what was dropped is scheduled again by the script in the next version. If a server is gone, the chief waits to
be ended, because the script cannot continue without it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tf_ps_runner.worker import checkpoints, live_model, shards
from tf_ps_runner.worker.agent_connection import TaskOrder, agent, note, noted
from tf_ps_runner.worker.checkpoints import RestoredModel
from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, require_instance_attrs, require_params, wrap
from tf_ps_runner.worker.task import is_chief, leave

REPORT_INTERVAL = 0.05
"""Seconds between two reports of the step: with a server, unreported steps of up to that long are lost."""

SERVER_GONE = 30.0
"""Seconds that a chief waits to be ended after TensorFlow has reported that a server does not answer. The agent knows a
dead server at once, and an unresponsive one within a few probes. After that the error is the script's own."""

MODEL_IS_LOST = "a chief with ParameterServerStrategy goes back to its last checkpoint whenever it is restarted"
STEPS_ARE_LOST = "a planned change of servers loses the steps since the last checkpoint"


class _Chief:
    """What the chief of this process knows of its training."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clusters: list[Any] = []
        self.managers: list[Any] = []
        # A `tf.train.Checkpoint` that saves without a manager, and the prefix of its files.
        self.unmanaged: tuple[Any, str] | None = None
        self.model = RestoredModel()
        self.begun = False
        # Whether the script has a step counter. The step is `step` and the closures that were run since it was read.
        self.has_counter = False
        self.step = 0
        self.closures = 0
        self.reported_at = 0.0

    @property
    def checkpoints(self) -> list[Any]:
        """Each `tf.train.Checkpoint` that the script saves, as far as it is known."""
        unmanaged = [self.unmanaged[0]] if self.unmanaged is not None else []
        return [*(manager.checkpoint for manager in self.managers), *unmanaged]

    def read_step(self) -> None:
        """Read the step of the model; if the script has no step counter, closures are counted."""
        found = checkpoints.read_step(self.managers, self.checkpoints)
        with self.lock:
            self.has_counter = found is not None
            if found is not None:
                self.step, self.closures = found, 0
            elif not self.begun:
                self.step = max(0, checkpoints.step_of(self.model.path or ""))

    def count_closure(self) -> None:
        with self.lock:
            self.closures += 1
            now = time.monotonic()
            if now < self.reported_at + REPORT_INTERVAL:
                return
            self.reported_at = now
            step = self.step + self.closures
        agent().report("step", step=step)


_chief = _Chief()
_scheduling = threading.local()
_leaving = threading.Lock()


@patch_module("tensorflow.python.distribute.parameter_server_strategy_v2", without=MODEL_IS_LOST)
def change_strategy(module: Any) -> Sequence[Patch]:
    """Look for a live model once connected."""

    def connect(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_chief():
            live_model.look()
            # Without the patches of the coordinator this process may have nothing else to send.
            agent().report_missing_patches()

    return [wrap(require_attr(module, "ParameterServerStrategyV2"), "_connect_to_cluster", connect)]


@patch_module("tensorflow.python.distribute.coordinator.cluster_coordinator", without=STEPS_ARE_LOST)
def change_coordinator(module: Any) -> Sequence[Patch]:
    """Count closures, leave when ordered, and wait when a server is gone."""
    coordinator, closure = require_attr(module, "ClusterCoordinator"), require_attr(module, "Closure")
    resource, cluster = require_attr(module, "ResourceClosure"), require_attr(module, "Cluster")
    queue = require_attr(module, "_CoordinatedClosureQueue")
    wait_if_gone = _waiting_if_gone(module)
    # What `_drop` and `_leave` use when the chief has to save: then it would be too late to find it missing.
    require_attr(queue, "inflight_closure_count")
    require_instance_attrs(
        queue.__init__,
        *("_queue", "_queue_lock", "_queue_free_slot_condition"),
        *("_stop_waiting_condition", "_no_inflight_closure_condition"),
    )
    require_attr(closure, "mark_cancelled")
    require_instance_attrs(cluster.__init__, "closure_queue")

    def create_cluster(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_chief():
            if not _chief.clusters:
                # The queues go back to the state of the model before a part is taken.
                shards.before_take(_before_take)
            _chief.clusters.append(self)

    def create_closure(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tf_ps_batches = getattr(_scheduling, "batches", None) or []
        _scheduling.batches = []

    def execute(original: Any, self: Any, worker: Any) -> None:
        original(self, worker)
        if not isinstance(self, resource) and is_chief():
            for batch in self._tf_ps_batches:
                batch.used()
            _chief.count_closure()

    def schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chief():
            return original(self, *args, **kwargs)
        _leave_if_ordered()
        _scheduling.batches = shards.claim()
        result = wait_if_gone(original, self, *args, **kwargs)
        _begin()
        return result

    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chief():
            return original(self, *args, **kwargs)
        _leave_if_ordered()
        result = wait_if_gone(original, self, *args, **kwargs)
        _leave_if_ordered()
        return result

    return [
        wrap(cluster, "__init__", create_cluster),
        wrap(closure, "__init__", create_closure),
        wrap(closure, "execute_on", execute),
        wrap(coordinator, "schedule", schedule),
        *(wrap(coordinator, name, call) for name in ("join", "done", "fetch")),
    ]


@patch_module("tensorflow.python.distribute.coordinator.values", without=STEPS_ARE_LOST)
def change_values(module: Any) -> Sequence[Patch]:
    """Leave while waiting for a result that never comes."""
    wait_if_gone = _waiting_if_gone(module)

    def wait(original: Any, self: Any) -> None:
        # The coordinator's threads for the workers call this as well, and must not leave.
        if threading.current_thread() is not threading.main_thread() or not is_chief():
            original(self)
        else:
            wait_if_gone(original, self)

    return [wrap(require_attr(module, "RemoteValueImpl"), "_wait_and_maybe_error", wait)]


@patch_module("tensorflow.python.checkpoint.checkpoint_management", without=STEPS_ARE_LOST)
def change_management(module: Any) -> Sequence[Patch]:
    """Find the script's checkpoint managers."""
    manager = require_attr(module, "CheckpointManager")
    require_params(manager.__init__, "checkpoint", "directory", "max_to_keep")
    require_params(manager.save, "check_interval")
    require_attr(manager, "checkpoint"), require_attr(manager, "directory")
    require_instance_attrs(manager.__init__, "_step_counter")

    def create(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_chief():
            _chief.managers.append(self)
            # For the skipped ones: which one is restored is decided when TensorFlow searches.
            _chief.model.newest(self.directory)

    return [wrap(manager, "__init__", create)]


@patch_module("tensorflow.python.checkpoint.checkpoint", without=STEPS_ARE_LOST)
def change_checkpoint(module: Any) -> Sequence[Patch]:
    """Follow what is saved and restored."""
    checkpoint = require_attr(module, "Checkpoint")
    require_attr(checkpoint, "_trackable_children")
    unreadable = require_attr(module, "errors_impl.DataLossError"), require_attr(module, "errors_impl.OutOfRangeError")

    def write(original: Any, self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chief() or not _chief.clusters:
            return original(self, file_prefix, *args, **kwargs)
        with _chief.lock:
            path = os.fspath(file_prefix)
            checkpoints.before_save(path)
            _chief.read_step()
            step = _chief.step + _chief.closures
            written = original(self, file_prefix, *args, **kwargs)
            checkpoints.after_save(path, step)
            return written

    def save(original: Any, self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if is_chief():
            _chief.unmanaged = self, os.fspath(file_prefix)
        return original(self, file_prefix, *args, **kwargs)

    def read(original: Any, self: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chief() or not save_path:
            return original(self, save_path, *args, **kwargs)
        path = os.fspath(save_path)
        while True:
            try:
                status = original(self, path, *args, **kwargs)
            except unreadable as error:
                note(_chief.model.skip(path, error))
                older = _chief.model.newest(os.path.dirname(path))
                if older is None:
                    raise
                path = older
            else:
                _chief.model.path = path
                if not live_model.found():
                    note(f"Restoring parameters from {path}")
                return status

    return [wrap(checkpoint, "_write", write), wrap(checkpoint, "save", save), wrap(checkpoint, "read", read)]


def save_all() -> int:
    """Save everything that the script of a chief saves, and return the number of checkpoints; 0 in other tasks."""
    with _chief.lock:
        for manager in _chief.managers:
            manager.save(check_interval=False)
        if not _chief.managers and _chief.unmanaged is not None:
            checkpoint, prefix = _chief.unmanaged
            checkpoint.save(prefix)
            return 1
        return len(_chief.managers)


def _begin() -> None:
    """The first closure is on its way, or data for it is requested: the model is complete."""
    if _chief.begun:
        return
    difference = live_model.begin()
    if difference is not None:
        note(f"the model on the servers is not that of this script ({difference}): the newest checkpoint is used")
        leave()
    _chief.read_step()
    _chief.begun = True
    model = _chief.model
    if live_model.found():
        model.how, model.path = "live", None
        note(f"this chief continues with the live model{f', at step {_chief.step}' if _chief.has_counter else ''}")
    elif model.path is not None:
        model.how = "checkpoint"
    # The number in a checkpoint's name may be that of an epoch.
    model.report(_chief.step if _chief.has_counter or model.how == "fresh" else -1)
    if not _chief.checkpoints:
        note("this script has no CheckpointManager: its model is lost with a parameter server")
    threading.Thread(target=_watch, name="tf-ps-run-order", daemon=True).start()


def _before_take() -> None:
    _begin()
    _leave_if_ordered()


def _must_leave(order: TaskOrder) -> bool:
    return order.pause or order.save


def _watch() -> None:
    """Drop what no worker has begun once the chief has to leave, so that the threads which wait for it continue. A
    thread may wait for a part of the data until some of that is used, which now never happens: the chief leaves from
    there."""
    if agent().wait_for(_must_leave):
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


def _leave_if_ordered() -> None:
    if _must_leave(agent().order):
        _leave()


def _leave() -> NoReturn:
    """Wait for running closures, save, and end this process. Only the first thread that comes here does it."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    # Otherwise the model is saved all the same: it may lack the steps that are running now.
    with noted("the running steps are not waited for"):
        for cluster in _chief.clusters:
            _finish(cluster.closure_queue)
    with noted("the model could not be saved"):
        if save_all() == 0:
            note("this script has no CheckpointManager, so nothing was saved")
    leave()


def _waiting_if_gone(module: Any) -> Callable[..., Any]:
    """Calls a function, and does not return with the error of a server that has gone, or of a closure that was dropped:
    this process leaves then. Raises MissingAttribute."""
    cancelled, unavailable, aborted = (
        require_attr(module, f"errors.{name}") for name in ("CancelledError", "UnavailableError", "AbortedError")
    )

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except cancelled:
            _leave_if_ordered()
            raise
        except (unavailable, aborted):
            note("a parameter server does not answer; waiting for the cluster to change")
            version = int(os.environ.get("TF_PS_VERSION") or agent().order.version)
            if agent().wait_for(lambda order: order.version != version or _must_leave(order), SERVER_GONE) or (
                agent().gone
            ):
                leave()
            raise

    return call
