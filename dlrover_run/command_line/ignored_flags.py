"""Warnings about flags, keys and variables that have no effect on a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlrover_run.command_line import credentials, rdzv_conf
from dlrover_run.command_line.parser import FlagValues
from dlrover_run.command_line.rdzv_conf import Key, RdzvConf
from dlrover_run.command_line.rendezvous_options import LOCAL_MASTER, MASTER_VARIABLE, Rendezvous
from dlrover_run.command_line.suggestions import closest
from dlrover_run.coordination.parts import applies
from dlrover_run.spec import JobSpec

_PASSWORD_INSTEAD_OF_TOKEN = {
    credentials.TOKEN_VARIABLE: credentials.PASSWORD_VARIABLE,
    credentials.TOKEN_FILE_VARIABLE: credentials.PASSWORD_FILE_VARIABLE,
}
_BACKENDS = {"nodes": "c10d (or etcd)", "master": "c10d", "etcd": "etcd"}
_OWN_MASTER = "has no effect with --local-nodes, which starts its own master."


def rendezvous_warnings(
    rendezvous: Rendezvous, conf: RdzvConf, environ: Mapping[str, str], *, spares_given: bool = False
) -> Iterator[str]:
    """Warnings about keys of `--rdzv-conf`, `--spares` and token variables."""
    for name in conf.unknown:
        meant = closest(name, [key.name for key in rdzv_conf.TABLE if key.help])
        hint = f"; did you mean {meant}?" if meant else "."
        yield f"--rdzv-conf contains {name!r}, which is not a known key and has no effect{hint}"
    for key in conf.keys:
        if warning := _key_warning(key, rendezvous):
            yield warning
    if spares_given and not rendezvous.coordinated:
        yield _requires("--spares", "nodes")
    if rendezvous.backend == "etcd":
        for name, instead in _PASSWORD_INSTEAD_OF_TOKEN.items():
            if environ.get(name):
                yield f"{name} has no effect with etcd: give --rdzv-conf user=NAME and set {instead} instead."


def _key_warning(key: Key, rendezvous: Rendezvous) -> str:
    what = f"{key.name} of --rdzv-conf"
    if rendezvous.master is LOCAL_MASTER and (key.scope == "master" or key.name == "is_host"):
        return f"{what} {_OWN_MASTER}"
    if rendezvous.backend == "etcd" and key.instead_in_etcd:
        return f"{what} has no effect with etcd: {key.instead_in_etcd}."
    if key.scope in ("any", rendezvous.backend) or (key.scope == "nodes" and rendezvous.coordinated):
        return ""
    return _requires(what, key.scope)


def _requires(what: str, scope: str) -> str:
    return f"{what} has no effect: it requires several nodes, --rdzv-backend={_BACKENDS[scope]} and --rdzv-endpoint."


def stall_warnings(flags: FlagValues, spec: JobSpec) -> Iterator[str]:
    """Warnings about a limit for stalls that are not looked for."""
    if spec.stall_timeout is not None and spec.stall_action == "off":
        yield f"{flags.get('stall_timeout').source} has no effect with --stall-action=off."


def flag_warnings(flags: FlagValues, spec: JobSpec, conf: RdzvConf, environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings about the other flags of dlrover-run, by the job that they have come to."""
    if spec.progress == "optimizer" and spec.entrypoint.kind == "program":
        yield f"{flags.get('progress').source} optimizer has no effect with --no-python."
    asked = flags.explicit("stall_action") if spec.stall_action != "off" else None
    if asked is not None and spec.backend == "static" and spec.rules.max_nodes > 1:
        yield (
            f"{asked.source} has no effect with static rendezvous and more than one node, where "
            "nodes do not communicate: hangs are not found."
        )
    yield from stall_warnings(flags, spec)
    yield from _survivor_warnings(flags, spec)
    if not applies(spec.rules.parts, "health"):
        names = ["straggler_threshold"]
        if flags.is_on("exclude_straggler"):
            names.insert(0, "exclude_straggler")
        for source in _sources(flags, names):
            yield f"{source} has no effect without --network-check."
        if conf.has("check_timeout"):
            yield "check_timeout of --rdzv-conf has no effect without --network-check."
    yield from _rank_warnings(spec)
    yield from _local_node_warnings(flags, spec, environ)
    if conf.autoscale and flags.explicit("autoscale") is None:
        yield f"autoscale_{next(iter(conf.autoscale))} of --rdzv-conf has no effect without --autoscale."
    elif "command_timeout" in conf.autoscale and not spec.scale_command:
        yield "autoscale_command_timeout of --rdzv-conf has no effect without --scale-command."
    if flags.explicit("preload") and spec.start_method == "spawn":
        yield "--preload has no effect without --start-method=forkserver."


def _survivor_warnings(flags: FlagValues, spec: JobSpec) -> Iterator[str]:
    if flags.choice("survivors") != "keep":
        for source in _sources(flags, ["reconfigure_timeout"]):
            yield f"{source} has no effect without --survivors=keep."
    elif spec.backend == "static" and spec.rules.max_nodes > 1:
        yield (
            f"{flags.get('survivors').source} has no effect with static rendezvous and more than one node, where nodes "
            "do not communicate."
        )


def _sources(flags: FlagValues, names: list[str]) -> list[str]:
    return [given.source for name in names if (given := flags.explicit(name))]


def _rank_warnings(spec: JobSpec) -> Iterator[str]:
    workers, logs = spec.workers_per_node, spec.logs
    known = "only local rank 0" if workers == 1 else f"local ranks 0 to {workers - 1}"
    absent = ", ".join(str(rank) for rank in sorted(logs.shown_ranks or ()) if rank >= workers)
    if absent:
        yield f"--local-ranks-filter contains {absent}, and this node has {known}."
    for flag, chosen in (("--redirects", logs.redirects), ("--tee", logs.tee)):
        # A map with some ranks of this node is meant for nodes of several sizes.
        if chosen.by_rank and min(chosen.by_rank) >= workers:
            yield f"{flag} has no effect on this node, which has {known}."


def _local_node_warnings(flags: FlagValues, spec: JobSpec, environ: Mapping[str, str]) -> Iterator[str]:
    local = flags.explicit("local_nodes")
    if local is None or spec.local is None:
        names = ["node_restarts", "node_join_after"]
        if flags.is_on("isolate_nodes"):
            names.insert(1, "isolate_nodes")
        for source in _sources(flags, names):
            yield f"{source} has no effect without --local-nodes."
        return
    if spec.backend == "master":
        endpoint = flags.explicit("rdzv_endpoint")
        if endpoint and endpoint.text.strip():
            yield f"{endpoint.source} {_OWN_MASTER}"
        if environ.get(MASTER_VARIABLE, "").strip():
            yield f"{MASTER_VARIABLE} {_OWN_MASTER}"
    if spec.local.min_nodes == spec.local.max_nodes:
        for source in _sources(flags, ["node_join_after"]):
            yield f"{source} has no effect, since {local.source} {local.text} has no nodes that join later."
