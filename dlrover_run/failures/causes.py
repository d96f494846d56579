"""Which worker failed first, and the text that describes a worker's exit.

Pure functions on `WorkerExit`; `error_file` and `oom_kills` collect the facts in it.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence

from msgspec.structs import replace

from dlrover_run.failures import collective_errors, tracebacks
from dlrover_run.failures.guard import guarded
from dlrover_run.failures.tracebacks import plain_lines
from dlrover_run.failures.worker_exit import RecordedError, WorkerExit

CLOCK_TICK = 0.01
"""Seconds by which the modification time of a file may lag behind the clock: one tick of the slowest kernels."""

MAX_SUMMARY = 200
"""Maximum characters of an exception's message in a sentence."""

_SIGNAL_MEANINGS = {
    signal.SIGABRT: "abort",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGSYS: "bad system call",
    signal.SIGXCPU: "CPU time limit",
    signal.SIGXFSZ: "file size limit",
}

# Signals that a process does not get by an error of its own: another process sent them.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# A worker's output has them anywhere, and an exception of torch's store by its name.
_PEER_LOST = re.compile(
    f"{collective_errors.CLOSED.pattern}|DistNetworkError|{collective_errors.TIMEOUT.pattern}", re.IGNORECASE
)

MAX_OPEN_TRACEBACK = 10
"""Maximum lines from the exception at the end of a traceback to the end of a worker's output: a traceback before more
lines is one that the worker has recovered from."""

MAX_LAST_LINES = 30
"""Lines at the end of a worker's output in which the words of a process group count if no exception is recognised."""

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")


def root_cause(ends: Sequence[WorkerExit]) -> WorkerExit | None:
    """The worker that failed first, among those that failed by themselves; None if none did.

    A worker that the launcher stopped is a victim, whatever its exit code. So is a worker whose message is that it lost
    the connection to a peer, as long as another worker failed for another reason: the sockets of a dying process close
    before its death can be observed, so its peer may be seen to die first, and the root cause may be stopped while it
    exits. That worker is recognised by the error that it had recorded, or by its traceback (see `raised_own_error`). It
    ranks behind workers that were not stopped, because a record may be old and the worker have recovered from it.

    A worker that wrote something in which no error is recognised may be either, so it ranks between the two (see
    `is_unexplained`). Among the rest the order of the failures counts, not of the deaths: a worker may take seconds
    from its exception to its exit. The recorded time of the exception is used; if it has whole seconds only, the end of
    that second, because an uncertainty of up to a second must not put it before a death that was observed.
    """
    if all(end.stopped_with is not None for end in ends if end.failed):
        return None

    def order(end: WorkerExit) -> tuple[int, bool, float, int]:
        doubt = 2 if lost_peer(end) else 1 if is_unexplained(end) else 0
        return doubt, end.stopped_with is not None, _failed_by(end), end.rank

    return min((end for end in ends if end.failed), key=order)


def failed_before(error: RecordedError | None, stopped_at: float | None) -> bool:
    """Whether a worker that was stopped at that Unix time had certainly recorded its error before."""
    return error is not None and stopped_at is not None and 0 < _recorded_by(error) < stopped_at - CLOCK_TICK


def _failed_by(end: WorkerExit) -> float:
    """The Unix time by which the worker had certainly failed."""
    if end.error is None or end.error.unix_time <= 0:
        return end.unix_time
    return min(end.unix_time, _recorded_by(end.error))


def _recorded_by(error: RecordedError) -> float:
    return error.unix_time + 1 if error.unix_time % 1 == 0 else error.unix_time


def lost_peer(end: WorkerExit) -> bool:
    """Whether the worker failed, according to its own message, because the connection to another worker broke or a
    collective timed out. An error of its own device explains that, and is no loss of a peer."""
    return not end.blames_device and (end.has_lost_peer or _names_lost_peer(own_message(end)))


def is_unexplained(end: WorkerExit) -> bool:
    """Whether the worker ended with Python's code of an uncaught exception and wrote only text in which no exception is
    recognised: it may have lost a peer, or have failed by itself."""
    is_unknown = end.code == 1 and end.error is None and not end.blames_device
    return is_unknown and bool(end.stderr_tail.strip()) and not _exception_lines(end.stderr_tail)


def may_be_victim(end: WorkerExit) -> bool:
    """Whether another worker may be the cause, so that the agent waits a moment for its end before it names one."""
    return lost_peer(end) or is_unexplained(end)


def _names_lost_peer(text: str) -> bool:
    # A logger may have broken the message into lines.
    return _PEER_LOST.search(" ".join(text.split())) is not None


def raised_own_error(stderr_tail: str) -> bool:
    """Whether the output of a worker that still runs ends with the traceback of an error other than the loss of a peer,
    so that it is about to exit."""
    lines = _exception_lines(stderr_tail)
    return 0 < len(lines) <= MAX_OPEN_TRACEBACK and not _names_lost_peer("\n".join(lines))


def own_message(end: WorkerExit) -> str:
    """The worker's own message about its failure; may be empty."""
    if end.error is not None:
        return end.error.message
    if end.code == -signal.SIGABRT:
        return end.stderr_tail  # NCCL's watchdog writes its reason there and aborts the process.
    if found := _exception_lines(end.stderr_tail):
        return "\n".join(found)
    # Of a program that prints errors in its own way only the words of the process group are known.
    return "\n".join(plain_lines(end.stderr_tail.rstrip())[-MAX_LAST_LINES:]) if end.code > 0 else ""


class Cause(enum.StrEnum):
    """What kind of failure ended a worker, for programs that count failures. The names are stable.

    What the end of a task of `tf-ps-run` costs is another list (`tf_ps_runner.cluster.model.EndCause`), where `oom` is
    `memory`.
    """

    OUT_OF_MEMORY = "oom"
    FULL_DISK = "full_disk"
    DEVICE = "device"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    LOST_PEER = "lost_peer"
    EXCEPTION = "exception"
    STALL = "stall"
    SIGNAL = "signal"
    EXIT_CODE = "exit_code"


def cause_of(end: WorkerExit) -> Cause:
    """The kind of a failure: the first that applies. A worker that the launcher killed as a failure made no progress,
    unless it had lost a peer."""
    if end.oom_kill is not None:
        return Cause.OUT_OF_MEMORY
    if end.full_disk is not None:
        return Cause.FULL_DISK
    if end.blames_device:
        return Cause.DEVICE
    if end.waited_for is not None:
        return Cause.COLLECTIVE_TIMEOUT
    if lost_peer(end):
        return Cause.LOST_PEER
    if end.killed_for:
        return Cause.STALL
    if summarize_error(end) is not None:
        return Cause.EXCEPTION
    return Cause.SIGNAL if end.code < 0 else Cause.EXIT_CODE


def left_no_message(end: WorkerExit) -> bool:
    """Whether a worker failed by itself and left neither an error record nor an exception."""
    return end.failed and end.error is None and not _exception_lines(end.stderr_tail)


def may_be_oom_kill(code: int, stderr_tail: str) -> bool:
    """Whether the exit may be an out-of-memory kill, so that `OomKillCounters` is worth asking.

    That is a SIGKILL of the worker, of the command that a shell ran, or of one of the worker's DataLoader processes.
    """
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL) or (code > 0 and "killed by signal: Killed" in stderr_tail)


def summarize_error(end: WorkerExit) -> str | None:
    """The worker's error in one line, such as `ValueError: x`: as recorded, else from its last traceback."""
    if end.error is not None and end.error.message.strip():
        found: str | None = next(line for line in plain_lines(end.error.message.strip()))
    else:
        # 1 is Python's exit code after an uncaught exception; with another code the traceback was not the cause.
        caused = end.code == 1 or end.failed_first
        found = next(iter(_exception_lines(end.stderr_tail)), None) if caused else None
    if found is not None and len(found) > MAX_SUMMARY:
        found = found[: MAX_SUMMARY - 3] + "..."
    return found or None


def trace_lines(end: WorkerExit) -> list[str]:
    """The traceback of the failure: as recorded, else the last one in the output; may be empty."""
    recorded = _last_failure(end.error.traceback) if end.error is not None else []
    return recorded or _last_failure(end.stderr_tail)


def _exception_lines(text: str) -> list[str]:
    # These read what a user's program wrote, on the way to a restart.
    return guarded("an exception in the output", lambda: tracebacks.exception_lines(text), [])


def _last_failure(text: str) -> list[str]:
    return guarded("a traceback in the output", lambda: tracebacks.last_failure(text), [])


def describe_exit(end: WorkerExit) -> str:
    """How the worker exited, after its name: `exited with code 3`, `was killed by SIGKILL`, `raised KeyError: x`."""
    return guarded("the text of an end", lambda: _describe_exit(end), f"ended with code {end.code}")


def _describe_exit(end: WorkerExit) -> str:
    if end.waited_for is not None:
        return f"timed out waiting for {end.waited_for}; it {describe_exit(replace(end, waited_for=None))}"
    if end.stopped_with is not None and not end.failed_first:
        return f"was stopped by the launcher with {end.stopped_with.name}"
    if end.code == 0:
        return "exited with code 0"
    error = summarize_error(end)
    if end.failed_first and error is not None:
        return _describe_error(error)
    if end.code < 0:
        text = f"was killed by {describe_signal(-end.code)}"
        if error is not None:
            text += f", after it {_describe_error(error)}"
        elif end.killed_for:
            text += f", by {end.killed_for}"
        elif end.forwarded:
            text += ", which --forward-signals passed on"
        elif end.oom_kill is None and end.device_error is None and -end.code in _SENT:
            text += ", not by the launcher"
    elif error is not None:
        text = _describe_error(error)
    else:
        text = f"exited with code {end.code}"
        if 128 < end.code <= 128 + signal.SIGRTMAX:
            text += f", a shell's code for a command that was killed by {describe_signal(end.code - 128)}"
    if end.full_disk is not None:
        text += f", and {end.full_disk}"
    if end.device_error is not None:
        text += f", {end.device_error.clause}"
    return text if end.oom_kill is None else f"{text}: {end.oom_kill}"


def _describe_error(error: str) -> str:
    return f"raised {error}" if _EXCEPTION.match(error) else f"failed: {error}"


def describe_exit_code(code: int) -> str:
    """How a process of the launcher ended, to follow its name; `code` follows `subprocess`."""
    return f"was killed by {describe_signal(-code)}" if code < 0 else f"ended with code {code}"


def describe_signal(number: int) -> str:
    """A signal's name, with its meaning if it is that of an error: `SIGSEGV (segmentation fault)`, `SIGKILL`."""
    try:
        name = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    meaning = _SIGNAL_MEANINGS.get(name)
    return f"{name.name} ({meaning})" if meaning else name.name
