"""The exception that a failed launch from Python raises."""

from __future__ import annotations

import functools
import sys
from datetime import datetime
from typing import Any

import msgspec

from dlrover_run.agent.result import JobResult
from dlrover_run.failures.causes import describe_exit
from dlrover_run.failures.worker_exit import WorkerExit

_TORCH_MODULE = "torch.distributed.elastic.multiprocessing.errors"
_NOT_AVAILABLE = "<N/A>"
"""Torch's text for an error file that does not exist."""


class WorkerFailure(WorkerExit, frozen=True):
    """The exit of a failed worker, with the attributes of torch's `ProcessFailure` besides."""

    @classmethod
    def of(cls, end: WorkerExit) -> WorkerFailure:
        return cls(**{**msgspec.structs.asdict(end), "error_file": end.error_file or _NOT_AVAILABLE})

    @property
    def exitcode(self) -> int:
        return self.code

    @property
    def timestamp(self) -> int:
        """When it ended, in Unix seconds."""
        return int(self.unix_time)

    @property
    def message(self) -> Any:
        """The recorded error in the format of torch's error file; without one, a description of the exit."""
        if self.error is None:
            return describe_exit(self)
        extra = {"py_callstack": self.error.traceback, "timestamp": str(int(self.error.unix_time))}
        return {"message": self.error.message, "extraInfo": extra}

    def signal_name(self) -> str:
        import signal

        return signal.Signals(-self.code).name if -self.code in set(signal.Signals) else _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


class ChildFailedError(Exception):
    """The job failed. `failures` has the exits of all ranks that failed by themselves, by global rank.

    If the process has imported torch's class of this name and a worker of this node failed, it is an instance of that
    class too.
    """

    def __init__(self, name: str, result: JobResult) -> None:
        self.name = name
        self.failures = {end.rank: WorkerFailure.of(end) for end in result.ends if end.failed}
        self.exit_code = result.exit_code
        self._result = result
        root = result.root
        if root is not None:
            self._first: WorkerFailure | None = WorkerFailure.of(root)
        else:
            self._first = min(self.failures.values(), key=lambda end: end.unix_time, default=None)
        # The plan's reason was composed before the traceback was read.
        description = f"rank {root.rank} {describe_exit(root)}" if root else result.reason
        # Torch's class takes other arguments, so its constructor is not called.
        Exception.__init__(self, f"{name} failed: {result.error or description}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Makes it picklable: it may be raised in one process and caught in another.
        return child_failed_error, (self.name, self._result)

    def get_first_failure(self) -> tuple[int, WorkerFailure]:
        """The global rank that failed first on this node, and its exit. Raises LookupError if no worker of this node
        failed, and the launcher itself gave up."""
        if self._first is None:
            raise LookupError("no worker failed; the launcher itself gave up")
        return self._first.rank, self._first


def child_failed_error(name: str, result: JobResult) -> ChildFailedError:
    """The exception to raise. Torch is not imported for it: a caller that catches torch's class has imported it."""
    torch_class = getattr(sys.modules.get(_TORCH_MODULE), "ChildFailedError", None)
    if isinstance(torch_class, type) and any(end.failed for end in result.ends):
        return _combined(torch_class)(name, result)
    return ChildFailedError(name, result)


@functools.cache
def _combined(torch_class: type) -> type[ChildFailedError]:
    return type("ChildFailedError", (ChildFailedError, torch_class), {"__module__": ChildFailedError.__module__})
