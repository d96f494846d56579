"""The `dlrover-run` command line: flags and `PET_*` variables become a `JobSpec`; an error becomes one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import to_builtins

from dlrover_run import environment as cluster_environment
from dlrover_run.command_line import (
    access,
    checks,
    entry_point,
    ignored,
    rdzv_keys,
    values,
)
from dlrover_run.command_line.feature import Draft
from dlrover_run.command_line.flags import OF_FEATURES
from dlrover_run.command_line.parse import CommandLine, parse_argv
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.command_line.rendezvous import RendezvousArgs, resolve, resolve_local
from dlrover_run.command_line.rules import make_rules, resolve_size
from dlrover_run.command_line.script import check_script, check_standard_input, python_entrypoint, require_script
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.coordination.records.rules import MAX_NODES
from dlrover_run.exit_reasons import ExitScheme
from dlrover_run.spec import (
    SHUTDOWN_TIMEOUT,
    Entrypoint,
    FlagValue,
    JobSpec,
    LogSpec,
    SpecError,
    UsageError,
)
from dlrover_run.words.text import counted

if TYPE_CHECKING:
    from dlrover_run.environment.records import Context

CountWorkers = Callable[[str, Mapping[str, str]], int]


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    count_workers: CountWorkers | None = None,
    warn: Callable[[str], None] | None = None,
    inform: Callable[[str], None] | None = None,
    context: Context | None = None,
) -> JobSpec:
    """The job of a command line. Raises SpecError when it is not possible.

    `count_workers` counts devices for `--nproc-per-node=auto` and the like. `warn` takes sentences about flags without
    effect and other doubtful input, `inform` what was taken from the cluster; without them they are dropped. `context`
    is the machine that `--cluster` looks at, by default this one.
    """
    line = parse_argv(argv)
    if line.request is not None:
        raise UsageError(f"{line.request.spellings[0]} prints information and starts no job.")
    return _job(line, environ, count_workers or _count_workers, warn or _drop, inform or _drop, context)


def _drop(sentence: str) -> None:
    pass


def _job(
    line: CommandLine,
    environ: Mapping[str, str],
    count: CountWorkers,
    warn: Callable[[str], None],
    inform: Callable[[str], None],
    context: Context | None = None,
) -> JobSpec:
    flags = FlagValues(line.values, environ, DLROVER_RUN.by_dest)
    implying = (feature.implied for feature in OF_FEATURES.values() if feature.implied is not None)
    flags = flags.with_implied({name: value for imply in implying for name, value in imply(flags).items()})
    warnings: list[str] = []
    settings = _settings(flags, environ)
    nodes_here = _nodes_here(flags)
    found = None
    if cluster_environment.may_complete(environ, flags.choice("cluster"), hostfile=bool(flags.explicit("hostfile"))):
        from dlrover_run.command_line import cluster

        here = context or cluster.context_of(line, DLROVER_RUN)
        requested = cluster.requested_size(flags, environ, local=nodes_here)
        found = cluster.detect_job(flags, environ, requested, here, inform)
        if found:
            flags = flags.with_cluster(cluster.values_of(found))
    nodes, hosted = resolve_size(flags, environ, nodes_here, warnings.append)
    args = _rendezvous_args(flags, nodes, environ)
    if found:
        args = cluster.complete(args, found, here)
    resolve_place = resolve_local if nodes_here else resolve
    rendezvous = resolve_place(args, fresh_id=_fresh_id())
    conf = rdzv_keys.parse(*flags.get("rdzv_conf"))
    workers = values.worker_count(*hosted)
    if workers is None:
        workers = count(hosted.text, environ)
    logs = _logs(flags, environ)
    rules = make_rules(flags, nodes, rendezvous, conf)
    spares_given = flags.explicit("spares") is not None
    warnings += rendezvous.warnings
    warnings += ignored.rendezvous_warnings(rendezvous, conf, environ, spares_given=spares_given)
    draft = Draft(nodes, rendezvous, conf, warnings.append)
    for feature in OF_FEATURES.values():
        if feature.rules is not None:
            rules = feature.rules(flags, draft, rules)
    values.seconds(*flags.get("monitor_interval"), zero_allowed=False)
    preload = [name for value in flags.all("preload") for name in values.modules(*value)]
    local_addr = flags.get("local_addr")
    numa = flags.explicit("numa_binding") and flags.choice("numa_binding")
    weak: list[str] = []
    place = access.with_credentials(rendezvous, conf, environ, weak.append)
    spec = JobSpec(
        entrypoint=_entrypoint(line, flags, environ),
        run_id=rendezvous.run_id,
        workers_per_node=workers,
        gpu_each=hosted.text == "gpu",
        rules=rules,
        rendezvous=place,
        node_rank=rendezvous.node_rank,
        node_id=rendezvous.node_id,
        name=rendezvous.name,
        endpoint=rendezvous.endpoint,
        local_addr=values.host(*local_addr) if local_addr.text else None,
        role=values.shared_name(*flags.get("role"), empty_allowed=True)
        if rendezvous.coordinated
        else flags.get("role").text,
        # A fork of the launcher would copy its descriptors and its loop, so `fork` forks from a template too.
        start_method="spawn" if flags.choice("start_method") == "spawn" else "forkserver",
        preload=tuple(dict.fromkeys(preload)),
        signals=values.signals(*flags.get("signals_to_handle")),
        forward_signals=values.forwarded_signals(flags.get("forward_signals"), flags.get("signals_to_handle")),
        preemption=values.preemption_notice(
            flags.get("preemption_notice"), [flags.get("signals_to_handle"), flags.get("forward_signals")]
        ),
        shutdown_timeout=_shutdown_timeout(flags, environ),
        virtual_local_rank=flags.is_on("virtual_local_rank"),
        numa_binding=cast("Literal['node', 'socket', 'exclusive', 'core-complex'] | None", numa or None),
        exit_codes=_exit_codes(flags),
        progress=cast("Literal['auto', 'optimizer']", flags.choice("progress")),
        progress_regex=values.regex(*flags.get("progress_regex")),
        event_log=cast("Literal['null', 'console']", flags.choice("event_log_handler")),
        journal=checks.journal_directory(flags),
        settings=settings,
        logs=logs,
    )
    checked = [feature.check(flags, spec, environ) for feature in OF_FEATURES.values() if feature.check is not None]
    check_standard_input(spec.entrypoint, workers, rules.max_restarts)
    warnings += [*ignored.flag_warnings(flags, spec, conf), *chain.from_iterable(checked), *weak]
    for sentence in warnings:
        warn(sentence)
    if found and found.first is not False:
        source = flags.source_of(hosted, "nproc_per_node")
        here_run = f"{counted(workers, 'worker')} on this node ({source})"
        inform(cluster.describe(found, flags, args, rendezvous, nodes, here_run))
    return spec


def _settings(flags: FlagValues, environ: Mapping[str, str]) -> dict[str, Any]:
    """What this node does for the features that its flags ask for."""
    found = {name: feature.settings(flags, environ) for name, feature in OF_FEATURES.items() if feature.settings}
    return {name: to_builtins(settings) for name, settings in found.items() if settings is not None}


def _nodes_here(flags: FlagValues) -> FlagValue | None:
    """How many nodes a feature is to start on this machine; None if each is started by a command of its own."""
    names = [feature.nodes_here for feature in OF_FEATURES.values() if feature.nodes_here]
    return next((given for name in names if (given := flags.explicit(name))), None)


def _fresh_id() -> str:
    """A random UUID as `uuid.uuid4` gives it, whose module would take 2 ms to import."""
    digits = f"{int.from_bytes(os.urandom(16)) & ~(0xF << 76) & ~(0x3 << 62) | (4 << 76) | (2 << 62):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _count_workers(kind: str, environ: Mapping[str, str]) -> int:
    from dlrover_run.devices.count import count_workers

    return count_workers(kind, environ)


def _rendezvous_args(flags: FlagValues, nodes: FlagValue, environ: Mapping[str, str]) -> RendezvousArgs:
    return RendezvousArgs(
        nodes=nodes,
        spares=flags.integer("spares", 0, MAX_NODES),
        standalone=flags.is_on("standalone"),
        backend=flags.explicit("rdzv_backend"),
        endpoint=flags.get("rdzv_endpoint"),
        run_id=flags.get("rdzv_id"),
        node_rank=flags.explicit("node_rank"),
        master_addr=flags.explicit("master_addr"),
        master_port=flags.explicit_integer("master_port", 0, values.MAX_PORT),
        environ=environ,
    )


def _shutdown_timeout(flags: FlagValues, environ: Mapping[str, str]) -> float:
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    default = FlagValue(variable, environ.get(variable, str(SHUTDOWN_TIMEOUT)))
    return values.seconds(*(flags.explicit("shutdown_timeout") or default), zero_allowed=True)


def _exit_codes(flags: FlagValues) -> ExitScheme:
    compat, given = flags.explicit("compat_exit_codes"), flags.explicit("exit_codes")
    scheme = cast("ExitScheme", flags.choice("exit_codes"))
    if compat is None or not flags.is_on("compat_exit_codes"):
        return scheme
    if given is not None and scheme != "torchrun":
        raise SpecError(f"{compat.source} means --exit-codes=torchrun, and {given.source} is {scheme}: leave one out.")
    return "torchrun"


def _logs(flags: FlagValues, environ: Mapping[str, str]) -> LogSpec:
    log_dir = flags.get("log_dir").text or None
    plugin = flags.get("logs_specs").text or None
    if log_dir is not None:
        checks.check_directory("--log-dir", log_dir)
    if plugin is not None:
        checks.check_logs_plugin(plugin)
    filters = {
        stream: values.comma_list(value.text) if (value := flags.explicit(f"duplicate_{stream}_filters")) else ()
        for stream in ("stdout", "stderr")
    }
    return LogSpec(
        log_dir=log_dir,
        redirects=values.streams(*flags.get("redirects")),
        tee=values.streams(*flags.get("tee")),
        shown_ranks=values.rank_set(*flags.get("local_ranks_filter")),
        stdout_filters=filters["stdout"],
        stderr_filters=filters["stderr"],
        prefix_template=flags.get("log_line_prefix_template").text
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        plugin=plugin,
    )


def _entrypoint(line: CommandLine, flags: FlagValues, environ: Mapping[str, str]) -> Entrypoint:
    target, args = require_script(line), line.script_args
    if flags.is_on("run_path"):
        entry_point.refuse_reserved(DLROVER_RUN, target)
        check_script(target, args, DLROVER_RUN)
        return Entrypoint("run_path", target, args, sys.executable)
    if flags.is_on("no_python"):
        if flags.is_on("module"):
            raise SpecError("--no-python and --module exclude each other, since a module needs Python: leave one out.")
        checks.check_program(target, environ)
        return Entrypoint("program", target, args)
    if not flags.is_on("module"):
        entry_point.refuse_reserved(DLROVER_RUN, target)
    return python_entrypoint(line, environ, DLROVER_RUN, module=flags.is_on("module"))


def read_job(line: CommandLine, warn: Callable[[str], None]) -> JobSpec:
    """The job of this process's command line; `warn` takes doubtful input. Raises SpecError."""
    environ = cluster_environment.without_outer_job(os.environ)
    return _job(line, environ, _count_workers, warn, lambda line: entry_point.report(DLROVER_RUN.name, line))


def launch(spec: JobSpec) -> int:
    """Run the job on this node; the exit code. Raises SpecError when it cannot begin."""
    from dlrover_run import launch as launcher

    return launcher.launch(spec)
