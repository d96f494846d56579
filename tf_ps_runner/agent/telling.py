"""What a person is told of this node's tasks and of the cluster, a line for each thing that happens."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.coordination.records import Assignment
from dlrover_run.policies.parameter_servers.model import EndCause, NodeOrder, Role, TaskEnd, TaskKey
from dlrover_run.policies.parameter_servers.text import news
from tf_ps_runner.agent.words import Note, Restored, Saved, plain


class Telling:
    """Tells with `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reason = ""
        self._told_watch = False
        self._order: NodeOrder | None = None

    def follow(self, wanted: Assignment) -> None:
        """What the coordinator wants now, and why."""
        if wanted.cluster is None:
            return
        self._order = wanted.cluster
        before, self._reason = self._reason, wanted.reason
        if self._reason != before:
            self._say(news(before, self._reason))

    def limited(self, kept_by: str) -> None:
        """A task has a limit of memory, which is kept in that way."""
        if kept_by == "watch" and not self._told_watch:
            self._told_watch = True
            self._say(
                "warning: no control group can be made here, so processes are looked at for their memory, and a fast "
                "one takes more than its limit before it is killed"
            )

    def ended(self, key: TaskKey, end: TaskEnd, step: int) -> None:
        """A process has ended, whose last known step was that; -1 where it has told of none."""
        if key.role is Role.CHIEF and end.cause is EndCause.SUCCESS and step < 0:
            self._say(
                f"warning: {key} has succeeded without a session in the cluster: does the script read TF_CONFIG? One "
                "that does not trains alone in each of its processes"
            )

    def said(self, key: TaskKey, event: Note | Restored | Saved) -> None:
        """A process has said something that a person should know."""
        if isinstance(event, Note):
            self._say(f"{key}: {plain(event.text)}")
        elif isinstance(event, Saved):
            if self._order is not None and self._order.save:
                self._say(f"{key} has saved step {event.step}: {plain(event.path)}")
        else:
            for sentence in event.skipped:
                self._say(f"{key}: {plain(sentence)}")
            self._say(f"{key}: {_model(event)}")


def _model(event: Restored) -> str:
    # How many steps that has cost the coordinator says, who hears of those of all nodes.
    known = event.step >= 0
    if event.how == "checkpoint":
        return f"has restored {plain(event.path or '?')}, and goes on{f' after step {event.step}' if known else ''}"
    if event.how == "live":
        # Without a step of its own, the script decides: Keras' BackupAndRestore goes back to the beginning of an epoch.
        rest = f" at step {event.step}; no step lost" if known else "; the script decides from where"
        return f"goes on with the live model{rest}"
    if event.step > 0:
        return f"begins at step {event.step}, with a model that the script has restored by itself"
    return f"begins with a fresh model{' at step 0' if known else ''}"
