"""Finds the job that an operator means: by the rendezvous flags, as the only job of this user here, or by the cluster.

What is found is asked in one way, whatever holds the records of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from dlrover_run.command_line import backend_spec, credentials, rdzv_conf, rendezvous_options
from dlrover_run.command_line.parser import CommandLine, FlagValues, Program
from dlrover_run.command_line.rendezvous_options import MASTER_VARIABLE, RendezvousArgs
from dlrover_run.coordination.activity import MemoryUse
from dlrover_run.coordination.requests import OperatorRequest, StackQuery
from dlrover_run.coordination.rules import MAX_NODES, JobRules
from dlrover_run.coordination.stacks import JobStacks
from dlrover_run.coordination.status import JobStatus
from dlrover_run.operate import protocol
from dlrover_run.operate.protocol import AgentInfo, AgentReply, AgentRequest, TaskProgress
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.spec import Entrypoint, FlagValue, JobSpec, SpecError
from dlrover_run.supervisor import unix_sockets

if TYPE_CHECKING:
    from dlrover_run.etcd.store import EtcdStore
    from dlrover_run.rendezvous.etcd_records import Keys

SURVEY_TIMEOUT = 3.0
"""Seconds that the agents of this machine have to name themselves. A stopped one is left out."""


class JobHere:
    """A job with agents on this machine. The first that answers asks the coordinator."""

    def __init__(self, found: Sequence[tuple[str, AgentInfo]]) -> None:
        self.agents = tuple(agent for _, agent in found)
        self.name = self.agents[0].job
        self._sockets = [socket for socket, _ in found]

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        """The status of the job, after a request was taken. The caller limits the time. Raises AskFailed."""
        reply = await self._first_reply(AgentRequest(status=True, request=request))
        assert reply.status is not None, "a reply without a problem has what was requested"
        return reply.status

    async def stacks(self, query: StackQuery) -> JobStacks:
        """The stacks of the job's workers. The caller limits the time. Raises AskFailed."""
        reply = await self._first_reply(AgentRequest(stacks=query))
        assert reply.stacks is not None, "a reply without a problem has what was requested"
        return reply.stacks

    async def _first_reply(self, request: AgentRequest) -> AgentReply:
        for socket in self._sockets:
            reply = await _ask_agent(socket, request)
            if reply is not None and reply.problem:
                raise AskFailed(reply.problem, reply.no_job)
            if reply is not None:
                return reply
        raise AskFailed(f"the agents of the job {self.name!r} have ended", no_job=True)

    async def progress(self) -> Mapping[str, Sequence[TaskProgress]]:
        """What the tasks of each node on this machine have done, by its node id; those that have no step are left
        out."""
        return {reply.agent.node_id: reply.tasks for reply in await self._replies() if reply.tasks}

    async def memory(self) -> Mapping[str, MemoryUse]:
        """What checkpoints take in memory on each node on this machine, by its node id."""
        return {reply.agent.node_id: reply.memory for reply in await self._replies() if reply.memory is not None}

    async def _replies(self) -> list[AgentReply]:
        replies = await asyncio.gather(*(_ask_agent(socket, AgentRequest(progress=True)) for socket in self._sockets))
        return [reply for reply in replies if reply is not None]


class JobElsewhere:
    """A job at an endpoint. `spec` is the job as a program sees it that starts no master."""

    agents: tuple[AgentInfo, ...] = ()

    def __init__(self, spec: JobSpec) -> None:
        self.name = spec.run_id
        self.spec = spec

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        spec = self.spec
        if spec.master is not None:
            from dlrover_run.rendezvous.master_client import ask_master

            return await ask_master(spec.master, spec.run_id, request)
        from dlrover_run.rendezvous.etcd_requests import ask_etcd

        async with self._etcd() as (store, keys):
            return await ask_etcd(store, keys, spec.run_id, request)

    async def stacks(self, query: StackQuery) -> JobStacks:
        """The stacks of the job's workers. The caller limits the time. Raises AskFailed."""
        spec = self.spec
        if spec.master is not None:
            from dlrover_run.rendezvous.master_client import ask_master_for_stacks

            return await ask_master_for_stacks(spec.master, spec.run_id, query)
        from dlrover_run.rendezvous.etcd_stacks import ask_etcd_for_stacks

        async with self._etcd() as (store, keys):
            return await ask_etcd_for_stacks(store, keys, spec.run_id, query)

    @contextlib.asynccontextmanager
    async def _etcd(self) -> AsyncIterator[tuple[EtcdStore, Keys]]:
        from dlrover_run.etcd.store import EtcdStore
        from dlrover_run.rendezvous.etcd_client import renewal_timeout
        from dlrover_run.rendezvous.etcd_records import Keys

        spec = self.spec
        assert spec.etcd is not None, "a job elsewhere has a master or an etcd"
        store = EtcdStore(spec.etcd, renew_timeout=renewal_timeout(spec.rules))
        try:
            yield store, Keys(spec.etcd.prefix, spec.run_id)
        finally:
            await store.close()

    async def progress(self) -> Mapping[str, Sequence[TaskProgress]]:
        return {}

    async def memory(self) -> Mapping[str, MemoryUse]:
        return {}


FoundJob = JobHere | JobElsewhere


async def find_job(flags: FlagValues, environ: Mapping[str, str], program: Program) -> FoundJob:
    """The job that these flags and variables mean. Raises SpecError for invalid flags, and AskFailed without a job."""
    named = flags.explicit("rdzv_id")
    by_flag = flags.explicit("rdzv_backend") or flags.explicit("rdzv_endpoint")
    if not by_flag:
        jobs = group(await survey(os.geteuid()), named.text if named and named.text else None)
        if len(jobs) == 1:
            return JobHere(jobs[0])
        if jobs:
            names = ", ".join(sorted({agents[0][1].job for agents in jobs})[:10])
            raise SpecError(f"several jobs of yours run here: give --rdzv-id, one of {names}.")
    spec = job_elsewhere(flags, environ, program)
    credentials.scrub_environment()
    if spec is not None:
        return JobElsewhere(spec)
    which = f" named {named.text!r}" if named else ""
    raise AskFailed(
        f"no job{which} of yours runs on this machine; for a job elsewhere give --rdzv-endpoint (and --rdzv-backend) "
        "and --rdzv-id",
        no_job=True,
    )


async def survey(uid: int) -> list[tuple[str, AgentInfo]]:
    """The sockets of the agents of this user here that answer, each with its agent."""
    prefix = unix_sockets.socket_prefix(uid)
    names = sorted(prefix + rest for rest in unix_sockets.socket_names(prefix))
    replies = await asyncio.gather(*(_ask_agent(name, AgentRequest()) for name in names))
    return [(name, reply.agent) for name, reply in zip(names, replies, strict=True) if reply is not None]


def group(found: Sequence[tuple[str, AgentInfo]], name: str | None) -> list[list[tuple[str, AgentInfo]]]:
    """The agents of each job, of that name if one is given. Only with a master or an etcd agents are of one job when
    its name is the same."""
    jobs: dict[tuple[str, str, int], list[tuple[str, AgentInfo]]] = {}
    for each in found:
        agent = each[1]
        if name is None or agent.job == name:
            alone = agent.pid if agent.backend in ("memory", "static") else 0
            jobs.setdefault((agent.job, agent.backend, alone), []).append(each)
    return list(jobs.values())


async def _ask_agent(name: str, request: AgentRequest) -> AgentReply | None:
    """The reply of the agent with that socket; None if it does not answer, or belongs to another user."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(None if request.waits else SURVEY_TIMEOUT):
            reader, writer = await asyncio.open_unix_connection(f"\0{name}", limit=protocol.MAX_REPLY)
            if unix_sockets.peer_of(writer.get_extra_info("socket")).uid not in (os.geteuid(), 0):
                return None
            writer.write(msgspec.json.encode(request) + b"\n")
            return msgspec.json.decode(await reader.readline(), type=AgentReply)
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def job_elsewhere(flags: FlagValues, environ: Mapping[str, str], program: Program) -> JobSpec | None:
    """The job at an endpoint that flags or variables give, or the cluster that has started this shell; None if nothing
    does. Raises SpecError."""
    args = RendezvousArgs(
        nodes=FlagValue("--nnodes", f"1:{MAX_NODES}"),
        endpoint=flags.get("rdzv_endpoint"),
        run_id=flags.explicit("rdzv_id") or FlagValue("--rdzv-id", rendezvous_options.UNNAMED),
        environ=environ,
        backend=flags.explicit("rdzv_backend"),
    )
    if not (args.backend or args.endpoint.text.strip() or environ.get(MASTER_VARIABLE, "").strip()):
        completed = _by_cluster(args, flags, environ, program)
        if completed is None:
            return None
        args = completed
    backend = args.backend or FlagValue("--rdzv-backend", rendezvous_options.MASTER_BACKENDS[0])
    if backend.text == "static":
        raise SpecError("a job with --rdzv-backend=static is known to its own machines only: run this on one of them.")
    rendezvous = rendezvous_options.resolve(args._replace(backend=backend), rendezvous_options.UNNAMED)
    conf = rdzv_conf.parse(*flags.get("rdzv_conf"))
    found = backend_spec.find_backend(rendezvous, conf, environ)
    return JobSpec(
        # Nothing runs, but a JobSpec needs an entry point.
        entrypoint=Entrypoint("program", "true"),
        run_id=rendezvous.run_id,
        rules=JobRules(max_nodes=MAX_NODES),
        backend=rendezvous.backend,
        master=replace(found.master, is_host=False) if found.master else None,
        etcd=found.etcd,
    )


def _by_cluster(
    args: RendezvousArgs, flags: FlagValues, environ: Mapping[str, str], program: Program
) -> RendezvousArgs | None:
    """The rendezvous that the cluster of this shell gives a job of several nodes; None without one."""
    from dlrover_run import cluster_environment

    if not cluster_environment.may_complete(environ, "auto", hostfile=False):
        return None
    from dlrover_run.command_line import cluster

    here = cluster.context_of(CommandLine({}), program)
    with contextlib.suppress(SpecError):
        # The flags of the launch are not known here, so what contradicts them is no mistake of the user.
        found = cluster.find(flags, environ, cluster.Wanted(any_size=True), here, lambda hint: None)
        if found is not None and found.size != 1:
            return cluster.complete(args, found, flags, here)
    return None
