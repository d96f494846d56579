"""The configuration of a launch from Python, with the names of `torch.distributed.launcher.api`, converted to flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover_run.spec import LogSpec, SpecError, Std, StreamMap


@dataclass
class LaunchConfig:
    """The fields of torch's class of this name, with the same meanings.

    The default of `rdzv_backend` is empty, as one node needs no rendezvous, and not torch's `etcd`, which needs a
    server. `rdzv_configs` has the keys of `--rdzv-conf`. `logs_specs` takes our `LogsSpecs` or torch's
    `DefaultLogsSpecs`, `numa_options` the name of a binding or torch's `NumaOptions`. `metrics_cfg` has no effect.
    `preload` and the fields after it are not torch's; they mean the flags of the same names. `network_check` is a
    switch, or "always" (or "once").
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
    hook: Sequence[str] = ()
    hook_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout

    def flags(self) -> list[str]:
        """The flags of an equivalent command line. Raises SpecError for a value that no flag can express."""
        given: dict[str, object] = {
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "nproc-per-node": self.nproc_per_node,
            "rdzv-id": self.run_id,
            "role": self.role,
            "rdzv-endpoint": self.rdzv_endpoint,
            "rdzv-backend": self.rdzv_backend,
            "rdzv-conf": _conf(self.rdzv_configs),
            "node-rank": self.rdzv_configs.get("rank"),
            "max-restarts": self.max_restarts,
            "monitor-interval": self.monitor_interval,
            "start-method": self.start_method,
            "local-addr": self.local_addr,
            "event-log-handler": self.event_log_handler,
            "numa-binding": _binding_name(self.numa_options),
            "signals-to-handle": self.signals_to_handle,
            "forward-signals": self.forward_signals or None,
            "shutdown-timeout": self.shutdown_timeout,
            "preload": _comma_list(self.preload),
            # A program in Python has found out where it runs.
            "cluster": "none",
            "progress": self.progress if self.progress != "auto" else None,
            "progress-regex": self.progress_regex or None,
            "stall-action": self.stall_action if self.stall_action != "report" else None,
            "stall-timeout": self.stall_timeout,
            "checkpoint-memory": self.checkpoint_memory,
            "hook-timeout": self.hook_timeout,
            "spares": self.spares or None,
            "node-unit": self.node_unit,
            "network-check": "once" if self.network_check is True else self.network_check or None,
            "straggler-threshold": self.straggler_threshold,
        }
        switches = {
            "virtual-local-rank": self.virtual_local_rank,
            "comm-perf-test": self.comm_perf_test,
            "exclude-straggler": self.exclude_straggler,
        }
        flags = [f"--{name}={value}" for name, value in given.items() if value not in (None, "")]
        hooks = [f"--hook={hook}" for hook in self.hook]
        return [*flags, *hooks, *(f"--{name}" for name, on in switches.items() if on)]


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


def _comma_list(items: Sequence[str] | None) -> str:
    return ",".join(item.replace(",", ",,") for item in items or ())
