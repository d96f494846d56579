"""The subcommand `dlrover-run scale`: changes how many nodes of a running job train."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dlrover_run import exit_codes
from dlrover_run.command_line import values
from dlrover_run.command_line.options import OTHER
from dlrover_run.console.text import format_duration
from dlrover_run.coordination.requests import Action, OperatorRequest
from dlrover_run.coordination.status import JobState, JobStatus, size_text
from dlrover_run.coordination.text import counted
from dlrover_run.operate.commands import FLAGS, REFUSED, Asker, operator_command, requester
from dlrover_run.operate.find import FoundJob
from dlrover_run.rendezvous.client import AskFailed

AUTO = "auto"
"""The size with which the job was started."""

LOOK_INTERVAL = 0.1
"""Seconds between two looks at a job that has taken the request, until its coordinator has decided."""


@operator_command(*FLAGS, refused=REFUSED)
async def scale(
    asker: Asker,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="N, MIN:MAX or auto", help="New size of a round.", rich_help_panel=OTHER)
    ],
) -> int:
    """Change how many nodes of a running job train.

    The size has to be within the --nnodes=MIN:MAX with which the job was started. With N at most that many nodes train.
    The others become spares, and take part again when the size grows. In a job that marks its checkpoints the change
    waits for the next one. [b]auto[/] takes the request back. A job with --autoscale chooses within MIN:MAX; N stops
    that until [b]auto[/].

    From elsewhere: [b]dlrover-run scale --nodes=2 --rdzv-endpoint=node0 --rdzv-id=resnet[/]
    """
    least, most = (0, 0) if nodes == AUTO else values.node_range("--nodes", nodes)
    request = OperatorRequest(Action.SCALE, by=requester(), min_nodes=least if ":" in nodes else 0, max_nodes=most)
    job = await asker.find()
    try:
        async with asyncio.timeout(asker.timeout):
            found = await _decided(asker, job, request)
    except TimeoutError:
        late = f"the coordinator of the job {job.name!r} has not decided within {asker.timeout:g} s (--timeout)"
        raise AskFailed(late) from None
    print(f"{asker.name}: the job {job.name!r} accepts: {decision(found)}", flush=True)
    return exit_codes.SUCCESS


async def _decided(asker: Asker, job: FoundJob, request: OperatorRequest) -> JobStatus:
    """The status in which the request is decided."""
    found = await asker.ask(job, request)
    wanted = _size(request, found)
    while found.desired_nodes != wanted and found.state in (JobState.WAITING, JobState.TRAINING):
        await asyncio.sleep(LOOK_INTERVAL)
        found = await asker.ask(job)
    return found


def _size(request: OperatorRequest, status: JobStatus) -> str:
    """The size as the status shows it, which is empty for the whole range of the job."""
    least, most = request.min_nodes or status.min_nodes, request.max_nodes or status.max_nodes
    is_fixed = status.size_choice is not None and bool(request.max_nodes) and not request.min_nodes
    if (least, most) == (status.min_nodes, status.max_nodes) and not is_fixed:
        return ""
    return size_text(least, most, status.min_nodes)


def decision(status: JobStatus) -> str:
    """What the coordinator has decided, a clause."""
    size = status.desired_nodes or f"{status.min_nodes}:{status.max_nodes}"
    if status.state is not JobState.TRAINING:
        return f"the next round has {size} nodes"
    trains = f"{counted(status.round_nodes, 'node')} {'trains' if status.round_nodes == 1 else 'train'}"
    if status.change_waits:
        left = "" if status.change_seconds is None else f", in at most {format_duration(status.change_seconds)}"
        return f"{trains} until the next checkpoint{left}, and then a round of {size}"
    most = int(size.rpartition(":")[2])
    if status.round_nodes < most:
        return f"{trains}, and {most - status.round_nodes} more may join"
    return trains
