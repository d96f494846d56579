"""The codes of what a job with parameter servers decides about its own size, and the autoscaler's reasons in the words
of such a job: its sizes count the tasks that train, which are the chief and the workers."""

from __future__ import annotations

from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.words.reasons import Reason, ReasonCode, Reasons, register


class WorkersCode(ReasonCode):
    """Each code of the autoscaler, for a number of workers beside the chief."""

    NO_STEPS = "no step was reported yet, so nothing is measured"
    MEASURING = "the throughput of {size:#worker} is measured"
    TRYING = "the throughput of {to:#worker} is tried"
    CHANGING = (
        "{to:#worker} {to:does|do} {ratio:g} times the work of {size} (efficiency {efficiency:g}; a larger number is "
        "kept from {floor:g})"
    )
    BEST = "no number does better than {size:#worker}; numbers measured: {sizes}"
    LARGEST = "{size:#worker} {size:is|are} the most that the job may have, and worth it"
    ALLOWED = "the job may have {to:#worker}, not {size}"
    PAUSE = "the pause of {pause:g} s for a change to {to:#worker} would not pay within {horizon:g} s"
    SHORTAGE = "{size:#worker} {size:is|are} here, not {to}; more are tried as soon as there is room for them"
    UNSTABLE = "{size:#worker} {size:stays|stay}, not {to}; more are tried again in {seconds:g} s"
    CRASHED = "workers fail when there are {size}, so {to:#worker} {to:trains|train}"
    DRIFTED = "{size:#worker} {size:does|do} {ratio:g} times the work of before, so other numbers are measured again"


class ServersCode(ReasonCode):
    FIRST = "the job begins with the fewest"
    IDLE = "their processors and their memory are not the limit"
    BUSY = "they use {processor} % of their processors and {memory} % of their memory"
    PROCESSOR = "the parameter servers use {share} % of their processors, so {to} are wanted instead of {size}"
    MEMORY = "a parameter server uses {share} % of its memory, so {to} are wanted instead of {size}"
    WORTH = "{to:#parameter server} {to:does|do} {ratio:g} times the work of {size}"
    NOT_WORTH = (
        "{to:#parameter server} {to:does|do} {ratio:g} times the work of {size}, so none is added for their processors "
        "for {seconds:g} s"
    )
    NO_ROOM = "there is room for {size:#parameter server}, and {to} are wanted"
    MOST = "{size:#parameter server} {size:is|are} the most that the job may have"
    FAILED = "new parameter servers have failed too often, so {size} go on"


AUTOSCALE_TERMS = {AutoscaleCode[code.name].code: code for code in WorkersCode}


def of_workers(reasons: Reasons) -> Reasons:
    """The autoscaler's reasons with numbers of workers instead of numbers of tasks that train."""
    return tuple(_of_workers(reason) for reason in reasons)


def _of_workers(reason: Reason) -> Reason:
    code = AUTOSCALE_TERMS.get(reason.code)
    if code is None:
        return reason
    params = dict(reason.params)
    for name in ("size", "to"):
        if isinstance(number := params.get(name), int):
            params[name] = number - 1
    if isinstance(sizes := params.get("sizes"), str):
        params["sizes"] = ", ".join(str(int(size) - 1) for size in sizes.split(", "))
    return code(**params)


register(WorkersCode, "parameter_servers.workers_")
register(ServersCode, "parameter_servers.servers_")
