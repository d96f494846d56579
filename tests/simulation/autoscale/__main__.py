"""Run worlds by hand: one with what was decided in it, or many with the figure of each rule."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from simulation.autoscale.job import Account, Ours, Published, run
from simulation.autoscale.worlds import HOUR, draw

GOOD = 0.95
"""The share of the best utility from which the size of a job counts as found."""


def share_of(accounts: Sequence[Account]) -> float:
    """The share of jobs whose size was found."""
    return sum(one.share >= GOOD and one.outside is None for one in accounts) / len(accounts)


def both(seed: int) -> tuple[Account, Account]:
    """What comes of the world of that seed by our rule and by the published one."""
    found = tuple(run(draw(seed), chooser) for chooser in (Ours, Published))
    for one in found:
        one.chooser = None
    return found[0], found[1]


def show(seed: int) -> None:
    """Print what was decided in one world."""
    account = run(draw(seed))
    world = account.world
    print(world)
    best = world.best(0.5)
    print(f"best {best} of {world.sizes.fewest} to {world.sizes.most}, ended with {account.ended_with}")
    print(f"{account.share:.3f} of the best utility, {account.failures} failures")
    assert isinstance(account.chooser, Ours)
    for at, target, text in account.chooser.log:
        print(f"{at / HOUR:6.2f} h {target:4} {text}")


def main() -> int:
    """The exit code is 1 if fewer than 95 of 100 sizes were found."""
    parser = argparse.ArgumentParser(prog="python -m simulation.autoscale", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed, or the first of several")
    parser.add_argument("--count", type=int, default=1, help="run that many worlds, with both rules")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="as many at a time")
    arguments = parser.parse_args()
    if arguments.count == 1:
        show(arguments.seed)
        return 0
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.processes == 1:
        results = [both(seed) for seed in seeds]
    else:
        with ProcessPoolExecutor(arguments.processes) as pool:
            results = list(pool.map(both, seeds, chunksize=max(1, min(50, arguments.count // 8))))
    ours, published = zip(*results, strict=True)
    missed: Counter[str] = Counter()
    for one in ours:
        if one.share < GOOD:
            missed[f"{one.world.kind}, {one.world.trouble}"] += 1
    worst = sorted(ours, key=lambda one: one.share)[:15]
    print("missed:", ", ".join(f"{number} {name}" for name, number in missed.most_common()) or "none")
    print("worst:", ", ".join(f"seed {one.world.seed} {one.share:.2f}" for one in worst))
    for name, found in (("dlrover-run", ours), ("published rule", published)):
        outside = sum(one.outside is not None for one in found)
        changes = sum(len(one.changes) for one in found) / len(found)
        print(
            f"{name}: {100 * share_of(found):.1f} % of {len(found)} worlds within 5 % of the best utility, "
            f"{changes:.1f} sizes each, {outside} outside of the range or the unit"
        )
    return int(share_of(ours) < GOOD)


if __name__ == "__main__":
    sys.exit(main())
