"""How a worker has ended: from its code, its output, its error file and the kernel's counters."""

from __future__ import annotations

import os

from msgspec.structs import replace

from dlrover_run.coordination.records.bounds import MAX_TRACE, MAX_WHAT
from dlrover_run.events.records import WorkerExited, WorkerFailed
from dlrover_run.failures import causes
from dlrover_run.failures.error_file import read_error_file
from dlrover_run.failures.guard import guarded
from dlrover_run.failures.oom_kills import OomKillCounters
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.destinations import RankStreams, log_path
from dlrover_run.output.ring import read_log_tail
from dlrover_run.workers.specs import Worker


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
    end = WorkerExit(
        rank=worker.spec.rank,
        local_rank=worker.spec.local_rank,
        pid=worker.pid,
        code=worker.code,
        unix_time=worker.ended_at,
        stopped_with=worker.stopped_with,
        stdout_path=log_path(placed.stdout),
        stderr_path=log_path(placed.stderr),
        failed_first=raised,
        forwarded=-worker.code in worker.forwarded,
    )
    return guarded(f"the end of rank {end.rank}", lambda: _explain(end, worker, placed, tail, oom_kills), end)


def _explain(
    end: WorkerExit, worker: Worker, placed: RankStreams, tail: str | None, oom_kills: OomKillCounters
) -> WorkerExit:
    """The end with what is read and looked up to explain it. One explanation that fails does not take the others."""
    seen = guarded("the end of the output", lambda: read_stderr(placed, tail), "")
    end = replace(end, stderr_tail=seen)
    if (path := placed.error_file) is not None:
        error = guarded("the error file", lambda: read_error_file(path), None)
        found = path if os.path.exists(path) else None
        failed_first = end.failed_first or causes.failed_before(error, worker.stopped_at)
        end = replace(end, error=error, error_file=found, failed_first=failed_first)
    if worker.stopped_with is None and causes.may_be_oom_kill(end.code, seen):
        end = replace(end, oom_kill=guarded("the out-of-memory kills", lambda: oom_kills.explain(end.pid), None))
    if causes.left_no_message(end):
        end = replace(end, full_disk=guarded("the full disks", lambda: _full_disk(placed), None))
    return end


def read_stderr(placed: RankStreams, tail: str | None) -> str:
    """The end of a worker's standard error: from its log file, or `tail` from the relay."""
    path = log_path(placed.stderr)
    return read_log_tail(path) if path is not None else tail or ""


def _full_disk(placed: RankStreams) -> str | None:
    """A clause on the first of a worker's directories whose disk is full, so that its output may be missing."""
    # Only a worker that has failed without a message needs it.
    from dlrover_run.devices.disks import disk_space

    written = [*placed.log_paths, *([placed.error_file] if placed.error_file else [])]
    for directory in dict.fromkeys([*map(os.path.dirname, written), *_temp_dirs()]):
        try:
            space = disk_space(os.statvfs(directory))
        except OSError:
            continue
        if not space.free:
            return f"no space is left on the disk of {directory}"
        if space.free_files == 0:
            return f"no more files can be made on the disk of {directory} (no inodes are left)"
    return None


def _temp_dirs() -> list[str]:
    """The directory for temporary files; it need not be writable.

    `tempfile.gettempdir` looks for a writable one by writing, and raises where it finds none.
    """
    named = next((value for name in ("TMPDIR", "TEMP", "TMP") if (value := os.environ.get(name))), "/tmp")
    return [os.path.abspath(named)] if os.access(named, os.W_OK) else []


def exit_event(worker: Worker, round_: int, since: float | None) -> WorkerExited:
    """The event of a worker that has ended in a round; `since` is when its script was over, None if not known."""
    return WorkerExited(
        round=round_,
        rank=worker.spec.rank,
        local_rank=worker.spec.local_rank,
        since=since,
        pid=worker.pid,
        code=worker.code or 0,
        stopped_with="" if worker.stopped_with is None else worker.stopped_with.name,
        peak_memory=worker.peak_memory,
    )


def failure_event(root: WorkerExit, round_: int) -> WorkerFailed:
    """The event of the failure that is the root cause in a round."""
    return WorkerFailed(
        round=round_,
        rank=root.rank,
        local_rank=root.local_rank,
        pid=root.pid,
        code=root.code,
        cause=causes.cause_of(root),
        what=causes.describe_exit(root)[:MAX_WHAT],
        trace="\n".join(causes.trace_lines(root))[-MAX_TRACE:],
    )
