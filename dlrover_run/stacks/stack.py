"""The stacks of all threads of a process, and the user's line among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_run.words.text import format_ranks

MAX_FRAMES = 100
"""Frames of a thread that are kept."""

_HOME = Path(__file__).parents[2]
_LAUNCHER = "|".join(
    re.escape(f"{home / package}/") for home in (_HOME, _HOME.resolve()) for package in ("dlrover_run", "tf_ps_runner")
)
"""The code of the launcher, some of which runs in a worker: also in a checkout, outside of site-packages."""

_LIBRARY = re.compile(rf"/(?:site|dist)-packages/|/lib/python3\.\d+t?/|^<frozen |^<string>$|^(?:{_LAUNCHER})")
_COLLECTIVE = re.compile(r"/torch/(?:distributed|nn/parallel|autograd)/|/horovod/|/deepspeed/comm/")
_LOCK = re.compile(r"/threading\.py:|/multiprocessing/synchronize\.py:|/queue\.py:|/filelock/")
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py:|/multiprocessing/(?:queues|connection|pool)\.py:")
_DEBUGGER = re.compile(r"/(?:pdb|bdb)\.py:")


class Frame(NamedTuple):
    """One call: `line` 0 if it is unknown."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.function}"


class Thread(NamedTuple):
    """The calls of one thread, the innermost first."""

    name: str
    frames: tuple[Frame, ...]


class Stack(NamedTuple):
    """The threads of one process, the main thread last. `holds_lock` says whether the main thread holds the lock of the
    interpreter, as one does that runs Python; None if that is not known. `variables` is a digest of the variables in
    its calls: equal ones say that it has run no Python in between, 0 that it is not known."""

    threads: tuple[Thread, ...]
    holds_lock: bool | None = None
    variables: int = 0

    @property
    def main(self) -> tuple[Frame, ...]:
        """The calls of the main thread."""
        return self.threads[-1].frames if self.threads else ()

    @property
    def user_line(self) -> Frame | None:
        """The innermost call of the main thread in a file of the user; None if there is none."""
        return next((frame for frame in self.main if not _LIBRARY.search(frame.file)), None)

    @property
    def in_collective(self) -> bool:
        """Whether the main thread may be in a collective: below the user's line it is in torch.distributed, or in a
        backward pass, whose collectives are not in Python."""
        return self.is_below(_COLLECTIVE)

    @property
    def in_lock(self) -> bool:
        return self.is_below(_LOCK)

    @property
    def in_loader(self) -> bool:
        """Whether the main thread waits for another process, as for a data loader's."""
        return self.is_below(_LOADER)

    @property
    def in_debugger(self) -> bool:
        return any(_DEBUGGER.search(str(frame)) for frame in self.main)

    def is_below(self, pattern: re.Pattern[str]) -> bool:
        """Whether the pattern is in a call of the main thread below the user's line."""
        for frame in self.main:
            if not _LIBRARY.search(frame.file):
                return False
            if pattern.search(str(frame)):
                return True
        return False


class Folded(NamedTuple):
    """The ranks whose main threads have the same calls."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


def fold(stacks: Mapping[int, Stack]) -> list[Folded]:
    """Equal stacks once, those of the fewest ranks first: the outlier is what a reader looks for."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(stack.main, []).append(rank)
    folded = [Folded(tuple(ranks), frames) for frames, ranks in groups.items()]
    return sorted(folded, key=lambda one: (len(one.ranks), one.ranks))


def render(folded: Sequence[Folded], names: Callable[[tuple[int, ...]], str] = format_ranks) -> str:
    """The folded stacks as lines. `names` names the workers of these ranks."""
    lines = []
    for one in folded:
        lines.append(f"{names(one.ranks)}:")
        lines += [f"  {frame.file}:{frame.line} in {frame.function}" for frame in one.frames] or ["  (no Python frame)"]
    return "\n".join(lines)
