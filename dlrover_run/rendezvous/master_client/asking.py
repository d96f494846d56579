"""Questions about a job to its master, over a connection of their own. The program that asks is no node of the job."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.rendezvous.master_client.session import MasterNotAuthenticated, MasterRefused, MasterSession
from dlrover_run.transport import messages
from dlrover_run.transport.addresses import UnresolvedHost, resolve
from dlrover_run.transport.connection import Connect, Connection, ConnectionLost, GrpcConnection
from dlrover_run.transport.messages import Answered, Ask

if TYPE_CHECKING:
    from dlrover_run.coordination.records.requests import OperatorRequest
    from dlrover_run.job_status.questions import StackQuery
    from dlrover_run.job_status.stacks import JobStacks
    from dlrover_run.job_status.status import JobStatus

Part = TypeVar("Part")


class MasterAsker:
    """Asks the master at an endpoint about one job. The caller limits the time; both questions raise AskFailed."""

    def __init__(self, place: kinds.Master, run_id: str) -> None:
        self._place = place
        self._run_id = run_id

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        return await ask_master(self._place, self._run_id, request)

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        return await ask_master_for_stacks(self._place, self._run_id, query)


async def ask_master(
    spec: kinds.Master, job: str, request: OperatorRequest | None, connect: Connect = GrpcConnection, place: str = ""
) -> JobStatus:
    """The status of a job, over a connection of its own. The caller limits the time. Raises AskFailed."""
    # Imported only here: a node that joins does not wait for it.
    from dlrover_run.job_status.status import JobStatus

    answer = await send_question(spec, job, Ask(request), connect, place)
    status = _decoded(spec, answer.status, JobStatus)
    if status is None or answer.refusal:
        raise AskFailed(f"{server_name(spec)}: {answer.refusal}" if status is None else answer.refusal, status is None)
    return status


async def ask_master_for_stacks(
    spec: kinds.Master, job: str, query: StackQuery, connect: Connect = GrpcConnection, place: str = ""
) -> JobStacks:
    """The stacks of a job's workers, over a connection of its own. The caller limits the time. Raises AskFailed."""
    from dlrover_run.job_status.stacks import JobStacks

    answer = await send_question(spec, job, Ask(stacks=query), connect, place)
    stacks = _decoded(spec, answer.stacks, JobStacks)
    if stacks is None:
        no_job = answer.status == messages.NULL
        raise AskFailed(f"{server_name(spec)}: {answer.refusal}" if no_job else answer.refusal, no_job)
    return stacks


async def send_question(spec: kinds.Master, job: str, question: Ask, connect: Connect, place: str = "") -> Answered:
    """The answer of the master, at `place` or else at its endpoint. Raises AskFailed."""
    server = server_name(spec)
    try:
        addresses = await resolve(place or spec.host, spec.port)
    except UnresolvedHost as unknown:
        raise AskFailed(str(unknown)) from None
    problem = AskFailed(f"{server} has no address")
    groups = [list(group) for _, group in itertools.groupby(addresses, lambda address: address.family)]
    for verified, group in itertools.product(verified_as(spec, place), groups):
        connection: Connection | None = None
        try:
            connection = connect(verified, group)
            return await MasterSession(connection, spec.token).ask(job, question)
        except ConnectionLost as ended:
            problem = AskFailed(f"{server} cannot be reached: {ended}")
        except MasterNotAuthenticated:
            raise AskFailed(f"{server} does not know this job's token") from None
        except MasterRefused as refusal:
            raise AskFailed(f"{server} refuses: {refusal}") from None
        finally:
            if connection is not None:
                await connection.close()
    raise problem


def verified_as(spec: kinds.Master, place: str) -> tuple[kinds.Master, ...]:
    """The specs with which to connect to the master at `place`: with TLS the certificate of a successor may be for the
    name of the endpoint, as one that all nodes share is, or for its own address."""
    return (spec,) if not place or spec.tls is None else (spec, replace(spec, host=place))


def server_name(spec: kinds.Master) -> str:
    """What messages call the master."""
    return f"the master at {spec.endpoint}"


def _decoded(spec: kinds.Master, data: msgspec.Raw, kind: type[Part]) -> Part | None:
    """A part of an answer; None if it has none. Raises AskFailed."""
    try:
        return msgspec.json.decode(data, type=kind | None)
    except msgspec.DecodeError as error:
        raise AskFailed(f"the answer of {server_name(spec)} cannot be read: {error}") from None
