"""The worker that is blamed for a timeout of a process group: the one that was missing, not the one that waited."""

from __future__ import annotations

import re

import pytest
from support.harness import Mailbox, finish, launch

from dlrover_run.failures.causes import describe_exit, lost_peer, root_cause
from dlrover_run.failures.collective_timeouts import LiveWorker, find_absent_workers
from dlrover_run.failures.worker_exit import WorkerExit

GLOO = "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete"
STORE = "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined."
BARRIER = "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 10000 ms"
IN_GROUP = "rank {} of the process group"

STOPPED = LiveWorker(1, 11, "T", "do_signal_stop")
ASLEEP = LiveWorker(1, 11, "S", "hrtimer_nanosleep")
WAITS_TOO = LiveWorker(2, 12, "S", "futex_do_wait")
COMPUTES = LiveWorker(3, 13, "R")


def gave_up(words: str, code: int = 1) -> WorkerExit:
    raised = words if re.match(r"[\w.]+: ", words) else f"RuntimeError: {words}"
    trace = f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    x()\n{raised}\n'
    return WorkerExit(rank=0, local_rank=0, pid=10, code=code, unix_time=1.0, stderr_tail=trace)


@pytest.mark.parametrize(
    ("words", "live", "all_here", "clause"),
    [
        (GLOO, [STOPPED], True, "rank 1 (pid 11), which was stopped (SIGSTOP or the like)"),
        (GLOO, [ASLEEP], True, "rank 1 (pid 11), which slept (in hrtimer_nanosleep)"),
        (STORE, [COMPUTES], True, "rank 3 (pid 13), which was running"),
        # Only one is left that could be meant, whatever it does.
        (GLOO, [WAITS_TOO], True, "rank 2 (pid 12), which slept (in futex_do_wait)"),
        # It may also be a worker of another node.
        (GLOO, [WAITS_TOO], False, None),
        (GLOO, [COMPUTES], False, None),
        (GLOO, [STOPPED], False, "rank 1 (pid 11), which was stopped (SIGSTOP or the like)"),
        (GLOO, [STOPPED, WAITS_TOO, COMPUTES], True, "rank 1 (pid 11), which was stopped (SIGSTOP or the like)"),
        # A wait of torch with a timeout checks again after a short sleep.
        (GLOO, [ASLEEP, WAITS_TOO, COMPUTES], True, None),
        (GLOO, [ASLEEP], False, None),
        (GLOO, [WAITS_TOO, COMPUTES], True, None),
        (GLOO, [], True, None),
        (BARRIER, [STOPPED], False, "rank 1 (pid 11), which was stopped (SIGSTOP or the like) and for rank 2"),
        # The ranks of a group, whose ranks in the job are unknown.
        (BARRIER.replace("Rank 0", "Rank 1"), [STOPPED], True, f"{IN_GROUP.format(1)} and for {IN_GROUP.format(2)}"),
        ("Rank 1 failed to pass monitoredBarrier in 10000 ms", [STOPPED], True, IN_GROUP.format(1)),
        ("Connection closed by peer", [STOPPED], True, None),
        ("bad batch", [STOPPED], True, None),
    ],
)
def test_no_more_is_shown_than_is_known(words: str, live: list[LiveWorker], all_here: bool, clause: str | None) -> None:
    assert find_absent_workers(gave_up(words), live, all_here=all_here) == clause


@pytest.mark.parametrize("words", [GLOO, STORE, BARRIER])
def test_one_that_waited_in_vain_is_no_cause_beside_one_that_failed_of_itself(words: str) -> None:
    own = WorkerExit(rank=1, local_rank=1, pid=11, code=3, unix_time=2.0)
    assert lost_peer(gave_up(words))
    assert root_cause([gave_up(words), own]) == own


@pytest.mark.parametrize(
    "words",
    [
        "filelock._error.Timeout: timed out waiting for the lock file /data/index.lock",
        "pymongo.errors.WaitQueueTimeoutError: Timed out waiting for a connection from the connection pool",
        "requests.exceptions.Timeout: wait timeout after three tries",
    ],
)
def test_a_wait_for_anything_else_blames_no_worker(words: str) -> None:
    assert find_absent_workers(gave_up(words), [ASLEEP], all_here=True) is None
    assert not lost_peer(gave_up(words))


@pytest.mark.parametrize(
    "words",
    [
        GLOO,
        STORE,
        BARRIER,
        "torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0",
        "torch.distributed.DistStoreError: barrier timeout after 10000ms, key: /init",
        "torch.distributed.DistNetworkError: waitForInput: socket SocketImpl(fd=3) timed out after 10000ms",
        "RuntimeError: Socket Timeout",
    ],
)
def test_every_wait_of_torch_is_one_for_a_worker(words: str) -> None:
    assert find_absent_workers(gave_up(words), [STOPPED], all_here=True)


def test_a_crowd_is_counted() -> None:
    workers = [LiveWorker(rank, 10 + rank, "T") for rank in range(1, 9)]
    clause = find_absent_workers(gave_up(GLOO), workers, all_here=True)
    assert clause is not None
    assert clause.endswith("rank 3 (pid 13), which was stopped (SIGSTOP or the like) and for 5 more")


def test_a_kill_keeps_its_text() -> None:
    end = WorkerExit(rank=0, local_rank=0, pid=10, code=-6, unix_time=1.0, waited_for="rank 1 (pid 11), which slept")
    assert describe_exit(end) == (
        "timed out waiting for rank 1 (pid 11), which slept; it was killed by SIGABRT (abort)"
    )


SCRIPT = """
import os, pathlib, signal, sys, time
other = pathlib.Path("pid")
if os.environ["RANK"] == "1":
    other.with_suffix(".new").write_text(str(os.getpid()))
    other.with_suffix(".new").rename(other)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
while not other.exists() or pathlib.Path(f"/proc/{other.read_text()}/stat").read_text().rpartition(") ")[2][0] != "T":
    time.sleep(0.01)
raise RuntimeError("[a.cc:81] Timed out waiting 10000ms for recv operation to complete")
"""


def test_a_stopped_worker_is_named_and_not_the_one_whose_time_was_up(mailbox: Mailbox) -> None:
    ended = finish(launch(mailbox, "--nproc-per-node=2", mailbox.script("stop.py", SCRIPT)))
    assert ended.code == 1
    report = " ".join(ended.err.partition("Root Cause (first observed failure):")[2].split())
    assert re.match(r"rank 0 timed out waiting for rank 1 \(pid \d+\), which was stopped \(SIGSTOP", report), ended.err
    assert "it raised RuntimeError: " in report
