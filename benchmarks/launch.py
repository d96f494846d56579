"""Compare dlrover-run, torchrun and no launcher at all, in turn, on this machine: `python benchmarks/launch.py`.

The rivals take turns (A B C A B C ...) so that whatever else the machine does weighs on all of them alike, and what is
judged is the ratio of each pair of neighbours, never a time. `benchmarks/README.md` tells more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison import machine, report
from comparison.lost import Lost
from comparison.ratios import Sample, summarise
from launch_bench.case import Case, Limits
from launch_bench.cases import CASES
from launch_bench.plot import plot
from launch_bench.rivals import Rival
from launch_bench.room import Room

HERE = Path(__file__).resolve().parent
TITLE = "Launching: dlrover-run, torchrun and no launcher at all"
QUICK = Limits(start=60.0, recovery=40.0)


def run_once(case: Case, rival: Rival, repetition: int, limits: Limits) -> Sample:
    """Run one rival once, in a room of its own, and say on stderr how it went."""
    try:
        with Room() as room:
            try:
                measured = case.measure(rival, room, limits)
            except Lost:
                if tail := room.output_tail():
                    print(tail, file=sys.stderr)
                raise
        sample = Sample(rival.name, repetition, measured.values, measured.note, measured.unended)
        outcome = ", ".join(
            report.figure(value, case.unit, value if part in measured.unended else None) + part
            for part, value in measured.values.items()
        )
    except Lost as why:
        sample = Sample(rival.name, repetition, None, str(why))
        outcome = f"lost: {why}"
    turn = f"run {repetition}" if repetition else "warm-up"
    print(f"{case.name:17} {turn:8} {rival.name}: {outcome}", file=sys.stderr, flush=True)
    return sample


def run_case(case: Case, repetitions: int, limits: Limits, absent: dict[str, str]) -> report.Result:
    """One warm-up of every rival, which does not count, and then `repetitions` rounds of all in turn."""
    present = [rival for rival in case.rivals if rival.name not in absent]
    for rival in present:
        run_once(case, rival, 0, limits)
    samples = [run_once(case, rival, turn, limits) for turn in range(1, repetitions + 1) for rival in present]
    missing = {rival.name: absent[rival.name] for rival in case.rivals if rival.name in absent}
    rows = summarise(samples, case.baseline, case.targets)
    return report.Result(case.name, case.title, case.unit, case.baseline, rows, missing)


def find_absent(cases: Sequence[Case]) -> dict[str, str]:
    """The rivals of these cases that cannot run here, with the reason."""
    rivals = {rival.name: rival for case in cases for rival in case.rivals}
    return {name: why for name, rival in rivals.items() if (why := rival.absent())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and write `launch.json`, `launch.md` and `launch.png`."""
    parser = argparse.ArgumentParser(description="Compare dlrover-run, torchrun and no launcher at all, in turn.")
    parser.add_argument("--repetitions", type=int, default=7, help="counted runs of each rival (default: 7)")
    parser.add_argument(
        "--only", action="append", choices=[case.name for case in CASES], help="only this case; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="2 repetitions, shorter time-outs: does it work?")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="directory for the results")
    options = parser.parse_args(arguments)
    repetitions = 2 if options.quick else options.repetitions
    if repetitions < 1:
        parser.error(f"--repetitions must be at least 1, not {repetitions}")
    limits = QUICK if options.quick else Limits()
    cases = [case for case in CASES if options.only is None or case.name in options.only]

    # The load is read before the first rival runs: it is what others do to this machine, not what we do.
    where = machine.look(HERE.parent)
    absent = find_absent(cases)
    results = [run_case(case, repetitions, limits, absent) for case in cases]

    report.show(results)
    options.output.mkdir(parents=True, exist_ok=True)
    how = f"{repetitions} repetitions in turn after one warm-up"
    facts = {"repetitions": repetitions, "quick": options.quick, "cases": [case.name for case in cases]}
    (options.output / "launch.json").write_text(report.as_json(results, where, facts))
    (options.output / "launch.md").write_text(report.markdown(TITLE, results, where, how))
    plot(results, options.output / "launch.png")
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
