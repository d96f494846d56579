"""The faults: a server or the chief dies, or there is to be one server more."""

from __future__ import annotations

import time

from comparison.lost import Lost
from launch_bench.case import Limits, Measured
from launch_bench.room import Report, Room
from recovery_bench.fault import Fault

from tf_recovery_bench.rivals import STRATEGY, PlainProcesses, Rival, TfPsRun, roles_of
from tf_recovery_bench.way_back import OF_THE_WORKER, sum_up, wait_back

SERVERS = 2

REACHED = 0.3
"""What is asked of processes that a template forks, as a ratio to plain processes."""

SPAWNED = 1.0
"""What is asked of processes that are started anew: they have to import TensorFlow as everybody has."""


def begin(rival: Rival, room: Room, limits: Limits, least: int = SERVERS) -> None:
    """Start a job, and wait until chief and worker train and have done so for a while."""
    room.patient = False
    rival.start(room, least, SERVERS)
    wait_steps(rival, room, limits, after_ns=0)


def wait_steps(rival: Rival, room: Room, limits: Limits, after_ns: int) -> None:
    """Wait for a step of chief and worker in a session that begins after a moment, and let them train."""
    for role in roles_of(rival.script):
        session = room.wait_each_rank(f"{role}-session", 1, limits.start, after_ns)[0]
        room.wait_each_rank(f"{role}-step", 1, limits.start, session.at_ns)
    room.settle(limits.settle)


def newest(room: Room, role: str, rank: int) -> Report:
    """The process that bears a role now, which must be one of those that the rival has started."""
    found = [report for report in room.reports if report.event == f"{role}-begun" and report.rank == rank]
    if not found or found[-1].pid not in room.of_node(0):
        raise Lost(f"{role} {rank} is not among the processes of this run")
    return found[-1]


def kill(rival: Rival, room: Room, limits: Limits, role: str, rank: int, roles: tuple[str, ...]) -> Measured:
    """SIGKILL, to the next step of these roles."""
    begin(rival, room, limits)
    killed = room.kill(newest(room, role, rank).pid)
    wait_back(room, roles, killed, limits.recovery)
    return sum_up(room.reports, roles, killed, limits.recovery, planned=False)


def server_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """The second of two servers is killed."""
    return kill(rival, room, limits, "ps", SERVERS - 1, roles_of(rival.script))


def chief_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """The chief is killed; a worker may go on."""
    return kill(rival, room, limits, "chief", 0, ("chief",))


def planned_change(rival: Rival, room: Room, limits: Limits) -> Measured:
    """A second server is asked for, to the first step with both."""
    begin(rival, room, limits, least=1)
    if rival.begins_with_most:
        now = time.monotonic_ns()
        rival.change(room, 1)
        wait_steps(rival, room, limits, after_ns=now)
    asked = time.monotonic_ns()
    rival.change(room, SERVERS)
    roles = roles_of(rival.script)
    wait_back(room, roles, asked, limits.recovery)
    return sum_up(room.reports, roles, asked, limits.recovery, planned=True)


def faults(python: str) -> tuple[Fault[Rival], ...]:
    """All faults, in the order in which they are tried and shown, for scripts that this interpreter runs."""
    spawn = ("--start-method=spawn",)
    forked = TfPsRun("tf-ps-run forkserver", python)
    spawned = TfPsRun("tf-ps-run spawn", python, options=spawn)
    hooks = TfPsRun("tf-ps-run hooks", python, environment={"DATA_SHARDS": "1"})
    plain = PlainProcesses("plain processes", python)
    itself = PlainProcesses("TensorFlow by itself", python, again="one")
    with_strategy = TfPsRun("tf-ps-run forkserver", python, STRATEGY)
    spawned_with_strategy = TfPsRun("tf-ps-run spawn", python, STRATEGY, spawn)
    plain_with_strategy = PlainProcesses("plain processes", python, STRATEGY)
    graph = {(forked.name, ""): REACHED, (hooks.name, ""): REACHED, (spawned.name, ""): SPAWNED}
    strategy = {(forked.name, ""): REACHED, (spawned.name, ""): SPAWNED}
    of_both = {(name, part): bound for (name, _), bound in graph.items() for part in ("", OF_THE_WORKER)}
    return (
        Fault(
            "server-death",
            "one of 2 parameter servers killed, graph mode, to the next step",
            "s",
            (forked, spawned, hooks, plain, itself),
            plain.name,
            server_death,
            of_both,
        ),
        Fault(
            "strategy-server-death",
            "one of 2 parameter servers killed, ParameterServerStrategy, to the next step",
            "s",
            (with_strategy, spawned_with_strategy, plain_with_strategy),
            plain.name,
            server_death,
            strategy,
        ),
        Fault(
            "planned-change",
            "from 1 to 2 parameter servers, graph mode, last step before to first step after",
            "s",
            (forked, spawned, hooks, plain),
            plain.name,
            planned_change,
            of_both,
        ),
        Fault(
            "chief-death",
            "the chief killed, graph mode, to its next step",
            "s",
            (forked, spawned, hooks, plain, itself),
            plain.name,
            chief_death,
            graph,
        ),
        Fault(
            "strategy-chief-death",
            "the chief killed, ParameterServerStrategy, to its next step",
            "s",
            (with_strategy, spawned_with_strategy, plain_with_strategy),
            plain.name,
            chief_death,
            strategy,
        ),
    )
