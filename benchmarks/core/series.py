"""A benchmark: a series of runs, each kept as it ends, and the tables that are published of them.

A run has a key: the case, its size, its number. A run that is kept is not repeated, so that a long benchmark can be
measured in pieces, and those that were measured elsewhere are merged by their keys. The runs lie beside the published
results and belong to no commit: of them a summary is published, from which its tables and pictures can be made again.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from core import report
from core.ratios import Lost
from core.report import RESULTS, RUNS, Machine, Result, Summary, Table


class HasKey(Protocol):
    """A run, as a dataclass that JSON can hold."""

    @property
    def key(self) -> Any: ...


R = TypeVar("R", bound=HasKey)


@dataclass(frozen=True)
class Kept(Generic[R]):
    """A run that has ended, and the machine and its load when it began."""

    run: R
    machine: Machine


def read(path: Path, kind: type[R]) -> list[Kept[R]]:
    """The runs of a file, which has one in each line; none if there is no file. Raises ValueError for another file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        # What a killed process has begun to write is after the last end of a line.
        return [msgspec.json.decode(line, type=Kept[kind]) for line in lines[:-1]]  # type: ignore[valid-type]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} has no runs of this benchmark ({error}): name another --output") from error


def write(path: Path, kept: Iterable[Kept[R]]) -> None:
    """Write all runs. A process that is killed meanwhile leaves the file of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in kept))
    fresh.replace(path)


def add(path: Path, one: Kept[R]) -> None:
    """Write a run after the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")


def merge(*groups: Iterable[Kept[R]]) -> list[Kept[R]]:
    """The runs of all groups in the order of their keys. Of runs with one key that of the last group counts."""
    found = {one.run.key: one for group in groups for one in group}
    return [found[key] for key in sorted(found)]


def measured(kept: Sequence[Kept[Any]], how: str = "") -> str:
    """How the runs of a table were measured: the machine of the last one, and the loads and commits of all."""
    loads = [one.machine.load_average[0] for one in kept]
    commits = ", ".join(dict.fromkeys(one.machine.commit for one in kept))
    parts = [how] if how else []
    parts += [str(kept[-1].machine), f"load {min(loads):.1f} to {max(loads):.1f}; commits of the runs: {commits}"]
    return "; ".join(parts)


def draw_nothing(results: Sequence[Result], path: Path) -> None:
    """No picture: the tables are read as tables."""


@dataclass(frozen=True)
class Series(Generic[R]):
    """A benchmark. `name` is the path of its files below `results/`.

    `measure` does the run of a key, or raises Lost; such a run is not kept, and so is tried again the next time.
    `tables` makes the published tables of all runs, and `line` says what came of one on the console, if `measure` does
    not. `absent` returns why a run cannot be done here, None if it can; such a run is in no file. `order` names the
    tables there are, empty if a table stays until it is made again. `draw` draws a picture of the results, and `text`
    is their page.
    """

    title: str
    name: str
    kind: type[R]
    measure: Callable[[Any], R]
    tables: Callable[[Sequence[Kept[R]]], Sequence[Result | Table]]
    line: Callable[[R], str] = lambda run: ""
    absent: Callable[[Any, Sequence[Kept[R]]], str | None] = lambda key, kept: None
    order: Sequence[str] = ()
    draw: Callable[[Sequence[Result], Path], None] = draw_nothing
    text: Callable[[Summary], str] = report.markdown
    machine: Callable[[], Machine] = report.this_machine

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The options that all benchmarks share."""
        folder = (RESULTS / self.name).parent
        parser.add_argument("--budget", type=float, default=float("inf"), help="begin no run after this many seconds")
        parser.add_argument("--fresh", action="store_true", help="measure again what is kept")
        parser.add_argument("--merge", type=Path, nargs="+", default=[], help="add the runs of these files")
        parser.add_argument("--redraw", action="store_true", help="measure nothing; write tables and picture again")
        parser.add_argument("--output", type=Path, help=f"folder of the results and runs (default: {folder})")

    def run(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        wanted: Sequence[Hashable],
        trial: bool = False,
    ) -> int:
        """Do the runs that are wanted and not kept, and publish the tables; return 0.

        A `trial` keeps no run and repeats each. It prints its tables, and writes them only to a folder that is named.
        """
        file = Path(options.output or (RUNS / self.name).parent) / f"{Path(self.name).name}.jsonl"
        try:
            before = Summary(self.title) if trial else report.read(self._path(options))
            others = [read(each, self.kind) for each in options.merge]
            kept = [] if trial else merge(read(file, self.kind), *others)
        except ValueError as error:
            parser.error(str(error))
        if options.fresh:
            kept = [one for one in kept if one.run.key not in {*wanted}]
        if not trial and (kept or file.exists()):
            # It may end with what a killed process has begun to write.
            write(file, kept)
        missing = [] if options.redraw else [key for key in wanted if key not in {one.run.key for one in kept}]
        if len(missing) < len(wanted) and not options.redraw:
            print(f"{len(wanted) - len(missing)} runs are in {file}; --fresh measures them again", file=sys.stderr)
        end = time.monotonic() + options.budget
        with _ended_by_sigterm():
            try:
                for one in self._runs(missing, kept, end):
                    kept = merge(kept, [one])
                    if not trial:
                        add(file, one)
            finally:
                # What took minutes is published, even if the next run fails.
                tables = self.tables(kept) if kept and (others or not options.redraw) else []
                summary = report.merge(replace(before, title=self.title), tables, self.order)
                lines = [self.text(summary)] if trial else [line for one in tables for line in report.section(one)]
                print("\n".join(lines), end="\n" if lines else "")
                if (tables or options.redraw) and (options.output or not trial):
                    self._write(options, summary)
        for why in dict.fromkeys(why for key in wanted if (why := self.absent(key, kept))):
            print(f"left out: {why}", file=sys.stderr)
        left = sum(not self.absent(key, kept) for key in {*wanted} - {one.run.key for one in kept})
        print(f"{len(kept)} runs are done; {left} of {len(wanted)} are missing", file=sys.stderr)
        return 0

    def publish(self, options: argparse.Namespace, tables: Sequence[Result | Table]) -> int:
        """Publish tables that come from elsewhere beside the others; return 0."""
        before = replace(report.read(self._path(options)), title=self.title)
        self._write(options, report.merge(before, tables, self.order))
        return 0

    def _path(self, options: argparse.Namespace) -> Path:
        return Path(options.output or (RESULTS / self.name).parent) / f"{Path(self.name).name}.json"

    def _write(self, options: argparse.Namespace, summary: Summary) -> None:
        report.write(self._path(options), summary, self.text, self.draw)
        print(f"Results are in {self._path(options).parent}.", file=sys.stderr)

    def _runs(self, missing: Sequence[Hashable], kept: Sequence[Kept[R]], end: float) -> Iterator[Kept[R]]:
        done = list(kept)
        for key in missing:
            if time.monotonic() >= end or self.absent(key, done):
                continue
            machine = self.machine()
            try:
                one = Kept(self.measure(key), machine)
            except (Lost, OSError, subprocess.SubprocessError) as error:
                print(f"{key}: lost: {error}", file=sys.stderr, flush=True)
                continue
            if text := self.line(one.run):
                print(text, file=sys.stderr, flush=True)
            done.append(one)
            yield one


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit here. Otherwise it would leave the processes of the run behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def share_within(errors: Sequence[float], limit: float) -> str:
    """The share of errors that are at most `limit` in absolute terms, as a percentage; "-" of nothing."""
    return percent(sum(abs(error) <= limit for error in errors), len(errors))


def percent(part: int, total: int) -> str:
    """A percentage; "-" of nothing."""
    return f"{100 * part / total:.0f} %" if total else "-"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
