"""`tf-ps-run scale`: tells a running job how many processes somebody wants, and waits until it has heard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_run import exit_codes
from dlrover_run.command_line import credentials, flags, replies
from dlrover_run.command_line.argv import UsageError, cut
from dlrover_run.command_line.settings import Settings
from dlrover_run.policies.parameter_servers.model import MAX_TASKS, DesiredReplicas
from dlrover_run.spec import SpecError
from tf_ps_runner import wishes
from tf_ps_runner.command_line.options import SCALE

REFUSED = 1
"""The exit code when the job was not found, or cannot do what is wanted, or has not heard of it in time."""

UNHEARD = "has not heard of it within {seconds:g} s (--timeout)"
"""What is said after the time-out of either way; the wish is gone then, unless the job has just heard of it."""


class Asked(NamedTuple):
    """What the command line comes to; `elsewhere` says that the job's nodes meet, and that its flags say where."""

    wish: DesiredReplicas
    timeout: float
    run_id: str | None
    elsewhere: bool


class Unheard(Exception):
    """The job was not told, or does not do it; the message is a sentence."""


def main(argv: Sequence[str]) -> int:
    """The command: prints what follows and returns its exit code."""
    try:
        line = cut(argv, SCALE)
        if line.request is not None:
            return replies.answer(SCALE, line.request)
        if line.script is not None:
            raise UsageError(f"{line.script!r} is neither a flag nor the value of one.")
        settings = Settings(line, os.environ, SCALE)
        asked = read(settings)
        said = _tell_elsewhere(asked, settings, os.environ) if asked.elsewhere else _tell_here(asked)
    except SpecError as mistake:
        return replies.refuse(SCALE, mistake)
    except Unheard as refusal:
        replies.say(SCALE, str(refusal))
        return REFUSED
    print(f"{SCALE.name}: {said}", flush=True)
    return exit_codes.SUCCESS


def read(settings: Settings) -> Asked:
    """What was asked for. Raises SpecError."""
    wish = DesiredReplicas(settings.asked_number("ps", 1, MAX_TASKS), settings.asked_number("workers", 0, MAX_TASKS))
    if wish == DesiredReplicas():
        raise UsageError("Nothing was asked for: give --ps=N, --workers=N or both.")
    elsewhere = settings.asked("rdzv_backend") is not None or bool(settings.text("rdzv_endpoint").text.strip())
    run_id = settings.asked("rdzv_id")
    timeout = flags.seconds(*settings.text("timeout"), zero_allowed=False)
    return Asked(wish, timeout, run_id.text if run_id else None, elsewhere)


def _tell_here(asked: Asked) -> str:
    """Tell the one job of this user on this machine, or the one that was named, over its socket."""
    run_id = asked.run_id or only_job(os.geteuid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(asked.timeout)
            connection.connect(wishes.socket_address(os.geteuid(), run_id))
            if wishes.peer_uid(connection) != os.geteuid():
                raise Unheard(f"what answers for the job {run_id!r} belongs to another user, and is not told anything.")
            connection.sendall(wishes.wish_line(asked.wish))
            reply = _reply(connection, time.monotonic() + asked.timeout)
        except ConnectionRefusedError:
            raise Unheard(
                f"no job {run_id!r} of yours runs on this machine: check --rdzv-id, or say where its nodes meet "
                "(--rdzv-backend, --rdzv-endpoint)."
            ) from None
        except TimeoutError:
            raise Unheard(f"the job {run_id!r} {UNHEARD.format(seconds=asked.timeout)}.") from None
        except OSError as error:
            raise Unheard(f"the job {run_id!r} cannot be told: {error.strerror or error}.") from None
    if reply is None:
        raise Unheard(f"the job {run_id!r} ended before it had heard of it.")
    return _what_follows(run_id, reply)


def _what_follows(run_id: str, reply: wishes.Reply) -> str:
    """The sentence about a wish that is granted. Raises Unheard for one that is not."""
    from tf_ps_runner.agent.words import plain

    text = f": {plain(reply.text)}." if reply.text else "."
    if not reply.granted:
        raise Unheard(f"the job {run_id!r} does not do that{text}")
    return f"the job {run_id!r} has heard of it{text}"


def _reply(connection: socket.socket, deadline: float) -> wishes.Reply | None:
    """The answer, or None when the connection ended without one. Raises TimeoutError."""
    import msgspec

    line = b""
    while not line.endswith(b"\n") and len(line) < wishes.MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        try:
            chunk = connection.recv(wishes.MOST_BYTES)
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        line += chunk
    try:
        return wishes.read_reply(line)
    except msgspec.DecodeError:
        raise Unheard("what answers is no tf-ps-run of this version.") from None


def only_job(uid: int, proc: Path = Path("/proc")) -> str:
    """The name of the one job of this user on this machine. Raises Unheard when there is none, or more than one."""
    jobs = sorted(job_names(uid, proc))
    if not jobs:
        raise Unheard(
            "no job of yours runs on this machine: say where its nodes meet (--rdzv-backend, --rdzv-endpoint and "
            "--rdzv-id)."
        )
    if len(jobs) > 1:
        raise Unheard(f"several jobs of yours run here: give --rdzv-id, one of {', '.join(jobs)}.")
    return jobs[0]


def job_names(uid: int, proc: Path) -> set[str]:
    """The names of the jobs whose agents listen here for wishes of this user."""
    mark = f"@{wishes.socket_prefix(uid)}"
    # The eighth column is the socket's name, which may hold spaces; `@` stands for the byte that makes it abstract.
    columns = (line.split(None, 7) for line in (proc / "net" / "unix").read_text(errors="replace").splitlines())
    names = {fields[7].removeprefix(mark) for fields in columns if len(fields) == 8 and fields[7].startswith(mark)}
    # Anybody may give a socket such a name, and shall not steer a terminal with it; no job has one like that.
    return {name for name in names if name.isprintable()}


def _tell_elsewhere(asked: Asked, settings: Settings, environ: Mapping[str, str]) -> str:
    from tf_ps_runner.agent.words import plain
    from tf_ps_runner.visiting import job_to_visit, visit

    spec = job_to_visit(settings, environ, asked.timeout)
    credentials.scrub_environment()
    outcome = visit(spec, asked.wish, asked.timeout, lambda sentence: replies.say(SCALE, sentence))
    if outcome.reply is None:
        raise Unheard(f"{plain(outcome.problem)}.")
    return _what_follows(spec.run_id, outcome.reply)
