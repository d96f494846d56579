"""What follows from the failures of a job: one change for the next round, a verdict, or nothing. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlrover_run.features.experiments.evidence import is_there, weigh
from dlrover_run.features.experiments.model import Cause, Change, Passed, Suspect, Trial

SURE = 0.999
"""The weight that what a verdict acts on needs: a node leaves, or the job stops, by mistake once in a thousand."""

FIRM = 0.9
"""The weight that it needs without the last failure already: one failure that is seen elsewhere by chance decides
nothing."""

NAMED = 0.999
"""The share of that weight with which the verdict names one thing, and not two that have the same consequence."""

MIN_GAIN = 0.02
"""The smallest weight on the smaller side of what a change separates that is worth it."""

# What a change costs: to start workers on other nodes, their caches; of an earlier checkpoint, steps.
_WORTH = {Change.DEVICES: 1.0, Change.NODES: 0.6, Change.CHECKPOINT: 0.4}

# What may pass by itself: a disk, a network or a service that is away for a while.
_OUTSIDE = re.compile(
    r"(?:^|\.)(?:OSError|\w*IOE\w*|BlockingIOError|PermissionError|FileNotFoundError|Broken\w+Error|\w*Connect\w*|\w*Timeout\w*"
    r"|\w*Time[dO]out\w*|HTTP\w*|\w*HTTP\w*Error|\w*Network\w*|\w*Socket\w*|gaierror|herror|URLError|SSL\w*|\w*ClientError"
    r"|\w*ServerError|\w*RpcError|\w*Unavailable\w*)$"
)


class Possible(NamedTuple):
    """What the next round may change: whether the workers of the node of the last failure can have other devices,
    whether another node has as many workers and ranks are not fixed, and the checkpoints that are older than the one
    from which the last round began."""

    devices: bool = False
    nodes: bool = False
    checkpoint: bool = False


class Verdict(NamedTuple):
    """What failures follow: `there` were with it, of `failures`. `perhaps` are other causes that it may be as well, and
    that have the same consequence."""

    suspect: Suspect
    there: int
    failures: int
    perhaps: tuple[Cause, ...] = ()
    stops: bool = False
    """Whether no further start can help."""

    @property
    def removes(self) -> str:
        """The id of the node that has to leave; empty if none has."""
        return self.suspect.node if self.suspect.cause in (Cause.GPU, Cause.NODE) else ""


class Advice(NamedTuple):
    """At most one of them."""

    verdict: Verdict | None = None
    change: Change | None = None
    suspect: Suspect | None = None
    """What the change is about."""


def may_pass(error: str) -> bool:
    """Whether an exception of that type comes from outside of the job, so that a later start may go well."""
    return _OUTSIDE.search(error) is not None


def advise(trials: Sequence[Trial], passes: Sequence[Passed], possible: Possible) -> Advice:
    """What follows once the last of these rounds has failed, or has passed its place; those of other kinds than that
    of the last trial do not count."""
    if not trials:
        return Advice()
    last = trials[-1]
    alike = [each for each in trials if each.kind.digest == last.kind.digest]
    if len(alike) < 2:
        return Advice()
    passed = [each for each in passes if each.kind.digest == last.kind.digest]
    weights = weigh(alike, passed)
    verdict = _verdict(alike, passed, weights, possible)
    if verdict is not None:
        return Advice(verdict)
    # A round that has come further has shown what it could.
    if passed and passed[-1].round > last.round:
        return Advice()
    return _change(last, weights, possible)


def _verdict(
    trials: Sequence[Trial], passed: Sequence[Passed], weights: Mapping[Suspect, float], possible: Possible
) -> Verdict | None:
    """The suspects with one consequence that have all the weight, if there are such."""
    last = trials[-1]
    groups = [
        [each for each in weights if each.cause in (Cause.GPU, Cause.NODE) and each.node == node]
        for node in dict.fromkeys(trial.node for trial in trials)
    ]
    groups += [[each] for each in weights if each.cause is Cause.CHECKPOINT and possible.checkpoint]
    # What cannot be told from a checkpoint, because no older one can be tried, has no other remedy either.
    last_causes = (Cause.RANK, Cause.CODE) if possible.checkpoint else (Cause.RANK, Cause.CODE, Cause.CHECKPOINT)
    final = [each for each in weights if each.cause in last_causes]
    before = weigh(trials[:-1], passed)
    for group in groups if may_pass(last.kind.error) else [*groups, final]:
        weight = sum(weights[each] for each in group)
        # A checkpoint is named by a round that has passed, not by the last failure.
        of_checkpoint = len(group) == 1 and group[0].cause is Cause.CHECKPOINT
        firm = 1.0 if of_checkpoint else sum(before.get(each, 0.0) for each in group)
        if weight < SURE or firm < FIRM:
            continue
        suspect = max(group, key=lambda each: weights[each])
        if weights[suspect] < NAMED * weight and suspect.cause is Cause.GPU:
            suspect = Suspect(Cause.NODE, suspect.node)
        others = {each.cause for each in group if weights[each] > (1 - NAMED) * weight} - {suspect.cause, Cause.GPU}
        there = sum(is_there(suspect, each, each is trials[0]) for each in trials)
        return Verdict(suspect, there, len(trials), tuple(sorted(others)), stops=group is final)
    return None


def _change(last: Trial, weights: Mapping[Suspect, float], possible: Possible) -> Advice:
    """The change that separates most: the smaller of the weights of what it holds to fail in one place, and of what it
    holds to fail in another one."""

    def of(*causes: Cause) -> float:
        there = (weight for suspect, weight in weights.items() if suspect.cause in causes and is_there(suspect, last))
        return sum(there)

    gains: dict[Change, float] = {}
    if possible.devices:
        gains[Change.DEVICES] = min(of(Cause.GPU), of(Cause.NODE) + of(Cause.RANK))
    if possible.nodes:
        here = of(Cause.GPU, Cause.NODE)
        gains[Change.NODES] = min(here, of(Cause.RANK, Cause.CODE, Cause.CHECKPOINT))
    if possible.checkpoint:
        gains[Change.CHECKPOINT] = min(of(Cause.CHECKPOINT), of(Cause.RANK, Cause.CODE, Cause.GPU, Cause.NODE))
    worth = {change: gain * _WORTH[change] for change, gain in gains.items() if gain >= MIN_GAIN}
    if not worth:
        return Advice()
    change = max(worth, key=lambda each: worth[each])
    about = {
        Change.DEVICES: Suspect(Cause.GPU, last.node, last.device),
        Change.NODES: Suspect(Cause.NODE, last.node),
        Change.CHECKPOINT: Suspect(Cause.CHECKPOINT, number=last.resumed or 0),
    }
    return Advice(change=change, suspect=about[change])
