"""A warm worker takes the rank of one that has died, and the job never depends on it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import WORKERS, Mailbox, finish, launch, until

LIBRARY = """\
import os, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
pid = os.getpid()
"""

TRAIN = """\
import sys
was_here = "threaded" in sys.modules
import os, time
import threaded
from post import post
from dlrover_run.training import report
report()
post(warm=was_here, cwd=os.getcwd(), args=sys.argv[1:], own=os.environ.get("TORCHELASTIC_RUN_ID"))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TEST_RESTARTS"]:
    sys.exit(0)
while True:
    time.sleep(0.05)
"""
"""A script whose path is not changed, as nothing is prepared for one that changes it."""


class Job:
    """A job of two workers with warm ones."""

    def __init__(self, mailbox: Mailbox, restarts: int, before: str = "") -> None:
        self.mailbox = mailbox
        site = mailbox.directory / "lib" / "site-packages"
        site.mkdir(parents=True)
        (site / "threaded.py").write_text(LIBRARY)
        (mailbox.directory / "train.py").write_text(before + TRAIN)
        path = os.pathsep.join([str(site), str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = launch(
            mailbox,
            *("--start-method=forkserver", "--warm-workers", "--nproc-per-node=2", f"--max-restarts={restarts}"),
            *(f"--journal={mailbox.directory / 'journal'}", "train.py", "--word", "two words"),
            env={"PYTHONPATH": path, "TEST_RESTARTS": str(restarts)},
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [
            line
            for file in (self.mailbox.directory / "journal").rglob("*.jsonl")
            for line in file.read_text().splitlines(keepends=True)
        ]
        # The last one may be half of a line that is being written.
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == f"dlrover.{name}"]

    def warm(self, number: int) -> list[dict[str, Any]]:
        """The warm workers, once so many have been prepared."""
        return until(lambda: found if len(found := self.events("worker.prepared")) >= number else None)


@pytest.fixture
def jobs(mailbox: Mailbox) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
            finish(job.process)


def is_over(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_after_a_kill_they_take_the_ranks_and_others_are_prepared(mailbox: Mailbox, jobs: list[Job]) -> None:
    jobs.append(job := Job(mailbox, 2))
    workers = mailbox.gather(2)
    assert [worker["warm"] for worker in workers] == [False, False]
    for restart in (1, 2):
        # In the order of the local ranks.
        waiting = [event["pid"] for event in job.warm(2 * restart)[-2:]]
        os.kill(workers[1]["pid"], signal.SIGKILL)
        workers = mailbox.gather(2)
        assert [(one["restart"], one["rank"], one["pid"]) for one in workers] == [
            (restart, rank, pid) for rank, pid in enumerate(waiting)
        ]
        for one in workers:
            assert one["warm"]
            assert (one["cwd"], one["args"]) == (str(mailbox.directory), ["--word", "two words"])
    ended = finish(job.process)
    assert ended.code == 0, ended.err
    assert "warning" not in ended.err
    started = [(event["round"], event["pid"]) for event in job.events("worker.started")]
    assert started[-2:] == [(3, worker["pid"]) for worker in workers]
    assert all(is_over(event["pid"]) for event in job.events("worker.prepared"))


def test_one_that_dies_is_replaced_and_one_that_is_stopped_costs_no_restart(mailbox: Mailbox, jobs: list[Job]) -> None:
    jobs.append(job := Job(mailbox, 1))
    workers = mailbox.gather(2)
    first, second = (event["pid"] for event in job.warm(2))
    os.kill(first, signal.SIGKILL)
    third = job.warm(3)[2]["pid"]
    os.kill(second, signal.SIGSTOP)
    os.kill(workers[0]["pid"], signal.SIGKILL)
    after = mailbox.gather(2)
    assert after[0]["pid"] == third
    assert [one["warm"] for one in after] == [True, False]
    ended = finish(job.process)
    assert ended.code == 0, ended.err
    line = "--warm-workers: the warm worker of local rank 0 was killed by SIGKILL; another one is prepared"
    assert ended.err.count(line) == 1
    assert all(map(is_over, (first, second, third)))


def test_they_end_with_the_agent_that_is_killed(mailbox: Mailbox, jobs: list[Job]) -> None:
    jobs.append(job := Job(mailbox, 1))
    workers = mailbox.gather(2)
    pids = [event["pid"] for event in job.warm(2)]
    agent = int(Path(f"/proc/{workers[0]['pid']}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(agent, signal.SIGKILL)
    until(lambda: all(map(is_over, pids)))
    assert finish(job.process).code != 0


def test_a_script_that_changes_a_variable_is_told_nothing_and_has_them_too(mailbox: Mailbox, jobs: list[Job]) -> None:
    """They have imported what the template has, and no more."""
    jobs.append(job := Job(mailbox, 1, before="import os\nos.environ['NCCL_HOSTID'] = os.environ['RANK']\n"))
    workers = mailbox.gather(2)
    waiting = [event["pid"] for event in job.warm(2)]
    os.kill(workers[1]["pid"], signal.SIGKILL)
    after = mailbox.gather(2)
    assert [(one["pid"], one["warm"]) for one in after] == [(pid, False) for pid in waiting]
    ended = finish(job.process)
    assert ended.code == 0, ended.err
    assert "--warm-workers" not in ended.err
