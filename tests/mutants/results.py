"""What became of each mutant, and the table of it."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from mutants.coverage_of_tests import Coverage
from mutants.operators import Mutant
from mutants.scope import LAYERS, ROOT, layer


class Result(msgspec.Struct, omit_defaults=True):
    """`status` is killed, survived, uncovered or invalid. `killers` are the tests that failed, in the order in which
    they ran, and `ended` is "timeout" or "crash" where the last of them ended the process. `tests` is the digest of
    the tests that cover the mutant, and of their files; `whole` whether all of them ran, or as many as it took to find
    `wanted` killers."""

    key: str
    status: str
    tests: str = ""
    killers: tuple[str, ...] = ()
    ended: str = ""
    whole: bool = True
    wanted: int = 1


class Results:
    """A file of results, one a line, to which each is added as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(Result)
        self.known: dict[str, Result] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    result = self._decoder.decode(line)
                except msgspec.DecodeError:
                    # The run was ended while it wrote its last line.
                    continue
                self.known[result.key] = result

    def add(self, result: Result) -> None:
        """Keep a result."""
        self.known[result.key] = result
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")


class Row(msgspec.Struct):
    """The counts of one module, or of all."""

    mutants: int = 0
    run: int = 0
    killed: int = 0
    by_layer: Counter[str] = msgspec.field(default_factory=Counter)
    timeouts: int = 0
    equivalent: int = 0
    survived: int = 0
    partly: int = 0
    uncovered: int = 0
    branches: int = 0
    taken: int = 0

    def add(self, other: Row) -> None:
        """Add the counts of a module."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def row(
    mutants: Iterable[Mutant], known: Mapping[str, Result], equivalent: Mapping[str, str], branches: tuple[int, int]
) -> Row:
    """The counts of one module. A mutant that cannot be planted is none."""
    counts = Row(branches=branches[0], taken=branches[1])
    for mutant in mutants:
        result = known.get(mutant.key)
        if result is not None and result.status == "invalid":
            continue
        counts.mutants += 1
        if result is None:
            continue
        counts.run += 1
        if result.status == "killed":
            counts.killed += 1
            counts.timeouts += result.ended == "timeout"
            counts.by_layer[list(LAYERS)[min(layer(killer) for killer in result.killers)]] += 1
        elif mutant.name in equivalent:
            counts.equivalent += 1
        else:
            counts.uncovered += result.status == "uncovered"
            counts.survived += result.status == "survived"
            counts.partly += not result.whole
    return counts


def table(rows: Mapping[str, Row]) -> str:
    """The page of the results."""
    total = Row()
    for counts in rows.values():
        total.add(counts)
    commit = _git("log", "-1", "--format=%h of %cs")
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`; what it does is in [README](../README.md#mutants).",
        "",
        f"Written at commit {commit}; the counts of a module may be older. "
        f"{total.run:,} of {total.mutants:,} mutants were run. Of those that are not equivalent "
        f"{_share(total.killed, total.run - total.equivalent)} were killed. Of the branches that were counted "
        f"{_share(total.taken, total.branches)} were taken.",
        "",
        "A mutant counts for the first layer that finds it; the layers are run in the order of the columns. *Timeouts* "
        "are among the killed. *Partly* are those of the survived and not covered against which not all tests of the "
        "group were run, so the share that was killed is a lower bound.",
        "",
        "| module | mutants | run | killed | " + " | ".join(LAYERS) + " | timeouts | equivalent | survived | partly | "
        "not covered | branches taken |",
        "|---|" + "---:|" * (9 + len(LAYERS)),
    ]
    for name, counts in (*rows.items(), (SUM, total)):
        layers = " | ".join(str(counts.by_layer[each]) for each in LAYERS)
        branches = f"{counts.taken}/{counts.branches}"
        lines.append(
            f"| {name} | {counts.mutants} | {counts.run} | {counts.killed} | {layers} | {counts.timeouts} | "
            f"{counts.equivalent} | {counts.survived} | {counts.partly} | {counts.uncovered} | {branches} |"
        )
    return "\n".join(lines) + "\n"


SUM = "**sum**"


def read_rows(page: str) -> dict[str, Row]:
    """The counts of each module on a page of results, and of all under `SUM`."""
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 + len(LAYERS) and "/" in cells[-1]:
            mutants, run, killed, *layers = map(int, cells[1 : 4 + len(LAYERS)])
            taken, branches = map(int, cells[-1].split("/"))
            by_layer = Counter(dict(zip(LAYERS, layers, strict=True)))
            rows[cells[0]] = Row(mutants, run, killed, by_layer, *map(int, cells[-6:-1]), branches, taken)
    return rows


def keep_known(rows: Mapping[str, Row], before: Mapping[str, Row]) -> None:
    """Take the counts of a page into the rows where this checkout knows less: the results of each mutant, which are not
    in git, were on another machine. A module counts as on the page until as many of its mutants were run here."""
    for name, counts in rows.items():
        old = before.get(name, Row())
        if counts.run < old.run:
            branches, mutants = (counts.branches, counts.taken), counts.mutants
            for field in counts.__struct_fields__:
                setattr(counts, field, getattr(old, field))
            counts.mutants, (counts.branches, counts.taken) = mutants, branches
        if not counts.branches:
            counts.branches, counts.taken = old.branches, old.taken


def sole_killers(mutants: Iterable[Mutant], known: Mapping[str, Result]) -> tuple[set[str], int]:
    """The tests that alone kill a mutant, and how many mutants were asked for a second killer."""
    asked = [
        result
        for mutant in mutants
        if (result := known.get(mutant.key)) is not None and result.status == "killed" and result.wanted > 1
    ]
    return {result.killers[0] for result in asked if len(result.killers) == 1 and not result.ended}, len(asked)


def fallen_branches(page: str, measured: Coverage) -> list[str]:
    """The modules of which fewer branches are taken than the page says, for a module that has as many as then."""
    fallen = []
    for name, before in read_rows(page).items():
        branches, taken = measured.branches.get(name, (0, 0))
        # A change of the module may add branches or remove some, so the number not taken is what may not rise.
        if before.branches and branches - taken > before.branches - before.taken:
            fallen.append(f"{name}: {taken} of {branches} branches, before {before.taken} of {before.branches}")
    return fallen


def branches_line(page: str) -> str:
    """The sentence on the branches of all modules, for those who run the tests."""
    total = read_rows(page)[SUM]
    return (
        f"Of the {total.branches:,} branches of the modules that decide, {total.taken:,} "
        f"({_share(total.taken, total.branches)}) were taken when make coverage measured them last; it fails if a "
        "module has more that are not."
    )


def read_equivalent(path: Path) -> dict[str, str]:
    """The mutants that change nothing which a test could show, each with the reason: `name ## reason` on a line."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(" ## ") for line in lines if line and not line.startswith("#"))
    return {name.strip(): reason.strip() for name, _, reason in pairs}


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
