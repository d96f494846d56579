"""The grammar of `--rdzv-conf`: one table of its keys, and the record that they come to.

torchrun's keys and ours stand side by side. Those of torchrun's that have no meaning here are checked and then left
alone: jobs in the wild have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.coordination.rules import Rules
from dlrover_run.spec import EtcdSpec, SpecError

MOST = 1_000_000
"""The highest that a count may be, which is more than anybody needs."""

LONGEST_PATH = 255
"""Characters that the path of a job's keys in etcd may have."""

_TRUE_WORDS = ("1", "true", "t", "yes", "y")
_FALSE_WORDS = ("0", "false", "f", "no", "n")


class RendezvousConf(NamedTuple):
    """What `--rdzv-conf` says. `rules` are the defaults but for what was given; a file's name keeps its place.

    `tls_ca` to `tls_key` are for a master, `cacert` to `key` for etcd. `given` are the keys that were given, `unknown`
    the names among them that nothing reads.
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
    protocol: str | None = None
    cacert: Given | None = None
    cert: Given | None = None
    key: Given | None = None
    prefix: str | None = None
    user: Given | None = None
    password_file: Given | None = None
    given: tuple[Key, ...] = ()
    unknown: tuple[str, ...] = ()

    def says(self, name: str) -> bool:
        """Whether a key was given."""
        return any(key.name == name for key in self.given)


class Key(NamedTuple):
    """One key.

    `read` turns its text into a value or says what would do. `help` is empty for another spelling, and for what
    torchrun has and what has no effect here. `rule` is the field of `Rules` that it sets; without one it sets the field
    of `RendezvousConf` with its name, if there is one. `means` is the key of which this is another spelling. `scope`
    says where it has an effect: in any job, where nodes meet, or only where they do so at a master or in etcd; what
    torchrun has too is left alone everywhere. `with_etcd` says what to do instead where a key is of no use with etcd.
    """

    name: str
    read: Callable[[str, str], Any]
    help: str = ""
    rule: str = ""
    scope: Literal["any", "nodes", "master", "etcd"] = "any"
    means: str = ""
    with_etcd: str = ""


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


def _prefix(place: str, text: str) -> str:
    # torchrun's etcd too puts a slash before a path that has none.
    path = "/" + text.strip("/")
    if path == "/" or "//" in path or len(path) > LONGEST_PATH or not path.isprintable():
        remedy = f"give one such as /dlrover-run, of at most {LONGEST_PATH} printable characters"
        raise flags.wrong(place, text, "is no path in etcd", remedy)
    return path


def _user(place: str, text: str) -> Given:
    if not text.isprintable():
        raise flags.wrong(place, text, "is no name of a user", "give printable characters")
    return Given(place, text)


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
        scope="nodes",
    ),
    Key(
        "lost_after",
        _time,
        "Seconds from the end of a node's connection (1) or lease (0) until the node counts as lost",
        "lost_after",
        scope="nodes",
    ),
    Key(
        "scale_up_delay",
        _time,
        "Seconds from a newcomer until the job takes it in, with those that came meanwhile",
        "scale_up_delay",
        scope="nodes",
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
    Key(
        "check_timeout",
        _time_above_zero,
        "Seconds for a round of --network-check, after which a node that did not answer has failed",
        "check_timeout",
    ),
    Key("is_host", _yes_or_no, "1 if this node runs the master, 0 if not; else the endpoint's address tells"),
    Key("auth", _auth, "auto, or required to refuse to run with nothing that proves who this node is", scope="nodes"),
    Key(
        "bind",
        flags.host,
        "The address that a master on this node listens on, else the endpoint's",
        scope="master",
        with_etcd="no node listens there",
    ),
    Key(
        "state_dir",
        Given,
        "Directory in which a master on this node keeps its journal",
        scope="master",
        with_etcd="what a job needs to go on is in etcd itself",
    ),
    Key(
        "token_file",
        Given,
        "File with the job's secret, else DLROVER_RDZV_TOKEN or DLROVER_RDZV_TOKEN_FILE",
        scope="master",
        with_etcd="give user and password_file instead",
    ),
    *(
        Key(name, Given, help, scope="master", with_etcd=f"give {instead} instead")
        for name, help, instead in (
            ("tls_ca", "For a master: file (PEM) with which the other side's certificate is checked", "cacert"),
            ("tls_cert", "For a master: file (PEM) with this node's certificate", "cert"),
            ("tls_key", "For a master: file (PEM) with the private key to it", "key"),
        )
    ),
    Key("protocol", _protocol, "For etcd: http, or https to encrypt, which the files below imply"),
    Key("cacert", Given, "For etcd: file (PEM) with which its certificate is checked, else the system's authorities"),
    Key("cert", Given, "For etcd: file (PEM) with this node's certificate"),
    Key("key", Given, "For etcd: file (PEM) with the private key to it"),
    Key("user", _user, "For etcd: the name under which this node logs in", scope="etcd"),
    Key(
        "password_file",
        Given,
        "For etcd: file with the password, else DLROVER_ETCD_PASSWORD or DLROVER_ETCD_PASSWORD_FILE",
        scope="etcd",
    ),
    Key("prefix", _prefix, f"For etcd: the path below which all keys are, else {EtcdSpec.prefix}", scope="etcd"),
    *(Key(name, Given, means=means) for name, means in (("ca_cert", "cacert"), ("ssl_cert", "cert"))),
    Key("ssl_cert_key", Given, means="key"),
    Key("etcd_prefix", _prefix, means="prefix"),
    # torchrun's c10d does not read `timeout` either: it is for static and etcd, and LaunchConfig gives it to all.
    *(Key(name, _whole_seconds) for name in ("timeout", "close_timeout", "heartbeat_timeout", "read_timeout")),
    Key("cas_backoff_max_seconds", _time),
    Key("rank", Given),
    Key("store_type", _store_type),
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
    return RendezvousConf(
        rules=replace(Rules(), **rules),
        **_by_field(place, values),
        given=tuple(known),
        unknown=tuple(name for name in given if name not in _BY_NAME),
    )


def _by_field(place: str, values: dict[Key, Any]) -> dict[str, Any]:
    """The fields of `RendezvousConf` that keys set, each by whichever of its spellings was given."""
    setters: dict[str, Key] = {}
    for key in values:
        name = key.means or key.name
        if name not in RendezvousConf._fields:
            continue
        other = setters.setdefault(name, key)
        one, two = _text(values[other]), _text(values[key])
        if one != two:
            raise SpecError(
                f"{place} has {other.name} {one!r} and {key.name} {two!r}, two names of one thing: leave one out."
            )
    return {name: values[key] for name, key in setters.items()}


def _text(value: Any) -> Any:
    return value.text if isinstance(value, Given) else value


def _pairs(place: str, text: str) -> dict[str, str]:
    text = _unquoted(text.strip())
    if not text:
        return {}
    pairs = [tuple(part.strip() for part in pair.partition("=")) for pair in text.split(",")]
    # Before anything else is said of the text, since a sentence about what is wrong with it quotes it.
    for key, _, value in pairs:
        name = key.strip("'\"").lower()
        if name == "token":
            raise _shown(place, "token", "DLROVER_RDZV_TOKEN")
        # `user=name:password` is how etcdctl takes it.
        if name == "password" or (name == "user" and ":" in value):
            raise _shown(place, "password", "DLROVER_ETCD_PASSWORD")
    for key, equals, value in pairs:
        if not key or not value:
            wrote = f"{key}{equals}{value}"
            raise flags.wrong(place, text, f"has {wrote!r} in it, which is no key=value", "give key=value,key=value")
    return {key: value for key, _, value in pairs}


def _unquoted(text: str) -> str:
    """The text without quotes around all of it, which a program that starts another without a shell leaves there."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1].strip() if quoted else text


def _shown(place: str, secret: str, variable: str) -> SpecError:
    return SpecError(
        f"{place} has a {secret} in it, where every list of processes shows it: put it into a file and give "
        f"{secret}_file=PATH, or set {variable}."
    )
