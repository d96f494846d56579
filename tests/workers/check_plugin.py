"""An accelerator plug-in for tests: a CPU with another name, on which CHECK_FAULT fails in one way.

CHECK_GIVE_UP_AFTER is the number of seconds after its timeout at which a link counts as hanging: gloo may need long to
time out on a busy machine.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

print("a library says hello")
os.write(1, b"so does its C part\n")


@dataclass
class Abacus:
    name: str = "abacus"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    backend: str = "gloo"
    uuid: str = ""

    def synchronize(self) -> None:
        pass


def number_groups_elsewhere() -> None:
    """Simulate a torch that keeps the number of the next process group in another attribute."""
    c10d = dist.distributed_c10d
    destroy = dist.destroy_process_group
    made = 0

    def name(*_: Any, **__: Any) -> str:
        nonlocal made
        made += 1
        return getattr(c10d, "GroupName", str)(str(made - 1))

    def destroy_and_begin_again() -> None:
        nonlocal made
        destroy()
        made = 0

    c10d._process_group_name = name
    dist.destroy_process_group = destroy_and_begin_again


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def find(local_rank: int, workers: int) -> Abacus | None:
    fault = os.environ.get("CHECK_FAULT", "")
    if "CHECK_GIVE_UP_AFTER" in os.environ:
        link: Any = sys.modules["_dlrover_node_check.link"]
        link.GIVE_UP_AFTER = float(os.environ["CHECK_GIVE_UP_AFTER"])
    if fault == "not there":
        return None
    if fault == "driver":
        raise OSError("the abacus does not answer\nand this is its second line")
    if fault == "place":
        return Abacus(name=f"abacus {local_rank} of {workers}")
    if fault == "number groups elsewhere":
        number_groups_elsewhere()
    if fault == "die before the group":
        dist.init_process_group = die
    mm, gather = torch.mm, getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls = gathers = 0

    def bad_mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if fault == "memory":
            raise torch.cuda.OutOfMemoryError("tried to allocate 3 beads\nsecond line")
        mm(left, right, out=out)
        if calls > 20 and fault == "wrong":
            out[3, 5] += 1
        if calls > 20 and fault == "nan":
            out[0, 0] = float("nan")
        if calls > 20 and fault == "skipped":
            out[1] = float("nan")
        return out

    def bad_gather(place: torch.Tensor, sent: torch.Tensor) -> Any:
        nonlocal gathers
        gathers += 1
        if fault == "die in the link" and gathers == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop in the link" and gathers == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        result = gather(place, sent)
        if fault == "bit" and gathers == 5:
            place[-1] ^= 1
        return result

    torch.mm = bad_mm  # type: ignore[assignment]
    for name in ("all_gather_single", "all_gather_into_tensor"):
        setattr(dist, name, bad_gather)
    return Abacus(backend=os.environ.get("CHECK_BACKEND", "gloo"), uuid=os.environ.get("CHECK_UUID", ""))
