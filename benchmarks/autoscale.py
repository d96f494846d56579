"""Jobs that scale themselves on one machine: what they find, what that costs, and MNIST beside fixed sizes.

See `benchmarks/README.md`. Every finished run is kept, so that it can be measured in pieces.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from core import indices
from core.launchers import OURS, WORKERS
from core.ratios import Lost
from core.report import Table, this_machine
from core.run import NANOSECOND, Run
from core.series import Kept, Series, measured

# The simulated worlds are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from simulation.autoscale.played import kept as kept_worlds
from simulation.autoscale.played import table as worlds_table

from dlrover_run.events.reader import NoEventLog, merged, read_logs
from dlrover_run.events.records import RoundClosed, RoundFormed, WorkerReady

CURVES = {
    "linear": (50.0, 100.0, 150.0, 200.0),
    "knee": (50.0, 100.0, 102.0, 104.0),
    "decline": (50.0, 100.0, 80.0, 60.0),
    "flat": (50.0, 50.0, 50.0, 50.0),
}
"""Work per second with 1 to 4 nodes."""

BEST = {"linear": 4, "knee": 2, "decline": 2, "flat": 1}
"""The size that has to be found: at least half of the nodes beyond the next smaller size become throughput."""

CURVE_CONF = {"default": "", "short": "autoscale_block=2,autoscale_warm_up=2"}
"""The settings of jobs with a planted throughput. Short blocks find the same in a fifth of the time."""

MNIST_CONF = "autoscale_block=2,autoscale_warm_up=2,autoscale_tolerance=0.1"

AUTO = "autoscale"
SIZES = (AUTO, "1", "2", "4")
"""The rivals of an MNIST job: the job that scales itself, and fixed numbers of nodes."""

SEARCH_TIMEOUT = 1200.0
MNIST_TIMEOUT = 1800.0
AFTERWARDS = 5.0
"""Seconds of training after the end of a search."""

SETTLED = "autoscale: ReachMax"
HOUR = 3600.0
TITLE = "Jobs that scale themselves, on one machine"
PLANTED, MNIST, WORLDS = "planted", "mnist", "worlds"


class Key(NamedTuple):
    """One run: of a curve with some settings, or of MNIST with a size and a number of epochs."""

    case: str
    what: str
    how: str
    turn: int


@dataclass(frozen=True)
class Trial:
    """What came of one run. `size` is the number of nodes at the end, and `changes` how many rounds followed the first.

    `seconds` are those from the first step to the end of the search, and of MNIST from the start to the end of the job.
    `pauses` are seconds without a round or before its first step, after the first one, by the event log. `cost` is how
    many of the seconds a job at its best size from its first step on would not have needed. `repeated` steps were made
    again, and `wrong` of the `epochs` have not used each sample once.
    """

    case: str
    what: str
    how: str
    turn: int
    size: int
    changes: int
    seconds: float
    pauses: float
    cost: float | None = None
    repeated: int = 0
    epochs: int = 0
    wrong: int = 0

    @property
    def key(self) -> Key:
        return Key(self.case, self.what, self.how, self.turn)


class Seen(NamedTuple):
    """What the event logs of a run say of its rounds."""

    size: int
    changes: int
    pauses: float


def seen_in(journal: Path) -> Seen:
    """The rounds of a run by its event logs. Raises Lost if there is none."""
    try:
        entries = list(merged(read_logs(journal)))
    except NoEventLog as error:
        raise Lost(str(error)) from None
    formed = [entry.event for entry in entries if isinstance(entry.event, RoundFormed) and entry.event.node == 0]
    closed = {event.round: event.mono for entry in entries if isinstance(event := entry.event, RoundClosed)}
    first: dict[int, float] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, WorkerReady) and event.stage == "step":
            at = event.mono if event.since is None else event.since
            first[event.round] = min(at, first.get(event.round, at))
    if not formed:
        raise Lost("the job has formed no round")
    rounds = [event.round for event in formed]
    pauses = [
        max(0.0, first[later] - closed[earlier])
        for earlier, later in pairwise(rounds)
        if earlier in closed and later in first
    ]
    return Seen(formed[-1].nodes, len(rounds) - 1, sum(pauses))


def missing_seconds(notes: Sequence[tuple[float, float]], until: float, rate: float) -> tuple[float, float]:
    """The seconds from the first step up to `until`, and how many of them the work of these steps, as (time, work),
    would not have taken at that rate. Pure."""
    done = sorted(note for note in notes if note[0] <= until)
    if not done:
        raise Lost("no step was noted")
    began = done[0][0]
    return until - began, until - began - sum(work for _, work in done[1:]) / rate


def planted(key: Key) -> Trial:
    """Run a job with a planted throughput until its search has ended. Raises Lost."""
    curve = CURVES[key.what]
    with Run() as run:
        journal, conf = run.directory / "journal", CURVE_CONF[key.how]
        flags = ["--autoscale", "--local-nodes=1:4", "--node-join-after=0", f"--journal={journal}"]
        flags += [f"--rdzv-conf={conf}"] if conf else []
        script = [str(WORKERS / "planted.py"), ",".join(map(str, curve))]
        run.start([*OURS, *flags, "--rdzv-id=benchmark-autoscale", *script])
        if not run.wait_output(SETTLED, SEARCH_TIMEOUT):
            raise Lost(f"the search has not ended in {SEARCH_TIMEOUT:g} s")
        settled = time.monotonic()
        run.settle(AFTERWARDS)
        size = _status(run)["size_choice"]["wanted_nodes"]
        (run.directory / "end").touch()
        run.wait_end(60.0)
        seen = seen_in(journal)
        lines = [line for path in run.directory.glob("work-*") for line in path.read_text().splitlines()]
        notes = [(float(at), float(work)) for at, work in map(str.split, lines)]
        seconds, cost = missing_seconds(notes, settled, curve[size - 1])
    return Trial(*key, size, seen.changes, round(seconds, 1), round(seen.pauses, 1), round(cost, 1))


def _status(run: Run) -> dict[str, Any]:
    """The status of the job. Raises Lost."""
    command = [*OURS, "status", "--json", "--rdzv-id=benchmark-autoscale"]
    found = subprocess.run(command, capture_output=True, text=True, env=run.environment, check=False)
    if found.returncode:
        raise Lost(f"no status: {found.stderr}")
    status: dict[str, Any] = json.loads(found.stdout)
    return status


def mnist(key: Key) -> Trial:
    """Run the MNIST example to its end, with one size. Raises Lost."""
    with Run() as run:
        journal = run.directory / "journal"
        nodes, auto = ("1:4", True) if key.what == AUTO else (key.what, False)
        flags = [f"--local-nodes={nodes}", f"--journal={journal}", "--start-method=forkserver"]
        flags += ["--autoscale", f"--rdzv-conf={MNIST_CONF}"] if auto else []
        epochs = ["--no_cuda", "--num_epochs", key.how, f"--digits_dir={run.directory / 'digits'}"]
        began = run.start([*OURS, *flags, "--preload=torch", str(WORKERS / "mnist_indices.py"), *epochs])
        ended = run.wait_end(MNIST_TIMEOUT)
        seen = seen_in(journal)
        texts = [path.read_bytes() for path in run.directory.glob("indices-*")]
        size = sum(1 for _ in (run.directory / "digits" / "training").glob("*/*.png"))
        use = indices.use_of(indices.read(texts), size)
    if use.epochs != int(key.how):
        raise Lost(f"{use.epochs} epochs were trained, not {key.how}")
    return Trial(
        *key,
        size=seen.size,
        changes=seen.changes,
        seconds=round((ended - began) * NANOSECOND, 1),
        pauses=round(seen.pauses, 1),
        repeated=use.repeated,
        epochs=use.epochs,
        wrong=use.wrong,
    )


def measure(key: Key) -> Trial:
    """Do one run. Raises Lost."""
    return planted(key) if key.case == PLANTED else mnist(key)


PLANTED_HEAD = ("throughput", "settings", "runs", "best found", "changes", "seconds", "pauses", "cost", "of an hour")
MNIST_HEAD = (
    "nodes",
    "epochs",
    "runs",
    "seconds",
    "to the best fixed size",
    "changes",
    "ends with",
    "repeated",
    "wrong",
)


def planted_rows(trials: Sequence[Trial]) -> list[list[str]]:
    rows = []
    for what in CURVES:
        for how in CURVE_CONF:
            own = [one for one in trials if (one.what, one.how) == (what, how)]
            if not own:
                continue
            cost = median(one.cost or 0.0 for one in own)
            rows.append(
                [
                    f"{what} ({', '.join(f'{rate:g}' for rate in CURVES[what])})",
                    how,
                    str(len(own)),
                    f"{sum(one.size == BEST[what] for one in own)} of {len(own)} ({BEST[what]})",
                    f"{median(one.changes for one in own):g}",
                    f"{median(one.seconds for one in own):.0f}",
                    f"{median(one.pauses for one in own):.1f}",
                    f"{cost:.1f}",
                    f"{100 * cost / HOUR:.2f} %",
                ]
            )
    return rows


def mnist_rows(trials: Sequence[Trial]) -> list[list[str]]:
    rows = []
    for epochs in sorted({one.how for one in trials}, key=int):
        by_size = {what: [one for one in trials if (one.what, one.how) == (what, epochs)] for what in SIZES}
        fixed = [median(one.seconds for one in own) for what, own in by_size.items() if own and what != AUTO]
        for what, own in by_size.items():
            if not own:
                continue
            seconds = median(one.seconds for one in own)
            wrong, total = sum(one.wrong for one in own), sum(one.epochs for one in own)
            rows.append(
                [
                    what,
                    epochs,
                    str(len(own)),
                    f"{seconds:.0f}",
                    f"{seconds / min(fixed):.3f}" if fixed else "-",
                    f"{median(one.changes for one in own):g}",
                    ", ".join(str(one.size) for one in own),
                    str(sum(one.repeated for one in own)),
                    f"{wrong} of {total}",
                ]
            )
    return rows


def tables(kept: Sequence[Kept[Trial]]) -> list[Table]:
    """The tables of the cases that have runs."""
    found = []
    for case, title, head, rows, text in (
        (PLANTED, "Planted throughput", PLANTED_HEAD, planted_rows, (0, 1)),
        (MNIST, "MNIST", MNIST_HEAD, mnist_rows, (0,)),
    ):
        if own := [one for one in kept if one.run.case == case]:
            found.append(Table(case, measured(own), head, rows([one.run for one in own]), title, text=text))
    return found


def worlds(played: Path) -> Table:
    """The table of the worlds that `python -m simulation.autoscale --keep` has played."""
    found = list(kept_worlds(played).values())
    seeds = [one.seed for one in found]
    how = f"{len(found)} worlds, seeds {min(seeds)} to {max(seeds)}, commit {this_machine().commit}"
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in worlds_table(found) if line]
    return Table(WORLDS, how, head, rows, "Simulated worlds")


def outcome(trial: Trial) -> str:
    """One line for the console."""
    cost = "" if trial.cost is None else f", cost {trial.cost:g} s"
    wrong = f", {trial.wrong} of {trial.epochs} epochs wrong, {trial.repeated} steps repeated" if trial.epochs else ""
    done = f"{trial.size} nodes after {trial.changes} changes in {trial.seconds:g} s, {trial.pauses:g} s of pauses"
    return f"{trial.case} {trial.what} {trial.how} {trial.turn}: {done}{cost}{wrong}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; return 0."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--only", action="append", choices=(PLANTED, MNIST), help="only this case; may be repeated")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES), help="planted: these (all)")
    parser.add_argument("--settings", choices=CURVE_CONF, default="default", help="planted: length of the blocks")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="mnist: these rivals (all)")
    parser.add_argument("--epochs", type=int, default=300, help="mnist: epochs (default: 300)")
    parser.add_argument("--repetitions", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--worlds", type=Path, metavar="FILE", help="keep the table of these simulated worlds")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    if options.worlds is not None:
        return SERIES.publish(options, [worlds(options.worlds)])
    wanted = []
    for turn in range(1, options.repetitions + 1):
        if PLANTED in (options.only or (PLANTED, MNIST)):
            wanted += [Key(PLANTED, curve, options.settings, turn) for curve in options.curves]
        if MNIST in (options.only or (PLANTED, MNIST)):
            wanted += [Key(MNIST, size, str(options.epochs), turn) for size in options.sizes]
    return SERIES.run(parser, options, wanted)


SERIES = Series(TITLE, "autoscale", Trial, measure, tables, outcome)

if __name__ == "__main__":
    sys.exit(main())
