"""A job with parameter servers over what carries its records: a real master, a real etcd.

The nodes are real boards whose tasks are pretended. Whole jobs with every fault are in `simulation/`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from etcd_server import Etcd
from links import Link
from master_process import Master, master
from policy_parts import order_of
from pretend_tasks import CHIEF, SUCCESS, Job, PretendNode, playing, ps, room, rules, worker

from dlrover_run.coordination.model import PlanPhase
from dlrover_run.coordination.rules import JobRules
from dlrover_run.spec import EtcdSpec, MasterSpec

SERVERS, TRAINERS = room(ps=2), room(chief=1, worker=1, ps=1)


def at(master: Master, **changes: Any) -> dict[str, Any]:
    host, _, port = master.address.rpartition(":")
    return {"backend": "master", "master": replace(MasterSpec(host, int(port), is_host=False), **changes)}


def in_etcd(etcd: Etcd, prefix: str, port: int | None = None) -> dict[str, Any]:
    places = etcd.places if port is None else (("127.0.0.1", port),)
    return {"backend": "etcd", "etcd": EtcdSpec(places, prefix=f"/dlrover-run-{prefix}")}


async def begin(job: Job) -> tuple[PretendNode, PretendNode]:
    """Two nodes that train: `a` with a server, `b` with the other one, the chief and the worker."""
    a = job.node("a", room(ps=1))
    # Nothing can begin without `b`, so the last call is not over before both are here.
    await a.until(lambda: a.assignment.epoch)
    b = job.node("b", TRAINERS)
    await a.runs("ps-0")
    await b.runs("ps-1", "chief-0", "worker-0")
    return a, b


async def lose_a_server(a: PretendNode, b: PretendNode) -> None:
    """A server dies, and the next version trains."""
    addresses = a.order.servers
    a.end(ps(0))
    await a.runs("ps-2")
    await b.runs("ps-3", "chief-1", "worker-1")
    assert b.order.version == 2
    assert b.order.servers == addresses, "each rank has its port still"


async def succeed(a: PretendNode, b: PretendNode, chief: int) -> None:
    b.end(msgspec.structs.replace(CHIEF, id=chief), SUCCESS)
    for node in (a, b):
        assert (await node.over()).phase is PlanPhase.FINISHED


async def whole_life(job: Job) -> None:
    a, b = await begin(job)
    assert a.order.servers == b.order.servers
    assert len(b.order.servers) == 2
    assert all(server.startswith("127.0.0.1:") for server in b.order.servers)
    b.end(worker(0))
    await b.runs("ps-1", "chief-0", "worker-1")
    assert b.order.version == 1, "nobody else is disturbed"
    a.end(ps(0))
    await a.runs("ps-2")
    await b.runs("ps-3", "chief-1", "worker-2")
    await succeed(a, b, chief=1)


def play(scene: Callable[[Job], Awaitable[None]], rules: JobRules, **meeting: Any) -> None:
    async def all_of_it() -> None:
        async with playing(rules, **meeting) as job:
            await scene(job)

    asyncio.run(all_of_it())


def test_nodes_that_meet_at_a_master_train_until_the_chief_is_done() -> None:
    with master() as process:
        play(whole_life, rules(), **at(process))
        process.process.terminate()
        _, said = process.finish()
    assert "begins, for 1 to 2 parameter servers, a chief and 0 to 1 worker" in said
    assert "version 1" in said
    assert "ps-0 (rank 0) on host-a was killed by SIGKILL" in said
    assert "finished: " in said


def test_nodes_that_meet_in_etcd_train_until_the_chief_is_done(shared_etcd: Etcd) -> None:
    play(whole_life, rules(), **in_etcd(shared_etcd, "life"))
    assert shared_etcd.ctl("get", "--prefix", "/dlrover-run-life/", "--keys-only").split() == []


def test_a_master_without_a_journal_rebuilds_its_cluster_from_what_nodes_repeat() -> None:
    async def scene() -> None:
        with master() as first:
            async with playing(rules(max_restarts=1), **at(first)) as job:
                a, b = await begin(job)
                b.end(worker(0))
                await b.runs("ps-1", "chief-0", "worker-1")
                epochs = await killed(first, a, b)
                with master(listen=first.address):
                    await obey_another(epochs)
                    assert (a.keys, b.keys) == ({"ps-0"}, {"ps-1", "chief-0", "worker-1"})
                    assert b.order.version == 1
                    assert b.order.open, "workers are not shut out"
                    b.end(worker(1))
                    over = await b.over()
                    assert over.phase is PlanPhase.FAILED, "the restart of before counts"
                    assert "worker-1" in over.reason

    asyncio.run(scene())


def test_an_id_is_never_given_twice_though_no_journal_knows_of_it() -> None:
    async def scene() -> None:
        with master() as first:
            async with playing(rules(), **at(first)) as job:
                a, b = await begin(job)
                await lose_a_server(a, b)
                epochs = await killed(first, a, b)
                with master(listen=first.address):
                    await obey_another(epochs)
                    a.end(ps(2))
                    await a.runs("ps-4")
                    await b.runs("ps-5", "chief-2", "worker-2")
                    assert b.order.version == 3

    asyncio.run(scene())


def test_a_node_that_does_not_come_back_to_a_master_without_a_journal_is_replaced() -> None:
    async def scene() -> None:
        with master() as first:
            link = Link(int(first.address.rpartition(":")[2]))
            async with playing(rules(), **at(first)) as job:
                apart = replace(job.spec, master=MasterSpec("127.0.0.1", link.port, is_host=False))
                a = job.node("a", room(ps=1), spec=apart)
                await a.until(lambda: a.assignment.epoch)
                b = job.node("b", TRAINERS)
                await a.runs("ps-0")
                await b.runs("ps-1", "chief-0", "worker-0")
                await killed(first, a, b)
                link.close()
                with master(listen=first.address):
                    await b.until(lambda: b.order.version == 2 and b.order.open)
                    assert b.keys == {"ps-3", "chief-1", "worker-1"}
                    assert len(b.order.servers) == 1

    asyncio.run(scene())


def test_another_elected_agent_goes_on_with_the_cluster(shared_etcd: Etcd) -> None:
    async def scene() -> None:
        link = Link(shared_etcd.places[0][1])
        async with playing(rules(), **in_etcd(shared_etcd, "elected")) as job:
            apart = replace(job.spec, **in_etcd(shared_etcd, "elected", link.port))
            # It comes first, so it is elected; and it is a worker, whose loss disturbs nobody.
            first = job.node("first", room(worker=1), spec=apart)
            await first.until(lambda: first.assignment.waiting)
            rest = job.node("rest", room(ps=1, chief=1, worker=1))
            await rest.until(lambda: "chief-0" in rest.keys and rest.order.open)
            assert shared_etcd.ctl("get", "/dlrover-run-elected/job/leader", "--print-value-only").strip() == "first"
            epoch, begun = rest.assignment.epoch, list(rest.begun)
            link.close()
            await rest.until(lambda: rest.assignment.epoch > epoch)
            await rest.runs("ps-0", "chief-0", "worker-1")
            await rest.until(lambda: worker(1) in rest.begun)
            assert rest.order.version == 1
            assert rest.begun == [*begun, worker(1)]
            rest.end(CHIEF, SUCCESS)
            assert (await rest.over()).phase is PlanPhase.FINISHED

    asyncio.run(scene())


async def wish_for_more(job: Job) -> None:
    """A visitor asks for one server less, hears that this is known, and goes; nobody waits for it."""
    a, b = await begin(job)
    visitor = job.visitor(ps=1)
    await visitor.until(lambda: order_of(visitor.assignment) and visitor.order.scale_answered == 1)
    assert "1 parameter server" in visitor.assignment.reason
    assert visitor.order.tasks == ()
    await visitor.close()
    job.nodes.remove(visitor)
    await b.until(lambda: b.order.version == 2 and b.order.open)
    assert len(b.order.servers) == 1
    running = a.keys | b.keys
    assert running == {"ps-2", "chief-1", "worker-1"}
    await succeed(a, b, chief=1)


def test_a_scale_client_at_a_master_is_answered_and_leaves() -> None:
    with master() as process:
        play(wish_for_more, rules(), **at(process))


def test_a_scale_client_in_etcd_is_answered_and_leaves(shared_etcd: Etcd) -> None:
    play(wish_for_more, rules(), **in_etcd(shared_etcd, "wish"))


async def visit_nobody(job: Job) -> None:
    visitor = job.visitor(ps=1)
    await visitor.over()
    assert visitor.board.problem is not None
    assert "no node of a job 'job' is" in visitor.board.problem


def test_a_visitor_begins_no_job_at_a_master() -> None:
    with master() as process:
        play(visit_nobody, rules(), **at(process))


def test_a_visitor_begins_no_job_in_etcd(shared_etcd: Etcd) -> None:
    play(visit_nobody, rules(), **in_etcd(shared_etcd, "nobody"))
    assert shared_etcd.ctl("get", "--prefix", "/dlrover-run-nobody/", "--keys-only").split() == []


def without_servers(job: Job) -> Any:
    return replace(job.spec, rules=replace(job.spec.rules, policy=None))


async def meet_training(job: Job) -> None:
    """A node of dlrover-run meets a job of tf-ps-run."""
    await begin(job)
    stranger = job.node("c", spec=without_servers(job), trains=True)
    await stranger.over()
    assert stranger.board.problem is not None
    assert "the job was started with tf-ps-run and this node with dlrover-run" in stranger.board.problem


def test_a_node_that_trains_is_refused_by_the_master_of_a_job_with_servers() -> None:
    with master() as process:
        play(meet_training, rules(), **at(process))


def test_a_node_that_trains_gives_up_where_etcd_has_a_job_with_servers(shared_etcd: Etcd) -> None:
    play(meet_training, rules(), **in_etcd(shared_etcd, "training"))


async def meet_servers(job: Job) -> None:
    """A node of tf-ps-run, and a visitor, meet a job of dlrover-run."""
    trains = job.node("c", spec=without_servers(job), trains=True)
    await trains.until(lambda: trains.assignment.ranks is not None)
    for node, words in (
        (job.node("a", TRAINERS), "the job was started with dlrover-run and this node with tf-ps-run"),
        (job.visitor(ps=1), "has no parameter servers, so there is nothing to scale"),
    ):
        await node.over()
        assert node.board.problem is not None
        assert words in node.board.problem


def test_a_node_with_servers_is_refused_by_the_master_of_a_job_that_trains() -> None:
    with master() as process:
        play(meet_servers, rules(), **at(process))


def test_a_node_with_servers_gives_up_where_etcd_has_a_job_that_trains(shared_etcd: Etcd) -> None:
    play(meet_servers, rules(), **in_etcd(shared_etcd, "servers"))


def test_each_node_that_comes_to_a_job_in_etcd_is_informed_that_it_trains(shared_etcd: Etcd) -> None:
    async def scene(job: Job) -> None:
        a, b = await begin(job)
        await b.until(lambda: b.order.open)
        # What they are told is the same, and nothing is decided when they come.
        for name in ("spare", "another", "third"):
            spare = job.node(name, room(worker=1))
            await spare.until(lambda node=spare: node.assignment.waiting)
            assert spare.assignment.waiting is not None
            assert "this node waits as a spare" in spare.assignment.waiting.text
        await succeed(a, b, chief=0)

    play(scene, rules(), **in_etcd(shared_etcd, "spares"))


async def killed(first: Master, *nodes: PretendNode) -> dict[PretendNode, int]:
    """The master dies, and all nodes have noticed; the epoch of before of each."""
    epochs = {node: node.assignment.epoch for node in nodes}
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    for node in nodes:
        await node.until(lambda node=node: any(line.startswith("lost the master") for line in node.said))
    return epochs


async def obey_another(epochs: dict[PretendNode, int]) -> None:
    """All nodes have been told by another coordinator what to run."""
    for node, epoch in epochs.items():
        await node.until(lambda node=node, epoch=epoch: node.assignment.epoch > epoch and node.order.hint)
