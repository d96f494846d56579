"""The grammar of flag values: each function parses one text into one typed value, or raises SpecError.

The first argument is the source of the text (`--max-restarts`, `PET_MAX_RESTARTS`), which begins the error message.
Nothing here reads files, the environment or the machine.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence

from dlrover_run.spec import FlagValue, PreemptionNotice, SpecError, Std, StreamMap
from dlrover_run.words.text import join_words

WORKER_COUNTS = ("auto", "gpu", "cpu", "xpu")
"""The words for a number of workers that is counted."""

MAX_PORT = 65535

MAX_INTEGER = 2**31 - 1
"""The largest integer that any flag accepts: far above every use, and small enough for every message field."""

MAX_NAME_LENGTH = 255
"""Characters of a name that is sent to other nodes."""

_MAX_DIGITS = 9
"""Digits of the longest local rank or port that is parsed: Python converts no text of thousands of digits."""

TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})

_STREAMS = {"0": Std.NONE, "1": Std.OUT, "2": Std.ERR, "3": Std.ALL}

_HOST = re.compile(r"[\w.:-]+")
_HOST_FORMS = "a host name, an IPv4 address or an IPv6 address in brackets"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?")
_UNITS: Mapping[str, int] = {
    "": 1,
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{letter: 1000**power for power, letter in enumerate("KMGT", 1)},
}
MAX_MIB = 1 << 24
"""16 TiB, more than any machine has."""


def invalid(source: str, text: str, problem: str, remedy: str) -> SpecError:
    """The error for a value, always of one shape: where, what is wrong, what to do."""
    return SpecError(f"{source} {text!r} {problem}: {remedy}.")


def switch(source: str, text: str) -> bool:
    """On or off as an environment variable gives it: a word, or any integer as torchrun accepts it."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    try:
        return bool(int(word))
    except ValueError:
        raise invalid(source, text, "is neither on nor off", "give 1 or 0 (true, yes, on, false, no, off)") from None


def ratio(source: str, text: str) -> float:
    """A finite number above 1."""
    return _number(source, text, "a number above 1", lambda value: value > 1)


def _number(source: str, text: str, allowed: str, fits: Callable[[float], bool]) -> float:
    """A finite number that fits; `allowed` says which ones do."""
    try:
        value = float(text)
    except ValueError:
        raise invalid(source, text, "is not a number", f"give {allowed}") from None
    if not (math.isfinite(value) and fits(value)):
        raise invalid(source, text, "is out of range", f"give {allowed}")
    return value


def integer(source: str, text: str, lowest: int, highest: int | None = None) -> int:
    """An integer of at least `lowest` and at most `highest`."""
    allowed = f"an integer of {lowest} or more" if highest is None else f"an integer from {lowest} to {highest}"
    try:
        number = int(text)
    except ValueError:
        raise invalid(source, text, "is not an integer", f"give {allowed}") from None
    if number > MAX_INTEGER:
        raise invalid(source, text, "is out of range", f"give at most {MAX_INTEGER if highest is None else highest}")
    if number < lowest or (highest is not None and number > highest):
        raise invalid(source, text, "is out of range", f"give {allowed}")
    return number


def seconds(source: str, text: str, *, zero_allowed: bool) -> float:
    """A finite time in seconds; fractions are allowed."""
    if zero_allowed:
        return _number(source, text, "a number of seconds, 0 or more", lambda value: value >= 0)
    return _number(source, text, "a number of seconds above 0", lambda value: value > 0)


def memory_size(source: str, text: str, *, zero_allowed: bool = False) -> int:
    """A size of memory in whole MiB: `4Gi`, `512Mi`, `4G` (10^9 bytes each), or a plain number of bytes. Called for
    flags of a feature, and by tf-ps-run for the memory of its tasks."""
    remedy = "give a size such as 4Gi or 512Mi"
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise invalid(source, text, "is not a size of memory", remedy)
    number, unit = found.groups(default="")
    if zero_allowed and not float(number):
        return 0
    mib = math.floor(float(number) * _UNITS[unit] / 2**20)
    if not 1 <= mib <= MAX_MIB:
        raise invalid(source, text, "is out of range", f"{remedy}, from 1Mi to {MAX_MIB // 1024 // 1024}Ti")
    return mib


def choice(source: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise invalid(source, text, "is not valid", f"give {alternatives(allowed)}")
    return text


def node_range(source: str, text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX` nodes as the pair (MIN, MAX). Called wherever a number of nodes is read: for the rendezvous, for
    the size that a cluster gives, and by features."""
    return number_range(source, text, "nodes", zero_allowed=False)


def number_range(source: str, text: str, what: str, *, zero_allowed: bool) -> tuple[int, int]:
    """`N` or `MIN:MAX` as the pair (MIN, MAX); `what` names the things counted. Called by `node_range`, and by
    tf-ps-run for its numbers of servers and workers."""
    remedy = f"give N or MIN:MAX with 0 {'<=' if zero_allowed else '<'} MIN <= MAX"
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise invalid(source, text, f"is not a number of {what}", remedy) from None
    if len(numbers) > 2:
        raise invalid(source, text, "has more than two parts", remedy)
    low, high = numbers[0], numbers[-1]
    if not (0 if zero_allowed else 1) <= low <= high:
        raise invalid(source, text, "is out of range", remedy)
    return low, high


def host(source: str, text: str) -> str:
    """A host name or address; the brackets around an IPv6 address are removed."""
    name = _without_brackets(text)
    if name is None:
        raise invalid(source, text, "is not a host", f"give {_HOST_FORMS}")
    return name


def endpoint(source: str, text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[ipv6]` or `[ipv6]:port` as the pair (host, port); an empty text means this machine."""
    written = text.strip()
    if not written:
        return "localhost", default_port
    address, port = written, str(default_port)
    if ":" in written and not written.endswith("]"):
        address, _, port = written.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= _MAX_DIGITS and int(port) <= MAX_PORT):
        raise invalid(source, text, "has an invalid port", f"give HOST:PORT with a port from 0 to {MAX_PORT}")
    name = _without_brackets(address)
    # Otherwise `::1` without brackets would be the host `:` with port 1.
    if name is None or (":" in address and not address.endswith("]")):
        raise invalid(source, text, "has an invalid host", f"give HOST:PORT, where HOST is {_HOST_FORMS}")
    return name, int(port)


def _without_brackets(text: str) -> str | None:
    name = text[1:-1] if len(text) > 2 and text.startswith("[") and text.endswith("]") else text
    return name if _HOST.fullmatch(name) else None


def shared_name(source: str, text: str, *, empty_allowed: bool = False) -> str:
    """The text, if it can be a name that is the same on all nodes; raises SpecError otherwise. Called for the job's id
    and for the role of its workers."""
    if not (empty_allowed or text) or len(text) > MAX_NAME_LENGTH or not text.isprintable():
        least = 0 if empty_allowed else 1
        problem = f"must be {least}-{MAX_NAME_LENGTH} printable characters"
        raise invalid(source, text, problem, "give another name, the same on all nodes")
    return text


def streams(source: str, text: str) -> StreamMap:
    """`0` to `3` for every rank, or `rank:value,rank:value` for some local ranks.

    Ranks that this node does not have are accepted: the nodes of a job may run different numbers of workers with the
    same command line.
    """
    if text in _STREAMS:
        return StreamMap(default=_STREAMS[text])
    by_rank: dict[int, Std] = {}
    for item in text.split(","):
        rank, colon, value = item.partition(":")
        if not (colon and rank.isascii() and rank.isdigit() and len(rank) <= _MAX_DIGITS and value in _STREAMS):
            remedy = "give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or RANK:VALUE,RANK:VALUE"
            raise invalid(source, text, "does not name output streams", remedy)
        by_rank[int(rank)] = _STREAMS[value]
    return StreamMap(by_rank=by_rank)


def rank_set(source: str, text: str) -> frozenset[int] | None:
    """Local ranks, separated by commas; None (every rank) for an empty text."""
    if not text:
        return None
    try:
        ranks = frozenset(int(item) for item in text.split(","))
    except ValueError:
        raise invalid(source, text, "is not a list of local ranks", "give integers such as 0,1,2") from None
    if min(ranks) < 0:
        raise invalid(source, text, "has a negative rank", "give integers such as 0,1,2")
    return ranks


def comma_list(text: str) -> tuple[str, ...]:
    """The items of a list that is separated by commas; a doubled comma stands for a comma in an item."""
    items = [""]
    for position, chunk in enumerate(text.split(",,")):
        first, *others = chunk.split(",")
        items[-1] += ("," if position else "") + first
        items.extend(others)
    return tuple(items)


def signals(source: str, text: str, prefix: str = "") -> tuple[signal.Signals, ...]:
    """Names of signals that a process can handle, in the order given and each once; `prefix` may be left out."""
    chosen: dict[signal.Signals, None] = {}
    for written in (item.strip() for item in text.split(",")):
        name = written if written.startswith(prefix) else prefix + written
        if name not in signal.Signals.__members__:
            problem = f"contains {written!r}, which is not the name of a signal"
            raise invalid(source, text, problem, "give names such as SIGTERM,SIGINT,SIGUSR1")
        number = signal.Signals[name]
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise invalid(source, text, f"contains {name}, which no process can handle", f"leave {name} out")
        if number is signal.SIGCHLD:
            raise invalid(source, text, "contains SIGCHLD, which reports the end of workers", "leave SIGCHLD out")
        chosen[number] = None
    return tuple(chosen)


def forwarded_signals(value: FlagValue, handled: FlagValue) -> tuple[signal.Signals, ...]:
    """Names of signals to pass on, with or without SIG, in the order given; none of them may be in `handled`. Called by
    both launchers."""
    if not value.text:
        return ()
    chosen = signals(*value, "SIG")
    for number in chosen:
        if number in signals(*handled):
            problem = f"contains {number.name}, which ends the job ({handled.source} {handled.text})"
            raise invalid(*value, problem, "leave it out of one of the two")
        if number is signal.SIGCONT:
            raise invalid(*value, "contains SIGCONT, which the launcher sends itself", "leave SIGCONT out")
    return chosen


def preemption_notice(value: FlagValue, others: Sequence[FlagValue]) -> PreemptionNotice | None:
    """`SIGNAL@SECONDS`, as Slurm writes it; None for an empty text. The signal may not be in one of the `others`.
    Called by both launchers."""
    if not value.text:
        return None
    name, _, seconds_text = value.text.partition("@")
    chosen = signals(value.source, name, "SIG") if seconds_text else ()
    if len(chosen) != 1 or chosen[0] is signal.SIGCONT:
        raise invalid(*value, "is not a signal and a time", "give them as in USR1@120")
    for other in others:
        if other.text and chosen[0] in signals(*other, "SIG"):
            problem = f"contains {chosen[0].name}, as {other.source} {other.text} does"
            raise invalid(*value, problem, "leave it out of one of the two")
    return PreemptionNotice(chosen[0], seconds(value.source, seconds_text, zero_allowed=False))


def regex(source: str, text: str) -> str:
    """A regular expression with one group at most, or with one whose number is the step; empty for an empty text."""
    try:
        # Compiled for bytes, as the lines of a worker need not be valid in any encoding.
        re.compile(text.encode())
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        problem = f"is not a regular expression ({error})"
        raise invalid(source, text, problem, "give one in Python's syntax, such as 'step (\\d+)'") from None
    return text


def modules(source: str, text: str) -> tuple[str, ...]:
    """Dotted names of modules, separated by commas."""
    names = tuple(item.strip() for item in text.split(","))
    for name in names:
        if not _MODULE.fullmatch(name):
            problem = f"contains {name!r}, which is not the name of a module"
            raise invalid(source, text, problem, "give names such as torch,numpy")
    return names


def module(source: str, text: str) -> str:
    """One dotted name of a module, as `python -m` takes it."""
    if not all(text.split(".")):
        raise invalid(source, text, "is not the name of a module", "give a dotted name such as package.train")
    return text


def worker_count(source: str, text: str) -> int | None:
    """The number of workers of a node; None for a word that names what to count."""
    try:
        int(text)
    except ValueError:
        if text not in WORKER_COUNTS:
            remedy = f"give a number of workers, {alternatives(WORKER_COUNTS)}"
            raise invalid(source, text, "is not valid", remedy) from None
        return None
    return integer(source, text, 1)


def alternatives(words: Sequence[str]) -> str:
    """The words of a choice for a sentence: `a`, `a or b`, `a, b or c`."""
    return join_words(words, "or")
