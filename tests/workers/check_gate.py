"""An accelerator plug-in for tests: each measurement of a check process waits at the test's gate.

It offers no accelerator, or with CHECK_DEVICE a CPU of that name; not as long as the file CHECK_DEVICE_MISSING is not
empty, from which it takes one byte each time.

The process tells the gate what it is about to do and waits for a word: "go", "wrong" to multiply matrices wrongly,
"slow" when it will be slowed, or nothing any more, when it is to be killed there. It holds the connection for as long
as it measures.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Device:
    name: str
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it never changes)
    dtype: torch.dtype = torch.float32
    backend: str = "gloo"

    def synchronize(self) -> None:
        pass


def find(local_rank: int, workers: int) -> Device | None:
    tasks: Any = sys.modules["_dlrover_node_check.tasks"]
    tasks.measure_compute = gated("compute", local_rank, tasks.measure_compute)
    tasks.measure_link = gated("link", local_rank, tasks.measure_link)
    missing = os.environ.get("CHECK_DEVICE_MISSING")
    if missing and (left := Path(missing).read_bytes()):
        Path(missing).write_bytes(left[1:])
        return None
    return Device(os.environ["CHECK_DEVICE"]) if "CHECK_DEVICE" in os.environ else None


def gated(stage: str, local_rank: int, measure: Callable[..., float]) -> Callable[..., float]:
    def wait_and_measure(*args: Any) -> float:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gate:
            gate.connect("\0" + os.environ["CHECK_GATE"])
            node = os.environ.get("TEST_NODE") or os.environ["DLROVER_LOCAL_NODE"]
            about = {"node": node, "local_rank": local_rank, "stage": stage, "pid": os.getpid()}
            gate.send(json.dumps(about).encode())
            word = gate.recv(16)
            if word == b"wrong":
                torch.mm = bad_mm  # type: ignore[assignment]
            compute: Any = sys.modules["_dlrover_node_check.compute"]
            compute.time = time if word == b"slow" else OwnTime
            return measure(*args)

    return wait_and_measure


class OwnTime:
    """A clock that stands still while others have the core: a healthy node reads its own speed on any busy machine."""

    perf_counter = staticmethod(time.thread_time)


good_mm: Any = torch.mm


def bad_mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    good_mm(left, right, out=out)
    out[3, 5] += 1
    return out
