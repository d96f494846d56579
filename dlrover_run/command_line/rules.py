"""The size of a job and its rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.rendezvous import Rendezvous
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.coordination.records.rules import MAX_NODES, JobRules
from dlrover_run.spec import FlagValue, SpecError

COUNT_VARIABLES = ("NODE_NUM", "WORKER_NUM")
"""The number of nodes that a cluster manager sets, the newer name first."""

MAX_RESTARTS = 1_000_000
"""More restarts than any job needs, and within the range that a coordinator accepts."""

_AUTO = "auto"


def resolve_size(
    flags: FlagValues, environ: Mapping[str, str], nodes_here: FlagValue | None, warn: Callable[[str], None]
) -> tuple[FlagValue, FlagValue]:
    """The texts of `--nnodes` and `--nproc-per-node`, with their sources.

    Raises SpecError when nothing gives the number of nodes.

    `nodes_here`, the number of nodes that start on this machine, is the default of `--nnodes`. DLRover's
    `--auto-config` overrides explicit numbers; here an explicit number takes precedence, with a warning.
    """
    nodes, workers = flags.explicit("nnodes") or nodes_here, flags.explicit("nproc_per_node")
    if not flags.is_on("auto_config"):
        return nodes or flags.get("nnodes"), flags.get("nproc_per_node")
    by_variable = next(
        (FlagValue(name, environ[name]) for name in COUNT_VARIABLES if environ.get(name, "").strip()), None
    )
    if by_variable is not None:
        values.integer(*by_variable, 1, MAX_NODES)
        if nodes is not None and nodes.text.strip() != by_variable.text.strip():
            variable = f"{by_variable.source}={by_variable.text}"
            warn(f"{nodes.source} {nodes.text} takes precedence over {variable} of --auto-config.")
    elif nodes is None and flags.known("nnodes") is None and not flags.is_on("standalone"):
        variables = values.alternatives(COUNT_VARIABLES)
        raise SpecError(f"--auto-config cannot find the number of nodes: set {variables}, or give --nnodes.")
    if workers is not None and workers.text != _AUTO:
        warn(f"{workers.source} {workers.text} takes precedence over --auto-config: devices are not counted.")
    return nodes or by_variable or flags.get("nnodes"), workers or FlagValue("--auto-config", _AUTO)


def make_rules(flags: FlagValues, nodes: FlagValue, rendezvous: Rendezvous, conf: RdzvConf) -> JobRules:
    """The rules that no feature adds to: sizes, restarts, and those of `--rdzv-conf`. Raises SpecError."""
    rules = replace(
        conf.rules,
        min_nodes=rendezvous.min_nodes,
        max_nodes=rendezvous.max_nodes,
        node_unit=flags.integer("node_unit", 1, MAX_NODES),
        max_restarts=flags.integer("max_restarts", 0, MAX_RESTARTS),
    )
    if rendezvous.coordinated:
        rules = replace(rules, spares=flags.integer("spares", 0, MAX_NODES))
    rules = adjust_rules(rules, rendezvous, conf)
    if problem := rules.problem():
        raise SpecError(f"{nodes.source} {nodes.text} with --node-unit {rules.node_unit} is not possible: {problem}.")
    return rules


def adjust_rules(rules: JobRules, rendezvous: Rendezvous, conf: RdzvConf) -> JobRules:
    """The rules with the `lost_after` that fits the backend. Called by `make_rules` for dlrover-run, and by
    tf-ps-run."""
    if not rendezvous.coordinated:
        # Nodes learn nothing of each other, so no loss of a node can explain a failure.
        return replace(rules, lost_after=0.0)
    if rendezvous.place.leased and not conf.has("lost_after"):
        # The lease has already covered the moment that a broken connection needs.
        return replace(rules, lost_after=0.0)
    return rules
