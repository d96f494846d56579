"""The supervisor of a local cluster: starts, replaces and ends the nodes, as a cluster manager does.

`supervision` decides what follows from an event; this module receives events and carries the decisions out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial

from msgspec.structs import replace

from dlrover_run import exit_codes, launch_request
from dlrover_run.agent.host import explain_os_error
from dlrover_run.agent.result import JobResult
from dlrover_run.console.console import Console
from dlrover_run.console.text import use_color
from dlrover_run.exit_reasons import ExitReason, in_scheme
from dlrover_run.features.local_nodes import supervision
from dlrover_run.features.local_nodes.cluster_master import ClusterMaster, reason_of
from dlrover_run.features.local_nodes.network import Network
from dlrover_run.features.local_nodes.nodes import NodeProcess, environment_of, spec_of
from dlrover_run.features.local_nodes.settings import LocalSettings
from dlrover_run.features.local_nodes.supervision import LocalNode, NodeEnd, Transition
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.processes import event_loop, signals, tree
from dlrover_run.processes.orphans import OrphanKiller
from dlrover_run.rendezvous.master_client.launcher import MasterNotReady
from dlrover_run.spec import JobSpec

END_GRACE = 30.0
"""Seconds that the other nodes get to end by themselves once the job is over for one. The master informs them within
milliseconds; a node that it cannot reach, because its network is cut, gets a signal then."""

NEWCOMER_GRACE = 1.0
"""The same for a newcomer: a node that joins when the job is done would begin it anew, and train alone."""

NEWCOMER_AGE = 15.0
"""Seconds since its start for which a node is a newcomer: on a busy machine it may not have joined yet."""


def supervise(spec: JobSpec, parent_pipe_fd: int | None, result_fd: int | None) -> int:
    """Run a job with all of its nodes here, and return the exit code of the command.

    This process must have no threads. All nodes end when `parent_pipe_fd` reads as ended. The
    JobResult is written to `result_fd` as JSON.
    """
    settings = spec.settings_of("local_nodes", LocalSettings)
    tree.become_subreaper()
    # The parent may have left SIGCHLD ignored, or signals blocked.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals.restore(spec.handled_signals)
    signals.release()
    try:
        relay = RelayClient(shared=True)
    except OSError as error:
        line = f"dlrover-run: the launcher's own processes could not be started: {explain_os_error(error)}\n"
        os.write(2, line.encode())
        return in_scheme(ExitReason.CANNOT_START, exit_codes.CANNOT_START, spec.exit_codes)
    return event_loop.run(_supervise(spec, settings, relay, parent_pipe_fd, result_fd))


async def _supervise(
    spec: JobSpec, local: LocalSettings, relay: RelayClient, parent_pipe_fd: int | None, result_fd: int | None
) -> int:
    # Nodes share the console, so nothing on it may change once it is written.
    color = use_color(os.isatty(2), os.environ)
    console = Console(relay.write, lambda: None, clock=time.time, color=color)
    relay.attach(console.info)
    supervisor = Supervisor(spec, local, relay, console.info)
    try:
        code = await supervisor.run(parent_pipe_fd)
    except (MasterNotReady, OSError) as why:
        code = exit_codes.CANNOT_START
        supervisor.log(f"the nodes could not be started: {reason_of(why)}")
    result = supervision.job_result(code, supervisor.results, supervisor.last_line)
    code = in_scheme(result.exit_reason, code, spec.exit_codes)
    # A signal still ends the wait for a console that does not read.
    await relay.drain(timeout=None)
    # A signal that arrives now has no handler any more, and would change the exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.TERMINATION_SIGNALS)
    await relay.close()
    if refused := tree.end_children():
        # The relay has ended.
        os.write(2, f"dlrover-run: {tree.describe_refused(refused)}\n".encode())
    if result_fd is not None:
        # The process that reads the result may have ended, and that may be why the nodes end.
        with contextlib.suppress(BrokenPipeError), open(result_fd, "wb") as file:
            file.write(launch_request.encode(replace(result, exit_code=code)))
    return code


class Supervisor:
    """Runs the nodes of a job on this machine. `log` prints one line on the console."""

    def __init__(self, spec: JobSpec, local: LocalSettings, relay: RelayClient, log: Callable[[str], None]) -> None:
        self._spec = spec
        self._local = local
        self._relay = relay
        self._log = log
        self.last_line = ""
        self.results: list[JobResult] = []
        """The results of the nodes that have ended, in that order."""
        self._nodes: dict[int, NodeProcess] = {}
        self._network: Network | None = None
        self._master: ClusterMaster | None = None
        self._cluster = supervision.LocalCluster(local)
        self._over = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._begun = False
        self._early_joins = 0
        self._ending = False
        self._orphans = OrphanKiller(self._own_children)

    def log(self, line: str) -> None:
        self.last_line = line
        self._log(line)

    async def run(self, parent_pipe_fd: int | None) -> int:
        """Run from the start of the first node to the end of the last, and return the exit code. Raises MasterNotReady
        or OSError if no node can be started."""
        with contextlib.ExitStack() as ending:
            if signal.SIGUSR1 not in self._spec.handled_signals:
                # Before anything else, because its default action ends this process.
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._join_now)
            if self._local.isolated:
                self._network = Network()
                ending.callback(self._network.close)
            if self._spec.rendezvous.hosted:
                self._master = ClusterMaster(self._network, self.log)
                await self._master.start()
            self._handle_signals()
            if parent_pipe_fd is not None:
                event_loop.watch_pipe(parent_pipe_fd, self._abandon)
            try:
                self._begin()
                await self._over.wait()
            finally:
                for timer in self._timers:
                    timer.cancel()
                self._orphans.close()
                if self._master is not None:
                    await self._master.end()
        return supervision.exit_code(self._cluster)

    def _begin(self) -> None:
        self._begun = True
        self._carry_out(supervision.begin(self._local))
        for _ in range(self._early_joins):
            self._join_now()
        self._await_next()

    def _carry_out(self, step: Transition) -> None:
        self._cluster = step.cluster
        for line in step.lines:
            self.log(line)
        for node in step.start:
            self._start(node)
        if step.end_others:
            self._later(END_GRACE, self._end_others)
            if self._cluster.done:
                now = asyncio.get_running_loop().time()
                newcomers = [each for each in self._nodes.values() if now - each.started_at < NEWCOMER_AGE]
                self._later(NEWCOMER_GRACE, partial(_end, newcomers))
        if self._cluster.over:
            self._over.set()

    def _start(self, node: LocalNode) -> None:
        process = NodeProcess(node, self._ended)
        spec = spec_of(self._spec, node, None if self._master is None else self._master.spec)
        environment = environment_of(os.environ, node, isolated=self._local.isolated)
        try:
            namespace = None if self._network is None else self._network.connect(node.number)
            try:
                process.start(spec, environment, namespace)
            except OSError:
                self._disconnect(node.number)
                raise
        except OSError as error:
            self._carry_out(supervision.cannot_start(self._cluster, node, explain_os_error(error)))
            if self._cluster.failed is not None:
                # The other nodes would wait for this one.
                self._end_others()
            return
        self._nodes[node.number] = process
        if self._ending:
            process.send(signal.SIGTERM)

    def _ended(self, end: NodeEnd) -> None:
        process = self._nodes.pop(end.number)
        if process.result is not None:
            self.results.append(process.result)
        self._disconnect(end.number)
        # Kill what its watchdog and its agent have left behind.
        self._orphans.kill_orphans()
        self._carry_out(supervision.node_ended(self._cluster, end))

    def _disconnect(self, number: int) -> None:
        if self._network is not None:
            self._network.disconnect(number)

    def _await_next(self) -> None:
        if self._cluster.more_to_come:
            self._later(self._local.join_after, self._join)

    def _join(self) -> None:
        self._carry_out(supervision.join(self._cluster))
        self._await_next()

    def _end_others(self) -> None:
        self._ending = True
        _end(self._nodes.values())

    def _abandon(self) -> None:
        self._carry_out(supervision.stop(self._cluster, signal.SIGTERM))
        for process in self._nodes.values():
            process.abandon()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        joins = {signal.SIGUSR1} - set(self._spec.handled_signals)
        # A signal without a handler ends this process too, with a line; a real-time signal has no effect.
        signals.catch(lambda number: None, but=joins)
        for number in {*signals.NAMED, *self._spec.handled_signals} - {*joins, *self._spec.forward_signals}:
            # A signal that is ignored, as after nohup, stays ignored, here and in the nodes.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._pass_on, number)
        for number in self._spec.forward_signals:
            loop.add_signal_handler(number, self._forward, number)
        loop.add_signal_handler(signal.SIGCHLD, self._orphans.reap)

    def _pass_on(self, number: signal.Signals) -> None:
        self._relay.stop_waiting()
        if number is signal.SIGINT and os.isatty(2):
            # The terminal shows the key where the cursor is.
            self._relay.write("\n")
        self._carry_out(supervision.stop(self._cluster, number))
        for process in self._nodes.values():
            process.send(number)

    def _forward(self, number: signal.Signals) -> None:
        for process in self._nodes.values():
            process.forward(number)

    def _join_now(self) -> None:
        if not self._begun:
            self._early_joins += 1
        elif self._cluster.more_to_come:
            self._carry_out(supervision.join(self._cluster))
        else:
            self.log("SIGUSR1 requests another node, and none is left to start")

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, do))

    def _own_children(self) -> set[int]:
        masters = () if self._master is None else self._master.pids
        return {self._relay.pid, *masters}.union(*(process.pids for process in self._nodes.values()))


def _end(nodes: Iterable[NodeProcess]) -> None:
    for process in nodes:
        process.send(signal.SIGTERM)
