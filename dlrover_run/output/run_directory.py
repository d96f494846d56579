"""The directory of a run and those of its attempts: created, found, and removed unless the user asked for them.

The layout is torchrun's, because users' scripts rely on it:

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
from collections.abc import Callable, Iterable

import msgspec

from dlrover_run.spec import LogSpec, SpecError

TEMP_PREFIX = "dlrover_run_"

LATEST = "latest"
"""The link in `--log-dir` to the directory of the run that started last."""


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


def next_free_attempt(run_dir: str | None, number: int) -> int:
    """The number of the next attempt without a directory: `number`, or the first free one after it.

    A restarted master that does not know this node's earlier rounds counts from 1 again.
    """
    while run_dir is not None and os.path.lexists(attempt_directory(run_dir, number)):
        number += 1
    return number


def earlier_log(path: str) -> str | None:
    """The log file of the same worker in the last attempt before that of `path` which has one."""
    found = re.fullmatch(r"(.*/attempt_)(\d+)(/\d+/[^/]+)", path)
    if found is None:
        return None
    earlier = (f"{found[1]}{number}{found[3]}" for number in reversed(range(int(found[2]))))
    return next(filter(os.path.exists, earlier), None)


def attempt_directory(run_dir: str, number: int) -> str:
    return os.path.join(run_dir, f"attempt_{number}")


def make_attempt_dirs(directory: str, local_ranks: Iterable[int]) -> None:
    """Create the directory of one attempt, with one for each local rank.

    Raises SpecError if the attempt's directory exists already: the logs in it are not overwritten.
    """
    try:
        # A cleanup of /tmp may have removed the run's directory during a job of weeks.
        os.makedirs(directory)
    except FileExistsError:
        raise SpecError(f"{directory} exists already and its logs are not overwritten; move it away") from None
    for local_rank in local_ranks:
        os.mkdir(os.path.join(directory, str(local_rank)))


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
