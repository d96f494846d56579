"""The faults and tables of docs/failures.md, docs/published-experiments.md and docs/events.md agree with the code:
tests, times, lines, actions of the script, events and their fields.
"""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from support.doc_pages import DOCS, ROOT

from dlrover_run.cli import parse
from dlrover_run.command_line import rdzv_keys
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.events.records import AnyEvent, Event, name_of
from dlrover_run.events.writer import KEPT_FILES, MAX_BYTES
from dlrover_run.failures.causes import Cause
from dlrover_run.features.node_check.rules import NodeCheckRules

FAULTS, _, TIMES = (DOCS / "failures.md").read_text().partition("## The times")
EXPERIMENTS = (DOCS / "published-experiments.md").read_text()
EVENTS = (DOCS / "events.md").read_text()


def rows_of(text: str, heading: str) -> list[str]:
    """The rows of a table without its first line, which begins with `heading`."""
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(f"| {heading} ")]


def file_of(named: str, test: str) -> Path:
    """The file of that name that has that test."""
    files = [path for path in (ROOT / "tests").rglob(named) if test in names_in(path)]
    assert files, f"{named}::{test}"
    return files[0]


@cache
def names_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_fault_names_a_test_that_exists() -> None:
    sections = FAULTS.split("\n#### ")[1:]
    assert len(sections) > 150
    for section in sections:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", section.partition("\n- Shown by")[2])
        assert named, section
        for file, name in named:
            file_of(file, name)


def test_every_fault_has_an_anchor_of_its_own_and_says_what_follows() -> None:
    titles = re.findall(r"^#+ (.*)$", FAULTS, re.MULTILINE)
    assert len({re.sub(r"[^\w\- ]", "", title.lower()) for title in titles}) == len(titles)
    for section in FAULTS.split("\n#### ")[1:]:
        follows = section.split("\n\n")[1]
        assert not follows.startswith("- "), section


ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows_of(EXPERIMENTS, "experiment")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_experiment_names_a_test_and_a_line_that_it_waits_for(row: list[str]) -> None:
    assert (len(ROWS), len(row)) == (19, 5)
    named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", row[4])
    assert named is not None
    source = file_of(*named.groups()).read_text()
    shown = re.match(r"`([^`]+)`", row[3])
    assert (shown is None) == (row[3] == "the same job")
    assert shown is None or shown[1] in source, shown


def test_each_verb_and_setting_of_the_script_exists() -> None:
    verbs = re.findall(r"start_chaos\.sh ([\w-]+) &", EXPERIMENTS)
    assert set(verbs) >= {"kill-process", "kill-node", "cpu-overload", "network-loss", "memory-overload"}
    script = (ROOT / "scripts" / "start_chaos.sh").read_text()
    for word in {*verbs, *re.findall(r"CHAOS_\w+", EXPERIMENTS)}:
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", script), word


def value_of(rule: str, backend: str) -> float:
    """The value of a rule in a job without given times."""
    command = ["--nnodes=2", f"--rdzv-backend={backend}", "--rdzv-endpoint=a", __file__]
    rules = parse(command, {}, warn=print).rules
    value: float = getattr(rules if hasattr(rules, rule) else NodeCheckRules.get(rules.parts), rule)
    return value


def test_the_times_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d.]+)(?:; ([\d.]+) with etcd)? \|", TIMES, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", TIMES, re.MULTILINE)) > 15
    for name, seconds, with_etcd in rows:
        module, _, constant = name.rpartition(".")
        if module:
            value = getattr(importlib.import_module(f"dlrover_run.{module}"), constant)
            assert not with_etcd, name
            assert value == float(seconds) * (1000 if constant.endswith("_MS") else 1), name
        else:
            rule = next(key.field for key in rdzv_keys.TABLE if key.name == name)
            assert rule is not None, name
            assert value_of(rule, "c10d") == float(seconds), name
            assert value_of(rule, "etcd") == float(with_etcd or seconds), name
    counts = dict(re.findall(r"`(\w+)` [^`]*?, (\d+) by default", TIMES.splitlines()[-1]))
    assert counts == {"keep_alive_max_attempt": "3", "early_failure_limit": "5"}
    assert (JobRules().keep_alive_attempts, JobRules().early_failure_limit) == (3, 5)


def test_every_time_that_a_fault_names_is_in_the_table_of_times() -> None:
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+|[A-Z]+(?:_[A-Z]+)*)`", FAULTS)) - {"state_dir", "SIGKILL"}
    assert named
    assert not [name for name in named if not re.search(rf"`(?:[\w.]+\.)?{name}`", TIMES)]


def test_each_event_has_a_row_with_its_fields() -> None:
    rows = re.findall(r"^\| `(dlrover[\w.]+)` \|[^|]*\|([^|]*)\|$", EVENTS, re.MULTILINE)
    common = {field.name for field in msgspec.structs.fields(Event)}
    known = {
        name_of(kind): [field.name for field in msgspec.structs.fields(kind) if field.name not in common]
        for kind in get_args(AnyEvent)
    }
    assert {name: re.findall(r"`(\w+)`", fields) for name, fields in rows} == known


def test_the_causes_and_the_sizes_are_named() -> None:
    sentence = next(line for line in EVENTS.splitlines() if line.startswith("The `cause` of a failure"))
    assert set(re.findall(r"`(\w+)`", sentence)) == {"cause", *Cause}
    assert f"at {MAX_BYTES >> 20} MiB" in EVENTS
    assert {4: "five files"}[KEPT_FILES] in EVENTS
