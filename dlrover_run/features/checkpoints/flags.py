"""The flag of checkpoints in memory."""

from __future__ import annotations

from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import FAILURES, Flag

# fmt: off
FLAGS = (
    Flag("checkpoint-memory", FAILURES,
        "Limit of the memory of this node for checkpoints that scripts save with memory=True; 0 for none "
        "[dim](else a quarter of the memory)[/].",
        "SIZE", extension=True, after="preemption-notice"),
)
# fmt: on

FEATURE = FeatureFlags("checkpoints", FLAGS)
