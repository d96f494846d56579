"""Runs that are kept in a file as they are done, so that a long benchmark can be measured in pieces.

A run has a key: the case, its size, its number. A run that is kept is not repeated, and a part of a benchmark that was
measured elsewhere is merged by its keys.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from core import report
from core.ratios import Lost
from core.report import RESULTS, Machine


class HasKey(Protocol):
    """A run, as a dataclass that JSON can hold."""

    @property
    def key(self) -> Any: ...


R = TypeVar("R", bound=HasKey)


@dataclass(frozen=True)
class Stored(Generic[R]):
    """The runs so far, and the machine of the last ones."""

    machine: Machine
    runs: list[R]


def read(path: Path, kind: type[R]) -> list[R]:
    """The runs of a file; none if there is no file. Raises ValueError for a file of another kind."""
    try:
        stored: Stored[R] = msgspec.json.decode(path.read_bytes(), type=Stored[kind])  # type: ignore[valid-type]
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no result of this benchmark ({error}): name another --output") from error
    return stored.runs


def merge(*groups: Iterable[R]) -> list[R]:
    """The runs of all groups in the order of their keys. Of runs with one key that of the last group counts."""
    found = {one.key: one for group in groups for one in group}
    return [found[key] for key in sorted(found)]


def write(path: Path, stored: Stored[R], markdown: Callable[[Stored[R]], str]) -> None:
    """Write the runs and their tables beside them. A process that is killed meanwhile leaves the files of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, content in (
        (path, lambda to: report.write_json(to, stored)),
        (path.with_suffix(".md"), lambda to: to.write_text(markdown(stored))),
    ):
        fresh = target.with_name(f".{target.name}")
        content(fresh)
        fresh.replace(target)


@dataclass(frozen=True)
class Series(Generic[R]):
    """A benchmark whose runs are kept in `file` of its folder. `measure` does the run of a key, on this machine;
    `markdown` has all tables, and `line` one run for the console. `absent` returns why a run cannot be done here, None
    if it can; such a run is in no file."""

    file: str
    kind: type[R]
    measure: Callable[[Any, Machine], R]
    markdown: Callable[[Stored[R]], str]
    line: Callable[[R], str]
    absent: Callable[[Any], str | None] = lambda key: None

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """The options that all series share."""
        parser.add_argument("--budget", type=float, default=float("inf"), help="begin no run after this many seconds")
        parser.add_argument("--fresh", action="store_true", help="forget the runs that are kept")
        parser.add_argument("--merge", type=Path, nargs="+", default=[], help="add the runs of these files")
        parser.add_argument("--redraw", action="store_true", help="measure nothing: write the tables again")
        parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")

    def run(self, parser: argparse.ArgumentParser, options: argparse.Namespace, wanted: Sequence[Hashable]) -> int:
        """Do the runs that are wanted and not kept; return 0."""
        path = options.output / self.file
        try:
            others = [read(each, self.kind) for each in options.merge]
            kept = merge([] if options.fresh else read(path, self.kind), *others)
        except ValueError as error:
            parser.error(str(error))
        # Otherwise SIGTERM would leave the processes of the run behind.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            if others or options.redraw:
                write(path, Stored(report.this_machine(), kept), self.markdown)
            kept = self._add(path, kept, [] if options.redraw else wanted, time.monotonic() + options.budget)
        finally:
            signal.signal(signal.SIGTERM, before)
        for why in dict.fromkeys(filter(None, map(self.absent, wanted))):
            print(f"left out: {why}", file=sys.stderr)
        left = sum(not self.absent(key) for key in {*wanted} - {one.key for one in kept})
        print(f"{len(kept)} runs are in {path}; {left} of {len(wanted)} are missing", file=sys.stderr)
        return 0

    def _add(self, path: Path, kept: list[R], wanted: Sequence[Hashable], end: float) -> list[R]:
        done = {one.key for one in kept}
        for key in wanted:
            if key in done or time.monotonic() >= end or self.absent(key):
                continue
            machine = report.this_machine()
            try:
                one = self.measure(key, machine)
            except (Lost, OSError, subprocess.SubprocessError) as error:
                # It is not kept, and so is tried again the next time.
                print(f"{key}: lost: {error}", file=sys.stderr, flush=True)
                continue
            kept = merge(kept, [one])
            write(path, Stored(machine, kept), self.markdown)
            print(self.line(one), file=sys.stderr, flush=True)
        return kept


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
