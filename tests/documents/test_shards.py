"""`make test-long` in shards: the division of tests, the record of a run, and the table of all shards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from shards.division import DEFAULT, MAX_CHUNK, LongTest, divide, estimate, expected_seconds, known_seconds
from shards.results import Outcome, ShardRun, add_up, read_runs, seconds_table, table
from simulation import nights
from support.harness import WAIT

TESTS = Path(__file__).resolve().parents[1]


def some_tests() -> list[LongTest]:
    files = {f"tests/a/test_{number}.py": number % 7 == 0 for number in range(20)}
    return [
        LongTest(f"{file}::test_it[{number}]", alone)
        for number in range(30)
        for file, alone in files.items()
        if (hash((number, alone)) + number) % 3
    ]


def test_two_tests_run_at_a_time_unless_they_need_the_machine_alone() -> None:
    tests = [LongTest("tests/a.py::test_a[1]"), LongTest("tests/a.py::test_a[2]"), LongTest("tests/b.py::test_b", True)]
    assert expected_seconds(tests, {"tests/a.py::test_a": 4.0, "tests/b.py::test_b": 6.0}) == 10.0


@pytest.mark.parametrize("count", [1, 3, 8, 200])
@pytest.mark.parametrize(
    "known", [{}, {f"tests/a/test_{number}.py::test_it": number * 5.0 for number in range(9)}], ids=["nothing", "some"]
)
def test_every_test_is_in_exactly_one_shard_whatever_is_known(count: int, known: dict[str, float]) -> None:
    tests = some_tests()
    shards = divide(tests, known, count)
    assert len(shards) == count
    assert sorted(test.id for shard in shards for test in shard) == sorted(test.id for test in tests)


def test_the_division_does_not_depend_on_the_order_of_the_tests() -> None:
    tests = some_tests()
    shuffled = random.Random(1).sample(tests, len(tests))
    assert divide(shuffled, {}, 8) == divide(tests, {}, 8)


def test_no_shard_is_longer_than_another_by_more_than_one_chunk() -> None:
    known = {f"tests/a/test_{number}.py::test_it": number * 2.0 for number in range(20)}
    found = [expected_seconds(shard, known) for shard in divide(some_tests(), known, 8)]
    assert max(found) - min(found) <= MAX_CHUNK / 2


def test_neighbours_stay_together_up_to_two_minutes() -> None:
    tests = [LongTest(f"tests/test_a.py::test_it[{number}]") for number in range(24)]
    shards = divide(tests, {"tests/test_a.py::test_it": 10.0}, 4)
    assert sorted(len(shard) for shard in shards) == [0, 0, 12, 12]


def test_a_test_that_is_not_known_takes_as_long_as_its_file_or_ten_seconds() -> None:
    tests = [LongTest("tests/a.py::test_new"), LongTest("tests/b.py::test_new"), LongTest("tests/a.py::test_old[1]")]
    seconds = estimate(tests, {"tests/a.py::test_old": 4.0, "tests/a.py::test_other": 6.0})
    assert list(seconds.values()) == [5.0, DEFAULT, 4.0]


def test_the_recorded_seconds_are_those_of_files_that_exist() -> None:
    files = {name.partition("::")[0] for name in known_seconds()}
    assert files
    assert not [file for file in files if not (TESTS.parent / file).exists()]


PROJECT = {
    "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["long: l", "rival: r", "alone: a"]\n',
    "conftest.py": (
        "from shards import plugin\n"
        "def pytest_addoption(parser): plugin.add_options(parser)\n"
        "def pytest_configure(config): plugin.configure(config)\n"
    ),
    "test_some.py": (
        "import os, pytest\n"
        "pytestmark = pytest.mark.long\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'no'\n"
        "def test_left_out(): pytest.skip('not here')\n"
        "def test_ends_its_process(): os.kill(os.getpid(), 9)\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise ValueError('at its end')\n"
        "def test_leaves_something(broken): pass\n"
        "def test_of_another_shard(): pass\n"
    ),
}


def test_a_run_records_each_of_its_tests_and_no_other(tmp_path: Path) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    ids = [f"test_some.py::test_{name}" for name in ("good", "bad", "left_out", "ends_its_process", "leaves_something")]
    (tmp_path / "only").write_text("\n".join(ids))
    given = [
        f"--only-tests={tmp_path / 'only'}",
        f"--record={tmp_path / 'record'}",
        f"--list-tests={tmp_path / 'list'}",
    ]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", *given],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(TESTS)}, timeout=WAIT, capture_output=True,
    )  # fmt: skip
    found = {(each := Outcome(**json.loads(line))).id: each for line in (tmp_path / "record").read_text().splitlines()}
    assert {test: found[test].outcome for test in ids} == dict(
        zip(ids, ("passed", "failed", "skipped", "failed", "failed"), strict=True)
    )
    assert len(found) == len(ids)
    assert found[ids[1]].reason == "AssertionError: no"
    assert found[ids[2]].reason == "Skipped: not here"
    assert found[ids[4]].reason == "ValueError: at its end"


def a_run(shard: int, started: str, outcomes: dict[str, str], tests: list[str], seconds: float | None) -> ShardRun:
    ends = [Outcome(test, outcome, 2.0, "why" if outcome != "passed" else "") for test, outcome in outcomes.items()]
    versions = {"python": "3.11.7"}
    return ShardRun(shard, 2, "abc", "2026-11-27", started, tests, 4, "d", versions, ends, seconds)


FIRST = a_run(
    1, "2026-11-27T10:00:00", {"a": "passed", "tests/simulation/b": "failed"}, ["a", "tests/simulation/b"], 9.0
)
SECOND = a_run(2, "2026-11-27T11:00:00", {"c": "skipped"}, ["c", "d"], None)


def test_the_table_has_what_each_test_did_last() -> None:
    found = add_up([FIRST, SECOND])
    assert not found.is_green
    lines = list(table(found, "python"))
    assert lines[2:5] == [
        "| 1/2 | 1 | 1 | 1 | 0 | 0 | 9 |",
        "| 2/2 | 1 | 0 | 0 | 1 | 1 | 2 |",
        "| sum | 2 | 1 | 1 | 1 | 1 | 11 |",
    ]
    assert "3 of 4 tests have run." in lines
    assert "failed: NIGHT=2026-11-27 python -m pytest tests/simulation/b  # why" in lines
    assert "skipped: 1 tests, why" in lines


def test_a_test_that_passes_in_a_later_run_is_reported_as_unstable() -> None:
    again = a_run(1, "2026-11-27T12:00:00", {"tests/simulation/b": "passed"}, FIRST.tests, 3.0)
    rest = a_run(2, "2026-11-27T13:00:00", {"d": "passed"}, SECOND.tests, 1.0)
    found = add_up([FIRST, SECOND, again, rest])
    assert found.is_green
    assert "failed, then passed: tests/simulation/b" in list(table(found, "python"))


def test_a_shard_that_has_not_run_is_not_green() -> None:
    assert not add_up([a_run(1, "", {"a": "passed", "b": "passed"}, ["a", "b"], 1.0)]).is_green
    assert not add_up([]).is_green


def test_runs_of_one_commit_are_read_and_an_incomplete_last_line_is_not(tmp_path: Path) -> None:
    for commit in ("abc", "abc-changed", "fff"):
        folder = tmp_path / commit
        folder.mkdir()
        header = json.dumps(FIRST.header())
        (folder / "shard-1-of-2-x.jsonl").write_text(
            f'{header}\n{{"id": "a", "outcome": "passed", "seconds": 1}}\n{{"id'
        )
    (run,) = read_runs([tmp_path], "abc")
    assert [each.id for each in run.outcomes] == ["a"]
    assert run.not_run() == ["tests/simulation/b"]


def test_the_seconds_of_passed_tests_become_those_of_the_next_division() -> None:
    run = a_run(1, "", {"t.py::a[1]": "passed", "t.py::a[2]": "passed", "t.py::b": "failed"}, [], 1.0)
    assert seconds_table([run], {"t.py::b": 7.0}) == {"t.py::a": 2.0, "t.py::b": 7.0}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("--shard=0/8", "'0/8' must be"),
        ("--shard=9/8", "'9/8' must be"),
        ("--shard=x", "'x' must be"),
        ("--night=x", "'x' must be a date"),
    ],
)
def test_a_bad_shard_or_night_is_refused_in_one_line(given: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shards", "run", given], cwd=TESTS, capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[-1]


def test_each_night_has_other_seeds_and_none_of_make_test(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = []
    for night in ("2026-11-27", "2026-11-28", "2026-12-01"):
        monkeypatch.setenv("NIGHT", night)
        firsts.append(nights.first_seed())
    assert firsts[0] == 202611270000
    assert all(later - first >= nights.SEEDS_OF_A_NIGHT for first, later in pairwise(firsts))


def test_the_night_is_todays_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIGHT", raising=False)
    days = [date.today()]
    seed = nights.first_seed()
    days.append(date.today())
    assert seed in {int(f"{day:%Y%m%d}0000") for day in days}


def test_the_parts_of_a_night_are_all_its_seeds() -> None:
    assert [part.values[0] for part in nights.night_parts(900, 300)] == [0, 300, 600]
