"""The flag of the cache of compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_run.command_line import checks
from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import WORKERS, Flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues
    from dlrover_run.features.job_cache.settings import JobCacheSettings

# fmt: off
FLAGS = (
    Flag("job-cache", WORKERS,
        "Directory that keeps what torch.compile, Triton and CUDA have compiled, for restarts and for later jobs.",
        "DIR", extension=True, after="preload", files="directory"),
)
# fmt: on


def settings(flags: FlagValues, environ: Mapping[str, str]) -> JobCacheSettings | None:
    """The directory of this node for compiled code. Raises SpecError for one that cannot be created."""
    given = flags.explicit("job_cache")
    if given is None:
        return None
    # Imported only here: other launches do not wait for it.
    import os

    from dlrover_run.features.job_cache.settings import JobCacheSettings

    checks.check_directory(*given)
    return JobCacheSettings(os.path.abspath(given[1]))


FEATURE = FeatureFlags(FLAGS, settings=settings)
"""Where a node keeps compiled code, as its flag gives it."""
