"""Every text about a cluster, in one place. The decisions give a code and its parameters, and hold no sentences.

The templates are as in `words.reasons`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrover_run.words.reasons import Code, Reason, ReasonCode, Reasons, register, shown_names
from dlrover_run.words.text import counted, join_words
from tf_ps_runner.cluster.model import NAME, Cluster, PlannedTask, Role, ServerBounds
from tf_ps_runner.cluster.rules import ROLES, ClusterRules
from tf_ps_runner.cluster.view import LostTask, tasks_of

MAX_ENDS_SHOWN = 3
"""How many ends are named one by one: those of a thousand tasks would fill the screen."""


class ClusterCode(ReasonCode):
    # While no version runs.
    NODES_HERE = "{number:#node} {number:is|are} here"
    TOO_FEW_NODES = "after {seconds:g} s {hosts:join} {hosts:is|are} here:"
    NO_NODE_HERE = "after {seconds:g} s no node is here:"
    JOB_IS_FOR = "the job is for {size}"
    OTHERS_MAY_COME = "others may come, for there is room for {slots}"
    SHORTAGE = "there is room for {room}"

    # A version that begins.
    VERSION = "version {number}:"
    ALL_RESTART = ", and all other processes are started again too"
    FEWER_SERVERS = "there is room for {number:#parameter server}"
    LEFTOVER = "{task} of an earlier version on {host} does not end, so training cannot start"

    # Ends, and what they cost.
    LOST = "{task} {what}"
    MORE_LOST = "and {number} more"
    RESTARTS_USED = "{most:the one restart|all {most} restarts} of {whose} {most:was|were} used"
    NO_RESTARTS = "no restart of {whose} is allowed"
    REPEATED = ", twice soon after its start, so another start would not help"
    MEMORY_EXHAUSTED = "more than {most} MiB are not allowed (--max-memory)"
    GOES_ON_WITHOUT = "{role} {number:is|are} not started again, and training goes on without {purpose}"
    NO_SLOT = "there is no room for another one now"
    EXCUSED = ", which costs no restart, because {number:#worker} {number:was|were} only tried"
    CHIEF_MOVES = ", and with it the position in the data"
    CHIEF_FITS = "there is room for a chief again"
    TAKES_PLACE = "{tasks:join} {tasks:takes its place|take their places}"
    TAKES_PLACE_ON = "{tasks:join} on {hosts:join} {tasks:takes its place|take their places}"
    GETS_MEMORY = " and gets {memory} instead of {before}"
    ONE_GETS_MEMORY = ", {task} gets {memory} instead of {before}"
    OTHERS_GET_MEMORY = ", and {number:#other} {number:gets|get} more too"
    MOVES = "{successor} takes the place of {task}"
    ADDED = "{tasks:join} {tasks:is|are} added"
    TOO_MANY = "{wanted} {number:is|are} wanted, so {extra:join} {extra:leaves|leave}"
    NO_TASK = "after {seconds:g} s there is no room for {task}"
    TOO_FEW_TASKS = "after {seconds:g} s there is room for {number} of at least {least} {role}"

    # The end of the job.
    CHIEF_SUCCEEDED = "{chief} on {host} has succeeded"
    LEFT_BEFORE_SUCCESS = "every node has left before the chief had succeeded"
    DID_NOT_END = "{tasks:join} had {seconds:g} s to end, and did not"

    PURPOSE_FAILED = "the {purpose} has failed: see the output of {role}"

    # The model with which a version begins.
    RESTORED = "restored from step {step}"
    BEGUN_ANEW = "begun anew"
    NO_STEP_LOST = ", no step lost"
    LAST_REPORTED = ", the last step that was reported"
    STEPS_LOST = ", {steps:#step} lost"
    AT_LEAST_LOST = ", at least {steps:#step} lost"

    # A planned change of the servers.
    NEAR_LIMIT = "{task} is near its limit of {limit}, and is to get {memory}"
    OTHER_NUMBER = "{wanted:#parameter server} {wanted:is|are} wanted instead of {current}"
    CHIEF_LEAVES = ", and the chief moves"
    MORE_MEMORY = "{tasks:join} {tasks:needs|need} more memory"
    NEXT_START = ": {tasks:join} {tasks:is|are} started while training goes on"
    NEXT_READY = "{number:#parameter server} of the next version {number:answers|answer}, so training pauses"
    CHANGE_GIVEN_UP = "the change is given up, and training goes on"
    OTHERS_WANTED = "other parameter servers are wanted by now"
    RESIZED = "{after:#parameter server} instead of {before}"
    STARTED_ANEW = "{after:#parameter server}, started anew"
    SAVED = "{chief} saved at step {step}"
    NOT_SAVED = "{late:join} did not leave within {seconds:g} s, so what was not saved is lost"

    # The numbers of servers that the tables of the model allow.
    BOUNDED = (
        "the number of parameter servers {exact:stays|must be at least} {least}: the table {table!r} has "
        '{parts:#part} and is looked up with partition_strategy="mod", so with another number of parts each id would '
        "get the row of another id"
    )
    PARTS_UNKNOWN = "did not restore the checkpoint: how many parts it holds of the table {table!r} cannot be read"
    PARTS_DIFFER = (
        "did not restore the checkpoint: it holds {parts:#part} of the table {table!r}, and the script "
        "makes {refused} with {present:#parameter server}"
    )
    SERVERS_NEEDED = ", so {number:#parameter server} {number:is|are} needed"
    AS_WHEN_WRITTEN = "use as many servers as when the checkpoint was written"
    START_WITH = "start the job with --ps={number}"

    # Scale requests.
    REQUEST = "{by} asked for {replicas}"
    OUT_OF_FIXED = "the job was started with {flag}={least}, so it cannot have {wanted}: start it with {flag}=MIN:MAX"
    OUT_OF_RANGE = "the job was started with {flag}={least}:{most}, so it cannot have {wanted}: give {least} to {most}"
    SERVERS_NOT_TRIED = (
        "new parameter servers have failed too often to be tried again, so training goes on with {present}"
    )
    NO_SLOTS = "there is room for {slots} now: start more nodes first, or ask for less"
    MAY_RECONNECT = "a node that was disconnected just now may come back, so try again in a moment"
    WHEN_IT_TRAINS = "{replicas}, once the job trains, if there is room by then: there is room for {slots} now"
    ALREADY_THERE = "{replicas} {number:is|are} there already"
    WORKERS_CHANGE = "{replicas}: no other process pauses for that"
    NEXT_SET_FITS = "{replicas}: the set that all go on with already has as many"
    GIVEN_BACK = "as many {role} as there is room for, from {least} to {most}"
    CHOOSES = "the job chooses the number of {role} itself again, from {least} to {most}"
    NEW_SET = (
        "{replicas}: a new set is started while training goes on; then the workers pause, the chief saves, and all go "
        "on with the new set"
    )

    # What a node without tasks waits for while others train.
    TRAINING = "{tasks} {number:trains|train}"
    SUCCEEDED = ", and {tasks} {number:has|have} succeeded"
    SPARE = "this node waits as a spare"
    ENDING = "the chief has succeeded, and the other tasks end"


register(ClusterCode, f"{NAME}.")


def task_name(task: PlannedTask) -> str:
    """`ps-1 (rank 1) on host-b`. A role with one task, such as the chief, has no rank in it. Called for reasons about
    one task that moves or gets more memory (`cluster/failures`, `cluster/reshape`), and by the texts about several."""
    rank = f" (rank {task.rank})" if ROLES[task.role].numbered else ""
    return f"{task.key}{rank} on {task.host}"


def task_names(tasks: Sequence[PlannedTask]) -> tuple[str, ...]:
    """The tasks with ranks and hosts, as far as they are shown."""
    return shown_names([task_name(task) for task in tasks])


def task_keys(tasks: Sequence[PlannedTask]) -> tuple[str, ...]:
    """The tasks by their keys, as far as they are shown."""
    return shown_names([str(task.key) for task in tasks])


def memory_size(memory: int) -> str:
    """A memory limit in MiB, as on a command line."""
    return f"{memory // 1024}Gi" if memory and memory % 1024 == 0 else f"{memory}Mi"


def lost_tasks(losses: Sequence[LostTask]) -> Reasons:
    """The ends of these tasks, as far as they are shown. Called wherever such an end changes the plan
    (`cluster/failures`, `cluster/reshape`, `cluster/scaling`, `cluster/autoscaling`)."""
    shown = [ClusterCode.LOST(task=task_name(loss.task), what=loss.end.exit_text) for loss in losses[:MAX_ENDS_SHOWN]]
    more = len(losses) - len(shown)
    return (*shown, ClusterCode.MORE_LOST(number=more)) if more else tuple(shown)


def replacements(losses: Sequence[LostTask], tasks: Sequence[PlannedTask]) -> Reasons:
    """Which of the tasks take the places of those that were lost. Called when a version replaces lost servers
    (`cluster/versions`), and when one other task is replaced (`cluster/failures`)."""
    before = {loss.task.rank: loss.task for loss in losses}
    successors = [task for task in tasks if task.rank in before]
    if not successors:
        return ()
    moved = {task.host for task in successors} - {loss.task.host for loss in losses}
    code = ClusterCode.TAKES_PLACE_ON if moved else ClusterCode.TAKES_PLACE
    reasons = [code(tasks=task_keys(successors), hosts=shown_names(sorted(moved)))]
    more = [task for task in successors if task.memory_mib != before[task.rank].memory_mib]
    is_one = len(successors) == 1
    for task in more[:MAX_ENDS_SHOWN]:
        old, memory = memory_size(before[task.rank].memory_mib), memory_size(task.memory_mib)
        reasons.append(
            (ClusterCode.GETS_MEMORY if is_one else ClusterCode.ONE_GETS_MEMORY)(
                task=task.key, memory=memory, before=old
            )
        )
    if len(more) > MAX_ENDS_SHOWN:
        reasons.append(ClusterCode.OTHERS_GET_MEMORY(number=len(more) - MAX_ENDS_SHOWN))
    return tuple(reasons)


def restored(step: int, before: int, paused: bool) -> Reasons:
    """From which step a version continues, and how many of `before` steps are lost. Unless all tasks had `paused` there
    may have been more steps, which were not reported."""
    if step < 0 or (step == 0 and before < 0):
        return ()
    where = ClusterCode.RESTORED(step=step) if step else ClusterCode.BEGUN_ANEW()
    if before < 0 or before == step == 0:
        return (where,)
    lost = max(0, before - step)
    if not lost:
        return where, (ClusterCode.NO_STEP_LOST() if paused else ClusterCode.LAST_REPORTED())
    return where, (ClusterCode.STEPS_LOST if paused else ClusterCode.AT_LEAST_LOST)(steps=lost)


def shortage(missing: Sequence[tuple[Role, int, int]], cluster: Cluster, limits: ClusterRules) -> Reasons:
    """What there is no slot for that every version needs: the role, how many there are, and the minimum."""
    parts = []
    for role, number, least in missing:
        if role is Role.PS:
            bounds = cluster.server_bounds
            exactly = "exactly" if bounds is not None and bounds.most == least else "at least"
            parts.append(f"{number} of {exactly} {replicas(role, least)}")
            if bounds is not None and bounds.least > limits.min_ps:
                held = f"the table {bounds.table!r} has {counted(bounds.parts, 'part')}"
                parts[-1] += f" ({held}, which another number would change)"
        else:
            spec = ROLES[role]
            parts.append(f"{number} of at least {least} {spec.label}" if spec.numbered else f"no {spec.noun}")
    return (ClusterCode.SHORTAGE(room=" and ".join(parts)),) if parts else ()


def too_few_tasks(role: Role, number: int, least: int, seconds: float) -> Reason:
    """That there was no slot for the minimum of a role in that time."""
    spec = ROLES[role]
    if not spec.numbered:
        return ClusterCode.NO_TASK(task=spec.counted(least), seconds=seconds)
    return ClusterCode.TOO_FEW_TASKS(number=number, least=least, role=spec.label, seconds=seconds)


def gathering(hosts: Sequence[str], rest: Reasons) -> Reasons:
    """Which nodes are here, and what they wait for."""
    named = (Code.NAMED(names=shown_names(hosts)),) if hosts else ()
    return (ClusterCode.NODES_HERE(number=len(hosts)), *named, *rest)


def others_may_come(slots: Mapping[Role, int], limits: ClusterRules) -> Reason:
    """The slots of the nodes that are here, as far as the job would use them."""
    most = {role: limits.replicas(role)[1] for role, spec in ROLES.items() if spec.numbered}
    room = [f"{min(slots[role], number)} of {replicas(role, number)}" for role, number in most.items()]
    return ClusterCode.OTHERS_MAY_COME(slots=" and ".join(room))


def training(cluster: Cluster) -> Reasons:
    bound = [(len(tasks_of(cluster, role)), spec) for role, spec in ROLES.items() if not spec.outlives_versions]
    # A role may have no task for a while, such as a chief for which there is no slot.
    here = [spec.counted(number) for number, spec in bound if number]
    over = {role: number for role in ROLES if (number := len(cluster.role_state(role).succeeded))}
    tasks = [replicas(role, number) if ROLES[role].numbered else ROLES[role].label for role, number in over.items()]
    succeeded = (ClusterCode.SUCCEEDED(tasks=join_words(tasks), number=sum(over.values())),) if tasks else ()
    number = sum(number for number, _ in bound)
    return (ClusterCode.TRAINING(tasks=join_words(here), number=number), *succeeded, ClusterCode.SPARE())


def reshaped(before: int, after: int) -> Reason:
    """Which servers a planned change has put in place of the former ones."""
    return (ClusterCode.RESIZED if after != before else ClusterCode.STARTED_ANEW)(after=after, before=before)


def bounded(bounds: ServerBounds) -> Reason:
    """How many parameter servers the tables of the model allow, and why."""
    exact = 1 if bounds.least == bounds.most else 0
    return ClusterCode.BOUNDED(exact=exact, least=bounds.least, table=bounds.table, parts=bounds.parts)


def replicas(role: Role, number: int) -> str:
    return counted(number, ROLES[role].noun)
