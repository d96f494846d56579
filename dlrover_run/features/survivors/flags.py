"""The flags of survivors, and the rules that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.command_line import values
from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import FAILURES, Flag
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules

if TYPE_CHECKING:
    from dlrover_run.command_line.sources import FlagValues

SURVIVORS = ("restart", "keep")

# fmt: off
FLAGS = (
    Flag("survivors", FAILURES,
        "What the other workers do when one has failed: [b]restart[/] with it, or [b]keep[/] their processes and form "
        "the next process group in place (torch 2.14, and a block of Survivor in the script).",
        "restart|keep", "restart", extension=True, choices=SURVIVORS, after="max-restarts"),
    Flag("reconfigure-timeout", FAILURES,
        "Time that a worker with --survivors=keep has to leave its last group, and that the next group has to form "
        "[dim](30)[/]; a worker that takes longer is killed and replaced.",
        "SECONDS", extension=True, after="survivors", needs="survivors=keep"),
)
# fmt: on


def add_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules with those of `--survivors=keep`, where the nodes of a job communicate. Raises SpecError."""
    given = flags.explicit("reconfigure_timeout")
    seconds = None if given is None else values.seconds(*given, zero_allowed=False)
    if flags.choice("survivors") != "keep":
        return rules
    if job.rendezvous.nodes_apart:
        job.warn(
            f"{flags.get('survivors').source} has no effect with static rendezvous and more than one node, where nodes "
            "do not communicate."
        )
        return rules
    from dlrover_run.features.survivors.rules import RECONFIGURE_TIMEOUT, START_TIMEOUT, SurvivorsRules

    timeout = RECONFIGURE_TIMEOUT if seconds is None else seconds
    part = SurvivorsRules(reconfigure_timeout=timeout, start_timeout=max(START_TIMEOUT, timeout))
    return replace(rules, parts=with_part(rules.parts, part))


FEATURE = FeatureFlags(FLAGS, add_rules)
