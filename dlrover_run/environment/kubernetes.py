"""Kubernetes: indexed Jobs, JobSets, the TrainJobs and PyTorchJobs of Kubeflow, and Volcano.

The API server gives a pod its index, not the number of pods. What Kubeflow sets as `PET_*` is read as such; here it
only completes what is missing.
"""

from __future__ import annotations

import re

from dlrover_run.environment import host_list
from dlrover_run.environment.records import (
    BY_FLAGS,
    Context,
    Contradiction,
    Detected,
    Detection,
    Unstarted,
    is_count,
    read_number,
)
from dlrover_run.spec import FlagValue

INDEX = "JOB_COMPLETION_INDEX"
PORT = 29400
"""The default port of a master: a pod has an address of its own, so no other job can have it."""

HOSTS_FILE = "/etc/hosts"
"""Where the kubelet writes the full name of a pod that has a subdomain."""

_SERVICE_REMEDY = (
    "give the Job a headless Service and its pods `subdomain:`, or give --rdzv-endpoint=HOST:PORT, where HOST is the "
    "first pod"
)
_VOLCANO_LIST = re.compile(r"VC_(.+)_HOSTS", re.ASCII)


def detect(context: Context) -> Detection:
    """What the variables of a pod say. Raises Contradiction."""
    found = _volcano(context) or _ranked(context) or _indexed(context)
    if isinstance(found, Detected) and context.interactive and found.size != 1:
        index = f"{found.node_rank.source}={found.node_rank.text}" if found.node_rank else found.title
        return Unstarted(
            f"{index}: this pod is one of several, and a terminal started this launcher",
            "give --cluster=kubernetes for a job on all pods",
            hint_only=True,
        )
    return found


def _indexed(context: Context) -> Detection:
    """An indexed Job, or one Job of a JobSet."""
    index = context.number(INDEX)
    if index is None:
        return None
    job_index = context.number("JOB_INDEX") if context.given("JOBSET_NAME", "REPLICATED_JOB_NAME") else None
    name = context.given("JOBSET_NAME", "JOB_NAME")
    own = context.hostname.partition(".")[0]
    stem = own.removesuffix(f"-{job_index.text}-{index.text}" if job_index else f"-{index.text}")
    run_id = name or (FlagValue("the host name", stem) if stem != own else None)
    title = f"Kubernetes Job {run_id.text}" if run_id else "Kubernetes Job"
    rank = context.number("PET_NODE_RANK") or (index if job_index is None or job_index.text == "0" else None)
    return Detected(
        "kubernetes",
        title,
        None,
        rank,
        host=context.given("PET_MASTER_ADDR", "MASTER_ADDR") or _first_pod(context, stem, index, job_index),
        port=read_number(port) if (port := context.given("PET_MASTER_PORT", "MASTER_PORT")) else PORT,
        run_id=run_id,
        workers=context.visible_gpus(),
        first=index.text == "0" and (job_index is None or job_index.text == "0"),
        least=_least(context, index) if job_index is None or job_index.text == "0" else 2,
        no_host=_SERVICE_REMEDY,
    )


def _first_pod(context: Context, stem: str, index: FlagValue, job_index: FlagValue | None) -> FlagValue | None:
    """The full name of pod 0: this pod's own with another index. None if pods have no names."""
    own = context.hostname.partition(".")[0]
    for line in (context.read(HOSTS_FILE) or "").splitlines():
        names = line.partition("#")[0].split()[1:]
        full = next((name for name in names if name.startswith(f"{own}.")), None)
        if full and own != stem:
            domain = full.removeprefix(own)
            return FlagValue(HOSTS_FILE, f"{stem}-0{'-0' if job_index else ''}{domain}")
    return None


def _volcano(context: Context) -> Detection:
    index = context.number("VC_TASK_INDEX", "VK_TASK_INDEX")
    if index is None:
        return None
    lists = {
        name: [host.strip() for host in text.split(",") if host.strip()]
        for name, text in context.environ.items()
        if _VOLCANO_LIST.fullmatch(name) and text.strip()
    }
    if len(lists) != 1:
        # The plug-in for PyTorch numbers the pods of several tasks.
        if ranked := _ranked(context):
            return ranked
        raise Contradiction(
            f"{index.source} is {index.text}, and {len(lists)} variables VC_..._HOSTS name pods",
            f"turn on Volcano's pytorch plug-in, or {BY_FLAGS}",
        )
    ((source, hosts),) = lists.items()
    count = context.number(source.removesuffix("_HOSTS") + "_NUM", lowest=1)
    if int(index.text) >= len(hosts) or (count and int(count.text) != len(hosts)):
        other = f"{count.source} is {count.text}" if count else f"{index.source} is {index.text}"
        raise Contradiction(f"{source} names {len(hosts)} hosts, and {other}", BY_FLAGS)
    own = context.hostname.partition(".")[0]
    at = host_list.find_host(hosts, own)
    if at is not None and at != int(index.text):
        raise Contradiction(f"{index.source} is {index.text}, and {source} has {own} as number {at}", BY_FLAGS)
    job = own.removesuffix(f"-{index.text}") if own.endswith(f"-{index.text}") else ""
    return Detected(
        "kubernetes",
        f"Volcano job {job}".rstrip(),
        FlagValue(source, str(len(hosts))),
        index,
        host=FlagValue(source, hosts[0]),
        port=PORT,
        run_id=FlagValue("the host name", job) if job else None,
        workers=context.visible_gpus(),
        first=index.text == "0",
        hosts=tuple(hosts),
    )


def _ranked(context: Context) -> Detection:
    """`RANK` and `WORLD_SIZE` as an operator sets them for one launcher in each pod: they count nodes."""
    if not context.given("KUBERNETES_SERVICE_HOST", "VC_TASK_INDEX", "VK_TASK_INDEX"):
        return None
    # In a worker of another launcher they are those of the worker.
    if context.given("LOCAL_RANK"):
        return None
    host, rank = context.given("MASTER_ADDR"), context.number("RANK")
    if rank is None or not (host or context.given("WORLD_SIZE")):
        return None
    if host and host.text == "localhost":
        # An operator may give the first pod its own address so.
        host = FlagValue("the host name", context.hostname) if rank.text == "0" else None
    # With PET_NNODES, WORLD_SIZE may count workers.
    nodes = None if context.given("PET_NNODES") else context.number("WORLD_SIZE", lowest=1)
    if nodes and int(rank.text) >= int(nodes.text):
        raise Contradiction(f"{rank.source} is {rank.text}, and {nodes.source} is {nodes.text}", BY_FLAGS)
    port = context.number("MASTER_PORT", lowest=1)
    return Detected(
        "kubernetes",
        "Kubernetes job",
        nodes,
        rank,
        host=host,
        port=int(port.text) if port else PORT,
        workers=context.visible_gpus(),
        first=rank.text == "0",
        least=_least(context, rank),
    )


def _least(context: Context, rank: FlagValue) -> int:
    """The lowest number of nodes that the job has, by this pod's rank and by its operator."""
    by_operator = context.environ.get("PET_NNODES", "").partition(":")[0].strip()
    return max(int(rank.text) + 1, int(by_operator) if is_count(by_operator) else 1)
