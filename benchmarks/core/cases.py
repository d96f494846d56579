"""Cases, the turns of their rivals, and the command line that all benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import against, pictures, report
from core.ratios import Lost, Measured, Sample, summarise
from core.report import RESULTS, Machine, Result, Unit
from core.run import Run
from core.trees import Tree, open_tree

NO_LIMIT = sys.maxsize


@dataclass(frozen=True)
class Limits:
    """Seconds. `settle` is how long every rival runs undisturbed before a measurement; a template learns then what the
    workers import."""

    start: float = 120.0
    recovery: float = 120.0
    settle: float = 3.0


Measure = Callable[[Any, Run, Limits], Measured]
"""Runs one rival once."""


@dataclass(frozen=True)
class Case:
    """One comparison. A rival has a `name`, and `absent()` returns why it cannot run
    here, None if it can.

    `targets` bound the ratio to `baseline` by rival and part; `within`: see `summarise`. `warm_up` adds one run of each
    rival that is not counted. A rival takes at most `max_turns` turns, or the number in `turns_of`. A baseline that is
    no rival but a known time has its seconds in `known_baseline`. `derive` may add samples that are computed from
    others. `unavailable` returns why the case cannot run on this machine, None if it can. `pairs` maps a rival to a
    baseline of its own.
    """

    name: str
    title: str
    unit: Unit
    rivals: Sequence[Any]
    baseline: str
    measure: Measure
    targets: Mapping[tuple[str, str], float] = field(default_factory=dict)
    within: Mapping[str, str] = field(default_factory=dict)
    warm_up: bool = True
    max_turns: int = NO_LIMIT
    turns_of: Mapping[str, int] = field(default_factory=dict)
    known_baseline: float = 0.0
    derive: Callable[[list[Sample]], list[Sample]] = lambda samples: samples
    unavailable: Callable[[], str | None] = lambda: None
    pairs: Mapping[str, str] = field(default_factory=dict)

    def against(self, tree: Tree) -> Case:
        """This case with the project's own rivals of both checkouts, which take all turns."""
        rivals, pairs = against.with_twins(self.rivals, tree)
        return dataclasses.replace(
            self,
            rivals=rivals,
            pairs=pairs,
            baseline="",
            targets={},
            known_baseline=0.0,
            max_turns=NO_LIMIT,
            turns_of={},
        )


def run_once(case: Case, rival: Any, turn: int, limits: Limits) -> Sample:
    """Run one rival once, and print on stderr how it went; turn 0 is a warm-up."""
    try:
        with Run() as run:
            measured = case.measure(rival, run, limits)
    except Lost as why:
        print(run.tail, end="", file=sys.stderr)
        measured = Measured(None, str(why))
    outcome = ", ".join(
        report.figure(value, case.unit, value if part in measured.unended else None) + part
        for part, value in (measured.values or {}).items()
    )
    turn_text = f"turn {turn}" if turn else "warm-up"
    outcome = outcome or f"lost: {measured.note}"
    print(f"{case.name:17} {turn_text:8} {rival.name}: {outcome}", file=sys.stderr, flush=True)
    return Sample(rival.name, turn, measured)


def run_case(case: Case, repetitions: int, limits: Limits, machine: Machine) -> Result:
    """Let the rivals take turns (A B C A B C ...), so that changing load affects all of them alike."""
    how = f"{repetitions} repetitions in turn" + (" after one warm-up" if case.warm_up else ", fewer where so counted")
    machine = dataclasses.replace(machine, date=report.now())
    result = Result(case.name, case.title, case.unit, case.baseline, [], {}, machine, how, case.pairs)
    if why := case.unavailable():
        return dataclasses.replace(result, absent={rival.name: why for rival in case.rivals})
    absent = {rival.name: why for rival in case.rivals if (why := rival.absent())}
    present = [rival for rival in case.rivals if rival.name not in absent]
    if case.warm_up:
        for rival in present:
            run_once(case, rival, 0, limits)
    samples: list[Sample] = []
    for turn in range(1, repetitions + 1):
        due = [rival for rival in present if turn <= case.turns_of.get(rival.name, case.max_turns)]
        if case.pairs and turn % 2 == 0:
            # The second of a pair would always find the caches that the first one has left.
            due.reverse()
        samples += [run_once(case, rival, turn, limits) for rival in due]
        if case.known_baseline and turn <= case.max_turns:
            samples.append(Sample(case.baseline, turn, Measured({"": case.known_baseline})))
    rows = summarise(case.derive(samples), case.baseline, case.targets, case.within, case.pairs)
    return dataclasses.replace(result, rows=rows, absent=absent)


Options = argparse.Namespace


def chosen(names: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option that has some of these names, with commas between them."""

    def parse(text: str) -> list[str]:
        if unknown := {*text.split(",")} - {*names}:
            raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {', '.join(names)}")
        return text.split(",")

    return parse


def tree(text: str) -> Tree:
    """The type of --against."""
    try:
        return open_tree(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Benchmark:
    """One program. `json` is the path of its results below `results/`. The case names do not depend on the options."""

    title: str
    json: str
    cases: Callable[[Options], Sequence[Case]]
    repetitions: int
    quick_repetitions: int = 1
    limits: Limits = Limits()
    quick_limits: Limits = Limits(start=60.0, recovery=40.0)
    draw: Callable[[Sequence[Result], Path], None] = pictures.bars

    def names(self) -> list[str]:
        """The cases in the order of the tables."""
        return [case.name for case in self.cases(Options(quick=False, python=""))]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add options of this benchmark alone."""

    def measure(self, options: Options, machine: Machine, names: Sequence[str]) -> Iterable[Result]:
        """The results of the cases of these names."""
        limits = self.quick_limits if options.quick else self.limits
        for case in self.cases(options):
            if case.name in names:
                compared = case.against(options.against) if options.against else case
                if compared.rivals:
                    yield run_case(compared, options.repetitions, limits, machine)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure what the command line says; return 0."""
        names = self.names()
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--repetitions", type=int, default=self.repetitions, help="turns (default: %(default)s)")
        parser.add_argument("--quick", action="store_true", help="few turns and short time-outs, to see that it works")
        parser.add_argument(
            "--only",
            action="extend",
            type=chosen(names),
            metavar="CASE",
            help=f"only these, with commas: {', '.join(names)}",
        )
        parser.add_argument("--against", type=tree, metavar="TREE", help="compare with another checkout: its folder")
        parser.add_argument("--redraw", action="store_true", help="measure nothing; write tables and picture again")
        folder = (RESULTS / self.json).parent
        parser.add_argument("--output", type=Path, help=f"folder of the results (default: {folder}; --against: none)")
        self.add_options(parser)
        options = parser.parse_args(arguments)
        if options.quick:
            options.repetitions = self.quick_repetitions
        if options.repetitions < 1:
            parser.error(f"--repetitions must be at least 1, not {options.repetitions}")
        path = (options.output or folder) / Path(self.json).name
        try:
            results = report.read(path)
        except ValueError as error:
            parser.error(str(error))
        # Otherwise SIGTERM would leave the processes of the run behind.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            if options.against:
                self.compare(options, options.only or names)
            else:
                self.publish(path, results, options, names)
        finally:
            signal.signal(signal.SIGTERM, before)
        return 0

    def publish(self, path: Path, results: list[Result], options: Options, names: Sequence[str]) -> None:
        """Measure the chosen cases, and write them beside the results that the other cases have."""
        if not options.redraw:
            # The load is read before the first rival runs: it is that of other programs.
            machine = report.this_machine()
            for result in self.measure(options, machine, options.only or names):
                # What took minutes is kept, even if the next case fails.
                results = report.merge(results, [result], names)
                report.write_json(path, {"cases": results})
                print("\n".join(report.section(result)))
        report.write(path, self.title, results, self.draw)
        print(f"Results are in {path.parent}.", file=sys.stderr)

    def compare(self, options: Options, names: Sequence[str]) -> None:
        """Measure this checkout and another one in turn, and print their ratios. They belong to no published result."""
        results = []
        for result in self.measure(options, report.this_machine(), names):
            results.append(result)
            print("\n".join(report.section(result)), file=sys.stderr, flush=True)
        text = against.markdown(self.title, options.against, results)
        print(text)
        if options.output:
            path = options.output / Path(self.json).name
            report.write_json(path, {"cases": results})
            path.with_suffix(".md").write_text(text)
