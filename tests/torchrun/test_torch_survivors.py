"""Workers of a real torch outlive the failures of others: their pids, their weights and the steps that are repeated."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import psutil
import pytest
from support.harness import WORKERS, Finished, Mailbox, finish, launch, only_long

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 14),
        reason="a group is formed in place from torch 2.14 on: make test-torch TORCH=2.15.0",
    ),
]


@contextlib.contextmanager
def job(mailbox: Mailbox, *flags: str, script: str = "survive_torch.py") -> Iterator[subprocess.Popen[str]]:
    """A job of that script, which is ended in any case."""
    (mailbox.directory / "stop").unlink(missing_ok=True)
    command = ("--survivors=keep", "--start-method=forkserver", "--max-restarts=1000", *flags)
    started = launch(mailbox, *command, WORKERS / script)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
            finish(started)


def round_of(mailbox: Mailbox, workers: int) -> list[dict[str, Any]]:
    """What the workers post when they have begun a round, by rank."""
    return sorted(mailbox.gather(workers), key=lambda one: one["rank"])


def end(mailbox: Mailbox, started: subprocess.Popen[str], step: int) -> Finished:
    """Let the workers train up to that step."""
    partial = mailbox.directory / "stop.partial"
    partial.write_text(str(step))
    partial.rename(mailbox.directory / "stop")
    return finish(started)


def check_kept(before: list[dict[str, Any]], after: list[dict[str, Any]], gone: set[int]) -> None:
    """Check that all but the workers that are gone have kept their processes, and repeat one step at most."""
    assert [one["rank"] for one in after] == list(range(len(before)))
    assert {rank for rank, one in enumerate(after) if one["pid"] != before[rank]["pid"]} == gone
    assert {one["step"] for one in after} == {max(one["mine"] for one in after)}
    assert all(one["step"] - one["mine"] <= 1 for rank, one in enumerate(after) if rank not in gone)
    assert min(one["mine"] for rank, one in enumerate(after) if rank not in gone) >= before[0]["step"]


@pytest.mark.parametrize(
    ("nodes", "workers", "kills"), [(1, 3, 4), *only_long((1, 2, 40), (1, 5, 40), (1, 8, 60), (3, 1, 20), (3, 2, 40))]
)
def test_workers_keep_their_pids_and_their_weights(mailbox: Mailbox, nodes: int, workers: int, kills: int) -> None:
    flags = [f"--nproc-per-node={workers}", *([f"--local-nodes={nodes}"] if nodes > 1 else [])]
    choose, world = random.Random(kills), nodes * workers
    with job(mailbox, *flags) as started:
        group = round_of(mailbox, world)
        for _ in range(kills):
            killed = choose.randrange(world)
            # At any moment of a step, or before the first one.
            time.sleep(choose.random() * 0.3)
            os.kill(group[killed]["pid"], signal.SIGKILL)
            before, group = group, round_of(mailbox, world)
            check_kept(before, group, {killed})
        step = group[0]["step"] + 50
        ended = end(mailbox, started, step)
    assert ended.code == 0
    assert ended.err.count("; restart ") == kills * nodes
    found = {(one["done"], one["weights"]) for one in mailbox.gather(world)}
    with job(mailbox, *flags) as started:
        round_of(mailbox, world)
        assert end(mailbox, started, step).code == 0
    assert found == {(one["done"], one["weights"]) for one in mailbox.gather(world)}
    assert len(found) == 1
    print(f"{nodes} x {workers} workers: {kills} kills, every survivor kept its process, {step} steps, equal weights")


def test_a_worker_that_is_stopped_is_replaced_in_time(mailbox: Mailbox) -> None:
    with job(mailbox, "--nproc-per-node=4", "--reconfigure-timeout=15") as started:
        group = round_of(mailbox, 4)
        os.kill(group[3]["pid"], signal.SIGSTOP)
        os.kill(group[1]["pid"], signal.SIGKILL)
        after = round_of(mailbox, 4)
        check_kept(group, after, {1, 3})
        assert not psutil.pid_exists(group[3]["pid"])
        ended = end(mailbox, started, after[0]["step"] + 5)
    assert ended.code == 0
    assert ended.err.count("; restart ") == 1


@pytest.mark.parametrize("plain", [0, 1])
def test_workers_with_and_without_a_block_are_in_one_job_and_all_restart(mailbox: Mailbox, plain: int) -> None:
    with job(mailbox, "--nproc-per-node=3", script="survive_torch_mixed.py") as started:
        group = round_of(mailbox, 3)
        (mailbox.directory / "plain").write_text(str(plain))
        for killed in (plain, 2):
            # First the newcomer has no block, then it is a survivor that fails.
            os.kill(group[killed]["pid"], signal.SIGKILL)
            before, group = group, round_of(mailbox, 3)
            assert not {one["pid"] for one in before} & {one["pid"] for one in group}
        ended = end(mailbox, started, 0)
    assert ended.code == 0
    assert ended.err.count("; restart ") == 2
    assert ended.err.count("without a block of Survivor") == 1
