"""The elected agent of a job in etcd is killed, hangs, is replaced, or finds records that it did not write. Real
processes.

No two worlds share a round: each round has its own port, and each of its ranks has one worker.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from links import Links
from support.cluster import NEVER, SOON, Cluster, Node, World, leave, places, send_signal, succeed
from support.etcd_server import Etcd
from support.harness import WAIT, WORKERS, only_long, still_alive, watched
from support.rendezvous_backends import EtcdBackend


@pytest.fixture
def place(shared_etcd_cluster: Etcd) -> EtcdBackend:
    """Keys in a cluster of three members, which all stay up."""
    return EtcdBackend(shared_etcd_cluster)


class Job:
    """Nodes with their names as ids, each with its own links to etcd, and all reports of their workers."""

    def __init__(self, cluster: Cluster, place: EtcdBackend, *flags: str, **options: Any) -> None:
        self.cluster = cluster
        self.nodes: dict[str, Node] = {}
        self.links: dict[str, Links] = {}
        self._place = place
        self._flags = flags
        self._options = options
        self._messages: list[dict[str, Any]] = []

    def start(self, *names: str) -> None:
        """Start nodes. The first of all is elected."""
        for name in names:
            self.links[name] = Links(self._place.ports)
            begins = not self.nodes
            self.nodes[name] = self.cluster.node(
                name, *self._flags, endpoint=self.links[name].ports, env={"NODE_ID": name}, **self._options
            )
            if begins:
                self.nodes[name].until_prints("waiting: ")

    def lose(self, name: str) -> None:
        """Kill all processes of a node."""
        self.nodes.pop(name).lose()
        self.links.pop(name).close()

    def world(self) -> World:
        """Return the next world that has exactly one worker of each node.

        Earlier rounds may have started too early for some nodes and too late for others.
        """
        latest: dict[str, dict[str, Any]] = {}
        while True:
            message = self.cluster.mailbox.receive()
            self._messages.append(message)
            latest[message["node"]] = message
            here = [latest[name] for name in self.nodes if name in latest]
            if len(here) == len(self.nodes) and {(m["port"], m["world"]) for m in here} == {
                (here[0]["port"], len(self.nodes))
            }:
                return sorted(here, key=lambda m: int(m["rank"]))

    def check(self) -> None:
        """Fail if one round had two worlds."""
        rounds: dict[str, list[dict[str, Any]]] = {}
        for message in self._messages:
            rounds.setdefault(message["port"], []).append(message)
        for members in rounds.values():
            ranks = [m["rank"] for m in members]
            assert len(set(ranks)) == len(ranks), members
            assert len({(m["world"], m["nodes"], m["restart"]) for m in members}) == 1, members
            assert max(ranks) < members[0]["world"], members

    def close(self) -> None:
        for links in self.links.values():
            links.close()


@contextlib.contextmanager
def followed(cluster: Cluster, place: EtcdBackend, *flags: str, **options: Any) -> Iterator[Job]:
    """A job that is checked when the test ends."""
    job = Job(cluster, place, *flags, **options)
    try:
        yield job
        job.check()
    finally:
        job.close()


FAILING: dict[str, Any] = {"conf": {**SOON, "early_failure_limit": 0}}
"""Settings of a job whose workers fail repeatedly."""


@pytest.fixture
def job(cluster: Cluster, place: EtcdBackend) -> Iterator[Job]:
    """Two or three nodes, of which the first is elected."""
    with followed(cluster, place, "2:3", "--max-restarts=99", **FAILING) as job:
        yield job


@pytest.fixture
def training(cluster: Cluster, place: EtcdBackend) -> Iterator[Job]:
    """The same, with torch workers that count their steps. Each node imports torch once for all its rounds."""
    flags = ("--max-restarts=99", "--start-method=forkserver")
    with followed(cluster, place, "2:3", *flags, script=WORKERS / "count.py", **FAILING) as job:
        yield job


LOSE = pytest.mark.parametrize("lose", ["request", *only_long("answer")])
"""Whether the elected agent dies just before it has written its decision, or just after."""


@pytest.mark.long
@pytest.mark.torchrun
@LOSE
def test_the_elected_agent_is_killed_while_it_starts_the_next_round(
    training: Job, place: EtcdBackend, lose: Literal["request", "answer"]
) -> None:
    job = training
    job.start("a", "b", "c")
    before = job.world()
    assert place.elected() == "a"
    step = job.cluster.step_of(before, 0)
    job.links["a"].set_trap(b'"phase":"training"', lose)
    send_signal([member for member in before if member["node"] == "b"], signal.SIGKILL)
    job.links["a"].until_sprung()
    job.lose("a")
    after = job.world()
    assert sorted(places(after)) == ["b", "c"]
    assert after[0]["restart"] <= 1, "it costs at most one restart"
    assert after[0]["step"] >= step
    step = job.cluster.step_of(after, after[0]["step"])
    job.start("a")
    together = job.world()
    assert {m["restart"] for m in together} == {after[0]["restart"]}
    assert together[0]["step"] >= step
    assert place.elected() in ("b", "c")
    succeed(together, *job.nodes.values())


@LOSE
def test_the_elected_agent_is_killed_while_it_ends_a_round_that_has_lost_a_node(
    cluster: Cluster, place: EtcdBackend, lose: Literal["request", "answer"]
) -> None:
    with followed(cluster, place, "3", "--max-restarts=1") as job:
        job.start("a", "b", "c")
        before = job.world()
        assert place.elected() == "a"
        job.links["a"].set_trap(b'"phase":"gathering"', lose)
        job.lose("c")
        job.links["a"].until_sprung()
        job.lose("a")
        job.start("a", "c")
        after = job.world()
        assert {m["restart"] for m in after} == {0}
        assert places(after)["b"] == places(before)["b"]
        succeed(after, *job.nodes.values())


@pytest.mark.long
@pytest.mark.torchrun
def test_an_elected_agent_that_was_stopped_makes_no_more_decisions(cluster: Cluster, place: EtcdBackend) -> None:
    with followed(cluster, place, "2:3", conf=SOON, script=WORKERS / "count.py") as job:
        job.start("a", "b", "c")
        before = job.world()
        assert place.elected() == "a"
        agent = job.nodes["a"].agent
        agent.suspend()
        stopped = job.nodes.pop("a")
        stopped.expire()
        after = job.world()
        assert {m["restart"] for m in after} == {0}
        assert after[0]["step"] >= before[0]["step"]
        elected = place.elected()
        assert elected in ("b", "c")
        (worker,) = [member["pid"] for member in before if member["node"] == "a"]
        with watched(worker) as old:
            agent.resume()
            assert still_alive(old, WAIT) == 0
        job.nodes["a"] = stopped
        together = job.world()
        assert {m["restart"] for m in together} == {0}
        assert together[0]["step"] >= after[0]["step"]
        assert place.elected() == elected
        succeed(together, *job.nodes.values())


def test_an_agent_that_was_stopped_while_another_took_its_id_stops_its_workers(job: Job) -> None:
    job.start("a", "b", "c")
    before = job.world()
    stopped, links = job.nodes.pop("b"), job.links.pop("b")
    agent = stopped.agent
    agent.suspend()
    stopped.expire()
    job.world()
    job.start("b")
    together = job.world()
    (worker,) = [member["pid"] for member in before if member["node"] == "b"]
    with watched(worker) as old:
        agent.resume()
        assert still_alive(old, WAIT) == 0
    leave(stopped)
    links.close()
    succeed(together, *job.nodes.values())


def key_of(place: EtcdBackend, name: str) -> str:
    """The full name of a key."""
    (key,) = [key for key in place.all_keys() if key.endswith(f"/{name}")]
    return key


def undo_the_election(place: EtcdBackend) -> None:
    place.etcd.ctl("del", key_of(place, "leader"))


def revoke_all_leases(place: EtcdBackend) -> None:
    leases = place.leases()
    assert len(leases) == 3, "one lease of each node, and one of the job"
    for lease in leases:
        place.etcd.ctl("lease", "revoke", lease)


def delete_all_keys(place: EtcdBackend) -> None:
    place.etcd.ctl("del", "--prefix", place.prefix)


@pytest.mark.long
@pytest.mark.parametrize("undo", [undo_the_election, revoke_all_leases, delete_all_keys])
def test_keys_that_another_client_removed_are_restored_and_no_worker_ends(
    cluster: Cluster, place: EtcdBackend, undo: Callable[[EtcdBackend], None]
) -> None:
    conf = {**SOON, "lost_after": NEVER}
    nodes = cluster.nodes("ab", "2:3", conf=conf)
    world = cluster.world(2)
    undo(place)
    nodes.append(cluster.node("c", "2:3", conf=conf))
    after = cluster.world(3)
    assert places(after) == {**places(world), "c": 2}
    assert {m["restart"] for m in after} == {0}
    succeed(after, *nodes)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plan", "messages", "a"])
def test_an_invalid_record_of_the_job_is_reported_in_one_line_and_ends_no_worker(
    cluster: Cluster, place: EtcdBackend, name: str
) -> None:
    nodes = {name: cluster.node(name, "2:3", env={"NODE_ID": name}, conf=SOON) for name in "ab"}
    before = cluster.world(2)
    elected = place.elected()
    wrong = [key for key in place.all_keys() if f"/{name}" in key.removeprefix(place.prefix)]
    assert wrong
    for key in wrong:
        place.etcd.ctl("put", key, "{rubbish}")
    if name == "plan":
        # The next elected agent has to read it.
        place.etcd.ctl("del", key_of(place, "leader"))
        sentence = "/plan in etcd is "
    else:
        sentence = {"messages": " in etcd is ignored: ", "a": "warning: the report in etcd under "}[name]
        nodes[elected].until_prints(sentence)
    nodes["c"] = cluster.node("c", "2:3", env={"NODE_ID": "c"}, conf=SOON)
    after = cluster.world(3)
    assert places(after) == {**places(before), "c": 2}
    assert {m["restart"] for m in after} == {0}
    succeed(after, *nodes.values())
    counts = [node.output.count(sentence) for node in nodes.values()]
    assert sum(counts) >= 1, counts
    assert max(counts) <= 1, counts
