"""`docs/failures.md` speaks of tests that exist and of times as they are."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from dlrover_run.cli import parse
from dlrover_run.command_line import rdzv_conf
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.health.rules import HealthRules

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "failures.md").read_text()


def names_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def rules_of(backend: str) -> JobRules:
    """The rules of a job for which no time is given."""
    command = ["--nnodes=2", f"--rdzv-backend={backend}", "--rdzv-endpoint=a", __file__]
    return parse(command, {}, warn=print).rules


def value_of(rule: str, backend: str) -> float:
    rules = rules_of(backend)
    value: float = getattr(rules if hasattr(rules, rule) else HealthRules.get(rules.policy), rule)
    return value


def test_every_fault_names_a_test_that_exists() -> None:
    faults, _, _ = TEXT.partition("## The times")
    rows = [line for line in faults.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert any(name in names_in(path) for path in TESTS.rglob(file)), f"{file}::{name}"


def test_the_times_are_those_of_the_code() -> None:
    _, _, times = TEXT.partition("## The times")
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d.]+)(?:; ([\d.]+) with etcd)? \|", times, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", times, re.MULTILINE)) > 15
    for name, seconds, with_etcd in rows:
        module, _, constant = name.rpartition(".")
        if module:
            value = getattr(importlib.import_module(f"dlrover_run.{module}"), constant)
            assert not with_etcd, name
            assert value == float(seconds) * (1000 if constant.endswith("_MS") else 1), name
        else:
            rule = next(key.rule for key in rdzv_conf.TABLE if key.name == name)
            assert rule is not None, name
            assert value_of(rule, "c10d") == float(seconds), name
            assert value_of(rule, "etcd") == float(with_etcd or seconds), name
    counts = dict(re.findall(r"`(\w+)` [^`]*?, (\d+) by default", TEXT.splitlines()[-1]))
    assert counts == {"keep_alive_max_attempt": "3", "early_failure_limit": "5"}
    assert (JobRules().keep_alive_attempts, JobRules().early_failure_limit) == (3, 5)


def test_every_time_that_a_fault_names_is_in_the_table_of_times() -> None:
    faults, _, times = TEXT.partition("## The times")
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+|[A-Z]+(?:_[A-Z]+)*)`", faults)) - {"state_dir", "SIGKILL"}
    assert named
    assert not [name for name in named if not re.search(rf"`(?:[\w.]+\.)?{name}`", times)]
