"""The policies of a job: its rules with a part for each policy that a flag asks for, which alone is imported."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from dlrover_run.command_line import lookup, values
from dlrover_run.command_line.options import CHECK_MODES
from dlrover_run.command_line.parser import FlagValues
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.rendezvous_options import Rendezvous
from dlrover_run.coordination.parts import with_part
from dlrover_run.coordination.rules import JobRules
from dlrover_run.spec import FlagValue, SpecError

_CHECK_FLAGS = (
    "network_check",
    "precheck",
    "comm_perf_test",
    "auto_config",
    "straggler_threshold",
    "exclude_straggler",
)
"""Flags of the health check. Several turn it on, and others have an effect only with it."""

AUTO_CONFIG_CHECK_NODES = 4
"""The number of nodes from which `--auto-config` turns the check on (as DLRover does)."""

SAFE_THRESHOLD = 1.7
"""Below this a healthy node may count as a straggler: measurements of two equal nodes, each off by up to 20 %, may be
1.5 times apart, and three tries and a median only make that rare."""

_USE_MASTER = "give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT, where HOST is one of the nodes"


def add_health_check(flags: FlagValues, rendezvous: Rendezvous, rules: JobRules) -> tuple[JobRules, list[str]]:
    """The rules with the options of the check, and warnings. Raises SpecError for a check of nodes that do not
    communicate."""
    if not any(flags.explicit(name) or flags.is_on(name) for name in _CHECK_FLAGS):
        return rules, []
    from dlrover_run.features.node_check.decision.rules import CHECK_NEVER, CHECK_ONCE, HealthRules

    threshold = values.ratio(*flags.get("straggler_threshold"))
    level = int(flags.choice("precheck"))
    network_check = flags.explicit("network_check")
    mode = _check_mode(*network_check) if network_check else CHECK_NEVER
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
    part = replace(
        HealthRules.get(rules.parts),
        check=mode,
        straggler_threshold=threshold,
        exclude_stragglers=int(flags.is_on("exclude_straggler")),
        measure_links=int(measure_links),
    )
    return replace(rules, parts=with_part(rules.parts, part)), warnings


def _check_mode(source: str, text: str) -> int:
    """When nodes are checked: `once`, `always`, or a switch value for once (on) or never (off)."""
    from dlrover_run.features.node_check.decision.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE

    word = text.strip().lower()
    if word in CHECK_MODES:
        return CHECK_ALWAYS if word == "always" else CHECK_ONCE
    try:
        return CHECK_ONCE if values.switch(source, text) else CHECK_NEVER
    except SpecError:
        remedy = f"give {values.alternatives(CHECK_MODES)}, or 1 or 0 (true, yes, on, false, no, off)"
        raise values.invalid(source, text, "is not valid", remedy) from None


def stall_timeout(flags: FlagValues) -> float | None:
    """The limit for stalls in seconds, None to learn it. Raises SpecError."""
    given = flags.explicit("stall_timeout")
    return None if given is None else values.seconds(*given, zero_allowed=False)


def add_stalls(flags: FlagValues, rendezvous: Rendezvous, rules: JobRules) -> JobRules:
    """The rules with the policies for stragglers, and for stalls, where nodes have to compare what they see."""
    alone = rendezvous.max_nodes == 1
    if flags.choice("stall_action") == "off" or (rendezvous.backend == "static" and not alone):
        return rules
    from dlrover_run.features.hangs.stragglers.rules import StragglerRules

    rules = replace(rules, parts=with_part(rules.parts, StragglerRules(watched=1)))
    if alone:
        return rules
    from dlrover_run.features.hangs.stalls.rules import StallRules

    return replace(rules, parts=with_part(rules.parts, StallRules(watched=1)))


def add_survivors(flags: FlagValues, rendezvous: Rendezvous, rules: JobRules) -> JobRules:
    """The rules with those of `--survivors=keep`, where the nodes of a job communicate. Raises SpecError."""
    given = flags.explicit("reconfigure_timeout")
    seconds = None if given is None else values.seconds(*given, zero_allowed=False)
    alone = rendezvous.max_nodes == 1
    if flags.choice("survivors") != "keep" or (rendezvous.backend == "static" and not alone):
        return rules
    from dlrover_run.features.survivors.rules import RECONFIGURE_TIMEOUT, START_TIMEOUT, SurvivorsRules

    timeout = RECONFIGURE_TIMEOUT if seconds is None else seconds
    part = SurvivorsRules(reconfigure_timeout=timeout, start_timeout=max(START_TIMEOUT, timeout))
    return replace(rules, parts=with_part(rules.parts, part))


def add_autoscale(
    flags: FlagValues, rules: JobRules, conf: RdzvConf, nodes: FlagValue, *, coordinated: bool
) -> JobRules:
    """The rules with those of `--autoscale`, if it is given; `nodes` is the number of nodes that was given. Raises
    SpecError for a job that has one size only, or whose nodes do not communicate."""
    command = flags.explicit("scale_command")
    given = flags.explicit("autoscale")
    if given is None:
        if command is not None:
            raise SpecError(f"{command.source} is for a job that scales itself: give --autoscale too, or leave it out.")
        return rules
    kind = flags.choice("autoscale")
    if rules.min_size == rules.max_size:
        unit = f" with --node-unit {rules.node_unit}" if rules.node_unit > 1 else ""
        raise SpecError(
            f"{given.source} chooses between several numbers of nodes, and {nodes.source} {nodes.text}{unit} allows "
            "one only: give --nnodes=MIN:MAX."
        )
    if not coordinated:
        raise SpecError(
            f"{given.source} needs nodes that communicate: give --rdzv-backend=c10d or etcd with --rdzv-endpoint."
        )
    from dlrover_run.features.autoscale.rules import STRONG, WEAK, AutoscaleRules

    scaling = STRONG if kind == "strong" else WEAK
    part = replace(AutoscaleRules(), scaling=scaling, command=int(command is not None), **conf.autoscale)
    if problem := part.problem():
        raise SpecError(f"{given.source} is not possible: {problem}.")
    return replace(rules, parts=with_part(rules.parts, part))


def find_scale_command(flags: FlagValues, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words of `--scale-command`, empty without it. Raises SpecError for one that cannot be run here."""
    given = flags.explicit("scale_command")
    if given is None:
        return ()
    if local := flags.explicit("local_nodes"):
        raise SpecError(
            f"{given.source} starts nodes elsewhere, and {local.source} starts all nodes here: leave one out."
        )
    # Imported only here: other launches do not wait for it.
    import shlex

    try:
        words = tuple(shlex.split(given.text))
    except ValueError as error:
        raise values.invalid(*given, f"cannot be split into words ({error})", "close each quotation mark") from None
    if not words:
        raise SpecError(f"{given.source} names no program: give a command such as 'resize-job {{nodes}}'.")
    lookup.check_program(words[0], environ, f"program of {given.source}")
    return words
