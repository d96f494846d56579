"""Jobs that lose a worker between two steps, and what they resume from."""

from __future__ import annotations

import os
import signal

import pytest
from support.harness import WORKERS, Mailbox, finish, launch

pytestmark = [pytest.mark.torchrun, pytest.mark.long]

TRAIN = """
import torch
import torch.distributed as dist
from dlrover_run.training import CheckpointDirectory

dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoints = CheckpointDirectory("checkpoints"{ranks})
newest = checkpoints.load_latest()
step, weights = (0, torch.ones(4)) if newest is None else (newest.step, newest.state["weights"])
post(resumed=step)

def train():
    global step
    gradient = weights * (rank + 1)
    dist.all_reduce(gradient)
    weights.add_(gradient / 8)
    step += 1
"""

LAST_STEP = (
    TRAIN.format(ranks="")
    + """
with checkpoints.save_at_stop(lambda: (step, {"weights": weights})) as last:
    while step < 8:
        if step == 5 and rank == 1 and newest is None:
            post(completed=step)
            wait_for_signals()
        train()
        last.check()
post(weights=weights.tolist())
dist.destroy_process_group()
"""
)

EACH_RANK = (
    TRAIN.format(ranks=", rank=rank, world_size=dist.get_world_size()")
    + """
while step < 6:
    train()
    if step % 2 == 0:
        if step == 4 and rank == 7 and newest is None:
            wait_for_signals()
        checkpoints.save(step, {"weights": weights, "rank": rank})
        if step == 4 and newest is None:
            post(completed=step)
            wait_for_signals()
assert newest is None or newest.state["rank"] == rank
post(weights=weights.tolist())
dist.destroy_process_group()
"""
)


def lose_rank_1(mailbox: Mailbox, body: str, workers: int, completed: int) -> tuple[set[int], list[list[float]]]:
    """Kill rank 1 when as many ranks as are given have completed a step. The steps that the ranks resume from, and
    their weights at the end."""
    script = mailbox.script("train.py", body)
    flags = ["--start-method=forkserver", "--preload=torch", f"--nproc-per-node={workers}", "--max-restarts=1"]
    job = launch(mailbox, *flags, script, env={"OMP_NUM_THREADS": "1"})
    first = mailbox.gather(workers)
    assert [each["resumed"] for each in first] == [0] * workers
    mailbox.gather(completed)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = mailbox.gather(2 * workers)
    ended = finish(job)
    assert ended.code == 0, ended.err
    assert "rank 1 was killed by SIGKILL" in ended.err
    assert all(each["restart"] == 1 for each in second)
    return {each["resumed"] for each in second if "resumed" in each}, [
        each["weights"] for each in second if "weights" in each
    ]


def weights_after(steps: int, workers: int) -> list[float]:
    weight = 1.0
    for _ in range(steps):
        weight += weight * sum(range(1, workers + 1)) / 8
    return [pytest.approx(weight)] * 4


def test_no_step_is_repeated_after_a_kill_where_the_last_step_is_saved(mailbox: Mailbox) -> None:
    """The three survivors wait in a collective. No checkpoint is saved in any other way."""
    resumed, weights = lose_rank_1(mailbox, LAST_STEP, 4, completed=1)
    assert resumed == {5}
    assert weights == [weights_after(8, 4)] * 4


def test_eight_workers_one_is_killed_and_one_is_late(mailbox: Mailbox) -> None:
    """MindSpore's experiment (document 003): each rank saves its own checkpoint; all resume from the newest that each
    one has, and nothing has to be deleted."""
    resumed, weights = lose_rank_1(mailbox, EACH_RANK, 8, completed=7)
    assert resumed == {2}
    assert weights == [weights_after(6, 8)] * 8


@pytest.mark.parametrize("memory", ["0", "1"])
def test_a_sharded_state_is_resumed_by_as_many_and_by_fewer_ranks(mailbox: Mailbox, memory: str) -> None:
    """`torch.distributed.checkpoint`: rank 1 is killed before its third save, then another job has one rank."""
    variables = {"OMP_NUM_THREADS": "1", "MEMORY": memory}

    def resumed(workers: int, **more: str) -> list[int]:
        flags = [f"--nproc-per-node={workers}", "--max-restarts=1", WORKERS / "shard.py"]
        ended = finish(launch(mailbox, *flags, env={**variables, **more}))
        assert ended.code == 0, ended.err
        return sorted(each["resumed"] for each in mailbox.pending())

    assert resumed(2, STEPS="4", KILL_AT="3") == [0, 0, 2, 2]
    assert resumed(1, STEPS="5") == [4]
    assert resumed(3, STEPS="5") == [5, 5, 5]
