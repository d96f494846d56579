"""What all trials come to: the tables, and how the time grows with the nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from comparison.ratios import Row, Sample, summarise
from comparison.report import Result, Unit

from rendezvous_bench.trial import C10D, OURS, Figure, Reading

TARGET = 0.1


@dataclass(frozen=True)
class Trial:
    """What one rival did with so many nodes in one repetition. `why` says why it lacks figures that it should have."""

    rival: str
    nodes: int
    repetition: int
    figures: Mapping[Figure, Reading]
    why: str = ""


@dataclass(frozen=True)
class Question:
    """One table: a figure, in words, its unit, who has it, and how large the ratio to c10d may be."""

    figure: Figure
    title: str
    unit: Unit
    rivals: tuple[str, ...]
    target: float | None = None


BOTH = (OURS.name, C10D.name)

QUESTIONS = (
    Question("last-joiner", "start of the last node, all others waiting, to the place of the last", "s", BOTH, TARGET),
    Question("at-once", "start of all nodes in the same moment to the place of the last", "s", BOTH),
    Question("death", "SIGKILL of a node to the new world at all others, lost_after (1 s) in it", "s", (OURS.name,)),
    Question("memory", "memory (PSS) of the process that the nodes meet at", "bytes", BOTH),
    Question("cpu", "its processor time from the first start to the last place", "s", BOTH),
    Question("steady", "its share of one processor with signs of life at the default interval", "%", (OURS.name,)),
)

UNITS: dict[Figure, Unit] = {question.figure: question.unit for question in QUESTIONS}


def results(trials: Sequence[Trial], sizes: Sequence[int], absent: dict[str, str]) -> list[Result]:
    """A table for each question, with the rivals side by side at each number of nodes."""
    return [
        Result(
            question.figure,
            question.title,
            question.unit,
            C10D.name if C10D.name in question.rivals else "",
            [row for nodes in sizes for row in _rows(question, trials, nodes)],
            {name: why for name, why in absent.items() if name.startswith(question.rivals)},
        )
        for question in QUESTIONS
    ]


def _rows(question: Question, trials: Sequence[Trial], nodes: int) -> list[Row]:
    samples = [
        _sample(question.figure, trial)
        for rival in question.rivals
        for trial in trials
        if trial.nodes == nodes and trial.rival == rival
    ]
    targets = {} if question.target is None else {(label(OURS.name, nodes), ""): question.target}
    return summarise(samples, label(C10D.name, nodes), targets)


def label(rival: str, nodes: int) -> str:
    """What a rival's row is called."""
    return f"{rival}, {nodes} nodes"


def _sample(figure: Figure, trial: Trial) -> Sample:
    rival = label(trial.rival, trial.nodes)
    reading = trial.figures.get(figure)
    if reading is None:
        return Sample(rival, trial.repetition, None, trial.why)
    values = {"": reading.value}
    if reading.ended:
        return Sample(rival, trial.repetition, values)
    return Sample(rival, trial.repetition, values, f"did not end in {reading.value:g} s", frozenset({""}))


def medians(result: Result, rival: str, sizes: Sequence[int]) -> dict[int, float]:
    """A rival's median at each number of nodes for which every run had its end."""
    by_title = {row.title: row for row in result.rows}
    rows = {nodes: by_title.get(label(rival, nodes)) for nodes in sizes}
    return {nodes: row.median for nodes, row in rows.items() if row and row.median is not None and not row.lost}


def growth(times: Mapping[int, float]) -> str:
    """A sentence on how the times grow with the nodes, as the exponent of a power; 1 is linear."""
    sizes = sorted(times)
    if len(sizes) < 2:
        return "Growth: too few sizes to say."

    def exponent(few: int, many: int) -> float:
        return math.log(times[many] / times[few]) / math.log(many / few)

    steepest, few, many = max((exponent(few, many), few, many) for few, many in pairwise(sizes))
    overall = exponent(sizes[0], sizes[-1])
    return (
        f"Growth of {OURS.name} from {sizes[0]} to {sizes[-1]} nodes: time as the power {overall:.2f} of the nodes "
        f"(1 is linear); steepest from {few} to {many}: {steepest:.2f}."
    )
