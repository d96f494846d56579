"""What the deaths of workers mean: which one came first of itself, and how to say it in words.

Pure functions on `WorkerExit`; the evidence that it holds is gathered with `error_file` and `memory_watch`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from dlrover_run.failures.tracebacks import exception_lines, last_failure, plain_lines
from dlrover_run.failures.worker_exit import RecordedError, WorkerExit

CLOCK_TICK = 0.01
"""Seconds by which the time of a file may lag behind the clock: one tick of the slowest kernels."""

MAX_SUMMARY = 200
"""Characters of an exception's message that are worth a place in a sentence."""

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

# Signals that nobody gets by an error of one's own: somebody sent them.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# How gloo, NCCL and torch's store say that the other side of a connection went away or fell silent.
# Torch's own words: other packages wait for locks and connections in much the same ones, and blame nobody.
COLLECTIVE_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms for (?:send|recv)|(?:wait|barrier) timeout after \d+ ?ms|error: socket timeout\b"
    r"|waitForInput: socket .* timed out after|timed out after \d+ seconds waiting for clients"
    r"|watchdog caught collective operation timeout|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
"""That a process group or its store waited for another worker in vain."""

_PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|remote process exited or there was a network error"
    rf"|connection was likely closed|DistNetworkError|{COLLECTIVE_TIMEOUT.pattern}",
    re.IGNORECASE,
)

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")


def root_cause(ends: Sequence[WorkerExit]) -> WorkerExit | None:
    """The worker that failed first, of those that failed of themselves; None when none did.

    A worker that the launcher stopped is a victim, whatever its exit code. So is, as long as another one failed for any
    other reason, a worker that says that it lost the connection to a peer: a dying process's sockets close before
    its death can be observed, so such a peer may even be seen to die first, and the culprit be stopped on its way out.
    That one is known by the error that it had recorded; it stands behind those that nobody stopped, for a record may be
    old and its error have been overcome.

    Among the rest the order of their failures counts, not of their deaths: a worker may take seconds from its exception
    to its end. The recorded time of the exception is used for that; where the record has only whole seconds, the
    end of that second, because a doubt of up to a second must not put it before a death that was observed.
    """
    if all(end.stopped_with is not None for end in ends if end.failed):
        return None

    def order(end: WorkerExit) -> tuple[bool, bool, float, int]:
        return lost_peer(end), end.stopped_with is not None, _failed_by(end), end.rank

    return min((end for end in ends if end.failed), key=order)


def failed_before(error: RecordedError | None, stopped_at: float | None) -> bool:
    """Whether a worker that was stopped at a Unix time had certainly recorded its error before that."""
    return error is not None and stopped_at is not None and 0 < _recorded_by(error) < stopped_at - CLOCK_TICK


def _failed_by(end: WorkerExit) -> float:
    """The moment by which the worker had failed for certain."""
    if end.error is None or end.error.unix_time <= 0:
        return end.unix_time
    return min(end.unix_time, _recorded_by(end.error))


def _recorded_by(error: RecordedError) -> float:
    return error.unix_time + 1 if error.unix_time % 1 == 0 else error.unix_time


def lost_peer(end: WorkerExit) -> bool:
    """Whether the worker's own words say that it failed because the connection to another worker broke, or because it
    waited for another one in vain."""
    return _PEER_LOST.search(own_message(end)) is not None


def own_message(end: WorkerExit) -> str:
    """What the worker itself said of its failure; empty when it said nothing."""
    if end.error is not None:
        return end.error.message
    if end.code == -signal.SIGABRT:
        return end.stderr_tail  # NCCL's watchdog writes its reason there and aborts the process.
    return "\n".join(exception_lines(end.stderr_tail))


def left_no_message(end: WorkerExit) -> bool:
    """Whether a worker failed of itself and left no word of why: no record and no exception."""
    return end.failed and end.error is None and not exception_lines(end.stderr_tail)


def may_be_oom_kill(code: int, stderr_tail: str) -> bool:
    """Whether the end looks like a kill for memory, so that it is worth asking `OomMonitor`.

    That is a SIGKILL of the worker itself, of the command that a shell ran, or of one of its DataLoader workers.
    """
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL) or (code > 0 and "killed by signal: Killed" in stderr_tail)


def summarize_error(end: WorkerExit) -> str | None:
    """What the worker raised, in one line such as `ValueError: x`: as it recorded it, else from its last traceback."""
    if end.error is not None and end.error.message.strip():
        found: str | None = next(line for line in plain_lines(end.error.message.strip()))
    else:
        # Python's own exit code after an exception that nobody caught; with another code it was not the end.
        found = next(iter(exception_lines(end.stderr_tail)), None) if end.code == 1 else None
    if found is not None and len(found) > MAX_SUMMARY:
        found = found[: MAX_SUMMARY - 3] + "..."
    return found or None


def trace_lines(end: WorkerExit) -> list[str]:
    """The traceback of the worker's failure, as it recorded it, else the last of what it wrote; empty without one."""
    recorded = last_failure(end.error.traceback) if end.error is not None else []
    return recorded or last_failure(end.stderr_tail)


def describe_exit(end: WorkerExit) -> str:
    """How the worker ended, to follow its name: `exited with code 3`, `was killed by SIGKILL`, `raised KeyError: x`."""
    if end.waited_for is not None:
        return f"waited in vain for {end.waited_for}; it {describe_exit(replace(end, waited_for=None))}"
    if end.stopped_with is not None and not end.failed_first:
        return f"was stopped by the launcher with {end.stopped_with.name}"
    if end.code == 0:
        return "exited with code 0"
    words = summarize_error(end)
    if end.failed_first and words is not None:
        return _failing(words)
    if end.code < 0:
        text = f"was killed by {describe_signal(-end.code)}"
        if words is not None:
            text += f", after it {_failing(words)}"
        elif end.forwarded:
            text += ", which --forward-signals passed on"
        elif end.memory_limit is None and -end.code in _SENT:
            text += ", which the launcher did not send"
    elif words is not None:
        text = _failing(words)
    else:
        text = f"exited with code {end.code}"
        if 128 < end.code <= 128 + signal.SIGRTMAX:
            text += f", as a shell does whose command is killed by {describe_signal(end.code - 128)}"
    if end.full_disk is not None:
        text += f", and {end.full_disk}"
    return text if end.memory_limit is None else f"{text}: {end.memory_limit}"


def _failing(words: str) -> str:
    return f"raised {words}" if _EXCEPTION.match(words) else f"failed: {words}"


def describe_exit_code(code: int) -> str:
    """How a process of the launcher's own ended, to follow its name; `code` is as `subprocess` has it."""
    return f"was killed by {describe_signal(-code)}" if code < 0 else f"ended with code {code}"


def describe_signal(number: int) -> str:
    """A signal's name with its meaning where it has one of its own: `SIGSEGV (segmentation fault)`, `SIGKILL`."""
    try:
        name = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    meaning = _SIGNAL_MEANINGS.get(name)
    return f"{name.name} ({meaning})" if meaning else name.name
