"""Takes tracebacks out of log records: JSON objects, and lines that each begin with a time or a name.

`tracebacks` then sees a traceback as Python itself prints it, or as rich draws it. Tried with the recorded output of
logging, loguru, structlog and rich in tests/decisions/failures/printed_errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

HEADING = "Traceback (most recent call last):"
"""The line with which Python begins a traceback."""

MAX_RECORD = 64 * 1024
"""Characters of the longest line that is read as JSON."""

# The heading of a group of exceptions is indented, and rich writes it into the upper edge of a box.
_HEADED = re.compile(
    r"(?P<prefix>.*?)(?:  \+ Exception Group |[\u256d\u250c+][\u2500-]+ )?Traceback \(most recent call last\)"
)


def unpack_records(lines: Sequence[str]) -> list[str]:
    """The lines with each traceback as it would be without a logger: out of JSON, and without the prefix that a logger
    writes before each of its lines."""
    return _without_prefixes([each for line in lines for each in _from_json(line)])


def _without_prefixes(lines: Sequence[str]) -> list[str]:
    found = []
    prefix: re.Pattern[str] | None = None
    for line in lines:
        matched = prefix.match(line) if prefix is not None else None
        if matched is None:
            headed = _HEADED.match(line)
            # A bar belongs to a group of exceptions or to a box, and not to a logger.
            if headed is None or not headed["prefix"].strip(" |\u2502"):
                prefix = None
                found.append(line)
                continue
            prefix = _pattern(headed["prefix"])
            matched = prefix.match(line)
        found.append(line[matched.end() :] if matched is not None else line)
    return found


def _pattern(prefix: str) -> re.Pattern[str]:
    """Matches the prefix of other lines of the same record: the digits of a time may differ."""
    bare = prefix.rstrip(" ")
    digits = re.sub(r"\d+", r"\\d+", re.sub(r"[^\w\s]", lambda found: re.escape(found.group()), bare))
    return re.compile(f"{digits} {{0,{len(prefix) - len(bare)}}}")


def _from_json(line: str) -> list[str]:
    """The lines of the traceback in a record; the line itself if it is no record of an exception."""
    if not (line.startswith("{") and line.endswith("}")) or len(line) > MAX_RECORD:
        return [line]
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    for value in record.values():
        if isinstance(value, str) and HEADING in value:
            return value.rstrip("\n").split("\n")
    chain = record.get("exception")
    if not isinstance(chain, list) or not all(isinstance(each, Mapping) and "exc_type" in each for each in chain):
        return [line]
    # The first one of structlog's list is the one that was raised last.
    return [each for error in reversed(chain) for each in _as_printed(error)]


def _as_printed(error: Mapping[str, object]) -> list[str]:
    frames = error.get("frames")
    places = [frame for frame in frames if isinstance(frame, Mapping)] if isinstance(frames, list) else []
    return [
        HEADING,
        *(f'  File "{at.get("filename")}", line {at.get("lineno")}, in {at.get("name")}' for at in places),
        *f"{error['exc_type']}: {error.get('exc_value')}".split("\n"),
    ]
