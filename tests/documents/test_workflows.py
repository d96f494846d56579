"""The workflows of GitHub: each step runs a target of the Makefile, for versions that the project says it supports."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z0-9.-]*):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"\$[({]([A-Z_0-9]+)[)}]", MAKEFILE))


class Step(NamedTuple):
    """One step of a job, with the values that its matrix gives to each variable."""

    workflow: str
    job: str
    matrix: dict[str, list[Any]]
    keys: dict[str, Any]


def read(path: Path) -> dict[Any, Any]:
    """Return a workflow. YAML takes its key `on` for the value true."""
    content: dict[Any, Any] = yaml.safe_load(path.read_text())
    return content


def steps() -> Iterator[Step]:
    """Yield each step of each workflow."""
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                yield Step(path.name, name, matrix, step)


def make_commands() -> Iterator[tuple[Step, list[str]]]:
    """Yield the arguments of `make` in each step that runs a command; some run it as root."""
    for step in steps():
        if "run" in step.keys:
            text = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", r"{\1}", step.keys["run"])
            *before, arguments = text.split("make ", 1)
            assert before in ([""], ['sudo -E env "PATH=$PATH" ']), f"{step.workflow} {step.job}: {text}"
            yield step, shlex.split(arguments)


def versions(variable: str) -> set[str]:
    """Return the values of a variable in the matrices of all workflows."""
    return {str(value) for step in steps() for value in step.matrix.get(variable, [])}


def test_the_workflows_are_those_of_a_push_a_night_and_a_release() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "nightly.yml", "release.yml"]
    assert {path.stem for path in WORKFLOWS} == {read(path)["name"] for path in WORKFLOWS}


def test_each_step_runs_a_target_of_the_makefile() -> None:
    commands = list(make_commands())
    assert len(commands) >= 8
    for step, arguments in commands:
        place = f"{step.workflow}, {step.job}: make {shlex.join(arguments)}"
        targets = [argument for argument in arguments if "=" not in argument]
        assert targets, place
        assert set(targets) <= TARGETS, place
        assert {argument.partition("=")[0] for argument in arguments if "=" in argument} <= VARIABLES, place
        used = set(re.findall(r"\{(\w+)\}", shlex.join(arguments)))
        assert used <= step.matrix.keys(), place


def test_each_value_of_a_matrix_reaches_a_command() -> None:
    used = {
        (step.workflow, step.job, name)
        for step, words in make_commands()
        for name in re.findall(r"\{(\w+)\}", str(words))
    }
    assert used == {(step.workflow, step.job, name) for step in steps() for name in step.matrix}


def test_the_pythons_are_those_of_the_package() -> None:
    requirement = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest, after = (int(minor) for minor in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", requirement).groups())  # type: ignore[union-attr]
    assert versions("python") == {f"3.{minor}" for minor in range(oldest, after)}


def test_the_torches_are_those_that_the_readme_names() -> None:
    tested = re.search(r"\(tested: ([\d., ]+)\)", (ROOT / "README.md").read_text())
    assert tested is not None
    assert versions("torch") == set(tested[1].split(", "))


def test_the_tensorflows_are_those_of_the_makefile() -> None:
    named = re.search(r"^TENSORFLOW \?= (.*)$", MAKEFILE, re.MULTILINE)
    assert named is not None
    assert versions("tensorflow") == set(named[1].split())


def test_the_shards_are_all_of_them() -> None:
    [(step, arguments)] = [(step, words) for step, words in make_commands() if words[0] == "test-long"]
    count = int(arguments[1].removeprefix("SHARD={shard}/"))
    assert step.matrix["shard"] == list(range(1, count + 1))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 90, name
        assert "permissions" not in job, name


def test_an_action_is_pinned_to_a_commit_and_names_its_version() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for action, pin in re.findall(r"uses: (\S+?)(@.*)", path.read_text()):
            assert re.fullmatch(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), f"{path.name}: {action}{pin}"
            pins.setdefault(action, set()).add(pin)
    assert all(len(used) == 1 for used in pins.values()), pins
    for step in steps():
        if step.keys.get("uses", "").startswith("actions/checkout@"):
            assert step.keys["with"]["persist-credentials"] is False, f"{step.workflow} {step.job}"
