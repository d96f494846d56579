"""What follows from the files that have changed: nothing yet, another start of the workers, or of the template. Pure.

Each decision compares what the files are with what they were when the present workers began, so no event is needed, and
none that is lost or repeated changes anything. A change counts once the files have been quiet for a while: an editor
may write a file twice, or rename it, and a checkout changes a hundred files. A checkout on a slow disk may pause for
longer; it counts once git has removed its lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Signature = tuple[int, int, int] | None
"""The time of the last change in nanoseconds, the size and the inode of a file; None for one that is not there."""

Snapshot = Mapping[str, Signature]
"""The signatures of files by their paths."""

QUIET = 0.05
"""Seconds without a change after which saved files count: longer than the pauses between the writes of one save, and of
one checkout."""

MISSING_QUIET = 0.3
"""Seconds after which a file counts as deleted: an editor that renames, or a checkout, may write it again."""

KEPT_QUIET = 1.0
"""Seconds without a change after which an installed module counts: pip writes for seconds."""


class Files(NamedTuple):
    """`own` are files of the user's, which workers import, and `kept` those that the template has imported."""

    own: Snapshot
    kept: Snapshot


class Action(enum.Enum):
    """What follows from a look at the files."""

    NOTHING = "nothing"
    WAIT = "wait"
    """Something has changed, and is not quiet yet: look again at `Verdict.at`."""
    RESTART = "restart"
    DELETED = "deleted"
    """Only deletions: the workers go on, as a module that runs needs no file."""
    NEW_TEMPLATE = "new template"


class Verdict(NamedTuple):
    """`names` are the paths that were written, `deleted` those that are gone. `at` is when to look again."""

    action: Action
    names: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    at: float | None = None


class Watched(NamedTuple):
    """`base` are the files as the present workers, and the template, have read them; `last` as they were at the last
    look; `changed_at` when a look last found them changed, in seconds."""

    base: Files = Files({}, {})
    last: Files = Files({}, {})
    changed_at: float = 0.0

    def add(self, own: Snapshot, kept: Snapshot, started: int, template_started: int) -> Watched:
        """With files that are known from now on. The workers and the template have begun at these times, in nanoseconds
        of the time of the day, and have read an older file as it is."""
        read = Files(_older(own, started), _older(kept, template_started))
        return self._replace(
            base=Files({**read.own, **self.base.own}, {**read.kept, **self.base.kept}),
            last=Files({**own, **self.last.own}, {**kept, **self.last.kept}),
        )

    def forget_kept(self) -> Watched:
        """For a new template, whose modules are not known yet."""
        return self._replace(base=self.base._replace(kept={}), last=self.last._replace(kept={}))

    def begin(self, own: Snapshot) -> Watched:
        """When workers begin, which read the user's files as they are now."""
        return self._replace(base=Files(own, self.base.kept), last=Files(own, self.last.kept))


def _older(files: Snapshot, time: int) -> Snapshot:
    """The files as they were read by what has begun at that time; one that was written later may have been another."""
    return {path: one if one is None or one[0] <= time else None for path, one in files.items()}


def decide(
    watched: Watched, files: Files, now: float, is_busy: Callable[[Sequence[str]], bool] = lambda paths: False
) -> tuple[Watched, Verdict]:
    """What follows from the files as they are at time `now`, in seconds. What has been acted on counts as read.
    `is_busy` says whether a program is still writing files beside these, however quiet they are."""
    if files != watched.last:
        watched = watched._replace(last=files, changed_at=now)
    own = [path for path, one in files.own.items() if one != watched.base.own.get(path)]
    kept = [path for path, one in files.kept.items() if one != watched.base.kept.get(path)]
    deleted = tuple(path for path in own if files.own[path] is None)
    if not own and not kept:
        return watched, Verdict(Action.NOTHING)
    quiet = KEPT_QUIET if kept else MISSING_QUIET if deleted else QUIET
    if now < (at := watched.changed_at + quiet):
        return watched, Verdict(Action.WAIT, at=at)
    if is_busy((*own, *kept)):
        return watched, Verdict(Action.WAIT, at=now + QUIET)
    read = watched._replace(base=files)
    saved = tuple(path for path in own if path not in deleted)
    if kept:
        return read, Verdict(Action.NEW_TEMPLATE, (*kept, *saved), deleted)
    return read, Verdict(Action.RESTART if saved else Action.DELETED, saved, deleted)
