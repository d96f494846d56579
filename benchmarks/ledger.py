"""The ledger of time against what scripts note themselves, in jobs whose workers are killed again and again.

See `benchmarks/README.md`. Each run is kept, so that the seeds can be measured in pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

from core.cases import Limits
from core.launchers import FORKSERVER, OURS, SPAWN, Job, Launcher
from core.process_events import process_events, why_absent
from core.ratios import Lost
from core.report import Table
from core.run import NANOSECOND, Run
from core.series import Kept, Series, measured, quantile, share_within
from core.steps import read_steps
from core.storms import Storm, survive
from core.truth import PHASES, Note, Pair, Plan, compare, delays, plan_of, read_notes, truth_of, with_kernel_times

from dlrover_run.events.ledger import Ledger, build_ledger
from dlrover_run.events.reader import AgentLog, NoEventLog, read_logs
from dlrover_run.events.timeline import TimePhase

SEEDS = 100
CHAOS = "chaos"
METHODS: Mapping[str, Launcher] = {"spawn": SPAWN, "forkserver": FORKSERVER}

STEP = 0.02
"""Seconds of a step of `workers/truth.py`."""

SLACK = 120.0
"""Seconds that a job may take longer than its sleeps, in which a loaded machine starts its workers."""

TARGETS: Mapping[str, float] = {"wall": 0.01, "sum": 0.01, "ettr": 0.01, **dict.fromkeys(PHASES, 0.05)}
"""The greatest relative error of each figure."""


class Key(NamedTuple):
    """One job: a seed of CHAOS whose rounds are `scale` times as long, or a turn of a storm with a start method."""

    case: str
    scale: int
    number: int


@dataclass(frozen=True)
class Outcome:
    """What came of one job: see `core.truth.compare` and `core.truth.delays`. `rounds` counts those of all ranks."""

    case: str
    scale: int
    number: int
    rounds: int
    figures: Mapping[str, Pair]
    delays: Mapping[str, Sequence[float]]

    @property
    def key(self) -> Key:
        return Key(self.case, self.scale, self.number)


def run_plan(run: Run, plan: Plan, options: Sequence[str] = ()) -> tuple[list[AgentLog], list[Note], int]:
    """Run the job of a plan to its end, with these options besides: the event logs, the notes of its ranks, and when it
    was started. With --local-nodes each node has the workers of the plan, and only the notes of the first are read.

    Raises Lost if it does not succeed.
    """
    (run.directory / "plan.json").write_text(json.dumps(plan.rounds))
    journal = run.directory / "journal"
    environment = {"BENCHMARK_TRUTH": f"{plan.save_every} {plan.begins_after}"}
    launcher = Launcher("", OURS, (f"--journal={journal}", *options), environment)
    began = launcher.start(run, Job("truth.py", plan.workers, max_restarts=len(plan.rounds)))
    run.wait_end(SLACK + sum(plan.begins_after + one.steps * STEP for one in plan.rounds))
    try:
        return read_logs(journal), read_notes(run.directory, plan.workers), began
    except NoEventLog as error:
        raise Lost(str(error)) from None


def chaos(key: Key) -> Outcome:
    """Run the job of a seed, and compare. Raises Lost if it does not succeed."""
    plan = plan_of(key.number, key.scale)
    rounds = len(plan.rounds)
    with process_events() as lives, Run() as run:
        logs, notes, began = run_plan(run, plan)
        notes = with_kernel_times(notes, lives())
    (log,) = logs
    if log.ended is None:
        raise Lost("the event log has no end")
    truth = truth_of(notes, plan.workers, rounds)
    figures = compare(build_ledger(logs), truth, log.ended.mono - began * NANOSECOND)
    late = delays(log, notes, rounds)
    return Outcome(*key, rounds * plan.workers, figures, late)


def share_between(ledger: Ledger, began: float, ended: float) -> float:
    """The share of the time of all places between two moments that is TRAIN, in percent; the moments are in seconds of
    the monotonic clock. Pure."""
    low, high = began * 1e6, ended * 1e6
    trained = sum(
        max(0.0, min(each.end, high) - max(each.start, low))
        for place in ledger.places
        for each in place.segments
        if each.phase is TimePhase.TRAIN
    )
    return 100.0 * trained / ((high - low) * len(ledger.places)) if ledger.places else 0.0


def weather(key: Key, storm: Storm) -> Outcome:
    """Run the storm of `recovery.py`, and compare its share of effective training time with the ledger's over the same
    time. Raises Lost if the job did not survive it.

    `recovery.py` counts steps, each worth the time that it took before the first kill, and the ledger counts time. So
    "ettr at its own rate" takes the rate of the steps in the storm: it leaves out that the job became slower or faster.
    """
    rival = METHODS[key.case]
    with Run() as run:
        journal = run.directory / "journal"
        options, counts = (*rival.options, f"--journal={journal}"), {"BENCHMARK_COUNTS": "1"}
        lived = survive(storm, replace(rival, options=options, environment=counts), run, Limits())
        if lived.note:
            raise Lost(lived.note)
        steps = read_steps(run.directory)
        ledger = build_ledger(read_logs(journal), until=datetime.now(UTC), running=True)
    share, at_own_rate = lived.share(steps, lived.undisturbed), lived.share(steps, lived.rate(steps))
    ours = share_between(ledger, lived.began_ns * NANOSECOND, lived.ended_ns * NANOSECOND)
    figures = {"ettr": Pair(ours, share), "ettr at its own rate": Pair(ours, at_own_rate)}
    return Outcome(*key, len(lived.kills), figures, {})


FIGURES_HEAD = ("figure", "jobs", "target", "within", "median error", "90 %", "greatest", "in each round of a rank")
DELAYS_HEAD = ("later than the script's note", "moments", "median", "90 %", "greatest", "smallest")
STORM_HEAD = (
    "workers are started by",
    "turn",
    "kills",
    "the ledger",
    "recovery.py",
    "error",
    "at its own rate",
    "error",
)


def figure_cells(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """One row: how far the ledger is from the truth in one figure."""
    known = [(one.figures[name], one.rounds) for one in outcomes if one.figures[name].error is not None]
    errors = [abs(pair.error or 0.0) for pair, _ in known]
    each = [1e3 * abs(pair.ledger - pair.truth) / rounds for pair, rounds in known]
    parts = [f"{100 * one:.2f} %" for one in (median(errors), quantile(errors, 0.9), max(errors))]
    return [
        name,
        str(len(known)),
        f"{100 * TARGETS[name]:g} %",
        share_within(errors, TARGETS[name]),
        *parts,
        "" if name == "ettr" else f"{median(each):.1f} ms",
    ]


def delay_cells(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """One row: by how much one kind of moment is later in the event log."""
    late = [1e3 * delay for one in outcomes for delay in one.delays[name]]
    figures = [median(late), quantile(late, 0.9), max(late), min(late)] if late else []
    return [name, str(len(late)), *([f"{figure:.1f} ms" for figure in figures] or ["-"] * 4)]


def storm_cells(one: Outcome) -> list[str]:
    """One row: a storm by the ledger, and by the steps of the job."""
    by_steps = ((f"{pair.truth:.2f} %", f"{100 * (pair.error or 0.0):+.2f} %") for pair in one.figures.values())
    ours = f"{one.figures['ettr'].ledger:.2f} %"
    return [one.case, str(one.number), str(one.rounds), ours, *(cell for cells in by_steps for cell in cells)]


def tables(kept: Sequence[Kept[Outcome]]) -> list[Table]:
    """All tables."""
    found = []
    for scale in sorted({one.run.scale for one in kept if one.run.case == CHAOS}):
        of_scale = [one for one in kept if (one.run.case, one.run.scale) == (CHAOS, scale)]
        own, how = [one.run for one in of_scale], measured(of_scale)
        rows = [figure_cells(name, own) for name in TARGETS if any(one.figures[name].error is not None for one in own)]
        longer = f", rounds {scale} times as long" if scale > 1 else ""
        found.append(Table(f"errors-{scale}", how, FIGURES_HEAD, rows, f"{len(own)} jobs{longer}"))
        late = [delay_cells(name, own) for name in own[0].delays]
        found.append(Table(f"delays-{scale}", how, DELAYS_HEAD, late, about="Where errors come from:"))
    if storms := [one for one in kept if one.run.case != CHAOS]:
        title = "Effective training time in the storm of `recovery.py`"
        found.append(Table("storms", measured(storms), STORM_HEAD, [storm_cells(one.run) for one in storms], title))
    return found


def line(one: Outcome) -> str:
    """One line for the console."""
    errors = ", ".join(
        f"{name} {100 * pair.error:+.2f} %" for name, pair in one.figures.items() if pair.error is not None
    )
    return f"{one.case} {one.number}: {errors}"


def seeds(text: str) -> range:
    """A range of seeds: `100` or `20:40`."""
    first, colon, last = text.partition(":")
    found = range(int(first), int(last)) if colon else range(int(text))
    if not found or found[0] < 0:
        raise ValueError(text)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; return 0."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--seeds", type=seeds, default=range(SEEDS), help="20 or 20:40 (default: 100)")
    parser.add_argument("--scale", type=int, default=1, help="rounds that are this many times as long (default: 1)")
    parser.add_argument("--storm", choices=METHODS, help="instead, the storm of recovery.py with this start method")
    parser.add_argument("--turns", type=int, default=1, help="how many storms (default: 1)")
    parser.add_argument("--kills", type=int, default=Storm().kills, help="kills of a storm (default: 10)")
    series_of(Storm()).add_options(parser)
    options = parser.parse_args(arguments)
    if min(options.scale, options.turns, options.kills) < 1:
        parser.error("--scale, --turns and --kills must be at least 1")
    keys = (
        [Key(options.storm, 1, turn) for turn in range(1, options.turns + 1)]
        if options.storm
        else [Key(CHAOS, options.scale, seed) for seed in options.seeds]
    )
    return series_of(Storm(kills=options.kills)).run(parser, options, keys)


def series_of(storm: Storm) -> Series[Outcome]:
    """The jobs of the seeds, and these storms."""
    return Series(
        TITLE,
        "ledger",
        Outcome,
        measure=lambda key: chaos(key) if key.case == CHAOS else weather(key, storm),
        tables=tables,
        line=line,
        absent=lambda key, kept: why_absent() if key.case == CHAOS else None,
    )


TITLE = "The ledger of time, and what scripts note themselves"

if __name__ == "__main__":
    sys.exit(main())
