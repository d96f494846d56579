"""What of a plan concerns one node: all that a coordinator tells each node besides what it tells them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.check_records import MOST_LINK_ROWS, MOST_ROWS, CheckTask, Checkup, LinkRow
from dlrover_run.coordination.check_round import key_of, tasks
from dlrover_run.coordination.check_words import shown
from dlrover_run.coordination.records import OVER, Assignment, NodeKey, Plan, Seat, Waiting, assignment, seats
from dlrover_run.coordination.rules import Rules
from dlrover_run.policies.parameter_servers.model import NodeOrder
from dlrover_run.policies.parameter_servers.policy import client_order, orders


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One node's own part: the fields of its `Assignment` that no other node is told."""

    seat: Seat | None = None
    task: CheckTask | None = None
    checkup: Checkup | None = None
    others: Annotated[tuple[Checkup, ...], Meta(max_length=MOST_ROWS)] = ()
    links: Annotated[tuple[LinkRow, ...], Meta(max_length=MOST_LINK_ROWS)] = ()
    cluster: NodeOrder | None = None

    @property
    def waits(self) -> bool:
        """Whether the node has nothing to run in the job, and waits until it has."""
        return self.seat is None and (self.cluster is None or not self.cluster.tasks)


NOBODY = Part()
"""The part of a node that the plan does not know."""


def parts(rules: Rules, plan: Plan) -> dict[NodeKey, Part]:
    """The part of each node that has one."""
    if plan.cluster is not None:
        return {key: Part(cluster=order) for key, order in orders(plan).items()}
    found = {key: Part(seat=seat) for key, seat in seats(plan).items()}
    if plan.check is None and not plan.checked:
        return found
    seated = {key: part.seat for key, part in found.items()}
    given = {} if plan.check is None or plan.phase in OVER else tasks(rules, plan.check)
    checkups = {key_of(checkup): checkup for checkup in plan.checked}
    for key in {**seated, **given, **checkups}:
        found[key] = Part(seat=seated.get(key), task=given.get(key), checkup=checkups.get(key))
    if seated:
        first = plan.members[0].key
        others, links = _table(plan, checkups)
        found[first] = msgspec.structs.replace(found[first], others=others, links=links)
    return found


def part_of(plan: Plan, found: Mapping[NodeKey, Part], key: NodeKey) -> Part:
    """One node's part among those of the plan. A visitor is told only what became of its wish, which the plan knows by
    its node id."""
    part = found.get(key, NOBODY)
    answer = client_order(plan, key) if part.cluster is None else None
    return part if answer is None else Part(cluster=answer)


def assigned(plan: Plan, part: Part, waiting: Waiting | None) -> Assignment:
    """What the plan asks of the node whose part that is; `waiting` is for those that wait, unless all is over."""
    waits = part.waits and plan.phase not in OVER
    return with_part(assignment(plan, None), part, waiting if waits else None)


def with_part(told: Assignment, part: Part, waiting: Waiting | None) -> Assignment:
    """What all nodes are told, with one node's part in it."""
    return msgspec.structs.replace(
        told,
        seat=part.seat,
        waiting=waiting,
        task=part.task,
        checkup=part.checkup,
        others=part.others,
        links=part.links,
        cluster=part.cluster,
    )


def _table(plan: Plan, checkups: dict[NodeKey, Checkup]) -> tuple[tuple[Checkup, ...], tuple[LinkRow, ...]]:
    """Of all nodes, in the order of their ranks and with this one among them, what a person is shown; and the links
    between those."""
    seated = [member.key for member in plan.members if member.key in checkups]
    order = dict.fromkeys([*seated, *checkups])
    others = shown([checkups[key] for key in order])
    places = {key_of(checkup): place for place, checkup in enumerate(others)}
    links = []
    for link in plan.links:
        ends = [places.get(key_of(plan.checked[end])) for end in (link.one, link.other)]
        known = sorted(end for end in ends if end is not None)
        if len(known) == 2:
            links.append(msgspec.structs.replace(link, one=known[0], other=known[1]))
    return others, tuple(links)
