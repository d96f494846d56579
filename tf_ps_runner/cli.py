"""The `tf-ps-run` command line: flags and variables become a `PsJobSpec`; an error becomes one sentence.

Flags that dlrover-run has too are read by the same functions. A launch imports neither typer nor TensorFlow.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from msgspec import to_builtins
from msgspec.structs import replace

from dlrover_run import environment as cluster_environment
from dlrover_run.command_line import access, checks, entry_point, rdzv_keys, values
from dlrover_run.command_line.ignored import rendezvous_warnings, unmet_needs
from dlrover_run.command_line.parse import CommandLine, parse_argv
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.rendezvous import UNNAMED, USUAL, Rendezvous, RendezvousArgs, resolve
from dlrover_run.command_line.rules import MAX_RESTARTS, adjust_rules
from dlrover_run.command_line.script import INTERPRETER_VARIABLE, python_entrypoint
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import MAX_NODES, JobRules
from dlrover_run.exit_reasons import ExitScheme
from dlrover_run.features.autoscale import flags as autoscale_flags
from dlrover_run.features.hangs import flags as hangs
from dlrover_run.rendezvous import backends
from dlrover_run.rendezvous.backends import MASTER_VARIABLE
from dlrover_run.spec import (
    DEFAULT_ROLE,
    SHUTDOWN_TIMEOUT,
    FlagValue,
    JobSpec,
    LogSpec,
    SpecError,
    Std,
    StreamMap,
    UsageError,
)
from tf_ps_runner.cluster.model import Capacity, Role
from tf_ps_runner.cluster.rules import ClusterRules
from tf_ps_runner.command_line.options import TF_PS_RUN
from tf_ps_runner.spec import PRELOAD, PsJobSpec, whole_job

if TYPE_CHECKING:
    from dlrover_run.agent.framework import AdapterFactory
    from dlrover_run.environment.records import Context
    from dlrover_run.features.autoscale.rules import AutoscaleRules


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    require: Callable[[str], None] = lambda python: None,
    warn: Callable[[str], None] = lambda sentence: None,
    inform: Callable[[str], None] = lambda sentence: None,
    context: Context | None = None,
) -> PsJobSpec:
    """The job of a command line. Raises SpecError when it is not possible.

    `require` raises SpecError for an interpreter that cannot run TensorFlow. `warn` takes sentences about flags without
    effect and other doubtful input, `inform` what was taken from the cluster. `context` is the machine that `--cluster`
    looks at, by default this one.
    """
    line = parse_argv(argv, TF_PS_RUN)
    if line.request is not None:
        raise UsageError(f"{line.request.spellings[0]} prints information and starts no job.")
    return _job(line, environ, require, warn, inform, context)


def _job(
    line: CommandLine,
    environ: Mapping[str, str],
    require: Callable[[str], None],
    warn: Callable[[str], None],
    inform: Callable[[str], None],
    context: Context | None = None,
) -> PsJobSpec:
    flags = FlagValues(line.values, environ, TF_PS_RUN.by_dest)
    role = Role(flags.choice("role")) if flags.explicit("role") else None
    cluster = _cluster(flags, role)
    warnings: list[str] = []
    found = None
    if cluster_environment.may_complete(environ, flags.choice("cluster"), hostfile=bool(flags.explicit("hostfile"))):
        from dlrover_run.command_line import cluster as in_cluster
        from tf_ps_runner.command_line.cluster import describe_tasks, tasks_of_node

        here = context or in_cluster.context_of(line, TF_PS_RUN)
        requested = in_cluster.RequestedSize(
            place=in_cluster.place_of(flags, environ, "rdzv_endpoint"), any_size=True, workers=False
        )
        found = in_cluster.detect_job(flags, environ, requested, here, inform)
        if found:
            flags = flags.with_cluster(in_cluster.values_of(found))
    args = _rendezvous_args(flags, environ, in_cluster=found is not None)
    if found:
        args = in_cluster.complete(args, found, here)
    rendezvous = _resolve(flags, args)
    if role is not None:
        capacity: tuple[Capacity, ...] = (Capacity(role, 1),)
    else:
        capacity = tasks_of_node(found, cluster) if found else whole_job(cluster)
    conf = rdzv_keys.parse(*flags.get("rdzv_conf"))
    ignored = [key for key in conf.keys if key.name in TF_PS_RUN.ignored_keys]
    conf = conf._replace(keys=tuple(key for key in conf.keys if key not in ignored))
    warnings += [f"{key.name} of --rdzv-conf has no effect on a job with parameter servers." for key in ignored]
    # Those of --autoscale have an effect on one machine too.
    others = conf._replace(keys=tuple(key for key in conf.keys if key not in autoscale_flags.KEYS))
    warnings += [*rendezvous.warnings, *rendezvous_warnings(rendezvous, others, environ)]
    autoscale = _autoscale(flags, cluster, conf, warnings)
    forking = flags.choice("start_method") == "forkserver"
    preload = [name for value in flags.all("preload") for name in values.modules(*value)]
    place = access.with_credentials(rendezvous, conf, environ, warnings.append)
    local_addr = flags.get("local_addr")
    shutdown_timeout = flags.explicit("shutdown_timeout") or FlagValue("--shutdown-timeout", str(SHUTDOWN_TIMEOUT))
    entrypoint = python_entrypoint(line, environ, TF_PS_RUN, module=flags.is_on("module"))
    if entrypoint.target == checks.STANDARD_INPUT:
        raise SpecError("The script '-' is standard input, which several tasks cannot read: name a file.")
    require(entrypoint.python)
    watch = hangs.settings(flags, environ)
    job = JobSpec(
        entrypoint=entrypoint,
        run_id=rendezvous.run_id,
        rules=_rules(rendezvous, conf, cluster, autoscale),
        rendezvous=place,
        node_id=rendezvous.node_id,
        name=rendezvous.name,
        endpoint=rendezvous.endpoint,
        local_addr=values.host(*local_addr) if local_addr.text else None,
        role=role.value if role else DEFAULT_ROLE,
        start_method=cast("Literal['spawn', 'forkserver']", flags.choice("start_method")),
        preload=tuple(dict.fromkeys((*PRELOAD, *preload))) if forking else (),
        signals=values.signals(*flags.get("signals_to_handle")),
        forward_signals=values.forwarded_signals(flags.get("forward_signals"), flags.get("signals_to_handle")),
        preemption=values.preemption_notice(
            flags.get("preemption_notice"), [flags.get("signals_to_handle"), flags.get("forward_signals")]
        ),
        shutdown_timeout=values.seconds(*shutdown_timeout, zero_allowed=True),
        exit_codes=cast("ExitScheme", flags.choice("exit_codes")),
        settings={} if watch is None else {"hangs": to_builtins(watch)},
        logs=_logs(flags),
        journal=checks.journal_directory(flags),
    )
    _check_checkpoint_dir(flags, cluster, warnings)
    warnings += unmet_needs(flags, job.rules)
    spec = PsJobSpec(
        job=job,
        capacity=capacity,
        sparse=flags.is_on("sparse"),
        hang_timeout=values.seconds(*flags.get("hang_timeout"), zero_allowed=True),
    )
    for sentence in warnings:
        warn(sentence)
    if found and found.first is not False:
        nodes = found.nodes or FlagValue("--ps, --workers", str(sum(part.slots for part in whole_job(cluster))))
        inform(in_cluster.describe(found, flags, args, rendezvous, nodes, describe_tasks(capacity)))
    return spec


def _rendezvous_args(flags: FlagValues, environ: Mapping[str, str], *, in_cluster: bool) -> RendezvousArgs:
    """The flags of the rendezvous. A cluster (`in_cluster`) has several nodes, and gives the endpoint.

    A node without a role and without an endpoint hosts the whole job alone. An endpoint without a backend is that of a
    master. Raises SpecError.
    """
    role, backend = flags.explicit("role"), flags.explicit("rdzv_backend")
    endpoint = flags.get("rdzv_endpoint")
    by_flag = bool(endpoint.text.strip()) or in_cluster
    by_variable = bool(environ.get(MASTER_VARIABLE, "").strip())
    if backend is not None:
        row = backends.by_word(backend.text)
        if row is None or not row.kind.coordinated:
            offered = values.alternatives(backends.words(coordinated=True))
            raise values.invalid(*backend, "is not valid", f"give {offered}")
    elif role is not None and not (by_flag or by_variable):
        raise SpecError(
            f"{role.source} {role.text} hosts one task of a job on several nodes and needs an endpoint: give "
            f"--rdzv-endpoint=HOST:PORT, where HOST is one of the nodes, or leave {role.source} out for a job on this "
            "machine only."
        )
    alone = role is None and backend is None and not by_flag
    run_id = flags.known("rdzv_id")
    if run_id is not None:
        values.shared_name(*run_id)
    return RendezvousArgs(
        nodes=FlagValue("--role", "1" if alone else f"1:{MAX_NODES}"),
        backend=backend or FlagValue("--rdzv-backend", USUAL),
        endpoint=endpoint,
        run_id=run_id or FlagValue("--rdzv-id", "" if alone else UNNAMED),
        environ=environ,
    )


def _resolve(flags: FlagValues, args: RendezvousArgs) -> Rendezvous:
    """The rendezvous of these options. Raises SpecError."""
    role = flags.explicit("role")
    rendezvous = resolve(args, str(uuid.uuid4()))
    # The name that a cluster manager gives a pod is unique only within its role, and its rank is not a node rank here.
    name = f"{role.text}-{rendezvous.node_id}" if role is not None and rendezvous.node_id else rendezvous.node_id
    return rendezvous._replace(node_rank=None, node_id=name)


def _cluster(flags: FlagValues, role: Role | None) -> ClusterRules:
    """The size and the limits of the job."""
    ps, workers = flags.get("ps"), flags.get("workers")
    min_ps, max_ps = values.number_range(*ps, "parameter servers", zero_allowed=False)
    min_workers, max_workers = values.number_range(*workers, "workers", zero_allowed=True)
    limits = {
        dest: values.memory_size(*given)
        for dest in ("worker_memory", "ps_memory", "max_memory")
        if (given := flags.explicit(dest)) is not None
    }
    if highest := flags.explicit("max_memory"):
        first = [dest for dest in limits if dest != "max_memory"]
        for dest in first:
            if limits[dest] > limits["max_memory"]:
                given = flags.get(dest)
                raise SpecError(f"{given.source} {given.text} is more than {highest.source} {highest.text}: raise one.")
    return ClusterRules(
        min_ps=min_ps,
        max_ps=max_ps,
        min_workers=min_workers,
        max_workers=max_workers,
        evaluator=int(flags.is_on("evaluator") or role is Role.EVALUATOR),
        max_restarts=flags.integer("max_restarts", 0, MAX_RESTARTS),
        save_timeout=values.seconds(*flags.get("save_timeout"), zero_allowed=False),
        ready_timeout=values.seconds(*flags.get("ready_timeout"), zero_allowed=False),
        end_grace=values.seconds(*flags.get("end_grace"), zero_allowed=True),
        **limits,
    )


def _autoscale(flags: FlagValues, cluster: ClusterRules, conf: RdzvConf, warnings: list[str]) -> AutoscaleRules | None:
    """The rules of `--autoscale`, None without it. Raises SpecError for a job with nothing to choose."""
    given = flags.explicit("autoscale")
    if given is None:
        if key := next((key for key in conf.keys if key in autoscale_flags.KEYS), None):
            warnings.append(f"{key.name} of --rdzv-conf has no effect without --autoscale.")
        return None
    # Imported only here: other launches do not wait for it.
    from dlrover_run.features.autoscale.rules import STRONG, WEAK, AutoscaleRules

    # A global step is the work of one task with its own batch, or of all tasks together.
    scaling = WEAK if flags.choice("autoscale") == "sync" else STRONG
    if cluster.min_workers == cluster.max_workers and cluster.min_ps == cluster.max_ps:
        raise SpecError(
            f"{given.source} chooses between several numbers, and --workers={cluster.max_workers} and "
            f"--ps={cluster.max_ps} allow one only: give --workers=MIN:MAX, --ps=MIN:MAX or both."
        )
    rules = replace(AutoscaleRules(), scaling=scaling, **conf.of("autoscale"))
    if problem := rules.problem():
        raise SpecError(f"{given.source} is not possible: {problem}.")
    if scaling == STRONG and rules.max_batch:
        warnings.append("autoscale_max_batch of --rdzv-conf has no effect without --autoscale=sync.")
    return rules


def _rules(rendezvous: Rendezvous, conf: RdzvConf, cluster: ClusterRules, autoscale: AutoscaleRules | None) -> JobRules:
    parts = (cluster,) if autoscale is None else with_part((autoscale,), cluster)
    rules = replace(conf.rules, min_nodes=rendezvous.min_nodes, max_nodes=rendezvous.max_nodes, parts=parts)
    rules = adjust_rules(rules, rendezvous, conf)
    if problem := rules.problem():
        raise SpecError(f"This job is not possible: {problem}.")
    return rules


def _check_checkpoint_dir(flags: FlagValues, cluster: ClusterRules, warnings: list[str]) -> None:
    given = flags.explicit("checkpoint_dir")
    # Only the script can reach a remote directory such as hdfs://.
    if given is not None and "://" not in given.text:
        checks.check_directory(*given)
    if given is None and cluster.min_ps < cluster.max_ps:
        warnings.append(
            "servers may change, and variables that are not saved are lost with them: have the script write "
            "checkpoints, and give --checkpoint-dir=DIR."
        )


def _logs(flags: FlagValues) -> LogSpec:
    log_dir = flags.get("log_dir").text or None
    if log_dir is not None:
        checks.check_directory("--log-dir", log_dir)
    return LogSpec(
        log_dir=log_dir,
        redirects=all_streams(*flags.get("redirects")),
        tee=all_streams(*flags.get("tee")),
        # The prefix distinguishes the tasks on a shared console.
        prefixed=True,
    )


def all_streams(source: str, text: str) -> StreamMap:
    """`0` to `3` for every task. Ranks cannot be named, because tasks of all roles share a node."""
    if text not in ("0", "1", "2", "3"):
        remedy = "give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all tasks"
        raise values.invalid(source, text, "does not name output streams", remedy)
    return StreamMap(default=Std(int(text)))


def require_tensorflow(python: str) -> None:
    """Refuse an interpreter without TensorFlow, which is searched for and not imported. Raises SpecError."""
    if not has_tensorflow(python):
        raise SpecError(
            f"There is no TensorFlow in {python}: install it there (pip install 'dlrover-run[tf]'), or set "
            f"{INTERPRETER_VARIABLE} to an interpreter that has it."
        )


def has_tensorflow(python: str) -> bool:
    """Whether an interpreter finds TensorFlow; also True if it gives no answer."""
    if python == sys.executable:
        import importlib.util

        try:
            return importlib.util.find_spec("tensorflow") is not None
        except ValueError:
            return True
    return checks.probe_interpreter(python, "tensorflow", os.environ).exists


def read_job(line: CommandLine, warn: Callable[[str], None]) -> PsJobSpec:
    """The job of this process's command line; `warn` takes doubtful input. Raises SpecError."""
    environ = cluster_environment.without_outer_job(os.environ)
    return _job(line, environ, require_tensorflow, warn, lambda line: entry_point.report(TF_PS_RUN.name, line))


def launch(spec: PsJobSpec) -> int:
    """Run the job on this node; the exit code. Raises SpecError when it cannot begin."""
    from dlrover_run import launch as launcher

    def load_adapter() -> AdapterFactory:
        # Imported only in the agent's process, so that the watchdog stays small.
        from tf_ps_runner.agent.adapter import TensorFlowAdapter

        return partial(TensorFlowAdapter, spec)

    return launcher.launch(spec.job, program=launcher.LauncherProgram("tf-ps-run", "tf-ps-agent", load_adapter))
