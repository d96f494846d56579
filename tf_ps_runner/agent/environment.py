"""What a task is started with: its environment, and its command line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover_run.agent.command import command_line, python_program
from dlrover_run.output.streams import TEMP_PREFIX, RunDir
from dlrover_run.spec import Entrypoint
from tf_ps_runner.spec import ServersSpec

PACKAGE = Path(__file__).resolve().parent.parent
"""The package, of which the template may import what tasks need."""

WORKER_PATH = PACKAGE / "worker_path"
"""The directory that stands first in the search path of tasks; there is only the bootstrap in it."""

BOOT = WORKER_PATH / "tf_ps_boot.py"
"""What runs in front of the script in a task that is not forked from a template that has run it."""

AGENT = "TF_PS_AGENT"
"""The variable with the address of the agent."""

TOKEN = "TF_PS_TASK_TOKEN"
"""The variable with what a process shows its agent to be known; worth nothing to another user of this machine."""


SCRATCH = "TF_PS_SCRATCH"
"""The variable with a directory for files that shall not outlive the job."""


def common_environment(parent: Mapping[str, str], scratch: str | None) -> dict[str, str]:
    """What all tasks of this node have in common; `parent` is the launcher's own environment. A place in a cluster that
    the launcher itself was given is not theirs. `scratch` is a directory that is removed with the job, if there is one.
    """
    environment = {key: value for key, value in parent.items() if key not in ("TF_CONFIG", AGENT, TOKEN, SCRATCH)}
    if scratch is not None:
        environment[SCRATCH] = scratch
    paths = [str(WORKER_PATH), *filter(None, [parent.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Without it a line of a script may be held back in its buffer until the end, which servers never have.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def make_scratch(run_dir: RunDir) -> str | None:
    """A directory for `SCRATCH`, for the caller to remove; None where none can be made, and files stay where they are
    made without one. A run's directory that is kept is for what somebody has asked for."""
    try:
        return tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=None if run_dir.keep else run_dir.path)
    except OSError:
        return None


def boot_command(entrypoint: Entrypoint, args: Sequence[str]) -> tuple[str, ...]:
    """The command line of a task, with the bootstrap in front of the script; a program of which nothing is known is run
    as it is."""
    program = python_program(entrypoint)
    if program is None:
        return command_line(entrypoint, args)
    kind, target = program
    module = ("-m",) if kind == "module" else ()
    return (entrypoint.python, "-u", str(BOOT), *module, target, *args)


def master_address(spec: ServersSpec) -> str:
    """Where the nodes of the job meet, for `DLROVER_MASTER_ADDR`; empty where there is only one."""
    master = spec.job.master
    return f"{master.host}:{master.port}" if master is not None else ""
