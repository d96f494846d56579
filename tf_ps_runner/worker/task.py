"""Which task of the cluster this process is, by its `TF_CONFIG`, and how it leaves the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
from typing import Any, NoReturn

from tf_ps_runner.worker import shards
from tf_ps_runner.worker.agent_connection import agent, noted

EXIT_MEMBERSHIP = 75
"""The exit code of a process that leaves because the cluster changes."""

CLOSE_TIMEOUT = 2.0
"""Seconds to close the session, which has the servers release it. After that the process ends anyway, and the servers
keep what they hold for it until they end."""

GATE = "TF_PS_GATE"
READY_AT_START = "TF_PS_READY_AT_START"

CHIEFS = ("chief", "master")
"""TensorFlow's names for the task that creates the model and saves it."""

_leaving = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ClusterTask:
    """A role with an index in the cluster. `gated` means that a worker waits until the chief has a complete model, and
    `ready_at_start` that the task is ready when its script begins."""

    role: str
    index: int
    gated: bool
    ready_at_start: bool = False

    @property
    def chief(self) -> bool:
        """Whether it creates the model, and saves it."""
        return self.role in CHIEFS

    @property
    def worker(self) -> bool:
        """Whether it trains a model that the chief has created."""
        return self.role == "worker"


def task() -> ClusterTask | None:
    """The task of this process; None without an agent, or without a `TF_CONFIG` that names it."""
    if not agent().active:
        return None
    try:
        stated = json.loads(os.environ.get("TF_CONFIG", ""))["task"]
        gated, ready_at_start = (os.environ.get(name) == "1" for name in (GATE, READY_AT_START))
        return ClusterTask(str(stated["type"]), int(stated["index"]), gated, ready_at_start)
    except (ValueError, TypeError, KeyError):
        return None


def is_chief() -> bool:
    """Whether this process is the chief of a cluster with an agent."""
    own_task = task()
    return own_task is not None and own_task.chief


def report_used_data() -> None:
    """Report the data with which a step was made, before this process leaves. Idempotent."""
    with noted("the data that this process has used was not reported"):
        shards.before_leaving()


def leave(session: Any = None) -> NoReturn:
    """End this process with exit code 75. Only the first thread that comes here does it; others wait for the end.

    The interpreter does not end in order, because TensorFlow might then wait for servers that are gone.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    try:
        report_used_data()
        if session is not None:
            closing = threading.Thread(target=_close, args=(session,), daemon=True)
            closing.start()
            closing.join(CLOSE_TIMEOUT)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(EXIT_MEMBERSHIP)


def _close(session: Any) -> None:
    with contextlib.suppress(Exception):
        session.close()
