"""The grammar of `--rdzv-conf`: which keys it has, what they take, and the record that they come to.

torchrun's keys and ours stand side by side. Those of torchrun's that have no meaning here are checked and then left
alone: jobs in the wild have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.coordination.rules import Rules
from dlrover_run.spec import SpecError

MOST = 1_000_000
"""The highest that a count may be, which is more than anybody needs."""

_ABOVE_ZERO = frozenset({"join_timeout", "last_call_timeout", "keep_alive_interval"})
_FROM_ZERO = frozenset({"pend_timeout", "lost_after", "scale_up_delay", "restart_window"})
_COUNTS = {"keep_alive_max_attempt": 1, "early_failure_limit": 0}
_CHOICES = {
    "is_host": ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"),
    "auth": ("auto", "required"),
    "store_type": ("tcp", "file"),
    "protocol": ("http", "https"),
}
_TEXTS = frozenset({"token_file", "tls_ca", "tls_cert", "tls_key", "state_dir", "bind"})
# torchrun's c10d has no `timeout` either: it is for static and etcd, and LaunchConfig hands it to every backend.
_IGNORED_SECONDS = frozenset({"timeout", "close_timeout", "heartbeat_timeout", "read_timeout"})
_IGNORED_TEXTS = frozenset({"rank", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix", "cacert", "cert", "key"})

KEYS = _ABOVE_ZERO | _FROM_ZERO | _COUNTS.keys() | _CHOICES.keys() | _TEXTS | _IGNORED_SECONDS | _IGNORED_TEXTS
"""Every key that something reads, here or in torchrun."""

_OURS_FOR_SEVERAL = _TEXTS | {"auth", "pend_timeout", "lost_after", "scale_up_delay"}

_TRUE_HOST = ("1", "true", "t", "yes", "y")
_FIELD_OF_RULES = {"keep_alive_max_attempt": "keep_alive_attempts"}


class RendezvousConf(NamedTuple):
    """What `--rdzv-conf` says. `rules` are the defaults but for what was given; a text keeps its place.

    `for_several` are the keys among those given that torchrun does not have and that only mean something where nodes
    meet at a master; `unknown` are those that nothing reads.
    """

    rules: Rules
    is_host: bool | None = None
    auth_required: bool = False
    bind: str | None = None
    state_dir: Given | None = None
    token_file: Given | None = None
    tls_ca: Given | None = None
    tls_cert: Given | None = None
    tls_key: Given | None = None
    for_several: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def read(place: str, text: str) -> RendezvousConf:
    """The record of `key=value,key=value`.

    torchrun takes unknown keys in silence, so they are reported, not refused.
    """
    given = _pairs(place, text)
    rules: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{place} {key}"
        field = _FIELD_OF_RULES.get(key, key)
        if key in _ABOVE_ZERO or key in _FROM_ZERO:
            rules[field] = flags.seconds(where, value, zero_allowed=key in _FROM_ZERO)
        elif key in _COUNTS:
            rules[field] = flags.whole_number(where, value, _COUNTS[key], MOST)
        elif key in _IGNORED_SECONDS:
            flags.whole_number(where, value, 1)
        elif key in _CHOICES:
            flags.choice(where, value.lower(), _CHOICES[key])
    texts = {key: Given(f"{place} {key}", given[key]) for key in _TEXTS - {"bind"} if key in given}
    return RendezvousConf(
        rules=replace(Rules(), **rules),
        is_host=given["is_host"].lower() in _TRUE_HOST if "is_host" in given else None,
        auth_required=given.get("auth", "").lower() == "required",
        bind=flags.host(f"{place} bind", given["bind"]) if "bind" in given else None,
        **texts,
        for_several=tuple(key for key in given if key in _OURS_FOR_SEVERAL),
        unknown=tuple(key for key in given if key not in KEYS),
    )


def _pairs(place: str, text: str) -> dict[str, str]:
    if not text.strip():
        return {}
    pairs = [tuple(part.strip() for part in pair.partition("=")) for pair in text.split(",")]
    # Before anything else is said of the text, for what is wrong with it may quote it.
    if any(key.strip("'\" ").lower() == "token" for key, _, _ in pairs):
        raise SpecError(
            f"{place} has a token in it, where every list of processes shows it: put it into a file and give "
            "token_file=PATH, or set DLROVER_RDZV_TOKEN."
        )
    for key, equals, value in pairs:
        if not key or not value:
            wrote = f"{key}{equals}{value}"
            raise flags.wrong(place, text, f"has {wrote!r} in it, which is no key=value", "give key=value,key=value")
    return {key: value for key, _, value in pairs}
