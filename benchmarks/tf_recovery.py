"""Recovery of TensorFlow jobs with parameter servers, with tf-ps-run and without. See `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from core.cases import Benchmark, Case, Limits, Options
from core.launchers import WORKERS
from core.ratios import Late, Lost, Measured
from core.report import REPOSITORY, Machine
from core.run import NANOSECOND, Report, Run
from core.trees import Tree

GRAPH = "tf_graph.py"
STRATEGY = "tf_strategy.py"
SERVERS = 2

LIMITS = Limits(start=180.0, recovery=120.0, settle=4.0)
"""A worker that TensorFlow lets wait looks every 30 s only, so a start may take long; `settle` is enough for a
checkpoint or two."""

MAX_RESTARTS = 10
"""More than a run needs: the benchmark compares times, not budgets."""

PROBE_TIMEOUT = 60.0
OF_WORKER = ", of the worker"

FORKED = 0.3
"""The target for processes that a template forks, as a ratio to plain processes."""

SPAWNED = 1.0
"""The target for processes that are started anew: they import TensorFlow, as those of any launcher."""

VERSION = """
import importlib.metadata, platform
for name in ("tensorflow", "tensorflow-cpu"):
    try:
        print(f"{platform.python_version()} with TensorFlow {importlib.metadata.version(name)}")
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def trained_with(python: str) -> str:
    """The versions of an interpreter and of its TensorFlow; empty if it has none. TensorFlow is not imported."""
    command = [python, "-c", VERSION]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT).stdout.strip()
    return ""


def missing_tensorflow(python: str) -> str | None:
    """Why scripts with TensorFlow cannot run here; None if they can."""
    return None if trained_with(python) else f"{python} has no TensorFlow (`make .venv-tf/.made`)"


def roles_of(script: str) -> tuple[str, ...]:
    """The roles that report steps: with the strategy the worker executes no step of the script."""
    return ("chief",) if script == STRATEGY else ("chief", "worker")


@dataclass(frozen=True)
class TfPsRun:
    """tf-ps-run. A job that may have fewer servers starts with the most. `python` is the interpreter of the script,
    `launcher` that of tf-ps-run."""

    name: str
    python: str
    script: str = GRAPH
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = sys.executable

    def of_tree(self, tree: Tree) -> TfPsRun:
        """The same launcher of another checkout, with the same script."""
        return dataclasses.replace(self, name=f"{self.name}, {tree.name}", launcher=tree.python)

    def absent(self) -> str | None:
        return missing_tensorflow(self.python)

    def start(self, run: Run, least: int, most: int) -> None:
        command = [self.launcher, "-m", "tf_ps_runner", f"--ps={most}" if least == most else f"--ps={least}:{most}"]
        command += ["--workers=1", f"--max-restarts={MAX_RESTARTS}", f"--rdzv-id={run.directory.name}"]
        command += [f"--checkpoint-dir={run.directory / 'model'}", *self.options, str(WORKERS / self.script)]
        run.start(command, {"PYTHON_EXEC": self.python, **self.environment})

    def change(self, run: Run, servers: int) -> None:
        run.start([self.launcher, "-m", "tf_ps_runner", "scale", f"--ps={servers}", f"--rdzv-id={run.directory.name}"])


@dataclass(frozen=True)
class PlainProcesses:
    """No launcher: `workers/tf_supervisor.py` starts again `all` processes, or only the `one` that has died."""

    name: str
    python: str
    script: str = GRAPH
    again: str = "all"

    def of_tree(self, tree: Tree) -> None:
        """They belong to no checkout."""

    def absent(self) -> str | None:
        return missing_tensorflow(self.python)

    def start(self, run: Run, least: int, most: int) -> None:
        supervisor = [sys.executable, "-u", str(WORKERS / "tf_supervisor.py")]
        run.start([*supervisor, self.python, str(WORKERS / self.script), str(least), self.again])

    def change(self, run: Run, servers: int) -> None:
        try:
            change = os.open(run.directory / "change", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise Lost(f"the supervisor has ended ({error.strerror})") from None
        os.write(change, f"{servers}\n".encode())
        os.close(change)


Rival = TfPsRun | PlainProcesses


def train(rival: Rival, run: Run, limits: Limits, least: int = SERVERS) -> None:
    """Start a job, and let chief and worker train for a while."""
    run.ends_by_itself = False
    run.environment |= {"MODEL_DIR": str(run.directory / "model"), "TF_CPP_MIN_LOG_LEVEL": "1"}
    rival.start(run, least, SERVERS)
    wait_steps(rival, run, limits, after_ns=0)


def wait_steps(rival: Rival, run: Run, limits: Limits, after_ns: int) -> None:
    """Wait for a step of each role in a session that begins after a moment, and let them train."""
    for role in roles_of(rival.script):
        session = run.wait(f"{role}-session", 1, limits.start, after_ns)[0]
        run.wait(f"{role}-step", 1, limits.start, session.at_ns)
    run.settle(limits.settle)


def newest(run: Run, role: str, rank: int) -> Report:
    """The first report of the newest process of a task. Raises Lost if the run has none that is alive."""
    found = [report for report in run.reports if report.event == f"{role}-begun" and report.rank == rank]
    if not found or found[-1].pid not in run.of_node(0):
        raise Lost(f"{role} {rank} is not among the processes of this run")
    return found[-1]


def wait_back(run: Run, roles: Sequence[str], began_ns: int, limit: float) -> None:
    """Wait until each role has made a step in a session that began after `began_ns`, for at most `limit` seconds.
    Raises Lost if the job ends before."""
    deadline = time.monotonic() + limit
    with contextlib.suppress(Late):
        for role in roles:
            session = run.wait(f"{role}-session", 1, deadline - time.monotonic(), began_ns)[0]
            run.wait(f"{role}-step", 1, deadline - time.monotonic(), session.at_ns)


def first(reports: Sequence[Report], event: str, after_ns: int) -> Report | None:
    """The first report of an event after a moment."""
    found = (report for report in reports if report.event == event and report.at_ns > after_ns)
    return min(found, key=lambda report: report.at_ns, default=None)


def recovery_parts(
    reports: Sequence[Report], roles: Sequence[str], began_ns: int, limit: float, planned: bool
) -> Measured:
    """How long each role made no step, and how many steps were lost. Pure.

    The time of a role ends with the first step in its first session after `began_ns`. It begins with the fault, or if
    the change is `planned` with the last step before that session.
    """
    values: dict[str, float] = {}
    unended = set()
    for role in roles:
        part = "" if role == "chief" else OF_WORKER
        session = first(reports, f"{role}-session", began_ns)
        step = first(reports, f"{role}-step", session.at_ns) if session else None
        if session is None or step is None:
            values[part] = limit
            unended.add(part)
            continue
        before = [each.at_ns for each in reports if each.event == f"{role}-step" and each.at_ns < session.at_ns]
        values[part] = (step.at_ns - (max(before, default=began_ns) if planned else began_ns)) * NANOSECOND
    lost = steps_lost(reports, began_ns, planned)
    note = f"no step in {limit:g} s" if "" in unended or lost is None else f"{lost} steps lost"
    return Measured(values, note, frozenset(unended))


def steps_lost(reports: Sequence[Report], began_ns: int, planned: bool) -> int | None:
    """How many steps of the model are missing after the next session of the chief; None if there is no session.

    The steps before the fault count, and in a planned change those before the session too.
    """
    session = first(reports, "chief-session", began_ns)
    if session is None:
        return None
    until = session.at_ns if planned else began_ns
    # A new worker may finish a step before the chief has reported its session.
    old = {report.pid for report in reports if report.at_ns <= began_ns}
    steps = [report for report in reports if report.event.endswith("-step")]
    done = (report.attempt for report in steps if report.pid in old and report.at_ns <= until)
    again = (report.attempt for report in steps if report.pid not in old or report.at_ns > session.at_ns)
    first_again = min(again, default=None)
    return None if first_again is None else max(0, max(done, default=0) - (first_again - 1))


def server_death(rival: Rival, run: Run, limits: Limits) -> Measured:
    """The second of two servers is killed, to the next step of each role."""
    train(rival, run, limits)
    return kill(run, limits, newest(run, "ps", SERVERS - 1), roles_of(rival.script))


def chief_death(rival: Rival, run: Run, limits: Limits) -> Measured:
    """The chief is killed, to its next step; a worker may go on."""
    train(rival, run, limits)
    return kill(run, limits, newest(run, "chief", 0), ("chief",))


def kill(run: Run, limits: Limits, task: Report, roles: Sequence[str]) -> Measured:
    """SIGKILL of a task, to the next step of these roles."""
    killed = run.kill(task.pid)
    wait_back(run, roles, killed, limits.recovery)
    return recovery_parts(run.reports, roles, killed, limits.recovery, planned=False)


def planned_change(rival: Rival, run: Run, limits: Limits) -> Measured:
    """A second server is requested, to the first step with both."""
    train(rival, run, limits, least=1)
    if isinstance(rival, TfPsRun):
        now = time.monotonic_ns()
        rival.change(run, 1)
        wait_steps(rival, run, limits, after_ns=now)
    began = time.monotonic_ns()
    rival.change(run, SERVERS)
    wait_back(run, roles_of(rival.script), began, limits.recovery)
    return recovery_parts(run.reports, roles_of(rival.script), began, limits.recovery, planned=True)


def cases(python: str) -> tuple[Case, ...]:
    """All faults, for scripts that this interpreter executes."""
    spawn = ("--start-method=spawn",)
    forked = TfPsRun("tf-ps-run forkserver", python)
    spawned = TfPsRun("tf-ps-run spawn", python, options=spawn)
    hooks = TfPsRun("tf-ps-run hooks", python, environment={"DATA_SHARDS": "1"})
    plain = PlainProcesses("plain processes", python)
    itself = PlainProcesses("TensorFlow by itself", python, again="one")
    strategies = (
        TfPsRun(forked.name, python, STRATEGY),
        TfPsRun(spawned.name, python, STRATEGY, spawn),
        PlainProcesses(plain.name, python, STRATEGY),
    )
    strategy = {(forked.name, ""): FORKED, (spawned.name, ""): SPAWNED}
    graph = strategy | {(hooks.name, ""): FORKED}
    both = {(name, part): bound for (name, _), bound in graph.items() for part in ("", OF_WORKER)}
    case = partial(Case, unit="s", baseline=plain.name, warm_up=False)
    return (
        case(
            "server-death",
            "one of 2 parameter servers killed, graph mode, to the next step",
            rivals=(forked, spawned, hooks, plain, itself),
            measure=server_death,
            targets=both,
        ),
        case(
            "strategy-server-death",
            "one of 2 parameter servers killed, ParameterServerStrategy, to the next step",
            rivals=strategies,
            measure=server_death,
            targets=strategy,
        ),
        case(
            "planned-change",
            "from 1 to 2 parameter servers, graph mode, last step before to first step after",
            rivals=(forked, spawned, hooks, plain),
            measure=planned_change,
            targets=both,
        ),
        case(
            "chief-death",
            "the chief killed, graph mode, to its next step",
            rivals=(forked, spawned, hooks, plain, itself),
            measure=chief_death,
            targets=graph,
        ),
        case(
            "strategy-chief-death",
            "the chief killed, ParameterServerStrategy, to its next step",
            rivals=strategies,
            measure=chief_death,
            targets=strategy,
        ),
    )


class TensorFlowRecovery(Benchmark):
    """The scripts have an interpreter of their own."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        # The one that `make` sets up.
        default = os.environ.get("TF_PYTHON_221") or str(REPOSITORY / ".venv-tf" / "bin" / "python")
        parser.add_argument("--python", default=default, help="an interpreter with TensorFlow (default: %(default)s)")

    def machine(self, options: Options) -> Machine:
        machine = super().machine(options)
        python = f"{machine.python}, the script's {trained_with(options.python) or 'unknown'}"
        return dataclasses.replace(machine, python=python)


BENCHMARK = TensorFlowRecovery(
    "Recovering with parameter servers: tf-ps-run, plain processes and TensorFlow by itself",
    "tf_recovery/tf_recovery",
    lambda options: cases(options.python),
    repetitions=3,
    limits=LIMITS,
    quick_limits=LIMITS,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
