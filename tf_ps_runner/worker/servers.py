"""A server of TensorFlow that knows only itself, and sessions that bring the cluster along.

A server that was started with the addresses of others believes them for ever: a worker that comes back at another
address would never join. With the cluster in the session's own configuration each session tells the servers where
everybody is, and shares the variables with the other sessions all the same (TensorFlow's pull request 24466). Filters
keep a session from waiting for workers that it has nothing to do with.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker.channel import channel
from tf_ps_runner.worker.patching import Patch, assigns, place, takes, wrap
from tf_ps_runner.worker.task import Task, task

_served: list[Any] = []
"""The ServerDef of each server that was started here, with the cluster as the script has given it."""


def change_server(module: Any) -> Sequence[Patch]:
    """Have each `Server` know only itself. For `tensorflow.python.training.server_lib`."""
    server = place(module, "Server")
    takes(server.__init__, "server_or_cluster_def", "job_name", "task_index", "protocol", "config", "start")
    assigns(server.__init__, "_server_def")
    make = place(module, "_make_server_def")

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
    """Say that a worker serves, and let whoever serves end. For `tensorflow.python.training.server_lib`."""

    def join(original: Any, self: Any) -> None:
        mine = task()
        if mine is not None and mine.worker:
            channel().say("ready")
        if mine is not None and _interrupts():
            # It waits outside of Python, where KeyboardInterrupt is never raised; so the kernel is to end it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        original(self)

    return [wrap(place(module, "Server"), "join", join)]


def _interrupts() -> bool:
    """Whether SIGINT is Python's, and this thread may change that."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def change_session(module: Any) -> Sequence[Patch]:
    """Have each session on our own server bring the cluster along. For `tensorflow.python.client.session`."""
    session = place(module, "BaseSession")
    takes(session.__init__, "target", "graph", "config")
    context, config_pb2 = place(module, "context"), place(module, "config_pb2")
    place(context, "context"), place(place(context, "Context"), "config")

    def begin(original: Any, self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        mine = task()
        whole = served_at(target) if mine is not None else None
        if mine is not None and whole is not None:
            with_cluster = config_pb2.ConfigProto()
            with_cluster.CopyFrom(context.context().config if config is None else config)
            bring(with_cluster, whole, mine)
            config = with_cluster
        original(self, target, graph, config)

    return [wrap(session, "__init__", begin)]


def bring(config: Any, whole: Any, mine: Task) -> None:
    """Put the cluster of a ServerDef into a session's configuration, and let it wait for parameter servers alone."""
    if not config.cluster_def.job:
        config.cluster_def.CopyFrom(whole.cluster)
        config.experimental.share_session_state_in_clusterspec_propagation = True
    if not config.device_filters:
        own = f"/job:{mine.role}" if mine.chief else f"/job:{mine.role}/task:{mine.index}"
        config.device_filters.extend(["/job:ps", own])


def served_at(target: Any) -> Any:
    """The ServerDef of the server of this process that a session's target names; None for any other target."""
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
            # Asked for like this, a task that is not there is not put there.
            return str(dict(job.tasks).get(whole.task_index, ""))
    return ""


def _alone(whole: Any) -> Any:
    """The same server in a cluster of its own; as it is where the script has left its address out."""
    address = _address(whole)
    if not address:
        return whole
    alone = type(whole)()
    alone.CopyFrom(whole)
    del alone.cluster.job[:]
    if whole.job_name != "ps":
        # A session's cluster must not have the name that the session's own server was started with.
        alone.job_name, alone.task_index = "localhost", 0
    job = alone.cluster.job.add()
    job.name = alone.job_name
    job.tasks[alone.task_index] = address
    return alone
