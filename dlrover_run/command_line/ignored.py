"""Warnings about flags, keys and variables that have no effect on a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlrover_run.command_line import credentials, rdzv_keys
from dlrover_run.command_line.feature import OWN_MASTER
from dlrover_run.command_line.flags import OF_FEATURES
from dlrover_run.command_line.rdzv_conf import Key, RdzvConf, Scope
from dlrover_run.command_line.rendezvous import LOCAL_MASTER, Rendezvous
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.command_line.suggestions import closest
from dlrover_run.coordination.records.rules import JobRules, applies
from dlrover_run.rendezvous import backends
from dlrover_run.spec import JobSpec

_PASSWORD_INSTEAD_OF_TOKEN = {
    credentials.TOKEN_VARIABLE: credentials.PASSWORD_VARIABLE,
    credentials.TOKEN_FILE_VARIABLE: credentials.PASSWORD_FILE_VARIABLE,
}


def rendezvous_warnings(
    rendezvous: Rendezvous, conf: RdzvConf, environ: Mapping[str, str], *, spares_given: bool = False
) -> Iterator[str]:
    """Warnings about keys of `--rdzv-conf`, `--spares` and token variables. Called by both launchers once the
    rendezvous is resolved."""
    for name in conf.unknown:
        meant = closest(name, [key.name for key in rdzv_keys.TABLE if key.help])
        hint = f"; did you mean {meant}?" if meant else "."
        yield f"--rdzv-conf contains {name!r}, which is not a known key and has no effect{hint}"
    for key in conf.keys:
        if warning := _key_warning(key, rendezvous):
            yield warning
    if spares_given and not rendezvous.coordinated:
        yield _requires("--spares", "coordinated")
    if rendezvous.place.leased:
        for name, instead in _PASSWORD_INSTEAD_OF_TOKEN.items():
            if environ.get(name):
                store = rendezvous.place.backend
                yield f"{name} has no effect with {store}: give --rdzv-conf user=NAME and set {instead} instead."


def _key_warning(key: Key, rendezvous: Rendezvous) -> str:
    what = f"{key.name} of --rdzv-conf"
    if rendezvous.place is LOCAL_MASTER and (key.scope == "hosted" or key.name == "is_host"):
        return f"{what} {OWN_MASTER}"
    if rendezvous.place.leased and key.instead_in_store:
        store = rendezvous.place.backend
        return f"{what} has no effect with {store}: {key.instead_in_store.replace('{store}', store)}."
    if key.scope == "any" or getattr(rendezvous.place, key.scope):
        return ""
    return _requires(what, key.scope)


def _requires(what: str, scope: Scope) -> str:
    first, *others = [row.words[0] for row in backends.TABLE if getattr(row.kind, scope)]
    which = f"{first} (or {', '.join(others)})" if others else first
    return f"{what} has no effect: it requires several nodes, --rdzv-backend={which} and --rdzv-endpoint."


def unmet_needs(flags: FlagValues, rules: JobRules) -> Iterator[str]:
    """Warnings about flags that have no effect without another one, by the column `needs` of the table. Called by
    `flag_warnings` for dlrover-run, and by tf-ps-run."""
    for flag in flags.flags.values():
        given = flags.explicit(flag.dest) if flag.needs else None
        if given is None or not (flag.value or flags.is_on(flag.dest)):
            continue
        if clause := _unmet(flag.needs, flags, rules):
            yield f"{given.source} has no effect {clause}."


def unmet_keys(flags: FlagValues, rules: JobRules, conf: RdzvConf) -> Iterator[str]:
    """A warning about the first key of `--rdzv-conf` that has no effect without a flag, for each such flag."""
    first = {key.needs: key for key in reversed(conf.keys) if key.needs}
    for need, key in first.items():
        if clause := _unmet(need, flags, rules):
            yield f"{key.name} of --rdzv-conf has no effect {clause}."


def _unmet(need: str, flags: FlagValues, rules: JobRules) -> str:
    """What is missing, as a clause; empty if the need is met."""
    name, equals, value = need.partition("=")
    if equals:
        text, words = flags.get(name.removesuffix("!").replace("-", "_")).text, value.split("|")
        if name.endswith("!"):
            return f"with --{name[:-1]}={value}" if text in words else ""
        return "" if text in words else f"without --{name}={words[0]}"
    names = need.split("|")
    for feature, brought in OF_FEATURES.items():
        if brought.several and any(flag.name in names for flag in brought.flags):
            return "" if applies(rules.parts, feature) else f"without --{need}"
    if any(flags.explicit(name.replace("-", "_")) for name in names):
        return ""
    return f"without {' or '.join(f'--{name}' for name in names)}"


def flag_warnings(flags: FlagValues, spec: JobSpec, conf: RdzvConf) -> Iterator[str]:
    """Warnings about the other flags of dlrover-run, by the job that they have come to."""
    yield from unmet_needs(flags, spec.rules)
    yield from unmet_keys(flags, spec.rules, conf)
    if spec.progress == "optimizer" and spec.entrypoint.kind == "program":
        yield f"{flags.get('progress').source} optimizer has no effect with --no-python."
    yield from _rank_warnings(spec)


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
