"""Change the modules that decide in one place at a time, and see which tests find it."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, settings
from owned_directory import OwnedDirectory

from mutants.coverage_of_tests import Coverage, measure
from mutants.operators import Mutant, mutants_of
from mutants.planting import Planter, in_a_fork
from mutants.results import Result, Results, Row, fallen_branches, read_equivalent, row, sole_killers, table
from mutants.scope import CACHE, EQUIVALENT, ROOT, TABLE, TESTS, layer, modules

# Nothing is learned from the examples of mutants, and a smaller example of a failure is not asked for. The seeds are
# the same each time, so that a mutant is.
settings.register_profile(
    "mutants", deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="the tests to run, in place of those of scope.py")
    parser.add_argument("--module", action="append", default=[], help="modules below this path; may be repeated")
    parser.add_argument("--budget", type=float, help="begin no mutant after that many seconds")
    parser.add_argument("--sample", type=int, help="run that many mutants, drawn by chance")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    effort = "seconds of processor time for the tests of one mutant, without which a survivor counts as partly run"
    parser.add_argument("--effort", type=float, default=30.0, help=effort)
    killers = "how many tests have to find a mutant; 2 shows which tests find one alone"
    parser.add_argument("--killers", type=int, default=1, help=killers)
    parser.add_argument("--survivors", action="store_true", help="run nothing, print the survivors")
    parser.add_argument("--table", action="store_true", help="write results.md, and fail if fewer branches are taken")
    return parser.parse_args(arguments)


class MutationRun:
    """A plug-in of pytest that runs mutants in place of the tests. `code` is the exit code."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._sources = modules()
        self._results = Results(CACHE / "results.jsonl")
        self._equivalent = read_equivalent(EQUIVALENT)
        self._began = time.monotonic()
        self._digests: dict[str, str] = {}
        self.code = 0
        self.mutants = {name: mutants_of(name, text) for name, text in self._sources.items()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the mutants; called once all tests are collected."""
        if session.testsfailed:
            self.code = 1
            return True
        planter = Planter(ROOT, self._sources)
        measured = self._measure(session.items)
        by_name = {item.nodeid: item for item in session.items}
        items = [by_name[test] for test in measured.tests]
        for test in measured.failed:
            print(f"fails without a mutant, and is left out: {test}")
        try:
            self._run(planter, measured, items)
        except KeyboardInterrupt:
            print("interrupted; what is known is kept")
            self.code = 130
        self._report(measured)
        return True

    def _measure(self, items: list[pytest.Item]) -> Coverage:
        """The coverage of these tests, from the last run if nothing has changed since."""
        key = hashlib.sha256()
        for path in _what_coverage_depends_on():
            key.update(f"{path} {_digest_of_file(path)}\n".encode())
        key.update("\n".join(item.nodeid for item in items).encode())
        tests = hashlib.sha256(" ".join(self._options.tests).encode()).hexdigest()[:8]
        path = CACHE / f"coverage-{tests}.json"
        if path.exists():
            known = msgspec.json.decode(path.read_bytes(), type=Coverage)
            if known.key == key.hexdigest():
                return known
        began = time.monotonic()

        def work() -> None:
            path.write_bytes(msgspec.json.encode(measure(key.hexdigest(), items, ROOT, self._sources)))

        CACHE.mkdir(exist_ok=True)
        in_a_fork(work)
        measured = msgspec.json.decode(path.read_bytes(), type=Coverage)
        print(
            f"{len(measured.tests)} tests took {sum(measured.seconds):.0f} s of processor time with their coverage, "
            f"{time.monotonic() - began:.0f} s by the clock"
        )
        return measured

    def _run(self, planter: Planter, measured: Coverage, items: Sequence[pytest.Item]) -> None:
        chosen = [mutant for mutant in self._in_question() if self._is_open(mutant, measured)]
        if self._options.survivors:
            return
        if self._options.sample is not None:
            everything = self._in_question()
            drawn = random.Random(self._options.seed).sample(everything, min(len(everything), self._options.sample))
            chosen = [mutant for mutant in drawn if mutant in set(chosen)]
        print(f"{len(chosen)} mutants to run", flush=True)
        breadth = Counter(test for lines in measured.lines.values() for tests in lines.values() for test in tests)
        kills: Counter[tuple[str, str, int]] = Counter()
        counts: Counter[str] = Counter()
        for place, mutant in enumerate(chosen):
            if self._options.budget is not None and time.monotonic() - self._began > self._options.budget:
                print(f"the budget is spent; {len(chosen) - place} mutants are left")
                break
            covering = _covering(measured, mutant)
            place_of = partial(_order, mutant, measured, breadth, kills)
            tests, whole = self._affordable(sorted(covering, key=place_of), measured)
            result = Result(mutant.key, "uncovered", self._digest(covering, measured), wanted=self._options.killers)
            if tests:
                found = planter.run(mutant, tests, items, measured.seconds, self._options.killers)
                if found is None:
                    result.status = "invalid"
                else:
                    result.killers = tuple(measured.tests[test] for test in found.killers)
                    result.status = "killed" if found.killers else "survived"
                    result.ended = found.ended
                    result.whole = whole or len(found.killers) >= self._options.killers or bool(found.ended)
                    kills.update((mutant.module, mutant.function, test) for test in found.killers)
            counts[result.status] += 1
            self._results.add(result)
            if place % 50 == 49:
                print(f"{place + 1}/{len(chosen)} {dict(counts)} {time.monotonic() - self._began:.0f} s", flush=True)

    def _in_question(self) -> list[Mutant]:
        prefixes = tuple(self._options.module)
        return [
            mutant
            for name, mutants in self.mutants.items()
            if not prefixes or name.startswith(prefixes)
            for mutant in mutants
        ]

    def _is_open(self, mutant: Mutant, measured: Coverage) -> bool:
        """Whether it has to be run: never, or with other tests, and it was not killed by one that is still there."""
        known = self._results.known.get(mutant.key)
        if known is None or known.status == "invalid":
            return known is None
        if known.status == "killed" and known.wanted >= self._options.killers:
            return False
        return known.tests != self._digest(_covering(measured, mutant), measured) or (
            known.wanted < self._options.killers and known.status == "killed"
        )

    def _affordable(self, tests: list[int], measured: Coverage) -> tuple[list[int], bool]:
        """As many of the tests as the effort allows, and whether these are all."""
        spent, afforded = 0.0, []
        for test in tests:
            spent += measured.seconds[test]
            if afforded and spent > self._options.effort:
                return afforded, False
            afforded.append(test)
        return afforded, True

    def _digest(self, tests: set[int], measured: Coverage) -> str:
        names = sorted(measured.tests[test] for test in tests)
        files = sorted({name.partition("::")[0] for name in names})
        for file in files:
            if file not in self._digests:
                self._digests[file] = _digest_of_file(ROOT / file)
        return hashlib.sha256("\n".join([*names, *(self._digests[file] for file in files)]).encode()).hexdigest()[:12]

    def _report(self, measured: Coverage) -> None:
        known = self._results.known
        in_question = self._in_question()
        rows: dict[str, Row] = {}
        for name, mutants in self.mutants.items():
            rows[name] = row(mutants, known, self._equivalent, measured.branches[name])
        if self._options.survivors:
            for mutant in in_question:
                result = known.get(mutant.key)
                if result and result.status in ("survived", "uncovered") and mutant.name not in self._equivalent:
                    print(f"{result.status}{'' if result.whole else ' (partly)'} line {mutant.lines[0]} {mutant.name}")
        shown = {name: counts for name, counts in rows.items() if any(each.module == name for each in in_question)}
        page = table(shown, self._options.tests)
        print(page)
        for name in self._equivalent.keys() - {mutant.name for mutants in self.mutants.values() for mutant in mutants}:
            print(f"equivalent.txt names a mutant that there is not: {name}")
            self.code = 1
        alone, asked = sole_killers(in_question, known)
        if asked:
            dispensable = [test for test in measured.tests if test not in alone]
            (CACHE / "never-alone.txt").write_text("".join(f"{test}\n" for test in dispensable))
            print(
                f"of {len(measured.tests)} tests {len(alone)} kill one of {asked} mutants alone; the others are in "
                f"{(CACHE / 'never-alone.txt').relative_to(ROOT)}"
            )
        if self._options.table:
            if TABLE.exists() and (fallen := fallen_branches(TABLE.read_text(), measured)):
                print("fewer branches are taken, and the table is not written:", *fallen, sep="\n")
                self.code = 1
            else:
                TABLE.write_text(page)


def _covering(measured: Coverage, mutant: Mutant) -> set[int]:
    """The tests that execute the changed text, or its statement where it has no line of its own."""
    lines = measured.lines[mutant.module]
    first, last = mutant.lines
    is_block = mutant.statement == first and mutant.operator == "condition"
    covering = {test for line in range(first, (first if is_block else last) + 1) for test in lines.get(line, ())}
    return covering or set(lines.get(mutant.statement, ()))


def _order(
    mutant: Mutant, measured: Coverage, breadth: Counter[int], kills: Counter[tuple[str, str, int]], test: int
) -> tuple[int, int, float, int, int]:
    """By layer; the tests that have found another mutant of the function before; the quickest, those with the fewest
    lines."""
    found = kills[mutant.module, mutant.function, test]
    return layer(measured.tests[test]), -found, round(measured.seconds[test], 2), breadth[test], test


def _what_coverage_depends_on() -> list[Path]:
    """All modules and tests, without what runs the mutants."""
    everything = (path for folder in ("dlrover_run", "tf_ps_runner", "tests") for path in (ROOT / folder).rglob("*.py"))
    here = Path(__file__).parent
    return sorted(path for path in everything if path.parent != here or path.name == "seeds.py")


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where tests cannot be collected, or fewer branches are taken than before."""
    options = parse(arguments)
    os.chdir(ROOT)
    run = MutationRun(options)
    temporary = OwnedDirectory("dlrover-mutants-")
    marks = "not long and not rival and not tensorflow and not torchrun"
    flags = ["-q", "-s", "-m", marks, "--hypothesis-profile=mutants", "--disable-warnings", "-o", "addopts="]
    flags += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary.path}/t"]
    try:
        code = pytest.main([*flags, *options.tests], plugins=[run])
    finally:
        temporary.close()
    return run.code or (0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(code))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
