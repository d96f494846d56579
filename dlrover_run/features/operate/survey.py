"""The agents on this machine: which there are, the jobs that they make up, and the job that a user's word means."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from dlrover_run.features.operate import protocol
from dlrover_run.features.operate.protocol import AgentInfo, AgentReply, AgentRequest
from dlrover_run.processes import unix_sockets
from dlrover_run.rendezvous import backends

SURVEY_TIMEOUT = 3.0
"""Seconds that an agent of this machine has to name itself."""

SURVEY_WIDTH = 16
"""Agents that are asked at a time, so that the last of many has its seconds too."""

FoundAgent = tuple[str, AgentInfo]
"""The name of an agent's socket, and what the agent says of itself."""


class SilentAgent(NamedTuple):
    """An agent that does not answer: it is stopped, or has too much to do."""

    pid: int
    uid: int


class Survey(NamedTuple):
    """The agents of this machine."""

    found: list[FoundAgent]
    silent: list[SilentAgent]


_NAME = re.compile(r"(\d+)-(\d+)-[0-9a-f]+")


async def survey(uid: int | None) -> Survey:
    """The agents of this user here, of all users with None: which only root is answered by. Raises AskFailed."""
    prefix = unix_sockets.PREFIX if uid is None else unix_sockets.socket_prefix(uid)
    try:
        names = sorted(prefix + rest for rest in unix_sockets.socket_names(prefix))
    except OSError as error:
        # Imported only where it is needed: completion reads the table of jobs too.
        from dlrover_run.rendezvous.client import AskFailed

        raise AskFailed(
            f"the jobs of this machine cannot be listed: {error.filename} cannot be read ({error.strerror}); with "
            "--rdzv-endpoint and --rdzv-id the job is asked at its master"
        ) from error
    width = asyncio.Semaphore(SURVEY_WIDTH)

    async def ask(name: str) -> AgentReply | None:
        async with width:
            return await ask_agent(name, AgentRequest())

    replies = await asyncio.gather(*map(ask, names))
    found = [(name, reply.agent) for name, reply in zip(names, replies, strict=True) if reply is not None]
    silent = []
    for name, reply in zip(names, replies, strict=True):
        if reply is None and (parts := _NAME.fullmatch(name.removeprefix(unix_sockets.PREFIX))):
            silent.append(SilentAgent(int(parts[2]), int(parts[1])))
    return Survey(found, silent)


def group(found: Sequence[FoundAgent]) -> list[list[FoundAgent]]:
    """The agents of each job. Only where nodes communicate agents are of one job when its name is the same."""
    jobs: dict[tuple[str, str, int, int], list[FoundAgent]] = {}
    for each in found:
        agent = each[1]
        backend = backends.row(agent.backend)
        alone = 0 if backend is None or backend.kind.coordinated else agent.pid
        jobs.setdefault((agent.job, agent.backend, agent.uid, alone), []).append(each)
    return list(jobs.values())


def choose(jobs: Sequence[list[FoundAgent]], word: str) -> list[list[FoundAgent]]:
    """The jobs that a word of the user means: those of this name, else the one with this pid, else those whose name
    begins so."""
    if named := [job for job in jobs if job[0][1].job == word]:
        return named
    if word.isdecimal() and (
        by_pid := [job for job in jobs if any(word in (str(agent.launcher), str(agent.pid)) for _, agent in job)]
    ):
        return by_pid
    return [job for job in jobs if job[0][1].job.startswith(word)]


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a connection."""
    return unix_sockets.peer_of(connection).uid


async def ask_agent(name: str, request: AgentRequest) -> AgentReply | None:
    """The reply of the agent with that socket; None if it does not answer, or if this user may not ask it."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(None if request.waits else SURVEY_TIMEOUT):
            reader, writer = await asyncio.open_unix_connection(f"\0{name}", limit=protocol.MAX_REPLY)
            uid, own = peer_uid(writer.get_extra_info("socket")), os.geteuid()
            if own != 0 and uid not in (own, 0):
                return None
            writer.write(msgspec.json.encode(request) + b"\n")
            reply = msgspec.json.decode(await reader.readline(), type=AgentReply)
            return msgspec.structs.replace(reply, agent=msgspec.structs.replace(reply.agent, uid=uid))
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
