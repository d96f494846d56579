"""What came of one run of the matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover_run.events.records import WorkerStalled
from dlrover_run.words.reasons import Reason, render
from stall_matrix.kinds import BY_NAME, GLOO, SCRIPT, Key

ONE_REPORT = 0.5
"""Seconds between the first and the last event of one report."""

OPERATION_PARAMS = (("operation", "number"), ("own", "own_number"))
"""The parameters of a reason that has operations, and their numbers."""

NO_RANK, NO_REPORT = "no rank", "no report"


@dataclass(frozen=True)
class Trial:
    """What came of one run. `seconds` from the fault to the report are None if there was none, `code` is why the
    `named` ranks were named, `function` where the first of them was found. `wrong_reports` came when nothing was
    wrong: before the fault, or of an innocent job; that lasted for `watched` seconds. `wrong` has their lines.
    `starved` is the share of the time from the fault to the report in which the launcher could have run and had no
    processor. `awaited` is the operation in which the other ranks wait, with its number, if the processes of the job
    answer which they have launched; `operation` is the one that the report names. `asked` counts how often
    they were asked before the fault."""

    fault: str
    ranks: int
    turn: int
    pause: float
    guilty: int
    seconds: float | None
    named: tuple[int, ...]
    code: str
    function: str
    wrong_reports: int
    watched: float
    wrong: tuple[str, ...] = ()
    starved: float = 0.0
    shape: str = GLOO
    awaited: str = ""
    operation: str = ""
    asked: int = 0

    @property
    def key(self) -> Key:
        return Key(self.fault, self.ranks, self.turn, self.pause, self.shape)

    @property
    def reported(self) -> str:
        """Why the rank was named, or that none was."""
        return NO_REPORT if self.seconds is None else self.code or NO_RANK

    @property
    def right_rank(self) -> bool:
        """Whether the guilty rank was named, and no other; of two ranks that wait for each other both may be, and of
        two nodes without a network between them the ranks of either."""
        fault = BY_NAME[self.fault]
        if fault.cuts:
            return bool(self.named)
        both = fault.mutual and self.ranks == 2
        return set(self.named) == {self.guilty} or (both and len(self.named) == 2)

    @property
    def right_operation(self) -> bool:
        """Whether the report names the operation in which the others wait."""
        return bool(self.awaited) and self.awaited in self.operation.split(", ")

    @property
    def right_line(self) -> bool:
        """Whether the line is one of the function in which the guilty rank hangs."""
        return self.right_rank and self.function in BY_NAME[self.fault].functions


def named_operation(reasons: Sequence[Reason]) -> str:
    """The operation that a report names, with its number; both, separated by a comma, of a report that names two."""
    params = next((one.params for one in reasons if "operation" in one.params), {})
    named = [(params[key], params.get(number)) for key, number in OPERATION_PARAMS if key in params]
    return ", ".join(f"{operation} {number}" for operation, number in named)


def trial_of(
    key: Key,
    guilty: int,
    fault_at: float,
    events: Sequence[WorkerStalled],
    watched: float,
    starved: float = 0.0,
    awaited: str = "",
    asked: int = 0,
) -> Trial:
    """The outcome of a run from the stalls in its event log; `fault_at` is infinite if nothing was wrong. Pure."""
    wrong = [event for event in events if event.mono < fault_at]
    after = [event for event in events if event.mono >= fault_at]
    first = [event for event in after if event.mono <= after[0].mono + ONE_REPORT]
    reasons = next((event.reasons for event in first if event.guilty), ())
    place: Mapping[str, object] = next((one.params for one in reasons if {"file", "function"} <= {*one.params}), {})
    here = str(place.get("file", "")).endswith(f"/{SCRIPT}")
    lines = {round(event.since, 3): "" for event in wrong}
    for event in wrong:
        if event.guilty:
            lines[round(event.since, 3)] = f"rank {event.rank} {render(event.reasons)}"
    return Trial(
        *key[:4],
        shape=key.shape,
        guilty=guilty,
        seconds=first[0].mono - fault_at if first else None,
        named=tuple(sorted(event.rank for event in first if event.guilty)),
        code=reasons[0].code.removeprefix("stall.") if reasons else "",
        function=str(place["function"]) if here else "",
        wrong_reports=len(lines),
        watched=watched,
        wrong=tuple(lines.values()),
        starved=round(starved, 2),
        awaited=awaited,
        asked=asked,
        operation=named_operation(reasons),
    )


def outcome(trial: Trial) -> str:
    """One line for the console."""
    named = " ".join(map(str, trial.named)) or "none"
    found = " ".join(word for word in (trial.code, trial.function, trial.operation) if word)
    at = "no report" if trial.seconds is None else f"{trial.seconds:.1f} s, rank {named}, {found}"
    wrong = "".join(f"; wrong report: {line or NO_RANK}" for line in trial.wrong)
    shape = "" if trial.shape == GLOO else f" {trial.shape}"
    return f"{trial.fault} {trial.ranks} {trial.turn}{shape}: guilty {trial.guilty}: {at}{wrong}"
