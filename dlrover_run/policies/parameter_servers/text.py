"""Every text about a cluster, in one place. The decisions give a code and its parameters, and hold no sentences.

A template is as in `coordination.reasons`, with the names of `_Formatter.formats`. A text that continues another one
begins with its separator.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from dlrover_run.coordination.reasons import TextFormatter
from dlrover_run.coordination.text import counted, departure_text, join_names
from dlrover_run.policies.parameter_servers.model import Cluster, DesiredReplicas, Role, ServerBounds, Task
from dlrover_run.policies.parameter_servers.rules import ROLES, ClusterRules
from dlrover_run.policies.parameter_servers.view import LostTask

MAX_ENDS_SHOWN = 3
"""How many ends are named one by one: those of a thousand tasks would fill the screen."""

EVALUATION_FAILED = "the evaluation has failed: see the output of the evaluator"
"""Part of the reason of a finished job whose evaluator has failed."""


class Code(enum.Enum):
    """What the coordinator reports of a cluster; the value is the template of the text. A call renders it."""

    # While no version runs.
    NODES_HERE = "{hosts:#node} {hosts:is|are} here"
    LAST_CALL_OVER = ", and no other node came for {seconds:g} s"
    TOO_FEW_NODES = "after {seconds:g} s {here}: {short}"
    EVERY_NODE_LEFT = "every node has left"
    NO_NODE_LEFT = ", and no node is here any more"
    JOB_IS_FOR = "the job is for {size}"
    OTHERS_MAY_COME = "others may come, for there is room for {slots}"
    RECOVERED = "the job was running when its coordinator began"
    UNKNOWN_NODE = "the node that had {role} {rank}"

    # A version that begins.
    VERSION = "version {number}: {why}"
    ALL_RESTART = ", and all other processes are started again too"
    FEWER_SERVERS = "there is room for {number:#parameter server}"
    LEFTOVER = "; {task} of an earlier version on {host} does not end, so training cannot start"

    # Ends, and what they cost.
    RESTARTS_USED = "; {most:the one restart|all {most} restarts} of {whose} {most:was|were} used"
    NO_RESTARTS = "; no restart of {whose} is allowed"
    REPEATED = ", twice soon after its start, so another start would not help"
    MEMORY_EXHAUSTED = "; more than {most} MiB are not allowed (--max-memory)"
    NO_EVALUATION = "; the evaluator is not started again, and training goes on without evaluation"
    NO_SLOT = "; there is no room for another one now"
    CHIEF_MOVES = ", and with it the position in the data"
    CHIEF_FITS = "there is room for a chief again"
    MOVES = "{leaving}; {successor:name} takes the place of {task.key}"
    ADDED = "{tasks:names} {tasks:is|are} added"
    TOO_MANY_WORKERS = "{wanted:#worker} {wanted:is|are} wanted, so {extra:names} {extra:leaves|leave}"
    NO_CHIEF = "; after {seconds:g} s there is no room for a chief"
    TOO_FEW_WORKERS = "; after {seconds:g} s there is room for {workers} of at least {least} workers"

    # The end of the job.
    CHIEF_SUCCEEDED = "{chief.key} on {chief.host} has succeeded"
    LEFT_BEFORE_SUCCESS = "every node has left before the chief had succeeded"
    DID_NOT_END = "; {tasks:keys} had {seconds:g} s to end, and did not"

    # A planned change of the servers.
    NEAR_LIMIT = "{task:name} is near its limit of {task.memory:size}, and is to get {memory:size}"
    OTHER_NUMBER = "{wanted:#parameter server} {wanted:is|are} wanted instead of {current}"
    NODE_LEAVES = "{host} {departure}"
    CHIEF_LEAVES = "{leaving}, and the chief moves"
    MORE_MEMORY = "{tasks:keys} {tasks:needs|need} more memory"
    NEXT_START = "{why}: {tasks:keys} {tasks:is|are} started while training goes on"
    NEXT_READY = "{number:#parameter server} of the next version {number:answers|answer}, so training pauses"
    CHANGE_GIVEN_UP = "; the change is given up, and training goes on"
    OTHERS_WANTED = "other parameter servers are wanted by now"
    RESIZED = "{after:#parameter server} instead of {before}"
    STARTED_ANEW = "{after:#parameter server}, started anew"
    SAVED = "; {chief.key} saved at step {step}"
    NOT_SAVED = "; {late} did not leave within {seconds:g} s, so what was not saved is lost"

    # The numbers of servers that the tables of the model allow.
    BOUNDED = (
        "the number of parameter servers {number}: the table {bounds.table!r} has {bounds.parts:#part} and is looked "
        'up with partition_strategy="mod", so with another number of parts each id would get the row of another id'
    )
    PARTS_UNKNOWN = (
        "did not restore the checkpoint: how many parts it holds of the table {bounds.table!r} cannot be read"
    )
    PARTS_DIFFER = (
        "did not restore the checkpoint: it holds {bounds.parts:#part} of the table {bounds.table!r}, and the script "
        "makes {bounds.refused} with {present:#parameter server}"
    )
    SERVERS_NEEDED = ", so {number:#parameter server} are needed"
    AS_WHEN_WRITTEN = "; use as many servers as when the checkpoint was written"
    START_WITH = "; start the job with --ps={number}"

    # Scale requests.
    REFUSED = ", which is refused: {refusal}"
    OUT_OF_FIXED = "the job was started with {flag}={least}, so it cannot have {wanted}: start it with {flag}=MIN:MAX"
    OUT_OF_RANGE = "the job was started with {flag}={least}:{most}, so it cannot have {wanted}: give {least} to {most}"
    SERVERS_NOT_TRIED = (
        "new parameter servers have failed too often to be tried again, so training goes on with {present}"
    )
    NO_SLOTS = "there is room for {slots} now: start more nodes first, or ask for less"
    WHEN_IT_TRAINS = ", once the job trains, if there is room by then: there is room for {slots} now"
    ALREADY_THERE = " {number:is|are} there already"
    WORKERS_CHANGE = ": no other process pauses for that"
    NEXT_SET_FITS = ": the set that all go on with already has as many"
    NEW_SET = (
        ": a new set is started while training goes on; then the workers pause, the chief saves, and all go on with "
        "the new set"
    )

    # What a node without tasks waits for while others train.
    TRAINING = "{size} train{succeeded}; this node waits as a spare"
    ENDING = "the chief has succeeded, and the other tasks end"

    def __call__(self, **params: object) -> str:
        """The text with these parameters."""
        return _FORMATTER.format(self.value, **params)


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


def join(*parts: str) -> str:
    """The parts that are not empty, one after the other."""
    return "; ".join(part for part in parts if part)


def lost_tasks(losses: Sequence[LostTask]) -> str:
    """How these tasks have ended."""
    shown = [f"{task_name(loss.task)} {loss.end.what}" for loss in losses[:MAX_ENDS_SHOWN]]
    more = len(losses) - MAX_ENDS_SHOWN
    return join(*shown, f"and {more} more" if more > 0 else "")


def replacements(losses: Sequence[LostTask], tasks: Sequence[Task]) -> str:
    """Which of the tasks take the places of those that were lost."""
    before = {loss.task.rank: loss.task for loss in losses}
    successors = [task for task in tasks if task.rank in before]
    if not successors:
        return ""
    moved = {task.host for task in successors} - {loss.task.host for loss in losses}
    where = f" on {join_names(sorted(moved))}" if moved else ""
    is_one = len(successors) == 1
    text = f"{_keys(successors)}{where} {'takes its place' if is_one else 'take their places'}"
    more = [task for task in successors if task.memory != before[task.rank].memory]
    if not more:
        return text
    gets = [
        f"{'and' if is_one else task.key} gets {memory_size(task.memory)} instead of "
        f"{memory_size(before[task.rank].memory)}"
        for task in more[:MAX_ENDS_SHOWN]
    ]
    others = f", and {len(more) - MAX_ENDS_SHOWN} others get more too" if len(more) > MAX_ENDS_SHOWN else ""
    return f"{text}{' ' if is_one else ', '}{', '.join(gets)}{others}"


def restarts_used(most: int, role: Role, with_memory: bool) -> str:
    """That all restarts of the role are used up."""
    whose = ROLES[role].label + " with more memory" * with_memory
    return Code.RESTARTS_USED(most=most, whose=whose) if most else Code.NO_RESTARTS(whose=whose)


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
        return f"{where}, no step lost" if paused else f"{where}, the last step that was reported"
    return f"{where}, {'' if paused else 'at least '}{counted(lost, 'step')} lost"


def shortage(missing: Sequence[tuple[Role, int, int]], cluster: Cluster, limits: ClusterRules) -> str:
    """What there is no slot for that every version needs: the role, how many there are, and the minimum."""
    parts = []
    for role, number, least in missing:
        if role is Role.PS:
            bounds = cluster.server_bounds
            exactly = "exactly" if bounds is not None and bounds.most == least else "at least"
            parts.append(f"{number} of {exactly} {counted(least, _NOUNS[role])}")
            if bounds is not None and bounds.least > limits.min_ps:
                held = f"the table {bounds.table!r} has {counted(bounds.parts, 'part')}"
                parts[-1] += f" ({held}, which another number would change)"
        else:
            parts.append("no chief" if role is Role.CHIEF else f"{number} of at least {least} {ROLES[role].label}")
    return f"there is room for {' and '.join(parts)}" if parts else ""


def too_few_nodes(hosts: Sequence[str], seconds: float, short: str) -> str:
    """That too few nodes have come in that time."""
    here = f"{join_names(hosts)} {'is' if len(hosts) == 1 else 'are'} here" if hosts else "no node is here"
    return Code.TOO_FEW_NODES(here=here, seconds=seconds, short=short)


def gathering(hosts: Sequence[str], rest: str) -> str:
    """Which nodes are here, and what they wait for."""
    return join(Code.NODES_HERE(hosts=hosts) + (f": {join_names(hosts)}" if hosts else ""), rest)


def others_may_come(slots: Mapping[Role, int], limits: ClusterRules) -> str:
    """The slots of the nodes that are here, as far as the job would use them."""
    most = {Role.PS: limits.max_ps, Role.WORKER: limits.max_workers}
    room = [f"{min(slots[role], most[role])} of {counted(most[role], _NOUNS[role])}" for role in most]
    return Code.OTHERS_MAY_COME(slots=" and ".join(room))


def training(cluster: Cluster) -> str:
    """Which tasks train, and which have succeeded."""
    numbers = [sum(task.role is role for task in cluster.tasks) for role in (Role.PS, Role.WORKER)]
    size = f"{counted(numbers[0], 'parameter server')}, a chief and {counted(numbers[1], 'worker')}"
    workers, evaluator = (len(cluster.role_state(role).succeeded) for role in (Role.WORKER, Role.EVALUATOR))
    over = ([counted(workers, "worker")] if workers else []) + (["the evaluator"] if evaluator else [])
    has = "has" if workers + evaluator == 1 else "have"
    return Code.TRAINING(size=size, succeeded=f", and {join_names(over)} {has} succeeded" if over else "")


def node_leaves(task: Task, signal: str) -> str:
    """That the task's node leaves, and because of which signal if that is known."""
    return Code.NODE_LEAVES(host=task.host, departure=departure_text(signal))


def reshaped(before: int, after: int, how: str) -> str:
    """Which servers a planned change has put in place of the former ones."""
    return (Code.RESIZED if after != before else Code.STARTED_ANEW)(after=after, before=before) + how


def bounded(bounds: ServerBounds) -> str:
    """How many parameter servers the tables of the model allow, and why."""
    number = f"stays {bounds.least}" if bounds.least == bounds.most else f"must be at least {bounds.least}"
    return Code.BOUNDED(number=number, bounds=bounds)


def scale_requested(host: str, request: DesiredReplicas, refusal: str) -> str:
    """What was requested through a node, and why it is refused if it is."""
    numbers = {Role.PS: request.ps, Role.WORKER: request.workers}
    asked = "; and for ".join(counted(number, _NOUNS[role]) for role, number in numbers.items() if number is not None)
    return f"{host} asked for {asked or 'nothing'}{Code.REFUSED(refusal=refusal) if refusal else ''}"


def replicas(role: Role, number: int) -> str:
    """That many tasks of a role."""
    return counted(number, _NOUNS[role])


_NOUNS = {Role.PS: "parameter server", Role.WORKER: "worker"}


def _keys(tasks: Sequence[Task]) -> str:
    return join_names([str(task.key) for task in tasks])


class _Formatter(TextFormatter):
    """Renders the templates."""

    formats: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "name": task_name,
        "names": lambda tasks: join_names([task_name(task) for task in tasks]),
        "keys": _keys,
        "size": memory_size,
    }


_FORMATTER = _Formatter()
