"""The last step where a device finishes the collectives, as with NCCL. It is pretended: the ranks meet over gloo."""

from __future__ import annotations

import contextlib
import os
import signal

from support.harness import Mailbox, finish, launch

# The main thread runs no Python, as one that waits for its device: no handler, and no end.
STUCK = """\
import ctypes, os, sys
from dlrover_run.training import CheckpointDirectory, peers
peers.waits_for_device = lambda: True
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    post(steps=CheckpointDirectory("checkpoints").steps())
    sys.exit(0)
with CheckpointDirectory("checkpoints").save_at_stop(lambda: (7, {})):
    post()
    mutex = ctypes.create_string_buffer(128)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""

STEPS = """\
import os, time
import torch
import torch.distributed as dist
from dlrover_run.training import CheckpointDirectory, peers, stop_agreement
dist.init_process_group("gloo")
peers.waits_for_device = lambda: True
stop_agreement.CONFIRM_TIMEOUT = 3600
rank = dist.get_rank()
checkpoints = CheckpointDirectory("checkpoints", rank=rank, world_size=2)
found = checkpoints.load_latest()
if found is not None:
    post(step=found.step, state=found.state["step"], rank=found.state["rank"])
    raise SystemExit
step = 0
with checkpoints.save_at_stop(lambda: (step, {"step": step, "rank": rank})) as last:
    while True:
        dist.all_reduce(torch.ones(1))
        step += 1
        if step == 5:
            post()
        last.check()
"""


def test_a_rank_that_has_lost_another_one_and_waits_for_its_device_gets_a_second_and_saves_nothing(
    mailbox: Mailbox,
) -> None:
    script = mailbox.script("script.py", STUCK)
    # The grace period is longer than this test waits.
    job = launch(mailbox, "--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=3600", script)
    first = mailbox.gather(2)
    try:
        os.kill(first[1]["pid"], signal.SIGKILL)
        assert [one["steps"] for one in mailbox.gather(2)] == [[], []]
    finally:
        # If the test fails, it still waits.
        with contextlib.suppress(ProcessLookupError):
            os.kill(first[0]["pid"], signal.SIGKILL)
        ended = finish(job)
    assert ended.code == 0, ended.err


def test_a_planned_stop_saves_the_same_step_on_all_ranks(mailbox: Mailbox) -> None:
    script = mailbox.script("script.py", STEPS)
    job = launch(mailbox, "--nproc-per-node=2", "--shutdown-timeout=3600", script)
    mailbox.gather(2)
    job.send_signal(signal.SIGTERM)
    assert finish(job).code == 143
    again = launch(mailbox, "--nproc-per-node=2", script)
    ranks = mailbox.gather(2)
    assert finish(again).code == 0
    assert [one["rank"] for one in ranks] == [0, 1]
    assert ranks[0]["step"] == ranks[0]["state"] == ranks[1]["step"] == ranks[1]["state"] >= 5
