"""The codes of how the process group of a round is formed."""

from __future__ import annotations

from dlrover_run.words.reasons import ReasonCode, register


class SurvivorsCode(ReasonCode):
    KEPT = "{kept} of {of} workers keep their processes in round {round}"
    WITHOUT = "{node} was started without --survivors=keep, so all workers restart with each round"
    UNABLE = "a worker on {node} cannot keep its process, so all workers restart with each round:"
    NO_BLOCK = "{worker} forms its group without a block of Survivor, so all workers restart with each round"
    OLDER_TORCH = "torch {version} cannot form a process group in place; 2.14 and later can"
    TOO_LARGE = "{workers} workers are more than the {most} that keep their processes, so all restart with each round"
    NO_UUID = "round {round} has no uuid left, so all workers restart with it"


register(SurvivorsCode, "survivors.")
