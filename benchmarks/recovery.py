"""Break a job under every launcher and see how it comes back, in turn: `python benchmarks/recovery.py`.

The rivals train with the same script, suffer the same fault, and take turns (A B C A B C ...), so that whatever else
the machine does weighs on all of them alike. What is judged is a ratio, never a time. `benchmarks/README.md` tells
more.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison import machine, report
from launch import QUICK, find_absent
from launch_bench.case import Limits
from recovery_bench import record
from recovery_bench.cut import CUT
from recovery_bench.deaths import DEATHS
from recovery_bench.ettr import QUICK_STORM, STORM, Storm, ettr
from recovery_bench.fault import Fault, run_fault
from recovery_bench.plot import plot

HERE = Path(__file__).resolve().parent
TITLE = "Recovering: dlrover-run, torchrun and others"


def faults(storm: Storm) -> tuple[Fault, ...]:
    """All faults, in the order in which they are tried and shown."""
    return (*DEATHS, CUT, ettr(storm))


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the faults and write `recovery.json`, `recovery.md` and `recovery.png`; the rest keeps its results."""
    parser = argparse.ArgumentParser(description="Break a job under every launcher and see how it comes back, in turn.")
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each fault, at most (default: 5)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[fault.name for fault in faults(STORM)],
        help="only this fault, the others keep the results that they have; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="1 turn, shorter time-outs: does it work?")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "recovery", help="directory for the results")
    options = parser.parse_args(arguments)
    repetitions = 1 if options.quick else options.repetitions
    if repetitions < 1:
        parser.error(f"--repetitions must be at least 1, not {repetitions}")
    everything = faults(QUICK_STORM if options.quick else STORM)
    chosen = [fault for fault in everything if options.only is None or fault.name in options.only]
    try:
        earlier = record.read(options.output / "recovery.json")
    except ValueError as error:
        parser.error(str(error))

    # The load is read before the first rival runs: it is what others do to this machine, not what we do.
    where = machine.look(HERE.parent)
    absent = find_absent(chosen)
    limits = QUICK if options.quick else Limits()
    options.output.mkdir(parents=True, exist_ok=True)
    measured: dict[str, record.Measurement] = {}
    for fault in chosen:
        here = dataclasses.replace(where, date=machine.now())
        result = run_fault(fault, repetitions, limits, absent)
        measured[fault.name] = record.Measurement(result, here, repetitions, options.quick)
        # What has taken minutes is kept, whatever becomes of the next fault.
        merged = record.merge(earlier, measured, [each.name for each in everything])
        (options.output / "recovery.json").write_text(record.as_json(merged))
    (options.output / "recovery.md").write_text(record.markdown(TITLE, merged))
    plot([one.result for one in merged], record.caption(merged), options.output / "recovery.png")
    report.show([one.result for one in measured.values()])
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
