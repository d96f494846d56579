"""Jobs whose checkpoints are in memory: what they resume from, and that nothing is left of them after any end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.harness import (
    OURS,
    WAIT,
    WORKERS,
    Mailbox,
    agent_of,
    finish,
    kill_leftovers,
    launch,
    only_long,
    run,
    still_alive,
    until,
    watched,
)
from support.rendezvous_backends import EVERYWHERE

from dlrover_run.features.checkpoints.write_behind import TEMPORARY
from dlrover_run.training.saved_steps import complete_steps, saved_files

sys.path.insert(0, str(WORKERS))
from hold_steps import ATTEMPT, LENGTH_BYTES, state_of

SIZE = 100_000

Start = Callable[..., tuple[subprocess.Popen[str], list[int]]]

SAVE_IN_MEMORY = """
import os, signal
import hold_steps
hold_steps.without_torch()
rank = int(os.environ["RANK"])
checkpoints = hold_steps.directory("checkpoints")
found = checkpoints.load_latest()
if found is not None:
    assert found.state == hold_steps.state_of(found.step, rank, {size})
    post(resumed=found.step)
    raise SystemExit
for step in range(1, 4):
    checkpoints.save(step, hold_steps.state_of(step, rank, {size}), memory=True)
if rank == 1:
    checkpoints.save(4, hold_steps.state_of(4, rank, {size}), memory=True)
post(saved=True)
wait_for_signals()
"""
"""Rank 1 has one step more than rank 0."""


@pytest.fixture
def start(mailbox: Mailbox) -> Iterator[Start]:
    """Starts a job of two ranks; returns it once they have saved in memory, with the pids of the ranks."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, size: int = SIZE) -> tuple[subprocess.Popen[str], list[int]]:
        script = mailbox.script("train.py", SAVE_IN_MEMORY.format(size=size))
        job = launch(mailbox, "--nproc-per-node=2", "--max-restarts=1", *flags, script)
        started.append(job)
        return job, [each["pid"] for each in mailbox.gather(2)]

    yield start
    for job in started:
        if job.poll() is None:
            job.kill()
            job.communicate()


def holder_of(job: subprocess.Popen[str]) -> int:
    """The process that holds the checkpoints of a job."""
    (found,) = [each.pid for each in agent_of(job).children() if each.name().startswith("dlrover-memory")]
    return found


def steps_on_disk(mailbox: Mailbox) -> list[int]:
    return [step.step for step in complete_steps(saved_files(os.listdir(mailbox.directory / "checkpoints")))]


@contextmanager
def nothing_left(pid: int) -> Iterator[None]:
    """This process ends, and no file of the launcher in /dev/shm is new: those of other tests come and go."""
    before = files_in_shared_memory()
    with watched(pid) as pidfds:
        try:
            yield
            assert still_alive(pidfds, WAIT) == 0
        finally:
            kill_leftovers(pidfds)
    assert files_in_shared_memory() <= before


def files_in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "dlrover" in name}


def test_a_restarted_job_resumes_from_memory(mailbox: Mailbox, start: Start) -> None:
    job, pids = start()
    with nothing_left(holder_of(job)):
        # The disk has nothing any more, so what is resumed comes from memory.
        folder = mailbox.directory / "checkpoints"
        wait_for_files(folder, 7)
        for name in os.listdir(folder):
            (folder / name).unlink()
        os.kill(pids[1], signal.SIGKILL)
        assert [each["resumed"] for each in mailbox.gather(2)] == [3, 3]
        assert finish(job).code == 0


def wait_for_files(folder: Path, count: int) -> None:
    """Return when the disk has that many files of checkpoints."""
    watch = subprocess.run(
        [sys.executable, "-c", _WATCH, str(folder), str(count)], timeout=WAIT, check=False, capture_output=True
    )
    assert watch.returncode == 0, watch.stderr


_WATCH = """
import os, sys, time
while len([name for name in os.listdir(sys.argv[1]) if name.startswith("step-")]) < int(sys.argv[2]):
    time.sleep(0.02)
"""


@pytest.mark.parametrize("how", ["the agent", *only_long("the watchdog", "both")])
def test_nothing_is_left_of_a_launcher_that_is_killed(mailbox: Mailbox, start: Start, how: str) -> None:
    job, _ = start()
    agent = agent_of(job)
    with nothing_left(holder_of(job)):
        if how != "the watchdog":
            agent.kill()
        if how != "the agent":
            job.kill()
        job.communicate(timeout=WAIT)
    # What was being written is whole or has another name; the next job removes it.
    names = [name for name in os.listdir(mailbox.directory / "checkpoints") if not name.startswith("step-")]
    assert all(fnmatch(name, TEMPORARY.format(name="*", mark="*")) for name in names)


@pytest.mark.parametrize("end", ["a signal", *only_long("a failure")])
def test_all_is_on_the_disk_when_a_job_ends(mailbox: Mailbox, start: Start, end: str) -> None:
    # More than the disk takes until the holder is stopped.
    job, pids = start("--max-restarts=0", size=20_000_000)
    holder = holder_of(job)
    os.kill(holder, signal.SIGSTOP)
    with nothing_left(holder), watched(*pids) as workers:
        if end == "a signal":
            job.terminate()
        else:
            os.kill(pids[0], signal.SIGKILL)
        assert still_alive(workers, WAIT) == 0
        os.kill(holder, signal.SIGCONT)
        ended = finish(job)
    assert ended.code != 0
    assert steps_on_disk(mailbox) == [1, 2, 3]
    last = mailbox.directory / "checkpoints" / f"step-000000000004.attempt-{ATTEMPT}.rank-00001-of-00002.pt"
    assert last.read_bytes()[LENGTH_BYTES:].startswith(state_of(4, 1, 20_000_000))


def test_what_memory_holds_is_shown_while_the_job_runs(mailbox: Mailbox, start: Start) -> None:
    name = f"held-{os.getpid()}"
    job, _ = start("--rdzv-backend=c10d", f"--rdzv-id={name}")
    wait_for_files(mailbox.directory / "checkpoints", 7)
    command = ["status", "--json", f"--rdzv-id={name}"]
    # An agent on a busy machine may answer too late to be found.
    shown = until(lambda: run(OURS, command, cwd=mailbox.directory).out, "no agent answers")
    (node,) = json.loads(shown)["nodes"]
    # Two steps of each rank.
    assert 4 * SIZE <= node["memory"]["used"] < node["memory"]["limit"]
    assert node["memory"]["waiting"] == 0
    job.terminate()
    assert finish(job).code == 143


AT_STOP = """
import time
import hold_steps
hold_steps.without_torch()
with hold_steps.directory("checkpoints").save_at_stop(lambda: (1, b"x"), memory=True) as last:
    post()
    while True:
        time.sleep(0.02)
        last.check()
"""


@pytest.mark.parametrize(("body", "holders"), [("post()\nwait_for_signals()\n", 0), (AT_STOP, 1)])
def test_a_process_holds_checkpoints_only_for_a_job_that_may_save_some(
    mailbox: Mailbox, body: str, holders: int
) -> None:
    """Where the last step will be saved in memory it runs before, because that save is urgent."""
    job = launch(mailbox, mailbox.script("train.py", body))
    mailbox.gather(1)
    assert len([each for each in agent_of(job).children() if each.name().startswith("dlrover-memory")]) == holders
    job.terminate()
    finish(job)


def test_memory_can_be_turned_off(mailbox: Mailbox, start: Start) -> None:
    job, _ = start("--checkpoint-memory=0")
    assert steps_on_disk(mailbox) == [1, 2, 3]
    assert not [each for each in agent_of(job).children() if each.name().startswith("dlrover-memory")]
    job.terminate()
    finish(job)


SAVE_UNTIL_KILLED = """
import os, time
from pathlib import Path
import hold_steps
hold_steps.without_torch()
rank = int(os.environ["RANK"])
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def note(step):
    beside = Path(f"saved-{rank}-{restart}.new")
    beside.write_text(str(step))
    beside.replace(f"saved-{rank}-{restart}")

checkpoints = hold_steps.directory("checkpoints")
found = checkpoints.load_latest()
step = 0 if found is None else found.step
assert found is None or found.state == hold_steps.state_of(step, rank, 1_000_000), "other bytes"
common = min(int(Path(f"saved-{number}-{restart - 1}").read_text()) for number in range(2)) if restart else 0
note(step)
post(resumed=step, common=common)
while not Path(f"go-{restart}").exists():
    time.sleep(0.01)
while True:
    step += 1
    checkpoints.save(step, hold_steps.state_of(step, rank, 1_000_000), memory=True)
    note(step)
"""
"""A rank notes each step once it is held; all resume from what both have noted since the last restart, or from the step
after it."""


@pytest.mark.parametrize("kills", [5, *only_long(200)])
def test_any_moment_of_a_kill_leaves_the_newest_common_step(mailbox: Mailbox, kills: int) -> None:
    chance = random.Random(kills)
    script = mailbox.script("train.py", SAVE_UNTIL_KILLED)
    job = launch(mailbox, "--nproc-per-node=2", f"--max-restarts={kills}", script)
    try:
        for restart in range(kills):
            ranks = mailbox.gather(2)
            check_resumed(ranks)
            (mailbox.directory / f"go-{restart}").touch()
            time.sleep(chance.uniform(0, 0.4))
            os.kill(chance.choice(ranks)["pid"], signal.SIGKILL)
        check_resumed(mailbox.gather(2))
    finally:
        job.terminate()
        ended = finish(job)
    assert ended.code == 143, ended.err
    assert "holds checkpoints" not in ended.err


def check_resumed(ranks: list[dict[str, int]]) -> None:
    assert len({each["resumed"] for each in ranks}) == 1, ranks
    assert all(each["common"] <= each["resumed"] <= each["common"] + 1 for each in ranks), ranks


SAVE_WITH_COPIES = """
import os, time
import torch.distributed as dist
from dlrover_run.training import CheckpointDirectory
from hold_steps import Bytes, state_of
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
checkpoints = CheckpointDirectory("checkpoints", files=Bytes(), rank=rank, world_size=world, peer_copy=True)
checkpoints._make_directory = lambda: None  # The test has put a file there, so that the disk takes nothing.
found = checkpoints.load_latest()
if found is not None:
    states = [found.state_of(each) == state_of(found.step, each) for each in range(found.world_size)]
    post(resumed=found.step, states=states)
    raise SystemExit
for step in range(1, 4):
    checkpoints.save(step, state_of(step, rank), memory=True)
while not [file for file in checkpoints._memory.held(checkpoints._place) if (file.rank, file.step) == (1 - rank, 3)]:
    time.sleep(0.02)
post(node=os.environ["TEST_NODE"])
wait_for_signals()
"""
"""Each rank has saved three steps when the memory of its node has the newest one of the other rank too."""


@pytest.mark.torchrun
@EVERYWHERE
@pytest.mark.parametrize("lost", [0, *only_long(1)])
def test_the_last_step_of_a_lost_node_comes_from_the_memory_of_its_neighbour(cluster: Cluster, lost: int) -> None:
    mailbox, folder = cluster.mailbox, cluster.directory / "checkpoints"
    folder.touch()
    script = mailbox.script("train.py", SAVE_WITH_COPIES)
    nodes = {name: cluster.node(name, "1:2", script=script) for name in "ab"}
    worker = mailbox.gather(2)[lost]
    gone = nodes.pop(worker["node"])
    (holder,) = (each for each in gone.agent.children() if each.name().startswith("dlrover-memory"))
    # From now on the disk takes files, but none of the lost node.
    holder.suspend()
    folder.unlink()
    gone.lose()
    (resumed,) = mailbox.gather(1)
    assert (resumed["resumed"], resumed["states"]) == (3, [True, True])
    (left,) = nodes.values()
    assert left.finish() == 0, left.output
