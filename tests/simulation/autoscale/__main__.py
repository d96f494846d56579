"""Play worlds by hand: one with what was decided in it, or many with the figures of each rule."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from simulation.autoscale.job import Ours, run
from simulation.autoscale.played import GOOD, play_all, share_of, table
from simulation.autoscale.worlds import HOUR, draw

SHOWN = 15
"""Seeds that are named of the worlds in which a rule has not found the best size."""


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
    parser.add_argument("--count", type=int, default=1, help="play that many worlds, by both rules")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="as many at a time")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add each world to this file; play none twice")
    arguments = parser.parse_args()
    if arguments.count == 1:
        show(arguments.seed)
        return 0
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    worlds = sorted(play_all(seeds, arguments.keep, arguments.processes), key=lambda one: one.seed)
    missed = sorted((one for one in worlds if not one.found), key=lambda one: one.share)
    late = [one for one in worlds if one.settled is False or not one.is_within_limit]
    print("\n".join(table(worlds)))
    print("missed:", ", ".join(f"seed {one.seed} {one.share:.2f}" for one in missed[:SHOWN]) or "none")
    print("more changes than the limit, or not settled:", ", ".join(str(one.seed) for one in late[:SHOWN]) or "none")
    return int(share_of(worlds) < GOOD)


if __name__ == "__main__":
    sys.exit(main())
