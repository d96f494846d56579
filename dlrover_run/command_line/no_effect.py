"""What somebody said of a rendezvous and will have no effect on this job, a sentence each."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.command_line import credentials
from dlrover_run.command_line.meeting import Meeting, without_effect_here
from dlrover_run.command_line.rendezvous_conf import Key, RendezvousConf

_IN_PLACE_OF_A_TOKEN = {
    credentials.TOKEN_VARIABLE: credentials.PASSWORD_VARIABLE,
    credentials.TOKEN_FILE_VARIABLE: credentials.PASSWORD_FILE_VARIABLE,
}
_BACKENDS = {"nodes": "c10d (or etcd)", "master": "c10d", "etcd": "etcd"}


def without_effect(
    place: Meeting, conf: RendezvousConf, environ: Mapping[str, str], *, spares_given: bool
) -> list[str]:
    """The sentences, in the order in which things were said."""
    said = [f"--rdzv-conf has {key!r}, which nothing reads." for key in conf.unknown]
    said += [sentence for key in conf.given if (sentence := _of_key(key, place))]
    if spares_given and not place.has_place:
        said.append(_without("--spares", "nodes"))
    if place.backend == "etcd":
        said += [
            f"{name} has no effect with etcd: give --rdzv-conf user=NAME and set {instead} instead."
            for name, instead in _IN_PLACE_OF_A_TOKEN.items()
            if environ.get(name)
        ]
    return said


def _of_key(key: Key, place: Meeting) -> str:
    what = f"{key.name} of --rdzv-conf"
    if place.own_master and (key.scope == "master" or key.name == "is_host"):
        return without_effect_here(what)
    if place.backend == "etcd" and key.with_etcd:
        return f"{what} has no effect with etcd: {key.with_etcd}."
    if key.scope in ("any", place.backend) or (key.scope == "nodes" and place.has_place):
        return ""
    return _without(what, key.scope)


def _without(what: str, scope: str) -> str:
    return f"{what} has no effect: it takes several nodes, --rdzv-backend={_BACKENDS[scope]} and --rdzv-endpoint."
