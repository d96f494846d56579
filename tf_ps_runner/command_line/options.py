"""The table of flags of tf-ps-run; flags that dlrover-run has too are taken from its table.

Variables begin with TF_PS_RUN_ and not with PET_, which a cluster manager sets for torch, in every pod of a job.
"""

from __future__ import annotations

from typing import Any

from dlrover_run.command_line.flag import FAILURES, Flag
from dlrover_run.command_line.flags import BY_DEST
from dlrover_run.command_line.program import OPERATOR_COMMANDS, Program, Subcommand
from dlrover_run.command_line.values import alternatives
from dlrover_run.rendezvous import backends
from tf_ps_runner.cluster import rules

PREFIX = "TF_PS_RUN_"

CLUSTER = "Cluster"
PROCESSES = "Processes"
MEMORY = "Memory"

STEPS = ("async", "sync")
"""Whether each task that trains makes global steps of its own, or all of them make each step together."""

ROLE_CHOICES = tuple(role.value for role in rules.ROLES)


def _flag(name: str, panel: str, help: str, value: str = "", default: str | None = None, **more: Any) -> Flag:
    flag = Flag(name, panel, help, value, default, extension=True, variable_prefix=PREFIX)
    return flag._replace(**more)


def _shared(name: str, **changed: Any) -> Flag:
    """The flag of this name from dlrover-run's table, with some fields changed."""
    return BY_DEST[name]._replace(extension=True, variable_prefix=PREFIX)._replace(**changed)


# A row has the name, the text, and what belongs to the value.
# fmt: off
TABLE: tuple[Flag, ...] = (
    _flag("ps", CLUSTER,
        "Number of parameter servers. With a range the job has as many as its nodes have room for, and [b]tf-ps-run "
        "scale[/] changes the number.",
        "N|MIN:MAX", "1"),
    _flag("workers", CLUSTER, "Number of workers in addition to the chief, which trains too.", "N|MIN:MAX", "1"),
    _shared("autoscale", panel=CLUSTER, value="async|sync", const="async", choices=STEPS,
        help="Measure the throughput with different numbers of workers within --workers=MIN:MAX, keep the number "
        "whose workers pay for themselves, and add servers within --ps=MIN:MAX while their processors or memory are "
        "the limit; [b]sync[/] if a global step takes a batch of each worker."),
    _flag("evaluator", CLUSTER, "Start an evaluator, which is never listed in the cluster."),
    _flag("role", CLUSTER,
        f"Host one task of this role: {alternatives([f'[b]{name}[/]' for name in ROLE_CHOICES])}. Without it a node "
        "of a cluster hosts its share of all tasks, and any other machine as many of each role as the job may have.",
        "ROLE", choices=ROLE_CHOICES),
    _flag("sparse", CLUSTER, "List in TF_CONFIG only the task itself, the chief and the servers, by their index."),
    _shared("rdzv_backend", default=None, choices=backends.words(coordinated=True),
        help="How nodes find each other: [b]master[/] or [b]c10d[/] (the same), through a master at the endpoint; "
        "[b]etcd[/], through an etcd (v3). A job on one machine needs none."),
    _shared("rdzv_endpoint"),
    _shared("rdzv_id", default=None,
        help="Name of the job, the same on all nodes; part of its log directory [dim](for several nodes: none)[/]."),
    _shared("rdzv_conf"),
    _shared("cluster"),
    _shared("hostfile", help="File with the hosts of the job in the order of their ranks, one on a line."),
    _shared("local_addr"),
    _shared("module", panel=PROCESSES),
    _flag("start-method", PROCESSES,
        "[b]forkserver[/] forks each task from a process that has imported TensorFlow; [b]spawn[/] starts a new "
        "interpreter for each.",
        "METHOD", "forkserver", choices=("forkserver", "spawn")),
    _shared("preload", panel=PROCESSES, needs="start-method!=spawn"),
    _shared("max_restarts", default=f"{rules.RESTARTS}",
        help="Number of times the tasks of each role may be restarted."),
    _flag("save-timeout", FAILURES,
        "Time that a planned change waits for the workers to pause and the chief to save.",
        "SECONDS", f"{rules.SAVE_TIMEOUT:g}"),
    _flag("ready-timeout", FAILURES,
        "Time until a new task must be ready, including the import of TensorFlow.",
        "SECONDS", f"{rules.READY_TIMEOUT:g}"),
    _flag("hang-timeout", FAILURES,
        "Time without a new global step after which the chief is declared hung; 0 means never.",
        "SECONDS", "0"),
    _shared("stall_action", panel=FAILURES,
        help="When a task that has made steps makes no progress, or a task is stopped: nothing ([b]off[/]), "
        "[b]report[/] which task is the cause, and where it waits, [b]dump[/] all stacks too, or [b]restart[/] the "
        "cause too, which costs one restart."),
    _shared("stall_timeout", panel=FAILURES),
    _flag("end-grace", FAILURES,
        "Time that workers and the evaluator may continue after the chief is done.",
        "SECONDS", f"{rules.END_GRACE:g}"),
    _flag("checkpoint-dir", FAILURES,
        "Where the script saves checkpoints. It only turns off the warning that unsaved variables are lost with a "
        "server; the value is not passed to the script.",
        "DIR", files="directory"),
    _shared("shutdown_timeout", help="Time from the stop signal to SIGKILL for a task [dim](30)[/]."),
    _shared("signals_to_handle"),
    _shared("forward_signals"),
    _shared("preemption_notice",
        help="The signal by which the scheduler announces the end of this node, and the time until then, as in "
        "[b]USR1@120[/]: within that time its tasks move to other nodes, or end after they got the signal."),
    _shared("exit_codes", choices=("precise", "kubernetes"),
        help="[b]precise[/] tells each reason apart; [b]kubernetes[/] exits with 130, 137, 138 or 143 where another "
        "attempt may succeed, for operators that retry only those."),
    _flag("worker-memory", MEMORY, "Memory limit of the chief, each worker and the evaluator, as in 4Gi.", "SIZE"),
    _flag("ps-memory", MEMORY, "Memory limit of each parameter server.", "SIZE"),
    _flag("max-memory", MEMORY,
        "The highest memory limit: the replacement of a task that was killed for memory gets twice as much as it had.",
        "SIZE", needs="worker-memory|ps-memory"),
    _shared("log_dir"),
    _shared("journal"),
    _shared("redirects", help="Write the output of all tasks to files: 1 stdout, 2 stderr, 3 both."),
    _shared("tee"),
    *(_shared(name) for name in ("help", "version", "install_completion", "show_completion")),
)
# fmt: on

IGNORED_KEYS = frozenset(("scale_up_delay", "scale_wait", "restart_window", "early_failure_limit", "check_timeout"))
"""Keys of `--rdzv-conf` that have no effect on a job with parameter servers."""

SCALE = Subcommand("tf_ps_runner.scale:scale", "Change the number of parameter servers and workers of a running job.")

SUBCOMMANDS = {
    # First in the help, and in place of that for nodes.
    **{name: SCALE for name in OPERATOR_COMMANDS if name == "scale"},
    **{name: command for name, command in OPERATOR_COMMANDS.items() if name != "scale"},
}

TF_PS_RUN = Program(
    name="tf-ps-run",
    launcher="tf_ps_runner.cli",
    table=TABLE,
    about="""Run SCRIPT as chief, workers, parameter servers and evaluator of TensorFlow, and restart what fails.

Each task gets its TF_CONFIG. Arguments after SCRIPT are passed to SCRIPT.""",
    epilog="\n\n".join(
        (
            "A flag may be written with underscores ([b]--max_restarts[/]) or given by a variable "
            f"([b]{PREFIX}MAX_RESTARTS=4[/]); the command line takes precedence. [b]PYTHON_EXEC[/] names the "
            "interpreter that has TensorFlow, if it is not this one.",
            "One machine: [b]tf-ps-run --ps=2 --workers=3 --evaluator train.py --steps 1000[/]",
            "By itself: [b]tf-ps-run --autoscale --ps=1:3 --workers=0:7 train.py[/]",
            "Each of several: [b]tf-ps-run --role=ps --ps=1:4 --workers=2:8 --rdzv-endpoint=node0 train.py[/]",
        )
    ),
    common=("ps", "workers", "evaluator", "role", "rdzv-endpoint", "rdzv-id", "max-restarts", "log-dir"),
    subcommands=SUBCOMMANDS,
    unsupported_from="dlrover-run",
    unsupported={
        "nnodes": "give --ps and --workers, and --role on each machine",
        "nproc-per-node": "give --ps and --workers",
        "standalone": "leave it out; a job without --rdzv-endpoint runs on this machine only",
        "node-rank": "leave it out; the job gives each task a rank",
    },
    ignored_keys=IGNORED_KEYS,
)
