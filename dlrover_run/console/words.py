"""How the console speaks of times and ranks."""

from __future__ import annotations

from collections.abc import Iterable

from dlrover_run.failures.tracebacks import plain_lines


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
