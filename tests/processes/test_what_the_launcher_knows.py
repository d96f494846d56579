"""A message has what the launcher knows of the cause; bytes that are no text reach the workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import OURS, run

from dlrover_run.failures.other_environment import explain_missing_module


def test_a_missing_module_names_the_environment_that_is_activated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import kforge\n")
    done = run(OURS, ("train.py",), cwd=tmp_path, env={"VIRTUAL_ENV": str(tmp_path / "project"), "CONDA_PREFIX": None})
    text = " ".join(done.err.split())
    assert f"The workers ran {sys.executable}, and VIRTUAL_ENV is {tmp_path}/project" in text
    assert f"PYTHON_EXEC={tmp_path}/project/bin/python" in text


@pytest.mark.parametrize(
    ("error", "environ", "named"),
    [
        ("ModuleNotFoundError: x", {"VIRTUAL_ENV": "/a"}, None),
        ("ModuleNotFoundError: x", {"VIRTUAL_ENV": "/b"}, "VIRTUAL_ENV is /b"),
        ("ImportError: x", {"CONDA_PREFIX": "/c"}, "CONDA_PREFIX is /c"),
        ("ModuleNotFoundError: x", {"VIRTUAL_ENV": "/a", "CONDA_PREFIX": "/c"}, None),
        ("ValueError: x", {"VIRTUAL_ENV": "/b"}, None),
        (None, {"VIRTUAL_ENV": "/b"}, None),
        ("ModuleNotFoundError: x", {}, None),
    ],
)
def test_which_environment_is_another_one(error: str | None, environ: dict[str, str], named: str | None) -> None:
    found = explain_missing_module(error, "/a/bin/python", environ)
    assert (found is None) is (named is None)
    assert named is None or (found is not None and named in found)


def test_a_carriage_return_in_the_first_line_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_bytes(b"#!/bin/bash\r\necho trained\r\n")
    (tmp_path / "plain.sh").write_text("echo trained\n")
    for name, said in (
        ("train.sh", r"does not: b'#!/bin/bash\r'; remove the carriage returns"),
        ("plain.sh", "its first line names no interpreter"),
    ):
        (tmp_path / name).chmod(0o755)
        done = run(OURS, ("--no-python", f"./{name}"), cwd=tmp_path)
        assert done.code not in (0, 70)
        assert said in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize("way", ["nodes", "api"])
def test_bytes_that_are_no_utf8_reach_the_workers(tmp_path: Path, way: str) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / "train.py").write_text("import sys\nprint(ascii(sys.argv[1]), flush=True)\n")
    if way == "nodes":
        done = run(OURS, ("--local-nodes=2", "--nproc-per-node=1", "train.py", name), cwd=tmp_path)
    else:
        program = (
            "import sys\nfrom dlrover_run import LaunchConfig, elastic_launch\nif __name__ == '__main__':\n"
            "    elastic_launch(LaunchConfig(1, 1, 1), sys.executable)('train.py', sys.argv[1])\n"
        )
        (tmp_path / "program.py").write_text(program)
        ended = subprocess.run([sys.executable, "program.py", name], cwd=tmp_path, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout.count("caf\\udce9.jpg")) == (0, 1), ended.stderr
        return
    assert (done.code, done.out.count("caf\\udce9.jpg")) == (0, 2), done.err
