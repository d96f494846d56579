"""The flag of experiments, and the rules that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import FAILURES, Flag
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules

if TYPE_CHECKING:
    from dlrover_run.command_line.sources import FlagValues

# fmt: off
FLAGS = (
    Flag("experiments", FAILURES,
        "When the same failure comes again: [b]on[/] changes one thing in the next round to learn what it follows (a "
        "GPU, a node, a rank's data, the code), has a faulty node leave, and stops where no restart can help.",
        "on|off", "off", extension=True, choices=("on", "off"), after="max-restarts"),
)
# fmt: on


def add_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules with those of `--experiments=on`, where the nodes of a job communicate. Raises SpecError."""
    if flags.choice("experiments") != "on":
        return rules
    if job.rendezvous.nodes_apart:
        job.warn(
            f"{flags.get('experiments').source} has no effect with static rendezvous and more than one node, where "
            "nodes do not communicate."
        )
        return rules
    from dlrover_run.features.experiments.rules import ExperimentsRules

    return replace(rules, parts=with_part(rules.parts, ExperimentsRules(on=1)))


FEATURE = FeatureFlags(FLAGS, add_rules)
