"""The mistakes of a simulated node check, compared with the truth of its world."""

from __future__ import annotations

from collections.abc import Iterator

from support.check_world import Outcome, Pair, World, expected_statuses

from dlrover_run.features.node_check.decision.model import HealthStatus


def mistakes(world: World, outcome: Outcome) -> list[str]:
    """Return the mistakes of the check: a healthy node that is named, a plant that could be detected and is not, and a
    bad link between two nodes with other working links that was tried and is not reported."""
    named, wanted = outcome.named, expected_statuses(world)
    blameless = [node for node in named if world.nodes[node].healthy or world.nodes[node].trusted]
    wrong = [f"healthy node {node} is named {named[node].value}" for node in blameless]
    wrong += [
        f"node {node} ({world.nodes[node]}) should be a {expected.value}, "
        f"not {named.get(node, HealthStatus.PASSED).value}"
        for node, expected in wanted.items()
        if named.get(node) is not expected
    ]
    return wrong + [f"no report of the bad link {pair}" for pair in _unsaid(world, outcome)]


def _unsaid(world: World, outcome: Outcome) -> Iterator[Pair]:
    here = {node for node, checked in enumerate(outcome.check.nodes) if checked.is_here}
    linked = [fact for fact in outcome.check.link_facts if here.issuperset(fact.ends)]
    worked = {end for fact in linked if not fact.problem for end in fact.ends}
    for fact in linked:
        if fact.problem and world.links.get(fact.ends) == 0 and worked.issuperset(fact.ends):
            one, other = fact.ends
            sentence = f"the link between node{one} and node{other} does not work"
            if not {one, other} & outcome.named.keys() and not any(
                sentence in note for note in outcome.diagnosis.notes
            ):
                yield fact.ends
