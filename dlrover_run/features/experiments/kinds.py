"""The kind of a failure: two failures are the same if their kinds are equal. Pure.

A kind is made of the cause, and of each traceback of the worker's output: the type of the exception, the innermost
frame of the user's code, and the form of the message. What differs between two runs of one defect is no part of it:
numbers, addresses, paths, ranks, devices and what was read. The rules are in docs/experiments.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise, takewhile
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.failures import causes, tracebacks
from dlrover_run.failures.causes import Cause
from dlrover_run.failures.worker_exit import WorkerExit

MAX_TEXT = 200
"""Characters of the exception and of its place, for people."""

MAX_LINKS = 4
"""Tracebacks of a chain that count, half of them from each of its ends."""

MESSAGE_LINES = 2
"""Lines of a message that count: the later ones are explanations of a library, or a list of what was found."""

RECURSION_FRAMES = 8
"""Frames at the end of an endless recursion, of which the set counts: where it ends depends on the depth before it."""

COMPARED = frozenset({Cause.EXCEPTION, Cause.SIGNAL, Cause.EXIT_CODE})
"""The causes of failures that are compared. Each of the others has an explanation already, or is in another worker."""

_SENT = frozenset({9, 15, 2, 1, 3})
"""Signals that another process sends: a death by one of them tells nothing of the worker."""

_HEADING = re.compile(
    r"(?:^|[ |+\u2500-])(?:Original |Exception Group )?Traceback \(most recent call last\)|^Fatal Python error: "
)
_BARS = re.compile(r"^\s*[|+\u2502]?(?: *\|)* ?(?:\+-.*)?")
_FRAMES = (
    re.compile(r'^\s*(?:> )?File "(?P<file>.+)", line (?P<line>\d+)(?:,? in (?P<name>.*))?$'),
    # As rich draws it.
    re.compile(r"^\s*(?P<file>\S+\.py):(?P<line>\d+) in (?P<name>\S+)\s*$"),
)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen |/runpy\.py$")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|Group|[A-Z]\w*))(?::|$)")

# An error of a device is raised by a later call than the one that caused it.
_LATE = re.compile(
    r"\b(?:CUDA|HIP|XPU|CUDNN|CUBLAS|NCCL) (?:kernel )?error|CUDNN_STATUS|CUBLAS_STATUS|AcceleratorError"
)
# These name what the program itself is made of, and not what it has read.
_OF_NAMES = ("NameError", "UnboundLocalError", "AttributeError", "ImportError", "ModuleNotFoundError", "TypeError")

_FORMS = (
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"(?:[A-Za-z]:)?(?:[\w.@+~-]*/)+[\w.@+-]*"), "<path>"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"\b[+-]?(?:nan|inf|infinity)\b", re.IGNORECASE), "#"),
    (re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"), "#"),
)
_QUOTED = re.compile(r"""(?<![\w])(?:'[^'\n]*'|"[^"\n]*"|`[^`\n]*`)""")
_REPEATED = re.compile(r"(#|<text>|<path>)(?:[\s,;x*:]*\1)+")


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes two failures the same: the digest of all that counts. The rest is for people: the cause, and the
    exception and the innermost place of the user's code, empty where none is known."""

    digest: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    cause: Annotated[str, Meta(max_length=32)] = ""
    error: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    place: Annotated[str, Meta(max_length=MAX_TEXT)] = ""


class _Link(NamedTuple):
    """One traceback: what was raised, where, the form of its message, and the function of a library that raised it."""

    error: str
    place: str
    form: str
    inside: str = ""


def kind_of(end: WorkerExit) -> Kind | None:
    """The kind of a worker's failure; None for one that is not compared: it is explained already (memory, disk, a
    device), another worker is the cause, or another process has ended the worker."""
    cause = causes.cause_of(end)
    if cause not in COMPARED or (cause is Cause.SIGNAL and -end.code in _SENT):
        return None
    links = links_of(causes.trace_lines(end)) if cause is not Cause.EXIT_CODE else []
    status = "" if cause is Cause.EXCEPTION else str(end.code)
    if not links and cause is Cause.EXCEPTION:
        summary = causes.summarize_error(end) or ""
        links = [_Link(summary.partition(":")[0], "", form_of([summary]))]
    counted = links if len(links) <= MAX_LINKS else links[: MAX_LINKS // 2] + links[-MAX_LINKS // 2 :]
    digest = sha256("\0".join((cause, status, *("\1".join(link) for link in counted))).encode()).hexdigest()[:16]
    shown = links[-1] if links else _Link("", "", "")
    error = shown.error or causes.describe_exit(end)
    return Kind(digest, str(cause), error[:MAX_TEXT], shown.place[:MAX_TEXT])


def links_of(trace: Sequence[str]) -> list[_Link]:
    """The tracebacks in the lines of a failure, in their order."""
    # An error of the syntax has no heading.
    starts = [at for at, line in enumerate(trace) if _HEADING.search(line)] or ([0] if trace else [])
    links = (_link(trace[at:end]) for at, end in pairwise([*starts, len(trace)]))
    # How many parts of a group have failed in one way differs.
    return list(dict.fromkeys(links))


def _link(lines: Sequence[str]) -> _Link:
    plain = [line if line.startswith("  File") else _BARS.sub("", line, count=1).rstrip(" |\u2502") for line in lines]
    frames = [found for line in plain if (found := next(filter(None, (each.match(line) for each in _FRAMES)), None))]
    raised = next((at for at, line in enumerate(plain) if at and _RAISED.match(line)), None)
    message = [] if raised is None else list(takewhile(_goes_on, plain[raised : raised + MESSAGE_LINES]))
    found = _RAISED.match(message[0]) if message else None
    error = found["type"] if found is not None else ""
    if lines[0].startswith("Fatal Python error: "):
        error, message = lines[0], []
        # A dump begins with the innermost frame of the thread that failed.
        frames = list(reversed(frames))
    if _LATE.search(" ".join(message)):
        return _Link(error, "", form_of(message))
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])] or frames
    if error == "RecursionError":
        place = ", ".join(sorted({_place(frame) for frame in own[-RECURSION_FRAMES:]}))
        return _Link(error, place, form_of(message))
    # Of a library only the function counts: its lines say how far it came with what it was given.
    inside = "" if not frames or frames[-1] is own[-1] else frames[-1]["name"] or ""
    return _Link(error, _place(own[-1]) if own else "", form_of(message), inside)


def _goes_on(line: str) -> bool:
    """Whether a line after an exception belongs to its message: a rule separates the parts of a group."""
    return bool(line.strip()) and "--------" not in line and not _HEADING.search(line)


def _place(frame: re.Match[str]) -> str:
    """File, line and function. Of the path only the name counts: a script may be staged to another directory."""
    file = re.sub(r".*/", "", frame["file"])
    return f"{file}:{frame['line']}" + (f" in {frame['name']}" if frame["name"] else "")


def form_of(message: Sequence[str]) -> str:
    """The message without what differs between two runs of one defect."""
    text = " ".join(" ".join(tracebacks.plain_lines(line)[0].split()) for line in message)
    if not text.startswith(_OF_NAMES):
        text = _QUOTED.sub("<text>", text)
    for pattern, by in _FORMS:
        text = pattern.sub(by, text)
    return _REPEATED.sub(r"\1", text)[: 4 * MAX_TEXT]
