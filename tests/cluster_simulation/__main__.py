"""Run seeds by hand: one with a trace of its events, or many."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulation.timeline import Broken

from cluster_simulation.scenario import simulate


def main() -> int:
    """The exit code is the number of seeds that failed, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m cluster_simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed, or the first of several")
    parser.add_argument("--count", type=int, default=1, help="run that many seeds, without a trace")
    arguments = parser.parse_args()
    failed = versions = planned = charged = 0
    phases: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        try:
            outcome = simulate(seed, print if arguments.count == 1 else None)
        except Broken as broken:
            failed += 1
            print(broken)
            continue
        phases[outcome.phase] += 1
        versions += outcome.versions
        planned += outcome.planned
        charged += outcome.charged
    took = time.monotonic() - began
    worth = f"{dict(phases)}, {versions} versions, {planned} planned changes without a loss, {charged} restarts charged"
    print(f"{arguments.count} seeds in {took:.1f} s: {worth}, {failed} failed")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
