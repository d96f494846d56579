"""One round of a node check: what each node does in it, the nodes that it waits for, and the facts that result. Pure.

What nodes try is known by its `CheckKey`: an answer with another key belongs to an earlier task, and
is ignored here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey
from dlrover_run.features.node_check.decision.model import (
    MAX_PROBLEM,
    CheckedNode,
    CheckKey,
    CheckTask,
    ComputeFact,
    ComputeResult,
    HealthStatus,
    LinkEnd,
    LinkFact,
    LinkResults,
    NodeCheck,
    NodeCheckReport,
    NodeCheckState,
    NodeHealth,
)
from dlrover_run.features.node_check.rules import NodeCheckRules

CHECK_MARGIN = 15.0
"""Seconds that a node has beyond `check_timeout`, at which it ends what it tries and reports so. One that has reported
nothing by then counts as one whose check process failed."""


def key_of(record: NodeHealth | CheckedNode) -> NodeKey:
    return NodeKey(record.node_id, record.incarnation)


def health_of(node: CheckedNode | Member | NodeReport, status: HealthStatus, **found: Any) -> NodeHealth:
    """What is known of the health of a node."""
    return NodeHealth(node_id=node.node_id, incarnation=node.incarnation, host=node.host, status=status, **found)


def state_of(plan: Plan) -> NodeCheckState:
    return NodeCheckState.get(plan.parts)


def report_of(p: KnownNode) -> NodeCheckReport:
    return NodeCheckReport.get(p.report.parts)


def without_check(p: KnownNode) -> bool:
    """Whether the node takes no part in checks. A node that is only expected has not reported that yet."""
    return p.connected and not report_of(p).check_port and report_of(p).compute_result is None


def asked(check: NodeCheck, nodes: Nodes, now: float) -> set[int]:
    """The nodes that have something to try in this round, and are here."""
    return _here(check, nodes, now) & _asked(check)


def awaited(check: NodeCheck, nodes: Nodes, now: float) -> list[int]:
    """The nodes that the round still waits for. A node that is gone is not awaited, nor are links with it alone."""
    here = _here(check, nodes, now)
    compute = {*check.compute}
    linking = {end for ends in _round_links(check) if here.issuperset(ends) for end in ends}
    found = []
    for place in sorted(here & _asked(check)):
        report = report_of(nodes[key_of(check.nodes[place])])
        computes = place in compute and not _answers(report.compute_result, check.key)
        if computes or (place in linking and not _answers(report.link_result, check.key)):
            found.append(place)
    return found


def check_status(check: NodeCheck, nodes: Nodes) -> list[NodeHealth]:
    """What a user is shown of each node while the check goes on: its best so far, and what failed last; of a
    flagged one its status, and why."""
    tflops: dict[int, float] = {}
    gigabytes: dict[int, float] = {}
    reasons: dict[int, str] = {}
    for fact in check.compute_facts:
        tflops[fact.node] = max(fact.tflops, tflops.get(fact.node, 0.0))
        reasons[fact.node] = fact.problem
    for link in check.link_facts:
        for end in link.ends:
            gigabytes[end] = max(link.gigabytes, gigabytes.get(end, 0.0))
    for place, node in enumerate(check.nodes):
        p = nodes.get(key_of(node))
        if p is None:
            continue
        computed, linked = report_of(p).compute_result, report_of(p).link_result
        if computed is not None and computed.key == check.key:
            reasons[place] = computed.problem
            tflops[place] = max(computed.tflops, tflops.get(place, 0.0))
        if linked is not None and linked.key == check.key:
            reasons[place] = linked.problem or reasons.get(place, "")
            gigabytes[place] = max([gigabytes.get(place, 0.0), *(tried.gigabytes for tried in linked.results)])
    statuses = {place: HealthStatus.PASSED for place, node in enumerate(check.nodes) if node.already_passed}
    for named in check.flagged:
        statuses[named.node], reasons[named.node] = named.status, named.reason
    return [
        health_of(
            node,
            statuses.get(place, HealthStatus.PENDING),
            tflops=tflops.get(place, 0.0),
            gigabytes=gigabytes.get(place, 0.0),
            reason=reasons.get(place, ""),
        )
        for place, node in enumerate(check.nodes)
    ]


def tasks(rules: NodeCheckRules, check: NodeCheck) -> dict[NodeKey, CheckTask]:
    """What each node shall try in this round. The links of a group are tried in one order by all its members."""
    ends = [LinkEnd(place, node.address, node.port, node.workers) for place, node in enumerate(check.nodes)]
    compute = {*check.compute}
    links: dict[int, list[tuple[LinkEnd, ...]]] = {}
    for one, other in _round_links(check):
        link = (ends[one],) if one == other else (ends[one], ends[other])
        for place in {one, other}:
            links.setdefault(place, []).append(link)
    return {
        key_of(check.nodes[place]): CheckTask(
            key=check.key,
            node=place,
            compute=place in compute,
            links=tuple(links.get(place, ())),
            timeout=rules.check_timeout,
        )
        for place in sorted(_asked(check))
    }


def computed_fact(place: int, result: ComputeResult | None, waited: float) -> ComputeFact:
    """The fact of a try at computing, also if the node has reported nothing."""
    if result is None:
        return ComputeFact(place, problem=f"it did not answer for {waited:g} s")
    if result.problem or result.wrong:
        return ComputeFact(place, problem=result.problem or "it computed a wrong result", wrong=result.wrong)
    if not 0 < result.tflops < math.inf:
        return ComputeFact(place, problem="its check process reported no speed")
    return ComputeFact(place, result.tflops, device=result.device)


def _answers(result: ComputeResult | LinkResults | None, key: CheckKey) -> bool:
    return result is not None and result.key == key


def _here(check: NodeCheck, nodes: Nodes, now: float) -> set[int]:
    """The places of the nodes that still take part; one whose connection has just broken may be back in a moment.

    One that was lost since the round began and is back again got its task too late: the others did not meet it.
    """
    found = ((place, nodes.get(key_of(node))) for place, node in enumerate(check.nodes))
    here = {place: p for place, p in found if p is not None and not p.is_draining and not p.is_lost(now)}
    return {place for place, p in here.items() if p.joined_at <= check.since}


def _asked(check: NodeCheck) -> set[int]:
    return {*check.compute, *itertools.chain.from_iterable(check.groups)}


def _round_links(check: NodeCheck) -> list[tuple[int, int]]:
    links: list[tuple[int, int]] = []
    for group in check.groups:
        links += [(group[0], group[0])] if len(group) == 1 else itertools.combinations(sorted(group), 2)
    return links


def add_facts(rules: NodeCheckRules, check: NodeCheck, nodes: Nodes, now: float) -> NodeCheck:
    here = _here(check, nodes, now)
    result = {place: report_of(nodes[key_of(check.nodes[place])]) for place in here & _asked(check)}
    late = {*awaited(check, nodes, now)}
    compute = {*check.compute}
    waited = rules.check_timeout + CHECK_MARGIN
    computed = []
    for place, status in sorted(result.items()):
        own = status.compute_result if _answers(status.compute_result, check.key) else None
        if place in compute:
            computed.append(computed_fact(place, own, waited))
        linked = status.link_result if _answers(status.link_result, check.key) else None
        if linked is not None and linked.problem:
            computed.append(ComputeFact(place, problem=linked.problem, linking=True))
        elif linked is None and place not in compute and place in late:
            computed.append(msgspec.structs.replace(computed_fact(place, None, waited), linking=True))
    answers = {
        place: linked for place, status in result.items() if (linked := status.link_result) and linked.key == check.key
    }
    links = [
        _link(check, ends, answers, waited)
        for ends in _round_links(check)
        if here.issuperset(ends) and not _died_in(ends, answers) and not _left_out(ends, answers)
    ]
    return msgspec.structs.replace(
        check,
        nodes=tuple(msgspec.structs.replace(node, is_here=place in here) for place, node in enumerate(check.nodes)),
        compute=(),
        groups=(),
        compute_facts=(*check.compute_facts, *computed),
        link_facts=(*check.link_facts, *links),
    )


def _died_in(ends: tuple[int, int], answers: Mapping[int, LinkResults]) -> bool:
    """Whether a check process of either end ended by itself, which is no evidence about a link between two nodes: that
    is tried again, and so the node has a second chance to show that it was no accident."""
    return ends[0] != ends[1] and any(end in answers and answers[end].problem for end in ends)


def _left_out(ends: tuple[int, int], answers: Mapping[int, LinkResults]) -> bool:
    """Whether an end that has answered did not try the link: what the other one found is then no evidence about it."""
    return any(
        all(tried.other != other for tried in answers[end].results)
        for end, other in {ends, ends[::-1]}
        if end in answers
    )


def _link(check: NodeCheck, ends: tuple[int, int], answers: Mapping[int, LinkResults], waited: float) -> LinkFact:
    """One link from the reports of both ends: it failed if either reports so or nothing, and its speed is the lower
    one."""
    one, other = ends
    silent = sorted(check.nodes[end].host for end in {*ends} if end not in answers)
    if silent:
        return LinkFact(one, other, problem=f"no answer from {' and '.join(silent)} for {waited:g} s"[:MAX_PROBLEM])
    result = [tried for place, far in {ends, (other, one)} for tried in answers[place].results if tried.other == far]
    ended = [f"{check.nodes[end].host}: {answers[end].problem}" for end in ends if answers[end].problem]
    problems = sorted(tried.problem for tried in result if tried.problem)
    speed = min((tried.gigabytes for tried in result), default=0.0)
    if problems or not 0 < speed < math.inf:
        return LinkFact(one, other, problem=[*ended, *problems, "it was not timed"][0][:MAX_PROBLEM])
    return LinkFact(one, other, speed)
