"""An accelerator plug-in for tests: each measurement of a check process waits at the test's gate.

It offers no accelerator, or with CHECK_DEVICE a CPU of that name; none while the file CHECK_DEVICE_MISSING is not
empty, from which it removes one byte each time.

The process sends the gate its next action and waits for an answer: "go", "wrong" to multiply matrices wrongly, or none
if it is to be killed there. After the measurement it requests the speed to report from the gate, because the measured
one depends on the load of the machine. It keeps the connection open until then.
"""

from __future__ import annotations

import json
import os
import socket
import sys
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


def gated(stage: str, local_rank: int, measure: Callable[..., Any]) -> Callable[..., Any]:
    def wait_and_measure(*args: Any) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gate:
            gate.connect("\0" + os.environ["CHECK_GATE"])
            node = os.environ.get("TEST_NODE") or os.environ["DLROVER_LOCAL_NODE"]
            order = args[1]
            link, world = (order.name, order.world) if stage == "link" else ("", 1)
            about = {"node": node, "local_rank": local_rank, "stage": stage, "link": link, "world": world}
            gate.send(json.dumps({**about, "pid": os.getpid()}).encode())
            word = gate.recv(16)
            if word == b"wrong":
                torch.mm = bad_mm  # type: ignore[assignment]
            measured = measure(*args)
            gate.send(b"done")
            speed = float(gate.recv(64))
            return measured._replace(gigabytes=speed) if stage == "link" else speed

    return wait_and_measure


good_mm: Any = torch.mm


def bad_mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    good_mm(left, right, out=out)
    out[3, 5] += 1
    return out
