"""Where each worker's output goes.

`plan_streams` is a pure function from the user's flags to one destination for each stream of each local rank. The
functions below it that touch the disk carry out the plan. The layout is torchrun's, because users' scripts rely on it:

    <run directory>/attempt_<N>/<local rank>/stdout.log, stderr.log, error.json
    <run directory>/attempt_<N>/filtered_stdout.log, filtered_stderr.log

where the run directory is `<log_dir>/<run id>_<random>`. Two things differ on purpose: an attempt's directory is never
emptied and used again, and a directory that the user did not ask for is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from string import Template
from typing import Literal

import msgspec
from msgspec.structs import replace

from dlrover_run.output.ring import TAIL_BYTES
from dlrover_run.spec import LogSpec, SpecError, Std

TEMP_PREFIX = "dlrover_run_"

LATEST = "latest"
"""The link in `--log-dir` to the directory of the run that started last."""

Where = Literal["inherit", "file", "null", "relay", "stderr"]


class Stream(msgspec.Struct, frozen=True):
    """The destination of one output stream of one worker.

    `inherit` is the launcher's own descriptor. `file` is `path`, written by the worker itself. `null` is /dev/null.
    `relay` is a pipe to the relay, which keeps the end of the stream and copies it to the console if `shown`: unchanged
    or, if several workers share the console, line by line. `stderr`, only for a standard output, is the worker's own
    standard error, wherever that goes.
    """

    where: Where
    path: str | None = None
    shown: bool = False


class RankStreams(msgspec.Struct, frozen=True):
    """One worker's streams. `error_file` is None if no file may be written; the worker's variable is then empty."""

    local_rank: int
    stdout: Stream
    stderr: Stream
    error_file: str | None


class Tee(msgspec.Struct, frozen=True):
    """A log file that is also shown: `path` is copied line by line, with a prefix, to our descriptor `out` (1 or 2).

    Lines that contain any of `needles` are also copied, with their prefix, to `filtered`; without needles there is no
    such file.
    """

    local_rank: int
    out: Literal[1, 2]
    path: str
    needles: tuple[str, ...] = ()
    filtered: str | None = None


class StreamPlan(msgspec.Struct, frozen=True):
    """All streams of one attempt. `directory` holds its files; None if there are none."""

    directory: str | None
    ranks: tuple[RankStreams, ...]
    tees: tuple[Tee, ...]


def next_free_attempt(run_dir: str | None, number: int) -> int:
    """The number of the next attempt without a directory: `number`, or the first free one after it.

    A restarted master that does not know this node's earlier rounds counts from 1 again.
    """
    while run_dir is not None and os.path.lexists(_attempt_directory(run_dir, number)):
        number += 1
    return number


def earlier_log(path: str) -> str | None:
    """The log file of the same worker in the last attempt before that of `path` which has one."""
    found = re.fullmatch(r"(.*/attempt_)(\d+)(/\d+/[^/]+)", path)
    if found is None:
        return None
    earlier = (f"{found[1]}{number}{found[3]}" for number in reversed(range(int(found[2]))))
    return next(filter(os.path.exists, earlier), None)


def _attempt_directory(run_dir: str, number: int) -> str:
    return os.path.join(run_dir, f"attempt_{number}")


def plan_streams(logs: LogSpec, run_dir: str | None, attempt: int, local_ranks: int) -> StreamPlan:
    """Decide the destination of every stream of `local_ranks` workers in one attempt.

    If `run_dir` is None or `log_dir` is /dev/null, no file may be written. Redirects, tees and the choice of shown
    ranks then have no effect, as in torchrun: every worker writes to the console.
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
        # A hidden standard error still goes through the relay, so that the failure report can quote its end.
        stderr = Stream("file", stderr_log) if to_file & Std.ERR else Stream("relay", shown=shown)
        ranks.append(RankStreams(rank, stdout, stderr, os.path.join(own, "error.json")))
        if shown and logs.tee.of(rank) & Std.OUT:
            filtered = os.path.join(directory, "filtered_stdout.log") if logs.stdout_filters else None
            tees.append(Tee(rank, 1, stdout_log, logs.stdout_filters, filtered))
        if shown and logs.tee.of(rank) & Std.ERR:
            filtered = os.path.join(directory, "filtered_stderr.log") if logs.stderr_filters else None
            tees.append(Tee(rank, 2, stderr_log, logs.stderr_filters, filtered))
    return StreamPlan(directory, tuple(ranks), tuple(tees))


def line_prefix(template: str | None, role: str, rank: int, local_rank: int, hostname: str) -> str:
    """The prefix of each line; an unknown name in the template is kept as it is."""
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=hostname)


def shares_console(plan: StreamPlan) -> bool:
    """Whether several workers write to the console."""
    writers = {rank.local_rank for rank in plan.ranks if rank.stdout.where == "inherit" or rank.stderr.shown}
    return len(writers | {tee.local_rank for tee in plan.tees}) > 1


def route_through_relay(plan: StreamPlan, *, hidden: bool = False) -> StreamPlan:
    """The plan for a console that several workers share: inherited standard outputs go through the relay, which keeps
    lines whole. `print` writes a text and its newline separately, so lines would be joined otherwise. With `hidden`,
    as for a job whose output is searched, those that are written nowhere go there too."""
    routed = {"inherit": Stream("relay", shown=True)}
    if hidden:
        routed["null"] = Stream("relay")
    ranks = [replace(rank, stdout=routed.get(rank.stdout.where, rank.stdout)) for rank in plan.ranks]
    return replace(plan, ranks=tuple(ranks))


def merge_stdout_into_stderr(plan: StreamPlan) -> StreamPlan:
    """The plan for a console that is both standard output and standard error, as after `2>&1` or on a terminal.

    The order of a worker's writes to the two is then visible, such as a message before its traceback. Only a single
    path from the worker to the console keeps it, so standard output takes that of standard error.
    """
    ranks = [
        replace(rank, stdout=Stream("stderr"))
        if rank.stdout.where in ("inherit", "relay") and rank.stderr.where == "relay" and rank.stderr.shown
        else rank
        for rank in plan.ranks
    ]
    return replace(plan, ranks=tuple(ranks))


class RunDir(msgspec.Struct, frozen=True):
    """The directory of one run. `path` None: there is none. `keep` False: the launcher removes it at the end."""

    path: str | None
    keep: bool


def create_run_dir(logs: LogSpec, run_id: str) -> RunDir:
    """Create the run's directory if the user asked for logs, so that it is kept; else choose a name (`make_temp_dir`).

    A machine without a writable disk runs jobs all the same, without error files. Raises SpecError if the user asked
    for logs and they cannot be written.
    """
    if logs.plugin is not None:
        return RunDir(None, keep=True)  # The plugin creates its own directories, in `log_dir` or elsewhere.
    if logs.log_dir == os.devnull:
        return RunDir(None, keep=False)
    if not logs.log_dir:
        keep = logs.redirects.any() or logs.tee.any()
        try:
            if not keep:
                # The agent creates it once its relay will remove it: a watchdog that is killed now leaves nothing.
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
        # A run id may be any text, but a directory's name is one path component.
        path = tempfile.mkdtemp(prefix=run_id.replace("/", "_") + "_", dir=base)
    except (FileExistsError, NotADirectoryError):
        raise SpecError(f"--log-dir: {base} is not a directory; name a directory, or remove that file") from None
    except OSError as error:
        raise SpecError(f"--log-dir: cannot make a directory in {base} ({error.strerror}); name another one") from None
    _link_latest(base, os.path.basename(path))
    return RunDir(path, keep=True)


def _link_latest(base: str, name: str) -> None:
    """Make the link `latest`, beside the run's directory, point to it. Jobs may share the directory above: the one that
    started last has the link, which is replaced atomically. A `latest` that is no link is not the launcher's, and not
    every file system has links."""
    link = os.path.join(base, LATEST)
    if os.path.lexists(link) and not os.path.islink(link):
        return
    # Unique, because the run's name is.
    partial = os.path.join(base, f".{LATEST}.{name}")
    try:
        os.symlink(name, partial)
        os.replace(partial, link)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def unused_temp_dir() -> str:
    """The name of a temporary directory that does not exist. Raises OSError if there is no temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"{TEMP_PREFIX}{os.urandom(8).hex()}")


def make_temp_dir(run_dir: RunDir, remove_at_end: Callable[[str], None]) -> RunDir:
    """Create the directory of a run that is not kept, after `remove_at_end` was called with its path. Returns a run
    without a directory if it cannot be created."""
    if run_dir.path is None or run_dir.keep:
        return run_dir
    remove_at_end(run_dir.path)
    try:
        os.mkdir(run_dir.path, 0o700)
    except OSError:
        return RunDir(None, keep=False)
    return run_dir


def make_dirs(plan: StreamPlan) -> None:
    """Create the directories of one attempt.

    Raises SpecError if the attempt's directory exists already: the logs in it are not overwritten.
    """
    if plan.directory is None:
        return
    try:
        # A cleanup of /tmp may have removed the run's directory during a job of weeks.
        os.makedirs(plan.directory)
    except FileExistsError:
        raise SpecError(f"{plan.directory} exists already and its logs are not overwritten; move it away") from None
    for streams in plan.ranks:
        os.mkdir(os.path.join(plan.directory, str(streams.local_rank)))


def open_output(stream: Stream, inherited: int = -1) -> int:
    """A new close-on-exec descriptor for a `file` or `null` stream, or `inherited` for another.

    The file is opened in append mode, so that children of the worker that write to the same file overwrite nothing.
    """
    if stream.where == "null":
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    if stream.where == "file" and stream.path is not None:
        return os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    return inherited


def remove_run_dir(run_dir: RunDir) -> None:
    """Remove what the user did not ask for: the whole directory, or the empty directories in one that is kept.

    Watchdog, agent and relay all do this, because any of them may have been killed.
    """
    if run_dir.path is None:
        return
    if run_dir.keep:
        prune_empty(run_dir.path)
        _drop_link(run_dir.path)
    else:
        shutil.rmtree(run_dir.path, ignore_errors=True)


def _drop_link(run_dir: str) -> None:
    """Remove `latest` if it points to a directory that was removed."""
    base, name = os.path.split(run_dir)
    link = os.path.join(base, LATEST)
    with contextlib.suppress(OSError):  # There is no link.
        if not os.path.lexists(run_dir) and os.readlink(link) == name:
            os.unlink(link)


def prune_empty(path: str) -> None:
    """Remove the empty directories under `path`, and `path` itself when nothing is left in it."""
    for directory, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):  # Not empty, or already removed: both are fine.
            os.rmdir(directory)


def tail_text(data: bytes, cut: bool) -> str:
    """The end of an output as text; if its beginning was `cut` off, it starts with a whole line if it has one."""
    if cut:
        _, newline, rest = data.partition(b"\n")
        if newline and rest:
            data = rest
    return data.decode(errors="replace")


def read_tail(path: str, limit: int = TAIL_BYTES) -> str:
    """The last `limit` bytes of a log file as text, starting with a whole line; empty if it cannot be read."""
    try:
        with open(path, "rb") as log:
            start = max(0, log.seek(0, os.SEEK_END) - limit)
            log.seek(start)
            return tail_text(log.read(limit), cut=start > 0)
    except OSError:
        return ""
