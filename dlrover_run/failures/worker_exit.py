"""How one worker ended: the facts that the report, the exit code and the next decision are made of."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class RecordedError:
    """What a worker wrote to its `TORCHELASTIC_ERROR_FILE`, by torch's `@record` or in the same format."""

    message: str
    traceback: str
    unix_time: float


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker process.

    `code` follows `subprocess`: an exit code, or minus a signal's number. `stopped_with` is the signal with which the
    launcher itself stopped the worker, so that a victim is never mistaken for the culprit; None means it ended of
    itself. `failed_first` says that a stopped worker had recorded its error before it was stopped.
    `stderr_tail` is the last of what it wrote to standard error, as far as that could be seen, and to standard output
    where the two went to one console. `memory_limit` is a sentence when the kernel is known to have killed for memory,
    else None. `full_disk` is a clause when it ended without a word while a disk that it wrote to had no space left,
    else None. `waited_for` is a clause on the workers that this one waited for in vain, else None. `error_file` is
    where `error` was read. `forwarded` says that `--forward-signals` passed on the signal that killed it. `name` is
    what people call it where they do not go by ranks.
    """

    rank: int
    local_rank: int
    pid: int
    code: int
    unix_time: float
    stopped_with: signal.Signals | None = None
    error: RecordedError | None = None
    stderr_tail: str = ""
    stdout_path: str | None = None
    stderr_path: str | None = None
    memory_limit: str | None = None
    full_disk: str | None = None
    waited_for: str | None = None
    error_file: str | None = None
    failed_first: bool = False
    forwarded: bool = False
    name: str = ""

    @property
    def who(self) -> str:
        """What it is called in a sentence."""
        return self.name or f"rank {self.rank}"

    @property
    def failed(self) -> bool:
        """Whether the worker ended badly of itself: not with 0, and not only because the launcher stopped it."""
        return self.code != 0 and (self.stopped_with is None or self.failed_first)

    @property
    def exit_status(self) -> int:
        """The code as a shell reports it: 128 + n for signal n.

        A worker that had failed and only its slow end was cut short by our signal counts as Python does an exception.
        """
        if self.code < 0:
            return 1 if self.failed_first else 128 - self.code
        return self.code
