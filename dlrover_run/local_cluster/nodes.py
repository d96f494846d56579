"""One node of a cluster on this machine: a launcher with an agent of its own, as it would run on a machine of its own.

A node has a parent-death pipe, whose other end only the supervisor holds: the node ends when the supervisor has ended,
however that happened. The node sends its result through another pipe, as a `Verdict`; a killed node sends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec

from dlrover_run import exit_codes, failures
from dlrover_run.agent.result import JobResult
from dlrover_run.command_line import credentials
from dlrover_run.launch_request import LaunchRequest, command, memory_file
from dlrover_run.local_cluster.network import Namespace
from dlrover_run.local_cluster.supervision import EndKind, Node, NodeEnd
from dlrover_run.output.streams import unused_temp_dir
from dlrover_run.spec import JobSpec, MasterSpec
from dlrover_run.supervisor.process import ManagedProcess, ProcessSpec, spawn

NODE_VARIABLE = "DLROVER_LOCAL_NODE"
"""Tells a process on which node of a local cluster it is, by the node's number."""

CLUSTER_VARIABLE = "DLROVER_LOCAL_CLUSTER"
"""Tells two local clusters on one machine apart, by the pid of the supervisor."""

AFTERMATH_TIMEOUT = 10.0
"""Seconds that an agent may run after its watchdog was killed, to end what it has started, and a watchdog after its
agent has ended. This is twice what `tree.end_children` takes at most. Then the watchdog is killed, the node counts as
ended, and the supervisor kills what is left of it."""

_RANK_VARIABLES = ("NODE_RANK", "WORKER_RANK")
_ID_VARIABLES = ("NODE_ID", "WORKER_ID")
_SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_MOST_VERDICT = 16 * 1024 * 1024
"""Bytes of a verdict, which quotes the ends of what its workers said; a longer one is as good as none."""


def spec_of(job: JobSpec, node: Node, master: MasterSpec | None) -> JobSpec:
    """What one node is started with, where `job` is what all have in common and the nodes meet at `master`."""
    logs = job.logs
    if logs.log_dir not in (None, os.devnull):
        logs = replace(logs, log_dir=os.path.join(logs.log_dir, f"node-{node.number}"))
    if not logs.prefix_template:
        logs = replace(logs, prefix_template=f"[node {node.number} rank ${{rank}}]: ")
    return replace(
        job,
        local=None,
        master=master,
        node_id=f"node-{node.number}",
        node_rank=node.place,
        console_name=f"node {node.number}",
        # How a node ended is told by its own codes; what the command answers is made of them.
        compat_exit_codes=False,
        logs=logs,
    )


def environment_of(parent: Mapping[str, str], node: Node, *, isolated: bool) -> dict[str, str]:
    """The environment of a node: `parent`, which is that of the command, and the variables that tell nodes apart."""
    left_out = {*_RANK_VARIABLES, *credentials.VARIABLES}
    own = {name: text for name, text in parent.items() if name not in left_out}
    own |= {NODE_VARIABLE: str(node.number), CLUSTER_VARIABLE: str(os.getpid())}
    own |= dict.fromkeys(_ID_VARIABLES, str(node.number))
    if isolated:
        # By the name of the host, gloo would find an address that is none of this node's.
        own = dict.fromkeys(_SOCKET_VARIABLES, "eth0") | own
    return own


class NodeProcess:
    """The processes of a node. `on_end` is called once, when watchdog and agent have both ended."""

    def __init__(self, node: Node, on_end: Callable[[NodeEnd], None]) -> None:
        self.node = node
        self._on_end = on_end
        self._parent_pipe = -1
        self._verdict_fd = -1
        self._said = bytearray()
        self._aftermath: asyncio.TimerHandle | None = None
        self._process: ManagedProcess[ProcessSpec] | None = None
        self._told: set[int] = set()
        self._temp_dir = _unused_temp_dir()
        self.started_at = 0.0
        """When it was started, by the clock of the loop."""
        self.verdict: JobResult | None = None
        """What it had to say at its end, if anything."""

    def start(self, spec: JobSpec, environment: Mapping[str, str], namespace: Namespace | None) -> None:
        """Start it. Raises OSError when the machine does not allow that."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as kept:
            theirs, ours = os.pipe()
            passed_on.callback(os.close, theirs)
            kept.callback(os.close, ours)
            verdict_fd, verdict = os.pipe()
            passed_on.callback(os.close, verdict)
            kept.callback(os.close, verdict_fd)
            logs = replace(spec.logs, temp_dir=self._temp_dir)
            request = LaunchRequest(spec=replace(spec, logs=logs), parent_pipe=theirs, result_fd=verdict)
            request_fd = passed_on.enter_context(memory_file(msgspec.json.encode(request)))
            # The node has a session of its own, so the terminal's Ctrl-C comes through the supervisor only, and once. A
            # stopped agent reads no parent-death pipe; the end of its watchdog, which dies with its parent, continues
            # it. No signal is lost: they stay blocked until the watchdog takes them.
            process_spec = ProcessSpec(
                name=f"node {self.node.number}",
                argv=tuple(command(request_fd)),
                environment=environment,
                # A machine of its own would have no console to read from.
                stdio=(subprocess.DEVNULL, 1, 2),
                fds=(request_fd, theirs, verdict),
                signals_blocked=True,
            )
            with namespace.entered() if namespace is not None else contextlib.nullcontext():
                pid = spawn(process_spec)
            try:
                self._process = ManagedProcess(pid, process_spec, lambda _: self._look())
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            kept.pop_all()
        self._parent_pipe, self._verdict_fd = ours, verdict_fd
        self.started_at = asyncio.get_running_loop().time()
        os.set_blocking(verdict_fd, False)
        asyncio.get_running_loop().add_reader(verdict_fd, self._hear)

    @property
    def pids(self) -> set[int]:
        """The pid of the watchdog while it runs."""
        return {self._process.pid} if self._process is not None and self._process.live else set()

    def send(self, number: signal.Signals) -> None:
        """Send a signal that ends the node, unless it has ended."""
        if self._process is not None and self._process.live:
            self._told.add(number)
            self._process.send(number)

    def forward(self, number: signal.Signals) -> None:
        """Pass on a signal that does not end the node."""
        if self._process is not None:
            self._process.forward(number)

    def let_go(self) -> None:
        """End the node as if the supervisor had gone: at once, without asking its workers."""
        if self._parent_pipe >= 0:
            os.close(self._parent_pipe)
            self._parent_pipe = -1

    def _hear(self) -> None:
        data = os.read(self._verdict_fd, _MOST_VERDICT)
        if data and len(self._said) <= _MOST_VERDICT:
            self._said += data
            return
        self._forget_verdict()
        self._look()

    def _forget_verdict(self) -> None:
        if self._verdict_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._verdict_fd)
            os.close(self._verdict_fd)
            self._verdict_fd = -1

    def _look(self) -> None:
        assert self._process is not None, "it has been started"
        code = self._process.code
        if code is None or self._verdict_fd >= 0:
            if self._aftermath is None:
                self._aftermath = asyncio.get_running_loop().call_later(AFTERMATH_TIMEOUT, self._give_up)
            return
        if self._aftermath is not None:
            self._aftermath.cancel()
        self.let_go()
        if self._temp_dir is not None:
            # All who would have removed it may have been killed.
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        self.verdict = decode(bytes(self._said))
        self._on_end(end_of(self.node.number, code, self.verdict, self._told))

    def _give_up(self) -> None:
        assert self._process is not None, "it has been started"
        if self._process.live:
            # It may wait for a console that reads nothing. Its end is reported as usual.
            self._process.send(signal.SIGKILL)
        else:
            self._forget_verdict()
            self._look()


def _unused_temp_dir() -> str | None:
    """The name of a temporary directory that the node may make; None where there is no room for one."""
    with contextlib.suppress(OSError):
        return unused_temp_dir()
    return None


_HOPELESS = frozenset({exit_codes.BAD_COMMAND_LINE, exit_codes.INTERNAL_ERROR, exit_codes.CANNOT_START})


def end_of(number: int, code: int, verdict: JobResult | None, told: Collection[int] = ()) -> NodeEnd:
    """How a node ended whose watchdog ended with `code`, as `subprocess` has it, and that left this verdict, or none.

    `told` are the signals that were passed on to it.
    """
    if code == exit_codes.SUCCESS or (verdict is not None and verdict.exit_code == exit_codes.SUCCESS):
        # However the watchdog ended after its agent.
        return NodeEnd(number, EndKind.DONE, exit_codes.SUCCESS, "has done the job")
    if code < 0:
        kind = EndKind.LEFT if -code in told else EndKind.DIED
        return NodeEnd(number, kind, exit_codes.of_signal(-code), f"was killed by {failures.describe_signal(-code)}")
    if verdict is None:
        # A launcher that could not begin would not fare better under another number.
        hopeless = code in _HOPELESS
        words = f"could not begin (exit code {code})" if hopeless else f"died without a word (exit code {code})"
        return NodeEnd(number, EndKind.FAILED if hopeless else EndKind.DIED, code, words)
    if verdict.stopped:
        return NodeEnd(number, EndKind.LEFT, code, f"left: {verdict.reason}")
    if code == exit_codes.FAULTY_NODE:
        return NodeEnd(number, EndKind.EXCLUDED, code, "was found broken by the node check")
    if code == exit_codes.STRAGGLER:
        return NodeEnd(number, EndKind.EXCLUDED, code, "was found too slow by the node check")
    if code == exit_codes.CANNOT_JOIN and verdict.ends:
        return NodeEnd(number, EndKind.LEFT, code, f"lost the job ({verdict.error or verdict.reason})")
    if verdict.root is None and verdict.failure is not None:
        return NodeEnd(number, EndKind.FAILED, code, "ended because another node failed", by_peer=True)
    return NodeEnd(number, EndKind.FAILED, code, f"failed with exit code {code}")


def decode(said: bytes) -> JobResult | None:
    """The verdict in these bytes; None when there is none, or its writer was killed in the middle."""
    if not said:
        return None
    try:
        return msgspec.json.decode(said, type=JobResult)
    except msgspec.MsgspecError:
        return None
