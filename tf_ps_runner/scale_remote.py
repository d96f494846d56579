"""Sends a scale request from a machine without a node of the job: it joins for a moment as a node without tasks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from dlrover_run.agent.host import host_name
from dlrover_run.command_line import rdzv_conf, rendezvous_options
from dlrover_run.command_line.parser import FlagValues
from dlrover_run.coordination.model import OVER, NodePhase, NodeReport
from dlrover_run.policies.parameter_servers.model import DesiredReplicas, NodeTasks
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.rendezvous.reconnect import wait_for_event
from dlrover_run.spec import Entrypoint, JobSpec
from tf_ps_runner.command_line.rendezvous import resolve_rendezvous
from tf_ps_runner.scale_protocol import Reply

REQUEST_NUMBER = 1
"""The number of the only request of a client."""


class Outcome(NamedTuple):
    """The answer of the coordinator, or the reason, without a full stop, why there is none."""

    reply: Reply | None = None
    problem: str = ""


def job_to_reach(flags: FlagValues, environ: Mapping[str, str], timeout: float) -> JobSpec:
    """The job as a client sees it, which never starts the master. Raises SpecError."""
    rendezvous = resolve_rendezvous(flags, environ, as_client=True)
    conf = rdzv_conf.parse(*flags.get("rdzv_conf"))
    connection = rendezvous_options.find_connection(rendezvous, conf, environ)
    return JobSpec(
        # Nothing runs, but a JobSpec needs an entry point.
        entrypoint=Entrypoint("program", "true"),
        run_id=rendezvous.run_id,
        rules=replace(
            conf.rules,
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            join_timeout=timeout,
            cluster=ClusterRules(),
        ),
        backend=rendezvous.backend,
        master=replace(connection.master, is_host=False) if connection.master else None,
        etcd=connection.etcd,
    )


def request_remotely(spec: JobSpec, replicas: DesiredReplicas, timeout: float, say: Callable[[str], None]) -> Outcome:
    """Send the request and wait for the answer of the coordinator. Raises SpecError for an unsuitable package."""
    return asyncio.run(_send_request(spec, replicas, timeout, say))


async def _send_request(
    spec: JobSpec, replicas: DesiredReplicas, timeout: float, say: Callable[[str], None]
) -> Outcome:
    changed = asyncio.Event()
    client = open_client(spec, changed.set, say)
    name = secrets.token_hex(8)
    status = NodeReport(
        node_id=f"visitor-{name}",
        incarnation=name,
        host=host_name(),
        address="",
        port=0,
        workers=0,
        cluster=NodeTasks(scale_request=replicas, scale_request_number=REQUEST_NUMBER),
    )
    client.report(status)
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        while True:
            changed.clear()
            assignment = client.assignment
            if assignment.cluster is not None and assignment.cluster.scale_answered >= REQUEST_NUMBER:
                return Outcome(
                    Reply(granted=not assignment.cluster.scale_refused, text=assignment.cluster.scale_answer)
                )
            if assignment.phase in OVER:
                return Outcome(problem=f"the job {spec.run_id!r} is over")
            if client.problem is not None:
                return Outcome(problem=client.problem.rstrip("."))
            if not await wait_for_event(changed, deadline - asyncio.get_running_loop().time()):
                waited = f", which waited for {assignment.waiting.text}" if assignment.waiting else ""
                problem = f"the job {spec.run_id!r} has not received the request within {timeout:g} s"
                problem += f" (--timeout){waited}"
                return Outcome(problem=problem)
    finally:
        client.report(_leaving(status))
        await client.close()


def _leaving(status: NodeReport) -> NodeReport:
    return msgspec.structs.replace(status, phase=NodePhase.LEFT)
