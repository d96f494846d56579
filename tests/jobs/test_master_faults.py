"""A master that is killed, stopped or replaced, or whose disk or clock fails, while a job needs it. Real processes."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest
from links import Link
from support.cluster import SOON, Cluster, Node, places, quiet_port, send_signal, succeed
from support.harness import OURS, Finished, only_long, run, still_alive, watched
from support.job import CapturedProcess
from support.rendezvous_backends import MasterBackend

ALERT = MasterBackend.alert
"""Settings with short heartbeat timeouts."""


@pytest.fixture(params=["journal", *only_long("no journal")])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """The directory in which masters keep their journals, if any."""
    return tmp_path / "state" if request.param == "journal" else None


def settings(journal: Path | None, **others: object) -> dict[str, object]:
    return {**others, **({} if journal is None else {"state_dir": journal})}


def flags(journal: Path | None) -> list[str]:
    return [] if journal is None else [f"--state-dir={journal}"]


def kill(master: CapturedProcess) -> None:
    master.signal(signal.SIGKILL)
    assert master.finish() == -signal.SIGKILL


def until_back(*nodes: Node) -> None:
    for node in nodes:
        node.until_prints("the master at 127.0.0.1:")
        node.until_prints("is back")


def test_a_master_that_dies_while_nodes_train(cluster: Cluster, journal: Path | None) -> None:
    """The node that started it starts another, which continues the same round; a new node shows that the round is
    known.
    """
    conf = settings(journal, **SOON)
    nodes = cluster.nodes("ab", "2:3", conf=conf)
    before = cluster.world(2)
    cluster.master().kill()
    for node in nodes:
        node.until_prints("; running workers do not need it")
    until_back(*nodes)
    with watched(*(member["pid"] for member in before)) as workers:
        assert still_alive(workers, 0) == 2
    assert cluster.mailbox.pending() == []
    nodes.append(cluster.node("c", "2:3", conf=conf))
    after = cluster.world(3)
    assert places(after) == {**places(before), "c": 2}
    assert after[0]["restart"] == 0
    succeed(after, *nodes)


def test_a_master_that_dies_right_after_a_worker(cluster: Cluster, journal: Path | None) -> None:
    """Whatever the state of the round change at that moment, the failure counts once."""
    nodes = cluster.nodes("ab", "2", "--max-restarts=9", conf=settings(journal))
    world = cluster.world(2)
    for restart in (1, 2):
        os.kill(world[restart % 2]["pid"], signal.SIGKILL)
        cluster.master().kill()
        world = cluster.world(2)
        assert world[0]["restart"] == restart
        until_back(*nodes)
    succeed(world, *nodes)


@pytest.mark.long
def test_a_stopped_master_does_not_affect_the_workers(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", conf=ALERT)
    world = cluster.world(2)
    master = cluster.master()
    master.suspend()
    for node in nodes:
        node.until_prints("; running workers do not need it")
    master.resume()
    until_back(*nodes)
    assert cluster.mailbox.pending() == []
    succeed(world, *nodes)


@pytest.mark.long
def test_a_master_that_was_replaced_while_it_was_stopped_makes_no_more_decisions(
    cluster: Cluster, tmp_path: Path
) -> None:
    link = Link(cluster.port)
    directory = flags(tmp_path / "state")
    old = cluster.stand_alone_master(*directory)
    conf = {**ALERT, **SOON, "is_host": 0}
    nodes = cluster.nodes("ab", "2:3", endpoint=link.port, conf=conf)
    before = cluster.world(2)
    old.signal(signal.SIGSTOP)
    for node in nodes:
        node.until_prints("; running workers do not need it")
    # Its address now leads to another machine, which shares the directory.
    link.target = cluster.port + 1
    new = cluster.stand_alone_master(*directory, port=link.target)
    link.cut()
    until_back(*nodes)
    old.signal(signal.SIGCONT)
    # It declares the nodes lost, and finds that it may not write this to the journal.
    old.until_prints("this master no longer decides for the job")
    assert cluster.mailbox.pending() == []
    nodes.append(cluster.node("c", "2:3", endpoint=link.port, conf=conf))
    after = cluster.world(3)
    assert places(after) == {**places(before), "c": 2}
    succeed(after, *nodes)
    for master in (old, new):
        master.signal(signal.SIGTERM)
        assert master.finish() == 0
    link.close()


@pytest.mark.long
def test_a_damaged_journal_is_reported_and_ends_no_running_worker(cluster: Cluster, tmp_path: Path) -> None:
    state = tmp_path / "state"
    master = cluster.stand_alone_master(f"--state-dir={state}")
    nodes = cluster.nodes("ab", "2", conf={"is_host": 0})
    world = cluster.world(2)
    kill(master)
    (journal,) = state.iterdir()
    content = bytearray(journal.read_bytes())
    content[20] ^= 1
    journal.write_bytes(content)
    master = cluster.stand_alone_master(f"--state-dir={state}")
    for process in (master, *nodes):
        process.until_prints(f"the journal {journal} is damaged, line 1: the checksum is wrong. Move it away")
    journal.rename(tmp_path / "damaged")
    until_back(*nodes)
    assert cluster.mailbox.pending() == []
    succeed(world, *nodes)
    master.signal(signal.SIGTERM)
    assert master.finish() == 0


def test_no_decision_is_made_while_the_disk_is_full(cluster: Cluster, tmp_path: Path) -> None:
    master = cluster.stand_alone_master(f"--state-dir={tmp_path / 'state'}")
    nodes = cluster.nodes("ab", "2", "--max-restarts=1", conf={"is_host": 0})
    before = cluster.world(2)
    # A file of the master may have at most one byte, which has the effect of a full disk.
    resource.prlimit(master.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    send_signal(before[:1], signal.SIGKILL)
    master.until_prints("no decision is made until it can")
    with watched(before[1]["pid"]) as other:
        assert still_alive(other, 0) == 1
    assert cluster.mailbox.pending() == []
    resource.prlimit(master.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    master.until_prints("the journal is written again")
    after = cluster.world(2)
    assert after[0]["restart"] == 1
    succeed(after, *nodes)
    master.signal(signal.SIGTERM)
    assert master.finish() == 0


def test_a_node_whose_master_is_gone_says_how_long_it_waits_and_answers_for_itself(cluster: Cluster) -> None:
    """The operator's commands name the endpoint, as they do for a job elsewhere."""
    master = cluster.stand_alone_master()
    nodes = cluster.nodes("ab", "2", conf={"is_host": 0, "master_timeout": 600})
    world = cluster.world(2)
    kill(master)
    place = f"the master at 127.0.0.1:{cluster.port}"
    for node in nodes:
        node.until_prints(f"lost {place}; running workers do not need it")
    parent = psutil.Process(world[1]["pid"]).ppid()
    (failed,) = (node for node in nodes if node.agent.pid == parent)
    os.kill(world[1]["pid"], signal.SIGKILL)
    failed.until_prints(f"; this node waits for {place}, at most ")
    assert failed.has_printed("rank 1 failed: ")

    def operate(*words: str) -> Finished:
        return run(OURS, [*words, *cluster.place.flags(cluster.place.ports)], cwd=cluster.directory)

    shown = operate("status")
    assert shown.code == 0, shown
    assert f"{place} cannot be reached" in shown.out
    assert operate("stacks").code == 0
    drained = operate("drain", "0", "--force")
    assert drained.code, drained
    assert f"{place} cannot be reached" in drained.err
    while any(node.process.poll() is None for node in nodes):
        stopped = operate("stop")
        assert "only this node stops" in stopped.out or stopped.code, stopped
    for node in nodes:
        node.finish()


def test_a_node_that_finds_no_master_fails_and_reports_where_it_searched(cluster: Cluster) -> None:
    node = cluster.node("a", "2", conf={"is_host": 0, "join_timeout": 1})
    assert node.finish() == 72
    assert node.has_printed(f"the master at 127.0.0.1:{cluster.port} was not found within 1 s")


def test_a_node_continues_with_a_master_that_does_not_know_its_rounds(cluster: Cluster, tmp_path: Path) -> None:
    """As when a network partition heals and a new master without a journal has restarted the job on the other side."""
    logs = tmp_path / "logs"
    first = cluster.stand_alone_master()
    link = Link(cluster.port)
    a = cluster.node(
        "a", "1:2", "--max-restarts=1", f"--log-dir={logs}", "--redirects=1", conf=SOON, endpoint=link.port
    )
    send_signal(cluster.world(1), signal.SIGUSR2)
    a.until_prints("restart 1 of 1")
    cluster.world(1)
    elsewhere = quiet_port()
    second = cluster.stand_alone_master(port=elsewhere)
    c = cluster.node("c", "1:2", conf=SOON, endpoint=elsewhere)
    cluster.world(1)
    link.target = elsewhere
    link.cut()
    succeed(cluster.world(2), a, c)
    # Its third round is the second of that master, and no file of an earlier round was overwritten.
    assert {path.name for path in logs.glob("*/attempt_*")} == {f"attempt_{number}" for number in range(3)}
    assert any(node.has_printed("; round 2 with 2 nodes") for node in (a, c)), "that with rank 0 prints it"
    link.close()
    for master in (first, second):
        master.signal(signal.SIGTERM)
        assert master.finish() == 0
