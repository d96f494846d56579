"""What a task process is started with: environment, command line, output and memory limit.

Each line of output goes to the console with the task's name before it, and to files if there is a directory for them:

    <run directory>/<role>-<id>/stdout.log, stderr.log
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover_run.output.destinations import LogFile, RankStreams, Relayed, StreamPlan, Tee, log_path, share_console
from dlrover_run.output.opening import open_outputs, show_files
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.ring import read_log_tail
from dlrover_run.output.run_directory import TEMP_PREFIX, RunDir
from dlrover_run.processes.process import ProcessSpec
from dlrover_run.spec import Entrypoint, LogSpec, SpecError, Std
from dlrover_run.workers.environment import command_line, fill_macros, python_program
from tf_ps_runner.agent.report import EventPrinter
from tf_ps_runner.cluster.model import PlannedTask
from tf_ps_runner.cluster.rules import ROLES
from tf_ps_runner.memory.enforcer import MemoryEnforcer
from tf_ps_runner.spec import PsJobSpec

PACKAGE = Path(__file__).resolve().parent.parent
"""The package, from which the template may import what tasks need."""

WORKER_PATH = PACKAGE / "worker_path"
"""The first directory of the tasks' search path; it contains the bootstrap only."""

BOOT = WORKER_PATH / "tf_ps_boot.py"
"""What runs before the script in a task that is not forked from a template that has run it."""

AGENT = "TF_PS_AGENT"
"""The variable with the address of the agent."""

TOKEN = "TF_PS_TASK_TOKEN"
"""The variable with the token that a process shows its agent; useless to another user of this machine."""


SCRATCH = "TF_PS_SCRATCH"
"""The variable with a directory for files that must not outlive the job."""


def common_environment(parent: Mapping[str, str], scratch: str | None) -> dict[str, str]:
    """The environment that all tasks of this node share; `parent` is the launcher's own. A place in a cluster that the
    launcher itself was given is not passed on. `scratch` is a directory that is removed with the job, if there is one.
    """
    environment = {key: value for key, value in parent.items() if key not in ("TF_CONFIG", AGENT, TOKEN, SCRATCH)}
    if scratch is not None:
        environment[SCRATCH] = scratch
    paths = [str(WORKER_PATH), *filter(None, [parent.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Without it a line of a script may stay in its buffer until the end, which servers never reach.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def make_scratch(run_dir: RunDir) -> str | None:
    """A directory for `SCRATCH`, for the caller to remove; None if none can be made, and files stay where they are
    without it. The directory of a run that is kept is only for what the user asked for."""
    try:
        return tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=None if run_dir.keep else run_dir.path)
    except OSError:
        return None


def boot_command(entrypoint: Entrypoint, args: Sequence[str]) -> tuple[str, ...]:
    """The command line of a task, with the bootstrap before the script; any program but Python is run as it is."""
    program = python_program(entrypoint)
    if program is None:
        return command_line(entrypoint, args)
    kind, target = program
    module = ("-m",) if kind == "module" else ()
    return (entrypoint.python, "-u", str(BOOT), *module, target, *args)


def master_address(spec: PsJobSpec) -> str:
    """Where the nodes of the job rendezvous, for `DLROVER_MASTER_ADDR`; empty for one node."""
    place = spec.job.rendezvous
    return place.endpoint if place.hosted else ""


@dataclass(frozen=True)
class TaskStart:
    """All that one process is started with; the caller closes `memory` and the descriptors of `spec`."""

    spec: ProcessSpec
    memory: MemoryEnforcer
    outputs: RankStreams

    async def stderr_tail(self, relay: RelayClient) -> str:
        """The end of the standard error of the process, which has ended."""
        if (path := log_path(self.outputs.stderr)) is not None:
            return read_log_tail(path)
        return (await relay.tails([self.spec.name])).get(self.spec.name, "")

    def forget_output(self, relay: RelayClient) -> None:
        """The process writes no more: what is on its way to the console still gets there."""
        relay.release([self.spec.name], self.outputs.log_paths)


def plan_outputs(logs: LogSpec, directory: str | None) -> StreamPlan:
    """Where the outputs of one task go: to the console; with its `directory` to files as well, or with `--redirects` to
    files only, except for a stream that `--tee` names. All tasks share the console, in lines with a prefix.
    """
    if directory is None:
        return StreamPlan(None, (RankStreams(0, Relayed(shown=True), Relayed(shown=True), None),), ())
    out, err = os.path.join(directory, "stdout.log"), os.path.join(directory, "stderr.log")
    shown = ~logs.redirects.default | logs.tee.default
    tees = [Tee(0, 1, out)] if shown & Std.OUT else []
    tees += [Tee(0, 2, err)] if shown & Std.ERR else []
    return StreamPlan(directory, (RankStreams(0, LogFile(out), LogFile(err), None),), tuple(tees))


class TaskStartBuilder:
    """Builds the starts of this node's processes. `common` is the part of their environment that all of them share."""

    def __init__(self, spec: PsJobSpec, run_dir: RunDir, relay: RelayClient, events: EventPrinter) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._relay = relay
        self._events = events
        self._scratch = make_scratch(run_dir)
        if self._scratch is not None:
            # The relay ends last, also when watchdog and agent are killed together.
            relay.remove_at_end(self._scratch)
        self.common = common_environment(os.environ, self._scratch)

    def build(self, assigned: PlannedTask, variables: Mapping[str, str]) -> TaskStart:
        """The start of a task, with these variables of its own. Raises SpecError if its log files cannot be opened."""
        entrypoint = self._spec.job.entrypoint
        name = str(assigned.key)
        directory = self._make_directory(name)
        # Users rely on the order of what a task writes to both, which only one pipe to one console keeps.
        plan = plan_outputs(self._spec.job.logs, directory)
        outputs = share_console(plan, one_place=self._relay.single_console).ranks[0]
        prefix = f"[{name}]:"
        stdio = (0, *open_outputs(outputs, self._relay, name, prefix=prefix))
        show_files(((tee, prefix) for tee in plan.tees), self._relay)
        memory = MemoryEnforcer.open(name, assigned.memory_mib)
        self._events.memory_limited(memory.kept_by)
        args = fill_macros(entrypoint.args, assigned.rank)
        spec = ProcessSpec(
            name=name,
            record_imports=ROLES[assigned.role].uses_servers,
            argv=boot_command(entrypoint, args),
            args=args,
            environment={**self.common, **variables},
            stdio=stdio,
            before_exec=memory.enter,
        )
        return TaskStart(spec, memory, outputs)

    def _make_directory(self, name: str) -> str | None:
        """The directory for the log files of a task; None without `--log-dir`. Raises SpecError."""
        if self._run_dir.path is None or not self._run_dir.keep:
            return None
        directory = os.path.join(self._run_dir.path, name)
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--log-dir: {directory} cannot be made ({error.strerror}); name another one") from None
        return directory
