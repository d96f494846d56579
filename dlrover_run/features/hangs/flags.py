"""The flags of hangs, and the rules that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import PROGRESS, Flag
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.hangs.settings import HangSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.hangs.settings import StallAction

STALL_ACTIONS = ("off", "report", "dump", "restart")

# fmt: off
FLAGS = (
    Flag("stall-action", PROGRESS,
        "When the workers of a node make no progress: nothing ([b]off[/]), [b]report[/] which rank they wait for, and "
        "where, [b]dump[/] all stacks too, or [b]restart[/] the workers too, which costs one restart.",
        "ACTION", "report", extension=True, choices=STALL_ACTIONS),
    Flag("stall-timeout", PROGRESS,
        "Time without progress that is a stall [dim](else three times the longest pause, at least 3 s)[/].",
        "SECONDS", extension=True, needs="stall-action!=off"),
)
# fmt: on


def settings(flags: FlagValues, environ: Mapping[str, str]) -> HangSettings | None:
    """What this node does about hangs; None if it does not look for them. Raises SpecError."""
    action = flags.choice("stall_action")
    given = flags.explicit("stall_timeout")
    timeout = None if given is None else values.seconds(*given, zero_allowed=False)
    return None if action == "off" else HangSettings(cast("StallAction", action), timeout)


def add_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules with the observers for stragglers, and for stalls, where nodes have to compare what they see."""
    if flags.choice("stall_action") == "off":
        return rules
    if job.rendezvous.nodes_apart:
        if given := flags.explicit("stall_action"):
            job.warn(
                f"{given.source} has no effect with static rendezvous and more than one node, where "
                "nodes do not communicate: hangs are not found."
            )
        return rules
    from dlrover_run.features.hangs.stragglers.rules import StragglerRules

    rules = replace(rules, parts=with_part(rules.parts, StragglerRules(watched=1)))
    if job.rendezvous.max_nodes == 1:
        return rules
    from dlrover_run.features.hangs.stalls.rules import StallRules

    return replace(rules, parts=with_part(rules.parts, StallRules(watched=1)))


FEATURE = FeatureFlags(FLAGS, add_rules, settings)
