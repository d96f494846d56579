"""How a node check is told: the lines that people grep for in a log, and the rows of the table that they are shown."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from dlrover_run.coordination.text import counted, join_names
from dlrover_run.policies.health.model import (
    MAX_LINK_PROBLEM,
    MAX_LINK_ROWS,
    MAX_ROWS,
    HealthCheck,
    HealthStatus,
    LinkFact,
    LinkRow,
    NodeHealth,
)

MAX_ROWS_PER_JOB = 16_384
"""Rows that all nodes of a job together are told in one telling: each of them gets its share of that, so that a table
for 2,000 people is no more work than one for a few hundred."""

MAX_REASON = 160
"""Characters of the clause in one row of a table: with all the rows there are, they fit into one message."""

_TO_SAY = {
    HealthStatus.FAULT: 0,
    HealthStatus.STRAGGLER: 1,
    HealthStatus.PENDING: 2,
    HealthStatus.UNCHECKED: 3,
    HealthStatus.PASSED: 4,
}


def goes_on(check: HealthCheck) -> str:
    """What is done now, for a plan's reason."""
    examined = sum(not node.already_passed for node in check.nodes)
    return f"checks {counted(examined, 'node')}, round {check.key.round}"


def stands(check: HealthCheck, missing: Sequence[str], asked: int) -> str:
    """How a round stands in which `asked` nodes have something to try and the hosts `missing` have not answered."""
    here = f"node check, round {check.key.round}: {asked - len(missing)} of {counted(asked, 'node')} "
    here += "has answered" if asked == 1 else "have answered"
    return f"{here}; missing: {join_names(missing)}" if missing else here


def not_computed(missing: Sequence[str], nodes: int) -> str:
    """That a check is yet to begin, because the hosts `missing` of so many nodes have not computed. One node is missed
    by nobody."""
    if nodes == 1:
        return "checking this node before training"
    return f"node check: {nodes - len(missing)} of {nodes} nodes have computed; missing: {join_names(missing)}"


def elapsed(check: HealthCheck) -> dict[int, float]:
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


def round_lines(check: HealthCheck, failing: Collection[int]) -> list[str]:
    """What a round came to, in the words of DLRover's master; `failing` are the nodes that have not passed by now.
    Nothing, when nobody is left of whom it could be said: then the nodes were told to stop."""
    if not any(node.is_here for node in check.nodes):
        return []
    times = elapsed(check)
    slowest = sorted(times, key=lambda place: (-times[place], place))[:MAX_ROWS]
    here = (place for place, node in enumerate(check.nodes) if node.is_here)
    # Those of whom there is most to say, for nobody reads a line of thousands.
    told = sorted(here, key=lambda place: (place not in failing, place))[:MAX_ROWS]
    status = {place: place not in failing for place in sorted(told)}
    number = check.key.round
    shown_times = {place: times[place] for place in sorted(slowest)}
    return [
        f"Round {number}: The node elapsed time are {shown_times}",
        f"Round {number}: The node status are {status}.",
    ]


def end_lines(check: HealthCheck, faults: Sequence[int], stragglers: Sequence[int]) -> list[str]:
    """What a check came to, in the words of DLRover's master; nothing, when nobody is left."""
    if not any(node.is_here for node in check.nodes):
        return []
    return [f"Fault nodes are: {list(faults)} and stragglers are: {list(stragglers)}."]


def dismissal(dismissed: Sequence[NodeHealth]) -> str:
    """Who has to leave, and why: of more than three the first ones."""
    said = [
        f"{checkup.host} was dismissed by the node check: {checkup.reason or checkup.status}" for checkup in dismissed
    ]
    more = f"; and {counted(len(said) - 3, 'other')}" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more


def shown(checkups: Sequence[NodeHealth], most: int = MAX_ROWS) -> tuple[NodeHealth, ...]:
    """Those that a person is shown, in their order: all, or of too many those of whom there is most to say."""
    telling = sorted(
        range(len(checkups)), key=lambda place: (_TO_SAY[checkups[place].status], not checkups[place].reason)
    )
    rows = (checkups[place] for place in sorted(telling[:most]))
    return tuple(row if len(row.reason) <= MAX_REASON else _clipped(row) for row in rows)


def _clipped(row: NodeHealth) -> NodeHealth:
    return msgspec.structs.replace(row, reason=row.reason[: MAX_REASON - 3] + "...")


def share_of(nodes: int) -> int:
    """How many rows each of so many nodes is told while a check goes on."""
    return min(MAX_ROWS, max(1, MAX_ROWS_PER_JOB // max(1, nodes)))


def link_rows(links: Sequence[LinkFact], places: Sequence[int | None]) -> tuple[LinkRow, ...]:
    """The best of the tries at each link; of too many links those that failed and the slowest. `places` are those of
    the examinees in the list of nodes that is told with it, None for one that is not there, whose links are no row."""
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
