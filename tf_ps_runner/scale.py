"""The subcommand `tf-ps-run scale`: requests other numbers of tasks of a running job and waits for the answer.

An agent of the job on this machine passes the request on. Without one, this process joins the job for a moment as a
node without tasks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from dlrover_run import exit_codes
from dlrover_run.agent.host import host_name
from dlrover_run.command_line import values
from dlrover_run.command_line.entry_point import report
from dlrover_run.command_line.parser import UsageError
from dlrover_run.console.text import sanitize
from dlrover_run.coordination.model import OVER, NodePhase, NodeReport
from dlrover_run.coordination.reasons import render
from dlrover_run.operate.commands import FLAGS, REFUSED, Asker, operator_command
from dlrover_run.operate.find import JobHere, find_job
from dlrover_run.operate.protocol import ScaleReply
from dlrover_run.policies.parameter_servers.model import MAX_TASKS, DesiredReplicas
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from dlrover_run.policies.parameter_servers.reports import NodeTasks
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.rendezvous.reconnect import wait_for_event
from dlrover_run.spec import JobSpec
from tf_ps_runner.command_line.options import CLUSTER

REQUEST_NUMBER = 1
"""The number of the only request of a node without tasks."""


def _number(help: str) -> Any:
    return typer.Option(metavar="N", help=help, rich_help_panel=CLUSTER, show_default=False)


@operator_command(*FLAGS, refused=REFUSED, no_job=REFUSED, timeout="30")
async def scale(
    asker: Asker,
    ps: Annotated[str | None, _number("New number of parameter servers.")] = None,
    workers: Annotated[str | None, _number("New number of workers in addition to the chief.")] = None,
) -> int:
    """Change the number of parameter servers and workers of a running job.

    The job must have been started with a range, as in [b]--ps=1:4[/]. If several of your jobs run here, --rdzv-id
    names one. From another machine the flags of the rendezvous say where the job is.

    Here: [b]tf-ps-run scale --ps=3[/]

    From elsewhere: [b]tf-ps-run scale --workers=6 --rdzv-endpoint=node0 --rdzv-id=ads[/]
    """
    replicas = DesiredReplicas(
        None if ps is None else values.integer("--ps", ps, 1, MAX_TASKS),
        None if workers is None else values.integer("--workers", workers, 0, MAX_TASKS),
    )
    if replicas == DesiredReplicas():
        raise UsageError("Nothing to change: give --ps=N, --workers=N or both.")
    if asker.flags.explicit("rdzv_backend"):
        asker.flags.choice("rdzv_backend")
    job = await find_job(asker.flags, os.environ, asker.program, of_program=True)
    if isinstance(job, JobHere):
        reply = await _request_here(job, replicas, asker.timeout)
    else:
        reply = await join_and_request(job.spec, replicas, asker.timeout, lambda line: report(asker.name, line))
    text = f": {reply.text}" if reply.text else ""
    if not reply.granted:
        raise AskFailed(f"the job {job.name!r} refuses{text}")
    print(f"{asker.name}: the job {job.name!r} accepts{sanitize(text)}.", flush=True)
    return exit_codes.SUCCESS


async def _request_here(job: JobHere, replicas: DesiredReplicas, timeout: float) -> ScaleReply:
    try:
        async with asyncio.timeout(timeout):
            return await job.scale(replicas)
    except TimeoutError:
        raise AskFailed(_not_received(job.name, timeout)) from None


async def join_and_request(
    spec: JobSpec, replicas: DesiredReplicas, timeout: float, log: Callable[[str], None]
) -> ScaleReply:
    """Send the request as a node without tasks. Raises AskFailed without an answer, and SpecError for a package that
    does not suit the backend."""
    spec = replace(spec, rules=replace(spec.rules, join_timeout=timeout, policy=ClusterRules()))
    changed = asyncio.Event()
    client = open_client(spec, changed.set, log)
    name = secrets.token_hex(8)
    node = NodeReport(
        node_id=f"client-{name}",
        incarnation=name,
        host=host_name(),
        address="",
        port=0,
        workers=0,
        policy=NodeTasks(scale_request=replicas, scale_request_number=REQUEST_NUMBER),
    )
    client.report(node)
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        while True:
            changed.clear()
            assignment = client.assignment
            order = NodeOrder.find(assignment.policy)
            if order is not None and order.scale_answered >= REQUEST_NUMBER:
                return ScaleReply(granted=not order.scale_refused, text=render(order.scale_answer))
            if assignment.phase in OVER:
                raise AskFailed(f"the job {spec.run_id!r} is over")
            if client.problem is not None:
                raise AskFailed(client.problem)
            if not await wait_for_event(changed, deadline - asyncio.get_running_loop().time()):
                waited = f", which waited for {assignment.waiting.text}" if assignment.waiting else ""
                raise AskFailed(f"{_not_received(spec.run_id, timeout)}{waited}")
    finally:
        client.report(msgspec.structs.replace(node, phase=NodePhase.LEFT))
        await client.close()


def _not_received(run_id: str, timeout: float) -> str:
    return f"the job {run_id!r} has not received the request within {timeout:g} s (--timeout)"
