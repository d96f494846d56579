"""What the user asked for, validated and frozen.

Everything below the command line takes a `JobSpec` and nothing else, so that a job means the same whether it came from
flags, from `PET_*` variables or from Python.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import Literal


class SpecError(ValueError):
    """The user asked for something that cannot be done; the message is one sentence fit to print as it is."""


class Std(enum.IntFlag):
    """Which of a worker's output streams a flag speaks of."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class StreamMap:
    """A stream choice for each local rank: `default` for all, or only the ranks named in `by_rank`.

    torchrun's grammar: `3` is every rank; `0:1,10:2` names ranks, and a rank that is not named gets nothing.
    """

    default: Std = Std.NONE
    by_rank: dict[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        """The streams chosen for one local rank."""
        return self.by_rank.get(local_rank, self.default)

    def any(self) -> bool:
        """Whether any rank has a stream chosen."""
        return bool(self.default) or any(self.by_rank.values())


@dataclass(frozen=True)
class LogSpec:
    """Where the workers' output goes.

    `log_dir` None means no directory was asked for; `/dev/null` means that no file may be written at all.
    `shown_ranks` None shows every local rank on the console.
    """

    log_dir: str | None = None
    redirects: StreamMap = field(default_factory=StreamMap)
    tee: StreamMap = field(default_factory=StreamMap)
    shown_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    plugin: str | None = None


EntrypointKind = Literal["script", "module", "program", "run_path", "function"]


@dataclass(frozen=True)
class Entrypoint:
    """What each worker runs.

    `target` is a path (script, run_path), a dotted module name, a program, or the function's qualified name. `args`
    still hold their `${local_rank}` macros. `python` is the interpreter for everything but a program. `payload_fd` is
    the descriptor of the pickled function and its arguments, for `kind == "function"` only: it comes from the Python
    process that called `elastic_launch` on this machine, by inheritance, never over a network.
    """

    kind: EntrypointKind
    target: str
    args: tuple[str, ...] = ()
    python: str = ""
    payload_fd: int = -1


DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

SHUTDOWN_TIMEOUT = 30.0
"""Seconds that a worker gets to end after a signal before it is killed; `--shutdown-timeout` changes it (as
torchrun)."""


@dataclass(frozen=True)
class JobSpec:
    """One job as one node sees it.

    `backend` says where the records of coordination live: `memory` for one node, `static` when ranks are given by
    flags. `master_addr` and `master_port` are the store that `static` names; with `memory` every round has a port of
    its own. `local_addr` is the address that this node advertises.
    """

    entrypoint: Entrypoint
    run_id: str
    workers_per_node: int = 1
    nodes: int = 1
    node_rank: int = 0
    backend: Literal["memory", "static"] = "memory"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    local_addr: str | None = None
    max_restarts: int = 0
    role: str = "default"
    start_method: Literal["spawn", "forkserver"] = "spawn"
    preload: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    virtual_local_rank: bool = False
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    compat_exit_codes: bool = False
    event_log: Literal["null", "console"] = "null"
    logs: LogSpec = field(default_factory=LogSpec)
