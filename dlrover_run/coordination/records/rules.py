"""What is fixed for a job before it starts: how many nodes it may have, how often it may fail, how long it waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import msgspec

from dlrover_run.coordination.records.bounds import Count, Name
from dlrover_run.coordination.records.parts import PROGRAM, Part, check_parts

MAX_NODES = 20_000
"""More than any job has: a bound for what a stranger may request."""


LAST_CALL_TIMEOUT = 30.0
"""Seconds without a newcomer after which the first round starts with fewer than the most nodes (as torchrun)."""


JOIN_TIMEOUT = 600.0
"""Seconds that the first round waits for the fewest nodes before the job fails (as torchrun)."""


MASTER_TIMEOUT = 60.0
"""Seconds for which a node without running workers looks for a master that it has lost.

A master that is started again is back in a second, and its pod in less than a minute. Longer would only keep idle
accelerators from a scheduler that could start the job again; torchrun ends after four seconds.
"""


PEND_TIMEOUT = 600.0
"""Seconds that a job which has lost nodes waits for others to take their place before it fails."""


SCALE_WAIT = 60.0
"""Seconds for which a planned change waits for the next checkpoint at most."""


LOST_AFTER = 1.0
"""Seconds after the end of a node's connection at which the node counts as lost.

An agent whose connection broke while it lives connects again at once, so this only has to be longer than that takes.
Shorter would shrink the job for a hiccup of the network; longer delays the next round by as much.
"""


KEEP_ALIVE_INTERVAL = 3.0
"""Seconds between two signs of life on a connection."""


KEEP_ALIVE_ATTEMPTS = 3
"""Signs of life that may be missing before a silent connection counts as ended: 9 s with the default interval."""


CUT_OFF_TIMEOUT = 300.0
"""Seconds without an answer of the coordinator and of every other node after which a node ends, to be replaced. The
same as Kubernetes gives a pod on a node that it cannot reach; less than NCCL's own timeout, after which workers fail.
"""


EARLY_FAILURE_LIMIT = 5
"""Rounds that may fail one after the other, none of which got to work, before the job stops early."""


RESULT_RETENTION = 20.0
"""Seconds for which the result of a job is kept for nodes whose connection was broken when it ended.

One that comes later finds no job and begins a new one, which fails after `join_timeout` unless others come too. It is
shorter than `ID_IN_USE_TIMEOUT`, after which a newcomer that is refused gives up: until then a node of the next job of
that name is refused because of the result of this one.
"""


Kind = Literal["observer", "gate", "engine"]


class RulesPart(Part):
    """The part of `JobRules`."""

    __slots__ = ()

    kind: ClassVar[Kind] = "observer"
    """What the feature is in a decision, of which a job has one gate and one engine at most."""
    needs_rounds: ClassVar[bool] = False
    """Whether the feature acts on rounds of workers only. A job with another engine does not have it, and the engine
    may follow its rules."""
    chooses_size: ClassVar[bool] = False
    """Whether the feature may want fewer nodes than are here (`PlanPart.wanted_nodes`)."""
    flags: ClassVar[Mapping[str, str]] = {}
    """The flag of each rule that has one."""
    per_node: ClassVar[frozenset[str]] = frozenset()
    """The rules that may differ between the nodes of a job, so that a difference is no mismatch."""
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {}
    """What the user writes for a number, where that is a word."""

    @property
    def applies(self) -> bool:
        """Whether a job with these rules has the feature."""
        return True

    def problem(self) -> str | None:
        """A sentence when no job can have these rules, else None."""
        return None

    def job_size(self) -> str | None:
        """How large the job is, as text, where that is not a number of nodes."""
        return None


def applies(rules: Iterable[RulesPart], feature: str) -> bool:
    """Whether a job with these rules has that feature, which need not be imported to know."""
    return any(part.feature == feature and part.applies for part in rules)


class DesiredSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many nodes a round has at the request of an operator, within what the job was started with. `by` is who asked
    for it, for people. If it is `fixed`, no feature may choose fewer."""

    min_nodes: Count
    max_nodes: Count
    by: Name = ""
    fixed: bool = False


class JobRules(msgspec.Struct, frozen=True):
    """The rules of one job. Those of the first node that joins hold for all of it.

    A round has `min_nodes` to `max_nodes` nodes, a multiple of `node_unit`; nodes beyond that are spares, of which
    `spares` are requested. `max_restarts` counts failures of workers, in the last `restart_window` seconds or, with 0,
    in the whole job. A newcomer to a running job starts a new round after `scale_up_delay` seconds, together with those
    that came meanwhile. In a job that marks checkpoints a planned change waits for the next one, for `scale_wait`
    seconds at most. `early_failure_limit` 0 is no limit. `store` is (address, port) when flags name the place of the
    workers' store, else None: then the node with rank 0 offers a port that it holds. The loss of a node may stay
    unknown for `detection_delay` seconds: a lease's time where the records live under leases, 0 where a connection ends
    with the node.

    A node without running workers ends when a master that it had reached is away for `master_timeout` seconds.

    A node ends when it has reached neither the coordinator nor another node for `cut_off_timeout` seconds, 0 for never.

    `parts` are the rules of the job's features. `wanted_nodes` is how many nodes a round has
    at most because a feature wants no more, 0 where none says so; no flag sets it.

    All times are seconds.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    spares: int = 0
    max_restarts: int = 0
    restart_window: float = 0.0
    early_failure_limit: int = EARLY_FAILURE_LIMIT
    last_call_timeout: float = LAST_CALL_TIMEOUT
    join_timeout: float = JOIN_TIMEOUT
    pend_timeout: float = PEND_TIMEOUT
    scale_up_delay: float = 0.0
    scale_wait: float = SCALE_WAIT
    lost_after: float = LOST_AFTER
    keep_alive_interval: float = KEEP_ALIVE_INTERVAL
    keep_alive_attempts: int = KEEP_ALIVE_ATTEMPTS
    cut_off_timeout: float = CUT_OFF_TIMEOUT
    master_timeout: float = MASTER_TIMEOUT
    detection_delay: float = 0.0
    store: tuple[str, int] | None = None
    parts: tuple[RulesPart, ...] = ()
    wanted_nodes: int = 0

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def engine(self) -> str:
        """The feature that decides what the nodes run, in place of rounds of workers; empty in a job with rounds."""
        return next((part.feature for part in self.parts if part.applies and part.kind == "engine"), "")

    @property
    def program(self) -> str:
        """The program that starts such a job."""
        return next((part.program for part in self.parts if part.program != PROGRAM), PROGRAM)

    @property
    def size_text(self) -> str | None:
        """How large the job is, as text, where that is not a number of nodes."""
        return next((size for part in self.parts if (size := part.job_size()) is not None), None)

    def size(self, nodes: int) -> int:
        """How many of that many nodes a round has: 0 when they are too few for one."""
        most = self.max_nodes
        if self.wanted_nodes:
            # A range that has just changed may exclude what was wanted before.
            most = min(most, max(self.wanted_nodes, self.min_size))
        size = min(nodes, most) // self.node_unit * self.node_unit
        return size if size >= self.min_nodes else 0

    def resized(self, size: DesiredSize | None, wanted_nodes: int = 0) -> JobRules:
        """The rules with that size of a round, of which a feature wants `wanted_nodes`, 0 for as many as possible."""
        if size is None and wanted_nodes == self.wanted_nodes:
            return self
        least, most = (self.min_nodes, self.max_nodes) if size is None else (size.min_nodes, size.max_nodes)
        return msgspec.structs.replace(self, min_nodes=least, max_nodes=most, wanted_nodes=wanted_nodes)

    @property
    def max_size(self) -> int:
        """The most nodes that a round ever has."""
        return self.size(self.max_nodes)

    @property
    def min_size(self) -> int:
        """The fewest nodes that a round ever has."""
        return -(-self.min_nodes // self.node_unit) * self.node_unit

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds of silence after which a connection counts as ended."""
        return self.keep_alive_interval * self.keep_alive_attempts

    @property
    def blame_delay(self) -> float:
        """Seconds that the failure of a worker which only lost a peer waits for what that peer died of.

        The peer's node may have vanished with it. That is known after `detection_delay` seconds and some moments, and
        the node is lost `lost_after` later; twice that leaves as much for the moments.
        """
        return self.detection_delay + 2 * self.lost_after

    def problem(self) -> str | None:
        """A sentence when no job could have these rules, else None."""
        if not 1 <= self.min_nodes <= self.max_nodes <= MAX_NODES:
            nodes = f"{self.min_nodes} to {self.max_nodes}"
            return f"a job has 1 to {MAX_NODES} nodes, and MIN may not be above MAX: not {nodes}"
        if self.node_unit < 1 or not self.size(self.max_nodes):
            return f"no multiple of {self.node_unit} lies between {self.min_nodes} and {self.max_nodes} nodes"
        if not all_finite(msgspec.structs.astuple(self)):
            return NOT_FINITE
        if self.keep_alive_interval <= 0 or self.keep_alive_attempts < 1:
            return "signs of life need an interval and an attempt"
        kinds = [part.kind for part in self.parts if part.applies]
        if kinds.count("engine") > 1 or kinds.count("gate") > 1:
            return "two features of one job each decide alone what its nodes run, or which of them may"
        return next((problem for part in self.parts if (problem := part.problem()) is not None), None)


NOT_FINITE = "a time or a count is below 0 or not finite"
"""What is wrong with rules whose numbers are not `all_finite`."""


def all_finite(values: Iterable[object]) -> bool:
    """Whether all numbers among the values are finite and at least 0."""
    return all(0 <= value < math.inf for value in values if isinstance(value, int | float))
