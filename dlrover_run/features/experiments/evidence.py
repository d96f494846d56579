"""How likely each thing is that failures of one kind may follow: a device, a node, a rank, a checkpoint, the code, or
chance. Pure.

Each suspect says how probable it makes what was seen: where the failure came, at which step, how many workers failed in
the same way, and that it came again at all. The product over all rounds, with the share of each before anything was
seen, is its weight. The probabilities are rough on purpose: a verdict needs a thousand times the weight of all that
would make it wrong, which no single one of them can give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dlrover_run.features.experiments.model import Alike, Cause, Passed, Suspect, Trial

ODD = 0.01
"""How probable it is that the failure is reported elsewhere than a suspect says: a peer may fail first."""


class _Odds(NamedTuple):
    """How probable a suspect of one cause makes something. `prior`: before anything was seen. `again`: another failure
    follows. `same_at_once`, `same_later`: it has the step of the one before, if it comes at the begin of the round or
    later. `passed`: a round with the suspect comes further. `together`: it is of a sort that most often lets several
    workers fail alike, and not one only; `wide`: these are of several nodes."""

    prior: float
    again: float
    same_at_once: float
    same_later: float
    passed: float
    together: float = 0.02
    wide: float = 0.02


# A device or a node that is broken may fail at once or at any time, and sometimes when the same thing is done again.
# The same data, checkpoint and code fail each time: what does not is chance.
_ODDS: Mapping[Cause, _Odds] = {
    Cause.GPU: _Odds(0.1, 0.9, 0.5, 0.2, 0.3),
    Cause.NODE: _Odds(0.1, 0.9, 0.5, 0.2, 0.3, together=0.4),
    Cause.RANK: _Odds(0.1, 1.0, 0.98, 0.98, 0.0005),
    Cause.CHECKPOINT: _Odds(0.1, 1.0, 0.98, 0.98, 0.0005, together=0.6, wide=0.6),
    Cause.CODE: _Odds(0.1, 1.0, 0.98, 0.98, 0.0005, together=0.7, wide=0.6),
    # Also what is away for a while, so that all workers fail alike at their start.
    Cause.CHANCE: _Odds(0.5, 0.5, 0.8, 0.02, 0.5, together=0.2, wide=0.6),
}

SEVERAL = 0.8
"""How probable it is that several workers are seen to fail alike where they do: the others are stopped soon."""


def weigh(trials: Sequence[Trial], passes: Sequence[Passed] = ()) -> dict[Suspect, float]:
    """The weight of each suspect by rounds with failures of one kind, in their order; they sum to 1."""
    if not trials:
        return {}
    logs = {suspect: _log_weight(suspect, trials, passes) for suspect in _suspects(trials)}
    most = max(logs.values())
    weights = {suspect: math.exp(value - most) for suspect, value in logs.items()}
    total = sum(weights.values())
    return {suspect: weight / total for suspect, weight in weights.items()}


def _suspects(trials: Sequence[Trial]) -> list[Suspect]:
    """All that was there at one of the failures at least; what was at none has no weight."""
    found = [Suspect(Cause.CODE), Suspect(Cause.CHANCE)]
    found += [Suspect(Cause.GPU, each.node, each.device) for each in trials if each.device]
    found += [Suspect(Cause.NODE, each.node) for each in trials]
    found += [Suspect(Cause.RANK, number=each.rank) for each in trials]
    # With number 0 one that is not known. What begins without one has 0 steps.
    found += [Suspect(Cause.CHECKPOINT, number=each.resumed or 0) for each in trials if each.resumed != 0]
    return list(dict.fromkeys(found))


def _log_weight(suspect: Suspect, trials: Sequence[Trial], passes: Sequence[Passed]) -> float:
    odds = _ODDS[suspect.cause]
    found = math.log(odds.prior) + _log_place(suspect, trials) + _log_alike(odds, trials)
    for before, trial in pairwise(trials):
        found += math.log(odds.again)
        if before.step is not None and trial.step is not None:
            same = odds.same_at_once if trial.at_once else odds.same_later
            found += math.log(same if before.step == trial.step else 1 - same)
    for each in passes:
        without = suspect.cause is Cause.CHECKPOINT and each.resumed != suspect.number
        found += math.log(0.98 if without else odds.passed)
    return found


def _log_alike(odds: _Odds, trials: Sequence[Trial]) -> float:
    """How probable it is that so many workers failed alike. A cause is of one sort for good: it lets one worker fail,
    or several."""
    seen = [each for each in trials if each.workers > 1]

    def probability(several: float) -> float:
        found = 1.0
        for each in seen:
            if each.alike is None:
                continue
            # On one node all workers are those of a node.
            wide = odds.wide if each.workers > each.local else 0.0
            found *= {Alike.ONE: 1 - several, Alike.NODE: several * (1 - wide), Alike.NODES: several * wide}[each.alike]
        return found

    return math.log(odds.together * probability(SEVERAL) + (1 - odds.together) * probability(0.03) + 1e-30)


def _log_place(suspect: Suspect, trials: Sequence[Trial]) -> float:
    """How probable the suspect makes the places of the failures."""
    first = trials[0]
    there = [each for each in trials if is_there(suspect, each, each is first)]
    found = len(there) * math.log(1 - ODD)
    found += sum(math.log(ODD / each.workers) for each in trials if not is_there(suspect, each, each is first))
    # As many suspects of this cause were possible as there are places for it.
    match suspect.cause:
        case Cause.GPU | Cause.RANK:
            return found - math.log(first.workers)
        case Cause.NODE:
            return found + _anywhere_or_fixed(there) - math.log(max(1.0, first.workers / first.local))
        case Cause.CHECKPOINT | Cause.CODE:
            return found + _anywhere_or_fixed(there, of_all=True)
        case _ if any(each.alike in (Alike.NODE, Alike.NODES) for each in trials):
            # What several workers fail with is not where one of them is.
            return _anywhere_or_fixed(trials, of_all=True)
        case _:
            return sum(-math.log(each.workers) for each in trials)


def is_there(suspect: Suspect, trial: Trial, is_first: bool = False) -> bool:
    """Whether the failure came where the suspect was."""
    match suspect.cause:
        case Cause.GPU:
            return (trial.node, trial.device) == (suspect.node, suspect.device)
        case Cause.NODE:
            return trial.node == suspect.node and trial.alike is not Alike.NODES
        case Cause.RANK:
            return trial.rank == suspect.number
        case Cause.CHECKPOINT:
            # The round that saved it may have failed by the same state.
            saved = is_first and (trial.resumed or 0) < suspect.number <= (trial.step or 0)
            return saved or (trial.resumed != 0 and (trial.resumed or 0) == suspect.number)
        case _:
            return True


def _anywhere_or_fixed(trials: Sequence[Trial], of_all: bool = False) -> float:
    """What fails on a node, by a checkpoint or by the code may be any of its workers, or each time the same one: the
    one that is nearest to the coordinator may always be seen first."""
    if not trials:
        return 0.0
    sizes = [each.workers if of_all else each.local for each in trials]
    places = [each.rank if of_all else each.local_rank for each in trials]
    most = max(places, key=places.count)
    anywhere = -sum(math.log(size) for size in sizes)
    fixed = sum(math.log(1 - ODD if place == most else ODD / size) for place, size in zip(places, sizes, strict=True))
    return math.log(0.5 * math.exp(anywhere) + 0.5 * math.exp(fixed - math.log(sizes[0])))
