"""What the user asked for, validated and frozen.

Everything below the command line takes a `JobSpec` and nothing else, so that a job means the same whether it came from
flags, from `PET_*` variables or from Python.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import Literal

from dlrover_run.coordination.rules import Rules


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
    `shown_ranks` None shows every local rank on the console. `prefixed` puts the prefix before every line that a worker
    has on the console, also where no log file is written. `temp_dir` is where what is not kept goes, made by this run
    and removed at its end; None for a directory of its own finding.
    """

    log_dir: str | None = None
    redirects: StreamMap = field(default_factory=StreamMap)
    tee: StreamMap = field(default_factory=StreamMap)
    shown_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    prefixed: bool = False
    temp_dir: str | None = None
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
class TlsSpec:
    """Files (PEM) with which a connection to the master, or to etcd, is encrypted.

    `ca` signs the other side's certificate; `cert` and `key` are this side's own. A master that has a `ca` lets nobody
    in without a certificate that it signed.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class MasterSpec:
    """Where the built-in master of a job is, and how this node proves that it belongs to the job.

    `is_host` says whether this node runs the master when there is none yet; None finds out whether `host` is one of
    this machine's own addresses. `bind` is the address that a master of ours listens on, None for the endpoint's own.
    `state_dir` is where a master of ours keeps its journals. `token` is the job's secret, empty for none;
    `auth_required` refuses to run without one.
    """

    host: str
    port: int
    is_host: bool | None = None
    bind: str | None = None
    state_dir: str | None = None
    token: str = field(default="", repr=False)
    auth_required: bool = False
    tls: TlsSpec | None = None


@dataclass(frozen=True)
class EtcdSpec:
    """Where the members of an etcd cluster are, (host, port) each, and how this node proves that it may use it.

    All keys of ours are below `prefix`. `tls` None speaks plain HTTP/2; without a `ca` the system's authorities count.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str = "/dlrover-run"
    user: str = ""
    password: str = field(default="", repr=False)
    tls: TlsSpec | None = None


@dataclass(frozen=True)
class LocalSpec:
    """Several nodes on this machine: `least` of them at once, and up to `most`, one more each `join_after` seconds.

    `restarts` is how many nodes in all may be replaced. `isolated` gives each node a network namespace of its own.
    """

    least: int
    most: int
    restarts: int = 3
    isolated: bool = False
    join_after: float = 30.0


@dataclass(frozen=True)
class JobSpec:
    """One job as one node sees it.

    `backend` says where the records of coordination live: `memory` for one node, `static` when ranks are given by
    flags, `master` when `master` says where the nodes meet, `etcd` when they meet in the cluster that `etcd` names.
    `rules` are this node's idea of the job; those of the first node that joins hold. `node_rank` is a rank that
    somebody gave this node by hand: with `static` it is its rank, else a wish. `node_id` is a name that a cluster
    manager gave it, empty for one of its own making. `local_addr` is the address that this node advertises, None for
    one that is found out. `gpu_each` says that the workers were counted as GPUs, so that each of them needs one.
    `signals` are passed on to the workers and end the job, `forward_signals` are passed on and training continues.
    `local` asks for all nodes of the job here; this spec is then what they have in common. `console_name` is what this
    node is called on a console that it shares with others, empty where it has one to itself.
    """

    entrypoint: Entrypoint
    run_id: str
    workers_per_node: int = 1
    rules: Rules = field(default_factory=Rules)
    backend: Literal["memory", "static", "master", "etcd"] = "memory"
    master: MasterSpec | None = None
    etcd: EtcdSpec | None = None
    node_rank: int | None = None
    node_id: str = ""
    local_addr: str | None = None
    role: str = "default"
    start_method: Literal["spawn", "forkserver"] = "spawn"
    preload: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    forward_signals: tuple[signal.Signals, ...] = ()
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    virtual_local_rank: bool = False
    gpu_each: bool = False
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    compat_exit_codes: bool = False
    event_log: Literal["null", "console"] = "null"
    logs: LogSpec = field(default_factory=LogSpec)
    local: LocalSpec | None = None
    console_name: str = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What only those processes may know that speak to a master or to etcd."""
        found = (self.master.token if self.master else "", self.etcd.password if self.etcd else "")
        return tuple(filter(None, found))

    @property
    def alone(self) -> bool:
        """Whether the job has one node only."""
        return self.backend == "memory" or (self.backend == "static" and self.rules.most == 1)
