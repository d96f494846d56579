"""A worker that makes no progress and does not exit: it is named with the line of the script, and the job continues."""

from __future__ import annotations

import signal

import pytest
from support.harness import Mailbox, finish, launch

from dlrover_run.events.reader import merged, read_logs
from dlrover_run.events.records import WorkerFailed, WorkerStalled
from dlrover_run.features.hangs.search.codes import GuiltCode

pytestmark = [pytest.mark.torchrun, pytest.mark.long]

SCRIPT = """
import os, signal, threading, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.ones(1000)

def sleep():
    time.sleep(1000)

def spin():
    while True:
        pass

def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

for step in range(100):
    if restart == 0 and step == 80 and rank == int(sys.argv[2]):
        globals()[sys.argv[1]]()
    dist.all_reduce(total)
    total /= 2
    time.sleep(0.05)
post(done=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("fault", ["sleep", "spin", "lock", "stop"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_the_worker_that_the_others_wait_for_is_named_and_restarted(
    mailbox: Mailbox, method: str, fault: str, guilty: int
) -> None:
    script = mailbox.script("stall.py", SCRIPT)
    journal = mailbox.directory / "journal"
    flags = [f"--start-method={method}", "--nproc-per-node=2", "--max-restarts=1", f"--journal={journal}"]
    ended = finish(launch(mailbox, *flags, "--stall-action=restart", script, fault, str(guilty)))
    assert ended.code == 0, ended.err
    assert [(m["restart"], m["rank"]) for m in mailbox.gather(2)] == [(1, 0), (1, 1)]
    stalls = [entry.event for entry in merged(read_logs(journal)) if isinstance(entry.event, WorkerStalled)]
    assert [event.rank for event in stalls if event.guilty] == [guilty]
    (why, *where) = next(event.reasons for event in stalls if event.guilty)
    assert f"rank {guilty} was killed by {signal.SIGKILL.name}" in ended.err
    failures = [entry.event for entry in merged(read_logs(journal)) if isinstance(entry.event, WorkerFailed)]
    assert [(event.rank, event.cause) for event in failures] == [(guilty, "stall")]
    if fault == "stop":
        assert GuiltCode.STOPPED.within((why,))
    else:
        (place,) = where
        assert (place.params["file"], place.params["function"]) == (str(script), fault)


@pytest.mark.parametrize("guilty", [0, 1])
def test_two_nodes_name_the_worker_and_its_node(mailbox: Mailbox, guilty: int) -> None:
    script = mailbox.script("stall.py", SCRIPT)
    journal = mailbox.directory / "journal"
    flags = ["--local-nodes=2", "--nproc-per-node=1", "--max-restarts=1", f"--journal={journal}"]
    ended = finish(launch(mailbox, *flags, "--stall-action=restart", script, "sleep", str(guilty)))
    assert ended.code == 0, ended.err
    assert [(m["restart"], m["rank"]) for m in mailbox.gather(2)] == [(1, 0), (1, 1)]
    stalls = [entry.event for entry in merged(read_logs(journal)) if isinstance(entry.event, WorkerStalled)]
    assert sorted(event.rank for event in stalls) == [0, 1], "each node about its own worker"
    assert [event.rank for event in stalls if event.guilty] == [guilty]
    assert ended.err.count(f"rank {guilty} on ") >= 2


ALONE_SCRIPT = """
import os, threading, time
from dlrover_run import training

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def hang():
    # Not a sleep: a worker that waits for a time is named after OUTSIDE_LIMIT only.
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

for step in range(400):
    if restart == 0 and step == 40 and rank == int(sys.argv[1]):
        hang()
    if restart == 1 and step == 40:
        break
    training.report(samples=1)
    time.sleep(0.2)
post(done=True)
"""


@pytest.mark.parametrize(("nodes", "workers"), [(1, 3), (2, 1)])
def test_a_worker_that_hangs_while_the_others_train_on_is_named_and_restarted(
    mailbox: Mailbox, nodes: int, workers: int
) -> None:
    script = mailbox.script("alone.py", ALONE_SCRIPT)
    journal = mailbox.directory / "journal"
    flags = [f"--nproc-per-node={workers}", "--max-restarts=1", f"--journal={journal}", "--stall-action=restart"]
    if nodes > 1:
        flags.append(f"--local-nodes={nodes}")
    ended = finish(launch(mailbox, *flags, script, "1"))
    assert ended.code == 0, ended.err
    ranks = nodes * workers
    assert [(m["restart"], m["rank"]) for m in mailbox.gather(ranks)] == [(1, rank) for rank in range(ranks)]
    (stall,) = [entry.event for entry in merged(read_logs(journal)) if isinstance(entry.event, WorkerStalled)]
    assert (stall.rank, stall.guilty) == (1, True), "the others are not stalled"
    why, others, place = stall.reasons
    assert GuiltCode.IDLE.within((why,))
    assert GuiltCode.OTHERS_GO_ON.within((others,))
    assert (place.params["file"], place.params["function"]) == (str(script), "hang")
