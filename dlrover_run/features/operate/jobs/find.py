"""Finds the job that an operator means: by the rendezvous flags, as the only job of this user here, or by the cluster.

What is found is asked in one way, whatever holds the records of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from dlrover_run.background import beside
from dlrover_run.command_line import access, credentials, rdzv_keys
from dlrover_run.command_line.parse import CommandLine
from dlrover_run.command_line.program import Program
from dlrover_run.command_line.rendezvous import UNNAMED, USUAL, RendezvousArgs, resolve
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.rules import MAX_NODES, JobRules
from dlrover_run.features.operate.jobs.job_table import job_rows, render_jobs, terminal_width
from dlrover_run.features.operate.jobs.survey import FoundAgent, Survey, ask_agent, choose, group, survey
from dlrover_run.features.operate.protocol import AgentInfo, AgentReply, AgentRequest, JobEnding
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import JobStacks
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous import backends
from dlrover_run.rendezvous.backends import MASTER_VARIABLE
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.spec import Entrypoint, FlagValue, JobSpec, SpecError

ENDING_TIMEOUT = 3.0
"""Seconds that the agents of a job that does not answer have to tell of its end."""


Readings = Mapping[str, AgentReply]
"""What the agent of each node on this machine reads of its tasks, by the node id."""


class Endings:
    """The ends of a job on the nodes whose agents are asked for them."""

    def __init__(self, waiting: Sequence[asyncio.Future[AgentReply | None]] = ()) -> None:
        self._waiting = waiting

    async def last(self) -> JobEnding | None:
        """The end on the node that was the last one to end; None if none is known."""
        if not self._waiting:
            return None
        done, _ = await asyncio.wait(self._waiting, timeout=ENDING_TIMEOUT)
        ends = [reply.ending for each in done if (reply := each.result()) is not None and reply.ending is not None]
        return max(ends, key=lambda end: end.seconds, default=None)


class JobHere:
    """A job with agents on this machine. The first that answers asks the coordinator."""

    def __init__(self, found: Sequence[FoundAgent]) -> None:
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
            reply = await ask_agent(socket, request)
            if reply is not None and reply.problem:
                raise AskFailed(reply.problem, reply.no_job)
            if reply is not None:
                return reply
        raise AskFailed(f"the agents of the job {self.name!r} have ended", no_job=True)

    @contextlib.asynccontextmanager
    async def endings(self) -> AsyncIterator[Endings]:
        """Waits for the end of the job on its nodes here, until this context ends."""
        async with contextlib.AsyncExitStack() as asked:
            requests = (ask_agent(name, AgentRequest(ending=True)) for name in self._sockets)
            yield Endings([await asked.enter_async_context(beside(request)) for request in requests])

    async def readings(self) -> Readings:
        """What the agents of this machine read now."""
        replies = await self._replies(AgentRequest(progress=True), self._sockets)
        return {reply.agent.node_id: reply for reply in replies}

    async def recent_events(self, agents: Sequence[AgentInfo]) -> list[list[bytes]]:
        """For each of these agents of this machine that answers, the lines of a log with the events that it keeps in
        memory."""
        sockets = [name for name, agent in zip(self._sockets, self.agents, strict=True) if agent in agents]
        replies = await self._replies(AgentRequest(events=True), sockets)
        return [[bytes(line) for line in reply.events] for reply in replies]

    async def _replies(self, request: AgentRequest, sockets: Sequence[str]) -> list[AgentReply]:
        replies = await asyncio.gather(*(ask_agent(socket, request) for socket in sockets))
        return [reply for reply in replies if reply is not None]


class JobElsewhere:
    """A job at an endpoint. `spec` is the job as a program sees it that starts no master."""

    agents: tuple[AgentInfo, ...] = ()

    def __init__(self, spec: JobSpec) -> None:
        self.name = spec.run_id
        self.spec = spec

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        return await self._asker.ask(request)

    async def stacks(self, query: StackQuery) -> JobStacks:
        """The stacks of the job's workers. The caller limits the time. Raises AskFailed."""
        return await self._asker.ask_stacks(query)

    @property
    def _asker(self) -> backends.Asker:
        asker = backends.of(self.spec.rendezvous).asker
        assert asker is not None, "a job elsewhere can be asked from outside"
        return asker(self.spec)

    @contextlib.asynccontextmanager
    async def endings(self) -> AsyncIterator[Endings]:
        """None: only the agents of this machine are asked."""
        yield Endings()

    async def readings(self) -> Readings:
        return {}

    async def recent_events(self, agents: Sequence[AgentInfo]) -> list[list[bytes]]:
        return []


FoundJob = JobHere | JobElsewhere


class SeveralJobs(SpecError):
    """Several jobs here can be meant, those with these names."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


async def find_job(flags: FlagValues, environ: Mapping[str, str], program: Program) -> FoundJob:
    """The job that these flags and variables mean. Raises SpecError for invalid flags, and AskFailed without a job."""
    given = flags.explicit("rdzv_id")
    word = given.text if given else ""
    endpoint = flags.get("rdzv_endpoint").text.strip()
    by_flag = flags.explicit("rdzv_backend") or flags.explicit("rdzv_endpoint")
    try:
        everyone = await survey_here()
    except AskFailed:
        # A job at a master or in etcd is found without its agents here.
        if (spec := job_elsewhere(flags, environ, program)) is None:
            raise
        credentials.scrub_environment()
        return JobElsewhere(spec)
    jobs = _wanted(group(everyone.found), word, endpoint if by_flag else None)
    if len(jobs) == 1:
        return JobHere(jobs[0])
    if jobs:
        raise SeveralJobs(await several(jobs, everyone, word), [job[0][1].job for job in jobs])
    spec = job_elsewhere(flags, environ, program)
    credentials.scrub_environment()
    if spec is not None:
        return _by_agent(spec, everyone.found) or JobElsewhere(spec)
    which = f" with the id or the pid {word!r}" if word else ""
    whose = "" if os.geteuid() == 0 else " of yours"
    there = f", but others do: `{program.name} jobs` lists them" if everyone.found else ""
    raise AskFailed(
        f"no job{which}{whose} runs on this machine{there}; for a job elsewhere give --rdzv-endpoint (and "
        "--rdzv-backend) and --rdzv-id",
        no_job=True,
    )


def _by_agent(spec: JobSpec, found: Sequence[FoundAgent]) -> JobHere | None:
    """The job at a master's endpoint by its agents on this machine; None if it has none here. They know its master also
    where another node has taken the endpoint's place, and answer for their own node while there is none."""
    if not spec.rendezvous.hosted:
        return None
    met = (spec.rendezvous.endpoint, spec.run_id)
    agents = [(name, agent) for name, agent in found if (agent.endpoint, agent.job) == met]
    return JobHere(agents) if agents else None


async def survey_here() -> Survey:
    """The agents here that this user may ask: root those of all users."""
    return await survey(None if os.geteuid() == 0 else os.geteuid())


def _wanted(jobs: list[list[FoundAgent]], word: str, endpoint: str | None) -> list[list[FoundAgent]]:
    """The jobs here that flags can mean. With an `endpoint` that is a job of one node, which has been started with the
    same flags and needs no endpoint: all others are found at the endpoint itself."""
    if endpoint is not None:
        alone = [job for job in jobs if _is_alone(job[0][1]) and job[0][1].endpoint == endpoint]
        return [job for job in alone if (job[0][1].job == word if word else endpoint)]
    if word:
        return choose(jobs, word)
    # What root has started itself comes before the jobs of others.
    return [job for job in jobs if job[0][1].uid == os.geteuid()] or jobs


def _is_alone(agent: AgentInfo) -> bool:
    """Whether an agent runs a job of one node that needs no endpoint."""
    backend = backends.row(agent.backend)
    return backend is not None and backend.kind.alone


async def several(jobs: list[list[FoundAgent]], everyone: Survey, word: str) -> str:
    """What is said where several jobs can be meant: a sentence, and the table of them."""
    which = f"several jobs here are called {word!r}, or begin so" if word else "several jobs run here"
    rows = await job_rows(jobs, () if word else everyone.silent)
    drawn = render_jobs(rows, terminal_width(sys.stderr))
    return f"{which}: name one by its PID or by the beginning of its JOB.\n{drawn}"


def job_elsewhere(flags: FlagValues, environ: Mapping[str, str], program: Program) -> JobSpec | None:
    """The job at an endpoint that flags or variables give, or the cluster that has started this shell; None if nothing
    does. Raises SpecError."""
    args = RendezvousArgs(
        nodes=FlagValue("--nnodes", f"1:{MAX_NODES}"),
        endpoint=flags.get("rdzv_endpoint"),
        run_id=flags.explicit("rdzv_id") or FlagValue("--rdzv-id", UNNAMED),
        environ=environ,
        backend=flags.explicit("rdzv_backend"),
    )
    if not (args.backend or args.endpoint.text.strip() or environ.get(MASTER_VARIABLE, "").strip()):
        completed = _by_cluster(args, flags, environ, program)
        if completed is None:
            return None
        args = completed
    backend = args.backend or FlagValue("--rdzv-backend", USUAL)
    row = backends.by_word(backend.text)
    if row is not None and row.kind.ranked:
        raise SpecError("a job with --rdzv-backend=static is known to its own machines only: run this on one of them.")
    rendezvous = resolve(args._replace(backend=backend), UNNAMED)
    conf = rdzv_keys.parse(*flags.get("rdzv_conf"))
    place = access.with_credentials(rendezvous, conf, environ, lambda warning: None)
    return JobSpec(
        # Nothing runs, but a JobSpec needs an entry point.
        entrypoint=Entrypoint("program", "true"),
        run_id=rendezvous.run_id,
        rules=JobRules(max_nodes=MAX_NODES),
        rendezvous=place,
    )


def _by_cluster(
    args: RendezvousArgs, flags: FlagValues, environ: Mapping[str, str], program: Program
) -> RendezvousArgs | None:
    """The rendezvous that the cluster of this shell gives a job of several nodes; None without one."""
    from dlrover_run import environment as cluster_environment

    if not cluster_environment.may_complete(environ, "auto", hostfile=False):
        return None
    from dlrover_run.command_line import cluster

    here = cluster.context_of(CommandLine({}), program)
    with contextlib.suppress(SpecError):
        # The flags of the launch are not known here, so what contradicts them is no mistake of the user.
        found = cluster.detect_job(flags, environ, cluster.RequestedSize(any_size=True), here, lambda hint: None)
        if found is not None and found.size != 1:
            run_id = flags.explicit("rdzv_id") or found.run_id or args.run_id
            return cluster.complete(args._replace(run_id=run_id), found, here)
    return None
