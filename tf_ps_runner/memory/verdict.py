"""Whether a task ended because of the memory that it, or a child of it, took: pure.

Exit by SIGKILL alone says nothing, since people and schedulers send that too; and a task whose child was killed may
leave with any code. What decides is the kernel's count of kills in the task's own control group, or the word of
whoever watched it. How often the limit was in the way (`failcnt`) is no sign: there are kernels where it stays 0.
"""

from __future__ import annotations

import signal

from dlrover_run.failures import describe_signal
from dlrover_run.policies.parameter_servers.text import size


def explain_end(code: int, kills_before: int | None, kills_after: int | None, limit: int) -> str | None:
    """A clause without the task's name when it ended for memory, else None.

    `code` is its exit code, below 0 for a signal; the kills are the count of its group before it started and after it
    ended, None where that cannot be read; `limit` is in MiB. A task that ended well did so in spite of a killed child.
    """
    if code == 0 or kills_before is None or kills_after is None or kills_after <= kills_before:
        return None
    if code == -signal.SIGKILL:
        return f"was killed for memory: it took more than the {size(limit)} that it may"
    return (
        f"{_left(code)} after a child of it was killed for memory: together they took more than the {size(limit)} "
        "that they may"
    )


def explain_watched(usage: int, limit: int) -> str:
    """A clause about a task that was killed by whoever watched it, both in MiB."""
    return f"was killed for memory: it took {size(usage)}, and may take {size(limit)}"


def explain_unlimited(code: int, evidence: str | None) -> str | None:
    """A clause about a task without a limit that SIGKILL ended, when there is evidence of a kill for memory."""
    return f"was killed for memory: {evidence}" if code == -signal.SIGKILL and evidence else None


def _left(code: int) -> str:
    return f"left with exit code {code}" if code > 0 else f"was ended by {describe_signal(-code)}"
