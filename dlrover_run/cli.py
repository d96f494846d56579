"""The command line: flags and `PET_*` variables become a `JobSpec`, and a mistake becomes one sentence.

A launch never imports typer or rich: they draw the help and do the completion, which nobody waits for twice a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from dlrover_run.command_line import credentials, etcd_place, flags, lookup, meeting, rendezvous_conf, replies
from dlrover_run.command_line.argv import CommandLine, UsageError, cut
from dlrover_run.command_line.entrypoint import find_python_program, need_script
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.job_size import find_size
from dlrover_run.command_line.local_nodes import (
    LocalNodes,
    find_local_nodes,
    fit_rules,
    refuse_what_no_node_has,
    without_local_nodes,
)
from dlrover_run.command_line.master_place import find_master, fit_to_place
from dlrover_run.command_line.meeting import Meeting
from dlrover_run.command_line.no_effect import without_effect
from dlrover_run.command_line.node_check import NodeCheck, settle_check
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.command_line.settings import Settings
from dlrover_run.coordination.rules import MOST_NODES, Rules
from dlrover_run.spec import SHUTDOWN_TIMEOUT, Entrypoint, JobSpec, LogSpec, SpecError

MOST_RESTARTS = 1_000_000
"""More restarts than any job has, and few enough for a coordinator to take."""

COMMANDS_TO_COME = frozenset({"status", "top", "why", "events", "stacks", "drain", "stop", "scale"})
"""Words that are kept for commands, so that no command line changes its meaning when they come."""

CountWorkers = Callable[[str, Mapping[str, str]], int]


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    count_workers: CountWorkers | None = None,
    warn: Callable[[str], None] | None = None,
) -> JobSpec:
    """The job that a command line asks for; SpecError when it cannot be done.

    `count_workers` counts devices for `--nproc-per-node=auto` and the like. `warn` takes sentences about what was said
    but will have no effect; without it they are dropped.
    """
    line = cut(argv)
    if line.request is not None:
        raise UsageError(f"{line.request.spellings[0]} answers by itself and starts no job.")
    return _job(line, environ, count_workers or _count_workers, warn or (lambda _: None))


def _job(line: CommandLine, environ: Mapping[str, str], count: CountWorkers, warn: Callable[[str], None]) -> JobSpec:
    settings = Settings(line, environ)
    here = find_local_nodes(settings)
    size = find_size(settings, environ)
    place = _meeting(settings, size.nodes, environ, here)
    conf = rendezvous_conf.read(*settings.text("rdzv_conf"))
    check = settle_check(settings, place, conf)
    workers = _workers(size.workers, environ, count)
    logs = _logs(settings, environ)
    rules = _rules(settings, size.nodes, place, conf, check)
    spares_given = settings.asked("spares") is not None
    ineffective = without_effect(place, conf, environ, spares_given=spares_given)
    warnings = [*size.warnings, *place.warnings, *ineffective, *check.warnings, *_unseen_ranks(logs, workers)]
    if here:
        rules, spare = fit_rules(here, rules, conf, size.nodes, spares_given=spares_given)
        warnings += [*here.warnings, *spare]
    else:
        warnings += without_local_nodes(settings)
    flags.seconds(*settings.text("monitor_interval"), zero_allowed=False)
    # Forking straight from the launcher would copy its descriptors and its loop; a template is what is meant by fork.
    forking = settings.choice("start_method") != "spawn"
    preload = [name for given in settings.each("preload") for name in flags.modules(*given)]
    if preload and not forking:
        warnings.append("--preload has no effect without --start-method=forkserver.")
    local_addr = settings.text("local_addr")
    numa = settings.asked("numa_binding") and settings.choice("numa_binding")
    etcd = etcd_place.find_etcd(place.members, conf, environ) if place.members else None
    if place.members and etcd:
        warnings += etcd_place.in_the_open(place.members, conf, etcd)
    master = find_master(place, conf, environ)
    if master is not None:
        warnings += credentials.weaknesses_of_token(master.token, conf, environ)
    spec = JobSpec(
        entrypoint=_entrypoint(line, settings, environ),
        run_id=place.run_id,
        workers_per_node=workers,
        gpu_each=size.workers.text == "gpu",
        rules=rules,
        backend=place.backend,
        master=master,
        etcd=etcd,
        node_rank=place.node_rank,
        node_id=place.node_id,
        local_addr=flags.host(*local_addr) if local_addr.text else None,
        role=_role(settings.text("role"), place),
        start_method="forkserver" if forking else "spawn",
        preload=tuple(dict.fromkeys(preload)),
        signals=flags.signals(*settings.text("signals_to_handle")),
        forward_signals=flags.forwarded_signals(settings.text("forward_signals"), settings.text("signals_to_handle")),
        shutdown_timeout=_shutdown_timeout(settings, environ),
        virtual_local_rank=settings.on("virtual_local_rank"),
        numa_binding=cast("Literal['node', 'socket', 'exclusive', 'core-complex'] | None", numa or None),
        compat_exit_codes=settings.on("compat_exit_codes"),
        event_log=cast("Literal['null', 'console']", settings.choice("event_log_handler")),
        # Nodes on one console are told apart by what is before their lines.
        logs=replace(logs, prefixed=True) if here else logs,
        local=here.spec if here else None,
    )
    if here:
        refuse_what_no_node_has(here.spec, spec.entrypoint)
    for sentence in warnings:
        warn(sentence)
    return spec


def _count_workers(kind: str, environ: Mapping[str, str]) -> int:
    from dlrover_run.devices.count import count_workers

    return count_workers(kind, environ)


def _workers(given: Given, environ: Mapping[str, str], count: CountWorkers) -> int:
    number = flags.workers(*given)
    return count(given.text, environ) if number is None else number


def _meeting(settings: Settings, nodes: Given, environ: Mapping[str, str], here: LocalNodes | None) -> Meeting:
    import uuid

    wish = meeting.Wish(
        nodes=nodes,
        spares=settings.number("spares", 0, MOST_NODES),
        standalone=settings.on("standalone"),
        backend=settings.asked("rdzv_backend"),
        endpoint=settings.text("rdzv_endpoint"),
        run_id=settings.text("rdzv_id"),
        node_rank=settings.asked_number("node_rank", 0),
        master_addr=settings.asked("master_addr"),
        master_port=settings.asked_number("master_port", 0, flags.LAST_PORT),
        environ=environ,
    )
    return meeting.settle_here(wish) if here else meeting.settle(wish, str(uuid.uuid4()))


def _role(given: Given, place: Meeting) -> str:
    if place.has_place and (len(given.text) > meeting.LONGEST_NAME or not given.text.isprintable()):
        remedy = f"give at most {meeting.LONGEST_NAME} printable characters"
        raise flags.wrong(*given, "is no name that nodes tell each other", remedy)
    return given.text


def _rules(settings: Settings, nodes: Given, place: Meeting, conf: RendezvousConf, check: NodeCheck) -> Rules:
    rules = replace(
        check.add_to(conf.rules),
        least=place.least,
        most=place.most,
        unit=settings.number("node_unit", 1, MOST_NODES),
        max_restarts=settings.number("max_restarts", 0, MOST_RESTARTS),
        store=place.store,
    )
    if place.has_place:
        rules = replace(rules, spares=settings.number("spares", 0, MOST_NODES))
    rules = fit_to_place(rules, place, conf)
    if problem := rules.problem():
        raise SpecError(f"{nodes.place} {nodes.text} with --node-unit {rules.unit} cannot be had: {problem}.")
    return rules


def _shutdown_timeout(settings: Settings, environ: Mapping[str, str]) -> float:
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    given = settings.asked("shutdown_timeout") or Given(variable, environ.get(variable, str(SHUTDOWN_TIMEOUT)))
    return flags.seconds(*given, zero_allowed=True)


def _logs(settings: Settings, environ: Mapping[str, str]) -> LogSpec:
    log_dir = settings.text("log_dir").text or None
    plugin = settings.text("logs_specs").text or None
    if log_dir is not None:
        lookup.find_directory("--log-dir", log_dir)
    if plugin is not None:
        lookup.find_logs_plugin(plugin)
    filters = {
        stream: flags.needles(given.text) if (given := settings.asked(f"duplicate_{stream}_filters")) else ()
        for stream in ("stdout", "stderr")
    }
    return LogSpec(
        log_dir=log_dir,
        redirects=flags.streams(*settings.text("redirects")),
        tee=flags.streams(*settings.text("tee")),
        shown_ranks=flags.rank_set(*settings.text("local_ranks_filter")),
        stdout_filters=filters["stdout"],
        stderr_filters=filters["stderr"],
        prefix_template=settings.text("log_line_prefix_template").text
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        plugin=plugin,
    )


def _unseen_ranks(logs: LogSpec, workers: int) -> list[str]:
    absent = sorted(rank for rank in logs.shown_ranks or () if rank >= workers)
    names = ", ".join(map(str, absent))
    said = [f"--local-ranks-filter names {names}, and {flags.known_ranks(workers)}."] if absent else []
    for flag, chosen in (("--redirects", logs.redirects), ("--tee", logs.tee)):
        # A map that names some of them is one for nodes of several sizes.
        if chosen.by_rank and min(chosen.by_rank) >= workers:
            said.append(f"{flag} has no effect on this node: {flags.known_ranks(workers)}.")
    return said


def _entrypoint(line: CommandLine, settings: Settings, environ: Mapping[str, str]) -> Entrypoint:
    target, args = need_script(line), line.script_args
    if settings.on("run_path"):
        _refuse_reserved(target)
        lookup.find_script(target)
        return Entrypoint("run_path", target, args, sys.executable)
    if settings.on("no_python"):
        if settings.on("module"):
            raise SpecError("--no-python and --module exclude each other, since a module needs Python: leave one out.")
        lookup.find_program(target, environ)
        return Entrypoint("program", target, args)
    if not settings.on("module"):
        _refuse_reserved(target)
    return find_python_program(line, environ, module=settings.on("module"))


def _refuse_reserved(script: str) -> None:
    """Refuse a script whose name, without a directory, is kept for a command."""
    if script in COMMANDS_TO_COME:
        raise SpecError(
            f"{script!r} is reserved for a command, and there is no such command here yet: "
            f"run a script of this name as ./{script}."
        )


def main(argv: list[str] | None = None) -> int:
    """The command: what `dlrover-run` with these arguments exits with. A mistake is a line on stderr and code 2."""
    if argv is None:
        argv = sys.argv[1:]
        if DLROVER_RUN.completion_variable in os.environ:
            return replies.show(DLROVER_RUN, argv)
    asked = job_or_code(argv)
    credentials.scrub_environment()
    if isinstance(asked, int):
        return asked
    from dlrover_run.launch import launch

    try:
        return launch(asked)
    except SpecError as mistake:
        return replies.refuse(DLROVER_RUN, mistake)


def job_or_code(argv: Sequence[str]) -> JobSpec | int:
    """The job that the arguments ask for, its warnings printed; or an exit code, once what was asked or what is wrong
    has been printed instead."""
    try:
        line = cut(argv)
        if line.request is not None:
            return replies.answer(DLROVER_RUN, line.request, line.requested)
        return _job(line, os.environ, _count_workers, lambda sentence: replies.say(DLROVER_RUN, f"warning: {sentence}"))
    except SpecError as mistake:
        return replies.refuse(DLROVER_RUN, mistake)
