"""Decides which nodes of a local cluster are started and replaced, from the ends of their processes. Pure.

Whether the remaining nodes are enough to train is decided by the job's coordinator.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from dlrover_run import exit_codes
from dlrover_run.agent.result import JobResult
from dlrover_run.exit_reasons import ExitReason, reason_without_result
from dlrover_run.features.local_nodes.settings import LocalSettings
from dlrover_run.words.text import counted


class EndKind(enum.Enum):
    """How a node ended.

    DONE: the job is done. DIED: without a result. EXCLUDED: dismissed by the node check. LEFT: ended by a signal, or
    could not reach the master any more. FAILED: the job failed.
    """

    DONE = "done"
    DIED = "died"
    EXCLUDED = "excluded"
    LEFT = "left"
    FAILED = "failed"


class LocalNode(msgspec.Struct, frozen=True):
    """A node: `number` identifies it, also among replaced nodes; `place` is its preferred rank, which a replacement
    takes over."""

    number: int
    place: int


class NodeEnd(msgspec.Struct, frozen=True):
    """The end of node `number`; `clause` is such as "was killed by SIGKILL". `by_peer`: it FAILED because of another
    node, so its exit code is not that of the failure. `requested`: an operator has stopped the job, as the node has
    printed already."""

    number: int
    kind: EndKind
    code: int
    clause: str
    by_peer: bool = False
    requested: bool = False


class LocalCluster(msgspec.Struct, frozen=True):
    """The state of the cluster.

    `running` are the nodes that have been started and have not ended. `numbers`, `places` and `replaced` count the
    numbers and places in use and the replaced nodes. `done`: a node has finished the job. `failed` is the exit code of
    the first node that failed; a failure `by_peer` counts only while no other node has failed. `stopped_by` is the
    signal that stops the command, and `last_code` the exit code of the latest end.
    """

    local: LocalSettings
    running: tuple[LocalNode, ...] = ()
    numbers: int = 0
    places: int = 0
    replaced: int = 0
    done: bool = False
    failed: int | None = None
    by_peer: bool = False
    stopped_by: signal.Signals | None = None
    last_code: int = exit_codes.SUCCESS

    @property
    def over(self) -> bool:
        """Whether no node runs. No node is started then, because it would have none to join."""
        return not self.running

    @property
    def settled(self) -> bool:
        """Whether the result of the command is known, so that no node is started any more."""
        return self.done or self.failed is not None or self.stopped_by is not None

    @property
    def more_to_come(self) -> bool:
        """Whether `join` would start a node."""
        return not self.over and not self.settled and self.places < self.local.max_nodes


class Transition(msgspec.Struct, frozen=True):
    """What follows from an event: the new state, the nodes to `start`, and the lines to print.

    `end_others` is true once, when the job is done or has failed and nodes still run: the coordinator ends them, and a
    node that has not ended after a while gets a signal.
    """

    cluster: LocalCluster
    start: tuple[LocalNode, ...] = ()
    lines: tuple[str, ...] = ()
    end_others: bool = False


def begin(local: LocalSettings) -> Transition:
    """The cluster with its first nodes."""
    cluster = LocalCluster(local)
    for place in range(local.min_nodes):
        cluster = _with_another(cluster, place)
    line = f"{counted(local.min_nodes, 'node')} on this machine"
    if later := local.max_nodes - local.min_nodes:
        line += f", and {later} more later"
    return Transition(cluster, cluster.running, (line,))


def node_ended(cluster: LocalCluster, end: NodeEnd) -> Transition:
    """What follows from the end of a node. An end of a node that does not run changes nothing."""
    node = next((node for node in cluster.running if node.number == end.number), None)
    if node is None:
        return Transition(cluster)
    left = replace(_without(cluster, node), last_code=end.code)
    line = f"node {end.number} {end.clause}"
    if end.kind is EndKind.DONE:
        return Transition(replace(left, done=True), end_others=_ends_others(left))
    if end.requested:
        return replace(_fail(left, line, end.code), lines=())
    if end.kind is EndKind.FAILED:
        return _fail(left, line, end.code, by_peer=end.by_peer)
    if cluster.settled:
        # A node that was stopped with the command needs no line.
        return Transition(left, lines=() if end.kind is EndKind.LEFT else (line,))
    restarts, replaced = cluster.local.restarts, cluster.replaced + 1
    if replaced > restarts:
        why = f"no node restart is left of {restarts}" if restarts else "no node is replaced in this job"
        return _continue_without(left, f"{line}; {why}")
    after = _with_another(replace(left, replaced=replaced), node.place)
    newcomer = after.running[-1]
    line += f"; node {newcomer.number} takes its place ({replaced} of {counted(restarts, 'node restart')})"
    return Transition(after, (newcomer,), (line,))


def join(cluster: LocalCluster) -> Transition:
    """Start one more of the nodes that join later, if there is one."""
    if not cluster.more_to_come:
        return Transition(cluster)
    after = _with_another(cluster, cluster.places)
    newcomer = after.running[-1]
    return Transition(after, (newcomer,), (f"node {newcomer.number} joins",))


def cannot_start(cluster: LocalCluster, node: LocalNode, why: str) -> Transition:
    """What follows when a node could not be started; `why` is a clause or a sentence.

    Without one of the first nodes the job has failed, because it cannot begin. Without a later one the others continue;
    it is not replaced, because the machine would hardly start another.
    """
    if node not in cluster.running:
        return Transition(cluster)
    left = replace(_without(cluster, node), last_code=exit_codes.CANNOT_START)
    line = f"node {node.number} could not be started: {why.rstrip('.')}"
    if node.number < cluster.local.min_nodes:
        return _fail(left, line, exit_codes.CANNOT_START)
    return Transition(left, lines=(line,)) if cluster.settled else _continue_without(left, line)


def stop(cluster: LocalCluster, number: signal.Signals) -> Transition:
    """The command received a signal that ends it, which its nodes get too: no node is started any more."""
    return Transition(cluster if cluster.settled else replace(cluster, stopped_by=number))


def exit_code(cluster: LocalCluster) -> int:
    """The exit code of the command once the cluster is over: see `dlrover_run.exit_codes`.

    A job that is done is a success, also if nodes were lost afterwards, unless a node failed. If the job is neither
    done nor failed, the signal to the command counts, else the end of the last node.
    """
    if cluster.failed is not None:
        return cluster.failed
    if cluster.done:
        return exit_codes.SUCCESS
    if cluster.stopped_by is not None:
        return exit_codes.of_signal(cluster.stopped_by)
    return cluster.last_code


def _with_another(cluster: LocalCluster, place: int) -> LocalCluster:
    newcomer = LocalNode(cluster.numbers, place)
    return replace(
        cluster,
        running=(*cluster.running, newcomer),
        numbers=cluster.numbers + 1,
        places=max(cluster.places, place + 1),
    )


def _without(cluster: LocalCluster, ended: LocalNode) -> LocalCluster:
    return replace(cluster, running=tuple(node for node in cluster.running if node != ended))


def _ends_others(cluster: LocalCluster) -> bool:
    return bool(cluster.running) and not cluster.settled


def _fail(left: LocalCluster, line: str, code: int, *, by_peer: bool = False) -> Transition:
    if left.failed is not None and left.by_peer and not by_peer:
        # Nodes that only received the failure may end before the node where it happened.
        return Transition(replace(left, failed=code, by_peer=False), lines=(line,))
    if left.stopped_by is not None or left.failed is not None:
        # It may have failed because the others were stopped, or because of the first failure.
        return Transition(left, lines=(line,))
    line += ", so the job has failed"
    return Transition(replace(left, failed=code, by_peer=by_peer), lines=(line,), end_others=_ends_others(left))


def _continue_without(left: LocalCluster, line: str) -> Transition:
    consequence = "no node is left" if left.over else "the others go on without it"
    return Transition(left, lines=(f"{line}, so {consequence}",))


def job_result(code: int, results: Sequence[JobResult], last_line: str) -> JobResult:
    """The result of the command, which ends with `code` (see `exit_code`), for a program that has called it.

    `results` are those of the nodes in the order of their ends, of which some may have been replaced. `last_line` is
    the last line on the console, for a job of which no node has sent a result.
    """
    if code == exit_codes.SUCCESS:
        return JobResult(code, ExitReason.SUCCESS, last_line)
    deciding = [result for result in results if result.exit_code == code]
    if not deciding:
        return JobResult(code, reason_without_result(code), last_line, error=last_line)
    # The result of the node whose worker failed first describes the failure best.
    found = next((result for result in deciding if result.root is not None), deciding[0])
    failed = [result for result in results if result.root is not None or result.failure is not None]
    ends = {end.rank: end for result in failed for end in result.ends}
    return replace(found, ends=tuple(ends[rank] for rank in sorted(ends)))
