"""The answer of this node to a question for stacks: it reads those of its workers, and folds them."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.job_status.stacks import (
    MAX_FRAMES,
    MAX_NODE_BYTES,
    NodeStacks,
    StackFolder,
    StackFrame,
    StackProblem,
    clipped,
)
from dlrover_run.stacks.read import read_stacks


async def node_stacks(pids: Mapping[int | str, int]) -> NodeStacks:
    """The stacks of the workers with these ranks or names. It takes some milliseconds, and STACKS_TIMEOUT if the memory
    of one is locked."""
    found = await read_stacks(pids, main=True)
    folder = StackFolder(MAX_NODE_BYTES)
    for worker, reading in found.items():
        for stack in reading.stacks:
            frames = (StackFrame(clipped(one.file), one.line, clipped(one.function)) for one in stack.main)
            folder.add([worker], tuple(frames)[:MAX_FRAMES])
        if reading.problem is not None:
            folder.add_missing(reading.problem, [worker])
        elif reading.state in "Tt":
            # It has a stack, and the others may wait for it nevertheless.
            folder.add_missing(StackProblem.STOPPED, [worker])
    return NodeStacks(folder.folded, folder.missing)
