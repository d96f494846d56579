"""The events of hooks, and the hooks of a node as its flags give them."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

TIMEOUT = 60.0
"""Seconds for a command without `--hook-timeout`: long enough to copy logs, short beside a restart of a large job."""


class HookEnd(Enum):
    """From when on the commands of an event have no more than `--shutdown-timeout` seconds together."""

    JOB_OVER = auto()
    STOPPED = auto()
    """An operator has stopped the job: at another end they keep their own time."""
    NONE = auto()


class HookEvent(msgspec.Struct, frozen=True):
    """When commands of the user run. If `decides`, one that fails keeps the node out of the round, and none begins once
    the job is over; of any other event a failure is printed, and nothing follows."""

    name: str
    end: HookEnd = HookEnd.NONE
    decides: bool = False


BEFORE_ROUND = HookEvent("before-round", HookEnd.JOB_OVER, decides=True)
# What looks at the failure that ends the job keeps its own time.
AFTER_FAILURE = HookEvent("after-failure", HookEnd.STOPPED)
AT_END = HookEvent("at-end")

EVENTS = {event.name: event for event in (BEFORE_ROUND, AFTER_FAILURE, AT_END)}


class HookSettings(msgspec.Struct, frozen=True):
    """The commands as words, in the order in which they were given, by the name of their event. Each is stopped after
    `timeout` seconds."""

    commands: dict[str, tuple[tuple[str, ...], ...]] = msgspec.field(default_factory=dict)
    timeout: float = TIMEOUT
