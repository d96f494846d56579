"""The kinds of hangs and of innocent pauses, and the runs of the matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from core import faults
from core.faults import why_no_freezer, why_no_mount, why_no_own_disk
from core.run import Run

from dlrover_run.features.local_nodes import network

REPETITIONS = 20
SCRIPT, CALM_SCRIPT = "stalling.py", "calm.py"

GLOO, DEVICE = SHAPES = ("gloo", "device")
"""How workers wait in a collective: in torch's own frames, or as with NCCL, for a device and in C (`device_lab`)."""

Outside = Callable[[Run, int, str], AbstractContextManager[None]]
"""What the benchmark does to a job: the run, the pid of the worker, and the place that the fault has prepared."""


@dataclass(frozen=True)
class Fault:
    """What happens to one worker. Either the worker does it itself (`workers/stalling.py`), or `outside` does.

    `functions` are those of the worker's script in which it hangs, none if it can write no stack. With `mutual`, two
    ranks wait for each other, and nothing says which of them is at fault. `place` is a folder or an address that the
    worker needs. `innocent`: it is no hang, and ends by itself, or at the end of `outside`. `at_once`: each rank does
    it, before its second step. `together`: each rank does, at one step of the training. `cuts`: the job has two nodes,
    and that of the rank loses the network in which the ranks exchange data, but not the one of the launchers.
    `max_turns` bounds the runs with each number of ranks. `shapes` are those in which there is such a fault, and
    `ranks` the numbers of ranks, empty for any. `on_device` are options that its devices need. `unavailable` returns
    why it cannot be tried here, None if it can.
    """

    name: str
    title: str
    functions: tuple[str, ...] = ()
    mutual: bool = False
    innocent: bool = False
    at_once: bool = False
    together: bool = False
    cuts: bool = False
    max_turns: int = REPETITIONS
    outside: Outside | None = None
    place: Callable[[], AbstractContextManager[str]] = lambda: nullcontext("-")
    script: str = SCRIPT
    shapes: tuple[str, ...] = SHAPES
    ranks: tuple[int, ...] = ()
    on_device: tuple[tuple[str, int], ...] = ()
    unavailable: Callable[[], str | None] = lambda: None


FAULTS = (
    Fault("stopped", "stopped by SIGSTOP"),
    Fault("sleep", "sleeps", ("sleep",)),
    Fault("spin", "spins in Python", ("spin",)),
    Fault("spin-in-c", "spins in C and holds the lock of the interpreter", ("spin_in_c",)),
    Fault("lost-loader", "waits for a process that loads data and was killed", ("lost_loader",)),
    Fault("lock", "waits for a lock that it holds", ("lock",)),
    Fault(
        "frozen",
        "in state D: frozen by its control group",
        outside=lambda run, pid, place: faults.frozen([pid]),
        unavailable=why_no_freezer,
    ),
    Fault(
        "blocked-disk",
        "in state D: writes to a file system that is frozen",
        place=faults.own_disk,
        outside=lambda run, pid, place: faults.blocked(place),
        unavailable=why_no_own_disk,
    ),
    Fault("mismatch", "calls another collective than the others", ("mismatch", "step"), mutual=True),
    Fault("left", "has left the loop, and waits in a barrier", ("left", "step"), mutual=True),
    Fault("cut", "receives nothing from the network", ("step",), mutual=True, on_device=(("tcp", 1),)),
    Fault(
        "cut-node",
        "on one of two nodes, whose network is cut",
        ("step",),
        mutual=True,
        cuts=True,
        on_device=(("tcp", 1),),
        unavailable=network.why_not,
    ),
    Fault(
        "full-disk",
        "tries again and again to write to a full disk",
        ("full_disk",),
        place=faults.small_disk,
        unavailable=why_no_mount,
    ),
    Fault("storm", "waits for 300 threads that spin", ("storm",)),
    Fault("endless-kernel", "runs a kernel that never ends", ("step",), mutual=True, shapes=(DEVICE,)),
)

INNOCENTS = (
    Fault("checkpoint", "one rank writes a checkpoint", innocent=True),
    Fault("evaluation", "one rank evaluates", innocent=True),
    Fault("warm-up", "all ranks compile before their second step", innocent=True, at_once=True),
    Fault("compilation", "one rank compiles again", innocent=True),
    Fault("download", "one rank downloads data from a slow server", innocent=True, place=faults.slow_server),
    Fault(
        "debugger",
        "one rank is in pdb",
        innocent=True,
        place=faults.console,
        outside=lambda run, pid, place: faults.continuing(place),
    ),
    Fault(
        "traced",
        "one rank was stopped by a debugger from outside",
        innocent=True,
        outside=lambda run, pid, place: faults.traced(pid),
    ),
    Fault(
        "machine",
        "the whole job is frozen, and thawed again",
        innocent=True,
        outside=lambda run, pid, place: faults.frozen([process.pid for process in run.processes()]),
        unavailable=why_no_freezer,
    ),
    Fault(
        "suspended",
        "the whole job is stopped by SIGSTOP, and continued",
        innocent=True,
        outside=lambda run, pid, place: faults.stopped([process.pid for process in run.processes()]),
    ),
    Fault("kernel", "all ranks run a long kernel", innocent=True, together=True, shapes=(DEVICE,)),
    Fault("host-optimizer", "all ranks optimize on the host", innocent=True, together=True),
    Fault(
        "checkpoint-barrier",
        "one rank writes a checkpoint, the others wait in a barrier",
        innocent=True,
        together=True,
    ),
    Fault("loaders", "all ranks start the workers of their data loaders anew", innocent=True, together=True),
    Fault("one-rank", "the only rank runs a long kernel", innocent=True, shapes=(DEVICE,), ranks=(1,)),
    Fault(
        "shared-device",
        "one rank occupies the device of all with a long kernel",
        innocent=True,
        shapes=(DEVICE,),
        on_device=(("shared", 1),),
    ),
)

CALMS = (Fault("calm", "trains, with pauses drawn at random", innocent=True, max_turns=1000, script=CALM_SCRIPT),)

BY_NAME = {fault.name: fault for fault in (*FAULTS, *INNOCENTS, *CALMS)}


class Key(NamedTuple):
    """One run of the matrix. `pause` is the seconds of an innocent one, 0 of a hang."""

    fault: str
    ranks: int
    turn: int
    pause: float = 0.0
    shape: str = GLOO

    @property
    def draw(self) -> random.Random:
        """The random numbers of this run."""
        return random.Random(f"{self.fault} {self.ranks} {self.turn}")

    @property
    def device_options(self) -> dict[str, int]:
        """The options of its devices. Turn by turn data go through shared memory or connections; two turns of four
        answer as NCCL RAS does; a third has copies in the background, and of five one waits asleep."""
        varied = {
            "tcp": int(self.turn % 2 == 0),
            "ras": int((self.turn - 1) // 2 % 2 == 0),
            "copies": int(self.turn % 3 == 0),
            "wait": int(self.turn % 5 == 0),
            "shared": 0,
        }
        return {**varied, **dict(BY_NAME[self.fault].on_device)}


def keys(
    kinds: Sequence[Fault],
    names: Collection[str],
    sizes: Sequence[int],
    turns: range,
    pause: float,
    shapes: Sequence[str] = (GLOO,),
) -> list[Key]:
    """All runs of these kinds, in an order in which each part of the matrix is even over the kinds."""
    return [
        Key(one.name, ranks, turn, pause if one.innocent else 0.0, shape)
        for turn in turns
        for one in kinds
        for ranks in one.ranks or sizes
        for shape in shapes
        if one.name in names and shape in one.shapes and turn <= one.max_turns and not (one.cuts and ranks % 2)
    ]
