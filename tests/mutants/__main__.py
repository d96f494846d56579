"""Change the modules that decide in one place at a time, and see which tests find it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# As conftest.py has it, before a module of the tests is imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlrover_run.processes.tree import die_with_parent
from mutants.coverage_of_tests import Coverage
from mutants.operators import Mutant, mutants_of
from mutants.results import (
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
from mutants.run import known_coverage, run_group
from mutants.scope import CACHE, EQUIVALENT, GROUPS, ROOT, TABLE, modules


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--group", action="append", choices=GROUPS, help="a group of modules; may be repeated")
    parser.add_argument("--module", action="append", default=[], help="only modules below this path; may be repeated")
    narrow = "only these tests, in place of the group's; may be repeated. For a survivor that a new test is to find"
    parser.add_argument("--tests", action="append", default=[], help=narrow)
    budget = "begin no mutant after that many seconds, which the groups share"
    parser.add_argument("--budget", type=float, help=budget)
    parser.add_argument("--sample", type=int, help="run that many mutants of each group, drawn by chance")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    effort = "seconds of processor time for the tests of a layer against one mutant; a survivor is then run partly"
    parser.add_argument("--effort", type=float, default=30.0, help=effort)
    killers = "how many tests have to find a mutant; 2 shows which tests find one alone"
    parser.add_argument("--killers", type=int, default=1, help=killers)
    parser.add_argument("--survivors", action="store_true", help="run nothing, print the survivors that are known")
    check = "fail if a module has more branches that no test takes than results.md says"
    parser.add_argument("--check", action="store_true", help=check)
    branches = "run nothing, print the sentence on the branches of results.md"
    parser.add_argument("--branches", action="store_true", help=branches)
    parser.add_argument("--table", action="store_true", help="write all of results.md, unless the check fails")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.group = options.group or [name for name in GROUPS if modules(GROUPS[name], *options.module)]
    return options


def report(options: argparse.Namespace) -> int:
    """Print what is known, and write the table if it is asked for; returns the exit code."""
    known = Results(CACHE / "results.jsonl").known
    equivalent = read_equivalent(EQUIVALENT)
    names: set[str] = set()
    rows: dict[str, Row] = {}
    in_question: list[Mutant] = []
    fallen: list[str] = []
    tests: list[str] = []
    for group in GROUPS:
        measured = known_coverage(group) or Coverage("", [], [], [], {}, {})
        fallen += fallen_branches(TABLE.read_text(), measured) if options.check and TABLE.exists() else []
        shown = modules(GROUPS[group], *options.module) if group in options.group else {}
        tests += [test for test in measured.tests if shown and test not in tests]
        for name, text in modules(GROUPS[group]).items():
            mutants = mutants_of(name, text)
            names |= {mutant.name for mutant in mutants}
            if name in shown or options.table:
                rows[name] = row(mutants, known, equivalent, measured.branches.get(name, (0, 0)))
            if name in shown:
                in_question += mutants
    if options.survivors:
        for mutant in in_question:
            result = known.get(mutant.key)
            if result and result.status in ("survived", "uncovered") and mutant.name not in equivalent:
                print(f"{result.status}{'' if result.whole else ' (partly)'} line {mutant.lines[0]} {mutant.name}")
    if options.table and TABLE.exists():
        keep_known(rows, read_rows(TABLE.read_text()))
    page = table(rows)
    print(page)
    unknown = sorted(equivalent.keys() - names)
    for name in unknown:
        print(f"equivalent.txt names a mutant that does not exist: {name}")
    alone, asked = sole_killers(in_question, known)
    if asked:
        (CACHE / "never-alone.txt").write_text("".join(f"{test}\n" for test in tests if test not in alone))
        here = (CACHE / "never-alone.txt").relative_to(ROOT)
        print(f"of {len(tests)} tests {len(alone)} kill one of {asked} mutants alone; the others are in {here}")
    if fallen:
        print("fewer branches are taken than before:", *fallen, sep="\n")
    elif options.table:
        TABLE.write_text(page)
    return int(bool(unknown or fallen))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where tests cannot be collected, or fewer branches are taken than before."""
    options = parse(arguments)
    if options.branches:
        print(branches_line(TABLE.read_text()))
        return 0
    os.chdir(ROOT)
    if options.alone:
        die_with_parent(os.getppid())
        return run_group(options.group[-1], options)
    began = time.monotonic()
    failed = 0
    for place, group in enumerate(() if options.survivors else options.group):
        command = [sys.executable, "-m", "mutants", *arguments, "--alone", "--group", group]
        if options.budget is not None:
            left = options.budget - (time.monotonic() - began)
            command.append(f"--budget={max(0.0, left / (len(options.group) - place))}")
        try:
            failed |= subprocess.run(command, cwd=ROOT / "tests").returncode
        except KeyboardInterrupt:
            # The group has received it too, and has kept what it knows.
            failed = 130
            break
    return report(options) or failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
