"""The job specification: what the user requested, validated and frozen.

Everything below the command line takes only a `JobSpec`, so that flags, `PET_*` variables and the Python API have the
same meaning.
"""

from __future__ import annotations

import enum
import signal
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.exit_reasons import ExitScheme
from dlrover_run.rendezvous.kinds import Alone, Rendezvous

Settings = TypeVar("Settings", bound=msgspec.Struct)


class SpecError(ValueError):
    """A request of the user that is invalid or impossible. The message is one sentence that is printed unchanged."""


class UsageError(SpecError):
    """The command line cannot be split into flags; the message is followed by a pointer to the help."""


class FlagValue(NamedTuple):
    """A text and its source, which messages name: the flag or the environment variable that gave it."""

    source: str
    text: str


class Std(enum.IntFlag):
    """The output streams of a worker that a flag selects."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class StreamMap(msgspec.Struct, frozen=True):
    """The selected streams of each local rank: `default` for all ranks, or `by_rank` for the named ones.

    torchrun's grammar: `3` is for every rank; `0:1,10:2` names ranks, and other ranks get nothing.
    """

    default: Std = Std.NONE
    by_rank: dict[int, Std] = msgspec.field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        return self.by_rank.get(local_rank, self.default)

    def any(self) -> bool:
        return bool(self.default) or any(self.by_rank.values())


class LogSpec(msgspec.Struct, frozen=True):
    """Where the output of the workers goes.

    `log_dir` is None if no directory is given; `/dev/null` means that no file may be written at all. `shown_ranks` None
    shows every local rank on the console. `prefixed` puts the prefix before every console line of a worker, also
    without a log file. `temp_dir` is the parent of the temporary directory, which this run creates and removes at its
    end; None for the system's.
    """

    log_dir: str | None = None
    redirects: StreamMap = msgspec.field(default_factory=StreamMap)
    tee: StreamMap = msgspec.field(default_factory=StreamMap)
    shown_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    prefixed: bool = False
    temp_dir: str | None = None
    plugin: str | None = None


EntrypointKind = Literal["script", "module", "program", "run_path", "function"]


class Entrypoint(msgspec.Struct, frozen=True):
    """The program that each worker runs.

    `target` is a path (script, run_path), a dotted module name, a program, or the function's qualified name. `args`
    still contain their `${local_rank}` macros. `python` is the interpreter, empty for a program. `payload_fd` is the
    descriptor of the pickled function and its arguments, for `kind == "function"` only: it is inherited from the Python
    process on this machine that called `elastic_launch`, and never comes over a network.
    """

    kind: EntrypointKind
    target: str
    args: tuple[str, ...] = ()
    python: str = ""
    payload_fd: int = -1


DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

SHUTDOWN_TIMEOUT = 30.0
"""Seconds from the stop signal to SIGKILL for a worker, as in torchrun; `--shutdown-timeout` changes it."""

DEFAULT_ROLE = "default"
"""The role of workers without `--role`, as in torchrun."""


PREEMPTION_MARGIN = 5.0
"""Seconds between the kill of workers that still run at the end of a preemption notice and the end itself, in which the
node leaves its job. At most half of the notice."""


class PreemptionNotice(msgspec.Struct, frozen=True):
    """The signal by which a scheduler announces that it will end this node, and the seconds between the two."""

    signal: signal.Signals
    seconds: float

    @property
    def grace(self) -> float:
        """The seconds that workers have."""
        return self.seconds - min(PREEMPTION_MARGIN, self.seconds / 2)


class JobSpec(msgspec.Struct, frozen=True):
    """One job as one node sees it.

    `rendezvous` is where the coordination state is kept. `rules` are this node's rules; those of the first node that
    joins apply to the job. `node_rank` is a rank that the user gave this node: its rank where flags give the ranks,
    otherwise a preferred rank. `node_id` is the name that a cluster manager gave this node, empty if the node
    generates one. `local_addr` is the address that this node advertises, None for one that is detected. `gpu_each`
    means that the workers were counted as GPUs, so that each of them needs one. `signals` are passed on to the workers
    and end the job, `forward_signals` are passed on and training continues, and the signal of `preemption` is passed on
    and this node leaves. `progress` says whether the steps of torch's optimizer are counted; the lines that match
    `progress_regex` count steps too, unless it is empty. `journal` is the
    directory of the event log, None for that of the run's log files, if the user has named one, and /dev/null for
    none. `settings` are those of the features of this node, by their names (see `settings_of`). If one
    of them starts all nodes of the job on this machine, this spec is what they have in common.
    `console_name` is the name of this node on a console that it shares with other nodes, empty if it has its own.
    `name` is what the user calls a job of one node, whose `run_id` is a fresh one as under torchrun, and `endpoint` the
    endpoint that was given for it in vain; both are empty for other jobs.
    """

    entrypoint: Entrypoint
    run_id: str
    workers_per_node: int = 1
    rules: JobRules = msgspec.field(default_factory=JobRules)
    rendezvous: Rendezvous = msgspec.field(default_factory=Alone)
    node_rank: int | None = None
    node_id: str = ""
    local_addr: str | None = None
    role: str = DEFAULT_ROLE
    start_method: Literal["spawn", "forkserver"] = "spawn"
    preload: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    forward_signals: tuple[signal.Signals, ...] = ()
    preemption: PreemptionNotice | None = None
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    virtual_local_rank: bool = False
    gpu_each: bool = False
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    exit_codes: ExitScheme = "precise"
    event_log: Literal["null", "console"] = "null"
    progress: Literal["auto", "optimizer"] = "auto"
    progress_regex: str = ""
    logs: LogSpec = msgspec.field(default_factory=LogSpec)
    journal: str | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    console_name: str = ""
    name: str = ""
    endpoint: str = ""

    def settings_of(self, feature: str, kind: type[Settings]) -> Settings:
        """What this node does for a feature, as its flags say: a record of this type, its defaults without any."""
        return msgspec.convert(self.settings.get(feature, {}), kind)

    @property
    def display_name(self) -> str:
        """What status, logs and messages call the job."""
        return self.name or self.run_id

    @property
    def handled_signals(self) -> tuple[signal.Signals, ...]:
        """Every signal that is passed on to the workers."""
        notice = () if self.preemption is None else (self.preemption.signal,)
        return (*self.signals, *self.forward_signals, *notice)

    @property
    def single_node(self) -> bool:
        return not self.rendezvous.coordinated and self.rules.max_nodes == 1

    @property
    def nodes_apart(self) -> bool:
        """Whether the job has several nodes that do not communicate."""
        return not self.rendezvous.coordinated and self.rules.max_nodes > 1
