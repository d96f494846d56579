"""The grammar of `--rdzv-conf`: one table of its keys, and the record that they come to.

torchrun's keys and ours stand side by side. Those of torchrun's that have no meaning here are checked and then left
alone: jobs in the wild have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.coordination.rules import Rules
from dlrover_run.spec import SpecError

MOST = 1_000_000
"""The highest that a count may be, which is more than anybody needs."""

_TRUE_WORDS = ("1", "true", "t", "yes", "y")
_FALSE_WORDS = ("0", "false", "f", "no", "n")


class RendezvousConf(NamedTuple):
    """What `--rdzv-conf` says. `rules` are the defaults but for what was given; a file's name keeps its place.

    `for_master` are the keys among those given that torchrun does not have and that only mean something where nodes
    meet at a master; `unknown` are those that nothing reads.
    """

    rules: Rules
    is_host: bool | None = None
    bind: str | None = None
    state_dir: Given | None = None
    token_file: Given | None = None
    tls_ca: Given | None = None
    tls_cert: Given | None = None
    tls_key: Given | None = None
    auth: str = "auto"
    for_master: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class Key(NamedTuple):
    """One key.

    `read` turns its text into a value or says what would do. `help` is empty for what torchrun has and what has no
    effect here. `rule` is the field of `Rules` that it sets; without one it sets the field of `RendezvousConf` with its
    name, if there is one. `for_master` as there.
    """

    name: str
    read: Callable[[str, str], Any]
    help: str = ""
    rule: str = ""
    for_master: bool = False


def _time(place: str, text: str) -> float:
    return flags.seconds(place, text, zero_allowed=True)


def _time_above_zero(place: str, text: str) -> float:
    return flags.seconds(place, text, zero_allowed=False)


def _whole_seconds(place: str, text: str) -> int:
    return flags.whole_number(place, text, 1)


def _count(place: str, text: str) -> int:
    return flags.whole_number(place, text, 0, MOST)


def _count_above_zero(place: str, text: str) -> int:
    return flags.whole_number(place, text, 1, MOST)


def _yes_or_no(place: str, text: str) -> bool:
    return flags.choice(place, text.lower(), (*_TRUE_WORDS, *_FALSE_WORDS)) in _TRUE_WORDS


def _auth(place: str, text: str) -> str:
    return flags.choice(place, text, ("auto", "required"))


def _store_type(place: str, text: str) -> str:
    return flags.choice(place, text.lower(), ("tcp", "file"))


def _protocol(place: str, text: str) -> str:
    return flags.choice(place, text.lower(), ("http", "https"))


TABLE: tuple[Key, ...] = (
    Key("join_timeout", _time_above_zero, "Seconds to wait for MIN nodes at first", "join_timeout"),
    Key(
        "last_call_timeout",
        _time_above_zero,
        "Seconds without a newcomer until fewer than MAX nodes start",
        "last_call_timeout",
    ),
    Key(
        "pend_timeout",
        _time,
        "Seconds to wait for others when fewer than MIN nodes are left",
        "pend_timeout",
        for_master=True,
    ),
    Key(
        "lost_after",
        _time,
        "Seconds from the end of a node's connection until the node counts as lost",
        "lost_after",
        for_master=True,
    ),
    Key(
        "scale_up_delay",
        _time,
        "Seconds from a newcomer until the job takes it in, with those that came meanwhile",
        "scale_up_delay",
        for_master=True,
    ),
    Key(
        "restart_window", _time, "Seconds in which --max-restarts counts; 0 counts over the whole job", "restart_window"
    ),
    Key("keep_alive_interval", _time_above_zero, "Seconds between two signs of life of a node", "keep_alive_interval"),
    Key(
        "keep_alive_max_attempt",
        _count_above_zero,
        "Signs of life that may be missing until a silent connection counts as ended",
        "keep_alive_attempts",
    ),
    Key(
        "early_failure_limit",
        _count,
        "Like failures in a row, before any worker got to work, after which the job stops; 0 for no limit",
        "early_failure_limit",
    ),
    Key("is_host", _yes_or_no, "1 if this node runs the master, 0 if not; else the endpoint's address tells"),
    Key("bind", flags.host, "The address that a master on this node listens on, else the endpoint's", for_master=True),
    Key("state_dir", Given, "Directory in which a master on this node keeps its journal", for_master=True),
    Key(
        "token_file",
        Given,
        "File with the job's secret, else DLROVER_RDZV_TOKEN or DLROVER_RDZV_TOKEN_FILE",
        for_master=True,
    ),
    Key("tls_ca", Given, "File (PEM) with which the other side's certificate is checked", for_master=True),
    Key("tls_cert", Given, "File (PEM) with this node's certificate", for_master=True),
    Key("tls_key", Given, "File (PEM) with the private key to it", for_master=True),
    Key("auth", _auth, "auto, or required to refuse to run without token or certificates", for_master=True),
    # torchrun's c10d does not read `timeout` either: it is for static and etcd, and LaunchConfig gives it to all.
    *(Key(name, _whole_seconds) for name in ("timeout", "close_timeout", "heartbeat_timeout", "read_timeout")),
    *(Key(name, Given) for name in ("rank", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix")),
    *(Key(name, Given) for name in ("cacert", "cert", "key")),
    Key("store_type", _store_type),
    Key("protocol", _protocol),
)

_BY_NAME = {key.name: key for key in TABLE}


def read(place: str, text: str) -> RendezvousConf:
    """The record of `key=value,key=value`.

    torchrun takes unknown keys in silence, so they are reported, not refused.
    """
    given = _pairs(place, text)
    known = {_BY_NAME[name]: value for name, value in given.items() if name in _BY_NAME}
    values = {key: key.read(f"{place} {key.name}", value) for key, value in known.items()}
    rules = {key.rule: value for key, value in values.items() if key.rule}
    others = {key.name: value for key, value in values.items() if key.name in RendezvousConf._fields}
    return RendezvousConf(
        rules=replace(Rules(), **rules),
        **others,
        for_master=tuple(key.name for key in known if key.for_master),
        unknown=tuple(name for name in given if name not in _BY_NAME),
    )


def _pairs(place: str, text: str) -> dict[str, str]:
    if not text.strip():
        return {}
    pairs = [tuple(part.strip() for part in pair.partition("=")) for pair in text.split(",")]
    # Before anything else is said of the text, since a sentence about what is wrong with it quotes it.
    if any(key.strip("'\"").lower() == "token" for key, _, _ in pairs):
        raise SpecError(
            f"{place} has a token in it, where every list of processes shows it: put it into a file and give "
            "token_file=PATH, or set DLROVER_RDZV_TOKEN."
        )
    for key, equals, value in pairs:
        if not key or not value:
            wrote = f"{key}{equals}{value}"
            raise flags.wrong(place, text, f"has {wrote!r} in it, which is no key=value", "give key=value,key=value")
    return {key: value for key, _, value in pairs}
