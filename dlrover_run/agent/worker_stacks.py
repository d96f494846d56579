"""The answer of this node to a question for stacks: it asks its workers, and folds what they have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrover_run.coordination.stacks import (
    MAX_FRAMES,
    MAX_NODE_BYTES,
    NodeStacks,
    StackFolder,
    StackFrame,
    StackProblem,
    clipped,
)
from dlrover_run.process_tree.tree import read_stat
from dlrover_run.stall.ask import StackFiles, gather_stacks
from dlrover_run.stall.stacks import Stack


@dataclass(frozen=True)
class AskedWorker:
    """A worker that runs: its rank or name, its process, and its file among `files`, which is None if it has none."""

    worker: int | str
    pid: int
    files: StackFiles | None
    local_rank: int = 0

    def request(self) -> bool:
        return self.files is not None and self.files.request(self.local_rank, self.pid)

    def answer(self) -> Stack | None:
        return None if self.files is None else self.files.answer(self.local_rank)


async def node_stacks(workers: Sequence[AskedWorker]) -> NodeStacks:
    """The stacks of these workers. It takes some milliseconds, and STACKS_TIMEOUT if one does not answer."""
    asked: set[int] = set()

    def request(place: int) -> bool:
        if workers[place].request():
            asked.add(place)
        return place in asked

    found = await gather_stacks(range(len(workers)), request, lambda place: workers[place].answer())
    folder = StackFolder(MAX_NODE_BYTES)
    for place, one in enumerate(workers):
        if place in found:
            frames = (StackFrame(clipped(each.file), each.line, clipped(each.function)) for each in found[place].main)
            folder.add([one.worker], tuple(frames)[:MAX_FRAMES])
        else:
            folder.add_missing(problem_of(_state(one.pid), place in asked, one.files is not None), [one.worker])
    return NodeStacks(folder.folded, folder.missing)


def problem_of(state: str, asked: bool, has_file: bool) -> StackProblem:
    """Why a worker in that state, the letter of its process, has no stack. `has_file`: it was started so that it can be
    asked; `asked`: it has registered, and was asked."""
    if state in "Tt":
        return StackProblem.STOPPED
    if state == "D":
        return StackProblem.BLOCKED
    if state in "XZ":
        return StackProblem.ENDED
    if not has_file:
        return StackProblem.NOT_REGISTERED
    return StackProblem.NO_ANSWER if asked else StackProblem.NOT_ASKED


def _state(pid: int) -> str:
    try:
        return read_stat(pid)[1][0].decode()
    except OSError:
        return "X"
