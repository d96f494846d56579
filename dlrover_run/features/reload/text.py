"""The codes of why the workers start again by a save, and of what a job waits for before that."""

from __future__ import annotations

from dlrover_run.words.reasons import ReasonCode, register


class ReloadCode(ReasonCode):
    SAVED = "{names:join} {number:was|were} saved"
    NEW_TEMPLATE = "{names:join} {number:has|have} changed, which the template had imported"
    REQUESTED = "r was pressed"
    AFTER_FAILURE = "the next save starts the workers again"
    AFTER_SUCCESS = "every worker has succeeded; the next save starts the workers again"


register(ReloadCode, "reload.")
