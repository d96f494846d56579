"""A stall of which no rank is named: a restart ends a worker for it, and calls no worker the cause."""

from __future__ import annotations

from support.harness import Mailbox, finish, launch

from dlrover_run.events.reader import merged, read_logs
from dlrover_run.events.records import WorkerFailed, WorkerStalled

SCRIPT = """
import os, threading

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restart == 0:
    held = threading.Lock()
    held.acquire()
    held.acquire()
post(restart=restart, rank=rank)
"""


def test_a_restart_without_a_named_rank_says_that_none_is_known(mailbox: Mailbox) -> None:
    journal = mailbox.directory / "journal"
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--journal={journal}", "--stall-timeout=3"]
    ended = finish(launch(mailbox, *flags, "--stall-action=restart", mailbox.script("all_wait.py", SCRIPT)))
    assert ended.code == 0, ended.err
    assert sorted((m["restart"], m["rank"]) for m in mailbox.gather(2)) == [(1, 0), (1, 1)]
    assert "the evidence names no rank" in ended.err
    assert "no rank that runs is named: rank 0 is killed, so that the round restarts" in ended.err
    assert "as it made no progress" not in ended.err
    events = [entry.event for entry in merged(read_logs(journal))]
    assert not any(event.guilty for event in events if isinstance(event, WorkerStalled))
    (failure,) = [event for event in events if isinstance(event, WorkerFailed)]
    assert (failure.rank, failure.cause) == (0, "stall")
    assert "as no rank that runs is named" in ended.err
