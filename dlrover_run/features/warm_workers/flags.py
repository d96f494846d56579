"""The flag of warm workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import WORKERS, Flag
from dlrover_run.spec import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.warm_workers.settings import WarmSettings
    from dlrover_run.spec import JobSpec

# fmt: off
FLAGS = (
    Flag("warm-workers", WORKERS,
        "Beside each worker keep a process that has imported what it needs and opened its device, and takes its rank "
        "after a failure [dim](some 500 MiB of the GPU for each)[/].",
        extension=True, after="preload"),
)
# fmt: on


def settings(flags: FlagValues, environ: Mapping[str, str]) -> WarmSettings | None:
    """What this node does for warm workers; None without them."""
    if not flags.is_on("warm_workers"):
        return None
    # Imported only here: other launches do not wait for it.
    from dlrover_run.features.warm_workers.settings import WarmSettings

    return WarmSettings()


def check(flags: FlagValues, job: JobSpec, environ: Mapping[str, str]) -> list[str]:
    """Refuse warm workers where none can be forked. Raises SpecError."""
    if flags.is_on("warm_workers"):
        source = flags.get("warm_workers").source
        if job.entrypoint.kind == "program":
            raise SpecError(f"{source} cannot be used with --no-python, because only a Python program can be prepared.")
        if job.start_method != "forkserver":
            raise SpecError(
                f"{source} needs --start-method=forkserver, because a warm worker is forked from its template."
            )
    return []


FEATURE = FeatureFlags(FLAGS, settings=settings, check=check)
