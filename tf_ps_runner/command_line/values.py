"""The grammar of values that only tf-ps-run has; a mistake becomes one sentence, as in `dlrover_run`'s flags."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from dlrover_run.command_line import flags
from dlrover_run.command_line.flags import Given
from dlrover_run.spec import SpecError, Std, StreamMap
from tf_ps_runner.memory.limits import MIB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?")
_UNITS: Mapping[str, int] = {
    "": 1,
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{letter: 1000**power for power, letter in enumerate("KMGT", 1)},
}
_LARGEST = 1 << 24
"""MiB: 16 TiB, more than any machine has."""


def memory_size(place: str, text: str) -> int:
    """A size of memory in whole MiB: `4Gi`, `512Mi`, `4G` (10^9 bytes each), or a plain number of bytes."""
    remedy = "give a size such as 4Gi or 512Mi"
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise flags.wrong(place, text, "is not a size of memory", remedy)
    number, unit = found.groups(default="")
    mib = math.floor(float(number) * _UNITS[unit] / MIB)
    if not 1 <= mib <= _LARGEST:
        raise flags.wrong(place, text, "is out of range", f"{remedy}, from 1Mi to {_LARGEST // 1024 // 1024}Ti")
    return mib


def all_streams(place: str, text: str) -> StreamMap:
    """`0` to `3` for every process. Ranks are not told apart here, since processes of all roles share a node."""
    if text not in ("0", "1", "2", "3"):
        remedy = "give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all processes"
        raise flags.wrong(place, text, "does not say which streams", remedy)
    return StreamMap(default=Std(int(text)))


def check_sizes(limits: Mapping[Given, int], most: Given, most_mib: int) -> None:
    """Refuse a limit of memory above the most that a replacement may have."""
    for given, mib in limits.items():
        if mib > most_mib:
            raise SpecError(f"{given.place} {given.text} is more than {most.place} {most.text}: raise one of them.")
