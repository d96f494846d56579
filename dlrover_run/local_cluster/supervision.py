"""What a cluster does for a job of its nodes, as a pure function: which nodes it starts, replaces and gives up.

It knows processes only, as a cluster manager does: whether the nodes that are left are enough to train is for the job's
coordinator to say.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace

from dlrover_run import exit_codes
from dlrover_run.coordination.text import counted
from dlrover_run.spec import LocalSpec


class EndKind(enum.Enum):
    """How a node ended.

    DONE means that the job is done. DIED is a node that had no time to say anything, EXCLUDED one that the node check
    sent away, LEFT one that was told to go, or that found no master any more. FAILED is a verdict of the job itself.
    """

    DONE = "done"
    DIED = "died"
    EXCLUDED = "excluded"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True)
class Node:
    """A node: `number` is its name and no other's, `place` the part of the cluster that it fills, and the rank that it
    wishes for."""

    number: int
    place: int


@dataclass(frozen=True)
class NodeEnd:
    """The end of node `number`. `words` tell it as a clause, such as "was killed by SIGKILL". `by_peer` says of one
    that FAILED that another node was the cause, so that its code says nothing of it."""

    number: int
    kind: EndKind
    code: int
    words: str
    by_peer: bool = False


@dataclass(frozen=True)
class Cluster:
    """The cluster as it stands.

    `running` are the nodes that have been started and have not ended. `numbers` and `places` count what has been given
    away of each, `replaced` the nodes that another took the place of. `done` says that a node has finished the job,
    `failed` is the code of the first that failed it, but for one that failed `by_peer` only while nobody else has,
    `told` the signal by which the command was told to end, and `last_code` the code of the latest end.
    """

    local: LocalSpec
    running: tuple[Node, ...] = ()
    numbers: int = 0
    places: int = 0
    replaced: int = 0
    done: bool = False
    failed: int | None = None
    by_peer: bool = False
    told: signal.Signals | None = None
    last_code: int = exit_codes.SUCCESS

    @property
    def over(self) -> bool:
        """Whether nothing runs. Then nothing more is started either: nobody is left whom a node could join."""
        return not self.running

    @property
    def settled(self) -> bool:
        """Whether it is decided how the command ends, so that no node is started any more."""
        return self.done or self.failed is not None or self.told is not None

    @property
    def more_to_come(self) -> bool:
        """Whether `join` would start a node."""
        return not self.over and not self.settled and self.places < self.local.max_nodes

    def node(self, number: int) -> Node | None:
        """The node with this number while it runs."""
        return next((node for node in self.running if node.number == number), None)


@dataclass(frozen=True)
class Step:
    """What follows from an event: the record from now on, the nodes to `start`, and what to tell the person.

    `end_others` is true once, when the job is done or has failed and nodes still run: they hear that from the job and
    end by themselves, and one that has not after a while is told to.
    """

    cluster: Cluster
    start: tuple[Node, ...] = ()
    said: tuple[str, ...] = ()
    end_others: bool = False


def begin(local: LocalSpec) -> Step:
    """The cluster with its first nodes."""
    cluster = Cluster(local)
    for place in range(local.min_nodes):
        cluster = _with_another(cluster, place)
    said = f"{counted(local.min_nodes, 'node')} on this machine"
    if later := local.max_nodes - local.min_nodes:
        said += f", and {later} more later"
    return Step(cluster, cluster.running, (said,))


def node_ended(cluster: Cluster, end: NodeEnd) -> Step:
    """What follows from the end of a node. An end of a node that does not run changes nothing."""
    node = cluster.node(end.number)
    if node is None:
        return Step(cluster)
    left = replace(_without(cluster, node), last_code=end.code)
    said = f"node {end.number} {end.words}"
    if end.kind is EndKind.DONE:
        return Step(replace(left, done=True), end_others=_ends_others(left))
    if end.kind is EndKind.FAILED:
        return _fail(left, said, end.code, by_peer=end.by_peer)
    if cluster.settled:
        # Who was told to go needs no line of its own.
        return Step(left, said=() if end.kind is EndKind.LEFT else (said,))
    if cluster.replaced == cluster.local.restarts:
        return _give_up(left, f"{said}; {_no_restart(cluster.local)}")
    replaced = cluster.replaced + 1
    after = _with_another(replace(left, replaced=replaced), node.place)
    newcomer = after.running[-1]
    of = f"{replaced} of {counted(cluster.local.restarts, 'node restart')}"
    return Step(after, (newcomer,), (f"{said}; node {newcomer.number} takes its place ({of})",))


def join(cluster: Cluster) -> Step:
    """One more of the nodes that come later, if any is left to come."""
    if not cluster.more_to_come:
        return Step(cluster)
    after = _with_another(cluster, cluster.places)
    newcomer = after.running[-1]
    return Step(after, (newcomer,), (f"node {newcomer.number} joins",))


def cannot_start(cluster: Cluster, node: Node, why: str) -> Step:
    """What follows when the machine did not let a node start that a step named.

    Without one of the first nodes the job that was asked for has never begun, so that it has failed; `why` is a clause
    or a sentence. Without a later one the others go on, since the machine would hardly let another start.
    """
    if node not in cluster.running:
        return Step(cluster)
    left = replace(_without(cluster, node), last_code=exit_codes.CANNOT_START)
    said = f"node {node.number} could not be started: {why.rstrip('.')}"
    if node.number < cluster.local.min_nodes:
        return _fail(left, said, exit_codes.CANNOT_START)
    return Step(left, said=(said,)) if cluster.settled else _give_up(left, said)


def stop(cluster: Cluster, number: signal.Signals) -> Step:
    """The command was told to end, and passes that on to its nodes: nobody is started any more."""
    if cluster.settled:
        return Step(cluster)
    return Step(replace(cluster, told=number))


def exit_code(cluster: Cluster) -> int:
    """What the command exits with once the cluster is over: see `dlrover_run.exit_codes`.

    A job that is done is a success whatever became of those who were lost then, but for one that failed it. Where
    neither was said, the signal to the command counts, else how the last node ended that nobody replaced.
    """
    if cluster.failed is not None:
        return cluster.failed
    if cluster.done:
        return exit_codes.SUCCESS
    if cluster.told is not None:
        return exit_codes.of_signal(cluster.told)
    return cluster.last_code


def _with_another(cluster: Cluster, place: int) -> Cluster:
    newcomer = Node(cluster.numbers, place)
    return replace(
        cluster,
        running=(*cluster.running, newcomer),
        numbers=cluster.numbers + 1,
        places=max(cluster.places, place + 1),
    )


def _without(cluster: Cluster, gone: Node) -> Cluster:
    return replace(cluster, running=tuple(node for node in cluster.running if node != gone))


def _ends_others(cluster: Cluster) -> bool:
    return bool(cluster.running) and not cluster.settled


def _fail(left: Cluster, said: str, code: int, *, by_peer: bool = False) -> Step:
    if left.failed is not None and left.by_peer and not by_peer:
        # Those who only heard of the failure may well end before the one that has it to tell.
        return Step(replace(left, failed=code, by_peer=False), said=(said,))
    if left.told is not None or left.failed is not None:
        # It may well have failed because the others were told to end, or because of the first failure.
        return Step(left, said=(said,))
    said += ", so the job has failed"
    return Step(replace(left, failed=code, by_peer=by_peer), said=(said,), end_others=_ends_others(left))


def _give_up(left: Cluster, said: str) -> Step:
    onward = "no node is left" if left.over else "the others go on without it"
    return Step(left, said=(f"{said}, so {onward}",))


def _no_restart(local: LocalSpec) -> str:
    return f"no node restart is left of {local.restarts}" if local.restarts else "no node is replaced in this job"
