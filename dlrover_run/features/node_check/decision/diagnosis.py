"""Which nodes are faulty and which are slow, from all that the nodes of a check have tried. Pure; called after each
round.

Two rules keep a healthy node from being named. Its computing concerns itself alone, and an accident is tried again.
Its links concern the other end as much, so they count only as far as several others agree that have links which do
well. What cannot be decided is reported, and no node is blamed for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dlrover_run.features.node_check.decision.evidence import (
    Evidence,
    Pair,
    collect_evidence,
    group_by,
    lower_median_with,
    rank_speeds,
)
from dlrover_run.features.node_check.decision.model import MAX_PROBLEM, FlaggedNode, HealthStatus, NodeCheck
from dlrover_run.features.node_check.decision.notes import CheckText, Notes

ENOUGH_WITNESSES = 3
"""Different partners that have to agree about a node's links: so a node that has two bad links is not blamed."""

MIN_WITNESSES = 2
"""How many are enough when no other node is left to link with. One never is: the link has two ends. What fails with
so few is tried once more before it makes a fault: in a triple a moment without a network fails both. What is slow is
tried once more however many agree, for whatever else disturbs a machine slows all that it does at that moment."""

SLOW_TRIES = 3
"""Slow readings at computing that make a straggler. A machine on which others are at work disturbs two tries in a row:
on an overloaded one a healthy node has been seen to be 4 times slower twice."""


@dataclass(frozen=True)
class NodeFinding:
    """The diagnosis of one checked node. `tflops` and `gigabytes` are its best, 0 where there is none; `reason` is a
    clause with figures, or empty."""

    status: HealthStatus
    tflops: float = 0.0
    gigabytes: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """`findings` are one for each checked node, in order, never PENDING: what would hold if the check ended now.

    More rounds of links could show more of those in `unresolved`, another try at computing about those in
    `compute_again`, another try at the links in `link_again` whether these failed, or were slow, by accident. `failing`
    are those that have not passed by now: their computing or their links failed, and nothing since has shown that they
    work. `notes` are sentences about links, and about what cannot be decided. `healthy` are those whose links leave no
    doubt: a link with one of them is evidence.
    """

    findings: tuple[NodeFinding, ...]
    unresolved: tuple[int, ...] = ()
    compute_again: tuple[int, ...] = ()
    link_again: tuple[Pair, ...] = ()
    notes: tuple[str, ...] = ()
    healthy: tuple[int, ...] = ()
    failing: frozenset[int] = frozenset()

    @property
    def flagged(self) -> tuple[FlaggedNode, ...]:
        """Faults and stragglers that no other try is needed for."""
        doubtful = {*self.unresolved, *self.compute_again}
        return tuple(
            FlaggedNode(node, finding.status, finding.reason)
            for node, finding in enumerate(self.findings)
            if finding.status in (HealthStatus.FAULT, HealthStatus.STRAGGLER) and node not in doubtful
        )


def diagnose(check: NodeCheck, threshold: float) -> Diagnosis:
    """The diagnosis from the facts of the check. A node that is at least `threshold` times slower than is usual is a
    straggler.

    `docs/node-check.md` explains the rules, and has their rates.
    """
    return _Diagnoser(collect_evidence(check), threshold).diagnosis()


class _Diagnoser:
    """All that is derived from the evidence on the way to a diagnosis, each thing once."""

    def __init__(self, evidence: Evidence, threshold: float) -> None:
        self.evidence = evidence
        self.check = evidence.check
        self.threshold = threshold
        self.words = CheckText(self.check)
        group_of = evidence.comparison_group
        self.linkers = Counter(group_of(node) for node in evidence.links)
        able = _known(evidence.computes_at, evidence.tries.keys() - evidence.broken - evidence.unproven)
        self.computing = rank_speeds(able, evidence.device_kinds.__getitem__, threshold)
        self.linked_at = _known(evidence.best_in_group, evidence.links)
        self.linking = rank_speeds(self.linked_at, group_of, threshold)
        self.ordered = {
            group_of(nodes[0]): sorted(self.linked_at[node] for node in nodes)
            for nodes in group_by(self.linked_at, group_of)
        }
        self.working = Counter[int]()
        for node in evidence.links:
            self.working[group_of(node)] += evidence.working_in_group(node)
        # Each of them has been counted at both of its ends.
        self.working = Counter({workers: count // 2 for workers, count in self.working.items()})
        self.unreachable = self._find_unreachable()
        # No more of the evidence is read for one node than that of its own links: with many nodes that would take long.
        self.unreachable_by_group = Counter(group_of(node) for node in self.unreachable)
        spoken_for = self.unreachable | evidence.broken
        here = [node for node, checked in enumerate(self.check.nodes) if checked.is_here and node not in spoken_for]
        self.able = Counter(group_of(node) for node in here)
        self.not_spoken_for = len(self.check.nodes) - len(spoken_for)
        self.to_confirm = {node: pairs for node in self.unreachable if (pairs := self._unconfirmed(node))}
        doubtful = set(self._examined(self.linking.doubtful)) - self.unreachable
        self.slow_linked = {node for node in doubtful if self._links_slowly(node) and self._slowness_is_agreed(node)}
        self.to_confirm |= {node: pairs for node in self.slow_linked if (pairs := self._slowness_unconfirmed(node))}

    def diagnosis(self) -> Diagnosis:
        findings = tuple(self._diagnose_node(node) for node in range(len(self.check.nodes)))
        again = tuple(node for node in self._examined(self.evidence.tries) if self._computes_again(node))
        unsettled = () if self.check.during_training else self._examined(self.evidence.links)
        still_open = tuple(node for node in unsettled if self._is_open(node) and self._could_learn(node))
        doing_well = (node for node in self.evidence.links if self.evidence.works(node))
        well = tuple(node for node in sorted(doing_well) if node not in self.linking.doubtful)
        pairs = sorted({pair for pairs in self.to_confirm.values() for pair in pairs})
        unsettled_unreachable = self.unreachable & self.to_confirm.keys()
        notes = Notes(
            self.evidence,
            self.threshold,
            self.words,
            self.computing,
            self.linking,
            self.slow_linked,
            self.unreachable,
            unsettled_unreachable,
        )
        return Diagnosis(findings, still_open, again, tuple(pairs), notes.all(), well, self._failing(findings))

    def _failing(self, findings: Sequence[NodeFinding]) -> frozenset[int]:
        at_fault = {node for node, finding in enumerate(findings) if finding.status is HealthStatus.FAULT}
        within = set(filter(self.evidence.failed_within, self.evidence.internal_links))
        without_link = {node for node, met in self.evidence.links.items() if met and not self.evidence.works(node)}
        return self.evidence.broken | self.evidence.unproven | at_fault | within | without_link

    def _examined(self, nodes: Collection[int]) -> tuple[int, ...]:
        return tuple(node for node in sorted(nodes) if not self.check.nodes[node].already_passed)

    # Computing

    def _computes_again(self, node: int) -> bool:
        if node in self.evidence.broken:
            return False
        tries = self.evidence.tries[node]
        good = sum(not fact.problem for fact in tries)
        unproven = not good or node in self.evidence.unproven
        return unproven or (node in self.computing.doubtful and good < SLOW_TRIES)

    def _computes_slowly(self, node: int) -> bool:
        return node in self.computing.slow and not self._computes_again(node)

    # Links

    def _find_unreachable(self) -> set[int]:
        """Nodes no link of which works, where others have links that do, so that these nodes are the cause."""
        cut = {node for node in self.evidence.internal_links if self.evidence.failed_within(node) > 1}
        failing = {node for node, met in self.evidence.links.items() if met and not self.evidence.works(node)} - cut
        while True:
            found = {
                node
                for node in failing
                if not self.check.nodes[node].already_passed
                and _agree(self._witnesses_of_failing(node), self._has_unmet(node, leave_out=cut))
            }
            if not found:
                return cut
            # With these out of the way no node may be left that another one has yet to link with.
            cut |= found
            failing -= found

    def _unconfirmed(self, node: int) -> list[Pair]:
        """Its failing links that have been tried once only, where so few others have a link with it that a moment
        without a network would make a fault."""
        witnesses = self._witnesses_of_failing(node)
        return [] if len(witnesses) >= ENOUGH_WITNESSES else self._untried_again(node, witnesses)

    def _untried_again(self, node: int, partners: Collection[int]) -> list[Pair]:
        """Its links with these that have been tried once only."""
        return [
            (min(node, other), max(node, other)) for other in partners if not self.evidence.was_confirmed(node, other)
        ]

    def _witnesses_of_failing(self, node: int) -> list[int]:
        return [other for other, speed in self._met(node) if speed is None and self.evidence.works(other)]

    def _witnesses_of_slowness(self, node: int) -> list[int]:
        return [
            other
            for other, speed in self._met(node)
            if speed is not None
            and self.evidence.are_comparable(other, node)
            and speed * self.threshold < (self.evidence.best_in_group(other) or 0.0)
        ]

    def _usual_link(self, node: int) -> float:
        """What the others reach among themselves. One that has linked with this node alone is no evidence about it."""
        removed, added = [], []
        for other in self.evidence.links[node]:
            if other in self.linked_at and self.evidence.are_comparable(other, node):
                removed.append(self.linked_at[other])
                without = self.evidence.best_in_group(other, but=node)
                if without is not None:
                    added.append(without)
        return lower_median_with(self.ordered[self.evidence.comparison_group(node)], removed, added)

    def _links_slowly(self, node: int) -> bool:
        return (self.evidence.best_in_group(node) or 0.0) * self.threshold < self._usual_link(node)

    def _slowness_is_agreed(self, node: int) -> bool:
        return self._agree_on_slowness(node, self._witnesses_of_slowness(node))

    def _slowness_unconfirmed(self, node: int) -> list[Pair]:
        """As many of its slow links that have been tried once only as are missing to those that have been tried more
        often. Others that link with it meanwhile need not try twice."""
        witnesses = self._witnesses_of_slowness(node)
        confirmed = [other for other in witnesses if self.evidence.was_confirmed(node, other)]
        if self._agree_on_slowness(node, confirmed):
            return []
        return self._untried_again(node, witnesses)[: ENOUGH_WITNESSES - len(confirmed)]

    def _agree_on_slowness(self, node: int, witnesses: Collection[int]) -> bool:
        return _agree(witnesses, self._has_unmet_in_group(node) or self._others_cannot_be_asked(node))

    def _met(self, node: int) -> list[tuple[int, float | None]]:
        return sorted(self.evidence.links.get(node, {}).items())

    def _has_unmet(self, node: int, leave_out: Collection[int]) -> bool:
        """Whether it could link with a node that it has not met, beside those of `leave_out`, all of which may link."""
        met = self.evidence.links[node]
        left_out = len(leave_out) - sum(other in leave_out for other in [node, *met])
        return len(self.evidence.links) - 1 - len(met) - left_out > 0

    def _has_unmet_in_group(self, node: int) -> bool:
        group = self.evidence.comparison_group(node)
        met = [other for other in self.evidence.links[node] if self.evidence.are_comparable(other, node)]
        cut = self.unreachable_by_group[group] - sum(other in self.unreachable for other in [node, *met])
        return self.linkers[group] - 1 - len(met) - cut > 0

    def _others_cannot_be_asked(self, node: int) -> bool:
        """Whether there are nodes that cannot be witnesses of the speed of its links: they are gone, or of another
        size. With that many of them, two slow links of a healthy node may well be all that it has in its comparison
        group."""
        return self.not_spoken_for > self.able[self.evidence.comparison_group(node)]

    def _is_open(self, node: int) -> bool:
        """Whether its links leave a doubt about it."""
        if node in self.unreachable:
            return False
        if not self.evidence.works(node):
            return len(self.evidence.links) > 1 or self.evidence.failed_within(node) == 1
        if node not in self.linking.median:
            # Its links work, but none of them is with a node that it can be compared with.
            return True
        if any(self._is_compared_with_nothing(end) for end in [node, *self.evidence.links[node]]):
            return self._has_unmet_in_group(node)
        doubted = node in self.linking.doubtful and not self._slowness_is_agreed(node)
        return doubted and not self._computes_slowly(node)

    def _is_compared_with_nothing(self, node: int) -> bool:
        """Whether all links that work between nodes of its kind are its own."""
        group = self.evidence.comparison_group(node)
        return self.working[group] == self.evidence.working_in_group(node)

    def _could_learn(self, node: int) -> bool:
        """Whether a link that was not tried yet would show more of it, be it a link of a partner that is in doubt."""
        if self.evidence.failed_within(node) == 1:
            return True
        if not self.evidence.works(node):
            failing = [other for other, _ in self._met(node) if not self.evidence.works(other)]
            partners = [other for other in failing if other not in self.unreachable]
            return any(self._has_unmet(one, leave_out=self.unreachable) for one in [node, *partners])
        partners = [other for other, _ in self._met(node) if other in self.linking.doubtful]
        return any(self._has_unmet_in_group(other) for other in [node, *partners])

    # Reasons

    def _diagnose_node(self, node: int) -> NodeFinding:
        evidence = self.evidence
        status, reason = self._status(node)
        return NodeFinding(
            status, evidence.computes_at(node) or 0.0, evidence.best_link(node) or 0.0, reason[:MAX_PROBLEM]
        )

    def _status(self, node: int) -> tuple[HealthStatus, str]:
        tries = self.evidence.tries.get(node, ())
        if not self.check.nodes[node].is_here or self.check.nodes[node].already_passed:
            return HealthStatus.PASSED, ""
        problems = [fact.problem for fact in tries if fact.problem]
        if node in self.evidence.broken:
            wrong = next((fact for fact in tries if fact.wrong), None)
            if wrong is not None:
                return HealthStatus.FAULT, f"computes wrongly: {wrong.problem}" if wrong.problem else "computes wrongly"
            if node in self.evidence.lost_accelerator:
                return (
                    HealthStatus.FAULT,
                    f"computes on the CPU where the others have {self.evidence.lost_accelerator[node]}",
                )
            linking = any(fact.linking for fact in tries)
            failed = "its check process failed" if linking else "failed to compute"
            return HealthStatus.FAULT, f"{failed} {len(problems)} times: {problems[-1]}"
        if node in self.unreachable and node not in self.to_confirm:
            return HealthStatus.FAULT, self._why_unreachable(node)
        if self._computes_slowly(node):
            speed, others = self.evidence.computes_at(node) or 0.0, self.computing.median[node]
            return HealthStatus.STRAGGLER, f"computes at {speed:.3g} TFLOP/s where the others reach {others:.3g}"
        if node in self.slow_linked and node not in self.to_confirm:
            partners = self.words.join(self._witnesses_of_slowness(node))
            speed, others = self.evidence.best_in_group(node) or 0.0, self._usual_link(node)
            slow = f"links at {speed:.3g} GB/s at best where the others reach {others:.3g}"
            return HealthStatus.STRAGGLER, f"{slow}: so with {partners}, who are quick with others"
        if problems and len(problems) < len(tries):
            linking = any(fact.linking for fact in tries)
            passed = "its check process failed once, in a link" if linking else "computed when asked again"
            return HealthStatus.PASSED, f"{passed}: {problems[-1]}"
        return HealthStatus.PASSED, ""

    def _why_unreachable(self, node: int) -> str:
        if not self.evidence.links[node]:
            workers = self.check.nodes[node].workers
            return f"the link among its own {workers} workers does not work{self.words.because(node)}"
        witnesses = self.words.join(self._witnesses_of_failing(node))
        return f"no link of it works{self.words.because(node)}, and {witnesses} have links that do"


def _known(speed: Callable[[int], float | None], nodes: Collection[int]) -> Mapping[int, float]:
    return {node: value for node in sorted(nodes) if (value := speed(node)) is not None}


def _agree(witnesses: Collection[int], others_are_left: bool) -> bool:
    return len(witnesses) >= (ENOUGH_WITNESSES if others_are_left else MIN_WITNESSES)
