"""Why workers are named in a stall: codes, and their texts."""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_run.coordination.records.activity import MAX_AWAITED
from dlrover_run.words.reasons import Reason, ReasonCode, register


class GuiltCode(ReasonCode):
    """Why the other workers wait for a worker; the texts continue the worker's name."""

    STOPPED = "is stopped by a signal"
    BLOCKED_IN_KERNEL = "waits for a disk or a device"
    ENDED = "has ended"
    CHILD_LOST = "waits for a child that is stopped or dead"
    SPINNING = "uses its processor in one place"
    LOCKED = "waits for a lock"
    ELSEWHERE = "is not in the collective in which the others wait"
    OFF_DEVICE = "has not begun the operation for which the others wait on their devices"
    OTHER_WAIT = "waits for its device at another place than the others"
    DIFFERENT_WAITS = "wait for their devices at different places"
    ON_DEVICE = "every rank waits for its device, or computes in one call"
    DEVICES_BUSY = "the devices are busy, and nothing says with which kernel"
    UNEXPLAINED = "nothing says for which operation"
    OTHER_COLLECTIVE = "waits in another collective than the others"
    DIFFERENT_COLLECTIVES = "wait in different collectives"
    SENT_NOTHING = "has sent nothing for longer than the others"
    NETWORK = "has sent data that is not acknowledged"
    UNKNOWN = "the evidence names no rank"
    OUTSIDE = "waits outside of TensorFlow"
    BEHIND = "waits in TensorFlow while other tasks make progress"
    UNNAMED = "the evidence names no task"
    IDLE = "makes no progress"
    OTHERS_GO_ON = " while the others go on"
    NEVER_ENTERED = (
        "never entered {operation} {number:,} of {group}{size}, in which {waiting:#rank} {waiting:waits|wait}"
    )
    OTHER_OPERATION = (
        "is in {own} {own_number:,}{own_size} while {waiting:#rank} {waiting:waits|wait} in {operation} "
        "{number:,}{size} of {group}"
    )
    OPERATIONS_DIFFER = (
        "wait in different operations of {group}: {waiting} in {operation} {number:,}, {ranks} in {own} {own_number:,}"
    )
    EACH_OTHER = "wait for each other: {waiting} in {operation} {number:,} of {group}, {ranks} in {own} {own_number:,}"
    SHOWS_NOTHING = (
        "does not show where it is, while {waiting:#rank} {waiting:waits|wait} in {operation} {number:,} "
        "of {group}{size}"
    )
    HEARS_NOTHING = "hears nothing of {others} in {operation} {number:,} of {group}"
    HEAR_NOTHING = "hear nothing of each other in {operation} {number:,} of {group}"
    AWAITED = ", while {waiting:#rank} {waiting:waits|wait} for it in {operation} {number:,} of {group}{size}"
    SAME_OPERATION = "all have entered {operation} {number:,}{size}"
    NONE_BEHIND = "no rank is behind: each has launched up to {operation} {number:,} of {group}"
    LAGS = "has not entered an operation in which others wait"
    DIFFERS = "waits in another operation than others"
    HIDES = "does not show where it is"
    ALONE = "hears nothing of others"
    """Each of the last four stands for a code with parameters where there is no place for a sentence."""
    DOES_STOPPED = "{who} is stopped by a signal"
    DOES_BLOCKED = "{who} waits for a disk or a device"
    DOES_CHILD_LOST = "{who} waits for a child that is stopped or dead"
    DOES_SLEEP = "{who} sleeps"
    DOES_LOCK = "{who} waits for a lock"
    DOES_DEVICE = "{who} waits for its device, or computes in one call,"
    DOES_COLLECTIVE = "{who} waits in a collective"
    DOES_SPIN = "{who} uses its processor"
    DOES = "{who} is"
    LATE = "has not connected to the store long after the first worker"
    PLACE = ", at {file}:{line} in {function}"
    SPOT = " at {file}:{line} in {function}"
    OTHER_PLACE = ", and at {file}:{line} in {function}"


register(GuiltCode, "stall.")


_AWAITED = frozenset(
    one.code for one in (GuiltCode.NEVER_ENTERED, GuiltCode.OTHER_OPERATION, GuiltCode.SHOWS_NOTHING, GuiltCode.AWAITED)
)


_SHORT = {
    GuiltCode.NEVER_ENTERED.code: GuiltCode.LAGS.code,
    GuiltCode.SHOWS_NOTHING.code: GuiltCode.HIDES.code,
    GuiltCode.HEARS_NOTHING.code: GuiltCode.ALONE.code,
    GuiltCode.HEAR_NOTHING.code: GuiltCode.ALONE.code,
    GuiltCode.OTHER_OPERATION.code: GuiltCode.DIFFERS.code,
    GuiltCode.OPERATIONS_DIFFER.code: GuiltCode.DIFFERS.code,
    GuiltCode.EACH_OTHER.code: GuiltCode.DIFFERS.code,
}


def awaited_operation(reasons: Sequence[Reason]) -> str:
    """The operation in which workers wait for those that these reasons are about, for people; empty if it is not
    known."""
    params = next((one.params for one in reasons if one.code in _AWAITED), {})
    number = params.get("number")
    shown = f"{params.get('operation')} {number:,} of {params.get('group')}" if isinstance(number, int) else ""
    # It comes from another node too, and goes into the report of this one.
    return "".join(letter if letter.isprintable() else "?" for letter in shown)[:MAX_AWAITED]


def shown_code(reasons: Sequence[Reason]) -> str:
    """The code of these reasons for a place that has room for a few words: one without parameters."""
    if not reasons:
        return ""
    code = reasons[0].code
    return _SHORT.get(code, GuiltCode.LAGS.code if reasons[0].params else code)
