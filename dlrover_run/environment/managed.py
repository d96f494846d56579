"""Managed training: SageMaker and Vertex AI, which describe the job in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from dlrover_run.environment import host_list
from dlrover_run.environment.records import (
    BY_FLAGS,
    Context,
    Contradiction,
    Detected,
    Detection,
    is_count,
    port_of,
)
from dlrover_run.spec import FlagValue


def detect_sagemaker(context: Context) -> Detection:
    """What SageMaker's training toolkit says. Raises Contradiction."""
    listed = context.given("SM_HOSTS")
    if listed is None:
        raise Contradiction("SM_CURRENT_HOST is set, and SM_HOSTS is not", BY_FLAGS)
    names = _json(listed)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise Contradiction(f"{listed.source} is not a list of hosts", BY_FLAGS)
    # By number, since algo-10 comes before algo-2 in the alphabet. Every node must get the same order. The parts of a
    # name alternate between text and digits, beginning with text.
    hosts = sorted(
        set(names), key=lambda name: [int(part) if is_count(part) else part for part in re.split(r"(\d+)", name)]
    )
    own = context.given("SM_CURRENT_HOST") or FlagValue("the host name", context.hostname)
    at = host_list.find_host(hosts, own.text)
    if at is None:
        raise Contradiction(f"{own.source} {own.text} is not in {listed.source}", BY_FLAGS)
    job = context.given("TRAINING_JOB_NAME")
    return Detected(
        "sagemaker",
        f"SageMaker job {job.text}" if job else "SageMaker job",
        FlagValue(listed.source, str(len(hosts))),
        FlagValue(own.source, str(at)),
        host=FlagValue(listed.source, hosts[0]),
        port=port_of(job.text if job else ""),
        run_id=job,
        workers=context.visible_gpus("SM_NUM_GPUS"),
        first=at == 0,
        hosts=tuple(hosts),
    )


def detect_vertex(context: Context) -> Detection:
    """What Vertex AI says. Raises Contradiction."""
    text = context.given("CLUSTER_SPEC")
    if text is None:
        for name, alone in (("WORLD_SIZE", 1), ("RANK", 0)):
            if (value := context.number(name)) and int(value.text) > alone:
                raise Contradiction(f"{name} is {value.text}, and CLUSTER_SPEC is not set", BY_FLAGS)
        return None
    spec = _json(text)
    pools = spec.get("cluster") if isinstance(spec, dict) else None
    task = spec.get("task") if isinstance(spec, dict) else None
    if not isinstance(pools, dict) or not isinstance(task, dict):
        raise Contradiction(f"{text.source} has no cluster or no task", BY_FLAGS)
    hosts: list[str] = []
    at: int | None = None
    for pool in sorted(pools):
        members = pools[pool]
        if not isinstance(members, list) or not all(isinstance(member, str) and member for member in members):
            raise Contradiction(f"{pool} of {text.source} is not a list of hosts", BY_FLAGS)
        index = task.get("index")
        if pool == task.get("type") and isinstance(index, int) and 0 <= index < len(members):
            at = len(hosts) + index
        hosts += members
    if at is None:
        raise Contradiction(f"the task of {text.source} is not in its cluster", BY_FLAGS)
    rank, nodes = context.number("RANK"), context.number("WORLD_SIZE")
    for name, value, expected in (("rank", rank, at), ("number of nodes", nodes, len(hosts))):
        if value and int(value.text) != expected:
            raise Contradiction(
                f"{value.source} is {value.text}, and the {name} of {text.source} is {expected}", BY_FLAGS
            )
    host, _, port = hosts[0].rpartition(":") if ":" in hosts[0] else (hosts[0], "", "")
    job = context.given("CLOUD_ML_JOB_ID")
    open_port = context.number("MASTER_PORT", lowest=1) or (FlagValue(text.source, port) if is_count(port) else None)
    return Detected(
        "vertex",
        f"Vertex AI job {job.text}" if job else "Vertex AI job",
        FlagValue(text.source, str(len(hosts))),
        FlagValue(text.source, str(at)),
        host=FlagValue(text.source, host),
        port=int(open_port.text) if open_port else port_of(job.text if job else ""),
        run_id=job,
        workers=context.visible_gpus(),
        first=at == 0,
        hosts=tuple(name.partition(":")[0] for name in hosts),
    )


def _json(value: FlagValue) -> Any:
    try:
        return json.loads(value.text)
    except ValueError:
        raise Contradiction(f"{value.source} is not JSON", BY_FLAGS) from None
