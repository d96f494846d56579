"""What the tasks of all nodes do, which only a status shows: no decision depends on it."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.round import NodeKey


class Received(NamedTuple):
    """An activity, and when it was received."""

    activity: NodeActivity
    at: float


class Activities:
    """The latest activity of each node that has reported one, and `past_times`: the seconds of nodes that are gone, by
    phase. `changes` counts what has changed."""

    def __init__(self) -> None:
        self.changes = 0
        self.by_node: dict[NodeKey, Received] = {}
        self.past_times: dict[str, float] = {}

    def take(self, key: NodeKey, activity: NodeActivity | None, time: float) -> None:
        """Take what a node reports at that job time."""
        known = self.by_node.get(key)
        if activity is None:
            self.by_node.pop(key, None)
        elif known is None or known.activity != activity:
            # A heartbeat repeats it, and its ages are from the first time.
            self.by_node[key] = Received(activity, time)
            self.changes += 1

    def forget(self, key: NodeKey) -> None:
        """The node is gone."""
        known = self.by_node.pop(key, None)
        if known is not None and known.activity.times is not None:
            for phase, spent in known.activity.times.seconds.items():
                self.past_times[phase] = self.past_times.get(phase, 0.0) + spent
