"""The command line of tf-ps-run: flags and variables become a `ServersSpec`, and a mistake becomes one sentence.

What dlrover-run has too is read by the same functions. A launch imports neither typer nor TensorFlow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from dlrover_run.cli import MOST_RESTARTS
from dlrover_run.command_line import credentials, etcd_place, flags, lookup, rendezvous_conf, replies
from dlrover_run.command_line.argv import CommandLine, UsageError, cut
from dlrover_run.command_line.entrypoint import find_python_program
from dlrover_run.command_line.master_place import find_master, fit_to_place
from dlrover_run.command_line.meeting import Meeting
from dlrover_run.command_line.no_effect import without_effect
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.command_line.settings import Settings
from dlrover_run.coordination.rules import Rules
from dlrover_run.policies.parameter_servers.model import MAX_TASKS, Capacity, Role
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.spec import SHUTDOWN_TIMEOUT, JobSpec, LogSpec, SpecError
from tf_ps_runner.command_line import values
from tf_ps_runner.command_line.options import TF_PS_RUN
from tf_ps_runner.command_line.place import find_place
from tf_ps_runner.command_line.tensorflow import require_tensorflow
from tf_ps_runner.spec import PRELOAD, ServersSpec, whole_job

SCALE = "scale"
"""The word that, in the place of a script, changes a job that runs. A script of that name is given behind `--`."""


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    require: Callable[[str], None] = lambda python: None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> ServersSpec:
    """The job that a command line asks for; SpecError when it cannot be done.

    `require` raises SpecError for an interpreter that cannot run TensorFlow. `warn` takes sentences about what was said
    but will have no effect, or may not do what was meant.
    """
    line = cut(argv, TF_PS_RUN)
    if line.request is not None:
        raise UsageError(f"{line.request.spellings[0]} answers by itself and starts no job.")
    return _job(line, environ, require, warn)


def _job(
    line: CommandLine, environ: Mapping[str, str], require: Callable[[str], None], warn: Callable[[str], None]
) -> ServersSpec:
    settings = Settings(line, environ, TF_PS_RUN)
    role = Role(settings.choice("role")) if settings.asked("role") else None
    cluster, warnings = _cluster(settings, role)
    place = find_place(settings, environ)
    conf = rendezvous_conf.read(*settings.text("rdzv_conf"))
    never = [key for key in conf.given if key.name in TF_PS_RUN.no_keys]
    conf = conf._replace(given=tuple(key for key in conf.given if key not in never))
    warnings += [f"{key.name} of --rdzv-conf has no effect on a job with parameter servers." for key in never]
    warnings += [*place.warnings, *without_effect(place, conf, environ, spares_given=False)]
    forking = settings.choice("start_method") == "forkserver"
    preload = [name for given in settings.each("preload") for name in flags.modules(*given)]
    if preload and not forking:
        warnings.append("--preload has no effect with --start-method=spawn.")
    etcd = etcd_place.find_etcd(place.members, conf, environ) if place.members else None
    if place.members and etcd:
        warnings += etcd_place.in_the_open(place.members, conf, etcd)
    master = find_master(place, conf, environ)
    if master is not None:
        warnings += credentials.weaknesses_of_token(master.token, conf, environ)
    local_addr = settings.text("local_addr")
    entrypoint = find_python_program(line, environ, module=settings.on("module"))
    require(entrypoint.python)
    job = JobSpec(
        entrypoint=entrypoint,
        run_id=place.run_id,
        rules=_rules(place, conf, cluster),
        backend=place.backend,
        master=master,
        etcd=etcd,
        node_id=place.node_id,
        local_addr=flags.host(*local_addr) if local_addr.text else None,
        role=role.value if role else JobSpec.role,
        start_method=cast("Literal['spawn', 'forkserver']", settings.choice("start_method")),
        preload=tuple(dict.fromkeys((*PRELOAD, *preload))) if forking else (),
        signals=flags.signals(*settings.text("signals_to_handle")),
        forward_signals=flags.forwarded_signals(settings.text("forward_signals"), settings.text("signals_to_handle")),
        shutdown_timeout=_seconds(settings, "shutdown_timeout", SHUTDOWN_TIMEOUT, zero_allowed=True),
        logs=_logs(settings),
    )
    spec = ServersSpec(
        job=job,
        rooms=_rooms(cluster, role),
        sparse=settings.on("sparse"),
        hang_timeout=_seconds(settings, "hang_timeout", 0.0, zero_allowed=True),
        checkpoint_dir=_checkpoint_dir(settings, cluster, warnings),
    )
    for sentence in warnings:
        warn(sentence)
    return spec


def _cluster(settings: Settings, role: Role | None) -> tuple[ClusterRules, list[str]]:
    """What the job may have and cost, and sentences about what has no effect on that."""
    ps = settings.text("ps")
    workers = settings.text("workers")
    min_ps, max_ps = flags.number_range(*ps, "parameter servers", zero_allowed=False)
    min_workers, max_workers = flags.number_range(*workers, "workers", zero_allowed=True)
    if max_ps + max_workers + 2 > MAX_TASKS:
        raise SpecError(
            f"{ps.place} {ps.text} and {workers.place} {workers.text} are more than the {MAX_TASKS} processes that a "
            "job may have."
        )
    limits = {
        dest: values.memory_size(*given)
        for dest in ("worker_memory", "ps_memory", "max_memory")
        if (given := settings.asked(dest)) is not None
    }
    warnings = []
    if most := settings.asked("max_memory"):
        first = {text: limits[dest] for dest in limits if dest != "max_memory" and (text := settings.asked(dest))}
        values.check_sizes(first, most, limits["max_memory"])
        if not first:
            warnings.append(f"{most.place} has no effect without --worker-memory or --ps-memory.")
    rules = ClusterRules(
        min_ps=min_ps,
        max_ps=max_ps,
        min_workers=min_workers,
        max_workers=max_workers,
        evaluator=int(settings.on("evaluator") or role is Role.EVALUATOR),
        max_restarts=settings.number("max_restarts", 0, MOST_RESTARTS),
        save_timeout=_seconds(settings, "save_timeout", 0.0, zero_allowed=False),
        ready_timeout=_seconds(settings, "ready_timeout", 0.0, zero_allowed=False),
        end_grace=_seconds(settings, "end_grace", 0.0, zero_allowed=True),
        **limits,
    )
    return rules, warnings


def _rules(place: Meeting, conf: RendezvousConf, cluster: ClusterRules) -> Rules:
    rules = replace(conf.rules, least=place.least, most=place.most, cluster=cluster)
    rules = fit_to_place(rules, place, conf)
    if problem := rules.problem():
        raise SpecError(f"This job cannot be had: {problem}.")
    return rules


def _rooms(cluster: ClusterRules, role: Role | None) -> tuple[Capacity, ...]:
    if role is not None:
        return (Capacity(role, 1),)
    return whole_job(cluster.max_ps, cluster.max_workers, cluster.evaluator)


def _checkpoint_dir(settings: Settings, cluster: ClusterRules, warnings: list[str]) -> str | None:
    given = settings.asked("checkpoint_dir")
    if given is not None:
        # One that is elsewhere, such as hdfs://, only the script can reach.
        if "://" not in given.text:
            lookup.find_directory(*given)
        return given.text
    if cluster.min_ps < cluster.max_ps:
        warnings.append(
            "servers may come and go, and with them goes what the script has not saved: have it write checkpoints, and "
            "say where with --checkpoint-dir=DIR."
        )
    return None


def _seconds(settings: Settings, dest: str, default: float, *, zero_allowed: bool) -> float:
    given = settings.text(dest)
    return flags.seconds(*given, zero_allowed=zero_allowed) if given.text else default


def _logs(settings: Settings) -> LogSpec:
    log_dir = settings.text("log_dir").text or None
    if log_dir is not None:
        lookup.find_directory("--log-dir", log_dir)
    return LogSpec(
        log_dir=log_dir,
        redirects=values.all_streams(*settings.text("redirects")),
        tee=values.all_streams(*settings.text("tee")),
        # Processes on one console are told apart by what is before their lines.
        prefixed=True,
    )


def main(argv: list[str] | None = None) -> int:
    """The command: what `tf-ps-run` with these arguments exits with. A mistake is a line on stderr and code 2."""
    if argv is None:
        argv = sys.argv[1:]
        if TF_PS_RUN.completion_variable in os.environ:
            return replies.show(TF_PS_RUN, argv)
    if argv[:1] == [SCALE]:
        from tf_ps_runner.scale import main as scale

        return scale(argv[1:])
    asked = job_or_code(argv)
    credentials.scrub_environment()
    if isinstance(asked, int):
        return asked
    from tf_ps_runner.launch import launch

    try:
        return launch(asked)
    except SpecError as mistake:
        return replies.refuse(TF_PS_RUN, mistake)


def job_or_code(argv: Sequence[str]) -> ServersSpec | int:
    """The job that the arguments ask for, its warnings printed; or an exit code, once what was asked or what is wrong
    has been printed instead."""
    try:
        line = cut(argv, TF_PS_RUN)
        if line.request is not None:
            return replies.answer(TF_PS_RUN, line.request, line.requested)
        return _job(
            line, os.environ, require_tensorflow, lambda sentence: replies.say(TF_PS_RUN, f"warning: {sentence}")
        )
    except SpecError as mistake:
        return replies.refuse(TF_PS_RUN, mistake)
