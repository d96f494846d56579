"""Each feature is a folder and the line that registers it: without both, the rest works as before."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.harness import Launcher, Mailbox, finish, launch

from dlrover_run.coordination.records.rules import RulesPart
from dlrover_run.features import FEATURES, Feature

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dlrover_run/features"

OURS = Launcher("dlrover-run", (sys.executable, "-m", "dlrover_run"))

NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))

SCRIPT = """
import os
post()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    wait_for_signals()
"""


READERS = ("dlrover_run.features.operate.commands.running", "dlrover_run.features.operate.web.server")
"""What shows a job to people, with what features add to it."""


def is_line_of(name: str, line: str) -> bool:
    return line.startswith(f'    Feature("{name}"')


def link_or_copy(source: str, target: str) -> None:
    """A test's directory may be on another disk. Symbolic links do not do: modules find their package by the target."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def without(name: str, directory: Path) -> Path:
    """A copy of the product without the folder of a feature and its line."""
    for package in ("dlrover_run", "tf_ps_runner"):
        shutil.copytree(ROOT / package, directory / package, copy_function=link_or_copy)
    features = directory / "dlrover_run/features"
    shutil.rmtree(features / name)
    table = features / "__init__.py"
    lines = table.read_text().splitlines(keepends=True)
    # Not the file of this checkout, which it may be a link to.
    table.unlink()
    table.write_text("".join(line for line in lines if not is_line_of(name, line)))
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_without_a_feature_a_job_restarts_its_workers(mailbox: Mailbox, name: str, tmp_path: Path) -> None:
    tree = without(name, tmp_path / "tree")
    script = mailbox.script("train.py", SCRIPT)
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    job = launch(mailbox, *flags, script, launcher=OURS, env={"PYTHONPATH": str(tree)})
    group: list[dict[str, Any]] = []
    try:
        while len(group) < 2 and job.poll() is None:
            group += mailbox.pending()
            time.sleep(0.02)
        assert len(group) == 2, "the job did not start"
        os.kill(group[0]["pid"], signal.SIGKILL)
        assert [(message["restart"], message["rank"]) for message in mailbox.gather(2)] == [(1, 0), (1, 1)]
    finally:
        ended = finish(job)
    assert ended.code == 0, ended.err
    assert "restart 1 of 1" in ended.err
    assert "warning" not in ended.err
    readers = [reader for reader in READERS if f".features.{name}." not in reader]
    shown = subprocess.run(
        [sys.executable, "-c", "".join(f"import {reader}\n" for reader in readers)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tmp_path,
    )
    assert shown.returncode == 0


def test_without_its_feature_the_word_of_a_subcommand_is_a_script_as_in_torchrun(tmp_path: Path) -> None:
    """So the error names the word, and nothing is started."""
    tree = without("operate", tmp_path / "tree")
    launcher = [sys.executable, "-m", "dlrover_run"]
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    asked = subprocess.run([*launcher, "status"], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "The script 'status' does not exist in" in asked.stderr
    (tmp_path / "status").write_text("print('run as a script')")
    script = subprocess.run([*launcher, "status"], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert (script.returncode, script.stdout) == (0, "run as a script\n")


def test_nothing_outside_of_the_features_imports_one() -> None:
    product = FOLDER.parent
    found: dict[str, set[str]] = {}
    for path in product.rglob("*.py"):
        room = path.relative_to(product).parts[0]
        named = set(re.findall(r"dlrover_run\.features\.(\w+)", path.read_text())) - {"registry"}
        if room != FOLDER.name and named:
            found.setdefault(room, set()).update(named)
    assert not found


def test_each_folder_has_a_line_and_each_line_has_a_folder() -> None:
    here = [row.name for row in FEATURES if not row.package]
    assert len(here) == len(set(here))
    assert set(NAMES) - set(here) == {"inspect"}, "its commands are those of operate"
    assert set(here) <= set(NAMES)


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_a_feature_has_the_modules_that_its_line_says_and_no_others(row: Feature) -> None:
    """And each is named as in any other feature, with the feature's name in its records."""
    assert has_module(row.module("flags")) == row.flags
    assert has_module(row.module("node")) == (row.node is not None)
    assert has_module(row.module("columns")) == row.columns
    assert has_module(row.module("metrics")) == row.metrics
    if not row.package:
        found = {path.parent for path in (FOLDER / row.name).rglob("rules.py")}
        assert {path.name for path in found} == set(row.parts)
    for part in row.parts:
        rules = import_module(row.deciding_module(part, "rules"))
        assert {record.__struct_config__.tag for record in rules.RECORDS} == {part}
        kinds = [record.kind for record in rules.RECORDS if issubclass(record, RulesPart)]
        assert [kind for kind in kinds if has_module(row.deciding_module(part, kind))] == kinds
        assert has_module(row.deciding_module(part, "text"))


def has_module(name: str) -> bool:
    return find_spec(name) is not None
