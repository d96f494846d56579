"""Which nodes compute and which nodes link with each other in the next round of a node check. Pure.

Round 0 has neighbours in pairs, and round 1 pairs that are far apart in rank: neighbours are in one rack, and what lies
between racks shows where nodes meet across it. In later rounds nodes in doubt link with nodes that did well, and that
they have not linked with: a link that works clears both of its ends, and one that does not is one more witness. Where
there are two witnesses and no third one, the links with them are tried once more, and so are those for which a node
would be called slow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dlrover_run.features.node_check.decision.diagnosis import ENOUGH_WITNESSES, Diagnosis, diagnose
from dlrover_run.features.node_check.decision.evidence import Evidence, Pair, collect_evidence, group_by
from dlrover_run.features.node_check.decision.model import HealthStatus, NodeCheck
from dlrover_run.features.node_check.rules import STRAGGLER_THRESHOLD

MAX_ROUNDS = 6
"""Rounds after which a check ends with what it knows, beyond those that measure links or try one once more. Of
the simulated checks in `tests/support/check_world.py`, with a third of the nodes in trouble, hardly one needs five."""

ENOUGH_PAIRS = 3
"""Pairs of which not all have a slow end while no more than a third of the nodes are slow. Of two pairs both may have
one: four newcomers and two that have passed are six, of which two may be slow."""

EVERY_PAIR = 16
"""Most nodes of which every pair is linked where links are measured: among more, as many rounds as these need."""

ACROSS_ROUND = 1
"""The round in which pairs are far apart in rank. It is there for them alone where no node is in doubt."""

MIN_ACROSS = 2
"""Pairs across of which there have to be as many: of three nodes or fewer all have met in the first round."""

Groups = tuple[tuple[int, ...], ...]


class RoundTasks(NamedTuple):
    """What is tried in one round: the nodes that compute, and groups whose members try all links between them; a group
    of one tries the link within the node. Nothing is to be tried when both are empty."""

    compute: tuple[int, ...]
    groups: Groups


def first_round(check: NodeCheck, measure_links: bool, threshold: float = STRAGGLER_THRESHOLD) -> RoundTasks:
    """What is tried first, after what the nodes computed by themselves.

    A node that failed or was slow at it computes again. One that failed does nothing else in this round, so that no
    node waits for a link with a node that may be dead; it links in the next one.
    """
    evidence = collect_evidence(check)
    return RoundTasks(diagnose(check, threshold).compute_again, _first_groups(evidence, measure_links))


def next_round(check: NodeCheck, diagnosis: Diagnosis, measure_links: bool) -> RoundTasks | None:
    """What is tried after the round `check.key`, which is among the facts already; None when the check is over."""
    evidence = collect_evidence(check)
    following = check.key.round + 1
    # Twice as many as are needed when no node is late, for one that computed in the second try only has missed a round.
    most = 2 * len(check.nodes) if len(check.nodes) <= EVERY_PAIR else EVERY_PAIR - 1
    measuring = most if measure_links else 0
    groups = _unmeasured(evidence, _useless(evidence, diagnosis)) if following < measuring else ()
    if groups:
        return RoundTasks(diagnosis.compute_again, groups)
    tried_again = any(tries > 1 for tries in evidence.link_tries.values())
    confirming = ENOUGH_WITNESSES if diagnosis.link_again or tried_again else 0
    if following < measuring + MAX_ROUNDS + confirming:
        groups = _groups_in_doubt(evidence, diagnosis)
        if following == ACROSS_ROUND and not measure_links:
            groups = tuple(sorted([*groups, *_pair_across(evidence, diagnosis, groups)]))
        tasks = RoundTasks(diagnosis.compute_again, groups)
    else:
        # No link is tried a third time for this, so that it ends too.
        tasks = RoundTasks((), _to_be_confirmed(evidence, diagnosis))
    return tasks if any(tasks) else None


def _useless(evidence: Evidence, diagnosis: Diagnosis) -> set[int]:
    """The nodes that no other node shall link with: those at fault, or about to be when their failing links were tried
    once more."""
    found = {node for node, finding in enumerate(diagnosis.findings) if finding.status is HealthStatus.FAULT}
    return found | {end for pair in diagnosis.link_again for end in pair if not evidence.works(end)}


def _linkers(evidence: Evidence) -> list[int]:
    return [] if evidence.check.during_training else sorted(evidence.links.keys() - evidence.unproven)


def _first_groups(evidence: Evidence, measure_links: bool) -> Groups:
    nodes = evidence.check.nodes
    linkers = _linkers(evidence)
    if len(evidence.links) == 1:
        return tuple((node,) for node in linkers if nodes[node].workers > 1)
    if measure_links and (measured := _unmeasured(evidence)):
        return measured
    trusted = [node for node in linkers if nodes[node].already_passed]
    groups = _pair_neighbours(evidence, [node for node in linkers if not nodes[node].already_passed], trusted)
    if len(groups) == 1 and len(groups[0]) == 2 and trusted:
        groups[0].append(_take_nearest(evidence, groups[0][0], trusted))
    return tuple(tuple(sorted(group)) for group in groups)


def _pair_neighbours(evidence: Evidence, examined: Sequence[int], trusted: list[int]) -> list[list[int]]:
    """Neighbours in pairs, those together whose speeds can be compared. An odd one is paired with one of the `trusted`,
    which is taken out of these, or makes a triple of the last pair. One of so few pairs that each may have a slow end
    takes one in."""
    groups: list[list[int]] = []
    single: list[int] = []
    for group in group_by(examined, evidence.comparison_group):
        kind = evidence.comparison_group(group[0])
        pairs = [group[at : at + 2] for at in range(0, len(group) - 1, 2)]
        if len(group) % 2:
            comparable = [node for node in trusted if evidence.comparison_group(node) == kind]
            if comparable:
                pairs.append([group[-1], _take_nearest(evidence, group[-1], trusted)])
            elif pairs:
                pairs[-1].append(group[-1])
            else:
                single.append(group[-1])
        comparable = [node for node in trusted if evidence.comparison_group(node) == kind]
        if 0 < len(pairs) < ENOUGH_PAIRS and max(map(len, pairs)) == 2 and comparable:
            # Links that are all slow have nothing to be compared with: three nodes have three links.
            pairs[0].append(_take_nearest(evidence, group[0], trusted))
        groups += pairs
    groups += [single[at : at + 2] for at in range(0, len(single) - 1, 2)]
    if len(single) % 2:
        if trusted:
            groups.append([single[-1], _take_nearest(evidence, single[-1], trusted)])
        elif groups:
            min(groups, key=len).append(single[-1])
    return groups


def _pair_across(evidence: Evidence, diagnosis: Diagnosis, groups: Groups) -> list[Pair]:
    """Of n alike the one at i with the one at i + n/2, where both have nothing else to try."""
    nodes = evidence.check.nodes
    busy = {node for group in groups for node in group}.union(diagnosis.compute_again, _useless(evidence, diagnosis))
    pairs: list[Pair] = []
    for alike in group_by(
        (node for node in _linkers(evidence) if not nodes[node].already_passed), evidence.comparison_group
    ):
        half = len(alike) // 2
        if half >= MIN_ACROSS:
            pairs += zip(alike[:half], alike[half : 2 * half], strict=True)
    return [pair for pair in pairs if busy.isdisjoint(pair) and pair[1] not in evidence.links[pair[0]]]


def _take_nearest(evidence: Evidence, node: int, others: list[int]) -> int:
    """The neighbour among those with which its speed can be compared, else among all."""
    nearest = min(
        others,
        key=lambda other: (
            not evidence.are_comparable(other, node),
            abs(other - node),
            other,
        ),
    )
    others.remove(nearest)
    return nearest


def _groups_in_doubt(evidence: Evidence, diagnosis: Diagnosis) -> Groups:
    """Pairs for the nodes about which more can be found out: each with a healthy node if there are enough of these,
    else with another one in doubt."""
    again = _to_be_confirmed(evidence, diagnosis)
    linkers = set(_linkers(evidence)) - {end for pair in again for end in pair}
    in_doubt = [node for node in diagnosis.unresolved if node in linkers]
    if not in_doubt:
        return again
    if len(evidence.links) == 1:
        return tuple((node,) for node in in_doubt)
    useless = _useless(evidence, diagnosis)
    # A link that has not been compared with any other leaves a doubt even where it does well.
    well = sorted((linkers & {*diagnosis.healthy}) - {*in_doubt})
    # The doubt about a trusted partner is cleared too, because only then is it a witness.
    nodes = evidence.check.nodes
    partners = {node for node in linkers if nodes[node].already_passed and evidence.links[node]} - set(well)
    seekers = sorted({*in_doubt, *partners}, key=lambda node: (node in partners, -len(evidence.links[node]), node))
    # A node that does well and has been a partner least often comes first, so that no node is kept from the others by
    # one.
    well.sort(key=lambda node: (len(evidence.links[node]), node))
    others = sorted(linkers - useless - set(well) - set(seekers))
    return tuple(sorted([*again, *_match(evidence, seekers, well, others)]))


def _to_be_confirmed(evidence: Evidence, diagnosis: Diagnosis) -> tuple[Pair, ...]:
    """The links to be tried again: as many as no node is in twice, each as soon as it is free."""
    free = set(_linkers(evidence))
    found = []
    for pair in diagnosis.link_again:
        if free.issuperset(pair):
            free.difference_update(pair)
            found.append(pair)
    return tuple(found)


def _match(evidence: Evidence, seekers: Sequence[int], well: Sequence[int], others: Sequence[int]) -> list[Pair]:
    groups: list[Pair] = []
    waiting = []
    free = _Free(evidence, well)
    for seeker in seekers:
        partner = free.take_partner(seeker)
        if partner is None:
            waiting.append(seeker)
        else:
            groups.append((min(seeker, partner), max(seeker, partner)))
    free = _Free(evidence, [*waiting, *others])
    for seeker in waiting:
        if seeker not in free:
            continue
        free.take(seeker)
        partner = free.take_partner(seeker)
        if partner is not None:
            groups.append((min(seeker, partner), max(seeker, partner)))
    return groups


class _Free:
    """Nodes that have no partner yet in a round, in the order in which they are to be taken. Each step looks at no more
    of them than one node has met, for there may be thousands."""

    def __init__(self, evidence: Evidence, nodes: Sequence[int]) -> None:
        self._evidence = evidence
        self._places = {node: place for place, node in enumerate(nodes)}
        # Not a dict, whose first key is found the more slowly the more were taken from before it.
        self._by_group = {
            evidence.comparison_group(alike[0]): OrderedDict.fromkeys(alike)
            for alike in group_by(nodes, evidence.comparison_group)
        }

    def __contains__(self, node: int) -> bool:
        return node in self._by_group.get(self._evidence.comparison_group(node), ())

    def take(self, node: int) -> None:
        del self._by_group[self._evidence.comparison_group(node)][node]

    def take_partner(self, seeker: int) -> int | None:
        """Take the first node that it has not linked with, of its own kind if possible."""
        own = self._evidence.comparison_group(seeker)
        partner = self._first_unmet(seeker, self._by_group.get(own, ()))
        # One whose links work but are slow learns nothing where speeds cannot be compared.
        if partner is None and not self._evidence.works(seeker):
            firsts = (self._first_unmet(seeker, free) for group, free in self._by_group.items() if group != own)
            partner = min((first for first in firsts if first is not None), key=self._places.__getitem__, default=None)
        if partner is not None:
            self.take(partner)
        return partner

    def _first_unmet(self, seeker: int, free: Iterable[int]) -> int | None:
        met = self._evidence.links[seeker]
        return next((other for other in free if other != seeker and other not in met), None)


def _unmeasured(evidence: Evidence, useless: Collection[int] = ()) -> Groups:
    """A round of a round-robin: the one with the most pairs that have not been linked.

    Each link that does not work costs half a minute, so no node is paired with the `useless`, nor with one that has met
    so many in vain that it may be one of them; when a later round clears it, its links are measured after that.
    """
    in_vain = {
        node for node, met in evidence.links.items() if len(met) >= ENOUGH_WITNESSES and not evidence.works(node)
    }
    linkers = set(_linkers(evidence)) - in_vain - {*useless}
    rounds = (
        tuple((one, other) for one, other in pairs if {one, other} <= linkers and other not in evidence.links[one])
        for pairs in _round_robin(len(evidence.check.nodes))
    )
    return max(rounds, key=len, default=())


def _round_robin(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each node links with each other one once: one stays, the others go round. At most fifteen of
    them."""
    places = nodes + nodes % 2
    rounds = []
    for turn in range(min(places - 1, EVERY_PAIR - 1)):
        circle = [0, *((at + turn) % (places - 1) + 1 for at in range(places - 1))]
        pairs = (sorted((circle[at], circle[-1 - at])) for at in range(places // 2))
        rounds.append(sorted((one, other) for one, other in pairs if other < nodes))
    return rounds
