"""Servers and sessions of graph mode.

A server that was started with the addresses of others believes them for ever: a worker that comes back at another
address would never join. So a server knows only itself, and each session brings the cluster in its own configuration;
it shares the variables with the other sessions all the same (TensorFlow's pull request 24466). Device filters keep a
session from waiting for workers that it has nothing to do with.

How a session begins: workers wait at the gate, and a chief keeps a model that is complete. TensorFlow's chief restores
the newest checkpoint whenever there is one. A chief that was started again alone would so roll back the model under the
workers, which go on; here it restores only if a variable on the servers has no value.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker import checkpoints
from tf_ps_runner.worker.agent_connection import agent, note
from tf_ps_runner.worker.patching import Patch, require_attr, require_instance_attrs, require_params, set_default, wrap
from tf_ps_runner.worker.task import ClusterTask, leave, task

_served: list[Any] = []
"""The ServerDef of each server that was started here, with the cluster as the script has given it."""


def change_server(module: Any) -> Sequence[Patch]:
    """Have each `Server` know only itself. For `tensorflow.python.training.server_lib`."""
    server = require_attr(module, "Server")
    require_params(server.__init__, "server_or_cluster_def", "job_name", "task_index", "protocol", "config", "start")
    require_instance_attrs(server.__init__, "_server_def")
    make = require_attr(module, "_make_server_def")

    def start(
        original: Any,
        self: Any,
        server_or_cluster_def: Any,
        job_name: Any = None,
        task_index: Any = None,
        protocol: Any = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        if task() is None:
            original(self, server_or_cluster_def, job_name, task_index, protocol, config, start)
            return
        whole = make(server_or_cluster_def, job_name, task_index, protocol, config)
        original(self, _alone(whole), start=start)
        self._server_def = whole
        _served.append(whole)

    return [wrap(server, "__init__", start)]


def change_join(module: Any) -> Sequence[Patch]:
    """Report that a worker serves, and let Ctrl-C end a server. For `tensorflow.python.training.server_lib`."""

    def join(original: Any, self: Any) -> None:
        own_task = task()
        if own_task is not None and own_task.worker:
            agent().report("ready")
        if own_task is not None and _interrupts():
            # It waits outside of Python, where KeyboardInterrupt is never raised; so the kernel has to end it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        original(self)

    return [wrap(require_attr(module, "Server"), "join", join)]


def _interrupts() -> bool:
    """Whether SIGINT has Python's handler, and this thread may change that."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def change_session_cluster(module: Any) -> Sequence[Patch]:
    """Have each session on this process's server bring the cluster. For `tensorflow.python.client.session`."""
    session = require_attr(module, "BaseSession")
    require_params(session.__init__, "target", "graph", "config")
    context, config_pb2 = require_attr(module, "context"), require_attr(module, "config_pb2")
    require_attr(context, "context"), require_attr(require_attr(context, "Context"), "config")

    def begin(original: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        own_task = task()
        whole = served_at(target) if own_task is not None else None
        if own_task is not None and whole is not None:
            with_cluster = config_pb2.ConfigProto()
            with_cluster.CopyFrom(context.context().config if config is None else config)
            bring(with_cluster, whole, own_task)
            config = with_cluster
        original(self, target, graph, config)

    return [wrap(session, "__init__", begin)]


def bring(config: Any, whole: Any, own_task: ClusterTask) -> None:
    """Put the cluster of a ServerDef into a session's configuration, and let it wait for parameter servers only."""
    if not config.cluster_def.job:
        config.cluster_def.CopyFrom(whole.cluster)
        config.experimental.share_session_state_in_clusterspec_propagation = True
    if not config.device_filters:
        own = f"/job:{own_task.role}" if own_task.chief else f"/job:{own_task.role}/task:{own_task.index}"
        config.device_filters.extend(["/job:ps", own])


def served_at(target: Any) -> Any:
    """The ServerDef of this process's server that a session's target names; None for any other target."""
    name = target.decode() if isinstance(target, bytes) else str(target or "")
    if not name.startswith("grpc://"):
        return None
    host, _, port = name[len("grpc://") :].rpartition(":")
    for whole in reversed(_served):
        own_host, _, own_port = _address(whole).rpartition(":")
        if port == own_port and host in (own_host, "localhost"):
            return whole
    return None


def _address(whole: Any) -> str:
    for job in whole.cluster.job:
        if job.name == whole.job_name:
            # Read like this, a missing task is not created.
            return str(dict(job.tasks).get(whole.task_index, ""))
    return ""


def _alone(whole: Any) -> Any:
    """The same server in a cluster of its own; unchanged if the script has left its address out."""
    address = _address(whole)
    if not address:
        return whole
    alone = type(whole)()
    alone.CopyFrom(whole)
    del alone.cluster.job[:]
    if whole.job_name != "ps":
        # A session's cluster must not have the name that its own server was started with.
        alone.job_name, alone.task_index = "localhost", 0
    job = alone.cluster.job.add()
    job.name = alone.job_name
    job.tasks[alone.task_index] = address
    return alone


POLL = 0.2
"""Seconds between two checks whether the model is ready, where TensorFlow waits for 30."""

MAX_SKIPPED = 20
"""Skipped checkpoints that are reported."""


@dataclasses.dataclass
class _Beginning:
    """How the chief's session of this thread got its model."""

    how: str = "fresh"
    path: str | None = None
    skipped: list[str] = dataclasses.field(default_factory=list)


class _Here(threading.local):
    beginning: _Beginning | None = None


_here = _Here()
_told: set[str] = set()
"""`restored`, once it was reported: a later session of a chief is not the one with the model."""


def change_session(module: Any) -> Sequence[Patch]:
    """Have workers wait at the gate. For `tensorflow.python.client.session`."""
    session = require_attr(module, "BaseSession")
    require_params(session.__init__, "target", "graph", "config")

    def begin(original: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        own_task = task()
        if own_task is None or served_at(target) is None:
            original(self, target, graph, config)
            return
        if own_task.worker and own_task.gated:
            pass_gate()
        original(self, target, graph, config)
        if own_task.worker:
            agent().report_once("ready")
        elif own_task.chief and _here.beginning is None and "restored" not in _told:
            # A script that creates its session itself also creates and restores its model itself.
            _told.add("restored")
            note("this script makes its session without a SessionManager: its workers are let in at once")
            checkpoints.was_restored(None, 0, "fresh", [])

    return [wrap(session, "__init__", begin)]


def change_session_manager(module: Any) -> Sequence[Patch]:
    """Have a chief keep a complete model, and others look for it often. For `...python.training.session_manager`."""
    manager = require_attr(module, "SessionManager")
    waits = set_default(manager, "__init__", "recovery_wait_secs", POLL, when=lambda: task() is not None)
    restore = _Restore(module)
    require_params(manager.prepare_session, "master")

    def prepare(original: Any, self: Any, master: Any, *args: Any, **kwargs: Any) -> Any:
        own_task = task()
        if own_task is None or not own_task.chief or served_at(master) is None:
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
    """The same for older scripts. For `tensorflow.python.training.supervisor`."""
    supervisor = require_attr(module, "Supervisor")
    return [set_default(supervisor, "__init__", "recovery_wait_secs", POLL, when=lambda: task() is not None)]


def pass_gate() -> None:
    """Wait until the chief has a complete model; leave if the cluster is about to change before that."""
    agent().wait_for(lambda order: order.open or order.pause or order.ending)
    if agent().order.pause:
        leave()


def step_in(session: Any) -> int:
    """The global step of the model in a session's servers; 0 if the graph has none."""
    from tensorflow.python.training import training_util

    with session.graph.as_default():
        step = training_util.get_global_step(session.graph)
    return 0 if step is None else max(0, int(training_util.global_step(session, step)))


class _Restore:
    """`SessionManager._restore_checkpoint` for a chief: creates a session, and says whether its model is there."""

    def __init__(self, module: Any) -> None:
        self._read = require_attr(module, "_restore_checkpoint_and_maybe_run_saved_model_initializers")
        self._errors = require_attr(module, "errors")
        self._management = require_attr(module, "checkpoint_management")
        self._logging = require_attr(module, "logging")
        manager = require_attr(module, "SessionManager")
        require_attr(manager, "_model_ready"), require_attr(manager, "_model_ready_for_local_init")
        require_instance_attrs(manager.__init__, "_ready_op", "_ready_for_local_init_op")
        require_attr(self._errors, "DataLossError"), require_attr(self._errors, "OutOfRangeError")
        require_params(
            require_attr(manager, "_restore_checkpoint"),
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
        """Whether everything that a chief initialises has a value on the servers of this version."""
        if manager._ready_for_local_init_op is not None:
            return bool(manager._model_ready_for_local_init(session)[0])
        return manager._ready_op is not None and bool(manager._model_ready(session)[0])

    def _restore_newest(self, session: Any, saver: Any, directory: str, beginning: _Beginning) -> bool:
        damaged: list[str] = []
        while True:
            path, skipped = checkpoints.newest_complete(directory, damaged)
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
        """Have the saver know the older checkpoints, so that it deletes them in turn as before."""
        state = self._management.get_checkpoint_state(directory)
        if state is not None:
            saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
