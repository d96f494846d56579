"""Run long tests in shards, and sum their results: `make test-long SHARD=1/8`, `make test-long-results`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from support.owned_directory import OwnedDirectory

from dlrover_run.processes import tree
from shards.division import SECONDS, WORKERS, LongTest, divide, expected_seconds, known_seconds
from shards.results import ShardRun, add_up, append, command, read_run, read_runs, seconds_table, table

ROOT = Path(__file__).resolve().parents[2]
MARKS = "long or rival"
SHARDS = 8
PYTEST = [sys.executable, "-m", "pytest"]


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `1/8`: the number of the shard, from 1, and the number of shards."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r} must be the number of a shard and of all shards, such as 1/8")
    return int(number), int(count)


def parse_night(text: str) -> str:
    """Parse a date, such as 2026-11-27."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a date, such as 2026-11-27") from None


def call_pytest(*arguments: str) -> int:
    """Run pytest and return its exit code. However this process ends, pytest ends too; SIGTERM lets it clean up."""
    own = os.getpid()
    process = subprocess.Popen([*PYTEST, *arguments], cwd=ROOT, preexec_fn=lambda: tree.die_with_parent(own))
    try:
        return process.wait()
    except BaseException:
        # After Ctrl-C in a terminal pytest has SIGINT already.
        if process.poll() is None and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
        process.wait()
        raise


def list_tests(directory: Path, paths: Sequence[str]) -> list[LongTest]:
    """Return the long tests of this machine. Exits with pytest's code if they cannot be collected."""
    file = directory / "tests"
    print("Collecting the long tests.", flush=True)
    code = call_pytest("--collect-only", "-qq", "--no-header", "-m", MARKS, f"--list-tests={file}", *paths)
    if code not in (0, 5):
        sys.exit(code)
    return [LongTest(**json.loads(line)) for line in file.read_text().splitlines()]


def current_commit() -> str:
    """The short commit of the tree, with `-changed` if files differ from it; `unknown` outside of git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit}-changed" if git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """What the results depend on besides the commit."""
    found = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "python": platform.python_version()}
    for package in ("torch", "pytest", "pytest-xdist"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    tensorflows = ROOT.glob(".venv-tf*/lib/*/site-packages/tensorflow_cpu-*.dist-info")
    numbers = {each.name.split("-")[1].removesuffix(".dist") for each in tensorflows}
    found["tensorflow"] = ", ".join(sorted(numbers)) or "none"
    return found


def run_tests(tests: Sequence[LongTest], directory: Path, record: Path, extra: Sequence[str]) -> int:
    """Run tests, first those that share the machine, then each one that needs it alone. Returns the worst exit code."""
    worst = 0
    for alone in (False, True):
        chosen = [test for test in tests if test.alone == alone]
        if not chosen:
            continue
        name = "alone" if alone else "shared"
        only = directory / f"{name}.txt"
        only.write_text("\n".join(test.id for test in chosen))
        parallel = [] if alone else ["-n", str(WORKERS), "--dist", "worksteal"]
        files = sorted({test.file for test in chosen})
        given = [f"--only-tests={only}", f"--record={record}", f"--basetemp={directory / name}"]
        worst = max(worst, abs(call_pytest("-m", MARKS, *parallel, *given, *extra, *files)))
    return worst


def run_shard(run: ShardRun, tests: Sequence[LongTest], results: Path, extra: Sequence[str]) -> bool:
    """Run tests of one shard, and write and print what came of it. Returns whether all of them ran and none failed."""
    folder = results / run.commit
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / f"shard-{run.shard}-of-{run.count}-{run.started.replace(':', '')}.jsonl"
    append(record, run.header())
    minutes = expected_seconds(tests, known_seconds()) / 60
    print(f"Shard {run.shard}/{run.count}: {len(tests)} tests, about {minutes:.0f} minutes, seeds of {run.night}")
    print(f"Results: {record}", flush=True)
    # Short, as sockets lie below it, whose paths have at most 107 bytes.
    directory = OwnedDirectory(f"shard-{run.shard}-")
    began = time.monotonic()
    code = run_tests(tests, Path(directory.path), record, extra)
    append(record, {"seconds": round(time.monotonic() - began, 1), "code": code})
    done = read_run(record)
    failed = [outcome.id for outcome in done.outcomes if outcome.outcome == "failed"]
    left = [test.id for test in tests if test.id not in {outcome.id for outcome in done.outcomes}]
    if is_green := not (code or failed or left):
        directory.close()
    print(f"Shard {run.shard}/{run.count}: {len(done.outcomes)} tests in {done.seconds:.0f} s, {len(failed)} failed.")
    if not is_green:
        print(f"Shard {run.shard}/{run.count} failed (pytest's exit code {code}); its files: {directory.path}")
        python = os.path.relpath(sys.executable, ROOT)
        for test in failed:
            print(f"  repeat: {command(test, run.night, python)}")
        if left:
            print(f"  {len(left)} tests did not run: make test-long SHARD={run.shard}/{run.count} AGAIN=1")
    sys.stdout.flush()
    return is_green


def run_all(arguments: argparse.Namespace) -> int:
    """Run one shard, or all of them in turn; return the exit code."""
    os.environ["NIGHT"] = arguments.night
    with tempfile.TemporaryDirectory(prefix="dlrover-shards-") as directory:
        tests = list_tests(Path(directory), arguments.paths)
    number, count = arguments.shard or (None, SHARDS)
    shards = divide(tests, known_seconds(), count)
    identity = hashlib.sha256(json.dumps([[test.id for test in shard] for shard in shards]).encode()).hexdigest()[:12]
    commit = current_commit()
    passed: set[str] = set()
    if arguments.again:
        last = add_up(read_runs([arguments.results], commit)).last
        passed = {test for test, (_, outcome) in last.items() if outcome.outcome != "failed"}
    green = True
    for shard in [number] if number else range(1, count + 1):
        ids = [test.id for test in shards[shard - 1]]
        started = datetime.now(UTC).isoformat(timespec="seconds").removesuffix("+00:00")
        night, found = arguments.night, versions()
        run = ShardRun(shard, count, commit, night, started, ids, len(tests), identity, found)
        left = [test for test in shards[shard - 1] if test.id not in passed]
        green = run_shard(run, left, arguments.results, arguments.pytest) and green
    if not number:
        print_sum([arguments.results], commit)
    return 0 if green else 1


def print_sum(folders: Sequence[Path], commit: str) -> bool:
    """Print the table of all runs on a commit. Returns whether all tests ran and none failed."""
    found = add_up(read_runs(folders, commit))
    for line in table(found, os.path.relpath(sys.executable, ROOT)):
        print(line)
    return found.is_green


def sum_up(arguments: argparse.Namespace) -> int:
    commit = arguments.commit or current_commit()
    if not read_runs(arguments.results, commit):
        print(f"There are no results of {commit} in {', '.join(map(str, arguments.results))}.", file=sys.stderr)
        return 2
    return 0 if print_sum(arguments.results, commit) else 1


def write_seconds(arguments: argparse.Namespace) -> int:
    runs = read_runs(arguments.results, arguments.commit or current_commit())
    new = seconds_table(runs, known_seconds())
    SECONDS.write_text(json.dumps(new, indent=0) + "\n")
    print(f"{SECONDS}: {len(new)} tests")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shards", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run one shard, or all of them in turn")
    runs.add_argument("--shard", type=parse_shard, help=f"such as 1/8; default: {SHARDS} shards, one after the other")
    tonight = os.environ.get("NIGHT") or date.today().isoformat()
    runs.add_argument("--night", type=parse_night, default=tonight, help="the date that chooses seeds; default: today")
    runs.add_argument("--again", action="store_true", help="run only what has not passed on this commit")
    runs.add_argument("--results", type=Path, default=ROOT / "test-results", help="the folder of the results")
    runs.add_argument("--paths", nargs="+", default=[], help="divide only the tests of these files")
    runs.add_argument("pytest", nargs="*", default=[], help="more arguments for pytest, after --")
    runs.set_defaults(run=run_all)
    for name, function, text in (
        ("sum", sum_up, "print the table of all shards on one commit"),
        ("table", write_seconds, "write seconds.json anew from results"),
    ):
        sums = commands.add_parser(name, help=text)
        sums.add_argument("results", type=Path, nargs="*", default=[ROOT / "test-results"])
        sums.add_argument("--commit", help="its first digits; default: that of the tree")
        sums.set_defaults(run=function)
    arguments: Any = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        code = 130
    return code


if __name__ == "__main__":
    sys.exit(main())
