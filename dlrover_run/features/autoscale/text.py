"""The codes of what the autoscaler decides."""

from __future__ import annotations

from dlrover_run.words.reasons import ReasonCode, register


class AutoscaleCode(ReasonCode):
    NO_STEPS = (
        "no step was reported yet: call dlrover_run.training.report, or give --progress=optimizer or --progress-regex"
    )
    MEASURING = "the throughput of {size:#node} is measured"
    TRYING = "the throughput of {to:#node} is tried"
    CHANGING = (
        "{to:#node} {to:does|do} {ratio:g} times the work of {size} (efficiency {efficiency:g}; a larger size is kept "
        "from {floor:g})"
    )
    BEST = "no size does better than {size:#node}; sizes measured: {sizes}"
    LARGEST = "{size:#node} {size:is|are} the most that the job may have, and worth it"
    ALLOWED = "the job may have {to:#node}, not {size}"
    PAUSE = "the pause of {pause:g} s for a change to {to:#node} would not pay within {horizon:g} s"
    SHORTAGE = "{size:#node} {size:is|are} here, not {to}; more are tried as soon as they come"
    UNSTABLE = "{size:#node} {size:stays|stay}, not {to}; more are tried again in {seconds:g} s"
    CRASHED = "the workers fail with {size:#node}, so {to:#node} {to:trains|train}"
    TRIED_SIZE = "this costs no restart, as {size:#node} {size:was|were} only tried"
    DRIFTED = "{size:#node} {size:does|do} {ratio:g} times the work of before, so other sizes are measured again"


register(AutoscaleCode, "autoscale.")
