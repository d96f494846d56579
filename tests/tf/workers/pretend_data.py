"""A pretended script whose workers take their data from the job's queues; the other tasks are those of `pretend.py`."""

from __future__ import annotations

import json
import os
import runpy
import socket
import time
from pathlib import Path

from tf_ps_runner.hooks import DataShards
from tf_ps_runner.worker.agent_connection import agent

NAME = f"{json.loads(os.environ['TF_CONFIG'])['task']['type']}-{os.environ['WORKER_ID']}"


def post(**fields: object) -> None:
    """Tell the test."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.sendto(
            json.dumps({"name": NAME, "pid": os.getpid(), **fields}).encode(), "\0" + os.environ["TEST_MAILBOX"]
        )


if NAME.startswith("worker"):
    agent().report("ready")
    post(at="begins")
    for begin, end in DataShards("train", size=60, shard_size=20).batches(10):
        post(at="took", begin=begin, end=end)
        while os.environ["WORKER_ID"] == "0" and begin == 30:
            # Until the test kills it, in the middle of its second part.
            time.sleep(60)
    post(at="over")
else:
    runpy.run_path(str(Path(__file__).with_name("pretend.py")), run_name="__main__")
