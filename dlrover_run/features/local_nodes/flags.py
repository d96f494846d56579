"""The flags of nodes that are all started on this machine, and what they make of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.command_line import checks, values
from dlrover_run.command_line.feature import OWN_MASTER, Draft, FeatureFlags
from dlrover_run.command_line.flag import Flag
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import backends
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.words.text import counted

if TYPE_CHECKING:
    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.local_nodes.settings import LocalSettings

LOCAL_CLUSTER = "A cluster on this machine"

# fmt: off
FLAGS = (
    Flag("local-nodes", LOCAL_CLUSTER,
        "Start this many nodes here and replace those that are lost. With a range, MIN nodes start at once and the "
        "others join later. It is the default of --nnodes; nodes beyond that are spares.",
        "N|MIN:MAX", extension=True),
    Flag("node-restarts", LOCAL_CLUSTER,
        "Total number of nodes that may be replaced.",
        "K", "3", extension=True, needs="local-nodes"),
    Flag("isolate-nodes", LOCAL_CLUSTER,
        "Give each node its own network namespace and address, which can be cut (needs root and ip).",
        extension=True, needs="local-nodes"),
    Flag("node-join-after", LOCAL_CLUSTER,
        "Time until the next of the later nodes joins, 0 with --autoscale; SIGUSR1 makes it join at once.",
        "SECONDS", "30", extension=True, needs="local-nodes"),
)
# fmt: on

MAX_LOCAL_NODES = 1000
"""More nodes than one machine can run: each is several processes."""

LOCAL_LAST_CALL_TIMEOUT = 3.0
"""Seconds without a new node after which the first round of local nodes starts with fewer than the most nodes, unless
`--rdzv-conf` sets it. All nodes are started in the same second, so no other node is on its way: a node that joins later
is meant to join a job that trains."""

LOCAL_CUT_OFF_TIMEOUT = 30.0
"""Seconds after which a local node that is cut off from the others ends, unless `--rdzv-conf` sets them. The supervisor
replaces it at once, and no switch of a network takes minutes to start."""

_EXCLUDED_BY_LOCAL_NODES = {
    "standalone": "runs a single node",
    "node_rank": "is for nodes that you start yourself",
    "master_addr": "is for nodes that you start yourself",
    "master_port": "is for nodes that you start yourself",
}


def settings(flags: FlagValues, environ: Mapping[str, str]) -> LocalSettings | None:
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
    # Imported only here: other launches do not wait for it.
    from dlrover_run.features.local_nodes.settings import LocalSettings

    return LocalSettings(min_nodes, max_nodes, restarts, isolated, join_after)


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


def fit_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules, fitted to nodes that all start here, if they do.

    Raises SpecError when fewer nodes start than the job needs to begin.
    """
    value = flags.explicit("local_nodes")
    if value is None:
        return rules
    min_nodes, max_nodes = values.node_range(*value)
    if min_nodes < rules.min_size:
        required = f"{job.nodes.source} {job.nodes.text}" + (
            f" with --node-unit {rules.node_unit}" if rules.node_unit > 1 else ""
        )
        problem = f"starts {counted(min_nodes, 'node')} at first, and {required} needs at least {rules.min_size}"
        raise values.invalid(*value, problem, f"give at least {rules.min_size}")
    if not job.conf.has("last_call_timeout"):
        rules = replace(rules, last_call_timeout=LOCAL_LAST_CALL_TIMEOUT)
    if not job.conf.has("cut_off_timeout"):
        rules = replace(rules, cut_off_timeout=LOCAL_CUT_OFF_TIMEOUT)
    if flags.explicit("spares") is None:
        return replace(rules, spares=max(0, max_nodes - rules.max_nodes))
    surplus = max_nodes - rules.max_nodes - rules.spares
    if surplus <= 0:
        return rules
    used = f"--nnodes and --spares use {rules.max_nodes + rules.spares} of the nodes of {value.source}"
    wait = "waits as a spare" if surplus == 1 else "wait as spares"
    job.warn(f"{used}, and {surplus} more {wait} too.")
    return rules


def check(flags: FlagValues, spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    """Refuse what local nodes cannot have: a script from standard input, or an isolated network without the rights.
    Returns warnings about flags that have no effect on a job of local nodes."""
    local = flags.explicit("local_nodes")
    if local is None:
        return []
    if spec.entrypoint.kind in ("script", "run_path") and spec.entrypoint.target == checks.STANDARD_INPUT:
        raise SpecError("The script '-' is standard input, which nodes of --local-nodes do not have: name a file.")
    if flags.is_on("isolate_nodes"):
        from dlrover_run.features.local_nodes.network import why_not

        if problem := why_not():
            raise SpecError(f"--isolate-nodes is not possible here, since {problem}.")
    warnings = []
    if spec.rendezvous.hosted:
        endpoint = flags.explicit("rdzv_endpoint")
        if endpoint and endpoint.text.strip():
            warnings.append(f"{endpoint.source} {OWN_MASTER}")
        if environ.get(backends.MASTER_VARIABLE, "").strip():
            warnings.append(f"{backends.MASTER_VARIABLE} {OWN_MASTER}")
    min_nodes, max_nodes = values.node_range(*local)
    if min_nodes == max_nodes and (given := flags.explicit("node_join_after")):
        warnings.append(
            f"{given.source} has no effect, since {local.source} {local.text} has no nodes that join later."
        )
    return warnings


FEATURE = FeatureFlags(FLAGS, fit_rules, settings, check, nodes_here="local_nodes")
