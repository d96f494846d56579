"""An operator's questions and requests, answered by a real master and from a real etcd to a program that is no node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.etcd_server import Etcd
from support.etcd_server import serving as serving_etcd
from support.harness import WAIT, only_long
from support.master_node import FAST, Bed, serving, status

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.features.operate.jobs.find import JobElsewhere
from dlrover_run.job_status import stacks
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import (
    FoldedStack,
    NodeStacks,
    StackFrame,
    StackProblem,
)
from dlrover_run.job_status.status import JobState, JobStatus, NodeCondition
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.rendezvous.client import AskFailed, RendezvousClient
from dlrover_run.spec import Entrypoint, JobSpec

SPEC = JobSpec(entrypoint=Entrypoint("program", "true"), run_id="job", rules=replace(FAST, spares=1))


Answer = Callable[["Node", "int | None"], Awaitable[NodeStacks]]


class Node:
    """A node that does what it is assigned, with the real client."""

    def __init__(self, spec: JobSpec, name: str, answer: Answer | None = None) -> None:
        self.report = status(name)
        self.changed = asyncio.Event()
        self.client: RendezvousClient = open_client(spec, self._on_change, lambda line: None)
        if answer is not None:
            self.client.stack_source = partial(answer, self)
        self.client.report(self.report)

    def _on_change(self) -> None:
        wanted = self.client.assignment
        phase = NodePhase.RUNNING if wanted.ranks else NodePhase.WAITING
        if wanted.drains:
            phase = NodePhase.LEAVING
        self.report = msgspec.structs.replace(
            self.report, phase=phase, ranks=wanted.ranks, known_round=wanted.key, epoch=wanted.epoch
        )
        self.client.report(self.report)
        self.changed.set()

    async def until(self, phase: PlanPhase) -> None:
        while self.client.assignment.phase is not phase:
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def meeting(kind: str, directory: Path) -> AsyncIterator[JobSpec]:
    """The job of nodes that meet at a master or in an etcd."""
    if kind == "master":
        async with serving(token="a token that is long enough") as bed:
            host, _, port = bed.address.rpartition(":")
            master = kinds.Master(host, int(port), is_host=False, token="a token that is long enough")
            yield replace(SPEC, rendezvous=master)
        return
    with serving_etcd(directory) as etcd:
        yield in_etcd(etcd)


def in_etcd(etcd: Etcd) -> JobSpec:
    return replace(SPEC, rendezvous=kinds.Store(etcd.places))


@contextlib.asynccontextmanager
async def training(spec: JobSpec, answer: Answer | None = None) -> AsyncIterator[dict[str, Node]]:
    """Two nodes train, and one waits to step in."""
    nodes = {name: Node(spec, name, answer) for name in "abc"}
    try:
        for node in nodes.values():
            await node.until(PlanPhase.TRAINING)
        yield nodes
    finally:
        for node in nodes.values():
            await node.client.close()


async def seen(job: JobElsewhere, **counts: int) -> JobStatus:
    """The status, once it counts the nodes so."""
    while dict((found := await job.ask()).node_counts) != counts:
        await asyncio.sleep(0.05)
    return found


@pytest.mark.parametrize("kind", ["master", *only_long("etcd")])
def test_what_an_operator_does_from_elsewhere(kind: str, tmp_path: Path) -> None:
    async def operate() -> None:
        async with asyncio.timeout(WAIT), meeting(kind, tmp_path) as spec, training(spec) as nodes:
            job = JobElsewhere(spec)
            found = await seen(job, training=2, spare=1)
            assert (found.state, found.round_nodes, found.workers) == (JobState.TRAINING, 2, 4)
            assert all(node.report.phase is not NodePhase.LEAVING for node in nodes.values())

            with pytest.raises(AskFailed):
                await job.ask(OperatorRequest(Action.DRAIN, "n99"))
            spare = next(each for each in found.nodes if each.state is NodeCondition.SPARE)
            await job.ask(OperatorRequest(Action.DRAIN, spare.host))
            found = await seen(job, training=2, draining=1)
            assert [each.node_id for each in found.nodes if each.state is NodeCondition.DRAINING] == [spare.node_id]

            await job.ask(OperatorRequest(Action.STOP, by="ann"))
            for node in nodes.values():
                await node.until(PlanPhase.FAILED)

    asyncio.run(operate())


@pytest.mark.parametrize("kind", ["master", *only_long("etcd")])
def test_another_size(kind: str, tmp_path: Path) -> None:
    async def operate() -> None:
        async with asyncio.timeout(WAIT), meeting(kind, tmp_path) as place:
            spec = replace(place, rules=replace(place.rules, min_nodes=1))
            async with training(spec):
                job = JobElsewhere(spec)
                await seen(job, training=2, spare=1)
                await job.ask(OperatorRequest(Action.SCALE, by="ann", max_nodes=1))
                found = await seen(job, training=1, spare=2)
                assert (found.round, found.desired_nodes, found.desired_by) == (2, "1", "ann")

                with pytest.raises(AskFailed) as failed:
                    await job.ask(OperatorRequest(Action.SCALE, max_nodes=3))
                assert not failed.value.no_job

                await job.ask(OperatorRequest(Action.SCALE, max_nodes=2))
                found = await seen(job, training=2, spare=1)
                assert (found.round, found.desired_nodes, found.restarts) == (3, "", 0)

    asyncio.run(operate())


@pytest.mark.parametrize("kind", ["master", *only_long("etcd")])
def test_the_stacks_of_all_nodes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "NODE_TIMEOUT", 2.0)
    loop = (StackFrame("train.py", 10, "main"),)

    silent: list[Node] = []

    async def answer(node: Node, rank: int | None) -> NodeStacks:
        if node in silent:
            await asyncio.Event().wait()
        ranks = node.report.ranks
        if ranks is None:
            return NodeStacks()
        here = range(ranks.first_rank, ranks.last_rank + 1)
        return NodeStacks((FoldedStack(tuple(each for each in here if rank in (None, each)), loop),))

    async def operate() -> None:
        async with asyncio.timeout(WAIT), meeting(kind, tmp_path) as spec, training(spec, answer) as nodes:
            job = JobElsewhere(spec)
            found = await job.stacks(StackQuery())
            assert (found.nodes, found.missing, found.silent) == (3, (), ())
            assert found.stacks == (FoldedStack((0, 1, 2, 3), loop),)
            for query in (StackQuery(rank=3), StackQuery(rank=3, node="1")):
                found = await job.stacks(query)
                assert (found.nodes, found.stacks) == (1, (FoldedStack((3,), loop),))
            with pytest.raises(AskFailed) as failed:
                await job.stacks(StackQuery(rank=4))
            assert not failed.value.no_job

            mute = next(node for node in nodes.values() if node.report.ranks and node.report.ranks.node_rank == 1)
            silent.append(mute)
            found = await job.stacks(StackQuery())
            assert [(one.node, one.problem) for one in found.silent] == [(1, StackProblem.NODE_NO_ANSWER)]
            assert found.stacks == (FoldedStack((0, 1), loop),)

    asyncio.run(operate())


@pytest.mark.parametrize("kind", ["master", *only_long("etcd")])
def test_a_job_that_does_not_exist(kind: str, tmp_path: Path) -> None:
    async def ask() -> AskFailed:
        async with asyncio.timeout(WAIT), meeting(kind, tmp_path) as spec:
            with pytest.raises(AskFailed) as failed:
                await JobElsewhere(spec).ask()
            return failed.value

    assert asyncio.run(ask()).no_job


def test_without_the_token_nothing_is_shown() -> None:
    async def ask(bed: Bed, token: str) -> AskFailed:
        host, _, port = bed.address.rpartition(":")
        spec = replace(SPEC, rendezvous=kinds.Master(host, int(port), is_host=False, token=token))
        with pytest.raises(AskFailed) as failed:
            await JobElsewhere(spec).ask(OperatorRequest(Action.STOP))
        return failed.value

    async def both() -> None:
        async with asyncio.timeout(WAIT), serving(token="a token that is long enough") as bed:
            await bed.joined("a", "b", token="a token that is long enough")
            for token in ("", "another token of some length"):
                assert not (await ask(bed, token)).no_job
            assert not bed.server.jobs.empty

    asyncio.run(both())
