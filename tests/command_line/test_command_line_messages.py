"""The messages of both programs, as the golden file `command_line_messages.txt` has them.

Each command line in the file is read, and its errors and warnings are compared; nothing is launched.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from support.command_lines import fake_etcd3, isolate, write_pems
from support.golden import assert_answers

from dlrover_run import cli, exit_codes
from dlrover_run.command_line import entry_point
from dlrover_run.command_line.program import DLROVER_RUN
from tf_ps_runner import cli as tf_cli
from tf_ps_runner.command_line.options import PREFIX, TF_PS_RUN

PROGRAMS = {program.name: program for program in (DLROVER_RUN, TF_PS_RUN)}

GOLDEN = Path(__file__).with_name("command_line_messages.txt")

SECRET = "open-sesame"
"""The secret in the golden file, which is never part of a message."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the command lines name, and no variable that changes a job."""
    isolate(tmp_path, monkeypatch)
    for name in [name for name in os.environ if name.startswith((PREFIX, "MASTER_", "SLURM_"))]:
        monkeypatch.delenv(name)
    write_pems(tmp_path)
    (tmp_path / "empty").write_text("\n")
    fake_etcd3(monkeypatch)
    monkeypatch.setattr(tf_cli, "require_tensorflow", lambda python: None)
    monkeypatch.setattr(cli, "_count_workers", lambda kind, environ: 8)
    return tmp_path


def messages(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line of the golden file prints."""
    words = shlex.split(command)
    variables = []
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        variables.append(words.pop(0).partition("="))
    program, *argv = words
    with pytest.MonkeyPatch.context() as environment:
        for name, _, value in variables:
            environment.setenv(name, value)
        if argv[:1] and argv[0] in TF_PS_RUN.subcommands:
            outcome: object = entry_point.run(PROGRAMS[program], argv)
        else:
            outcome = entry_point.job_or_code(PROGRAMS[program], argv)
    out, printed = capsys.readouterr()
    assert out == "", command
    lines = printed.splitlines()
    sentences = [line for line in lines if not line.startswith("Try ")]
    assert lines, command
    assert all(sentence.isprintable() and sentence.endswith((".", "?")) for sentence in sentences), command
    assert SECRET not in printed
    if isinstance(outcome, int):
        assert outcome == exit_codes.BAD_COMMAND_LINE, command
        assert len(sentences) == 1, command
    else:
        assert all(": warning: " in sentence for sentence in sentences), command
    return printed.replace(str(here), "HERE")


def test_the_messages_are_those_of_the_golden_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(assert_answers(GOLDEN, lambda command: messages(command, here, capsys).removesuffix("\n"))) > 200
