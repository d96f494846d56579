"""The subcommand `tf-ps-run scale`: requests other numbers of tasks of a running job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dlrover_run.command_line import values
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.features.operate.commands.asker import FLAGS, REFUSED, Asker, operator_command, requester
from dlrover_run.features.operate.commands.scale import AUTO, request_size
from dlrover_run.spec import UsageError
from tf_ps_runner.cluster.model import MAX_TASKS, Role, ScaleRequest
from tf_ps_runner.command_line.options import CLUSTER


def _number(help: str) -> Any:
    return typer.Option(metavar="N or auto", help=help, rich_help_panel=CLUSTER, show_default=False)


@operator_command(*FLAGS, refused=REFUSED, no_job=REFUSED)
async def scale(
    asker: Asker,
    ps: Annotated[str | None, _number("New number of parameter servers.")] = None,
    workers: Annotated[str | None, _number("New number of workers in addition to the chief.")] = None,
) -> int:
    """Change the number of parameter servers and workers of a running job.

    The job must have been started with a range, as in [b]--ps=1:4[/]. If several of your jobs run here, --rdzv-id
    names one. From another machine the flags of the rendezvous say where the job is.

    [b]auto[/] takes a request back: a job with --autoscale chooses the number again, any other has as many as fit.

    Here: [b]tf-ps-run scale --ps=3[/]

    From elsewhere: [b]tf-ps-run scale --workers=6 --rdzv-endpoint=node0 --rdzv-id=ads[/]
    """
    size = ScaleRequest(
        None if ps in (None, AUTO) else values.integer("--ps", ps, 1, MAX_TASKS),
        None if workers in (None, AUTO) else values.integer("--workers", workers, 0, MAX_TASKS),
        tuple(role for role, given in ((Role.PS, ps), (Role.WORKER, workers)) if given == AUTO),
    )
    if size == ScaleRequest():
        raise UsageError("Nothing to change: give --ps=N, --workers=N or both.")
    return await request_size(asker, OperatorRequest(Action.SCALE, by=requester(), part=size))
