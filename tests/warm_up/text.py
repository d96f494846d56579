"""The codes of the warm-up."""

from __future__ import annotations

from dlrover_run.words.reasons import ReasonCode, register


class Code(ReasonCode):
    """The reasons of the warm-up."""

    WARMING = "{number:#node} {number:warms|warm} up"


register(Code, "warm_up.")
