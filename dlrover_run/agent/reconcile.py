"""The steps that bring a node's tasks to what is desired: a pure function of the desired tasks and the tasks here.

The agent carries the actions out and calls it again. So only the latest state counts, and no sequence of events can be
missed. The same function serves both frameworks: a torch node has one task at a time, the workers of a round.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)


class StopMode(enum.IntEnum):
    """How a task is stopped; a higher mode replaces a lower one."""

    DRAIN = 1
    """It is asked to leave in its own time: the other tasks continue without it."""

    TERMINATE = 2
    """It gets a signal, and SIGKILL after a grace period."""

    KILL = 3
    """It gets SIGKILL at once: nothing that it could still do is of use, and some of it would do harm."""


class Readiness(enum.Enum):
    """Whether a desired task can start."""

    READY = "it has all that it needs"
    LACKS_PEERS = "it can start without peers whose addresses are not known yet, and may never be"
    NOT_READY = "an address that it needs is not known"


class DesiredTask(msgspec.Struct, Generic[Key], frozen=True):
    """A task that is to run on this node.

    `place` is what only one running task can have, such as its port or the node's devices. A running task of another
    `generation` is stopped and started anew. With `reserves`, its port is reserved before it starts, because the
    coordinator has to pass its address on first. `kept` are the processes of the running task at its place, by their
    local ranks, that go on in it while others take the places of the rest; None for a task that starts as a whole, or
    that is complete.
    """

    key: Key
    place: Hashable
    generation: Hashable = None
    readiness: Readiness = Readiness.READY
    reserves: bool = False
    kept: frozenset[int] | None = None


class TaskState(msgspec.Struct, Generic[Key], frozen=True):
    """A task of this node.

    `live` means that its process runs, is being started, or that its end is being classified; `ended` that it has run.
    Neither is true while only its port is reserved. `stopping` is how it is being stopped, `stop_mode` how it is
    stopped when it is not desired any more. When the node ends, tasks that are `served` end before those that `serve`.
    """

    key: Key
    place: Hashable
    generation: Hashable = None
    live: bool = False
    ended: bool = False
    stopping: StopMode | None = None
    stop_mode: StopMode = StopMode.TERMINATE
    serves: bool = False
    served: bool = False


class _ForTask(msgspec.Struct, Generic[Key], frozen=True):
    key: Key


class Reserve(_ForTask[Key], frozen=True):
    """Reserve the port of a task."""


class Start(_ForTask[Key], frozen=True):
    """Start a task."""


class Replace(_ForTask[Key], frozen=True):
    """Start a task with the processes `kept` of the running one at its place, which may be of the same key, and others
    in place of the rest. It is repeated until the task is complete."""

    kept: frozenset[int]


class WaitForPeers(_ForTask[Key], frozen=True):
    """Wait for the addresses of peers, for a limited time; then the task is ready without them."""


class Stop(_ForTask[Key], frozen=True):
    """Stop a task that is live."""

    mode: StopMode


class Release(_ForTask[Key], frozen=True):
    """Forget a task that has ended or never started, and release its port."""


Action = Reserve[Key] | Start[Key] | Replace[Key] | WaitForPeers[Key] | Stop[Key] | Release[Key]


def reconcile(
    desired: Sequence[DesiredTask[Key]], states: Sequence[TaskState[Key]], shutting_down: bool
) -> tuple[Action[Key], ...]:
    """The actions that bring this node closer to what is desired; none if it only has to wait. Idempotent.

    `shutting_down` means that the job is over for this node, or that it has to leave: nothing is desired any more,
    and a task that is being drained gets a signal as well.
    """
    if shutting_down:
        return tuple(action for state in _first_to_end(states) for action in _stop(state, StopMode.TERMINATE))
    wanted = {task.key: task for task in desired}
    here = {state.key: state for state in states}
    actions: list[Action[Key]] = [Replace(task.key, task.kept) for task in desired if task.kept is not None]
    replaced = {task.place for task in desired if task.kept is not None}
    for state in states:
        if state.place not in replaced and not _is_desired(state, wanted.get(state.key)):
            actions += _stop(state, state.stop_mode) if state.live else [Release(state.key)]
    # The place of a task is that of its predecessor, which has not left it yet.
    occupied = {state.place for state in states if state.live and state.key not in wanted}
    for task in desired:
        known = here.get(task.key)
        if task.kept is not None:
            continue
        if known is None:
            if task.place not in occupied:
                actions.append(Reserve(task.key) if task.reserves else Start(task.key))
        elif not (known.live or known.ended) and _is_desired(known, task):
            if task.readiness is Readiness.READY:
                actions.append(Start(task.key))
            elif task.readiness is Readiness.LACKS_PEERS:
                actions.append(WaitForPeers(task.key))
    return tuple(actions)


def _is_desired(state: TaskState[Key], task: DesiredTask[Key] | None) -> bool:
    return task is not None and task.generation == state.generation


def _stop(state: TaskState[Key], mode: StopMode) -> Iterable[Stop[Key]]:
    return [] if state.stopping is not None and state.stopping >= mode else [Stop(state.key, mode)]


def _first_to_end(states: Sequence[TaskState[Key]]) -> list[TaskState[Key]]:
    """The live tasks that end first: those that serve others only once none of these is here. A session that is closed
    waits for servers that are gone, and what is saved at the end is read from them."""
    live = [state for state in states if state.live]
    any_served = any(state.served for state in live)
    return [state for state in live if not (any_served and state.serves)]
