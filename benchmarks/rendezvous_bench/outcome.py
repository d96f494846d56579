"""What all trials come to: the tables, and how the time grows with the nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from comparison.ratios import Row, Sample, summarise
from comparison.report import Result, Unit

from rendezvous_bench.trial import C10D, ETCD, LEASE, OURS, RENEWAL, SETTLE, Figure, Reading

TARGET = 0.1

PROTOTYPE = {2: 0.006, 8: 0.009, 32: 0.040, 128: 0.115, 512: 0.266}
"""Seconds from the last joiner to everybody's place that a prototype of the design with etcd took, by nodes, on two
cores shared with its etcd 3.4.23."""


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


ALL = (OURS.name, ETCD.name, C10D.name)
SHRINKING = (OURS.name, ETCD.name)

QUESTIONS = (
    Question("last-joiner", "start of the last node, all others waiting, to the place of the last", "s", ALL, TARGET),
    Question("at-once", "start of all nodes in the same moment to the place of the last", "s", ALL),
    Question(
        "death",
        f"SIGKILL of a node to the new world at all others; lost_after (1 s) in it, with etcd a lease of {LEASE:g} s",
        "s",
        SHRINKING,
    ),
    Question("elected-death", "the same of the node that was elected to decide", "s", (ETCD.name,)),
    Question(
        "first-round-requests",
        f"requests a node from the first start to {SETTLE:g} s after the last place; {RENEWAL} is not in the sum",
        "requests",
        (ETCD.name,),
    ),
    Question(
        "next-round-requests",
        f"requests a survivor from a node's death to {SETTLE:g} s after the new world; {RENEWAL} is not in the sum",
        "requests",
        (ETCD.name,),
    ),
    Question("memory", "memory (PSS) of the process that the nodes meet at", "bytes", ALL),
    Question("cpu", "its processor time from the first start to the last place", "s", ALL),
    Question("steady", "its share of one processor with signs of life at the default interval", "%", SHRINKING),
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
    values = {"": reading.value} | {f", {part}": value for part, value in reading.parts.items()}
    if reading.ended:
        return Sample(rival, trial.repetition, values)
    return Sample(rival, trial.repetition, values, f"did not end in {reading.value:g} s", frozenset({""}))


def medians(result: Result, rival: str, sizes: Sequence[int]) -> dict[int, float]:
    """A rival's median at each number of nodes for which every run had its end."""
    by_title = {row.title: row for row in result.rows}
    rows = {nodes: by_title.get(label(rival, nodes)) for nodes in sizes}
    return {nodes: row.median for nodes, row in rows.items() if row and row.median is not None and not row.lost}


def growth(rival: str, times: Mapping[int, float]) -> str:
    """A sentence on how a rival's times grow with the nodes, as the exponent of a power; 1 is linear."""
    sizes = sorted(times)
    if len(sizes) < 2:
        return f"Growth of {rival}: too few sizes to say."

    def exponent(few: int, many: int) -> float:
        return math.log(times[many] / times[few]) / math.log(many / few)

    steepest, few, many = max((exponent(few, many), few, many) for few, many in pairwise(sizes))
    overall = exponent(sizes[0], sizes[-1])
    return (
        f"Growth of {rival} from {sizes[0]} to {sizes[-1]} nodes: time as the power {overall:.2f} of the nodes "
        f"(1 is linear); steepest from {few} to {many}: {steepest:.2f}."
    )


def sentences(tables: Sequence[Result], sizes: Sequence[int]) -> list[str]:
    """What the tables come to: growth, etcd beside its prototype, and how many requests a round of N nodes costs."""
    by_name = {table.name: table for table in tables}
    told = [growth(rival, medians(by_name["last-joiner"], rival, sizes)) for rival in (OURS.name, ETCD.name)]
    beside = [
        f"{time * 1000:.0f} ms with {nodes} nodes (the prototype {PROTOTYPE[nodes] * 1000:.0f})"
        for nodes, time in medians(by_name["last-joiner"], ETCD.name, sizes).items()
        if nodes in PROTOTYPE
    ]
    if beside:
        told.append(f"Last joiner with etcd: {', '.join(beside)}.")
    for name, which in (("first-round-requests", "first"), ("next-round-requests", "next")):
        if asked := medians(by_name[name], ETCD.name, sizes):
            each = ", ".join(f"{count:.2f} with {nodes}" for nodes, count in asked.items())
            told.append(f"Requests that the {which} round costs etcd for each of its nodes: {each}.")
    return told
