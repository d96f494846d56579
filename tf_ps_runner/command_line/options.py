"""The one table of flags of tf-ps-run, in which those that dlrover-run has too are the same ones.

Variables begin with TF_PS_RUN_ and not with PET_: a cluster manager sets those for torch, in every pod of a job.
"""

from __future__ import annotations

from typing import Any

from dlrover_run.command_line import options
from dlrover_run.command_line.options import FAILURES, MEETING, OTHER, OUTPUT, Flag
from dlrover_run.command_line.program import Program
from dlrover_run.policies.parameter_servers import rules
from dlrover_run.policies.parameter_servers.model import Role

PREFIX = "TF_PS_RUN_"

CLUSTER = "Cluster"
PROCESSES = "Processes"
MEMORY = "Memory"

BACKENDS = ("master", "c10d", "etcd")
START_METHODS = ("forkserver", "spawn")
ROLES = tuple(role.value for role in (Role.PS, Role.WORKER, Role.CHIEF, Role.EVALUATOR))


def _ours(name: str, panel: str, help: str, value: str = "", default: str | None = None, **more: Any) -> Flag:
    flag = Flag(name, panel, help, value, default, ours=True, prefix=PREFIX)
    return flag._replace(**more)


def _same(name: str, **changed: Any) -> Flag:
    """The flag of this name that dlrover-run has, but for what is changed."""
    return options.BY_DEST[name]._replace(ours=True, prefix=PREFIX)._replace(**changed)


_ID = _same(
    "rdzv_id",
    default=None,
    help="The job's name, part of its log directory; where nodes meet and nobody gives one it is [b]none[/].",
)
_MEETING = (
    _same(
        "rdzv_backend",
        default=None,
        choices=BACKENDS,
        help="How nodes find each other: [b]master[/] or [b]c10d[/] (the same), they meet at the endpoint; [b]etcd[/], "
        "in an etcd (v3). A job on one machine needs none.",
    ),
    _same("rdzv_endpoint"),
    _ID,
    _same("rdzv_conf"),
    _same("local_addr"),
)
_ENDINGS = tuple(_same(name) for name in ("help", "version", "install_completion", "show_completion"))

TABLE: tuple[Flag, ...] = (
    _ours(
        "ps",
        CLUSTER,
        "How many parameter servers the job has. With a range there are as many as there is room for, and "
        "[b]tf-ps-run scale[/] changes that.",
        "N|MIN:MAX",
        "1",
    ),
    _ours("workers", CLUSTER, "How many workers it has beside the chief, which trains too.", "N|MIN:MAX", "1"),
    _ours("evaluator", CLUSTER, "Have an evaluator, which is never listed in the cluster."),
    _ours(
        "role",
        CLUSTER,
        "Host one process of this kind: [b]ps[/], [b]worker[/], [b]chief[/] or [b]evaluator[/]. Without it this "
        "machine hosts as many of each as the job may have.",
        "ROLE",
        choices=ROLES,
    ),
    _ours(
        "sparse",
        CLUSTER,
        "Tell each process in TF_CONFIG only of itself, of the chief and of the servers, by their index.",
    ),
    *_MEETING,
    _same("module", panel=PROCESSES),
    _ours(
        "start-method",
        PROCESSES,
        "[b]forkserver[/] forks each process from one that has imported TensorFlow; [b]spawn[/] is a fresh interpreter "
        "for each.",
        "METHOD",
        "forkserver",
        choices=START_METHODS,
    ),
    _same("preload", panel=PROCESSES),
    _same(
        "max_restarts", default=f"{rules.RESTARTS}", help="How often the processes of each role may be started again."
    ),
    _ours(
        "save-timeout",
        FAILURES,
        "How long a planned change waits for the workers to pause and the chief to save.",
        "SECONDS",
        f"{rules.SAVE_TIMEOUT:g}",
    ),
    _ours(
        "ready-timeout",
        FAILURES,
        "How long a new process may take until it is ready, TensorFlow's import included.",
        "SECONDS",
        f"{rules.READY_TIMEOUT:g}",
    ),
    _ours(
        "hang-timeout",
        FAILURES,
        "How long the global step may stand still before the chief counts as hung; 0 is for ever.",
        "SECONDS",
        "0",
    ),
    _ours(
        "end-grace",
        FAILURES,
        "How long workers and the evaluator may go on after the chief is done.",
        "SECONDS",
        f"{rules.END_GRACE:g}",
    ),
    _ours(
        "checkpoint-dir",
        FAILURES,
        "Where the script saves. It is told nothing of this: somebody who says it is not warned that what is not saved "
        "is lost with a server.",
        "DIR",
        files="directory",
    ),
    _same("shutdown_timeout", help="Time between a process's stop signal and SIGKILL [dim](30)[/]."),
    _same("signals_to_handle"),
    _same("forward_signals"),
    _ours("worker-memory", MEMORY, "What the chief, each worker and the evaluator may take, as in 4Gi.", "SIZE"),
    _ours("ps-memory", MEMORY, "What each parameter server may take.", "SIZE"),
    _ours(
        "max-memory",
        MEMORY,
        "The most that a process may have after it was killed for memory: its replacement gets twice as much.",
        "SIZE",
    ),
    _same("log_dir"),
    _same("redirects", help="Write the output of all processes to files: 1 stdout, 2 stderr, 3 both."),
    _same("tee"),
    *_ENDINGS,
)

NO_KEYS = frozenset(("scale_up_delay", "restart_window", "early_failure_limit", "check_timeout"))
"""Keys of `--rdzv-conf` that only a job without servers knows."""

TF_PS_RUN = Program(
    name="tf-ps-run",
    table=TABLE,
    about="""Run SCRIPT as chief, workers, parameter servers and evaluator of TensorFlow, and keep the job alive.

Each process finds its place in TF_CONFIG. What follows SCRIPT is its own.

To change a running job: [b]tf-ps-run scale --help[/].""",
    no_keys=NO_KEYS,
    epilog="\n\n".join(
        (
            "A flag may be written with underscores ([b]--max_restarts[/]) or given by a variable "
            f"([b]{PREFIX}MAX_RESTARTS=4[/]); the command line wins. [b]PYTHON_EXEC[/] names the interpreter that has "
            "TensorFlow, if it is another one than this.",
            "One machine: [b]tf-ps-run --ps=2 --workers=3 --evaluator train.py --steps 1000[/]",
            "Each of several: [b]tf-ps-run --role=ps --ps=1:4 --workers=2:8 --rdzv-endpoint=node0 train.py[/]",
        )
    ),
    origin="dlrover-run's",
    instead={
        "nnodes": "give --ps and --workers, and --role on each machine",
        "nproc-per-node": "give --ps and --workers",
        "standalone": "leave it out, since a job without --rdzv-endpoint is on this machine alone",
        "node-rank": "leave it out, since the job finds a rank for each process",
    },
)

SCALE = Program(
    no_keys=NO_KEYS,
    name="tf-ps-run scale",
    table=(
        _ours("ps", CLUSTER, "How many parameter servers the job shall have.", "N", pet=False),
        _ours("workers", CLUSTER, "How many workers it shall have beside the chief.", "N", pet=False),
        *_MEETING[:-1],
        _ours(
            "timeout",
            OTHER,
            "How long to wait until the job has heard of it.",
            "SECONDS",
            "30",
            pet=False,
        ),
        _same("help"),
    ),
    about="""Change how many parameter servers and workers a running job has.

The job was started with a range, as in [b]--ps=1:4[/]. Where several jobs of yours run here, --rdzv-id names one.

From another machine the flags of the rendezvous say where its nodes meet.""",
    epilog="One machine: [b]tf-ps-run scale --ps=3[/]\n\n"
    "Elsewhere: [b]tf-ps-run scale --workers=6 --rdzv-endpoint=node0 --rdzv-id=ads[/]",
    usage="[FLAGS]",
)

__all__ = ["CLUSTER", "MEETING", "MEMORY", "OUTPUT", "PREFIX", "PROCESSES", "SCALE", "TABLE", "TF_PS_RUN"]
