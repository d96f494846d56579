"""Break a job with parameter servers under tf-ps-run and without it, in turn: `python benchmarks/tf_recovery.py`.

The rivals train with the same scripts, suffer the same fault, and take turns (A B C A B C ...), so that whatever else
the machine does weighs on all of them alike. What is judged is a ratio, never a time. `benchmarks/README.md` tells
more.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison import machine, report
from launch import find_absent
from launch_bench.case import Limits
from launch_bench.rivals import PROBE_TIMEOUT
from recovery_bench import record
from recovery_bench.fault import run_fault
from tf_recovery_bench.faults import faults

HERE = Path(__file__).resolve().parent
TITLE = "Recovering with parameter servers: tf-ps-run, plain processes and TensorFlow by itself"

LIMITS = Limits(start=180.0, recovery=120.0, settle=4.0)
"""Seconds. A worker that TensorFlow lets wait looks every 30 s only, so the start may take long; `settle` is enough for
a checkpoint or two."""

VERSIONS = """
import importlib.metadata, platform
for name in ("tensorflow", "tensorflow-cpu"):
    try:
        print(f"{platform.python_version()} with TensorFlow {importlib.metadata.version(name)}")
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def default_python() -> str:
    """The interpreter with TensorFlow that `make` sets up, unless TF_PYTHON_221 names another."""
    return os.environ.get("TF_PYTHON_221") or str(HERE.parent / ".venv-tf" / "bin" / "python")


def trained_with(python: str) -> str:
    """The version of an interpreter and of its TensorFlow, from the metadata."""
    try:
        done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the faults and write `tf_recovery.json` and `tf_recovery.md`; the rest keeps its results."""
    parser = argparse.ArgumentParser(description="Break a job with parameter servers and see how it comes back.")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each fault (default: 3)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[fault.name for fault in faults("")],
        help="only this fault, the others keep the results that they have; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="1 turn: does it work?")
    parser.add_argument(
        "--python", default=default_python(), help="an interpreter with TensorFlow (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / "tf_recovery", help="directory for the results"
    )
    options = parser.parse_args(arguments)
    repetitions = 1 if options.quick else options.repetitions
    if repetitions < 1:
        parser.error(f"--repetitions must be at least 1, not {repetitions}")
    everything = faults(options.python)
    chosen = [fault for fault in everything if options.only is None or fault.name in options.only]
    path = options.output / "tf_recovery.json"
    try:
        earlier = record.read(path)
    except ValueError as error:
        parser.error(str(error))
    if absent := find_absent(chosen):
        parser.error(f"nobody can take part: {next(iter(absent.values()))}")

    # The load is read before the first rival runs: it is what others do to this machine, not what we do.
    where = machine.look(HERE.parent)
    where = dataclasses.replace(where, python=f"{where.python}, the script's {trained_with(options.python)}")
    options.output.mkdir(parents=True, exist_ok=True)
    measured: dict[str, record.Measurement] = {}
    merged = earlier
    for fault in chosen:
        here = dataclasses.replace(where, date=machine.now())
        result = run_fault(fault, repetitions, LIMITS, {})
        measured[fault.name] = record.Measurement(result, here, repetitions, options.quick)
        # What has taken minutes is kept, whatever becomes of the next fault.
        merged = record.merge(earlier, measured, [each.name for each in everything])
        path.write_text(record.as_json(merged))
    (options.output / "tf_recovery.md").write_text(record.markdown(TITLE, merged))
    report.show([one.result for one in measured.values()])
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
