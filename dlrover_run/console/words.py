"""How the console speaks of times and ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable

from dlrover_run.failures.tracebacks import plain_lines


def time_of_day(unix_time: float) -> str:
    """The local time of day: `04:12:07`."""
    return time.strftime("%H:%M:%S", time.localtime(unix_time))


def duration(seconds: float) -> str:
    """A length of time for people: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 3 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rank_words(ranks: Iterable[int]) -> str:
    """Ranks for people: `rank 4`, `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        # A run of two reads better as two numbers.
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"


def harmless(text: str) -> str:
    """Words of another node or a master, without what would steer a terminal: whoever said them may be anybody."""
    return "\n".join(plain_lines(text))


def cells(text: str) -> int:
    """How many columns of a terminal a line takes at most: East Asian characters have two. What stands above another
    character, and takes none, is counted as well, for a line must not turn out longer than was thought."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def clip(text: str, columns: int) -> str:
    """As much of the beginning of a line as fits into so many columns."""
    if text.isascii():
        return text[: max(0, columns)]
    for end, character in enumerate(text):
        columns -= _cells_of(character)
        if columns < 0:
            return text[:end]
    return text


def _cells_of(character: str) -> int:
    # A library that hardly any launch needs.
    import unicodedata

    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
