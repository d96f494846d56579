"""The agents on this machine: which there are, the jobs that they make up, and the job that a user's word means."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from dlrover_run.background import TimeLimit
from dlrover_run.features.operate import protocol
from dlrover_run.features.operate.jobs.namespaces import ancestor_here
from dlrover_run.features.operate.protocol import AgentInfo, AgentReply, AgentRequest
from dlrover_run.processes import unix_sockets
from dlrover_run.processes.unix_sockets import Peer, peer_of
from dlrover_run.rendezvous import backends

SURVEY_TIMEOUT = 3.0
"""Seconds that an agent of this machine has to name itself."""

SURVEY_WIDTH = 16
"""Agents that are asked at a time, so that the last of many has its seconds too."""

FoundAgent = tuple[str, AgentInfo]
"""The name of an agent's socket, and what the agent says of itself."""


class SilentAgent(NamedTuple):
    """An agent that does not answer: it is stopped, or has too much to do; or `is_refused`, as by one in another user
    namespace, which takes no requests of a user whom it does not know."""

    pid: int
    uid: int
    is_refused: bool = False


class Survey(NamedTuple):
    """The agents of this machine."""

    found: list[FoundAgent]
    silent: list[SilentAgent]


_NAME = re.compile(r"(\d+)-(\d+)-[0-9a-f]+")


async def survey(uid: int | None) -> Survey:
    """The agents of this user here, of all users with None: which only root is answered by. Raises AskFailed."""
    try:
        names = sorted(unix_sockets.PREFIX + rest for rest in unix_sockets.socket_names(unix_sockets.PREFIX))
    except OSError as error:
        # Imported only where it is needed: completion reads the table of jobs too.
        from dlrover_run.rendezvous.client import AskFailed

        raise AskFailed(
            f"the jobs of this machine cannot be listed: {error.filename} cannot be read ({error.strerror}); with "
            "--rdzv-endpoint and --rdzv-id the job is asked at its master"
        ) from error
    width = asyncio.Semaphore(SURVEY_WIDTH)
    user = os.geteuid()
    own = unix_sockets.socket_prefix(user)

    async def ask(name: str) -> _Answer:
        # The name has the user in the namespace of the agent; the kernel says who that is here.
        users = None if user == 0 else (user, 0) if name.startswith(own) else (user,)
        async with width:
            return await _ask(name, AgentRequest(), users)

    answers = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
    found = [(name, answer.reply.agent) for name, answer in answers.items() if answer.reply is not None]
    silent = []
    for name, answer in answers.items():
        parts = _NAME.fullmatch(name.removeprefix(unix_sockets.PREFIX))
        if answer.reply is None and not answer.is_foreign and parts:
            pid, owner = answer.peer or (int(parts[2]), int(parts[1]))
            if uid is None or owner in (uid, 0):
                silent.append(SilentAgent(pid, owner, answer.is_refused))
    return Survey(found, silent)


def group(found: Sequence[FoundAgent]) -> list[list[FoundAgent]]:
    """The agents of each job. Only where nodes communicate agents are of one job when its name is the same."""
    jobs: dict[tuple[str, str, int, str], list[FoundAgent]] = {}
    for each in found:
        agent = each[1]
        backend = backends.row(agent.backend)
        alone = "" if backend is None or backend.kind.coordinated else each[0]
        jobs.setdefault((agent.job, agent.backend, agent.uid, alone), []).append(each)
    return list(jobs.values())


def choose(jobs: Sequence[list[FoundAgent]], word: str) -> list[list[FoundAgent]]:
    """The jobs that a word of the user means: those of this name, else the one with this pid, else those whose name
    begins so."""
    if named := [job for job in jobs if job[0][1].job == word]:
        return named
    if word.isdecimal() and (by_pid := [job for job in jobs if any(int(word) in agent.pids_here for _, agent in job)]):
        return by_pid
    return [job for job in jobs if job[0][1].job.startswith(word)]


class _Answer(NamedTuple):
    """What came of a question to an agent: its reply, and the process that listens, as far as they are known.
    `is_refused`: it has closed the connection. `is_foreign`: it is of a user who is not asked."""

    reply: AgentReply | None = None
    peer: Peer | None = None
    is_refused: bool = False
    is_foreign: bool = False


async def ask_agent(name: str, request: AgentRequest) -> AgentReply | None:
    """The reply of the agent with that socket; None if it does not answer, or if this user may not ask it."""
    own = os.geteuid()
    return (await _ask(name, request, None if own == 0 else (own, 0))).reply


async def _ask(name: str, request: AgentRequest, users: Collection[int] | None) -> _Answer:
    """Ask the agent with that socket, if it is of one of these users."""
    writer: asyncio.StreamWriter | None = None
    peer: Peer | None = None
    try:
        async with TimeLimit(None if request.waits else SURVEY_TIMEOUT):
            reader, writer = await asyncio.open_unix_connection(f"\0{name}", limit=protocol.MAX_REPLY)
            peer = peer_of(writer.get_extra_info("socket"))
            if users is not None and peer.uid not in users:
                return _Answer(peer=peer, is_foreign=True)
            writer.write(msgspec.json.encode(request) + b"\n")
            line = await reader.readline()
            if not line:
                return _Answer(peer=peer, is_refused=True)
            reply = msgspec.json.decode(line, type=AgentReply)
            return _Answer(msgspec.structs.replace(reply, agent=_seen(reply.agent, peer)), peer)
    except ConnectionError:
        return _Answer(peer=peer, is_refused=peer is not None)
    except (OSError, TimeoutError, ValueError):
        return _Answer(peer=peer)
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _seen(agent: AgentInfo, peer: Peer) -> AgentInfo:
    """What an agent says of itself, with its user and its pids as they are here: it may run in other namespaces."""
    is_here = peer.pid == agent.pid
    launcher = agent.launcher if is_here else ancestor_here(peer.pid, agent.launcher)
    return msgspec.structs.replace(agent, uid=peer.uid, pid_here=peer.pid, launcher_here=launcher)
