"""The flags of the check of nodes, and the rules that they make."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import Flag
from dlrover_run.command_line.rdzv_conf import Key
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import SpecError

if TYPE_CHECKING:
    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.node_check.rules import NodeCheckRules

NODE_CHECK = "Node check"
CHECK_MODES = ("once", "always")

# fmt: off
FLAGS = (
    Flag("network-check", NODE_CHECK,
        "Before training, find nodes that are faulty or slow: [b]once[/] for each launcher, or [b]always[/], before "
        "each round. A faulty node leaves with exit code 73.",
        "once|always", const="once", extension=True, choices=CHECK_MODES, common=True),
    Flag("comm-perf-test", NODE_CHECK,
        "Check nodes, and show the bandwidth between each pair of nodes.",
        extension=True),
    Flag("precheck", NODE_CHECK,
        "DLRover's newer flag for both: [b]1[/] is --network-check, [b]2[/] adds --comm-perf-test; [b]0[/] changes "
        "neither.",
        "0|1|2", "0", extension=True, choices=("0", "1", "2")),
    Flag("exclude-straggler", NODE_CHECK,
        "A slow node leaves too, with exit code 74, instead of a warning.",
        extension=True, needs="network-check"),
    Flag("straggler-threshold", NODE_CHECK,
        "A node counts as slow if it is this many times slower than the others.",
        "RATIO", "2", extension=True, needs="network-check"),
)
KEYS = (
    Key("check_timeout", partial(values.seconds, zero_allowed=False),
        "Seconds for a round of --network-check, after which a node that did not answer has failed",
        needs="network-check"),
)
# fmt: on

_CHECK_FLAGS = (
    "network_check",
    "precheck",
    "comm_perf_test",
    "auto_config",
    "straggler_threshold",
    "exclude_straggler",
)
"""Flags of the node check. Several turn it on, and others have an effect only with it."""

AUTO_CONFIG_CHECK_NODES = 4
"""The number of nodes from which `--auto-config` turns the check on (as DLRover does)."""

SAFE_THRESHOLD = 1.7
"""Below this a healthy node may count as a straggler: measurements of two equal nodes, each off by up to 20 %, may be
1.5 times apart, and three tries and a median only make that rare."""

_USE_MASTER = "give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes"


def add_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules with the options of the check. Raises SpecError for a check of nodes that do not communicate."""
    if not any(flags.explicit(name) or flags.is_on(name) for name in _CHECK_FLAGS):
        return rules
    from dlrover_run.features.node_check.rules import CHECK_NEVER, CHECK_ONCE, NodeCheckRules

    threshold = values.ratio(*flags.get("straggler_threshold"))
    level = int(flags.choice("precheck"))
    network_check = flags.explicit("network_check")
    mode = _check_mode(*network_check) if network_check else CHECK_NEVER
    measure_links = level == 2 or flags.is_on("comm_perf_test")
    cause = network_check if mode else flags.explicit("precheck") if level else flags.explicit("comm_perf_test")
    if level or measure_links:
        # Each of these turns the check on, and none turns it off again.
        mode = mode or CHECK_ONCE
    static = job.rendezvous.nodes_apart
    if mode and cause and static:
        raise SpecError(
            f"{cause.source} cannot be used with static rendezvous, where nodes do not communicate: {_USE_MASTER}."
        )
    if (
        not mode
        and network_check is None
        and flags.is_on("auto_config")
        and job.rendezvous.min_nodes >= AUTO_CONFIG_CHECK_NODES
    ):
        if static:
            job.warn(
                f"--auto-config does not check nodes with static rendezvous, where they do not communicate: "
                f"{_USE_MASTER}."
            )
        else:
            mode = CHECK_ONCE
    if mode != CHECK_NEVER and threshold < SAFE_THRESHOLD:
        given = flags.explicit("straggler_threshold")
        job.warn(
            f"{given.source if given else '--straggler-threshold'} {threshold:g} may flag healthy nodes, which can "
            f"measure 1.5 times apart: give {SAFE_THRESHOLD:g} or more."
        )
    if mode == CHECK_NEVER:
        # The other fields keep their defaults, so that nodes are not warned of a difference that has no effect.
        return rules
    part = replace(
        NodeCheckRules(),
        check=mode,
        straggler_threshold=threshold,
        exclude_stragglers=int(flags.is_on("exclude_straggler")),
        measure_links=int(measure_links),
        **job.conf.of("node_check"),
    )
    return replace(rules, parts=with_part(rules.parts, part))


def _check_mode(source: str, text: str) -> int:
    """When nodes are checked: `once`, `always`, or a switch value for once (on) or never (off)."""
    from dlrover_run.features.node_check.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE

    word = text.strip().lower()
    if word in CHECK_MODES:
        return CHECK_ALWAYS if word == "always" else CHECK_ONCE
    try:
        return CHECK_ONCE if values.switch(source, text) else CHECK_NEVER
    except SpecError:
        remedy = f"give {values.alternatives(CHECK_MODES)}, or 1 or 0 (true, yes, on, false, no, off)"
        raise values.invalid(source, text, "is not valid", remedy) from None


def default_rules() -> NodeCheckRules:
    """The rules of a check."""
    from dlrover_run.features.node_check.rules import NodeCheckRules

    return NodeCheckRules()


FEATURE = FeatureFlags(FLAGS, add_rules, several=True, keys=KEYS, default_rules=default_rules)
