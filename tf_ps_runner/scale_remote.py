"""Sends a scale request from a machine without a node of the job: it joins briefly as a node without tasks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from dlrover_run.agent.host import host_name
from dlrover_run.command_line import backend_spec, rdzv_conf
from dlrover_run.command_line.parser import FlagValues
from dlrover_run.coordination.model import OVER, NodePhase, NodeReport
from dlrover_run.coordination.reasons import render
from dlrover_run.policies.parameter_servers.model import DesiredReplicas
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from dlrover_run.policies.parameter_servers.reports import NodeTasks
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.rendezvous.reconnect import wait_for_event
from dlrover_run.spec import Entrypoint, JobSpec
from tf_ps_runner.command_line.rendezvous import resolve_rendezvous
from tf_ps_runner.scale_protocol import ScaleFailed, ScaleReply

REQUEST_NUMBER = 1
"""The number of the only request of a client."""


def job_to_reach(flags: FlagValues, environ: Mapping[str, str], timeout: float) -> JobSpec:
    """The job as a client sees it, which never starts the master. Raises SpecError."""
    rendezvous = resolve_rendezvous(flags, environ, as_client=True)
    conf = rdzv_conf.parse(*flags.get("rdzv_conf"))
    backend = backend_spec.find_backend(rendezvous, conf, environ)
    return JobSpec(
        # Nothing runs, but a JobSpec needs an entry point.
        entrypoint=Entrypoint("program", "true"),
        run_id=rendezvous.run_id,
        rules=replace(
            conf.rules,
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            join_timeout=timeout,
            policy=ClusterRules(),
        ),
        backend=rendezvous.backend,
        master=replace(backend.master, is_host=False) if backend.master else None,
        etcd=backend.etcd,
    )


async def request_remotely(
    spec: JobSpec, replicas: DesiredReplicas, timeout: float, warn: Callable[[str], None]
) -> ScaleReply:
    """Send the request and return the answer of the coordinator. Raises ScaleFailed without one, and SpecError for an
    unsuitable package."""
    changed = asyncio.Event()
    client = open_client(spec, changed.set, warn)
    name = secrets.token_hex(8)
    report = NodeReport(
        node_id=f"visitor-{name}",
        incarnation=name,
        host=host_name(),
        address="",
        port=0,
        workers=0,
        policy=NodeTasks(scale_request=replicas, scale_request_number=REQUEST_NUMBER),
    )
    client.report(report)
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        while True:
            changed.clear()
            assignment = client.assignment
            order = NodeOrder.find(assignment.policy)
            if order is not None and order.scale_answered >= REQUEST_NUMBER:
                return ScaleReply(granted=not order.scale_refused, text=render(order.scale_answer))
            if assignment.phase in OVER:
                raise ScaleFailed(f"the job {spec.run_id!r} is over.")
            if client.problem is not None:
                raise ScaleFailed(f"{client.problem.rstrip('.')}.")
            if not await wait_for_event(changed, deadline - asyncio.get_running_loop().time()):
                waited = f", which waited for {assignment.waiting.text}" if assignment.waiting else ""
                raise ScaleFailed(
                    f"the job {spec.run_id!r} has not received the request within {timeout:g} s (--timeout){waited}."
                )
    finally:
        client.report(msgspec.structs.replace(report, phase=NodePhase.LEFT))
        await client.close()
