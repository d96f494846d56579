"""The size of a job: the number of nodes and of workers on each, and the nodes that start on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.script import STANDARD_INPUT
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.coordination.rules import MAX_NODES, JobRules
from dlrover_run.rendezvous import backends
from dlrover_run.spec import Entrypoint, FlagValue, LocalSpec, SpecError
from dlrover_run.words.text import counted

if TYPE_CHECKING:
    from dlrover_run.environment.records import Detected

COUNT_VARIABLES = ("NODE_NUM", "WORKER_NUM")
"""The number of nodes that a cluster manager sets, the newer name first."""

MAX_LOCAL_NODES = 1000
"""More nodes than one machine can run: each is several processes."""

LOCAL_LAST_CALL_TIMEOUT = 3.0
"""Seconds without a new node after which the first round of local nodes starts with fewer than the most nodes, unless
`--rdzv-conf` sets it. All nodes are started in the same second, so no other node is on its way: a node that joins later
is meant to join a job that trains."""

LOCAL_CUT_OFF_TIMEOUT = 30.0
"""Seconds after which a local node that is cut off from the others ends, unless `--rdzv-conf` sets them. The supervisor
replaces it at once, and no switch of a network takes minutes to start."""

_AUTO = "auto"

_EXCLUDED_BY_LOCAL_NODES = {
    "standalone": "runs a single node",
    "node_rank": "is for nodes that you start yourself",
    "master_addr": "is for nodes that you start yourself",
    "master_port": "is for nodes that you start yourself",
}


class JobSize(NamedTuple):
    """The texts of `--nnodes` and `--nproc-per-node`, with their sources, and warnings."""

    nodes: FlagValue
    workers: FlagValue
    warnings: tuple[str, ...] = ()


def find_size(flags: FlagValues, environ: Mapping[str, str], found: Detected | None = None) -> JobSize:
    """The size of the job; `found` completes it. Raises SpecError when nothing gives the number of nodes.

    `--local-nodes` is the default of `--nnodes`. DLRover's `--auto-config` overrides explicit numbers; here an explicit
    number takes precedence, with a warning.
    """
    nodes, workers = flags.explicit("nnodes") or flags.explicit("local_nodes"), flags.explicit("nproc_per_node")
    detected = found.nodes if found else None
    if not flags.is_on("auto_config"):
        workers = workers or (found.workers if found else None) or flags.get("nproc_per_node")
        return JobSize(nodes or detected or flags.get("nnodes"), workers)
    by_variable = next(
        (FlagValue(name, environ[name]) for name in COUNT_VARIABLES if environ.get(name, "").strip()), None
    )
    warnings = []
    if by_variable is not None:
        values.integer(*by_variable, 1, MAX_NODES)
        if nodes is not None and nodes.text.strip() != by_variable.text.strip():
            variable = f"{by_variable.source}={by_variable.text}"
            warnings.append(f"{nodes.source} {nodes.text} takes precedence over {variable} of --auto-config.")
    elif nodes is None and detected is None and not flags.is_on("standalone"):
        variables = values.alternatives(COUNT_VARIABLES)
        raise SpecError(f"--auto-config cannot find the number of nodes: set {variables}, or give --nnodes.")
    if workers is not None and workers.text != _AUTO:
        warnings.append(
            f"{workers.source} {workers.text} takes precedence over --auto-config: devices are not counted."
        )
    return JobSize(
        nodes or by_variable or detected or flags.get("nnodes"),
        workers or FlagValue("--auto-config", _AUTO),
        tuple(warnings),
    )


class LocalNodes(NamedTuple):
    """The nodes that start on this machine, and the value of `--local-nodes`."""

    value: FlagValue
    spec: LocalSpec


def find_local_nodes(flags: FlagValues) -> LocalNodes | None:
    """The nodes that start on this machine; None if each node is started by a command of its own.

    Raises SpecError for a flag that excludes `--local-nodes`.
    """
    restarts = flags.integer("node_restarts", 0)
    join_after = values.seconds(*flags.get("node_join_after"), zero_allowed=True)
    isolated = flags.is_on("isolate_nodes")
    if flags.explicit("autoscale") is not None and flags.explicit("node_join_after") is None:
        # All nodes are here for the first round, as each that comes later would begin it anew.
        join_after = 0.0
    value = flags.explicit("local_nodes")
    if value is None:
        return None
    _refuse_excluded_flags(flags, isolated=isolated)
    min_nodes, max_nodes = values.node_range(*value)
    if max_nodes > MAX_LOCAL_NODES:
        raise values.invalid(*value, "is out of range", f"give at most {MAX_LOCAL_NODES}")
    return LocalNodes(value, LocalSpec(min_nodes, max_nodes, restarts, isolated, join_after))


def _refuse_excluded_flags(flags: FlagValues, *, isolated: bool) -> None:
    for name, purpose in _EXCLUDED_BY_LOCAL_NODES.items():
        given = flags.explicit(name)
        if given and (name != "standalone" or flags.is_on(name)):
            raise SpecError(f"{given.source} {purpose}, and --local-nodes starts the nodes itself: leave one out.")
    if not isolated:
        return
    if address := flags.explicit("local_addr"):
        raise SpecError(
            f"{address.source} gives one address, and --isolate-nodes gives each node its own: leave one out."
        )
    backend = flags.explicit("rdzv_backend")
    row = backends.by_word(backend.text) if backend else None
    if backend and row and row.kind.leased:
        raise SpecError(
            f"{backend.source} {backend.text} cannot be reached by nodes of --isolate-nodes: leave one out."
        )


def fit_rules(
    local: LocalNodes, rules: JobRules, conf: RdzvConf, nodes: FlagValue, *, spares_given: bool
) -> tuple[JobRules, Sequence[str]]:
    """The rules of a job of local nodes, and warnings; `nodes` is the number of nodes that was given.

    Raises SpecError when fewer nodes start than the job needs to begin.
    """
    min_nodes, max_nodes = local.spec.min_nodes, local.spec.max_nodes
    if min_nodes < rules.min_size:
        required = f"{nodes.source} {nodes.text}" + (
            f" with --node-unit {rules.node_unit}" if rules.node_unit > 1 else ""
        )
        problem = f"starts {counted(min_nodes, 'node')} at first, and {required} needs at least {rules.min_size}"
        raise values.invalid(*local.value, problem, f"give at least {rules.min_size}")
    if not conf.has("last_call_timeout"):
        rules = replace(rules, last_call_timeout=LOCAL_LAST_CALL_TIMEOUT)
    if not conf.has("cut_off_timeout"):
        rules = replace(rules, cut_off_timeout=LOCAL_CUT_OFF_TIMEOUT)
    if not spares_given:
        return replace(rules, spares=max(0, max_nodes - rules.max_nodes)), ()
    surplus = max_nodes - rules.max_nodes - rules.spares
    if surplus <= 0:
        return rules, ()
    used = f"--nnodes and --spares use {rules.max_nodes + rules.spares} of the nodes of {local.value.source}"
    wait = "waits as a spare" if surplus == 1 else "wait as spares"
    return rules, (f"{used}, and {surplus} more {wait} too.",)


def check_standard_input(entrypoint: Entrypoint, workers: int, max_restarts: int) -> None:
    """Refuse a script from standard input that would have to be read twice: the second worker, or the same one after a
    restart, would run an empty program, and succeed."""
    if entrypoint.kind not in ("script", "run_path") or entrypoint.target != STANDARD_INPUT:
        return
    if workers > 1 or max_restarts > 0:
        why = f"{workers} workers share" if workers > 1 else "a restart would need again"
        raise SpecError(f"The script '-' is standard input, which {why}, and it can be read only once: name a file.")


def check_local_entrypoint(local: LocalSpec, entrypoint: Entrypoint) -> None:
    """Refuse what local nodes cannot have: a script from standard input, or an isolated network without the rights."""
    if entrypoint.kind in ("script", "run_path") and entrypoint.target == STANDARD_INPUT:
        raise SpecError("The script '-' is standard input, which nodes of --local-nodes do not have: name a file.")
    if not local.isolated:
        return
    from dlrover_run.features.local_nodes.network import why_not

    if problem := why_not():
        raise SpecError(f"--isolate-nodes is not possible here, since {problem}.")
