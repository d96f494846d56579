"""Decides whether a job that chooses its own size should have another parameter server. Pure, and idempotent.

One is added while the processors or the memory of the servers are the limit, and none is ever taken away. Whether
another one helps cannot be known before it is there: a hot table stays on one server. So an addition for the processors
is compared with the throughput before it, at the same number of workers, and more follow only if it was worth a node.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from dlrover_run.features.autoscale.measure import Estimate
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.words.reasons import Reason
from tf_ps_runner.cluster.choice import Baseline, ServersChoice
from tf_ps_runner.cluster.size_text import ServersCode

HIGH = 80
"""Percent of their processors, or of the memory of one of them, above which the servers are the limit."""

LASTING = 3.0
"""How many blocks of a measurement that has to last: a checkpoint takes processors and memory too."""

ROUNDING = 5
"""Percent to which the load is rounded in the plan."""

MAX_DOUBLINGS = 6
"""How often the time to the next addition is doubled at most."""


class ServersView(NamedTuple):
    """The servers now: `servers` are in version `version`, `most` are allowed, also by the tables of the model, and
    there is room for `room`. With them `size` tasks train, 0 while that changes, with the throughput `rate`, None
    before it is known. `processor` and `memory` are the percents of the busiest, None before a report. They cannot be
    changed unless the job is `steady` and new servers may be tried (`may_try`)."""

    version: int
    servers: int
    most: int
    room: int
    size: int
    steady: bool
    may_try: bool
    processor: int | None = None
    memory: int | None = None
    rate: Estimate | None = None


def decide_servers(rules: AutoscaleRules, state: ServersChoice, view: ServersView, now: float) -> ServersChoice:
    """What is wanted of the servers now. `now` is the job time, in seconds."""
    state = _note_load(state, view, now)
    if not view.steady:
        return state
    if state.target < view.servers:
        # Those that an operator has asked for, or that the tables need, are not taken away.
        state = replace(state, target=view.servers)
    if state.target > view.servers:
        if view.may_try and state.target <= view.most:
            return state
        return _with(state, _why_no_more(view), target=view.servers, baseline=None, lacking=0)
    if not view.size:
        return state
    state = _compare(rules, state, view, now)
    share, code = _limit(rules, state, view, now)
    if code is None:
        # What was found of an addition is worth reading until the next one.
        kept = ServersCode.WORTH.within(state.reasons) or ServersCode.NOT_WORTH.within(state.reasons)
        is_known = view.processor is not None or view.memory is not None
        return replace(state, lacking=0) if kept or not is_known else _with(state, _load(state), lacking=0)
    wanted = view.servers + 1
    if wanted > view.most or not view.may_try:
        return _with(state, _why_no_more(view), lacking=0)
    if wanted > view.room:
        return _with(state, ServersCode.NO_ROOM(size=view.servers, to=wanted), lacking=wanted)
    baseline = None
    if code is ServersCode.PROCESSOR:
        if view.rate is None:
            # The throughput before the addition has to be known.
            return state
        baseline = Baseline(view.servers, view.size, view.rate.rate, view.rate.error)
    reason = code(share=share, size=view.servers, to=wanted)
    return _with(state, reason, target=wanted, baseline=baseline, lacking=0)


def awaits_measurement(rules: AutoscaleRules, state: ServersChoice, view: ServersView, now: float) -> bool:
    """Whether the throughput of the present size has to be known for a server that is to be added, or was added, so
    that this size must not change."""
    if not view.size or view.rate is not None:
        return False
    if state.baseline is not None:
        return state.baseline.size == view.size
    _, code = _limit(rules, state, view, now)
    return code is ServersCode.PROCESSOR and view.servers < min(view.most, view.room) and view.may_try


def _with(state: ServersChoice, reason: Reason, **changes: object) -> ServersChoice:
    return replace(state, reasons=(reason,), **changes)


def _why_no_more(view: ServersView) -> Reason:
    # The tables of the model may have turned out to exclude more.
    code = ServersCode.MOST if view.may_try else ServersCode.FAILED
    return code(size=view.servers)


def _note_load(state: ServersChoice, view: ServersView, now: float) -> ServersChoice:
    if state.version != view.version:
        state = replace(state, version=view.version, processor=None, memory=None, busy_since=None)
    state = replace(state, processor=_rounded(view.processor), memory=_rounded(view.memory))
    if max(view.processor or 0, view.memory or 0) < HIGH:
        return replace(state, busy_since=None)
    return state if state.busy_since is not None else replace(state, busy_since=now)


def _rounded(percent: int | None) -> int | None:
    """The figure that is stored, which does not change with each report."""
    return None if percent is None else ROUNDING * round(percent / ROUNDING)


def _limit(
    rules: AutoscaleRules, state: ServersChoice, view: ServersView, now: float
) -> tuple[int, ServersCode | None]:
    """Of what the servers use too much, and how much."""
    if state.busy_since is None or now - state.busy_since < LASTING * rules.block:
        return 0, None
    if (view.memory or 0) >= HIGH:
        return view.memory or 0, ServersCode.MEMORY
    if state.baseline is not None or now < state.quiet_until:
        return 0, None
    return view.processor or 0, ServersCode.PROCESSOR


def _compare(rules: AutoscaleRules, state: ServersChoice, view: ServersView, now: float) -> ServersChoice:
    """The state once it is known what the last addition for the processors was worth."""
    before = state.baseline
    if before is None or view.rate is None:
        return state
    if before.size != view.size or before.servers + 1 != view.servers:
        # Another number of workers trains by now, so it will never be known.
        return replace(state, baseline=None)
    gain = view.rate.rate - before.rate
    # A server counts like any other task: with this gain the throughput keeps pace with their number.
    tasks = before.size + before.servers
    needed = rules.efficiency * math.log((tasks + 1) / tasks)
    values = {"size": before.servers, "to": view.servers, "ratio": round(math.exp(gain), 3)}
    if gain >= needed - min(rules.tolerance / 2, math.hypot(before.error, view.rate.error)):
        return _with(state, ServersCode.WORTH(**values), baseline=None, refusals=0)
    seconds = float(rules.retry * 2 ** min(state.refusals, MAX_DOUBLINGS))
    refused = ServersCode.NOT_WORTH(**values, seconds=seconds)
    return _with(state, refused, baseline=None, refusals=state.refusals + 1, quiet_until=now + seconds)


def _load(state: ServersChoice) -> Reason:
    if state.busy_since is None:
        return ServersCode.IDLE()
    return ServersCode.BUSY(processor=state.processor or 0, memory=state.memory or 0)
