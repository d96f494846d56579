"""A worker for which the others wait in each step: it is named with what it does, while the job trains and after it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.harness import Mailbox, finish, launch

from dlrover_run.events.reader import NoEventLog, merged, read_logs
from dlrover_run.events.records import StragglerFound
from dlrover_run.features.inspect.why import Question, explain

pytestmark = [pytest.mark.torchrun, pytest.mark.long, pytest.mark.alone]

FOUND = 480.0
"""Seconds until the straggler must have been found: three windows, and the start of torch on a busy machine."""

POLL_INTERVAL = 2.0
"""Seconds between two looks at the event logs."""

SCRIPT = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
slow = rank == int(sys.argv[2])
total, goes_on = torch.ones(1000), torch.ones(1)

class Loaded(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            if slow:
                time.sleep(0.3)
            yield 1

def data():
    return iter(torch.utils.data.DataLoader(Loaded(), num_workers=1, batch_size=None))

def computing():
    while True:
        end = time.process_time() + 0.1 * slow
        while time.process_time() < end:
            pass
        yield 1

for _ in globals()[sys.argv[1]]():
    dist.all_reduce(total)
    total /= 2
    goes_on[0] = not os.path.exists(sys.argv[3])
    dist.broadcast(goes_on, 0)
    if not goes_on.item():
        break
dist.destroy_process_group()
"""


def found_in(journal: Path) -> list[StragglerFound]:
    """The stragglers in the event logs of all nodes."""
    try:
        logs = read_logs(journal)
    except NoEventLog:
        return []
    return [entry.event for entry in merged(logs) if isinstance(entry.event, StragglerFound)]


@pytest.mark.parametrize(
    ("slow", "rank", "place"),
    [
        ("data", 1, "--nproc-per-node=2"),
        ("computing", 0, "--nproc-per-node=3"),
        ("data", 0, "--local-nodes=2"),
    ],
)
def test_the_slow_worker_is_named_with_what_it_does(mailbox: Mailbox, slow: str, rank: int, place: str) -> None:
    script = mailbox.script("straggler.py", SCRIPT)
    journal, stop = mailbox.directory / "journal", mailbox.directory / "stop"
    flags = [place, "--stall-action=report", f"--journal={journal}"]
    job = launch(mailbox, *flags, script, slow, str(rank), str(stop))
    end = time.monotonic() + FOUND
    while not (found := found_in(journal)) and time.monotonic() < end and job.poll() is None:
        time.sleep(POLL_INTERVAL)
    stop.touch()
    ended = finish(job)
    assert ended.code == 0, ended.err
    assert {event.rank for event in found} == {rank}
    causes = {reason.code for event in found for reason in event.reasons}
    # On a machine with fewer processors than processes a worker that computes waits for one as well.
    expected = {f"straggler.{slow}"} | ({"straggler.processor"} if slow == "computing" else set())
    assert causes - {"straggler.waits"} <= expected
    answer = explain(read_logs(journal), Question.SLOW)
    assert "why.straggled" in {code for line in answer.codes for code in line}
