"""The mutation run: what it changes, and what it reports of a failure, an endless loop and a process that ends."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.harness import WAIT

from mutants.coverage_of_tests import Coverage
from mutants.operators import mutants_of, mutated
from mutants.results import (
    Result,
    Results,
    Row,
    branches_line,
    fallen_branches,
    keep_known,
    read_equivalent,
    read_rows,
    row,
    sole_killers,
    table,
)

SOURCE = '''
"""A module."""

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


def first(values: list[int], limit: int = 3) -> int | None:
    """The first value up to a limit."""
    log.debug("looking for %d", limit)
    for value in values:
        if value <= limit and not value < 0:
            return value
    return None


@dataclass
class Counted:
    number: int = 0

    @property
    def next(self) -> int:
        return self.number + 1

    def describe(self, name: str) -> str:
        assert name
        return f"{name}: {self.number}"
'''

CHANGES = """
first: operand removed: value <= limit and (not value < 0) -> not value < 0
first: operand removed: value <= limit and (not value < 0) -> value <= limit
first: and/or: value <= limit and (not value < 0) -> value <= limit or not value < 0
first: comparison: value <= limit -> value < limit
first: comparison: value <= limit -> value > limit
first: operator removed: not value < 0 -> value < 0
first: comparison: value < 0 -> value <= 0
first: comparison: value < 0 -> value >= 0
first: constant: 0 -> 1
first: return value: return value -> return None
Counted.next: return value: return self.number + 1 -> return None
Counted.next: arithmetic: self.number + 1 -> self.number - 1
Counted.next: constant: 1 -> 2
Counted.next: constant: 1 -> 0
Counted.describe: return value: return f'{name}: {self.number}' -> return None
"""


def test_the_changes_of_a_module_and_none_of_texts_defaults_or_annotations() -> None:
    changes = [mutant.name.partition("::")[2] for mutant in mutants_of("module.py", SOURCE)]
    assert sorted(changes) == sorted(CHANGES.strip().splitlines())


def test_each_change_gives_another_module_that_can_be_compiled() -> None:
    unchanged = ast.dump(ast.parse(SOURCE))
    for mutant in mutants_of("module.py", SOURCE):
        tree = mutated(SOURCE, mutant)
        compile(tree, "module.py", "exec")
        assert ast.dump(tree) != unchanged, mutant


def test_a_mutant_keeps_its_key_where_only_the_text_above_it_changes() -> None:
    def keys(text: str) -> list[str]:
        return [mutant.key for mutant in mutants_of("module.py", text)]

    assert keys(SOURCE) == keys(SOURCE.replace('"""A module."""', '"""A module."""\n\nNUMBER = 3'))
    assert len(set(keys(SOURCE))) == len(keys(SOURCE))
    changed = keys(SOURCE.replace("value < 0", "value < -1"))
    assert [key in changed for key in keys(SOURCE)] == ["first" not in key for key in keys(SOURCE)]


def test_a_result_that_was_cut_off_is_run_again_and_the_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path)
    results.add(Result("a", "killed", killers=("test",)))
    results.add(Result("b", "survived"))
    path.write_bytes(path.read_bytes()[:-5])
    assert Results(path).known == {"a": Result("a", "killed", killers=("test",))}


def test_a_test_is_alone_where_a_second_killer_was_asked_for_and_none_found() -> None:
    mutants = mutants_of("module.py", SOURCE)[:4]
    killers = [(("t1",), 2), (("t2", "t3"), 2), (("t4",), 1), ((), 2)]
    known = {
        mutant.key: Result(mutant.key, "killed" if tests else "survived", killers=tests, wanted=wanted)
        for mutant, (tests, wanted) in zip(mutants, killers, strict=True)
    }
    assert sole_killers(mutants, known) == ({"t1"}, 2)


def test_the_counts_of_a_module() -> None:
    mutants = mutants_of("module.py", SOURCE)
    results = [
        Result("", "killed", killers=("tests/mutants/seeds.py::s", "tests/decisions/a.py::t"), wanted=2),
        Result("", "killed", killers=("tests/backends/b.py::t",), ended="timeout"),
        Result("", "survived", whole=False),
        Result("", "survived"),
        Result("", "uncovered"),
        Result("", "invalid"),
    ]
    known = {mutant.key: result for mutant, result in zip(mutants, results, strict=False)}
    counts = row(mutants, known, {mutants[3].name: "a reason"}, (8, 6))
    assert (counts.mutants, counts.run, counts.killed) == (len(mutants) - 1, 5, 2)
    assert counts.by_layer == {"decisions": 1, "backends": 1}
    assert (counts.timeouts, counts.survived, counts.partly, counts.equivalent, counts.uncovered) == (1, 1, 1, 1, 1)
    page = table({"module.py": counts})
    assert "| module.py | 14 | 5 | 2 | 1 | 0 | 0 | 1 | 1 | 1 | 1 | 1 | 1 | 6/8 |" in page
    assert "5 of 14 mutants were run. Of those that are not equivalent 50.0 % were killed." in page
    assert "Of the branches that were counted 75.0 % were taken." in page


def test_a_module_with_more_branches_that_are_not_taken_is_reported() -> None:
    page = table({"a.py": Row(branches=10, taken=7), "b.py": Row(branches=10, taken=7), "gone.py": Row(branches=2)})
    branches = {"a.py": (12, 9), "b.py": (12, 8), "new.py": (5, 0)}
    assert fallen_branches(page, Coverage("", [], [], [], {}, branches)) == ["b.py: 8 of 12 branches, before 7 of 10"]


def test_what_was_found_on_another_machine_stays_in_the_table() -> None:
    counts = Counter({"decisions": 5, "tf": 0, "simulation": 1, "backends": 0})
    before = {"a.py": Row(10, 8, 6, counts, 1, 1, 1, 1, 0, 12, 11), "b.py": Row(5, branches=4, taken=2)}
    assert {name: rows for name, rows in read_rows(table(before)).items() if name in before} == before
    less = {"a.py": Row(11, 2, 2), "b.py": Row(5, 1, 1, branches=6, taken=5), "new.py": Row(3)}
    keep_known(less, before)
    kept = Row(11, 8, 6, counts, 1, 1, 1, 1, 0, 12, 11)
    assert less == {"a.py": kept, "b.py": Row(5, 1, 1, branches=6, taken=5), "new.py": Row(3)}
    assert "16 branches of the modules that decide, 13 (81.2 %)" in branches_line(table(before))


def test_an_equivalent_mutant_has_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.txt"
    file.write_text("# A comment.\n\na.py::f: constant: 1 -> 2 ## only ever compared with 0\n")
    assert read_equivalent(file) == {"a.py::f: constant: 1 -> 2": "only ever compared with 0"}


RUN = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
import subject
from mutants.operators import mutants_of
from mutants import planting

source = Path(subject.__file__).read_text()
by_change = {{mutant.change: mutant for mutant in mutants_of("subject.py", source)}}
tests = [
    lambda: subject.count(3) == 3,
    lambda: subject.Place(2).twice == 4,
]
planting.runs = lambda test: test()
planter = planting.Planter(Path(subject.__file__).parent, {{"subject.py": source}})
for change, found in {changes!r}:
    # Only where a timeout is expected are the timeouts short: a busy machine does not change what is found.
    short = "timeout" in found
    planting.MIN_CPU_SECONDS, planting.MIN_WALL_SECONDS = (1, 3.0) if short else (600, 600.0)
    print(planter.run(by_change[change], [0, 1], tests, [0.0, 0.0], 1), flush=True)
print(subject.count(3), subject.Place(2).twice, os.listdir("/proc/self/task") == [str(os.getpid())])
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""

SUBJECT = """
import os
import time


def count(end):
    number = 0
    while number < end:
        if number == 7:
            os._exit(3)
        number += 1
    if number > 100:
        time.sleep(600)
    return number


class Place:
    def __init__(self, number):
        self.number = number

    @property
    def twice(self):
        return self.number * 2
"""


def test_a_fork_finds_a_failure_an_endless_loop_a_crash_and_a_wait(tmp_path: Path) -> None:
    (tmp_path / "subject.py").write_text(SUBJECT)
    here = Path(__file__).parents[1]
    expected = {
        "arithmetic: self.number * 2 -> self.number / 2": "Found(killers=[1], ended='')",
        "statement removed: number += 1": "Found(killers=[0], ended='timeout')",
        "comparison: number == 7 -> number != 7": "Found(killers=[0], ended='crash')",
        "comparison: number > 100 -> number <= 100": "Found(killers=[0], ended='timeout')",
        "constant: 100 -> 101": "Found(killers=[], ended='')",
    }
    code = RUN.format(paths=[str(tmp_path), str(here), str(here.parent)], changes=list(expected.items()))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.stdout.splitlines() == [*expected.values(), "3 4 True", "no child"], done.stderr
