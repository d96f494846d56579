"""The flag of checkpoints in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_run.command_line import values
from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import FAILURES, Flag
from dlrover_run.features.checkpoints.settings import CheckpointSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlrover_run.command_line.sources import FlagValues

# fmt: off
FLAGS = (
    Flag("checkpoint-memory", FAILURES,
        "Limit of the memory of this node for checkpoints that scripts save with memory=True; 0 for none "
        "[dim](else a quarter of the memory)[/].",
        "SIZE", extension=True, after="preemption-notice"),
)
# fmt: on


def settings(flags: FlagValues, environ: Mapping[str, str]) -> CheckpointSettings | None:
    """The memory of this node for checkpoints; None for none. Raises SpecError."""
    given = flags.explicit("checkpoint_memory")
    limit = None if given is None else values.memory_size(*given, zero_allowed=True)
    return None if limit == 0 else CheckpointSettings(limit)


FEATURE = FeatureFlags(FLAGS, settings=settings)
