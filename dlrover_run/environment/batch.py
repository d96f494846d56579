"""LSF and PBS: a job knows its hosts, and each launcher finds its rank by its own host name.

Neither has a launcher of its own that numbers the nodes; `blaunch`, `pbsdsh` or `mpirun` starts a process on each.
"""

from __future__ import annotations

from dlrover_run.environment import host_list
from dlrover_run.environment.host_list import Host, HostListError
from dlrover_run.environment.records import (
    BY_FLAGS,
    Context,
    Contradiction,
    Detected,
    Detection,
    Unstarted,
    is_count,
    port_of,
)
from dlrover_run.spec import FlagValue

_GIVE_ALL = f"give --hostfile, or {BY_FLAGS}"


def detect_lsf(context: Context) -> Detection:
    """What LSF's variables say. Raises Contradiction."""
    job = context.given("LSB_JOBID") or FlagValue("LSB_MCPU_HOSTS", "none")
    source, hosts = lsf_hosts(context)
    if not hosts:
        task = context.number("LSF_PM_TASKID")
        if task and int(task.text) > 1:
            raise Contradiction(f"{task.source} is {task.text}, and LSB_MCPU_HOSTS is not set", _GIVE_ALL)
        return None
    if len(hosts) > 1 and context.interactive and "LSF_PM_TASKID" not in context.environ:
        return _shell(f"LSF job {job.text}", len(hosts), source, f"blaunch -z '{' '.join(hosts)}'", context)
    index = context.given("LSB_JOBINDEX")
    name = f"{job.text}_{index.text}" if index and index.text != "0" else job.text
    return _by_host_name("lsf", f"LSF job {name}", job, name, source, hosts, context)


def lsf_hosts(context: Context) -> tuple[str, list[str]]:
    """The hosts of an LSF job, and the variable that names them.

    A first host with one slot, before hosts with several, only runs the job script.
    """
    hosts: list[Host] = []
    source = "LSB_MCPU_HOSTS"
    words = context.environ.get(source, "").split()
    if words:
        if len(words) % 2 or not all(map(is_count, words[1::2])):
            raise Contradiction(f"{source} {' '.join(words)[:200]!r} is not pairs of hosts and slots", _GIVE_ALL)
        hosts = [Host(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]
    elif path := context.given("LSB_DJOB_HOSTFILE"):
        source, hosts = path.source, read_file(path, context) or []
    elif names := context.given("LSB_HOSTS"):
        source, hosts = names.source, [Host(name) for name in dict.fromkeys(names.text.split())]
    if len(hosts) > 1 and hosts[0].slots == 1 and all(host.slots > 1 for host in hosts[1:]):
        hosts = hosts[1:]
    return source, list(dict.fromkeys(host.name for host in hosts))


def detect_pbs(context: Context) -> Detection:
    """What the variables of PBS or Torque say. Raises Contradiction."""
    path, number_of_node = context.given("PBS_NODEFILE"), context.number("PBS_NODENUM")
    if path is None:
        if number_of_node and int(number_of_node.text):
            problem = f"{number_of_node.source} is {number_of_node.text}, and PBS_NODEFILE is not set"
            raise Contradiction(problem, _GIVE_ALL)
        return None
    job = context.given("PBS_JOBID") or FlagValue(path.source, "none")
    listed = read_file(path, context)
    if listed is None:
        # PBS writes it on the first host only.
        raise Contradiction(
            f"{path.source} names {path.text}, which is not on this node",
            f"copy it to a shared directory and give --hostfile, or {BY_FLAGS}",
        )
    hosts = [host.name for host in listed]
    task = context.number("PBS_TASKNUM")
    # The first task of the first node is the script or the shell of the job; pbsdsh starts the ones after it.
    is_script = task is not None and task.text == "1" and (number_of_node is None or number_of_node.text == "0")
    if len(hosts) > 1 and (context.interactive or is_script):
        launch = f"mpirun -np {len(hosts)} -N 1"
        return _shell(f"PBS job {job.text}", len(hosts), path.source, launch, context)
    return _by_host_name("pbs", f"PBS job {job.text}", job, job.text, path.source, hosts, context)


def read_file(path: FlagValue, context: Context) -> list[Host] | None:
    """The hosts of a file; None if there is none. Raises Contradiction when it is not a list of hosts."""
    text = context.read(path.text)
    if text is None:
        return None
    try:
        return host_list.read_hosts(text)
    except HostListError as error:
        raise Contradiction(f"{path.source} {path.text} {error}", "correct it, or give --cluster=none") from None


def _shell(title: str, nodes: int, source: str, launch: str, context: Context) -> Unstarted:
    return Unstarted(
        f"{title} has {nodes} nodes ({source}), and this launcher was started on one of them only",
        f"give `{launch} {context.command}` for a job on all of them, or --cluster=none for one on this node alone",
        hint_only=context.interactive,
    )


def _by_host_name(
    cluster: str,
    title: str,
    job: FlagValue,
    name: str,
    source: str,
    hosts: list[str],
    context: Context,
) -> Detected:
    at = host_list.find_host(hosts, context.hostname)
    if at is None and len(hosts) > 1:
        raise Contradiction(f"this host, {context.hostname}, is not one of those of {title} ({source})", _GIVE_ALL)
    return Detected(
        cluster,
        title,
        FlagValue(source, str(len(hosts))),
        FlagValue(f"the host name in {source}", str(at or 0)),
        host=FlagValue(source, hosts[0]),
        port=port_of(name),
        run_id=FlagValue(job.source, name),
        workers=context.visible_gpus(),
        first=not at,
        hosts=tuple(hosts),
    )
