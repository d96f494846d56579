"""One node of a local cluster: a launcher with its agent, as on a machine of its own.

Only the supervisor has the other end of its parent-death pipe, so the node also ends when the supervisor is killed.
The node sends its `JobResult` through another pipe; a killed node sends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from dlrover_run import exit_codes, launch_request
from dlrover_run.agent.host import CLUSTER_VARIABLE
from dlrover_run.agent.result import JobResult
from dlrover_run.command_line import credentials
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.features.local_nodes.network import Namespace
from dlrover_run.features.local_nodes.supervision import EndKind, LocalNode, NodeEnd
from dlrover_run.launch_request import LaunchRequest, command, memory_file
from dlrover_run.output.run_directory import unused_temp_dir
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import JobSpec

NODE_VARIABLE = "DLROVER_LOCAL_NODE"
"""The variable with the number of the node of a local cluster on which a process runs."""

AFTERMATH_TIMEOUT = 10.0
"""Seconds that an agent may run after its watchdog was killed, to end what it has started, and a watchdog after its
agent has ended. This is twice what `tree.end_children` takes at most. Then the watchdog is killed, the node counts as
ended, and the supervisor kills what is left of it."""

_RANK_VARIABLES = ("NODE_RANK", "WORKER_RANK")
_ID_VARIABLES = ("NODE_ID", "WORKER_ID")
_SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

MAX_RESULT = 16 * 1024 * 1024
"""Bytes of the longest result that is read; it contains the ends of the workers' output."""


def spec_of(job: JobSpec, node: LocalNode, master: kinds.Master | None) -> JobSpec:
    """The job of one node: `job` with `master`, if one has been started, and with a name and log files of its own."""
    # On a shared console the prefix identifies the node.
    logs = replace(job.logs, prefixed=True)
    if logs.log_dir not in (None, os.devnull):
        logs = replace(logs, log_dir=os.path.join(logs.log_dir, f"node-{node.number}"))
    if not logs.prefix_template:
        logs = replace(logs, prefix_template=f"[node {node.number} rank ${{rank}}]: ")
    return replace(
        job,
        settings={name: settings for name, settings in job.settings.items() if name != "local_nodes"},
        rendezvous=master or job.rendezvous,
        node_id=f"node-{node.number}",
        node_rank=node.place,
        console_name=f"node {node.number}",
        # The exit code of the command is made of the nodes' own codes.
        exit_codes="precise",
        logs=logs,
    )


def environment_of(parent: Mapping[str, str], node: LocalNode, *, isolated: bool) -> dict[str, str]:
    """The environment of a node: `parent`, that of the command, with the variables that distinguish nodes."""
    own = {name: text for name, text in parent.items() if name not in (*_RANK_VARIABLES, *credentials.VARIABLES)}
    own |= {NODE_VARIABLE: str(node.number), CLUSTER_VARIABLE: str(os.getpid())}
    own |= dict.fromkeys(_ID_VARIABLES, str(node.number))
    if isolated:
        # By the name of the host, gloo would find an address that does not belong to this node.
        own = dict.fromkeys(_SOCKET_VARIABLES, "eth0") | own
    return own


class NodeProcess:
    """The processes of a node. `on_end` is called once, when watchdog and agent have both ended."""

    def __init__(self, node: LocalNode, on_end: Callable[[NodeEnd], None]) -> None:
        self.node = node
        self._on_end = on_end
        self._parent_pipe = -1
        self._result_fd = -1
        self._received = bytearray()
        self._aftermath: asyncio.TimerHandle | None = None
        self._process: ManagedProcess[ProcessSpec] | None = None
        self._sent: set[int] = set()
        self._temp_dir: str | None = None
        # Without room for a temporary directory the node runs all the same.
        with contextlib.suppress(OSError):
            self._temp_dir = unused_temp_dir()
        self.started_at = 0.0
        """When it was started, by the clock of the loop."""
        self.result: JobResult | None = None
        """Its result, if it has sent one."""

    def start(self, spec: JobSpec, environment: Mapping[str, str], namespace: Namespace | None) -> None:
        """Start the processes. Raises OSError if that is not possible."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as kept:
            theirs, ours = os.pipe()
            passed_on.callback(os.close, theirs)
            kept.callback(os.close, ours)
            result_fd, result_end = os.pipe()
            passed_on.callback(os.close, result_end)
            kept.callback(os.close, result_fd)
            logs = replace(spec.logs, temp_dir=self._temp_dir)
            request = LaunchRequest(spec=replace(spec, logs=logs), parent_pipe=theirs, result_fd=result_end)
            request_fd = passed_on.enter_context(memory_file(launch_request.encode(request)))
            # The node has a session of its own, so the terminal's Ctrl-C comes through the supervisor only, and once. A
            # stopped agent reads no parent-death pipe; the end of its watchdog, which dies with its parent, continues
            # it. No signal is lost: they stay blocked until the watchdog takes them.
            process_spec = ProcessSpec(
                name=f"node {self.node.number}",
                argv=tuple(command(request_fd)),
                environment=environment,
                # A machine of its own would have no console to read from.
                stdio=(subprocess.DEVNULL, 1, 2),
                fds=(request_fd, theirs, result_end),
                signals_blocked=True,
            )
            with namespace.entered() if namespace is not None else contextlib.nullcontext():
                pid = spawn(process_spec)
            self._process = ManagedProcess(pid, process_spec, lambda _: self._check_end())
            kept.pop_all()
        self._parent_pipe, self._result_fd = ours, result_fd
        self.started_at = asyncio.get_running_loop().time()
        os.set_blocking(result_fd, False)
        asyncio.get_running_loop().add_reader(result_fd, self._read_result)

    @property
    def pids(self) -> set[int]:
        """The pid of the watchdog while it runs."""
        return {self._process.pid} if self._process is not None and self._process.live else set()

    def send(self, number: signal.Signals) -> None:
        """Send a signal that ends the node, unless it has ended."""
        if self._process is not None and self._process.live:
            self._sent.add(number)
            self._process.send(number)

    def forward(self, number: signal.Signals) -> None:
        """Pass on a signal that does not end the node."""
        if self._process is not None:
            self._process.forward(number)

    def abandon(self) -> None:
        """End the node as if the supervisor had ended: at once, with SIGKILL to its workers."""
        if self._parent_pipe >= 0:
            os.close(self._parent_pipe)
            self._parent_pipe = -1

    def _read_result(self) -> None:
        data = os.read(self._result_fd, MAX_RESULT)
        if data and len(self._received) <= MAX_RESULT:
            self._received += data
            return
        self._close_result()
        self._check_end()

    def _close_result(self) -> None:
        if self._result_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._result_fd)
            os.close(self._result_fd)
            self._result_fd = -1

    def _check_end(self) -> None:
        assert self._process is not None, "it has been started"
        code = self._process.code
        if code is None or self._result_fd >= 0:
            if self._aftermath is None:
                self._aftermath = asyncio.get_running_loop().call_later(AFTERMATH_TIMEOUT, self._give_up)
            return
        if self._aftermath is not None:
            self._aftermath.cancel()
        self.abandon()
        if self._temp_dir is not None:
            # The processes that would have removed it may have been killed.
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        self.result = decode(bytes(self._received))
        self._on_end(end_of(self.node.number, code, self.result, self._sent))

    def _give_up(self) -> None:
        assert self._process is not None, "it has been started"
        if self._process.live:
            # It may wait for a console that reads nothing. Its end is reported as usual.
            self._process.send(signal.SIGKILL)
        else:
            self._close_result()
            self._check_end()


_CANNOT_BEGIN = frozenset({exit_codes.BAD_COMMAND_LINE, exit_codes.INTERNAL_ERROR, exit_codes.CANNOT_START})
"""Exit codes after which a replacement would fail to begin for the same reason."""

_KINDS = {
    ExitReason.FAULTY_NODE: (EndKind.EXCLUDED, "was found broken"),
    ExitReason.STRAGGLER: (EndKind.EXCLUDED, "was found too slow by the node check"),
    ExitReason.CUT_OFF: (EndKind.LEFT, "was cut off from the other nodes"),
}


def end_of(number: int, code: int, result: JobResult | None, sent: Collection[int] = ()) -> NodeEnd:
    """How a node ended whose watchdog ended with `code` (negative for a signal), with the result that it has sent.

    `sent` are the signals that it got from the supervisor.
    """
    # The watchdog may have been killed after its agent had ended.
    if code == exit_codes.SUCCESS or (result is not None and result.exit_code == exit_codes.SUCCESS):
        return NodeEnd(number, EndKind.DONE, exit_codes.SUCCESS, "has done the job")
    if code < 0:
        kind = EndKind.LEFT if -code in sent else EndKind.DIED
        clause, code = describe_exit_code(code), exit_codes.of_signal(-code)
    elif result is None and code in _CANNOT_BEGIN:
        kind, clause = EndKind.FAILED, f"could not begin (exit code {code})"
    elif result is None:
        kind, clause = EndKind.DIED, f"died without a result (exit code {code})"
    elif result.stopped:
        kind, clause = EndKind.LEFT, f"left: {result.reason}"
    elif result.exit_reason is ExitReason.STOPPED_ON_REQUEST:
        return NodeEnd(number, EndKind.FAILED, code, "was stopped on request", requested=True)
    elif result.exit_reason in _KINDS:
        kind, clause = _KINDS[result.exit_reason]
    elif result.exit_reason is ExitReason.CANNOT_JOIN and result.ends:
        kind, clause = EndKind.LEFT, f"lost the job ({result.error or result.reason})"
    elif result.root is None and result.failure is not None:
        return NodeEnd(number, EndKind.FAILED, code, "ended because another node failed", by_peer=True)
    else:
        kind, clause = EndKind.FAILED, f"failed with exit code {code}"
    return NodeEnd(number, kind, code, clause)


def decode(data: bytes) -> JobResult | None:
    """The result in these bytes; None if there is none, or if its writer was killed while it wrote."""
    with contextlib.suppress(ValueError):
        return launch_request.decode(data, JobResult)
    return None
