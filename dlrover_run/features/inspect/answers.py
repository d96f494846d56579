"""The answers to `why`: lines of codes with parameters, and the text of each code. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dlrover_run.words.reasons import ReasonCode, Reasons, register, render


class WhyCode(ReasonCode):
    """What the log answers."""

    NO_ROUND = "no round has been formed"
    NO_RESTART = "the workers have not been restarted"
    ROUND_FORMED = "round {round} was formed at {at:clock} with {nodes:#node}"
    BECAUSE = ", because:"
    FAILED_WORKER = "{name} on {host} (pid {pid}) {what}"
    LIVED = ", {seconds:.1f} s after its start"
    USED_MEMORY = "it used up to {used:.1f} of {limit:.1f} GiB of memory"
    USED_DEVICE = "of GPU {index} it used {used:.1f} of {total:.1f} GiB"
    DOWN = "workers ran again after {seconds:.1f} s"
    NEXT_STEP = "each worker had made a step again after {seconds:.1f} s"
    NO_STEP_YET = "not each worker has made a step again yet"
    TASK_DOWN = "it ran again after {seconds:.1f} s"
    TASK_STILL_DOWN = "it has not been started again"
    STILL_DOWN = "its workers have not been started yet"
    LOST_WORK = "{seconds:.1f} s of work since the last checkpoint were lost"
    LOST_UNKNOWN = "the log has no checkpoint, so it does not show how much work was lost"

    TRAINED = "{percent:.1f} % of {seconds:.0f} s were training"
    TRAINED_ALL = "{percent:.1f} % of {seconds:.0f} s, the sum of {workers:#worker}, were training"
    SHARES = ", the other time:"
    SHARE = "{phase} {percent:.1f} %"
    WAITS_FOR_DATA = "rank {rank} on {host} waits for data {own:.0f} % of its time, the others {others:.0f} %"
    STRAGGLES = "{name} on {host} is a straggler since {at:clock}:"
    STRAGGLED = "{name} on {host} was a straggler for {seconds:.0f} s from {at:clock}:"
    NO_STRAGGLER = "no rank waits much longer for data than the others"
    NO_PROGRESS = "the log does not have the figures of two ranks over a minute, so it does not show which rank is slow"

    START_TOOK = "training began after {seconds:.1f} s, last on rank {local_rank} of {host}:"
    NOT_TRAINING = "after {seconds:.1f} s there is no training on rank {local_rank} of {host}:"
    PART = "{phase} {seconds:.1f} s"
    WAITED = "{host} waited up to the first round, because:"

    STALLED = "{name} on {host} has made no progress since {at:clock}"
    HAD_STALLED = "before that {name} on {host} had made no progress since {at:clock}"
    JOB_FAILED = "the job failed at {at:clock}:"
    JOB_STOPPED = "the job ended at {at:clock}:"
    JOB_SUCCEEDED = "the job succeeded at {at:clock}, after {number:#restart}"
    AGENT_ENDED = "the launcher on {host} ended at {at:clock} with exit code {code}:"
    WAITS = "{host} waits, because:"
    SPARES = "{names:join} {number:waits|wait} to step in as {number:a spare|spares}"
    TRAINS = "round {round} trains since {at:clock}"
    TASKS = "{number:#task} of version {version} of the cluster, running"
    TORN = "the log of {host} has no end: its agent was killed after {at:clock}, or it still runs"
    TORN_LOGS = "the logs of {names:join} have no end: their agents were killed, or still run"
    UNREAD = "{number:#line} of the log of {host} could not be read"


register(WhyCode, "why.")


@dataclass(frozen=True)
class WhyAnswer:
    """What the log shows. Each line is a chain of reasons."""

    lines: tuple[Reasons, ...]

    @property
    def text(self) -> str:
        """The lines as sentences."""
        return "\n".join(map(render, self.lines))

    @property
    def codes(self) -> tuple[tuple[str, ...], ...]:
        """The codes of each line."""
        return tuple(tuple(reason.code for reason in line) for line in self.lines)


def clock_text(time: datetime) -> str:
    """A time of day in an answer, which `render` shows on the local clock, as the console and `events` have it."""
    return time.isoformat(timespec="seconds")
