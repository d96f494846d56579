"""All nodes of a job on this machine, as real processes, and how their supervisor reacts when some are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.cluster import SOON, Cluster, Node, World, is_master, places, send_signal, succeed
from support.etcd_server import Etcd
from support.harness import OURS, WORKERS, Mailbox, only_long, run
from support.job import kill_at_once, of_local_node
from support.rendezvous_backends import EtcdBackend, MasterBackend

from dlrover_run import ChildFailedError, main

MEMBER = WORKERS / "local_member.py"


@pytest.fixture
def cluster(mailbox: Mailbox) -> Iterator[Cluster]:
    """The processes that a test starts; the test fails if any is left at its end."""
    processes = Cluster(mailbox, MasterBackend())
    yield processes
    processes.close()


def command(cluster: Cluster, nodes: str, nnodes: str, *flags: str, args: tuple[str, ...] = (), **conf: object) -> Node:
    """Start one command that has all nodes on this machine. Its first round needs the maximum of nodes."""
    return cluster.node(
        "job", nnodes, f"--local-nodes={nodes}", *flags, script=MEMBER, args=args, conf=conf, endpoint=0
    )


def processes_of(supervisor: Node, number: int) -> list[psutil.Process]:
    """The processes of one node."""
    return of_local_node(psutil.Process(supervisor.pid).children(recursive=True), number)


def master_of(supervisor: Node) -> psutil.Process:
    (master,) = [child for child in psutil.Process(supervisor.pid).children() if is_master(child)]
    return master


def kill_node(supervisor: Node, number: int) -> None:
    kill_at_once(processes_of(supervisor, number))


def numbers(world: World) -> list[int]:
    """The numbers of the nodes in a world of one worker each, in rank order."""
    return [member["node"] for member in world]


@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_node_is_replaced_by_one_with_the_next_number_and_its_rank(cluster: Cluster, lost: int) -> None:
    job = command(cluster, "3", "3")
    world = cluster.world(3)
    assert places(world) == {0: 0, 1: 1, 2: 2}
    kill_node(job, lost)
    job.until_prints(f"node {lost} was killed by SIGKILL; node 3 takes its place (1 of 3 node restarts)")
    world = cluster.world(3)
    assert places(world) == {node if node != lost else 3: node for node in range(3)}
    assert world[lost]["names"] == ["3", str(job.pid), "3", "3"]
    assert {member["restart"] for member in world} == {0}
    succeed(world, job)
    # The harness gives every launch the test's own directory for temporary files.
    assert [path.name for path in cluster.directory.iterdir()] == []


@pytest.mark.long
def test_nodes_need_no_console_script(tmp_path: Path) -> None:
    """DLRover's own package installs another program under the name of ours."""
    for name in ("dlrover-run", "tf-ps-run"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch called\nexit 9\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = run(OURS, ["--local-nodes=2", "--max-restarts=1", "train.py"], cwd=tmp_path, env={"PATH": path})
    assert ended.code == 0, ended.err
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("process", "text"), [*only_long((0, "died without a result (exit code 137)")), (1, "was killed by SIGKILL")]
)
def test_killing_the_watchdog_or_the_agent_ends_the_whole_node(cluster: Cluster, process: int, text: str) -> None:
    job = command(cluster, "2", "2")
    cluster.world(2)
    processes_of(job, 1)[process].kill()
    job.until_prints(f"node 1 {text}; node 2 takes its place")
    world = cluster.world(2)
    assert numbers(world) == [0, 2]
    succeed(world, job)


@pytest.mark.long
def test_a_node_that_is_requested_to_leave_is_replaced(cluster: Cluster) -> None:
    job = command(cluster, "2", "2")
    cluster.world(2)
    processes_of(job, 0)[1].terminate()
    job.until_prints("node 0 left: SIGTERM stopped the job; node 2 takes its place")
    world = cluster.world(2)
    assert numbers(world) == [2, 1]
    succeed(world, job)


@pytest.mark.long
def test_all_nodes_may_be_killed_at_once(cluster: Cluster) -> None:
    job = command(cluster, "2", "2")
    cluster.world(2)
    kill_at_once(processes_of(job, 0) + processes_of(job, 1))
    world = cluster.world(2)
    assert set(numbers(world)) == {2, 3}
    succeed(world, job)


@pytest.mark.long
def test_without_restarts_left_the_other_nodes_continue(cluster: Cluster) -> None:
    job = command(cluster, "2", "1:2", "--node-restarts=0")
    cluster.world(2)
    kill_node(job, 0)
    job.until_prints("no node is replaced in this job, so the others go on without it")
    world = cluster.world(1)
    assert numbers(world) == [1]
    kill_node(job, 1)
    assert job.finish() == 128 + signal.SIGKILL
    assert job.has_printed("so no node is left")


@pytest.mark.long
def test_a_signal_adds_a_node(cluster: Cluster) -> None:
    job = command(cluster, "1:2", "1:2", **SOON)
    assert numbers(cluster.world(1)) == [0]
    job.signal(signal.SIGUSR1)
    world = cluster.world(2)
    assert places(world) == {0: 0, 1: 1}
    job.signal(signal.SIGUSR1)
    job.until_prints("SIGUSR1 requests another node, and none is left to start")
    succeed(world, job)


@pytest.mark.parametrize(("flags", "code"), [((), 7), *only_long((("--compat-exit-codes",), 1))])
def test_the_exit_code_is_that_of_the_failed_worker_whichever_node_ends_first(
    cluster: Cluster, flags: tuple[str, ...], code: int
) -> None:
    job = command(cluster, "3", "3", *flags)
    world = cluster.world(3)
    os.kill(world[1]["pid"], signal.SIGUSR2)
    assert job.finish() == code, job.output
    assert job.has_printed("node 1 failed with exit code 7")


@pytest.mark.long
def test_the_master_is_restarted_without_effect_on_workers(cluster: Cluster) -> None:
    job = command(cluster, "2", "2")
    world = cluster.world(2)
    old = master_of(job)
    old.kill()
    job.until_prints("the master has ended; it is started again, and training goes on meanwhile")
    for _ in range(2):
        job.until_prints("is back")
    assert master_of(job) != old
    assert cluster.mailbox.pending() == []
    succeed(world, job)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *only_long((signal.SIGHUP, 129))])
def test_a_signal_ends_all_nodes_and_none_is_replaced(cluster: Cluster, number: signal.Signals, code: int) -> None:
    job = command(cluster, "2", "2", args=("service",))
    cluster.world(2)
    job.signal(number)
    assert job.finish() == code
    assert not job.has_printed("takes its place")


@pytest.mark.long
def test_a_second_interrupt_does_not_wait_for_workers(cluster: Cluster) -> None:
    job = command(cluster, "2", "2", "--shutdown-timeout=10000", args=("deaf",))
    cluster.world(2)
    job.signal(signal.SIGINT)
    for _ in range(2):
        job.until_prints("SIGINT received: the workers have")
    job.signal(signal.SIGINT)
    assert job.finish() == 130


def test_a_signal_loses_no_node_that_is_being_started(cluster: Cluster) -> None:
    job = command(cluster, "3", "3")
    job.until_prints("3 nodes on this machine")
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert not job.has_printed("was killed by"), job.output
    assert not job.has_printed("Traceback"), job.output


@pytest.mark.parametrize("moment", ["training", *only_long("start", "end")])
def test_nothing_outlives_a_killed_supervisor(cluster: Cluster, moment: str) -> None:
    job = command(cluster, "2", "2", "--shutdown-timeout=10000", args=("service", "deaf"))
    job.until_prints("2 nodes on this machine")
    if moment != "start":
        cluster.world(2)
    if moment == "end":
        job.signal(signal.SIGTERM)
        job.until_prints("SIGTERM received")
    job.process.kill()
    # The console is open while any process of the job lives.
    assert job.finish() == -signal.SIGKILL


@pytest.mark.long
def test_a_stopped_node_does_not_outlive_a_killed_supervisor(cluster: Cluster) -> None:
    job = command(cluster, "2", "2", args=("service",))
    cluster.world(2)
    for process in processes_of(job, 1)[:2]:
        process.suspend()
    job.process.kill()
    assert job.finish() == -signal.SIGKILL


@pytest.mark.long
def test_a_stopped_node_receives_a_signal_to_the_command(cluster: Cluster) -> None:
    job = command(cluster, "2", "2")
    cluster.world(2)
    for process in processes_of(job, 1)[:2]:
        process.suspend()
    job.signal(signal.SIGTERM)
    assert job.finish() == 143


@pytest.mark.long
def test_nodes_may_rendezvous_in_etcd(mailbox: Mailbox, shared_etcd: Etcd) -> None:
    cluster = Cluster(mailbox, EtcdBackend(shared_etcd))
    job = cluster.node("job", "2", "--local-nodes=2", script=MEMBER)
    cluster.world(2)
    processes_of(job, 1)[1].terminate()
    world = cluster.world(2)
    assert numbers(world) == [0, 2]
    succeed(world, job)
    cluster.close()
    cluster.check_place()


@pytest.mark.long
def test_each_node_has_its_own_log_directory(cluster: Cluster) -> None:
    job = command(cluster, "2", "2", "--log-dir=logs", "--redirects=3")
    send_signal(cluster.world(2), signal.SIGUSR1)
    assert job.finish() == 0
    logs = cluster.directory / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["node-0", "node-1"]
    assert len(list(logs.glob("node-1/latest/attempt_0/0/stdout.log"))) == 1


def test_a_calling_program_is_informed_which_worker_failed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildFailedError, match="rank 1 exited with code 7") as failed:
        main(["--local-nodes=2", "--nnodes=2", "--no-python", "/bin/sh", "-c", "exit $((7 * RANK))"])
    assert failed.value.exit_code == 7
    assert failed.value.get_first_failure()[0] == 1
    assert sorted(failed.value.failures) == [1]
    main(["--local-nodes=2", "--nnodes=2", "--no-python", "/bin/true"])
    assert "2 nodes on this machine" in capfd.readouterr().err
