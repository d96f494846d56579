"""Decides which nodes of a local cluster are started, replaced and given up. Pure.

It knows processes only, as a cluster manager does. The job's coordinator decides whether the nodes that are left are
enough to train.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlrover_run import exit_codes
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.text import counted
from dlrover_run.exit_reasons import ExitReason, reason_without_result
from dlrover_run.spec import LocalSpec


class EndKind(enum.Enum):
    """How a node ended.

    DONE means that the job is done. DIED is a node that sent no result, EXCLUDED one that the node check dismissed,
    LEFT one that a signal ended, or that could not reach the master any more. FAILED means that the job failed.
    """

    DONE = "done"
    DIED = "died"
    EXCLUDED = "excluded"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True)
class LocalNode:
    """A node: `number` identifies it, also among replaced nodes; `place` is its preferred rank, which a replacement
    takes over."""

    number: int
    place: int


@dataclass(frozen=True)
class NodeEnd:
    """The end of node `number`. `clause` describes it, such as "was killed by SIGKILL". `by_peer` is true if it FAILED
    because of another node, so that its exit code is not that of the failure."""

    number: int
    kind: EndKind
    code: int
    clause: str
    by_peer: bool = False


@dataclass(frozen=True)
class LocalCluster:
    """The state of the cluster.

    `running` are the nodes that have been started and have not ended. `numbers` and `places` count those in use, and
    `replaced` the nodes that were replaced. `done` is true if a node has finished the job. `failed` is the exit code of
    the first node that failed; a node that failed `by_peer` counts only while no other has failed. `stopped_by` is the
    signal that stops the command, and `last_code` the exit code of the latest end.
    """

    local: LocalSpec
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
        """Whether no node runs. Then none is started any more, because it would have no node to join."""
        return not self.running

    @property
    def settled(self) -> bool:
        """Whether the result of the command is known, so that no node is started any more."""
        return self.done or self.failed is not None or self.stopped_by is not None

    @property
    def more_to_come(self) -> bool:
        """Whether `join` would start a node."""
        return not self.over and not self.settled and self.places < self.local.max_nodes

    def node(self, number: int) -> LocalNode | None:
        """The node with this number while it runs."""
        return next((node for node in self.running if node.number == number), None)


@dataclass(frozen=True)
class Transition:
    """What follows from an event: the new state, the nodes to `start`, and the lines to print.

    `end_others` is true once, when the job is done or has failed and nodes still run: the job's coordinator makes them
    end by themselves, and one that has not after a while gets a signal.
    """

    cluster: LocalCluster
    start: tuple[LocalNode, ...] = ()
    lines: tuple[str, ...] = ()
    end_others: bool = False


def begin(local: LocalSpec) -> Transition:
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
    node = cluster.node(end.number)
    if node is None:
        return Transition(cluster)
    left = replace(_without(cluster, node), last_code=end.code)
    line = f"node {end.number} {end.clause}"
    if end.kind is EndKind.DONE:
        return Transition(replace(left, done=True), end_others=_ends_others(left))
    if end.kind is EndKind.FAILED:
        return _fail(left, line, end.code, by_peer=end.by_peer)
    if cluster.settled:
        # A node that was stopped with the command needs no line.
        return Transition(left, lines=() if end.kind is EndKind.LEFT else (line,))
    if cluster.replaced == cluster.local.restarts:
        return _give_up(left, f"{line}; {_no_restart(cluster.local)}")
    replaced = cluster.replaced + 1
    after = _with_another(replace(left, replaced=replaced), node.place)
    newcomer = after.running[-1]
    of = f"{replaced} of {counted(cluster.local.restarts, 'node restart')}"
    return Transition(after, (newcomer,), (f"{line}; node {newcomer.number} takes its place ({of})",))


def join(cluster: LocalCluster) -> Transition:
    """Start one more of the nodes that join later, if there is one."""
    if not cluster.more_to_come:
        return Transition(cluster)
    after = _with_another(cluster, cluster.places)
    newcomer = after.running[-1]
    return Transition(after, (newcomer,), (f"node {newcomer.number} joins",))


def cannot_start(cluster: LocalCluster, node: LocalNode, why: str) -> Transition:
    """What follows when a node of a step could not be started; `why` is a clause or a sentence.

    Without one of the first nodes the job cannot begin, so it has failed. Without a later one the others go on; no
    other node is started in its place, because the machine would hardly allow that.
    """
    if node not in cluster.running:
        return Transition(cluster)
    left = replace(_without(cluster, node), last_code=exit_codes.CANNOT_START)
    line = f"node {node.number} could not be started: {why.rstrip('.')}"
    if node.number < cluster.local.min_nodes:
        return _fail(left, line, exit_codes.CANNOT_START)
    return Transition(left, lines=(line,)) if cluster.settled else _give_up(left, line)


def stop(cluster: LocalCluster, number: signal.Signals) -> Transition:
    """The command has got a signal that ends it, which its nodes get too: no node is started any more."""
    if cluster.settled:
        return Transition(cluster)
    return Transition(replace(cluster, stopped_by=number))


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


def _give_up(left: LocalCluster, line: str) -> Transition:
    onward = "no node is left" if left.over else "the others go on without it"
    return Transition(left, lines=(f"{line}, so {onward}",))


def _no_restart(local: LocalSpec) -> str:
    return f"no node restart is left of {local.restarts}" if local.restarts else "no node is replaced in this job"


def job_result(code: int, results: Sequence[JobResult], last_line: str) -> JobResult:
    """The result of the command, which ends with `code` (see `exit_code`), for a program that has called it.

    `results` are those of the nodes in the order of their ends, of which some may have been replaced. `last_line` is
    the last line on the console, for a job of which no node has sent a result.
    """
    if code == exit_codes.SUCCESS:
        return JobResult(code, ExitReason.SUCCESS, last_line)
    deciding = [result for result in results if result.exit_code == code]
    # The node of the worker that failed knows most of the failure.
    with_root = [result for result in deciding if result.root is not None]
    found = next(iter([*with_root, *deciding]), None)
    if found is None:
        return JobResult(code, reason_without_result(code), last_line, error=last_line)
    failed = [result for result in results if result.root is not None or result.failure is not None]
    ends = {end.rank: end for result in failed for end in result.ends}
    return replace(found, ends=tuple(ends[rank] for rank in sorted(ends)))
