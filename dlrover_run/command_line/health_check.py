"""The options of the node check: several flags turn it on, and others have an effect only with it."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.parser import FlagValues
from dlrover_run.command_line.rendezvous_options import Rendezvous
from dlrover_run.coordination.combined_records import with_part
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.health.rules import CHECK_NEVER, CHECK_ONCE, HealthRules
from dlrover_run.spec import SpecError

AUTO_CONFIG_CHECK_NODES = 4
"""The number of nodes from which `--auto-config` turns the check on (as DLRover does)."""

SAFE_THRESHOLD = 1.7
"""Below this a healthy node may count as a straggler: measurements of two equal nodes, each off by up to 20 %, may be
1.5 times apart, and three tries and a median only make that rare."""

_USE_MASTER = "give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes"


def add_health_check(flags: FlagValues, rendezvous: Rendezvous, rules: JobRules) -> tuple[JobRules, list[str]]:
    """The rules with the options of the check, and warnings. Raises SpecError for a check of nodes that do not
    communicate."""
    threshold = values.ratio(*flags.get("straggler_threshold"))
    level = int(flags.choice("precheck"))
    network_check = flags.explicit("network_check")
    mode = values.check_mode(*network_check) if network_check else CHECK_NEVER
    measure_links = level == 2 or flags.is_on("comm_perf_test")
    cause = network_check if mode else flags.explicit("precheck") if level else flags.explicit("comm_perf_test")
    if level or measure_links:
        # Each of these turns the check on, and none turns it off again.
        mode = mode or CHECK_ONCE
    static = rendezvous.backend == "static" and rendezvous.max_nodes > 1
    warnings: list[str] = []
    if mode and cause and static:
        raise SpecError(
            f"{cause.source} cannot be used with static rendezvous, where nodes do not communicate: {_USE_MASTER}."
        )
    if (
        not mode
        and network_check is None
        and flags.is_on("auto_config")
        and rendezvous.min_nodes >= AUTO_CONFIG_CHECK_NODES
    ):
        if static:
            warnings.append(
                f"--auto-config does not check nodes with static rendezvous, where they do not communicate: "
                f"{_USE_MASTER}."
            )
        else:
            mode = CHECK_ONCE
    if mode != CHECK_NEVER and threshold < SAFE_THRESHOLD:
        given = flags.explicit("straggler_threshold")
        warnings.append(
            f"{given.source if given else '--straggler-threshold'} {threshold:g} may flag healthy nodes, which can "
            f"measure 1.5 times apart: give {SAFE_THRESHOLD:g} or more."
        )
    if mode == CHECK_NEVER:
        # The other fields keep their defaults, so that nodes are not warned of a difference that has no effect.
        return rules, warnings
    part = msgspec.structs.replace(
        HealthRules.get(rules.policy),
        check=mode,
        straggler_threshold=threshold,
        exclude_stragglers=int(flags.is_on("exclude_straggler")),
        measure_links=int(measure_links),
    )
    return replace(rules, policy=with_part(rules.policy, part)), warnings
