"""What is fixed for a job that scales itself before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import NOT_FINITE, RulesPart, all_finite
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport, AutoscaleState, Sizes

OFF, WEAK, STRONG = 0, 1, 2
"""Whether each worker keeps its batch when the job grows (weak), or the batch of the job is divided (strong)."""


TUNABLE = ("efficiency", "tolerance", "max_batch", "block", "warm_up", "node_timeout", "retry", "command_timeout")
"""The rules that a key of `--rdzv-conf` sets, whose names begin with `autoscale_`."""


class AutoscaleRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="autoscale"):
    """What a size has to give, and how long it is measured.

    `efficiency` is the share of a larger size that has to become throughput: 1 if twice the nodes have to do twice the
    work, 0 if any gain is enough. A size of n nodes with throughput T has the utility T / n**efficiency, and the size
    with the greatest utility is wanted. Differences of less than `tolerance` do not matter.

    `scaling` is `WEAK` or `STRONG`, which matters in jobs that count no samples, or `OFF` in a job of a fixed size. The
    batch of a job that scales weakly grows with it; `max_batch` limits it to that many times the batch of the smallest
    size, 0 for no limit.

    A size is measured in blocks of at least `block` seconds, without its first `warm_up` seconds, for at most
    `max_measure` seconds. Nodes that have not come after `node_timeout` seconds are given up for `retry` seconds, and
    for twice as long each further time. `command` is 1 if the nodes have a command that starts and ends nodes, which is
    stopped after `command_timeout` seconds. A change of the throughput by more than `drift` begins another search.
    `horizon` is for how many seconds a job trains at least, as far as is known.
    """

    efficiency: float = 0.5
    tolerance: float = 0.025
    scaling: int = OFF
    max_batch: float = 0.0
    block: float = 10.0
    warm_up: float = 10.0
    max_measure: float = 1800.0
    node_timeout: float = 60.0
    retry: float = 1800.0
    command: int = 0
    command_timeout: float = 30.0
    drift: float = 0.2
    horizon: float = 3600.0

    needs_rounds: ClassVar[bool] = True
    chooses_size: ClassVar[bool] = True
    flags: ClassVar[Mapping[str, str]] = {
        "scaling": "--autoscale",
        "command": "--scale-command",
        **{name: f"autoscale_{name}" for name in TUNABLE},
    }
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {
        "scaling": {OFF: "off", WEAK: "weak", STRONG: "strong"},
        "command": {0: "off", 1: "on"},
    }

    @property
    def applies(self) -> bool:
        return self.scaling != OFF

    def problem(self) -> str | None:
        if not all_finite(msgspec.structs.astuple(self)):
            return NOT_FINITE
        if self.efficiency > 1 or self.scaling > STRONG or not 0 < self.tolerance < 1 or self.drift <= self.tolerance:
            return "the autoscaler needs an efficiency of 0 to 1, a known scaling, and a drift above its tolerance"
        if self.block <= 0 or self.retry <= 0 or self.command_timeout <= 0 or 0 < self.max_batch < 1:
            return "the autoscaler needs times above 0, and a limit of the batch of at least 1"
        return None

    def allowed(self, fewest: int, most: int, unit: int) -> Sizes:
        """The sizes that the autoscaler may choose, of a job that may have `fewest` to `most` nodes, a multiple of
        `unit`. At least one multiple must lie between them."""
        first = -(-fewest // unit) * unit
        if self.scaling != STRONG and self.max_batch:
            most = min(most, max(first, int(first * self.max_batch)))
        return Sizes(first, most // unit * unit, unit)


RECORDS = (AutoscaleRules, AutoscaleState, AutoscaleNodeReport, AutoscaleAssignment)
