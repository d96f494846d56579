"""The store of a round, which the agent of rank 0 serves as torchrun's does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from harness import OURS, WAIT, WORKERS, Mailbox, agent_of, finish, launch, only_long, run, still_alive, watched

from dlrover_run.processes.ports import HeldPort

CLIENTS = str(WORKERS / "store_clients.py")


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "flags",
    [
        ["--standalone", "--nproc-per-node=3"],
        *only_long(
            ["--nproc-per-node=3"],
            ["--standalone", "--nproc-per-node=3", "--start-method=forkserver"],
            ["--local-nodes=3", "--nproc-per-node=1"],
            ["--nproc-per-node=3", "--nnodes=1", "--master-port=0"],
        ),
    ],
    ids=" ".join,
)
def test_scripts_that_are_only_clients_meet_and_the_store_outlives_rank_0(flags: list[str], tmp_path: Path) -> None:
    job = run(OURS, [*flags, CLIENTS], cwd=tmp_path)
    assert job.code == 0, job.err


def stores(job: subprocess.Popen[str]) -> list[psutil.Process]:
    return [one for one in agent_of(job).children() if one.name() == "dlrover-store"]


@contextmanager
def job_of(mailbox: Mailbox, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A job of clients, which is ended in any case."""
    job = launch(mailbox, *flags, WORKERS / "store_client.py")
    try:
        yield job
    finally:
        job.terminate()
        finish(job)


def test_each_round_has_a_fresh_store_which_ends_with_it(mailbox: Mailbox) -> None:
    with job_of(mailbox, "--nproc-per-node=2", "--max-restarts=1") as job:
        first = mailbox.gather(2)
        [before] = stores(job)
        with watched(before.pid) as pidfds:
            os.kill(first[1]["pid"], signal.SIGKILL)
            second = mailbox.gather(2)
            assert still_alive(pidfds, WAIT) == 0
        assert second[0]["port"] != first[0]["port"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(first[0]["port"])))
        [after] = stores(job)
        # It is small, and has no torch.
        assert after.memory_info().rss < 30 << 20


def test_with_a_port_that_is_given_the_next_store_listens_there_again(mailbox: Mailbox) -> None:
    held = HeldPort()
    port = str(held.number)
    held.release()
    with job_of(mailbox, "--nproc-per-node=2", "--max-restarts=1", f"--master-port={port}") as job:
        first = mailbox.gather(2)
        before = stores(job)
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = mailbox.gather(2)
        assert {one["port"] for one in (*first, *second)} == {port}
        assert stores(job) != before


def test_the_store_ends_with_its_agent(mailbox: Mailbox) -> None:
    with job_of(mailbox, "--nproc-per-node=1") as job:
        mailbox.gather(1)
        with watched(*(one.pid for one in stores(job))) as pidfds:
            assert len(pidfds) == 1
            agent_of(job).kill()
            assert still_alive(pidfds, WAIT) == 0


def test_a_job_whose_script_uses_no_store_has_no_process_for_it(mailbox: Mailbox) -> None:
    job = launch(mailbox, "--nproc-per-node=1", WORKERS / "hold.py")
    try:
        mailbox.gather(1)
        assert stores(job) == []
    finally:
        job.terminate()
        finish(job)


def test_a_store_that_is_killed_is_named_and_the_next_round_has_another_one(mailbox: Mailbox) -> None:
    with job_of(mailbox, "--nproc-per-node=1", "--max-restarts=1") as job:
        [worker] = mailbox.gather(1)
        [store] = stores(job)
        with watched(store.pid) as pidfds:
            store.kill()
            assert still_alive(pidfds, WAIT) == 0
        os.kill(worker["pid"], signal.SIGKILL)
        mailbox.gather(1)
        job.terminate()
        _, err = job.communicate(timeout=WAIT)
        assert "the store of round 1 was killed by SIGKILL: workers that still need it fail" in err


@pytest.mark.torchrun
def test_a_job_may_have_rank_0_host_the_store(mailbox: Mailbox) -> None:
    """The port is held for it."""
    script = WORKERS / "initialise.py"
    job = launch(mailbox, "--nproc-per-node=2", script, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        assert len(mailbox.gather(2)) == 2
        assert stores(job) == []
    finally:
        job.terminate()
        finish(job)
