"""The configuration of a launch from Python, with the names of `torch.distributed.launcher.api`, converted to flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlrover_run.spec import LogSpec, SpecError, Std, StreamMap

if TYPE_CHECKING:
    from dlrover_run.command_line.flag import Flag


@dataclass
class LaunchConfig:
    """The fields of torch's class of this name, with the same meanings.

    The default of `rdzv_backend` is empty, as one node needs no rendezvous, and not torch's `etcd`, which needs a
    server. `rdzv_configs` has the keys of `--rdzv-conf`. `logs_specs` takes our `LogsSpecs` or torch's
    `DefaultLogsSpecs`, `numa_options` the name of a binding or torch's `NumaOptions`. `metrics_cfg` has no effect.
    `preload` and the fields after it are not torch's: each means the flag of its name and has its default. A switch may
    be a bool, and so may a flag whose value is optional; a list is a flag that is given once for each item.

    The fields are written out, so that editors and type checkers know them. A test holds them to the table of flags.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    preload: list[str] | None = None
    forward_signals: str = ""
    spares: int = 0
    node_unit: int = 1
    network_check: bool | str = False
    comm_perf_test: bool = False
    exclude_straggler: bool = False
    straggler_threshold: float | None = None
    progress: str = "auto"
    progress_regex: str = ""
    stall_action: str = "report"
    stall_timeout: float | None = None
    checkpoint_memory: str | None = None
    job_cache: str | None = None
    warm_workers: bool = False
    hook: Sequence[str] = ()
    hook_timeout: float | None = None
    autoscale: bool | str = False
    scale_command: str = ""
    experiments: str = "off"
    survivors: str = "restart"
    reconfigure_timeout: float | None = None
    preemption_notice: str = ""
    exit_codes: str = "precise"
    journal: str | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout

    def flags(self) -> list[str]:
        """The flags of an equivalent command line. Raises SpecError for a value that no flag can express."""
        # Imported only here: a program that only imports this module does not wait for the table.
        from dlrover_run.command_line.flags import TABLE

        values: dict[str, object] = {
            **{name: value for name, value in vars(self).items() if name not in _LOG_FIELDS},
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "rdzv_id": self.run_id,
            "rdzv_conf": _conf(self.rdzv_configs),
            "node_rank": self.rdzv_configs.get("rank"),
            "numa_binding": _binding_name(self.numa_options),
            # A program in Python has found out where it runs.
            "cluster": "none",
        }
        return [text for flag in TABLE if flag.dest in values for text in _given(flag, values[flag.dest])]


_LOG_FIELDS = frozenset(
    {"logs_specs", "log_line_prefix_template", "duplicate_stdout_filters", "duplicate_stderr_filters"}
)
"""The fields of which `log_spec` makes the `LogSpec`, without a flag."""


def _given(flag: Flag, value: object) -> list[str]:
    """The words of a command line that give a flag this value; none for its default."""
    if isinstance(value, bool):
        word = f"--{flag.name}={flag.const}" if flag.const else f"--{flag.name}"
        return [word] if value else []
    items = value if isinstance(value, list | tuple) else [value]
    return [f"--{flag.name}={item}" for item in items if item not in (None, "") and str(item) != flag.default]


def _conf(configs: Mapping[str, Any]) -> str:
    """The text of `--rdzv-conf`, without None values and without the rank, which has its own flag."""
    texts = {key: str(value) for key, value in configs.items() if key != "rank" and value is not None}
    for key, value in texts.items():
        if "," in value:
            raise SpecError(f"rdzv_configs: the value of {key!r} contains a comma, which is not allowed: remove it.")
    return ",".join(f"{key}={value}" for key, value in texts.items())


@dataclass(frozen=True)
class LogsSpecs:
    """Where the output of the ranks goes, with the arguments of torch's `DefaultLogsSpecs`: one `Std` for all ranks, or
    a mapping from rank to `Std`."""

    log_dir: str | None = None
    redirects: int | Mapping[int, int] = Std.NONE
    tee: int | Mapping[int, int] = Std.NONE
    local_ranks_filter: Collection[int] | None = None


def log_spec(config: LaunchConfig) -> LogSpec:
    """The `LogSpec` of a configuration. Raises SpecError for a `logs_specs` of another type."""
    given = config.logs_specs or LogsSpecs()
    if not isinstance(given, LogsSpecs):
        # torch's class stores its arguments in these attributes and has no public ones.
        names = ("_root_log_dir", "_redirects", "_tee", "_local_ranks_filter")
        if not all(hasattr(given, name) for name in names):
            raise SpecError(f"logs_specs: {type(given).__name__} is not supported: give LogsSpecs or DefaultLogsSpecs.")
        given = LogsSpecs(*(getattr(given, name) for name in names))
    return LogSpec(
        log_dir=given.log_dir,
        redirects=_stream_map(given.redirects),
        tee=_stream_map(given.tee),
        shown_ranks=frozenset(given.local_ranks_filter) if given.local_ranks_filter else None,
        stdout_filters=tuple(config.duplicate_stdout_filters or ()),
        stderr_filters=tuple(config.duplicate_stderr_filters or ()),
        prefix_template=config.log_line_prefix_template,
    )


def _stream_map(value: int | Mapping[int, int]) -> StreamMap:
    if isinstance(value, Mapping):
        return StreamMap(by_rank={rank: Std(int(streams)) for rank, streams in value.items()})
    return StreamMap(default=Std(int(value)))


def _binding_name(options: Any) -> str | None:
    """`NumaOptions(affinity_mode=AffinityMode.NODE)` and the plain "node" name the same binding."""
    mode = getattr(options, "affinity_mode", options)
    return None if mode is None else str(getattr(mode, "value", mode))
