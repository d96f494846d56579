"""Servers and sessions of graph mode.

A server that was started with the addresses of others never learns new ones: a worker that comes back at another
address could never join. So a server knows only itself, and each session has the cluster in its own configuration; it
shares the variables with the other sessions all the same (TensorFlow's pull request 24466). Device filters keep a
session from waiting for workers that it does not need.

How a session begins: workers wait at the gate, and a chief keeps a model that is complete. TensorFlow's chief restores
the newest checkpoint whenever there is one. A chief that was restarted alone would roll back the model while the
workers train it; here it restores only if a variable on the servers has no value.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker.agent_connection import agent, note
from tf_ps_runner.worker.checkpoints import RestoredModel
from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, require_instance_attrs, require_params, wrap
from tf_ps_runner.worker.task import ClusterTask, is_chief, leave, task

POLL = 0.2
"""Seconds between two checks whether the model is ready, where TensorFlow waits for 30."""

_server_defs: list[Any] = []
"""The ServerDef of each server that was started here, with the cluster as the script has given it."""


class _ThisThread(threading.local):
    """`restoring` is the model of the chief's session that is being created in this thread."""

    restoring: RestoredModel | None = None


_this_thread = _ThisThread()
_has_model = threading.Event()
"""Set once the chief has a model: a later session of it is not the one that restores it."""


@patch_module(
    "tensorflow.python.training.server_lib", without="a worker that comes back at another address cannot join"
)
def change_server(module: Any) -> Sequence[Patch]:
    """Have each `Server` know only itself."""
    server = require_attr(module, "Server")
    require_params(server.__init__, "server_or_cluster_def", "job_name", "task_index", "protocol", "config", "start")
    require_instance_attrs(server.__init__, "_server_def")
    make_server_def = require_attr(module, "_make_server_def")

    def create(
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
        server_def = make_server_def(server_or_cluster_def, job_name, task_index, protocol, config)
        original(self, _alone(server_def), start=start)
        self._server_def = server_def
        _server_defs.append(server_def)

    return [wrap(server, "__init__", create)]


@patch_module(
    "tensorflow.python.training.server_lib",
    without="a worker that serves a chief is not reported as ready, and Ctrl-C ends no server",
)
def change_join(module: Any) -> Sequence[Patch]:
    """Report that a worker serves, and let Ctrl-C end a server."""

    def join(original: Any, self: Any) -> None:
        own_task = task()
        if own_task is not None and own_task.worker:
            agent().report("ready")
        in_main_thread = threading.current_thread() is threading.main_thread()
        if own_task is not None and in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # It waits outside of Python, where KeyboardInterrupt is never raised; so the kernel has to end it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        original(self)

    return [wrap(require_attr(module, "Server"), "join", join)]


@patch_module(
    "tensorflow.python.client.session", without="sessions know only the addresses that their servers were started with"
)
def change_session_cluster(module: Any) -> Sequence[Patch]:
    """Have each session on this process's server use the cluster of the script."""
    session = require_attr(module, "BaseSession")
    require_params(session.__init__, "target", "graph", "config")
    context, config_proto = require_attr(module, "context.context"), require_attr(module, "config_pb2.ConfigProto")
    require_attr(module, "context.Context.config")

    def create(original: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        own_task = task()
        server_def = server_at(target) if own_task is not None else None
        if own_task is not None and server_def is not None:
            with_cluster = config_proto()
            with_cluster.CopyFrom(context().config if config is None else config)
            _add_cluster(with_cluster, server_def, own_task)
            config = with_cluster
        original(self, target, graph, config)

    return [wrap(session, "__init__", create)]


@patch_module("tensorflow.python.client.session", without="workers do not wait until the chief has a complete model")
def change_session(module: Any) -> Sequence[Patch]:
    """Have workers wait at the gate."""
    session = require_attr(module, "BaseSession")
    require_params(session.__init__, "target", "graph", "config")

    def create(original: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        own_task = task()
        if own_task is None or server_at(target) is None:
            original(self, target, graph, config)
            return
        if own_task.worker and own_task.gated:
            _pass_gate()
        original(self, target, graph, config)
        if own_task.worker:
            agent().report_once("ready")
        elif own_task.chief and _this_thread.restoring is None and not _has_model.is_set():
            # A script that creates its session itself also creates and restores its model itself.
            _has_model.set()
            note("this script creates its session without a SessionManager: its workers are let in at once")
            RestoredModel().report(0)

    return [wrap(session, "__init__", create)]


@patch_module(
    "tensorflow.python.training.session_manager",
    without="a chief that is restarted goes back to the last checkpoint, and workers wait for 30 seconds",
)
def change_session_manager(module: Any) -> Sequence[Patch]:
    """Have a chief keep a complete model, and others look for it often."""
    manager = require_attr(module, "SessionManager")
    require_params(require_attr(manager, "prepare_session"), "master")
    for name in ("_model_ready", "_model_ready_for_local_init"):
        require_attr(manager, name)
    require_instance_attrs(manager.__init__, "_ready_op", "_ready_for_local_init_op")
    require_params(
        require_attr(manager, "_restore_checkpoint"),
        *("master", "saver", "checkpoint_dir", "checkpoint_filename_with_path", "wait_for_checkpoint", "config"),
    )
    read = require_attr(module, "_restore_checkpoint_and_maybe_run_saved_model_initializers")
    unreadable = require_attr(module, "errors.DataLossError"), require_attr(module, "errors.OutOfRangeError")
    checkpoint_state = require_attr(module, "checkpoint_management.get_checkpoint_state")
    verbosity, info = require_attr(module, "logging.get_verbosity"), require_attr(module, "logging.INFO")

    def prepare(original: Any, self: Any, master: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chief() or server_at(master) is None:
            return original(self, master, *args, **kwargs)
        _this_thread.restoring = model = RestoredModel()
        try:
            session = original(self, master, *args, **kwargs)
        finally:
            _this_thread.restoring = None
        _has_model.set()
        model.report(step_in(session))
        return session

    def restore(
        original: Any,
        self: Any,
        master: Any,
        saver: Any = None,
        checkpoint_dir: Any = None,
        checkpoint_filename_with_path: Any = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: Any = 7200,
        config: Any = None,
    ) -> Any:
        """A session, and whether its model is there."""
        model, path = _this_thread.restoring, checkpoint_filename_with_path
        if model is None or wait_for_checkpoint:
            return original(self, master, saver, checkpoint_dir, path, wait_for_checkpoint, max_wait_secs, config)
        session, _ = original(self, master, config=config)
        if _is_complete(self, session):
            model.how = "live"
        elif saver is None:
            return session, False
        elif path:
            restore_from(session, saver, path, model)
            return session, True
        elif not checkpoint_dir or not restore_newest(session, saver, str(checkpoint_dir), model):
            return session, False
        if saver is not None and checkpoint_dir:
            # The saver must know the older checkpoints, so that it deletes them in turn as before.
            state = checkpoint_state(checkpoint_dir)
            if state is not None:
                saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
        return session, True

    def restore_newest(session: Any, saver: Any, directory: str, model: RestoredModel) -> bool:
        while (path := model.newest(directory)) is not None:
            try:
                restore_from(session, saver, path, model)
                return True
            except unreadable as error:
                model.skip(path, error)
        return False

    def restore_from(session: Any, saver: Any, path: str, model: RestoredModel) -> None:
        if verbosity() > info:
            note(f"Restoring parameters from {path}")
        read(session, saver, path)
        model.how, model.path = "checkpoint", path

    return [
        _poll_often(manager),
        wrap(manager, "_restore_checkpoint", restore),
        wrap(manager, "prepare_session", prepare),
    ]


@patch_module("tensorflow.python.training.supervisor", without="a worker with a Supervisor may wait for 30 seconds")
def change_supervisor(module: Any) -> Sequence[Patch]:
    """Have others than the chief look for the model often, in older scripts."""
    return [_poll_often(require_attr(module, "Supervisor"))]


def _poll_often(owner: Any) -> Patch:
    """Have a class check every POLL seconds whether the model is ready, unless the script sets the interval."""
    require_params(owner.__init__, "recovery_wait_secs")
    signature = inspect.signature(owner.__init__)

    def create(original: Any, *args: Any, **kwargs: Any) -> None:
        if task() is not None and "recovery_wait_secs" not in signature.bind(*args, **kwargs).arguments:
            kwargs["recovery_wait_secs"] = POLL
        original(*args, **kwargs)

    return wrap(owner, "__init__", create)


def _is_complete(manager: Any, session: Any) -> bool:
    """Whether everything that a chief initialises has a value on the servers of this version."""
    if manager._ready_for_local_init_op is not None:
        return bool(manager._model_ready_for_local_init(session)[0])
    return manager._ready_op is not None and bool(manager._model_ready(session)[0])


def _pass_gate() -> None:
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


def server_at(target: Any) -> Any:
    """The ServerDef of this process's server that a session's target names; None for any other target."""
    name = target.decode() if isinstance(target, bytes) else str(target or "")
    if not name.startswith("grpc://"):
        return None
    host, _, port = name[len("grpc://") :].rpartition(":")
    for server_def in reversed(_server_defs):
        own_host, _, own_port = _address(server_def).rpartition(":")
        if port == own_port and host in (own_host, "localhost"):
            return server_def
    return None


def _add_cluster(config: Any, server_def: Any, own_task: ClusterTask) -> None:
    """Put the cluster of a ServerDef into a session's configuration, and have it wait for parameter servers only."""
    if not config.cluster_def.job:
        config.cluster_def.CopyFrom(server_def.cluster)
        config.experimental.share_session_state_in_clusterspec_propagation = True
    if not config.device_filters:
        own = f"/job:{own_task.role}" if own_task.chief else f"/job:{own_task.role}/task:{own_task.index}"
        config.device_filters.extend(["/job:ps", own])


def _address(server_def: Any) -> str:
    for job in server_def.cluster.job:
        if job.name == server_def.job_name:
            # Read like this, a missing task is not created.
            return str(dict(job.tasks).get(server_def.task_index, ""))
    return ""


def _alone(server_def: Any) -> Any:
    """The same server in a cluster of its own; unchanged if the script has left its address out."""
    address = _address(server_def)
    if not address:
        return server_def
    alone = type(server_def)()
    alone.CopyFrom(server_def)
    del alone.cluster.job[:]
    if server_def.job_name != "ps":
        # A session's cluster must not have the name that its own server was started with.
        alone.job_name, alone.task_index = "localhost", 0
    job = alone.cluster.job.add()
    job.name = alone.job_name
    job.tasks[alone.task_index] = address
    return alone
