"""Where each worker's output goes: decided first, done afterwards.

`plan_streams` is a pure function from what the user asked for to one destination for each stream of each local rank.
The few functions below it that touch the disk only carry the plan out. The layout is torchrun's, since people's scripts
look for it:

    <run directory>/attempt_<N>/<local rank>/stdout.log, stderr.log, error.json
    <run directory>/attempt_<N>/filtered_stdout.log, filtered_stderr.log

where the run directory is `<log_dir>/<run id>_<random>`. Two things differ on purpose: an attempt's directory is never
emptied to be used again, and a directory that nobody asked for does not stay behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from string import Template
from typing import Literal

from dlrover_run.spec import LogSpec, SpecError, Std

TAIL_BYTES = 32 * 1024
"""How much of a stream's end the failure report may show."""

MAX_MESSAGE = 128 * 1024
"""Maximum bytes of a message between agent and relay, in either direction: a stream's end with its header fits."""

TEMP_PREFIX = "dlrover_run_"

LATEST = "latest"
"""The link in `--log-dir` to the directory of the run that began last."""

Where = Literal["inherit", "file", "null", "relay", "stderr"]


@dataclass(frozen=True)
class Stream:
    """The destination of one output stream of one worker.

    `inherit` is our own descriptor, untouched. `file` is `path`, written by the worker itself. `null` is /dev/null.
    `relay` is a pipe to the relay, which remembers the end of the stream and copies it to our console when `shown`, as
    it is or, where several workers share the console, line by line.
    `stderr`, for a standard output only, is the worker's own standard error, wherever that goes.
    """

    where: Where
    path: str | None = None
    shown: bool = False


@dataclass(frozen=True)
class RankStreams:
    """One worker's streams. `error_file` is None when no file may be written; the worker's variable is empty then."""

    local_rank: int
    stdout: Stream
    stderr: Stream
    error_file: str | None


@dataclass(frozen=True)
class Tee:
    """One log file that is also shown: `path` goes line by line, prefixed, to our descriptor `out` (1 or 2).

    Lines that contain any of `needles` also go, with their prefix, to `filtered`; without needles it is not made.
    """

    local_rank: int
    out: Literal[1, 2]
    path: str
    needles: tuple[str, ...] = ()
    filtered: str | None = None


@dataclass(frozen=True)
class StreamPlan:
    """All streams of one attempt. `directory` holds its files; None when there are none."""

    directory: str | None
    ranks: tuple[RankStreams, ...]
    tees: tuple[Tee, ...]


def next_free_attempt(run_dir: str | None, number: int) -> int:
    """The number of an attempt whose directory no earlier one has: `number`, or the next one that is free.

    A master that knows nothing of the rounds which this node has been through counts from 1 again.
    """
    while run_dir is not None and os.path.lexists(_attempt_directory(run_dir, number)):
        number += 1
    return number


def _attempt_directory(run_dir: str, number: int) -> str:
    return os.path.join(run_dir, f"attempt_{number}")


def plan_streams(logs: LogSpec, run_dir: str | None, attempt: int, local_ranks: int) -> StreamPlan:
    """Decide the destination of every stream of `local_ranks` workers in one attempt.

    `run_dir` None, or a `log_dir` of /dev/null, means that no file may be written. Redirects, tees and the choice of
    shown ranks are then without effect, as with torchrun: every worker writes to the console.
    """
    if run_dir is None or logs.log_dir == os.devnull:
        unnamed = tuple(
            RankStreams(rank, Stream("inherit"), Stream("relay", shown=True), None) for rank in range(local_ranks)
        )
        return StreamPlan(None, unnamed, ())
    directory = _attempt_directory(run_dir, attempt)
    ranks: list[RankStreams] = []
    tees: list[Tee] = []
    for rank in range(local_ranks):
        own = os.path.join(directory, str(rank))
        to_file = logs.redirects.of(rank) | logs.tee.of(rank)
        # An empty set of ranks hides nothing, as in torchrun.
        shown = not logs.shown_ranks or rank in logs.shown_ranks
        stdout_log, stderr_log = os.path.join(own, "stdout.log"), os.path.join(own, "stderr.log")
        unfiled = Stream("inherit" if shown else "null")
        stdout = Stream("file", stdout_log) if to_file & Std.OUT else unfiled
        # A hidden rank's standard error still passes the relay, so that the report can quote how the worker ended.
        stderr = Stream("file", stderr_log) if to_file & Std.ERR else Stream("relay", shown=shown)
        ranks.append(RankStreams(rank, stdout, stderr, os.path.join(own, "error.json")))
        if shown and logs.tee.of(rank) & Std.OUT:
            tees.append(_tee(rank, 1, stdout_log, logs.stdout_filters, os.path.join(directory, "filtered_stdout.log")))
        if shown and logs.tee.of(rank) & Std.ERR:
            tees.append(_tee(rank, 2, stderr_log, logs.stderr_filters, os.path.join(directory, "filtered_stderr.log")))
    return StreamPlan(directory, tuple(ranks), tuple(tees))


def _tee(rank: int, out: Literal[1, 2], path: str, needles: tuple[str, ...], filtered: str) -> Tee:
    return Tee(rank, out, path, needles, filtered if needles else None)


def line_prefix(template: str | None, role: str, rank: int, local_rank: int, hostname: str) -> str:
    """What stands before each prefixed line; a name in the template that we do not know stays as it is."""
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=hostname)


def shares_console(plan: StreamPlan) -> bool:
    """Whether several workers write to the console."""
    writers = {rank.local_rank for rank in plan.ranks if rank.stdout.where == "inherit" or rank.stderr.shown}
    return len(writers | {tee.local_rank for tee in plan.tees}) > 1


def route_through_relay(plan: StreamPlan) -> StreamPlan:
    """The plan for a console that several workers share: what would go there untouched takes the way through the relay,
    which keeps lines whole. `print` writes a text and its newline separately, so lines would be joined otherwise."""
    ranks = [
        replace(rank, stdout=Stream("relay", shown=True)) if rank.stdout.where == "inherit" else rank
        for rank in plan.ranks
    ]
    return replace(plan, ranks=tuple(ranks))


def merge_stdout_into_stderr(plan: StreamPlan) -> StreamPlan:
    """The plan for a console that takes standard output and standard error alike, as after `2>&1` or on a terminal.

    What a worker writes to the two then has an order that people rely on, such as a message before its traceback. Only
    one way from the worker to the console keeps it, so standard output takes the way that standard error has.
    """
    ranks = [
        replace(rank, stdout=Stream("stderr"))
        if rank.stdout.where in ("inherit", "relay") and rank.stderr.where == "relay" and rank.stderr.shown
        else rank
        for rank in plan.ranks
    ]
    return replace(plan, ranks=tuple(ranks))


@dataclass(frozen=True)
class RunDir:
    """The directory of one run. `path` None: there is none. `keep` False: the launcher removes what was written."""

    path: str | None
    keep: bool


def create_run_dir(logs: LogSpec, run_id: str) -> RunDir:
    """Make the run's directory if it is to be kept, because the user asked for logs, else name one (`make_temp_dir`).

    A machine on which nothing can be written runs jobs all the same, without error files. Raises `SpecError` when the
    user asked for logs and there is no place for them.
    """
    if logs.plugin is not None:
        return RunDir(None, keep=True)  # The plugin makes its own directories, in `log_dir` or wherever it likes.
    if logs.log_dir == os.devnull:
        return RunDir(None, keep=False)
    if not logs.log_dir:
        keep = logs.redirects.any() or logs.tee.any()
        try:
            if not keep:
                # The agent makes it, once its relay is to remove it: a watchdog that is killed now leaves nothing.
                return RunDir(logs.temp_dir or unused_temp_dir(), keep)
            return RunDir(tempfile.mkdtemp(prefix=TEMP_PREFIX), keep)
        except OSError as error:
            if not keep:
                return RunDir(None, keep=False)
            raise SpecError(
                f"--redirects, --tee: no temporary directory can be made ({error.strerror}); name one with --log-dir"
            ) from None
    base = os.path.abspath(logs.log_dir)
    try:
        os.makedirs(base, exist_ok=True)
        # A run id may be any text, but only one path component of it can be a directory's name.
        run_dir = RunDir(tempfile.mkdtemp(prefix=run_id.replace("/", "_") + "_", dir=base), keep=True)
    except (FileExistsError, NotADirectoryError):
        raise SpecError(f"--log-dir: {base} is not a directory; name a directory, or remove that file") from None
    except OSError as error:
        raise SpecError(f"--log-dir: cannot make a directory in {base} ({error.strerror}); name another one") from None
    _link_latest(run_dir.path)
    return run_dir


def _link_latest(run_dir: str | None) -> None:
    """Have `latest` beside the run's directory lead to it. Jobs may share the place: the last to begin has the link,
    which is replaced in one step. A `latest` that is no link is somebody else's, and not every disk has links."""
    assert run_dir is not None, "it has just been made"
    base, name = os.path.split(run_dir)
    link = os.path.join(base, LATEST)
    if os.path.lexists(link) and not os.path.islink(link):
        return
    # The run's name is its own, and so is this one.
    partial = os.path.join(base, f".{LATEST}.{name}")
    try:
        os.symlink(name, partial)
        os.replace(partial, link)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def unused_temp_dir() -> str:
    """The name of a temporary directory that may be made. Raises OSError where there is no room for one."""
    return os.path.join(tempfile.gettempdir(), f"{TEMP_PREFIX}{secrets.token_hex(8)}")


def make_temp_dir(run_dir: RunDir, remove_at_end: Callable[[str], None]) -> RunDir:
    """Make the directory of a run that is not kept, after whoever shall remove it has been told; the run without one
    where it cannot be made."""
    if run_dir.path is None or run_dir.keep:
        return run_dir
    remove_at_end(run_dir.path)
    try:
        os.mkdir(run_dir.path, 0o700)
    except OSError:
        return RunDir(None, keep=False)
    return run_dir


def make_dirs(plan: StreamPlan) -> None:
    """Make the directories of one attempt.

    Raises `SpecError` when the attempt's directory exists already: its logs belong to someone, so nothing is touched.
    """
    if plan.directory is None:
        return
    try:
        # Whoever cleans /tmp may have taken the run's directory from a job of weeks.
        os.makedirs(plan.directory)
    except FileExistsError:
        raise SpecError(f"{plan.directory} exists already and its logs are not overwritten; move it away") from None
    for streams in plan.ranks:
        os.mkdir(os.path.join(plan.directory, str(streams.local_rank)))


def open_output(stream: Stream) -> int | None:
    """A new close-on-exec descriptor for a `file` or `null` stream; None for one that is inherited or relayed.

    The file is opened to append, so that children of the worker that write to the same file overwrite nothing.
    """
    if stream.where == "null":
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    if stream.where == "file" and stream.path is not None:
        return os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    return None


def remove_run_dir(run_dir: RunDir) -> None:
    """Remove what the user did not ask for: the whole directory, or the empty directories in one that is kept.

    Watchdog, agent and relay all see to it, since any of them may have been killed.
    """
    if run_dir.path is None:
        return
    if run_dir.keep:
        prune_empty(run_dir.path)
        _drop_link(run_dir.path)
    else:
        shutil.rmtree(run_dir.path, ignore_errors=True)


def _drop_link(run_dir: str) -> None:
    """Remove the link to a run's directory that is gone."""
    base, name = os.path.split(run_dir)
    link = os.path.join(base, LATEST)
    with contextlib.suppress(OSError):  # There is no link.
        if not os.path.lexists(run_dir) and os.readlink(link) == name:
            os.unlink(link)


def prune_empty(path: str) -> None:
    """Remove the empty directories under `path`, and `path` itself when nothing is left in it."""
    for directory, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):  # Something is in it, or it is gone: both are as wanted.
            os.rmdir(directory)


def tail_text(data: bytes, cut: bool) -> str:
    """The end of an output as text; when its beginning was `cut` off, it starts with a whole line if there is one."""
    if cut:
        _, newline, rest = data.partition(b"\n")
        if newline and rest:
            data = rest
    return data.decode(errors="replace")


def read_tail(path: str, limit: int = TAIL_BYTES) -> str:
    """The last `limit` bytes of a log file as text, beginning with a whole line; empty when it cannot be read."""
    try:
        with open(path, "rb") as log:
            start = max(0, log.seek(0, os.SEEK_END) - limit)
            log.seek(start)
            return tail_text(log.read(limit), cut=start > 0)
    except OSError:
        return ""
