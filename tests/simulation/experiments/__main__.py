"""What the experiments of restarts find in simulated jobs with planted causes. See `docs/experiments.md`.

PYTHONPATH=.:tests python -m simulation.experiments --jobs=1000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations

from simulation.experiments.jobs import CAUSES, Outcome, planted_job

SIZES = (1, 2, 4, 16)


def share(count: int, of: int) -> str:
    return f"{100 * count / of:.1f}" if of else "-"


def row(causes: Sequence[str], size: int, jobs: int, budget: int) -> tuple[str, int]:
    """A row of the table, and how many wrong verdicts it has."""
    with_it, without = ([planted_job(causes, size, budget, n, on) for n in range(jobs)] for on in (True, False))
    wrong = sum(False in each.verdicts for each in with_it)
    right = sum(True in each.verdicts and False not in each.verdicts for each in with_it)
    coarse = sum("coarse" in each.verdicts and not {True, False} & set(each.verdicts) for each in with_it)
    unknown = jobs - wrong - right - coarse

    def mean(of: list[Outcome]) -> str:
        done = share(sum(each.finished for each in of), jobs)
        return (
            f"{sum(each.restarts for each in of) / jobs:.2f} | {done} | {sum(each.seconds for each in of) / jobs:.0f}"
        )

    more = sum(a.restarts > b.restarts and not a.finished for a, b in zip(with_it, without, strict=True))
    shares = " | ".join(share(each, jobs) for each in (right, coarse, wrong, unknown))
    return f"| {' + '.join(causes)} | {size} | {shares} | {mean(with_it)} | {mean(without)} | {more} |", wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000, help="for each cause and size")
    parser.add_argument("--budget", type=int, default=5, help="restarts of each job")
    parser.add_argument("--two", action="store_true", help="two causes at once")
    given = parser.parse_args()
    names = [name for name in CAUSES if name != "outage"]
    planted: list[tuple[str, ...]] = list(combinations(names, 2)) if given.two else [(name,) for name in CAUSES]
    print(
        "| cause | nodes | right | right, with others | wrong | not known | restarts with | finished with | s with "
        "| restarts without | finished without | s without | more restarts |"
    )
    print("|" + "---|" * 13)
    wrong = 0
    for causes in planted:
        for size in SIZES:
            line, mistakes = row(causes, size, given.jobs, given.budget)
            wrong += mistakes
            print(line, flush=True)
    print(f"\n{wrong} wrong of {len(planted) * len(SIZES) * given.jobs}")


if __name__ == "__main__":
    main()
