"""The subcommand `tf-ps-run scale`: requests other numbers of tasks of a running job and waits for the answer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dlrover_run import exit_codes
from dlrover_run.command_line import credentials, values
from dlrover_run.command_line.application import flag_option
from dlrover_run.command_line.entry_point import report
from dlrover_run.command_line.options import OTHER
from dlrover_run.command_line.parser import CommandLine, FlagValues, UsageError
from dlrover_run.operate.sockets import peer_uid, socket_names
from dlrover_run.policies.parameter_servers.model import MAX_TASKS, DesiredReplicas
from tf_ps_runner import scale_protocol
from tf_ps_runner.command_line.options import CLUSTER, RENDEZVOUS_FLAGS, TF_PS_RUN
from tf_ps_runner.scale_protocol import ScaleFailed, ScaleReply

NAME = f"{TF_PS_RUN.name} scale"

REFUSED = 1
"""The exit code when the job is not found, refuses the request, or has not received it in time."""

_BACKEND, _ENDPOINT, _ID, _CONF = map(flag_option, RENDEZVOUS_FLAGS)


def _number(help: str) -> Any:
    return typer.Option(metavar="N", help=help, rich_help_panel=CLUSTER, show_default=False)


class ScaleRequest(NamedTuple):
    """The request of a command line. `remote` means that the rendezvous flags say where the job is."""

    targets: DesiredReplicas
    timeout: float
    run_id: str | None
    remote: bool


def scale(
    ps: Annotated[str | None, _number("New number of parameter servers.")] = None,
    workers: Annotated[str | None, _number("New number of workers in addition to the chief.")] = None,
    rdzv_backend: Annotated[str | None, _BACKEND] = None,
    rdzv_endpoint: Annotated[str | None, _ENDPOINT] = None,
    rdzv_id: Annotated[str | None, _ID] = None,
    rdzv_conf: Annotated[str | None, _CONF] = None,
    timeout: Annotated[
        str, typer.Option(metavar="SECONDS", help="Time until the job must have answered.", rich_help_panel=OTHER)
    ] = "30",
) -> int:
    """Change the number of parameter servers and workers of a running job.

    The job must have been started with a range, as in [b]--ps=1:4[/]. If several of your jobs run here, --rdzv-id
    names one. From another machine the flags of the rendezvous say where the job is.

    Here: [b]tf-ps-run scale --ps=3[/]

    From elsewhere: [b]tf-ps-run scale --workers=6 --rdzv-endpoint=node0 --rdzv-id=ads[/]
    """
    given = {
        "rdzv_backend": rdzv_backend,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_id": rdzv_id,
        "rdzv_conf": rdzv_conf,
    }
    line = CommandLine({dest: [text] for dest, text in given.items() if text is not None})
    flags = FlagValues(line, os.environ, TF_PS_RUN)
    try:
        request = read_request(flags, ps, workers, timeout)
        if request.remote:
            run_id, reply = _request_remotely(request, flags, os.environ)
        else:
            run_id = request.run_id or only_job(os.geteuid())
            reply = _request_here(request, run_id)
        answer = _outcome(run_id, reply)
    except ScaleFailed as failure:
        report(NAME, str(failure))
        return REFUSED
    print(f"{NAME}: {answer}", flush=True)
    return exit_codes.SUCCESS


def read_request(flags: FlagValues, ps: str | None, workers: str | None, timeout: str) -> ScaleRequest:
    """The request of a command line. Raises SpecError."""
    targets = DesiredReplicas(
        None if ps is None else values.integer("--ps", ps, 1, MAX_TASKS),
        None if workers is None else values.integer("--workers", workers, 0, MAX_TASKS),
    )
    if targets == DesiredReplicas():
        raise UsageError("Nothing to change: give --ps=N, --workers=N or both.")
    remote = flags.explicit("rdzv_backend") is not None or bool(flags.get("rdzv_endpoint").text.strip())
    run_id = flags.explicit("rdzv_id")
    seconds = values.seconds("--timeout", timeout, zero_allowed=False)
    return ScaleRequest(targets, seconds, run_id.text if run_id else None, remote)


def _outcome(run_id: str, reply: ScaleReply) -> str:
    """The sentence about a granted request. Raises ScaleFailed for a refused one."""
    from tf_ps_runner.agent.protocol import printable

    text = f": {printable(reply.text)}." if reply.text else "."
    if not reply.granted:
        raise ScaleFailed(f"the job {run_id!r} refuses{text}")
    return f"the job {run_id!r} accepts{text}"


def _request_here(request: ScaleRequest, run_id: str) -> ScaleReply:
    """Send the request over the socket of a job of this user on this machine. Raises ScaleFailed.

    After the timeout the request is withdrawn, unless the job has just received it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(request.timeout)
            connection.connect(scale_protocol.socket_address(os.geteuid(), run_id))
            if peer_uid(connection) != os.geteuid():
                raise ScaleFailed(f"the process that answers for the job {run_id!r} belongs to another user.")
            connection.sendall(scale_protocol.request_line(request.targets))
            line = _read_line(connection, time.monotonic() + request.timeout)
        except ConnectionRefusedError:
            raise ScaleFailed(
                f"no job {run_id!r} of yours runs on this machine: check --rdzv-id, or give --rdzv-endpoint (and "
                "--rdzv-backend) for a job elsewhere."
            ) from None
        except TimeoutError:
            raise ScaleFailed(
                f"the job {run_id!r} has not received the request within {request.timeout:g} s (--timeout)."
            ) from None
        except OSError as error:
            raise ScaleFailed(f"the job {run_id!r} cannot be reached: {error.strerror or error}.") from None
    if not line:
        raise ScaleFailed(f"the job {run_id!r} ended before it received the request.")
    try:
        return scale_protocol.read_reply(line)
    except ValueError:
        raise ScaleFailed("the process that answers is not a tf-ps-run of this version.") from None


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """A line; empty if the connection ended before. Raises TimeoutError."""
    line = b""
    while not line.endswith(b"\n") and len(line) < scale_protocol.MAX_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        try:
            chunk = connection.recv(scale_protocol.MAX_BYTES)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            return b""
        line += chunk
    return line


def only_job(uid: int, proc: Path = Path("/proc")) -> str:
    """The name of the only job of this user on this machine. Raises ScaleFailed when there is none, or several."""
    jobs = sorted(job_names(uid, proc))
    if not jobs:
        raise ScaleFailed(
            "no job of yours runs on this machine: give --rdzv-endpoint (and --rdzv-backend) and --rdzv-id for a job "
            "elsewhere."
        )
    if len(jobs) > 1:
        raise ScaleFailed(f"several jobs of yours run here: give --rdzv-id, one of {', '.join(jobs)}.")
    return jobs[0]


def job_names(uid: int, proc: Path) -> set[str]:
    """The names of the jobs whose agents accept requests of this user on this machine."""
    return socket_names(scale_protocol.socket_prefix(uid), proc)


def _request_remotely(request: ScaleRequest, flags: FlagValues, environ: Mapping[str, str]) -> tuple[str, ScaleReply]:
    import asyncio

    from tf_ps_runner import scale_remote
    from tf_ps_runner.agent.protocol import printable

    spec = scale_remote.job_to_reach(flags, environ, request.timeout)
    credentials.scrub_environment()
    sending = scale_remote.request_remotely(
        spec, request.targets, request.timeout, lambda sentence: report(NAME, sentence)
    )
    try:
        return spec.run_id, asyncio.run(sending)
    except ScaleFailed as failure:
        raise ScaleFailed(printable(str(failure))) from None
