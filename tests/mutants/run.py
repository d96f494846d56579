"""One group's mutants, run by pytest in place of its tests."""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, settings
from support.owned_directory import OwnedDirectory

from mutants.coverage_of_tests import Coverage, measure
from mutants.operators import Mutant, mutants_of
from mutants.planting import Planter, in_a_fork
from mutants.results import Result, Results
from mutants.scope import CACHE, GROUPS, ROOT, layer, modules

# Nothing is learned from the examples of mutants, and a smaller example of a failure is not asked for. The seeds are
# the same each time, so that a mutant is.
settings.register_profile(
    "mutants", deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)


class MutationRun:
    """A plug-in of pytest that runs mutants in place of the tests. `code` is the exit code."""

    def __init__(self, group: str, options: argparse.Namespace) -> None:
        self._group, self._options = group, options
        self._sources = modules(GROUPS[group])
        self._results = Results(CACHE / "results.jsonl")
        self._began = time.monotonic()
        self._digests: dict[str, str] = {}
        self.code = 0

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
        return True

    def _measure(self, items: list[pytest.Item]) -> Coverage:
        """The coverage of these tests, from the last run if nothing has changed since."""
        key = hashlib.sha256()
        for path in _what_coverage_depends_on():
            key.update(f"{path} {_digest_of_file(path)}\n".encode())
        key.update("\n".join(item.nodeid for item in items).encode())
        known = known_coverage(self._group, self._options.tests)
        if known is not None and known.key == key.hexdigest():
            return known
        began = time.monotonic()

        def work() -> None:
            taken = measure(key.hexdigest(), items, ROOT, self._sources)
            _coverage_file(self._group, self._options.tests).write_bytes(msgspec.json.encode(taken))

        CACHE.mkdir(exist_ok=True)
        in_a_fork(work)
        measured = known_coverage(self._group, self._options.tests)
        assert measured is not None
        print(
            f"{self._group}: {len(measured.tests)} tests took {sum(measured.seconds):.0f} s of processor time, "
            f"{time.monotonic() - began:.0f} s by the clock, both with coverage",
            flush=True,
        )
        return measured

    def _run(self, planter: Planter, measured: Coverage, items: Sequence[pytest.Item]) -> None:
        chosen = [mutant for mutant in self._in_question() if self._is_open(mutant, measured)]
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
            result.whole = whole = whole and not self._options.tests
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
        named = modules(GROUPS[self._group], *self._options.module)
        return [mutant for name, text in named.items() for mutant in mutants_of(name, text)]

    def _is_open(self, mutant: Mutant, measured: Coverage) -> bool:
        """Whether it has to be run: never, or with other tests, and it was not killed by one that is still there."""
        known = self._results.known.get(mutant.key)
        if known is None or known.status == "invalid":
            return known is None
        if known.status == "killed" and known.wanted >= self._options.killers and known.killers[0] in measured.tests:
            return False
        is_new = known.tests != self._digest(_covering(measured, mutant), measured)
        return is_new or known.status == "killed"

    def _affordable(self, tests: list[int], measured: Coverage) -> tuple[list[int], bool]:
        """As many of the tests of each layer as the effort allows, and whether these are all."""
        spent: Counter[int] = Counter()
        afforded = []
        for test in tests:
            place = layer(measured.tests[test])
            if not spent[place] or spent[place] + measured.seconds[test] <= self._options.effort:
                afforded.append(test)
                # A layer's first test is afforded in any case.
                spent[place] += max(measured.seconds[test], 1e-6)  # type: ignore[assignment]
        return afforded, len(afforded) == len(tests)

    def _digest(self, tests: set[int], measured: Coverage) -> str:
        names = sorted(measured.tests[test] for test in tests)
        files = sorted({name.partition("::")[0] for name in names})
        for file in files:
            if file not in self._digests:
                self._digests[file] = _digest_of_file(ROOT / file)
        return hashlib.sha256("\n".join([*names, *(self._digests[file] for file in files)]).encode()).hexdigest()[:12]


def run_group(group: str, options: argparse.Namespace) -> int:
    """Run the mutants of one group; returns the exit code. pytest collects once in a process, so each group has its
    own."""
    run = MutationRun(group, options)
    temporary = OwnedDirectory("dlrover-mutants-")
    marks = "not long and not rival and not tensorflow and not torchrun"
    flags = ["-q", "-s", "-m", marks, "--hypothesis-profile=mutants", "--disable-warnings", "-o", "addopts="]
    flags += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary.path}/t"]
    try:
        code = pytest.main([*flags, *(options.tests or GROUPS[group].tests)], plugins=[run])
    finally:
        temporary.close()
    return run.code or (0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(code))


def known_coverage(group: str, tests: Sequence[str] = ()) -> Coverage | None:
    """The coverage of the last run of a group, or of one with these tests in place of the group's."""
    path = _coverage_file(group, tests)
    return msgspec.json.decode(path.read_bytes(), type=Coverage) if path.exists() else None


def _coverage_file(group: str, tests: Sequence[str]) -> Path:
    suffix = f"-{hashlib.sha256(' '.join(tests).encode()).hexdigest()[:8]}" if tests else ""
    return CACHE / f"coverage-{group}{suffix}.json"


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
