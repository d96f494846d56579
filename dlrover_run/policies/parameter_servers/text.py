"""Every text about a cluster, in one place: a function for each reason, whose arguments are its parameters.

The decisions pass what they know and hold no sentences of their own. A text that continues a reason begins with `; `.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_run.coordination import words
from dlrover_run.coordination.words import counted, join_names
from dlrover_run.policies.parameter_servers.model import Cluster, DesiredReplicas, Role, ServerBounds, Task
from dlrover_run.policies.parameter_servers.rules import ROLES, ClusterRules
from dlrover_run.policies.parameter_servers.view import LostTask

MAX_ENDS_SHOWN = 3
"""How many ends are named one by one: those of a thousand tasks would fill the screen."""

EVALUATION_FAILED = "the evaluation has failed: see the output of the evaluator"
"""Part of the reason of a finished job whose evaluator has failed."""

_NOUNS = {Role.PS: "parameter server", Role.WORKER: "worker"}


# Parts of sentences.


def task_name(task: Task) -> str:
    """`ps-1 (rank 1) on host-b`. There is one chief and one evaluator, so their rank is left out."""
    rank = f" (rank {task.rank})" if ROLES[task.role].numbered else ""
    return f"{task.key}{rank} on {task.host}"


def memory_size(memory: int) -> str:
    """A memory limit in MiB, as on a command line."""
    return f"{memory // 1024}Gi" if memory and memory % 1024 == 0 else f"{memory}Mi"


def new_part(before: str, reason: str) -> str:
    """The part of a reason that was not shown before, where it continues the one before."""
    return reason[len(before) + 2 :] if before and reason.startswith(f"{before}; ") else reason


def servers(number: int) -> str:
    """That many parameter servers."""
    return counted(number, "parameter server")


def job_size(rules: ClusterRules) -> str:
    """What a job consists of: `1 to 4 parameter servers, a chief and 2 workers`."""
    parts = [_range(rules.min_ps, rules.max_ps, "parameter server"), "a chief"]
    parts += [_range(rules.min_workers, rules.max_workers, "worker")] if rules.max_workers else []
    parts += ["an evaluator"] if rules.evaluator else []
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def departure(task: Task, signal: str) -> str:
    """That the task's node leaves, and because of which signal if that is known."""
    return f"{task.host} {words.departure_text(signal)}"


def lost_tasks(losses: Sequence[LostTask]) -> str:
    """How these tasks have ended."""
    shown = [f"{task_name(loss.task)} {loss.end.what}" for loss in losses[:MAX_ENDS_SHOWN]]
    more = len(losses) - MAX_ENDS_SHOWN
    return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)


def replacements(losses: Sequence[LostTask], tasks: Sequence[Task]) -> str:
    """Which of the tasks take the places of those that were lost."""
    ranks = {loss.task.rank for loss in losses}
    successors = [task for task in tasks if task.rank in ranks]
    if not successors:
        return ""
    moved = {task.host for task in successors} - {loss.task.host for loss in losses}
    where = f" on {join_names(sorted(moved))}" if moved else ""
    is_one = len(successors) == 1
    text = f"{_keys(successors)}{where} {'takes its place' if is_one else 'take their places'}"
    before = {loss.task.rank: loss.task.memory for loss in losses}
    more = [task for task in successors if task.memory != before[task.rank]]
    if not more:
        return text
    gets = [
        f"{'and' if is_one else task.key} gets {memory_size(task.memory)} instead of {memory_size(before[task.rank])}"
        for task in more[:MAX_ENDS_SHOWN]
    ]
    others = f", and {len(more) - MAX_ENDS_SHOWN} others get more too" if len(more) > MAX_ENDS_SHOWN else ""
    return f"{text}{' ' if is_one else ', '}{', '.join(gets)}{others}"


# Before the first version, and between two of them.


def nodes_here(hosts: Sequence[str]) -> str:
    return f"{counted(len(hosts), 'node')} {'is' if len(hosts) == 1 else 'are'} here"


def last_call_over(seconds: float) -> str:
    return f", and nobody else came for {seconds:g} s"


def too_few_nodes(hosts: Sequence[str], seconds: float, short: str) -> str:
    here = f"{join_names(hosts)} {'is' if len(hosts) == 1 else 'are'} here" if hosts else "no node is here"
    return f"after {seconds:g} s {here}: {short}"


def shortage(missing: Sequence[tuple[Role, int, int]], cluster: Cluster, limits: ClusterRules) -> str:
    """What there is no slot for that every version needs: the role, how many there are, and the minimum."""
    parts = []
    for role, number, least in missing:
        if role is Role.PS:
            bounds = cluster.server_bounds
            exactly = "exactly" if bounds is not None and bounds.most == least else "at least"
            why = ""
            if bounds is not None and bounds.least > limits.min_ps:
                part = counted(bounds.parts, "part")
                why = f" (the table {bounds.table!r} has {part}, which another number would change)"
            parts.append(f"{number} of {exactly} {servers(least)}{why}")
        else:
            parts.append("no chief" if role is Role.CHIEF else f"{number} of at least {least} {ROLES[role].label}")
    return f"there is room for {' and '.join(parts)}" if parts else ""


def version_begins(number: int, why: str, successors: str, fewer: int | None) -> str:
    """`fewer` is the number of servers where that is less than is desired."""
    left = "" if fewer is None else f"there is room for {servers(fewer)}"
    return "; ".join(part for part in (f"version {number}: {why}", successors, left) if part)


ALL_RESTART = ", and all other processes are started again too"
EVERY_NODE_LEFT = "every node has left"
NO_NODE_LEFT = ", and no node is here any more"
LEFT_BEFORE_SUCCESS = "every node has left before the chief had succeeded"


def restored(step: int, before: int, paused: bool) -> str:
    """From which step a version continues, and how many of `before` steps are lost. Unless all tasks had `paused` there
    may have been more steps, which were not reported."""
    if step < 0:
        return ""
    where = f"; {f'restored from step {step}' if step else 'begun anew'}"
    lost = max(0, before - step)
    if before < 0:
        return where if step else ""
    if before == step == 0:
        return where
    if not lost:
        return f"{where}, no step lost" if paused else f"{where}, the last that was told of"
    return f"{where}, {'' if paused else 'at least '}{counted(lost, 'step')} lost"


RECOVERED = "the job was running when its coordinator began"


def unknown_node(role: Role, rank: int) -> str:
    return f"the node that had {role.value} {rank}"


def leftover(key: object, host: str) -> str:
    return f"; {key or 'a process'} of before on {host} does not end, so nobody may train"


# Losses and restarts.


def restarts_used(most: int, role: Role, with_memory: bool) -> str:
    whose = f"of {ROLES[role].label}{' with more memory' if with_memory else ''}"
    if not most:
        return f"; no restart {whose} is allowed"
    return f"; the one restart {whose} was used" if most == 1 else f"; all {most} restarts {whose} were used"


def repeated() -> str:
    return ", twice soon after its start, so another start would not help"


def memory_exhausted(most: int) -> str:
    return f"; more than {most} MiB are not allowed (--max-memory)"


NO_EVALUATION = "; the evaluator is not started again, and training goes on without evaluation"
CHIEF_MOVES = ", and with it the place in the data"
NO_SLOT = "; there is no room for another one now"
CHIEF_FITS = "there is room for a chief again"


def moves(leaving: str, successor: Task, task: Task) -> str:
    return f"{leaving}; {task_name(successor)} takes the place of {task.key}"


def added(tasks: Sequence[Task]) -> str:
    return f"{_named(tasks)} {_is(tasks)} added"


def too_many_workers(wanted: int, extra: Sequence[Task]) -> str:
    leave = "leaves" if len(extra) == 1 else "leave"
    return f"{counted(wanted, 'worker')} {'is' if wanted == 1 else 'are'} wanted, so {_named(extra)} {leave}"


def insufficient(workers: int, least: int | None, seconds: float) -> str:
    """Why a version cannot go on after so many seconds: without a chief, or with fewer workers than `least`."""
    what = "no room for a chief" if least is None else f"room for {workers} of at least {least} workers"
    return f"; after {seconds:g} s there is {what}"


# The end.


def chief_succeeded(chief: Task) -> str:
    return f"{chief.key} on {chief.host} has succeeded"


def did_not_end(late: Sequence[Task], seconds: float) -> str:
    return f"; {_keys(late)} had {seconds:g} s to end, and did not"


# Planned changes.


def near_limit(task: Task, memory: int) -> str:
    return f"{task_name(task)} is near its limit of {memory_size(task.memory)}, and is to get {memory_size(memory)}"


def other_number_wanted(wanted: int, current: int) -> str:
    return f"{servers(wanted)} {'is' if wanted == 1 else 'are'} wanted instead of {current}"


def nodes_leave(departures: Sequence[str]) -> str:
    return join_names(list(dict.fromkeys(departures)))


def chief_leaves(leaving: str) -> str:
    return f"{leaving}, and the chief moves"


def more_memory_needed(tasks: Sequence[Task]) -> str:
    return f"{_keys(tasks)} {'needs' if len(tasks) == 1 else 'need'} more memory"


def next_servers_start(why: str, tasks: Sequence[Task]) -> str:
    return f"{why}: {_keys(tasks)} {_is(tasks)} started while training goes on"


def next_servers_ready(number: int) -> str:
    return f"{servers(number)} of the next version {'answers' if number == 1 else 'answer'}, so training pauses"


def change_failed(losses: Sequence[LostTask], problem: str) -> str:
    return f"{lost_tasks(losses)}{f'{problem}; the change is given up, and training goes on' if problem else ''}"


OTHER_SERVERS_WANTED = "other parameter servers are wanted by now"


def reshaped(before: int, after: int, how: str) -> str:
    number = f"{servers(after)} instead of {before}" if after != before else f"{servers(after)}, started anew"
    return f"{number}; {how}" if how else number


def saved(chief: Task, step: int) -> str:
    return f"{chief.key} saved at step {step}" if step >= 0 else ""


def not_saved(workers: Sequence[Task], seconds: float) -> str:
    late = _keys(workers) or "the chief"
    return f"{late} did not leave within {seconds:g} s, so what was not saved is lost"


# Numbers of servers that the tables of the model allow.


def bounded(bounds: ServerBounds | None) -> str:
    """How many parameter servers the tables of the model allow, and why."""
    if bounds is None:
        return ""
    number = f"stays {bounds.least}" if bounds.least == bounds.most else f"must be at least {bounds.least}"
    return (
        f"the number of parameter servers {number}: the table {bounds.table!r} has {counted(bounds.parts, 'part')} and "
        'is looked up with partition_strategy="mod", so with another number of parts each id would get the row of '
        "another id"
    )


def not_restored(bounds: ServerBounds, present: int) -> str:
    """Why the chief of a version with `present` servers did not restore the model, as text that follows its name."""
    before = "did not restore the checkpoint: "
    if not bounds.parts:
        return f"{before}how many parts it holds of the table {bounds.table!r} cannot be read"
    held = f"it holds {counted(bounds.parts, 'part')} of the table {bounds.table!r}"
    return f"{before}{held}, and the script makes {bounds.refused} with {servers(present)}"


def servers_needed(number: int) -> str:
    return f", so {servers(number)} are needed"


AS_WHEN_WRITTEN = "; use as many servers as when the checkpoint was written"


def start_with(number: int) -> str:
    return f"; start the job with --ps={number}"


# Scale requests.


def scale_requested(host: str, request: DesiredReplicas, refusal: str) -> str:
    numbers = [] if request.ps is None else [servers(request.ps)]
    numbers += [] if request.workers is None else [counted(request.workers, "worker")]
    asked = f"{host} asked for {'; and for '.join(numbers) or 'nothing'}"
    return f"{asked}, which is refused: {refusal}" if refusal else asked


def out_of_range(flag: str, wanted: int, least: int, most: int) -> str:
    began = f"{flag}={least}" if least == most else f"{flag}={least}:{most}"
    remedy = f"start it with {flag}=MIN:MAX" if least == most else f"give {least} to {most}"
    return f"the job was started with {began}, so it cannot have {wanted}: {remedy}"


def servers_not_tried(present: int) -> str:
    return f"new parameter servers have failed too often to be tried again, so training goes on with {present}"


def no_slots(numbers: Sequence[tuple[Role, int]]) -> str:
    room = " and ".join(counted(number, _NOUNS[role]) for role, number in numbers)
    return f"there is room for {room} now: start more nodes first, or ask for less"


def scale_follows(role: Role, number: int, how: str) -> str:
    return f"{counted(number, _NOUNS[role])}{how}"


def when_it_trains(slots: int) -> str:
    return f", once the job trains, if there is room by then: there is room for {slots} now"


def already_there(number: int) -> str:
    return f" {'is' if number == 1 else 'are'} there already"


WORKERS_CHANGE = ": nobody else pauses for that"
NEXT_SET_FITS = ": the set that all go on with already has as many"
NEW_SET = (
    ": a new set is started while training goes on; then the workers pause, the chief saves, and all go on with "
    "the new set"
)


# What a node without tasks waits for.

ENDING = "the chief has succeeded, and the others come to their end"


def training(cluster: Cluster) -> str:
    numbers = [sum(task.role is role for task in cluster.tasks) for role in (Role.PS, Role.WORKER)]
    size = f"{servers(numbers[0])}, a chief and {counted(numbers[1], 'worker')}"
    over = [counted(len(cluster.succeeded_workers), "worker")] if cluster.succeeded_workers else []
    over += ["the evaluator"] if cluster.evaluator_succeeded else []
    has = "has" if len(cluster.succeeded_workers) + cluster.evaluator_succeeded == 1 else "have"
    succeeded = f", and {join_names(over)} {has} succeeded" if over else ""
    return f"{size} train{succeeded}; this node steps in should another one be needed"


def gathering(hosts: Sequence[str], rest: str) -> str:
    return f"{nodes_here(hosts)}{(hosts and f': {join_names(hosts)}') or ''}; {rest}"


def others_may_come(slots: dict[Role, int], limits: ClusterRules) -> str:
    """The slots of the nodes that are here, as far as the job would use them."""
    most = {Role.PS: limits.max_ps, Role.WORKER: limits.max_workers}
    room = " and ".join(f"{min(slots[role], most[role])} of {counted(most[role], _NOUNS[role])}" for role in most)
    return f"others may come, for there is room for {room}"


def _keys(tasks: Sequence[Task]) -> str:
    return join_names([str(task.key) for task in tasks])


def _named(tasks: Sequence[Task]) -> str:
    return join_names([task_name(task) for task in tasks])


def _is(tasks: Sequence[Task]) -> str:
    return "is" if len(tasks) == 1 else "are"


def _range(least: int, most: int, noun: str) -> str:
    return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"
