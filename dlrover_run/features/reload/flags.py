"""The flags of restarts by a save, and what they make of a job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.command_line import checks, values
from dlrover_run.command_line.feature import Draft, FeatureFlags
from dlrover_run.command_line.flag import WORKERS, Flag
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import FlagValue, JobSpec, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.reload.settings import ReloadSettings

# fmt: off
FLAGS = (
    Flag("reload", WORKERS,
        "Start the workers again when the script, or a module of yours that they have imported, is saved; with "
        "--start-method=forkserver unless you give another. For one machine.",
        extension=True, after="preload"),
    Flag("reload-dir", WORKERS,
        "Directory below which each Python file counts for --reload, imported or not; may be repeated.",
        "DIR", extension=True, after="reload", files="directory", needs="reload"),
)
# fmt: on


def implied(flags: FlagValues) -> Mapping[str, FlagValue]:
    """Workers that start again in a blink are forked."""
    if not flags.is_on("reload"):
        return {}
    return {"start_method": FlagValue("--reload", "forkserver")}


def add_rules(flags: FlagValues, job: Draft, rules: JobRules) -> JobRules:
    """The rules with those of `--reload`. Raises SpecError for a job with nodes on other machines."""
    if not flags.is_on("reload"):
        return rules
    given = flags.explicit("reload")
    source = "--reload" if given is None else given.source
    if rules.max_nodes > 1 and flags.explicit("local_nodes") is None:
        raise SpecError(
            f"{source} watches the files of one machine, and {job.nodes.source} {job.nodes.text} has others: leave one "
            "out, or start all nodes here with --local-nodes."
        )
    from dlrover_run.features.reload.rules import ReloadRules

    return replace(rules, parts=with_part(rules.parts, ReloadRules(enabled=1)))


def settings(flags: FlagValues, environ: Mapping[str, str]) -> ReloadSettings | None:
    """What this node watches beside what its workers import. Raises SpecError for a directory that does not exist."""
    directories = flags.all("reload_dir")
    for source, text in directories:
        if not os.path.isdir(text):
            raise values.invalid(source, text, "is not a directory", "name one that exists")
    if not flags.is_on("reload"):
        return None
    # Imported only here: other launches do not wait for it.
    from dlrover_run.features.reload.settings import ReloadSettings

    return ReloadSettings(tuple(dict.fromkeys(os.path.abspath(text) for _, text in directories)))


def check(flags: FlagValues, spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    """Refuse a script that cannot be read a second time, and processes that keep what they have imported."""
    if flags.is_on("reload") and flags.is_on("warm_workers"):
        raise SpecError(
            "--reload starts the workers of one machine from a template, and --warm-workers prepares others for a "
            "failure, which waits for a save: leave one out."
        )
    entrypoint = spec.entrypoint
    if flags.is_on("reload") and entrypoint.kind != "module" and entrypoint.target == checks.STANDARD_INPUT:
        raise SpecError("The script '-' is standard input, which --reload cannot read again: name a file.")
    return []


FEATURE = FeatureFlags(FLAGS, add_rules, settings, check, implied=implied)
