"""The grammar of `--rdzv-conf`, and the table of its keys.

The table has torchrun's keys, ours and those that features bring. torchrun's keys that have no meaning here are checked
and then ignored without a warning, because existing command lines contain them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.flags import OF_FEATURES
from dlrover_run.command_line.rdzv_conf import Key, RdzvConf
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import FlagValue, SpecError

MAX_COUNT = 1_000_000
"""The highest value of a count: more than any job uses."""

MAX_PREFIX_LENGTH = 255
"""Characters of the path of a job's keys in etcd."""

_TRUE_WORDS = ("1", "true", "t", "yes", "y")
_FALSE_WORDS = ("0", "false", "f", "no", "n")

_time = partial(values.seconds, zero_allowed=True)
_time_above_zero = partial(values.seconds, zero_allowed=False)
_whole_seconds = partial(values.integer, lowest=1)
_count = partial(values.integer, lowest=0, highest=MAX_COUNT)
_count_above_zero = partial(values.integer, lowest=1, highest=MAX_COUNT)
_auth = partial(values.choice, allowed=("auto", "required"))


def _yes_or_no(source: str, text: str) -> bool:
    return _word(source, text, (*_TRUE_WORDS, *_FALSE_WORDS)) in _TRUE_WORDS


def _prefix(source: str, text: str) -> str:
    # torchrun's etcd backend also adds a missing slash.
    path = "/" + text.strip("/")
    if path == "/" or "//" in path or len(path) > MAX_PREFIX_LENGTH or not path.isprintable():
        remedy = f"give one such as /dlrover-run, of at most {MAX_PREFIX_LENGTH} printable characters"
        raise values.invalid(source, text, "is not a path in etcd", remedy)
    return path


def _user(source: str, text: str) -> FlagValue:
    if not text.isprintable():
        raise values.invalid(source, text, "is not a user name", "give printable characters")
    return FlagValue(source, text)


def _word(source: str, text: str, allowed: tuple[str, ...]) -> str:
    return values.choice(source, text.lower(), allowed)


def _web(source: str, text: str) -> str:
    values.endpoint(source, f"127.0.0.1:{text}" if text.isdecimal() else text, 0)
    return text


_protocol = partial(_word, allowed=("http", "https"))
_store_type = partial(_word, allowed=("tcp", "file"))

# A row has the name, the text, and what belongs to the value.
# fmt: off
_OF_RULES: tuple[Key, ...] = (
    Key("join_timeout", _time_above_zero, "Seconds to wait for MIN nodes at the start"),
    Key("last_call_timeout", _time_above_zero, "Seconds without a new node until fewer than MAX nodes start"),
    Key("pend_timeout", _time, "Seconds to wait for other nodes when fewer than MIN are left", scope="coordinated"),
    Key("lost_after", _time,
        "Seconds from the end of a node's connection (1) or lease (0) until the node is declared lost",
        scope="coordinated"),
    Key("scale_up_delay", _time,
        "Seconds from when a new node is ready until the job includes it and those that came meanwhile",
        scope="coordinated"),
    Key("scale_wait", _time,
        "Seconds for which new nodes and drains wait at most for the next checkpoint of a job that marks them",
        scope="coordinated"),
    Key("cut_off_timeout", _time,
        "Seconds without an answer of the master or etcd and of all other nodes after which a node ends, so that it "
        "can be replaced; 0 for never",
        scope="coordinated"),
    Key("master_timeout", _time_above_zero,
        "Seconds after which a node without running workers gives up a master that it had reached before",
        scope="hosted"),
    Key("restart_window", _time, "Seconds in which --max-restarts counts; 0 counts over the whole job"),
    Key("keep_alive_interval", _time_above_zero, "Seconds between two heartbeats of a node"),
    Key("keep_alive_max_attempt", _count_above_zero,
        "Missed heartbeats after which a silent connection counts as ended",
        alias="keep_alive_attempts"),
    Key("early_failure_limit", _count,
        "Failures in a row before any worker got to work, after which the job stops; 0 for no limit"),
)

_OF_PLACE: tuple[Key, ...] = (
    Key("is_host", _yes_or_no, "1 if this node runs the master, 0 if not; by default the endpoint's address decides"),
    Key("auth", _auth, "auto, or required to refuse to run without credentials", scope="coordinated"),
    Key("bind", values.host,
        "The address on which a master on this node listens, by default the endpoint's",
        scope="hosted", instead_in_store="no node listens there"),
    Key("state_dir", FlagValue,
        "Directory in which a master on this node keeps its journal",
        scope="hosted", instead_in_store="{store} itself stores the state of the job"),
    Key("web", _web,
        "[HOST:]PORT where a master on this node serves /metrics and the status over HTTP; loopback without HOST",
        scope="hosted", instead_in_store="ask `status` for what it would serve"),
    Key("token_file", FlagValue,
        "File with the job's token, else DLROVER_RDZV_TOKEN or DLROVER_RDZV_TOKEN_FILE",
        scope="hosted", instead_in_store="give user and password_file instead"),
    *(
        Key(name, FlagValue, help, scope="hosted", instead_in_store=f"give {instead} instead")
        for name, help, instead in (
            ("tls_ca", "For a master: file (PEM) with the authority that signed the peer's certificate", "cacert"),
            ("tls_cert", "For a master: file (PEM) with this node's certificate", "cert"),
            ("tls_key", "For a master: file (PEM) with the private key of tls_cert", "key"),
        )
    ),
    Key("protocol", _protocol, "For etcd: http, or https to encrypt, which the files below imply"),
    Key("cacert", FlagValue, "For etcd: file (PEM) with the authority of its certificate, else the system's"),
    Key("cert", FlagValue, "For etcd: file (PEM) with this node's certificate"),
    Key("key", FlagValue, "For etcd: file (PEM) with the private key of cert"),
    Key("user", _user, "For etcd: the user name of this node", scope="leased"),
    Key("password_file", FlagValue,
        "For etcd: file with the password, else DLROVER_ETCD_PASSWORD or DLROVER_ETCD_PASSWORD_FILE",
        scope="leased"),
    Key("prefix", _prefix, f"For etcd: the path of all keys, else {kinds.DEFAULT_PREFIX}", scope="leased"),
    *(Key(name, FlagValue, alias=alias) for name, alias in (("ca_cert", "cacert"), ("ssl_cert", "cert"))),
    Key("ssl_cert_key", FlagValue, alias="key"),
    Key("etcd_prefix", _prefix, alias="prefix"),
    # torchrun's c10d does not read `timeout` either: it is for static and etcd, and LaunchConfig sets it for all.
    *(Key(name, _whole_seconds) for name in ("timeout", "close_timeout", "heartbeat_timeout", "read_timeout")),
    Key("cas_backoff_max_seconds", _time),
    Key("rank", FlagValue),
    Key("store_type", _store_type),
)
# fmt: on

_OF_FEATURES = {key: name for name, feature in OF_FEATURES.items() for key in feature.keys}

TABLE = (*_OF_RULES, *_OF_FEATURES, *_OF_PLACE)

_BY_NAME = {key.name: key for key in TABLE}

CONNECTION_KEYS = frozenset(
    (*("token_file", "tls_ca", "tls_cert", "tls_key"), *("protocol", "cacert", "cert", "key", "prefix"), "user")
) | {"password_file"}
"""The keys that a program reads which only asks a running job: how to reach its records, and its credentials."""


def defaults() -> dict[str, Any]:
    """The default of each key that sets a rule, by the name of the key."""
    known = {key.name: getattr(JobRules(), key.field) for key in _OF_RULES}
    for feature in OF_FEATURES.values():
        rules = feature.default_rules() if feature.default_rules is not None else None
        known |= {key.name: getattr(rules, key.field) for key in feature.keys}
    return known


def parse(source: str, text: str) -> RdzvConf:
    """The record of `key=value,key=value`.

    torchrun accepts unknown keys silently, so they are reported as warnings and not refused.
    """
    texts = _pairs(source, text)
    parsed = {key: key.parse(f"{source} {name}", text) for name, text in texts.items() if (key := _BY_NAME.get(name))}
    features: dict[str, dict[str, Any]] = {}
    for key, value in parsed.items():
        if key in _OF_FEATURES:
            features.setdefault(_OF_FEATURES[key], {})[key.field] = value
    return RdzvConf(
        rules=replace(JobRules(), **{key.field: value for key, value in parsed.items() if key in _OF_RULES}),
        **_fields(source, {key: value for key, value in parsed.items() if key in _OF_PLACE}),
        features=features,
        keys=tuple(parsed),
        unknown=tuple(name for name in texts if name not in _BY_NAME),
    )


def _fields(source: str, parsed: dict[Key, Any]) -> dict[str, Any]:
    """The fields of `RdzvConf` that the keys set; two spellings of one key must agree."""
    setters: dict[str, Key] = {}
    for key in parsed:
        name = key.field
        if name not in RdzvConf._fields:
            continue
        other = setters.setdefault(name, key)
        first, second = _text(parsed[other]), _text(parsed[key])
        if first != second:
            raise SpecError(
                f"{source} has {other.name} {first!r} and {key.name} {second!r}, two names of the same key: "
                "give one of them."
            )
    return {name: parsed[key] for name, key in setters.items()}


def _text(value: Any) -> Any:
    return value.text if isinstance(value, FlagValue) else value


def _pairs(source: str, text: str) -> dict[str, str]:
    text = _unquoted(text.strip())
    if not text:
        return {}
    pairs = [tuple(part.strip() for part in pair.partition("=")) for pair in text.split(",")]
    # Checked first, because the other errors quote the text.
    for key, _, value in pairs:
        name = key.strip("'\"").lower()
        if name == "token":
            raise _exposed(source, "token", "DLROVER_RDZV_TOKEN")
        # etcdctl takes `user=name:password`.
        if name == "password" or (name == "user" and ":" in value):
            raise _exposed(source, "password", "DLROVER_ETCD_PASSWORD")
    for key, equals, value in pairs:
        if not key or not value:
            problem = f"contains {key + equals + value!r}, which is not key=value"
            raise values.invalid(source, text, problem, "give key=value,key=value")
    return {key: value for key, _, value in pairs}


def _unquoted(text: str) -> str:
    """The text without quotes around all of it, which remain if a launcher is started without a shell."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1].strip() if quoted else text


def _exposed(source: str, secret: str, variable: str) -> SpecError:
    return SpecError(
        f"{source} contains a {secret}, which every process list shows: put it into a file and give "
        f"{secret}_file=PATH, or set {variable}."
    )
