"""The grammar of flag values that only tf-ps-run has, beside `dlrover_run.command_line.values`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from dlrover_run.command_line.values import FlagValue, invalid
from dlrover_run.spec import SpecError, Std, StreamMap
from tf_ps_runner.memory import MIB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?")
_UNITS: Mapping[str, int] = {
    "": 1,
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{letter: 1000**power for power, letter in enumerate("KMGT", 1)},
}
_MAX_MIB = 1 << 24
"""16 TiB, more than any machine has."""


def memory_size(source: str, text: str) -> int:
    """A size of memory in whole MiB: `4Gi`, `512Mi`, `4G` (10^9 bytes each), or a plain number of bytes."""
    remedy = "give a size such as 4Gi or 512Mi"
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise invalid(source, text, "is not a size of memory", remedy)
    number, unit = found.groups(default="")
    mib = math.floor(float(number) * _UNITS[unit] / MIB)
    if not 1 <= mib <= _MAX_MIB:
        raise invalid(source, text, "is out of range", f"{remedy}, from 1Mi to {_MAX_MIB // 1024 // 1024}Ti")
    return mib


def check_memory_sizes(limits: Mapping[FlagValue, int], highest: FlagValue, highest_mib: int) -> None:
    """Refuse a memory limit above the highest that a replacement may have."""
    for given, mib in limits.items():
        if mib > highest_mib:
            raise SpecError(f"{given.source} {given.text} is more than {highest.source} {highest.text}: raise one.")


def all_streams(source: str, text: str) -> StreamMap:
    """`0` to `3` for every task. Ranks cannot be named, because tasks of all roles share a node."""
    if text not in ("0", "1", "2", "3"):
        remedy = "give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all tasks"
        raise invalid(source, text, "does not name output streams", remedy)
    return StreamMap(default=Std(int(text)))
