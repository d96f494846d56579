"""The subcommand `dlrover-run scale`: changes how many nodes of a running job train."""

from __future__ import annotations

from typing import Annotated

import typer

from dlrover_run import exit_codes
from dlrover_run.command_line import values
from dlrover_run.console.text import format_duration, sanitize
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.features.operate.commands.asker import FLAGS, REFUSED, Asker, operator_command, requester
from dlrover_run.job_status.status import JobState, JobStatus
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.words.text import counted

AUTO = "auto"
"""The size with which the job was started."""


@operator_command(*FLAGS, refused=REFUSED)
async def scale(
    asker: Asker,
    nodes: Annotated[str, typer.Option("--nodes", metavar="N, MIN:MAX or auto", help="New size of a round.")],
) -> int:
    """Change how many nodes of a running job train.

    The size has to be within the --nnodes=MIN:MAX with which the job was started. With N at most that many nodes train.
    The others become spares, and take part again when the size grows. In a job that marks its checkpoints the change
    waits for the next one. [b]auto[/] takes the request back. A job with --autoscale chooses within MIN:MAX; N stops
    that until [b]auto[/].

    From elsewhere: [b]dlrover-run scale --nodes=2 --rdzv-endpoint=node0 --rdzv-id=resnet[/]
    """
    least, most = (0, 0) if nodes == AUTO else values.node_range("--nodes", nodes)
    size = least if ":" in nodes else 0
    return await request_size(asker, OperatorRequest(Action.SCALE, by=requester(), min_nodes=size, max_nodes=most))


async def request_size(asker: Asker, request: OperatorRequest) -> int:
    """Request another size of the job, and print what the job does; the exit code. Raises AskFailed."""
    job = await asker.find()
    try:
        found = await asker.ask(job, request)
    except AskFailed as failed:
        if failed.no_job:
            raise
        raise AskFailed(f"the job {job.name!r} refuses: {failed}") from None
    text = sanitize(found.answer or decision(found))
    print(f"{asker.name}: the job {job.name!r} accepts: {text}", flush=True)
    return exit_codes.SUCCESS


def decision(status: JobStatus) -> str:
    """What the coordinator has decided, a clause."""
    size = status.desired_nodes or f"{status.min_nodes}:{status.max_nodes}"
    if status.state is not JobState.TRAINING:
        return f"the next round has {size} {'node' if size == '1' else 'nodes'}"
    trains = f"{counted(status.round_nodes, 'node')} {'trains' if status.round_nodes == 1 else 'train'}"
    if status.change_waits:
        left = "" if status.change_seconds is None else f", in at most {format_duration(status.change_seconds)}"
        return f"{trains} until the next checkpoint{left}, and then a round of {size}"
    most = int(size.rpartition(":")[2])
    if status.round_nodes < most:
        return f"{trains}, and {most - status.round_nodes} more may join"
    return trains
