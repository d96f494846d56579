"""The flags of what counts the steps of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import PROGRESS, Flag
from dlrover_run.coordination.rules import JobRules

if TYPE_CHECKING:
    from dlrover_run.command_line.sources import FlagValues

PROGRESS_SOURCES = ("auto", "optimizer")

# fmt: off
FLAGS = (
    Flag("progress", PROGRESS,
        "What counts the steps of a worker, beside the script's own reports: [b]auto[/] the sampler of "
        "dlrover_run.training, [b]optimizer[/] torch's optimizer too.",
        "SOURCE", "auto", extension=True, choices=PROGRESS_SOURCES),
    Flag("progress-regex", PROGRESS,
        "Count the steps that a worker prints: a regular expression whose first group is the number of the step, as in "
        "'step (\\\\d+)'; without a group each line that matches is a step.",
        "REGEX", "", extension=True),
)
# fmt: on


def check(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules as they are: counting concerns one node. Warns of a count that no program of this job can have."""
    if flags.choice("progress") == "optimizer" and flags.is_on("no_python") and not flags.is_on("run_path"):
        job.warn(f"{flags.get('progress').source} optimizer has no effect with --no-python.")
    return rules


FEATURE = FeatureFlags(FLAGS, check)
