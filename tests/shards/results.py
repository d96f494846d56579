"""Results of shards: one file for each run of a shard, and the table of all runs on one commit."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a test ended: `passed`, `failed` or `skipped`, with the reason of the latter two."""

    id: str
    outcome: str
    seconds: float
    reason: str = ""


@dataclass
class ShardRun:
    """One run of one shard. `tests` are the ids of all tests of the shard, `total` is their number in all shards, and
    `divided` identifies the division. `seconds` are those on the clock; None: the run was cut off."""

    shard: int
    count: int
    commit: str
    night: str
    started: str
    tests: list[str]
    total: int
    divided: str
    versions: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float | None = None

    def not_run(self) -> list[str]:
        """The ids of the tests of the shard that have no outcome."""
        done = {outcome.id for outcome in self.outcomes}
        return [test for test in self.tests if test not in done]

    def header(self) -> dict[str, Any]:
        """The first line of the file of the run."""
        return {name: value for name, value in vars(self).items() if name not in ("outcomes", "seconds")}


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a line to the file of a run."""
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def read_run(file: Path) -> ShardRun:
    """Read the file of a run. Its last line may be incomplete where the run was killed."""
    run: ShardRun | None = None
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if run is None:
            run = ShardRun(**line)
        elif "id" in line:
            run.outcomes.append(Outcome(**line))
        else:
            run.seconds = line["seconds"]
    if run is None:
        raise ValueError(f"{file}: this is no file of results")
    return run


def read_runs(folders: Iterable[Path], commit: str) -> list[ShardRun]:
    """Return all runs on a commit that are below these folders, oldest first. `commit` may be its first digits."""
    files = {file for folder in folders for file in folder.rglob(f"{commit}*/shard-*.jsonl")}
    # Runs of a tree with changes are not runs of its commit.
    same = [file for file in files if file.parent.name.endswith("-changed") == commit.endswith("-changed")]
    return sorted(map(read_run, same), key=lambda run: (run.started, run.shard))


@dataclass(frozen=True)
class Sum:
    """The last outcome of each test on one commit."""

    runs: Sequence[ShardRun]
    last: dict[str, tuple[int, Outcome]]
    not_run: dict[str, int]
    unstable: list[str]

    @property
    def is_green(self) -> bool:
        """Whether every test of all shards has run, and the last run of each one did not fail."""
        total = max((run.total for run in self.runs), default=0)
        failed = any(outcome.outcome == "failed" for _, outcome in self.last.values())
        return 0 < total == len(self.last) and not failed and not self.not_run


def add_up(runs: Sequence[ShardRun]) -> Sum:
    """Sum runs, oldest first: what a test did last counts. `unstable` are those that failed before and passed then."""
    last: dict[str, tuple[int, Outcome]] = {}
    failed: set[str] = set()
    for run in runs:
        for outcome in run.outcomes:
            last[outcome.id] = run.shard, outcome
            if outcome.outcome == "failed":
                failed.add(outcome.id)
    not_run = {test: run.shard for run in runs for test in run.tests if test not in last}
    unstable = [test for test in sorted(failed) if last[test][1].outcome != "failed"]
    return Sum(runs, last, not_run, unstable)


def command(test: str, night: str, python: str) -> str:
    """The command that repeats one test."""
    seeds = f"NIGHT={night} " if "/simulation/" in test else ""
    return f"{seeds}{python} -m pytest {shlex.quote(test)}"


def table(found: Sum, python: str) -> Iterator[str]:
    """Return the lines of the table, and of what has to be looked at, as Markdown."""
    count = max((run.count for run in found.runs), default=0)
    yield "| shard | runs | passed | failed | skipped | not run | wall seconds |"
    yield "|---|---|---|---|---|---|---|"
    sums: Counter[str] = Counter()
    for shard in range(1, count + 1):
        runs = [run for run in found.runs if run.shard == shard]
        ends = Counter(outcome.outcome for number, outcome in found.last.values() if number == shard)
        ends["not run"] = sum(number == shard for number in found.not_run.values())
        ends["seconds"] = round(sum(run.seconds or sum(each.seconds for each in run.outcomes) for run in runs))
        ends["runs"] = len(runs)
        sums += ends
        yield _row(f"{shard}/{count}", ends) if runs else f"| {shard}/{count} | 0 | | | | all | |"
    yield _row("sum", sums)
    yield ""
    total = max((run.total for run in found.runs), default=0)
    yield f"{len(found.last)} of {total} tests have run."
    if len({run.divided for run in found.runs}) > 1:
        yield "Not all runs had the same division: another set of tests, or another seconds.json."
    for name, values in _same(found.runs).items():
        yield f"{name}: {', '.join(values)}"
    night = max((run.night for run in found.runs), default="")
    for test, (_, outcome) in sorted(found.last.items()):
        if outcome.outcome == "failed":
            yield f"failed: {command(test, night, python)}  # {outcome.reason}"
    for test in found.unstable:
        yield f"failed, then passed: {test}"
    reasons = Counter(outcome.reason for _, outcome in found.last.values() if outcome.outcome == "skipped")
    for reason, number in reasons.most_common():
        yield f"skipped: {number} tests, {reason}"


def _row(name: str, ends: Counter[str]) -> str:
    columns = ("runs", "passed", "failed", "skipped", "not run", "seconds")
    return f"| {name} | {' | '.join(f'{ends[column]:,}' for column in columns)} |"


def _same(runs: Sequence[ShardRun]) -> dict[str, list[str]]:
    """What the runs have in common, or each value where they differ."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in {"commit": run.commit, "night": run.night, **run.versions}.items():
            values.setdefault(name, {})[value] = None
    return {name: list(each) for name, each in values.items()}


def seconds_table(runs: Sequence[ShardRun], known: dict[str, float]) -> dict[str, float]:
    """Return what `seconds.json` is to hold after these runs: the mean of each test's passed runs by name; what did not
    run keeps its value."""
    seen: dict[str, list[float]] = {}
    for run in runs:
        for outcome in run.outcomes:
            if outcome.outcome == "passed":
                seen.setdefault(outcome.id.partition("[")[0], []).append(outcome.seconds)
    means = {name: round(sum(each) / len(each), 1) for name, each in seen.items()}
    return dict(sorted({**known, **means}.items()))
