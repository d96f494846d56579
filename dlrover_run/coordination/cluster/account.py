"""What of a cluster goes round by its nodes: told to each of them, and repeated by it.

A coordinator without a journal goes on with that. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dlrover_run.coordination.cluster.records import Account, Cluster, Given, Hosting, Order, Role, TaskEnd, TaskStatus

ROOM_FOR_ENDS = 48 * 1024
"""Bytes of all ends in one status that are told whole. When a server dies each process of the node may leave a
traceback, and some of them say as much as all."""

FEW_WORDS = 100
"""Characters of what is told of the other ends."""


def account_of(cluster: Cluster) -> Account:
    """What each node is told to repeat."""
    return Account(
        version=cluster.version,
        servers=sum(task.role is Role.PS for task in cluster.tasks),
        tasks=len(cluster.tasks),
        targets=cluster.targets,
        spent=cluster.spent,
        done=cluster.done,
        evaluated=cluster.evaluated,
        unevaluated=cluster.unevaluated,
    )


def with_answer(order: Order, cluster: Cluster, node_id: str) -> Order:
    """The order with what was decided on the last wish of that node."""
    for wish in cluster.wishes:
        if wish.node_id == node_id:
            return msgspec.structs.replace(
                order, heard_wish=wish.number, wish_refused=wish.refused, wish_answer=wish.answer
            )
    return order


def as_before(hosting: Hosting) -> Order | None:
    """The order of a node until a coordinator without a journal knows the cluster: to go on, if it has tasks."""
    account = hosting.account
    return Order(version=account.version, keep=True) if account is not None and account.given else None


def parted(order: Order) -> tuple[Order, Order]:
    """What all nodes with an order are told alike, which may be long, and what is this node's own."""
    alike = msgspec.structs.replace(order, tasks=(), heard_wish=0, wish_refused=False, wish_answer="")
    return alike, _with_own(Order(version=order.version), order)


def joined(alike: Order, own: Order) -> Order:
    """The order that was parted."""
    return _with_own(alike, own)


def _with_own(order: Order, own: Order) -> Order:
    return msgspec.structs.replace(
        order,
        tasks=own.tasks,
        heard_wish=own.heard_wish,
        wish_refused=own.wish_refused,
        wish_answer=own.wish_answer,
    )


class Memory(NamedTuple):
    """What a node remembers of the orders that it was given."""

    account: Account | None = None

    def follow(self, order: Order | None) -> Memory:
        """The memory after another order, but none that says to go on. One that asks for nothing takes no account away:
        the job may go on, and counts its restarts from there."""
        if order is None:
            return Memory(self.account and msgspec.structs.replace(self.account, given=()))
        account = order.account or self.account
        given = tuple(Given(task.key, task.rank, task.version, task.port, task.memory) for task in order.tasks)
        return Memory(account and msgspec.structs.replace(account, given=given))

    def add_to(self, hosting: Hosting) -> Hosting:
        """What a node says of itself, as it is told over a network."""
        return msgspec.structs.replace(hosting, account=self.account, tasks=_with_short_ends(hosting.tasks))


def _with_short_ends(tasks: tuple[TaskStatus, ...]) -> tuple[TaskStatus, ...]:
    """The same, with few words about the ends for which one message has no room; the shortest are told whole."""
    sizes = {task.key: len(msgspec.json.encode(task.end)) for task in tasks if task.end is not None}
    room, whole = ROOM_FOR_ENDS, set()
    for key in sorted(sizes, key=lambda key: (sizes[key], key)):
        room -= sizes[key]
        if room >= 0:
            whole.add(key)
    if len(whole) == len(sizes):
        return tasks

    def shortened(task: TaskStatus) -> TaskStatus:
        if task.end is None or task.key in whole:
            return task
        return msgspec.structs.replace(task, end=TaskEnd(task.end.cause, task.end.what[:FEW_WORDS]))

    return tuple(map(shortened, tasks))
