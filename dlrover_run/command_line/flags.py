"""The grammar of flag values: each function turns one text into one typed value, or says in a sentence what would do.

The first argument is the place where the user wrote the value (`--max-restarts` or `PET_MAX_RESTARTS`), so that the
sentence points there. Nothing here reads files, the environment or the machine.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.command_line.options import CHECK_WORDS, WORKER_COUNTS
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE
from dlrover_run.spec import SpecError, Std, StreamMap

STATIC_PORT = 29500
"""The port of the static store when nobody names one, as in torchrun."""

LAST_PORT = 65535

LARGEST = 2**31 - 1
"""The largest number that is taken anywhere: far beyond use, and within what can be written into a message."""

_RANK_DIGITS = 9
"""Digits of the longest local rank that is read: more than any machine has workers."""

TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})

_STREAMS = {"0": Std.NONE, "1": Std.OUT, "2": Std.ERR, "3": Std.ALL}

_HOST = re.compile(r"[\w.:-]+")
_HOSTS = "a host name, an IPv4 address or an IPv6 address in brackets"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Given(NamedTuple):
    """A text and the place where the user wrote it."""

    place: str
    text: str


def wrong(place: str, text: str, problem: str, remedy: str) -> SpecError:
    """The one shape of every complaint about a value."""
    return SpecError(f"{place} {text!r} {problem}: {remedy}.")


def switch(place: str, text: str) -> bool:
    """On or off as an environment variable says it: a word, or any integer as torchrun takes it."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    try:
        return bool(int(word))
    except ValueError:
        raise wrong(place, text, "is neither on nor off", "give 1 or 0 (true, yes, on, false, no, off)") from None


def check_mode(place: str, text: str) -> int:
    """When nodes are checked: `once`, `always`, or whatever switches a flag on (once) or off (never)."""
    word = text.strip().lower()
    if word in CHECK_WORDS:
        return CHECK_ALWAYS if word == "always" else CHECK_ONCE
    try:
        return CHECK_ONCE if switch(place, text) else CHECK_NEVER
    except SpecError:
        remedy = f"give {either(CHECK_WORDS)}, or 1 or 0 (true, yes, on, false, no, off)"
        raise wrong(place, text, "is not known", remedy) from None


def ratio(place: str, text: str) -> float:
    """A finite number above 1."""
    try:
        value = float(text)
    except ValueError:
        raise wrong(place, text, "is not a number", "give a number above 1") from None
    if not 1 < value < math.inf:
        raise wrong(place, text, "is out of range", "give a number above 1")
    return value


def whole_number(place: str, text: str, lowest: int, highest: int | None = None) -> int:
    """An integer of at least `lowest` and at most `highest`."""
    allowed = f"an integer of {lowest} or more" if highest is None else f"an integer from {lowest} to {highest}"
    try:
        number = int(text)
    except ValueError:
        raise wrong(place, text, "is not an integer", f"give {allowed}") from None
    if number > LARGEST:
        raise wrong(place, text, "is out of range", f"give at most {LARGEST if highest is None else highest}")
    if number < lowest or (highest is not None and number > highest):
        raise wrong(place, text, "is out of range", f"give {allowed}")
    return number


def seconds(place: str, text: str, *, zero_allowed: bool) -> float:
    """A finite time in seconds, fractions allowed."""
    allowed = "a number of seconds, 0 or more" if zero_allowed else "a number of seconds above 0"
    try:
        value = float(text)
    except ValueError:
        raise wrong(place, text, "is not a number", f"give {allowed}") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
        raise wrong(place, text, "is out of range", f"give {allowed}")
    return value


def choice(place: str, text: str, allowed: Sequence[str]) -> str:
    """One of a few words."""
    if text not in allowed:
        raise wrong(place, text, "is not known", f"give {either(allowed)}")
    return text


def node_range(place: str, text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX` nodes as the pair (MIN, MAX)."""
    return number_range(place, text, "nodes", zero_allowed=False)


def number_range(place: str, text: str, what: str, *, zero_allowed: bool) -> tuple[int, int]:
    """`N` or `MIN:MAX` of something as the pair (MIN, MAX)."""
    remedy = f"give N or MIN:MAX with 0 {'<=' if zero_allowed else '<'} MIN <= MAX"
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise wrong(place, text, f"is not a number of {what}", remedy) from None
    if len(numbers) > 2:
        raise wrong(place, text, "has more than two parts", remedy)
    least, most = numbers[0], numbers[-1]
    if not (0 if zero_allowed else 1) <= least <= most:
        raise wrong(place, text, "is out of range", remedy)
    return least, most


def host(place: str, text: str) -> str:
    """A host name or address; the brackets around an IPv6 address go away."""
    name = _bare_host(text)
    if name is None:
        raise wrong(place, text, "is not a host", f"give {_HOSTS}")
    return name


def endpoint(place: str, text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[ipv6]` or `[ipv6]:port` as the pair (host, port); an empty text is this machine."""
    written = text.strip()
    if not written:
        return "localhost", default_port
    address, port = written, str(default_port)
    if ":" in written and not written.endswith("]"):
        address, _, port = written.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= LAST_PORT):
        raise wrong(place, text, "has a bad port", f"give HOST:PORT with a port from 0 to {LAST_PORT}")
    name = _bare_host(address)
    # `::1` without brackets would else be the host `:` with port 1.
    if name is None or (":" in address and not address.endswith("]")):
        raise wrong(place, text, "has no good host", f"give HOST:PORT, where HOST is {_HOSTS}")
    return name, int(port)


def _bare_host(text: str) -> str | None:
    name = text[1:-1] if len(text) > 2 and text.startswith("[") and text.endswith("]") else text
    return name if _HOST.fullmatch(name) else None


def streams(place: str, text: str) -> StreamMap:
    """`0` to `3` for every rank, or `rank:value,rank:value` for some local ranks, which this node need not have: the
    nodes of a job may run different numbers of workers by the same command line."""
    if text in _STREAMS:
        return StreamMap(default=_STREAMS[text])
    by_rank: dict[int, Std] = {}
    for item in text.split(","):
        rank, colon, value = item.partition(":")
        if not (colon and rank.isascii() and rank.isdigit() and len(rank) <= _RANK_DIGITS and value in _STREAMS):
            remedy = "give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or RANK:VALUE,RANK:VALUE"
            raise wrong(place, text, "does not say which streams", remedy)
        by_rank[int(rank)] = _STREAMS[value]
    return StreamMap(by_rank=by_rank)


def rank_set(place: str, text: str) -> frozenset[int] | None:
    """Local ranks, separated by commas; None (every rank) for an empty text."""
    if not text:
        return None
    try:
        ranks = frozenset(int(item) for item in text.split(","))
    except ValueError:
        raise wrong(place, text, "is not a list of local ranks", "give integers such as 0,1,2") from None
    if min(ranks) < 0:
        raise wrong(place, text, "names a negative rank", "give integers such as 0,1,2")
    return ranks


def needles(text: str) -> tuple[str, ...]:
    """A comma list in which a doubled comma stands for a comma itself."""
    found = [""]
    for position, chunk in enumerate(text.split(",,")):
        first, *others = chunk.split(",")
        found[-1] += ("," if position else "") + first
        found.extend(others)
    return tuple(found)


def signals(place: str, text: str, prefix: str = "") -> tuple[signal.Signals, ...]:
    """Names of signals that a process can handle, which may lack this prefix, in the order given, each once."""
    chosen: dict[signal.Signals, None] = {}
    for written in (item.strip() for item in text.split(",")):
        name = written if written.startswith(prefix) else prefix + written
        if name not in signal.Signals.__members__:
            problem = f"has {written!r} in it, which is no signal's name"
            raise wrong(place, text, problem, "give names such as SIGTERM,SIGINT,SIGUSR1")
        number = signal.Signals[name]
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise wrong(place, text, f"names {name}, which no process can handle", f"leave {name} out")
        if number is signal.SIGCHLD:
            raise wrong(place, text, "names SIGCHLD, which tells of the workers' ends", "leave SIGCHLD out")
        chosen[number] = None
    return tuple(chosen)


def forwarded_signals(given: Given, handled: Given) -> tuple[signal.Signals, ...]:
    """Names of signals to pass on, with or without SIG, in the order given; none of them may be `handled`."""
    if not given.text:
        return ()
    chosen = signals(*given, "SIG")
    for number in chosen:
        if number in signals(*handled):
            problem = f"names {number.name}, which ends the job ({handled.place} {handled.text})"
            raise wrong(*given, problem, "leave it out of one of the two")
        if number is signal.SIGCONT:
            raise wrong(*given, "names SIGCONT, which the launcher sends itself", "leave SIGCONT out")
    return chosen


def modules(place: str, text: str) -> tuple[str, ...]:
    """Dotted names of modules, separated by commas."""
    names = tuple(item.strip() for item in text.split(","))
    for name in names:
        if not _MODULE.fullmatch(name):
            raise wrong(place, text, f"has {name!r} in it, which is no module's name", "give names such as torch,numpy")
    return names


def module(place: str, text: str) -> str:
    """One dotted name of a module, as `python -m` takes it."""
    if not text or not all(part for part in text.split(".")):
        raise wrong(place, text, "is not a module's name", "give a dotted name such as package.train")
    return text


def workers(place: str, text: str) -> int | None:
    """How many workers a node runs when the text is a number; None when it names something to count."""
    try:
        int(text)
    except ValueError:
        if text not in WORKER_COUNTS:
            raise wrong(place, text, "is not known", f"give a number of workers, {either(WORKER_COUNTS)}") from None
        return None
    return whole_number(place, text, 1)


def either(words: Sequence[str]) -> str:
    """A choice of words for a sentence: `a`, `a or b`, `a, b or c`."""
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def known_ranks(workers: int) -> str:
    """The end of a sentence about a local rank that does not exist."""
    return "this node has only local rank 0" if workers == 1 else f"this node has local ranks 0 to {workers - 1}"
