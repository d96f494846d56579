"""What `--network-check` costs: the launcher with and without it, and the check itself, in turn.

Run it as `python benchmarks/check_cost.py`; `benchmarks/README.md` tells more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from check_cost_bench.added import subtract
from check_cost_bench.cases import CASES
from check_cost_bench.contenders import ADDED, WITH, WITHOUT
from comparison import machine, report
from comparison.ratios import summarise
from launch import run_once
from launch_bench.case import Case, Limits

HERE = Path(__file__).resolve().parent
TITLE = "What --network-check costs"


def run_case(case: Case, repetitions: int, limits: Limits) -> report.Result:
    """One warm-up of every contender, which does not count, and then `repetitions` rounds of all in turn."""
    for rival in case.rivals:
        run_once(case, rival, 0, limits)
    samples = [run_once(case, rival, turn, limits) for turn in range(1, repetitions + 1) for rival in case.rivals]
    if case.baseline != WITHOUT:
        samples += subtract(ADDED, WITH, WITHOUT, samples)
    return report.Result(
        case.name, case.title, case.unit, case.baseline, summarise(samples, case.baseline, case.targets), {}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and write `cost.json` and `cost.md`."""
    parser = argparse.ArgumentParser(description="What --network-check costs: with it and without it, in turn.")
    parser.add_argument("--repetitions", type=int, default=7, help="counted runs of each contender (default: 7)")
    parser.add_argument(
        "--only", action="append", choices=[case.name for case in CASES], help="only this case; may be repeated"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / "node-check", help="directory for the results"
    )
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, not {options.repetitions}")
    cases = [case for case in CASES if options.only is None or case.name in options.only]

    # The load is read before the first run: it is what others do to this machine, not what we do.
    where = machine.look(HERE.parent)
    results = [run_case(case, options.repetitions, Limits()) for case in cases]

    report.show(results)
    options.output.mkdir(parents=True, exist_ok=True)
    how = f"{options.repetitions} repetitions in turn after one warm-up"
    facts = {"repetitions": options.repetitions, "cases": [case.name for case in cases]}
    (options.output / "cost.json").write_text(report.as_json(results, where, facts))
    (options.output / "cost.md").write_text(report.markdown(TITLE, results, where, how))
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
