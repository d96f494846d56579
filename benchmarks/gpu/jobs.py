"""A job of the benchmark, whose output is kept if it is lost: a lent machine is looked at only once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from core.run import Run

from gpu.plan import Key

LOST = "lost"
"""The folder of the outputs of lost jobs, beside the fixtures."""

MAX_OUTPUT = 200_000
"""Characters that are kept, the last ones."""


@contextlib.contextmanager
def open_job(key: Key, recorded: Path) -> Iterator[Run]:
    """A run whose processes end with the block. If the block fails, what the job has printed is kept."""
    with Run() as run:
        run.ends_by_itself = False
        try:
            yield run
        except Exception:
            folder = recorded / LOST
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{key.part}-{key.case}.txt").write_text(run.output[-MAX_OUTPUT:])
            raise
