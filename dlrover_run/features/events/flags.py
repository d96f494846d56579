"""The flag of the event log."""

from __future__ import annotations

from dlrover_run.command_line.feature import FeatureFlags
from dlrover_run.command_line.flag import OUTPUT, Flag

# fmt: off
FLAGS = (
    Flag("journal", OUTPUT,
        "Directory of the event log, JSON lines with what happened and when; /dev/null forbids it "
        "[dim](else with the log files of --log-dir, or in ~/.local/state/dlrover-run)[/].",
        "DIR", extension=True, files="directory", after="log-dir"),
)
# fmt: on

FEATURE = FeatureFlags(FLAGS)
