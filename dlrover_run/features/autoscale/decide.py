"""Decides how many nodes a job should have. `decide` is pure, and idempotent: it acts on the latest view of the job.

A search measures the size that trains, tries the one that may have the most to gain, and stays with the best. It never
tries a size twice, so it never toggles, and it is over after at most `Sizes.max_changes` changes. Another search begins
when the throughput of the size has changed; sizes of which nodes did not come, or at which workers failed, are tried
again after a time, which doubles.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from msgspec.structs import replace

from dlrover_run.features.autoscale import search
from dlrover_run.features.autoscale.measure import MIN_BLOCKS, Estimate, estimate, observe
from dlrover_run.features.autoscale.model import (
    MAX_LOSSES,
    MAX_PAUSES,
    MAX_SIZES,
    AutoscaleState,
    Ceiling,
    Condition,
    SizeRecord,
    Sizes,
    SizeView,
)
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.words.reasons import Reason, codes

USUAL_PAUSE = 30.0
"""Seconds that a change takes, as long as none was seen."""

CERTAIN = 3.0
"""How many standard errors make a difference certain."""

PRECISE = 0.6
"""The standard error at which a measurement ends, as a share of the tolerance."""

MAX_DOUBLINGS = 6
"""How often a time is doubled at most."""


MAX_STEPS = 8
"""What follows from one view is decided in fewer steps."""


def decide(rules: AutoscaleRules, sizes: Sizes, state: AutoscaleState, view: SizeView, now: float) -> AutoscaleState:
    """What the autoscaler wants now, and knows. `now` is the job time, in seconds."""
    for _ in range(MAX_STEPS):
        before, state = state, _step(rules, sizes, state, view, now)
        # From what is measured alone a step has already drawn its conclusions.
        if state == replace(before, measurement=state.measurement):
            break
    return state


def _step(rules: AutoscaleRules, sizes: Sizes, state: AutoscaleState, view: SizeView, now: float) -> AutoscaleState:
    state = _follow(rules, state, view, now)
    if view.busy:
        return state
    state = _leave_failing(rules, sizes, state, view, now)
    if not view.size:
        return state
    if state.target and state.target not in sizes:
        # Another range was requested. What is known of other sizes stays true.
        to = sizes.below(state.target)
        state = _change(state, view, to, Condition.CONTINUE, AutoscaleCode.ALLOWED(size=state.target, to=to))
        return replace(state, changes=0)
    if (
        state.ceiling.until > now
        and sizes.below(view.present) > state.ceiling.size
        and state.ceiling.is_lifted_by_nodes
    ):
        state = replace(state, ceiling=replace(state.ceiling, until=now))
    if state.target and view.size < state.target:
        return _wait_for_nodes(rules, sizes, state, view, now)
    if state.target and view.size > state.target:
        return state
    state = replace(state, short_since=None)
    if view.size not in sizes:
        return state
    record = find_record(state, view.size)
    if record is None or not record.blocks:
        found = _finished(rules, state)
        if found is None:
            until = spares_until(rules, state)
            target = state.target or view.size if until is None or now < until else 0
            return _with(state, AutoscaleCode.MEASURING(size=view.size), target=target)
        state = remember(state, SizeRecord(view.size, found.rate, found.error, found.blocks, now))
    else:
        drifted = _drifted(rules, state, record, now)
        if drifted is not None:
            return drifted
        if state.condition.has_settled:
            return state
    return _choose(rules, sizes, state, view, now)


def spares_until(rules: AutoscaleRules, state: AutoscaleState) -> float | None:
    """Until when nodes that come are spares although no step was counted; None if they are as long as the size that
    trains is not known. They are from the begin of the first round on, as each would make its workers start anew. In a
    job that counts no steps they must not be for ever."""
    if (
        state.started_at is not None
        or state.paused_at is None
        or state.changes
        or any(one.blocks for one in state.table)
    ):
        return None
    return state.paused_at + rules.node_timeout


def find_record(state: AutoscaleState, size: int) -> SizeRecord | None:
    """What is known of that size."""
    return next((record for record in state.table if record.size == size), None)


def remember(state: AutoscaleState, record: SizeRecord) -> AutoscaleState:
    """The state with what is known of one size."""
    others = tuple(one for one in state.table if one.size != record.size)
    return replace(state, table=(*others, record)[-MAX_SIZES:])


def _with(state: AutoscaleState, *reasons: Reason, **changes: Any) -> AutoscaleState:
    return replace(state, reasons=reasons, **changes)


def _change(state: AutoscaleState, view: SizeView, to: int, condition: Condition, reason: Reason) -> AutoscaleState:
    """The state in which another size is wanted."""
    before = view.size or state.measurement.size
    cause = state.reasons if codes(state.reasons) == (AutoscaleCode.DRIFTED.code,) else ()
    state = replace(state, target=to, before=before, wish=0, changes=state.changes + 1, short_since=None)
    return _with(state, *cause, reason, condition=condition)


# What has happened.


def _follow(rules: AutoscaleRules, state: AutoscaleState, view: SizeView, now: float) -> AutoscaleState:
    """The state after what has happened: steps, the end of a round, a failure, a loss."""
    measurement = state.measurement
    trained = measurement.first_at is not None
    begins = state.started_at is None and view.size > 0
    ends = trained and (not view.size or view.round != measurement.round)
    if (begins or ends) and state.paused_at is None:
        state = replace(state, paused_at=now)
    if not view.size:
        return _note_failure(rules, state, view, now)
    # Nodes that leave before the first step have not stayed either.
    if measurement.round != view.round and view.size < state.target <= measurement.size:
        state = replace(state, losses=(*state.losses, now)[-MAX_LOSSES:])
    progress = view.progress
    if progress is not None and progress.steps > 0 and (measurement.round != view.round or not trained):
        if state.paused_at is not None and progress.at > state.paused_at:
            state = replace(state, pauses=(*state.pauses, progress.at - state.paused_at)[-MAX_PAUSES:])
        state = replace(state, paused_at=None)
        if state.started_at is None:
            state = replace(state, started_at=progress.at)
    record = find_record(state, view.size)
    slide = record is not None and record.blocks > 0
    after = observe(rules, measurement, view.round, view.size, progress, slide)
    return _note_failure(rules, replace(state, measurement=after), view, now)


def _note_failure(rules: AutoscaleRules, state: AutoscaleState, view: SizeView, now: float) -> AutoscaleState:
    """A failure counts against a size that was never measured, once another one was."""
    failure = view.failure
    if failure is None or failure.round <= state.failed_round:
        return state
    state = replace(state, failed_round=failure.round)
    record = find_record(state, failure.size) or SizeRecord(failure.size)
    if record.blocks or not any(one.blocks for one in state.table):
        return state
    crashes = min(record.crashes + 1, 100)
    again_at = now + (rules.retry if crashes == 1 else 2**MAX_DOUBLINGS * rules.retry)
    return remember(state, replace(record, crashes=crashes, again_at=again_at))


def _leave_failing(
    rules: AutoscaleRules, sizes: Sizes, state: AutoscaleState, view: SizeView, now: float
) -> AutoscaleState:
    """Go back from a size at which workers fail."""
    if state.target not in _failing(state, now):
        return state
    known = [
        one for one in state.table if one.blocks and one.size in sizes and one.size <= _highest(sizes, state, view, now)
    ]
    if not known:
        return state
    to = search.best_size(known, rules.efficiency, rules.tolerance).size
    return _change(state, view, to, Condition.CONTINUE, AutoscaleCode.CRASHED(size=state.target, to=to))


def _failing(state: AutoscaleState, now: float) -> list[int]:
    return [one.size for one in state.table if not one.blocks and one.crashes and now < one.again_at]


# Nodes that do not come.


def _highest(sizes: Sizes, state: AutoscaleState, view: SizeView, now: float) -> int:
    """The largest size that can be had. While nodes are missing, a job trains with those that are here, so it asks for
    none as long as workers fail at that size."""
    highest = min(sizes.most, state.ceiling.size) if now < state.ceiling.until else sizes.most
    meanwhile = sizes.below(view.present)
    return min(highest, sizes.below(meanwhile - sizes.unit)) if meanwhile in _failing(state, now) else highest


def _wait_for_nodes(
    rules: AutoscaleRules, sizes: Sizes, state: AutoscaleState, view: SizeView, now: float
) -> AutoscaleState:
    """Fewer nodes train than wanted: wait for others, and give them up if they do not come or do not stay."""
    since = now if state.short_since is None else state.short_since
    flaps = len(state.losses) == MAX_LOSSES and now - state.losses[0] < rules.retry
    if view.present >= state.target and not flaps:
        # The nodes are here, and the next round will have them.
        return replace(state, short_since=None)
    if (now - since < rules.node_timeout and not flaps) or view.size not in sizes:
        return replace(state, short_since=since)
    before = state.ceiling
    span = _doubled(rules.retry, before.refusals)
    refusals = before.refusals if before.refusals and now - before.until < span else 0
    seconds = _doubled(rules.retry, refusals)
    losses = (before.losses if refusals else 0) + bool(state.losses)
    ceiling = Ceiling(view.size, now + seconds, refusals + 1, losses)
    reason = AutoscaleCode.SHORTAGE(size=view.size, to=state.target)
    if not ceiling.is_lifted_by_nodes:
        reason = AutoscaleCode.UNSTABLE(size=view.size, to=state.target, seconds=seconds)
    unchanged = view.size == state.before and bool(state.changes)
    return _with(
        state,
        reason,
        target=view.size,
        wish=state.target if ceiling.is_lifted_by_nodes else 0,
        changes=state.changes - 1 if unchanged else state.changes,
        condition=Condition.STOP,
        ceiling=ceiling,
        short_since=None,
        losses=(),
    )


def _doubled(seconds: float, times: int) -> float:
    return float(seconds * 2 ** min(times, MAX_DOUBLINGS))


# What the measurements say.


def _finished(rules: AutoscaleRules, state: AutoscaleState) -> Estimate | None:
    """The estimate for the size that trains, if it is precise enough, or certainly worse or better than another one."""
    found = estimate(state.measurement.blocks)
    if found is None:
        return None
    if found.error <= PRECISE * rules.tolerance or state.measurement.measured >= rules.max_measure:
        return found
    known = [one for one in state.table if one.blocks]
    if not known or found.blocks < 2 * MIN_BLOCKS:
        return None
    best = search.best_size(known, rules.efficiency, rules.tolerance)
    here = search.utility(SizeRecord(state.measurement.size, found.rate), rules.efficiency)
    difference = here - search.utility(best, rules.efficiency)
    if abs(difference) < CERTAIN * math.hypot(found.error, best.error) + rules.drift:
        return None
    # A better size is compared with others, so it is measured more precisely than a worse one.
    return found if difference < 0 or found.error <= 2 * rules.tolerance else None


def _drifted(rules: AutoscaleRules, state: AutoscaleState, record: SizeRecord, now: float) -> AutoscaleState | None:
    """The state of another search, if the size does no longer what was measured."""
    blocks, least = state.measurement.blocks, math.log1p(rules.drift)
    if now < state.quiet_until or not state.quiet_until or not blocks:
        return None
    if record.rate - least < min(blocks) and max(blocks) < record.rate + least:
        # Whatever they average to, it is no drift.
        return None
    found = estimate(blocks)
    if found is None:
        return None
    change = found.rate - record.rate
    if abs(change) < least + CERTAIN * math.hypot(found.error, record.error):
        return None
    reason = AutoscaleCode.DRIFTED(size=record.size, ratio=round(math.exp(change), 2))
    fresh = SizeRecord(record.size, found.rate, found.error, found.blocks, now)
    return _with(state, reason, table=(fresh,), changes=0, condition=Condition.CONTINUE, quiet_until=0.0)


def _choose(rules: AutoscaleRules, sizes: Sizes, state: AutoscaleState, view: SizeView, now: float) -> AutoscaleState:
    """Choose among the sizes that can be had, and note what would be chosen if nodes came."""
    highest = _highest(sizes, state, view, now)
    after = _choose_size(rules, sizes, state, view, now, highest)
    wish = 0
    if highest < sizes.most and state.ceiling.is_lifted_by_nodes:
        wish = _choose_size(rules, sizes, state, view, now, sizes.most).target
    if wish <= after.target:
        return replace(after, wish=0)
    if after.condition is Condition.STOP:
        after = _with(after, AutoscaleCode.SHORTAGE(size=after.target, to=wish))
    return replace(after, wish=wish)


def _choose_size(
    rules: AutoscaleRules, sizes: Sizes, state: AutoscaleState, view: SizeView, now: float, highest: int
) -> AutoscaleState:
    """Try another size, go to the best one, or stay with it, of those up to `highest`."""
    here = view.size
    measured = [one for one in state.table if one.blocks and one.size in sizes]
    best = search.best_size(
        [one for one in measured if one.size <= max(here, highest)], rules.efficiency, rules.tolerance
    )
    pause = median(state.pauses) if state.pauses else USUAL_PAUSE
    horizon = max(rules.horizon, now - (state.started_at or 0.0)) if view.remaining is None else view.remaining
    failing = _failing(state, now)
    candidate = search.next_size(sizes, highest, measured, failing, rules.efficiency, best)
    waits = highest < sizes.most or any(one.crashes == 1 and one.size in failing for one in state.table)
    if state.condition is Condition.STOP and 0 < state.quiet_until <= now and not _waits_for_time(state):
        # Sizes that could not be had are tried again, as another search.
        state = replace(state, changes=0)
    # One change is kept for the way back.
    may_try = state.changes + 2 <= sizes.max_changes
    if candidate is not None and candidate.gain <= rules.tolerance:
        candidate = None
    too_long: Reason | None = None
    if candidate is not None and may_try:
        # What is learnt about a size pays from the end of its measurement on.
        learns = 0.0 if view.remaining is None else pause + rules.warm_up + MIN_BLOCKS * rules.block
        if candidate.gain * (horizon - learns) >= 2 * pause:
            reason = AutoscaleCode.TRYING(size=here, to=candidate.size)
            again = replace(state, quiet_until=0.0)
            return _change(again, view, candidate.size, Condition.CONTINUE, reason)
        too_long = AutoscaleCode.PAUSE(to=candidate.size, pause=round(pause, 1), horizon=float(f"{horizon:.1g}"))
    elif candidate is not None and state.condition is Condition.STOP:
        # It is tried as soon as another search may begin.
        waits = waits or not _waits_for_time(state)
    record = find_record(state, here)
    assert record is not None, "only a size that was measured is compared"
    gain = search.utility(best, rules.efficiency) - search.utility(record, rules.efficiency)
    if best.size != here and gain * horizon > pause:
        small, large = sorted((record, best), key=lambda one: one.size)
        reason = AutoscaleCode.CHANGING(
            size=here,
            to=best.size,
            ratio=round(math.exp(best.rate - record.rate), 3),
            efficiency=round(search.efficiency_of(small, large), 2),
            floor=rules.efficiency,
        )
        return _change(state, view, best.size, Condition.CONTINUE, reason)
    if waits or too_long is not None:
        known = state.reasons[0] if state.condition is Condition.STOP and state.reasons else _best_reason(state, here)
        return _with(_settle(rules, state, here, now), too_long or known, target=here, condition=Condition.STOP)
    is_largest = here == sizes.most
    reason = AutoscaleCode.LARGEST(size=here) if is_largest else _best_reason(state, here)
    condition = Condition.LARGEST if is_largest else Condition.BEST
    return _with(_settle(rules, state, here, now), reason, target=here, condition=condition)


def _waits_for_time(state: AutoscaleState) -> bool:
    """Whether the search goes on once the job has trained for long enough that a change pays."""
    return state.condition is Condition.STOP and codes(state.reasons) == (AutoscaleCode.PAUSE.code,)


def _settle(rules: AutoscaleRules, state: AutoscaleState, size: int, now: float) -> AutoscaleState:
    """The state once a search has ended with that size: another one begins later each time that it is confirmed."""
    if state.quiet_until and size == state.target == state.settled_size:
        return state
    confirmed = min(state.confirmed + 1, MAX_DOUBLINGS) if size == state.settled_size else 0
    return replace(state, settled_size=size, confirmed=confirmed, quiet_until=now + _doubled(rules.retry, confirmed))


def _best_reason(state: AutoscaleState, size: int) -> Reason:
    known = sorted(one.size for one in state.table if one.blocks)
    return AutoscaleCode.BEST(size=size, sizes=", ".join(map(str, known)))
