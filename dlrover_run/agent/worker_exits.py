"""How a worker has ended: from its code, its output, its error file and the kernel's counters."""

from __future__ import annotations

import os
import tempfile

from msgspec.structs import replace

from dlrover_run.agent.worker_specs import Worker
from dlrover_run.failures import causes
from dlrover_run.failures.error_file import read_error_file
from dlrover_run.failures.oom_kills import OomKillCounters
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.streams import RankStreams, read_tail


def build_worker_exit(
    worker: Worker,
    placed: RankStreams,
    tail: str | None,
    oom_kills: OomKillCounters,
    raised: bool = False,
) -> WorkerExit:
    """How a worker has ended. `tail` is the end of its standard error from the relay, None if it was not requested yet.
    `raised`: it had written the traceback of its own error before it was stopped."""
    assert worker.code is not None, "the worker has ended"
    seen = read_stderr(placed, tail)
    may_be_oom = worker.stopped_with is None and causes.may_be_oom_kill(worker.code, seen)
    error = read_error_file(placed.error_file) if placed.error_file else None
    end = WorkerExit(
        rank=worker.spec.rank,
        local_rank=worker.spec.local_rank,
        pid=worker.pid,
        code=worker.code,
        unix_time=worker.ended_at,
        stopped_with=worker.stopped_with,
        error=error,
        error_file=placed.error_file if placed.error_file and os.path.exists(placed.error_file) else None,
        stderr_tail=seen,
        stdout_path=placed.stdout.path,
        stderr_path=placed.stderr.path,
        oom_kill=oom_kills.explain() if may_be_oom else None,
        failed_first=raised or causes.failed_before(error, worker.stopped_at),
        forwarded=-worker.code in worker.forwarded,
    )
    return replace(end, full_disk=_full_disk(placed)) if causes.left_no_message(end) else end


def read_stderr(placed: RankStreams, tail: str | None) -> str:
    """The end of a worker's standard error: from its log file, or `tail` from the relay."""
    return read_tail(placed.stderr.path) if placed.stderr.path else tail or ""


def _full_disk(placed: RankStreams) -> str | None:
    """A clause on the first of a worker's directories whose disk is full, so that its output may be missing."""
    written = [path for path in (placed.stderr.path, placed.stdout.path, placed.error_file) if path]
    for directory in dict.fromkeys([*map(os.path.dirname, written), tempfile.gettempdir()]):
        try:
            disk = os.statvfs(directory)
        except OSError:
            continue
        if not (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail):
            return f"no space is left on the disk of {directory}"
        if disk.f_files and not disk.f_favail:
            return f"no more files can be made on the disk of {directory} (no inodes are left)"
    return None
