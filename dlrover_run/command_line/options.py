"""The one table of flags: what they are called, what they take, which variable stands for them and what they do.

The command line is read by this table and the help and the completion are made from it, so the three cannot differ.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SIZE = "Job size"
MEETING = "Rendezvous"
WORKERS = "Workers"
FAILURES = "Failures and restarts"
CHECK = "Node check"
LOCAL = "A cluster on this machine"
OUTPUT = "Output"
DEVICES = "Devices"
OTHER = "Other"

START_METHODS = ("spawn", "fork", "forkserver")
EVENT_LOGS = ("null", "console")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
BACKENDS = ("static", "c10d", "master", "etcd")
WORKER_COUNTS = ("auto", "gpu", "cpu", "xpu")
CHECK_WORDS = ("once", "always")

SHELLS = ("bash", "zsh", "tcsh", "fish")
INSTALLED_SHELLS = ("bash", "zsh", "fish")
THIS_SHELL = "the shell that started this process"

STATIC_ADDRESS = "127.0.0.1"
"""Where node 0 of static is when nobody says so, as in torchrun."""


FIRST_TORCHRUN = "2.13"
"""The oldest torchrun whose every flag is here."""


class Flag(NamedTuple):
    """One flag.

    `value` is the name of its value in the help, empty for a switch. `bare` is the value that it has where none is
    given: such a flag takes one only behind a `=`, so that the word after it may be the script, unless it is a request.
    `pet` says that a variable gives its default, which is called `PET_<DEST>`, or begins as `prefix` says. `ours` marks
    what torchrun does not have: such a flag never makes one of torchrun's abbreviations ambiguous. A `request` answers
    by itself and starts no job. `files` asks the shell to complete file names. `since` is the torchrun that brought the
    flag: one that the first did not have never makes an abbreviation ambiguous that the first takes.
    """

    name: str
    panel: str
    help: str
    value: str = ""
    default: str | None = None
    short: str | None = None
    pet: bool = True
    ours: bool = False
    request: bool = False
    choices: tuple[str, ...] = ()
    files: Literal["", "directory"] = ""
    bare: str = ""
    prefix: str = "PET_"
    since: str = FIRST_TORCHRUN

    @property
    def dest(self) -> str:
        """The name with underscores: the key of its value, and the tail of its variable's name."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str | None:
        """The environment variable that stands for it."""
        return f"{self.prefix}{self.dest.upper()}" if self.pet and not self.request else None

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write it in full; the first is the one that messages use."""
        long = dict.fromkeys((f"--{self.name}", f"--{self.dest}"))
        return (*long, self.short) if self.short else tuple(long)


TABLE: tuple[Flag, ...] = (
    Flag(
        "nnodes",
        SIZE,
        "How many nodes the job has. With a range it may start with fewer than MAX, and nodes may come and go.",
        "N|MIN:MAX",
        "1",
    ),
    Flag(
        "nproc-per-node",
        SIZE,
        "Workers on this node: a number, or count [b]gpu[/], [b]xpu[/] or [b]cpu[/]; [b]auto[/] is the devices, "
        "else the CPUs.",
        "N|auto|gpu|cpu|xpu",
        "1",
        choices=WORKER_COUNTS,
    ),
    Flag(
        "node-rank",
        SIZE,
        "This node's number, from 0. For static it is its rank; else it is a wish [dim](NODE_RANK, WORKER_RANK)[/].",
        "RANK",
        "0",
    ),
    Flag(
        "spares",
        SIZE,
        "How many nodes beyond MAX shall wait, ready to take the place of one that is lost.",
        "K",
        "0",
        ours=True,
    ),
    Flag("node-unit", SIZE, "A round has a multiple of this many nodes.", "N", "1", ours=True),
    Flag(
        "auto-config",
        SIZE,
        "Nodes as many as NODE_NUM (or WORKER_NUM) says, workers as auto counts them, and --network-check from 4 nodes "
        "on; what is given by a flag holds.",
        ours=True,
    ),
    Flag("standalone", MEETING, "One node on its own; flags that say where nodes meet are ignored."),
    Flag(
        "rdzv-backend",
        MEETING,
        "How nodes find each other: [b]static[/], ranks and addresses are given by hand; [b]c10d[/] or [b]master[/] "
        "(the same), they meet at the endpoint; [b]etcd[/], in an etcd (v3). One node needs none.",
        "NAME",
        "static",
        choices=BACKENDS,
    ),
    Flag(
        "rdzv-endpoint",
        MEETING,
        "Where they meet: one of the nodes, a master of its own, or the members of an etcd; an IPv6 address goes in "
        "brackets [dim](port 29400, of etcd 2379; DLROVER_MASTER_ADDR)[/].",
        "HOST[:PORT],...",
        "",
    ),
    Flag("rdzv-id", MEETING, "The job's name, part of its log directory.", "NAME", "none"),
    Flag(
        "rdzv-conf",
        MEETING,
        "How long to wait, whom to let in and more; the keys are listed below.",
        "KEY=VALUE,...",
        "",
    ),
    Flag(
        "master-addr",
        MEETING,
        "Address of node 0 for static, where no --rdzv-endpoint is given.",
        "HOST",
        STATIC_ADDRESS,
    ),
    Flag("master-port", MEETING, "Port on node 0 for static [dim](29500)[/].", "PORT"),
    Flag(
        "local-addr",
        MEETING,
        "The address that this node advertises [dim](127.0.0.1 where there is one node)[/].",
        "HOST",
    ),
    Flag("module", WORKERS, "The script is a module's name, as in [b]python -m[/].", short="-m"),
    Flag("no-python", WORKERS, "The script is a program of any kind; run it without Python."),
    Flag("run-path", WORKERS, "Run the script with runpy.run_path; overrides -m and --no-python."),
    Flag(
        "start-method",
        WORKERS,
        "[b]spawn[/] is a fresh interpreter for each worker; [b]forkserver[/] forks one that has the imports done. "
        "fork is taken as forkserver.",
        "METHOD",
        "spawn",
        choices=START_METHODS,
    ),
    Flag("preload", WORKERS, "Modules that forkserver imports beforehand; may be repeated.", "MODULE,...", ours=True),
    Flag("role", WORKERS, "What the workers are called in logs and in ROLE_NAME.", "NAME", "default"),
    Flag("max-restarts", FAILURES, "How often the workers may be started again after a failure.", "N", "0"),
    Flag(
        "shutdown-timeout",
        FAILURES,
        "Time between a worker's stop signal and SIGKILL [dim](TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)[/].",
        "SECONDS",
    ),
    Flag(
        "signals-to-handle",
        FAILURES,
        "Signals that are passed on to the workers and then end the job.",
        "SIGNAL,...",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Flag(
        "forward-signals",
        FAILURES,
        "Signals that are passed on to the workers while training continues, as in [b]USR1,USR2[/].",
        "SIGNAL,...",
        "",
        ours=True,
    ),
    Flag(
        "monitor-interval",
        FAILURES,
        "No effect: the kernel tells of a worker's end at once. Accepted because torchrun has it.",
        "SECONDS",
        "0.1",
    ),
    Flag("compat-exit-codes", FAILURES, "Answer 1 to every failure, as torchrun does.", ours=True),
    Flag(
        "network-check",
        CHECK,
        "Before training, find nodes that are broken or slow: [b]once[/] in the life of each launcher, or before each "
        "round, [b]always[/]. A broken node leaves with exit code 73.",
        "once|always",
        bare="once",
        ours=True,
        choices=CHECK_WORDS,
    ),
    Flag("comm-perf-test", CHECK, "Check, and show how fast each pair of nodes is linked.", ours=True),
    Flag(
        "precheck",
        CHECK,
        "DLRover's newer name for the two: [b]1[/] is --network-check, [b]2[/] is --comm-perf-test too; [b]0[/] leaves "
        "it to them.",
        "0|1|2",
        "0",
        ours=True,
        choices=("0", "1", "2"),
    ),
    Flag("exclude-straggler", CHECK, "A slow node leaves too, with exit code 74; else it is a warning.", ours=True),
    Flag(
        "straggler-threshold",
        CHECK,
        "How many times slower than the others a node is that counts as slow.",
        "RATIO",
        "2",
        ours=True,
    ),
    Flag(
        "local-nodes",
        LOCAL,
        "Start this many nodes here, and put a new one in the place of one that is lost. With a range MIN of them "
        "start at once and the others join later. It is the default of --nnodes; who is beyond that is a spare.",
        "N|MIN:MAX",
        ours=True,
    ),
    Flag("node-restarts", LOCAL, "How many nodes in all may be replaced.", "K", "3", ours=True),
    Flag(
        "isolate-nodes",
        LOCAL,
        "Give each node a network and an address of its own, which can be cut (needs root and ip).",
        ours=True,
    ),
    Flag(
        "node-join-after",
        LOCAL,
        "How long after the start the next node joins, where there is one; at SIGUSR1 it does so at once.",
        "SECONDS",
        "30",
        ours=True,
    ),
    Flag(
        "log-dir",
        OUTPUT,
        "Where log files go; /dev/null forbids any file.",
        "DIR",
        files="directory",
    ),
    Flag(
        "redirects",
        OUTPUT,
        "Write output to files: 1 stdout, 2 stderr, 3 both; or for some local ranks, as in 0:3,1:2.",
        "STREAMS",
        "0",
        short="-r",
    ),
    Flag("tee", OUTPUT, "As --redirects, and on the console too.", "STREAMS", "0", short="-t"),
    Flag(
        "log-line-prefix-template",
        OUTPUT,
        "What stands before each teed line on the console; ${role_name}, ${local_rank}, ${rank} and ${hostname} are "
        "filled in [dim](TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else '\\[${role_name}${local_rank}]:')[/].",
        "TEXT",
        "",
        since="2.14",
    ),
    Flag("local-ranks-filter", OUTPUT, "Show only these local ranks on the console.", "RANK,...", ""),
    Flag(
        "duplicate-stdout-filters",
        OUTPUT,
        "Copy teed lines that contain one of these texts to filtered_stdout.log; ,, is a comma.",
        "TEXT,...",
    ),
    Flag("duplicate-stderr-filters", OUTPUT, "The same for stderr, to filtered_stderr.log.", "TEXT,..."),
    Flag("logs-specs", OUTPUT, "A plug-in of the group torchrun.logs_specs.", "NAME", pet=False),
    Flag(
        "event-log-handler",
        OUTPUT,
        "Log events: [b]null[/] nowhere, [b]console[/] as JSON lines.",
        "NAME",
        "null",
        choices=EVENT_LOGS,
    ),
    Flag("virtual-local-rank", DEVICES, "Every worker is local rank 0 and sees only its own GPU."),
    Flag(
        "numa-binding",
        DEVICES,
        "Bind each worker to the CPUs near its GPU: [b]node[/], [b]socket[/], [b]exclusive[/] or [b]core-complex[/].",
        "MODE",
        pet=False,
        choices=NUMA_BINDINGS,
    ),
    Flag("help", OTHER, "Show this page.", short="-h", request=True),
    Flag("version", OTHER, "Show the version.", ours=True, request=True),
    Flag(
        "print-completion",
        OTHER,
        "Print the completion script for [b]bash[/], [b]zsh[/], [b]tcsh[/] or [b]fish[/].",
        "SHELL",
        request=True,
        choices=SHELLS,
        since="2.14",
    ),
    Flag(
        "install-completion",
        OTHER,
        "Install completion for this shell, or for [b]bash[/], [b]zsh[/] or [b]fish[/].",
        "SHELL",
        ours=True,
        request=True,
        bare=THIS_SHELL,
        choices=INSTALLED_SHELLS,
    ),
    Flag(
        "show-completion",
        OTHER,
        "Show the completion script for this shell, or for [b]bash[/], [b]zsh[/], [b]tcsh[/] or [b]fish[/].",
        "SHELL",
        ours=True,
        request=True,
        bare=THIS_SHELL,
        choices=SHELLS,
    ),
)

OF_DLROVER = {
    "accelerator": "leave it out, since what this machine has is found by itself",
    "auto-tunning": "leave it out, since batch size and learning rate are the script's own",
    "membind-policy": "leave it out, since only CPUs are bound, by --numa-binding",
    "numa-affinity": "give --numa-binding=node instead",
    "save-at-breakpoint": "leave it out, since no checkpoint is held in memory",
    "training-port": "leave it out, since each round takes ports that are free",
    "ucp-device-type": "leave it out, since it has no effect there either",
}
"""Flags of DLRover's that are not here, and what to do instead, for people who paste their command lines."""

BY_DEST = {flag.dest: flag for flag in TABLE}
BY_SPELLING = {spelling: flag for flag in TABLE for spelling in flag.spellings}
