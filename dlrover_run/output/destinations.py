"""Where each worker's output goes: pure functions from the user's flags to one destination for each stream.

There are five destinations, and no sixth: `Inherited`, `LogFile`, `Nowhere`, `Relayed`, `SameAsStderr`. `plan_streams`
chooses them from the flags (a torchrun plug-in in its place: `torchrun/logs_specs`), and `share_console` changes those
that lead to the console where the console asks for it. `opening` carries the plan out.
"""

from __future__ import annotations

import os
from string import Template
from typing import Literal

import msgspec
from msgspec.structs import replace

from dlrover_run.output.run_directory import attempt_directory
from dlrover_run.spec import LogSpec, Std


class Inherited(msgspec.Struct, frozen=True):
    """The launcher's own descriptor."""


class LogFile(msgspec.Struct, frozen=True):
    """The file `path`, written by the worker itself."""

    path: str


class Nowhere(msgspec.Struct, frozen=True):
    """/dev/null."""


class Relayed(msgspec.Struct, frozen=True):
    """A pipe to the relay, which keeps the end of the stream. If `shown` it copies it to the console: unchanged or, if
    several workers share the console, line by line."""

    shown: bool


class SameAsStderr(msgspec.Struct, frozen=True):
    """Only for a standard output: the worker's own standard error, wherever that goes."""


Destination = Inherited | LogFile | Nowhere | Relayed | SameAsStderr


def log_path(destination: Destination) -> str | None:
    """The file that a worker writes; None for another destination. Called for the failure report, once a worker has
    ended, and for the paths of a placement."""
    return destination.path if isinstance(destination, LogFile) else None


class RankStreams(msgspec.Struct, frozen=True):
    """One worker's streams. `error_file` is None if no file may be written; the worker's variable is then empty."""

    local_rank: int
    stdout: Destination
    stderr: Destination
    error_file: str | None

    @property
    def log_paths(self) -> list[str]:
        """The files that the worker writes, each once."""
        paths = (log_path(self.stdout), log_path(self.stderr))
        return list(dict.fromkeys(path for path in paths if path is not None))


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
    """All streams of one attempt. `directory` holds its files; None if there are none. `shared`: several workers write
    to the console."""

    directory: str | None
    ranks: tuple[RankStreams, ...]
    tees: tuple[Tee, ...]

    @property
    def shared(self) -> bool:
        writers = {one.local_rank for one in self.ranks if isinstance(one.stdout, Inherited) or _is_shown(one.stderr)}
        return len(writers | {tee.local_rank for tee in self.tees}) > 1


def _is_shown(destination: Destination) -> bool:
    return isinstance(destination, Relayed) and destination.shown


def plan_streams(logs: LogSpec, run_dir: str | None, attempt: int, local_ranks: int) -> StreamPlan:
    """Decide the destination of every stream of `local_ranks` workers in one attempt.

    If `run_dir` is None or `log_dir` is /dev/null, no file may be written. Redirects, tees and the choice of shown
    ranks then have no effect, as in torchrun: every worker writes to the console.
    """
    if run_dir is None or logs.log_dir == os.devnull:
        unnamed = (RankStreams(rank, Inherited(), Relayed(shown=True), None) for rank in range(local_ranks))
        return StreamPlan(None, tuple(unnamed), ())
    directory = attempt_directory(run_dir, attempt)
    ranks: list[RankStreams] = []
    tees: list[Tee] = []
    for rank in range(local_ranks):
        own = os.path.join(directory, str(rank))
        # An empty set of ranks hides nothing, as in torchrun.
        shown = not logs.shown_ranks or rank in logs.shown_ranks
        to_file, shown_file = logs.redirects.of(rank) | logs.tee.of(rank), logs.tee.of(rank) if shown else Std.NONE
        stdout_log, stderr_log = os.path.join(own, "stdout.log"), os.path.join(own, "stderr.log")
        unfiled = Inherited() if shown else Nowhere()
        stdout = LogFile(stdout_log) if to_file & Std.OUT else unfiled
        # A hidden standard error still goes through the relay, so that the failure report can quote its end.
        stderr = LogFile(stderr_log) if to_file & Std.ERR else Relayed(shown=shown)
        ranks.append(RankStreams(rank, stdout, stderr, os.path.join(own, "error.json")))
        if shown_file & Std.OUT:
            filtered = os.path.join(directory, "filtered_stdout.log") if logs.stdout_filters else None
            tees.append(Tee(rank, 1, stdout_log, logs.stdout_filters, filtered))
        if shown_file & Std.ERR:
            filtered = os.path.join(directory, "filtered_stderr.log") if logs.stderr_filters else None
            tees.append(Tee(rank, 2, stderr_log, logs.stderr_filters, filtered))
    return StreamPlan(directory, tuple(ranks), tuple(tees))


def share_console(plan: StreamPlan, *, one_place: bool, prefixed: bool = False, searched: bool = False) -> StreamPlan:
    """The plan for the console that there is.

    Where several workers write to it, and where their lines are `prefixed` or `searched` for steps, standard outputs
    that would be inherited go through the relay, which keeps lines whole: `print` writes a text and its newline
    separately, so lines would be joined otherwise. A job whose output is searched also has those relayed that go
    nowhere.

    `one_place`: the console is both standard output and standard error, as after `2>&1` or on a terminal. The order of
    a worker's writes to the two is then visible, such as a message before its traceback. Only a single path from the
    worker to the console keeps it, so standard output takes that of standard error.
    """
    by_line = prefixed or searched or plan.shared

    def stdout(streams: RankStreams) -> Destination:
        chosen = streams.stdout
        if by_line and isinstance(chosen, Inherited):
            chosen = Relayed(shown=True)
        elif searched and isinstance(chosen, Nowhere):
            chosen = Relayed(shown=False)
        if one_place and isinstance(chosen, Inherited | Relayed) and _is_shown(streams.stderr):
            return SameAsStderr()
        return chosen

    return replace(plan, ranks=tuple(replace(one, stdout=stdout(one)) for one in plan.ranks))


def line_prefix(template: str | None, role: str, rank: int, local_rank: int, hostname: str) -> str:
    """The prefix of each line; an unknown name in the template is kept as it is."""
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=hostname)
