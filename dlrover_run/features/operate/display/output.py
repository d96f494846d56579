"""`logs`: the output of a job's workers, from the nodes that keep it, as lines of a person's terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from dlrover_run.job_status.questions import MAX_CURSORS, LogCursor, LogPiece, StackQuery
from dlrover_run.job_status.stacks import JobStacks
from dlrover_run.rendezvous.client import AskFailed

RETRY_INTERVAL = 0.2
"""Seconds between two questions while a job forms a round, or answers others."""

FOLLOW_WAIT = 0.5
"""Seconds that a node waits for new output: the answer of a job comes when all its nodes have answered."""

RETRIES = 150
"""Questions in a row without an answer after which a reader gives up."""


class OutputPrinter:
    """Prints pieces of output, each line with its worker in front if there are `several`; `write` takes text."""

    def __init__(self, write: Callable[[str], object], *, several: bool) -> None:
        self.several = several
        self._write = write

    def show(self, pieces: Sequence[LogPiece]) -> None:
        """Print pieces in the order of their workers."""
        for piece in sorted(pieces, key=lambda one: str(one.cursor.worker).zfill(12)):
            # Of a bar that is drawn again and again its last state.
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in piece.data.decode(errors="replace").split("\n")]
            if not lines[-1]:
                lines.pop()
            worker = piece.cursor.worker
            name = f"rank {worker}" if isinstance(worker, int) else worker
            prefix = f"[{name}]: " if self.several else ""
            self._write("".join(f"{prefix}{line}\n" for line in lines))


def workers_of(found: JobStacks) -> set[int | str]:
    """The workers of which there is output."""
    return {piece.cursor.worker for piece in found.logs}


async def follow(
    ask: Callable[[StackQuery], Awaitable[JobStacks]], query: StackQuery, found: JobStacks, printer: OutputPrinter
) -> str:
    """Print what is written after an answer, until the job does not answer any more; a clause that says so. Raises
    AskFailed."""
    assert query.logs is not None, "output is asked for"
    after: dict[tuple[int | str, str], LogCursor] = {}
    failures = 0
    while True:
        for piece in found.logs:
            after[piece.cursor.worker, piece.cursor.stream] = piece.cursor
        if len(after) > MAX_CURSORS:
            few = f"-f follows at most {MAX_CURSORS} streams, and there are {len(after)}"
            raise AskFailed(f"{few}: give --rank or --node")
        try:
            found = await ask(replace(query, logs=replace(query.logs, after=tuple(after.values()))))
        except AskFailed as failed:
            failures += 1
            if failed.no_job:
                return str(failed)
            if failures > RETRIES:
                raise
            # Between two rounds no worker has the rank.
            found = replace(found, logs=())
            await asyncio.sleep(RETRY_INTERVAL)
            continue
        failures = 0
        printer.several |= len(workers_of(found)) > 1
        printer.show(found.logs)
        sys.stdout.flush()
