"""The table of flags: torchrun's and those of the core, with those that each feature brings.

The parser, the help and the shell completion are all built from this table, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import (
    DEVICES,
    FAILURES,
    OTHER,
    OUTPUT,
    PROGRESS,
    RENDEZVOUS,
    SIZE,
    STATIC_ADDRESS,
    WORKERS,
    Flag,
)
from dlrover_run.command_line.values import WORKER_COUNTS
from dlrover_run.features import FEATURES
from dlrover_run.rendezvous import backends

START_METHODS = ("spawn", "fork", "forkserver")
EVENT_LOGS = ("null", "console")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
EXIT_SCHEMES = ("precise", "torchrun", "kubernetes")
PROGRESS_SOURCES = ("auto", "optimizer")
CLUSTERS = ("auto", "none", "slurm", "kubernetes", "mpi", "lsf", "pbs", "sagemaker", "vertex")

SHELLS = ("bash", "zsh", "tcsh", "fish")
INSTALLABLE_SHELLS = ("bash", "zsh", "fish")
CURRENT_SHELL = "the shell that started this process"

PANELS = (SIZE, RENDEZVOUS, WORKERS, FAILURES, "", OUTPUT, PROGRESS, DEVICES, OTHER)
"""The panels of the help in their order; the empty one stands for those that features have of their own."""

# A row has the name, the text, and what belongs to the value.
# fmt: off
CORE: tuple[Flag, ...] = (
    Flag("nnodes", SIZE,
        "Number of nodes. With a range the job may start with fewer than MAX, and nodes may join and leave.",
        "N|MIN:MAX", "1"),
    Flag("nproc-per-node", SIZE,
        "Workers on this node: a number, or count [b]gpu[/], [b]xpu[/] or [b]cpu[/]; [b]auto[/] is the devices, "
        "else the CPUs.",
        "N|auto|gpu|cpu|xpu", "1", choices=WORKER_COUNTS),
    Flag("node-rank", SIZE,
        "Rank of this node, from 0. Fixed with static; otherwise a preferred rank [dim](NODE_RANK, WORKER_RANK)[/].",
        "RANK", "0"),
    Flag("spares", SIZE,
        "Number of nodes beyond MAX that wait as spares, ready to replace a lost node.",
        "K", "0", extension=True),
    Flag("node-unit", SIZE, "The number of nodes in a round is a multiple of N.", "N", "1", extension=True),
    Flag("auto-config", SIZE,
        "Take the number of nodes from NODE_NUM (or WORKER_NUM), count the workers as auto does, and turn on "
        "--network-check for 4 nodes or more; explicit flags take precedence.",
        extension=True),
    Flag("cluster", RENDEZVOUS,
        "Take what no flag gives from the variables of the cluster that started the launcher on each node; [b]auto[/] "
        "finds out which one it is, [b]none[/] uses none.",
        "|".join(CLUSTERS), "auto", extension=True, choices=CLUSTERS),
    Flag("hostfile", RENDEZVOUS,
        "File with the hosts of the job in the order of their ranks, one on a line; [b]slots=N[/] behind a host is its "
        "number of workers.",
        "FILE", extension=True),
    Flag("standalone", RENDEZVOUS, "Run a single node; the flags of the rendezvous are ignored."),
    Flag("rdzv-backend", RENDEZVOUS,
        "How nodes find each other: [b]static[/], by ranks and addresses that you give; [b]c10d[/] or [b]master[/] "
        "(the same), through a master at the endpoint; [b]etcd[/], through an etcd (v3). One node needs none.",
        "NAME", "static", choices=backends.words()),
    Flag("rdzv-endpoint", RENDEZVOUS,
        "Address of the rendezvous: one of the nodes, a separate master, or the members of an etcd; IPv6 addresses in "
        "brackets [dim](port 29400, etcd 2379; DLROVER_MASTER_ADDR)[/].",
        "HOST[:PORT],...", ""),
    Flag("rdzv-id", RENDEZVOUS, "Name of the job, the same on all nodes; part of its log directory.", "NAME", "none"),
    Flag("rdzv-conf", RENDEZVOUS,
        "Timeouts, credentials and other settings; the keys are listed below.",
        "KEY=VALUE,...", ""),
    Flag("master-addr", RENDEZVOUS,
        "Address of node 0 for static, if --rdzv-endpoint is not given.",
        "HOST", STATIC_ADDRESS),
    Flag("master-port", RENDEZVOUS, "Port on node 0 for static [dim](29500)[/].", "PORT"),
    Flag("local-addr", RENDEZVOUS, "Address that this node advertises [dim](127.0.0.1 for a single node)[/].", "HOST"),
    Flag("module", WORKERS, "SCRIPT is the name of a module, as in [b]python -m[/].", short="-m"),
    Flag("no-python", WORKERS, "SCRIPT is any program; run it without Python."),
    Flag("run-path", WORKERS, "Run the script with runpy.run_path; overrides -m and --no-python."),
    Flag("start-method", WORKERS,
        "[b]spawn[/] starts a new interpreter for each worker; [b]forkserver[/] forks one that has done the imports. "
        "fork means forkserver.",
        "METHOD", "spawn", choices=START_METHODS),
    Flag("preload", WORKERS,
        "Modules that forkserver imports in advance; may be repeated.",
        "MODULE,...", extension=True, needs="start-method=forkserver|fork"),
    Flag("role", WORKERS, "Name of the workers in logs and in ROLE_NAME.", "NAME", "default"),
    Flag("max-restarts", FAILURES, "Number of times the workers may be restarted after a failure.", "N", "0"),
    Flag("shutdown-timeout", FAILURES,
        "Time from the stop signal to SIGKILL for a worker [dim](TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)[/].",
        "SECONDS"),
    Flag("signals-to-handle", FAILURES,
        "Signals that are passed on to the workers and end the job.",
        "SIGNAL,...", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    Flag("forward-signals", FAILURES,
        "Signals that are passed on to the workers without ending the job, as in [b]USR1,USR2[/].",
        "SIGNAL,...", "", extension=True),
    Flag("preemption-notice", FAILURES,
        "The signal by which the scheduler announces the end of this node, and the time until then, as in "
        "[b]USR1@120[/]: the workers get it, have that time to save, and the node leaves the job.",
        "SIGNAL@SECONDS", "", extension=True),
    Flag("monitor-interval", FAILURES,
        "No effect, as the kernel reports the end of a worker at once; accepted for torchrun compatibility.",
        "SECONDS", "0.1"),
    Flag("exit-codes", FAILURES,
        "[b]precise[/] tells each reason apart; [b]kubernetes[/] exits with 130, 137, 138 or 143 where another attempt "
        "may succeed, for operators that retry only those; [b]torchrun[/] exits with 1 for every failure.",
        "SCHEME", "precise", extension=True, choices=EXIT_SCHEMES),
    Flag("compat-exit-codes", FAILURES, "The same as --exit-codes=torchrun.", extension=True),
    Flag("log-dir", OUTPUT, "Directory of the log files; /dev/null forbids any file.", "DIR", files="directory"),
    Flag("journal", OUTPUT,
        "Directory of the event log, JSON lines with what happened and when; /dev/null forbids it "
        "[dim](else with the log files of --log-dir, or in ~/.local/state/dlrover-run)[/].",
        "DIR", extension=True, files="directory"),
    Flag("redirects", OUTPUT,
        "Write output to files: 1 stdout, 2 stderr, 3 both; or for some local ranks, as in 0:3,1:2.",
        "STREAMS", "0", short="-r"),
    Flag("tee", OUTPUT, "Like --redirects, and show the output on the console too.", "STREAMS", "0", short="-t"),
    Flag("log-line-prefix-template", OUTPUT,
        "Prefix of each teed line on the console; ${role_name}, ${local_rank}, ${rank} and ${hostname} are "
        "replaced [dim](TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else '\\[${role_name}${local_rank}]:')[/].",
        "TEXT", "", since="2.14"),
    Flag("local-ranks-filter", OUTPUT, "Show only these local ranks on the console.", "RANK,...", ""),
    Flag("duplicate-stdout-filters", OUTPUT,
        "Copy teed lines that contain one of these texts to filtered_stdout.log; write a comma as ,, .",
        "TEXT,..."),
    Flag("duplicate-stderr-filters", OUTPUT, "The same for stderr, to filtered_stderr.log.", "TEXT,..."),
    Flag("logs-specs", OUTPUT, "A plug-in of the entry point group torchrun.logs_specs.", "NAME", has_variable=False),
    Flag("event-log-handler", OUTPUT,
        "Where events are logged: [b]null[/] nowhere, [b]console[/] as JSON lines.",
        "NAME", "null", choices=EVENT_LOGS),
    Flag("progress", PROGRESS,
        "What counts the steps of a worker, beside the script's own reports: [b]auto[/] the sampler of "
        "dlrover_run.training, [b]optimizer[/] torch's optimizer too.",
        "SOURCE", "auto", extension=True, choices=PROGRESS_SOURCES),
    Flag("progress-regex", PROGRESS,
        "Count the steps that a worker prints: a regular expression whose first group is the number of the step, as in "
        "'step (\\\\d+)'; without a group each line that matches is a step.",
        "REGEX", "", extension=True),
    Flag("virtual-local-rank", DEVICES, "Give every worker local rank 0 and only its own GPU."),
    Flag("numa-binding", DEVICES,
        "Bind each worker to the CPUs near its GPU: [b]node[/], [b]socket[/], [b]exclusive[/] or [b]core-complex[/].",
        "MODE", has_variable=False, choices=NUMA_BINDINGS),
    Flag("help", OTHER, "Show this page; [b]-h[/] shows one screen of it.", short="-h", request=True),
    Flag("version", OTHER, "Show the version.", extension=True, request=True),
    Flag("print-completion", OTHER,
        "Print the completion script for [b]bash[/], [b]zsh[/], [b]tcsh[/] or [b]fish[/].",
        "SHELL", request=True, choices=SHELLS, since="2.14"),
    Flag("install-completion", OTHER,
        "Install the completion for this shell, or for [b]bash[/], [b]zsh[/] or [b]fish[/].",
        "SHELL", extension=True, request=True, const=CURRENT_SHELL, choices=INSTALLABLE_SHELLS),
    Flag("show-completion", OTHER,
        "Show the completion script for this shell, or for [b]bash[/], [b]zsh[/], [b]tcsh[/] or [b]fish[/].",
        "SHELL", extension=True, request=True, const=CURRENT_SHELL, choices=SHELLS),
)
# fmt: on


def arranged(core: Sequence[Flag], features: Iterable[Flag]) -> tuple[Flag, ...]:
    """The rows in the order of the help: by panels, and in a panel a feature's flag behind the one that it names."""
    table = list(core)
    for flag in features:
        panel = [index for index, other in enumerate(table) if other.panel == flag.panel]
        named = [index for index in panel if table[index].name == flag.after]
        table.insert([*(named or panel or [len(table) - 1])][-1] + 1, flag)
    own = PANELS.index("")
    return tuple(sorted(table, key=lambda flag: PANELS.index(flag.panel) if flag.panel in PANELS else own))


OF_FEATURES: Mapping[str, FeatureFlags] = {
    feature.name: import_module(feature.module("flags")).FEATURE for feature in FEATURES if feature.flags
}
"""What each feature brings to the command line, by its name. Each launch imports these modules, so at their tops they
import what a launch has anyway."""

TABLE = arranged(CORE, (flag for feature in OF_FEATURES.values() for flag in feature.flags))

UNSUPPORTED_DLROVER_FLAGS = {
    "accelerator": "leave it out; accelerators are detected",
    "auto-tunning": "leave it out; the script sets its own batch size and learning rate",
    "membind-policy": "leave it out; only CPUs are bound, by --numa-binding",
    "numa-affinity": "give --numa-binding=node instead",
    "save-at-breakpoint": "leave it out; the script saves with memory=True, see docs/checkpoints.md",
    "training-port": "leave it out; each round uses free ports",
    "ucp-device-type": "leave it out; it has no effect in DLRover either",
}
"""DLRover flags that dlrover-run does not have, and what to do instead, for pasted DLRover command lines."""

BY_DEST = {flag.dest: flag for flag in TABLE}
