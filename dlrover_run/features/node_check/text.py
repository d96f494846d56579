"""How a node check is reported: the lines that users grep for in a log, and the rows of the table for users."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from dlrover_run.coordination.records.bounds import MAX_WHAT
from dlrover_run.features.node_check.decision.model import (
    MAX_LINK_PROBLEM,
    MAX_LINK_ROWS,
    MAX_ROWS,
    HealthStatus,
    LinkFact,
    LinkRow,
    NodeCheck,
    NodeHealth,
)
from dlrover_run.words.reasons import Code, ReasonCode, Reasons, register, shown_names

MAX_ROWS_PER_JOB = 16_384
"""Rows that are sent to all nodes of a job together at one time: each of them gets its share of that, so that a table
for 2,000 users is no more work than one for a few hundred."""

MAX_DISMISSED_SHOWN = 3
"""Dismissed nodes that a reason names."""

MAX_REASON = 160
"""Characters of the clause in one row of a table: with all the rows there are, they fit into one message."""


class NodeCheckCode(ReasonCode):
    CHECKING = "checks {number:#node}, round {round}"
    PASSED = "the nodes have passed their check"
    DISMISSED = "{host} was dismissed by the node check: {why}"
    MORE_DISMISSED = "and {number:#other}"
    ANSWERS = "node check, round {round}: {answered} of {number:#node} {number:has|have} answered"
    THIS_NODE = "checking this node before training"
    RESULTS = "node check: {answered} of {number:#node} {number:has|have} computed"
    PASSED_JOIN = "those that have passed the node check take part in the next round"
    CHECKED_DURING_TRAINING = "meanwhile the node check looks at those who have come"


register(NodeCheckCode, "health.")

_URGENCY = {
    HealthStatus.FAULT: 0,
    HealthStatus.STRAGGLER: 1,
    HealthStatus.PENDING: 2,
    HealthStatus.UNCHECKED: 3,
    HealthStatus.PASSED: 4,
}


def checking(check: NodeCheck) -> Reasons:
    """The reason of a plan while a check runs."""
    return (NodeCheckCode.CHECKING(number=sum(not node.already_passed for node in check.nodes), round=check.key.round),)


def answers(check: NodeCheck, missing: Sequence[str], asked: int) -> Reasons:
    """The state of a round in which `asked` nodes have a task and the hosts `missing` have not answered."""
    here = NodeCheckCode.ANSWERS(round=check.key.round, answered=asked - len(missing), number=asked)
    return (here, Code.MISSING(names=shown_names(missing))) if missing else (here,)


def not_computed(missing: Sequence[str], nodes: int) -> Reasons:
    """That a check is yet to begin, because the hosts `missing` of that many nodes have not computed. A single node is
    not named as missing."""
    if nodes == 1:
        return (NodeCheckCode.THIS_NODE(),)
    here = NodeCheckCode.RESULTS(answered=nodes - len(missing), number=nodes)
    return (here, Code.MISSING(names=shown_names(missing)))


def elapsed(check: NodeCheck) -> dict[int, float]:
    """Of each node that has computed: seconds per TFLOP of its slowest device and per GB of its slowest link."""
    speeds: dict[int, float] = {}
    for fact in check.compute_facts:
        if fact.tflops > 0:
            speeds[fact.node] = max(fact.tflops, speeds.get(fact.node, 0.0))
    links: dict[int, float] = {}
    for link in check.link_facts:
        if link.gigabytes > 0:
            links.update({end: min(link.gigabytes, links.get(end, math.inf)) for end in link.ends})
    return {
        place: round(1 / speeds[place] + 1 / links.get(place, math.inf), 3)
        for place, node in enumerate(check.nodes)
        if node.is_here and place in speeds
    }


def round_lines(check: NodeCheck, failing: Collection[int]) -> list[str]:
    """The result of a round, with the text of DLRover's master; `failing` are the nodes that have not passed by now."""
    times = elapsed(check)
    slowest = sorted(times, key=lambda place: (-times[place], place))[:MAX_ROWS]
    here = (place for place, node in enumerate(check.nodes) if node.is_here)
    # The most urgent ones, because a line of thousands is not read.
    shown = sorted(here, key=lambda place: (place not in failing, place))[:MAX_ROWS]
    status = {place: place not in failing for place in sorted(shown)}
    number = check.key.round
    shown_times = {place: times[place] for place in sorted(slowest)}
    return [
        f"Round {number}: The node elapsed time are {shown_times}",
        f"Round {number}: The node status are {status}.",
    ]


def dismissals(dismissed: Sequence[NodeHealth], limit: int = MAX_WHAT) -> Reasons:
    """Which nodes have to leave, and why: of more than three the first ones. `limit` is the number of characters that
    the causes may have together."""
    shown_nodes = dismissed[:MAX_DISMISSED_SHOWN]
    reasons = [
        NodeCheckCode.DISMISSED(host=one.host, why=(one.reason or str(one.status))[: limit // len(shown_nodes)])
        for one in shown_nodes
    ]
    more = len(dismissed) - len(shown_nodes)
    return (*reasons, *((NodeCheckCode.MORE_DISMISSED(number=more),) if more else ()))


def shown(nodes_health: Sequence[NodeHealth], most: int = MAX_ROWS) -> tuple[NodeHealth, ...]:
    """The nodes that a user is shown, in their order: all, or of too many the most urgent ones."""
    urgent = sorted(
        range(len(nodes_health)),
        key=lambda place: (_URGENCY[nodes_health[place].status], not nodes_health[place].reason),
    )
    rows = (nodes_health[place] for place in sorted(urgent[:most]))
    return tuple(row if len(row.reason) <= MAX_REASON else _clipped(row) for row in rows)


def _clipped(row: NodeHealth) -> NodeHealth:
    return msgspec.structs.replace(row, reason=row.reason[: MAX_REASON - 3] + "...")


def share_of(nodes: int) -> int:
    """How many rows are sent to each of that many nodes while a check goes on."""
    return min(MAX_ROWS, max(1, MAX_ROWS_PER_JOB // max(1, nodes)))


def link_rows(links: Sequence[LinkFact], places: Sequence[int | None]) -> tuple[LinkRow, ...]:
    """The best of the tries at each link; of too many links those that failed and the slowest. `places` are those of
    the checked nodes in the list of nodes that is sent with it, None for one that is not there, whose links are no
    row."""
    best: dict[tuple[int, int], LinkRow] = {}
    for link in links:
        ends = sorted(place for end in link.ends if (place := places[end]) is not None)
        if len(ends) < 2:
            continue
        one, other = ends
        gigabytes = 0.0 if link.problem else link.gigabytes
        known = best.get((one, other))
        if known is None or known.gigabytes < gigabytes:
            best[one, other] = LinkRow(one, other, gigabytes, link.problem[:MAX_LINK_PROBLEM])
    slowest = sorted(best.values(), key=lambda row: (row.gigabytes, row.one, row.other))[:MAX_LINK_ROWS]
    return tuple(sorted(slowest, key=lambda row: (row.one, row.other)))
