"""What a status says of tasks that make no progress: which of them the others wait for, and which only wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.job_status.progress import HangingTask, NodeProgress
from dlrover_run.words.reasons import Reason, render
from dlrover_run.words.text import counted

MAX_NAMED = 8
"""Tasks that are named in one reason."""

MAX_IN_HEADLINE = 3
"""Tasks that are named in the headline of a job."""


class HangingNode(NamedTuple):
    """A node with tasks that make no progress; `name` names it in a sentence."""

    name: str
    progress: NodeProgress


def hang_headline(nodes: Sequence[HangingNode], noun: str) -> str:
    """What is shown first of a job with these nodes; empty if all tasks make progress."""
    culprits = [(node.name, task) for node in nodes for task in node.progress.hangs]
    stalled = sum(len(node.progress.stalled) for node in nodes)
    if not stalled:
        return ""
    if not culprits:
        return f"{counted(stalled, noun)} {'makes' if stalled == 1 else 'make'} no progress"
    named = ", ".join(f"{task.name} on {node}{_cause(task)}" for node, task in culprits[:MAX_IN_HEADLINE])
    more = len(culprits) - MAX_IN_HEADLINE
    waiting = stalled - len(culprits)
    awaited = next((f" in {node.progress.awaited}" for node in nodes if node.progress.awaited), "")
    return "".join(
        (
            f"{counted(len(culprits), noun)} {'hangs' if len(culprits) == 1 else 'hang'}: {named}",
            f" and {more} more" if more > 0 else "",
            f"; {counted(waiting, noun)} {'waits' if waiting == 1 else 'wait'} for it{awaited}" if waiting else "",
        )
    )


def stall_reason(progress: NodeProgress | None, *, culprit_known: bool) -> str:
    """What is shown of one node; `culprit_known`: some node of the job has a task for which the others wait."""
    if progress is None or not progress.stalled:
        return ""
    hangs = {task.name: f"{task.name}{_cause(task)}" for task in progress.hangs}
    waits = [name for name in progress.stalled if name not in hangs]
    parts = []
    if hangs:
        parts.append(f"no progress: {_listed(list(hangs.values()))}")
    if waits:
        parts.append(f"{'waits for another' if culprit_known else 'no progress'}: {_listed(waits)}")
    return "; ".join(parts)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _cause(task: HangingTask) -> str:
    """The cause in brackets. The texts of the codes continue the name of a task."""
    text = render([Reason(task.cause, {})]).removeprefix("is ")
    return f" ({text})" if text else ""
