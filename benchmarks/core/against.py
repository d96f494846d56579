"""`--against TREE`: this checkout and another one in turn, each case and start method, as ratios of medians."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from core.ratios import SHARE, Comparison, Row, compare
from core.report import Result, Summary, Unit, figure, ratio_text, table
from core.trees import Tree

HEAD = ("case", "program", "there", "here", "ratio of medians", f"{SHARE:.0%} of draws", "each turn", "lost")


class HasTwin(Protocol):
    """A program that is compared. `of_tree` returns that of another checkout; None if it is not the project's."""

    @property
    def name(self) -> str: ...

    def of_tree(self, tree: Tree) -> HasTwin | None: ...


R = TypeVar("R", bound=HasTwin)


def with_twins(rivals: Iterable[R], tree: Tree) -> tuple[list[R], dict[str, str]]:
    """The project's own programs, each after that of the other checkout, and which is compared with which."""
    found: list[R] = []
    pairs: dict[str, str] = {}
    for rival in rivals:
        if (twin := rival.of_tree(tree)) is not None:
            found += [twin, rival]  # type: ignore[list-item]
            pairs[rival.name] = twin.name
    return found, pairs


@dataclass(frozen=True)
class Difference:
    """One figure of both checkouts. `turns` are the smallest and the greatest ratio of a turn."""

    case: str
    title: str
    unit: Unit
    comparison: Comparison
    turns: str
    lost: str

    def cells(self) -> list[str]:
        """Its row in the table."""
        one = self.comparison
        spread = " to ".join(ratio_text("lost" if ratio is None else ratio) for ratio in (one.low, one.high))
        values = (figure(None if value == float("inf") else value, self.unit) for value in (one.theirs, one.ours))
        ratio = ratio_text("lost" if one.ratio is None else one.ratio)
        return [self.case, self.title, *values, ratio, spread, self.turns, self.lost]


def differences(result: Result) -> list[Difference]:
    """The figures of a case that both checkouts have."""
    rows = {row.title: row for row in result.rows}
    found = []
    for rival, other in result.pairs.items():
        for title, row in rows.items():
            theirs = rows.get(other + title.removeprefix(rival)) if title.startswith(rival) else None
            if theirs is None or not row.samples:
                continue
            turns = " to ".join(map(ratio_text, row.spread)) if row.spread else "-"
            comparison = compare(list(zip(_ended(row), _ended(theirs), strict=False)))
            lost = f"{theirs.lost} and {row.lost} of {len(row.samples)}"
            found.append(Difference(result.name, title, result.unit, comparison, turns, lost))
    return found


def _ended(row: Row) -> list[float | None]:
    """The figures of the turns; None where the run was lost or did not end."""
    return [None if value is None or (row.limit and value >= row.limit) else value for value in row.samples]


def markdown(tree: Tree, summary: Summary) -> str:
    """The table of all cases."""
    machine = summary.cases[-1].machine if summary.cases else None
    rows = [one.cells() for result in summary.cases for one in differences(result)]
    lines = [f"# {summary.title}: here, as a ratio to {tree.name}", "", f"There: {tree.root}. Here: {machine}.", ""]
    return "\n".join([*lines, *table(HEAD, rows, (0, 1)), ""])
