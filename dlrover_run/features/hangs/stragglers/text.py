"""The codes of stragglers."""

from __future__ import annotations

from dlrover_run.words.reasons import ReasonCode, register


class StragglerCode(ReasonCode):
    """What a straggler does while the others wait for it."""

    COMPUTING = "it computes {share:.0f} % of the time"
    PROCESSOR = "it has no processor {share:.0f} % of the time, because other processes use them"
    DATA = "it waits for data {share:.0f} % of the time"
    DISK = "it waits for a disk {share:.0f} % of the time"
    TIME = "it sleeps {share:.0f} % of the time"
    NETWORK = "what it sends is on its way {share:.0f} % of the time"
    WAITS = ", and waits for other workers {own:.0f} %; they wait {others:.0f} %"


register(StragglerCode, "straggler.")
