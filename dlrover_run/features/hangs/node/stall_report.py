"""What a stall comes to for the user: one line, and the stacks, in a file or on the console."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dlrover_run.console.console import Console
from dlrover_run.features.hangs.search.detector import StallCode, Stalled
from dlrover_run.output.run_directory import RunDir
from dlrover_run.stacks.stack import Stack, fold, render
from dlrover_run.words.reasons import Reasons
from dlrover_run.words.reasons import render as render_reasons
from dlrover_run.words.text import format_ranks

STACKS_FILE = "stacks.txt"
"""The file in the directory of the run to which the stacks of each stall are appended."""

Names = Callable[[tuple[int, ...]], str]
"""Names the workers of these ranks in a sentence."""


@dataclass(frozen=True)
class StallReport:
    """A stall, the workers `guilty` that the others wait for, empty if the evidence names none, why, and the stacks of
    the workers of this node. `nodes` are the nodes of the guilty workers, empty in a round of one node. With
    `--stall-action=restart` the workers `to_restart` are killed, each on its node. `names` is None for the ranks of a
    round."""

    stalled: Stalled
    guilty: tuple[int, ...]
    reasons: Reasons
    seconds: float
    stacks: Mapping[int, Stack]
    to_restart: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    names: Names | None = None

    @property
    def is_alone(self) -> bool:
        """Whether other workers of the round train on."""
        return self.stalled.code is StallCode.ALONE

    @property
    def line(self) -> str:
        """The line for the console."""
        names = self.names or format_ranks
        named = f"{names(self.guilty)} " if self.guilty else ""
        if self.guilty and self.nodes:
            named += f"on {' and '.join(self.nodes)} "
        stalled = self.stalled.ranks
        all_are = self.names is None and not self.is_alone
        whose = "" if all_are or stalled == self.guilty else f" of {names(stalled)}"
        return f"no progress{whose} for {self.seconds:.0f} s: {named}{render_reasons(self.reasons)}"

    @property
    def text(self) -> str:
        """The stacks, equal ones folded."""
        return render(fold(self.stacks), self.names or format_ranks)


def show_stacks(report: StallReport, title: str, run_dir: RunDir, console: Console, places: Sequence[str] = ()) -> None:
    """Append the stacks to the file of the run, below a title, and `places`, which say where each rank is in its
    collectives; without a directory, print them."""
    text = "\n".join([*places, *([""] if places else []), report.text])
    if run_dir.keep and run_dir.path is not None:
        path = os.path.join(run_dir.path, STACKS_FILE)
        try:
            with open(path, "a") as file:
                file.write(f"{title}: {report.line}\n{text}\n\n")
        except OSError as error:
            console.info(f"the stacks cannot be written to {path} ({error.strerror})")
        else:
            whose = "all ranks" if report.names is None else "all tasks"
            console.info(f"stacks of {format_ranks(report.stalled.ranks) if report.is_alone else whose} in {path}")
            return
    for line in text.splitlines():
        console.info(line)
