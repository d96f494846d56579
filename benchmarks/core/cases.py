"""A benchmark of rivals: cases in which they take turns, and the options of such a program."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from core import against, pictures, report
from core.ratios import Lost, Measured, Sample, summarise
from core.report import Machine, Result, Unit
from core.run import Run
from core.series import Kept, Series, draw_nothing
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
    """One comparison. A rival has a `name`, `absent()` returns why it cannot run here, None if it can, and `of_tree`
    is that of another checkout.

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

    def turns(self, repetitions: int) -> range:
        """The numbers of its turns."""
        most = max((self.turns_of.get(rival.name, self.max_turns) for rival in self.rivals), default=0)
        return range(1, min(repetitions, most) + 1)


class Key(NamedTuple):
    """A turn of all rivals, which are kept together: a ratio is one of neighbouring runs."""

    case: str
    turn: int


@dataclass(frozen=True)
class Turn:
    """What came of one turn, by rival, and why rivals are absent."""

    key: Key
    measured: Mapping[str, Measured]
    absent: Mapping[str, str]


def run_once(case: Case, rival: Any, turn: int, limits: Limits) -> Measured:
    """Run one rival once, and print on stderr how it went; turn 0 is a warm-up."""
    try:
        with Run() as run:
            measured: Measured = case.measure(rival, run, limits)
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
    return measured


def take_turn(case: Case, turn: int, limits: Limits, warm: bool = False) -> Turn:
    """Let the rivals take a turn (A B C A B C ...), so that changing load affects all of them alike. Those of a case
    with a warm-up that are not `warm` have one before."""
    absent = {rival.name: why for rival in case.rivals if (why := rival.absent())}
    present = [rival for rival in case.rivals if rival.name not in absent]
    for rival in present if case.warm_up and not warm else ():
        run_once(case, rival, 0, limits)
    due = [rival for rival in present if turn <= case.turns_of.get(rival.name, case.max_turns)]
    if case.pairs and turn % 2 == 0:
        # The second of a pair would always find the caches that the first one has left.
        due.reverse()
    return Turn(Key(case.name, turn), {rival.name: run_once(case, rival, turn, limits) for rival in due}, absent)


def result_of(case: Case, kept: Sequence[Kept[Turn]]) -> Result:
    """The table of a case, which has at least one turn."""
    turns = [one.run for one in kept]
    # All rows in the order of the case: some rivals take fewer turns, and pairs are turned round.
    samples = [
        Sample(rival.name, turn.key.turn, turn.measured[rival.name])
        for turn in turns
        for rival in case.rivals
        if rival.name in turn.measured
    ]
    if case.known_baseline:
        samples += [Sample(case.baseline, turn.key.turn, Measured({"": case.known_baseline})) for turn in turns]
    how = f"{len(turns)} repetitions in turn" + (" after one warm-up" if case.warm_up else ", fewer where so counted")
    rows = summarise(case.derive(samples), case.baseline, case.targets, case.within, case.pairs)
    absent = turns[-1].absent
    return Result(case.name, case.title, case.unit, case.baseline, rows, absent, kept[0].machine, how, case.pairs)


def results_of(cases: Sequence[Case], kept: Sequence[Kept[Turn]]) -> list[Result]:
    """The tables of all cases that have turns."""
    by_case = [(case, [one for one in kept if one.run.key.case == case.name]) for case in cases]
    return [result_of(case, own) for case, own in by_case if own]


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


def add_options(parser: argparse.ArgumentParser, names: Collection[str], repetitions: int) -> None:
    """The options of all benchmarks of rivals, whose cases have these names."""
    only = f"only these, with commas: {', '.join(names)}"
    parser.add_argument("--repetitions", type=int, default=repetitions, help="turns (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few turns and short time-outs, to see that it works")
    parser.add_argument("--only", action="extend", type=chosen(names), metavar="CASE", help=only)
    parser.add_argument("--against", type=tree, metavar="TREE", help="compare with another checkout: its folder")


def against_text(series: Series[Any], options: Options) -> Series[Any]:
    """The series, whose page is the comparison with another checkout if that is asked for."""
    text = partial(against.markdown, options.against)
    return dataclasses.replace(series, text=text, draw=draw_nothing) if options.against else series


@dataclass(frozen=True)
class Benchmark:
    """A program whose rivals take turns. `name`: see `Series`. The case names do not depend on the options."""

    title: str
    name: str
    cases: Callable[[Options], Sequence[Case]]
    repetitions: int
    quick_repetitions: int = 1
    limits: Limits = Limits()
    quick_limits: Limits = Limits(start=60.0, recovery=40.0)
    draw: Callable[[Sequence[Result], Path], None] = pictures.bars

    @property
    def order(self) -> list[str]:
        """The cases in the order of the tables."""
        return [case.name for case in self.cases(Options(quick=False, python=""))]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add options of this benchmark alone."""

    def machine(self, options: Options) -> Machine:
        """The machine, and what else the options say of it."""
        return report.this_machine()

    def series(self, cases: Sequence[Case], limits: Limits, machine: Callable[[], Machine]) -> Series[Turn]:
        """The turns of these cases."""
        by_name = {case.name: case for case in cases}
        warm: set[str] = set()

        def measure(key: Key) -> Turn:
            turn = take_turn(by_name[key.case], key.turn, limits, key.case in warm)
            warm.add(key.case)
            return turn

        def absent(key: Key, kept: Sequence[Kept[Turn]]) -> str | None:
            why = by_name[key.case].unavailable()
            return f"{key.case}: {why}" if why else None

        return Series(
            self.title,
            self.name,
            Turn,
            measure,
            lambda kept: results_of(cases, kept),
            absent=absent,
            order=self.order,
            draw=self.draw,
            machine=machine,
        )

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure what the command line says; return 0."""
        parser = argparse.ArgumentParser(description=self.title)
        add_options(parser, self.order, self.repetitions)
        self.add_options(parser)
        self.series((), self.limits, report.this_machine).add_options(parser)
        options = parser.parse_args(arguments)
        if options.quick:
            options.repetitions = self.quick_repetitions
        if options.repetitions < 1:
            parser.error(f"--repetitions must be at least 1, not {options.repetitions}")
        cases = [case.against(options.against) if options.against else case for case in self.cases(options)]
        series = self.series(cases, self.quick_limits if options.quick else self.limits, lambda: self.machine(options))
        wanted = [
            Key(case.name, turn)
            for case in cases
            if case.name in (options.only or self.order)
            for turn in case.turns(options.repetitions)
        ]
        return against_text(series, options).run(parser, options, wanted, trial=bool(options.against or options.quick))
