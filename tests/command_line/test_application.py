"""The help and the shell completion, as in a user's terminal and in a real bash."""

from __future__ import annotations

import importlib
import inspect
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_lines import LIMIT, run_python
from support.harness import only_long, until

from dlrover_run.command_line import help, rdzv_keys, suggestions
from dlrover_run.command_line.flag import SIZE
from dlrover_run.command_line.flags import TABLE
from dlrover_run.command_line.program import DLROVER_RUN, Program
from dlrover_run.features.operate.commands.completion import complete_job, complete_node
from tf_ps_runner.command_line.options import TF_PS_RUN


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m dlrover_run` with these arguments in a separate process."""
    return run_python("-m", "dlrover_run", *words, **variables)


@pytest.mark.parametrize(("word", "columns"), [("--help", 80), *only_long(("--he", 120))])
def test_the_help_names_every_flag_in_its_panel_and_fits_the_screen(word: str, columns: int) -> None:
    done = command(word, "--nonsense", COLUMNS=str(columns), NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    panel = ""
    seen: dict[str, str] = {}
    for line in lines:
        if line.startswith("╭─ "):
            panel = line.strip("╭╮─ ")
        elif line.startswith("│ --"):
            seen[line.split()[1]] = panel
    assert seen == {f"--{flag.name}": flag.panel for flag in TABLE}
    _, _, keys = done.stdout.partition("╭─ Keys of --rdzv-conf ")
    listed = [line.split()[1] for line in keys.splitlines() if re.match("│ [a-z]", line)]
    assert listed == [key.name for key in rdzv_keys.TABLE if key.help]
    assert "<bool>" not in done.stdout
    assert "Usage: dlrover-run [FLAGS] SCRIPT [ARGS]..." in done.stdout


def test_the_commands_come_first_and_the_page_of_a_command_has_no_key_of_a_launch() -> None:
    page = command("--help", COLUMNS="80", NO_COLOR="1").stdout
    assert 0 < page.index("╭─ Commands ") < page.index(f"╭─ {SIZE} ")
    page = command("status", "--help", COLUMNS="80", NO_COLOR="1").stdout
    assert "token_file" in page
    assert "join_timeout" not in page


@pytest.mark.parametrize("program", [DLROVER_RUN, TF_PS_RUN], ids=lambda program: program.name)
def test_the_page_of_each_command_has_plain_words(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    usages = {}
    for name in program.subcommands:
        assert help.run(program, [name, "--help"]) == 0
        page = capsys.readouterr().out
        usages[name] = next(line for line in page.splitlines() if "Usage:" in line).partition(f" {name} ")[2].rstrip()
        # What a flag takes is in capitals, and brackets mean that it may be left out.
        assert re.findall(r"<\w+>|\[\[|[{}]|>=", page.replace("MIN:MAX", "")) == []
    assert usages.pop("drain") == "[FLAGS] NODE [JOB]"
    assert usages.pop("jobs") == "[FLAGS]"
    assert [usages.pop(name) for name in ("why", "events")] == ["[FLAGS] [JOB|DIR]"] * 2
    assert set(usages.values()) == {"[FLAGS] [JOB]"}


@pytest.mark.parametrize("program", [DLROVER_RUN, TF_PS_RUN], ids=lambda program: program.name)
def test_the_name_that_another_tool_has_for_a_command_is_understood(program: Program) -> None:
    assert set(suggestions.OTHER_NAMES.values()) <= set(program.subcommands)
    for name, meant in (("ps", "jobs"), ("list", "jobs"), ("stauts", "status")):
        remedy = suggestions.instead_of_script(name, (), program.name, program.subcommands)
        assert remedy == f"did you mean `{program.name} {meant}`?"
    done = run_python("-m", program.launcher.partition(".")[0], "kill")
    assert done.returncode == 2
    assert f"did you mean `{program.name} stop`?" in done.stderr


@pytest.mark.parametrize("program", [DLROVER_RUN, TF_PS_RUN], ids=lambda program: program.name)
def test_the_short_help_is_a_screen_with_every_command(program: Program) -> None:
    done = run_python("-m", program.launcher.partition(".")[0], "-h")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) < 80
    listed = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    of_features = [flag.name for flag in program.table if flag.common]
    assert listed == [*program.subcommands, *(f"--{flag}" for flag in (*program.common, *of_features))]


@pytest.mark.parametrize(
    ("begun", "candidates"),
    [
        ("join", ["join_timeout="]),
        ("join_timeout=3,pend", ["join_timeout=3,pend_timeout="]),
        ("join_timeout=", []),
        ("nothing", []),
    ],
)
def test_the_keys_of_rdzv_conf_are_completed(begun: str, candidates: list[str]) -> None:
    assert help.complete_keys(begun) == candidates


def test_the_names_of_jobs_and_nodes_are_completed(tmp_path: Path) -> None:
    """Real agents of this machine are asked, as by a shell at the key TAB."""
    script = tmp_path / "wait.py"
    script.write_text("import sys; sys.stdin.read()")
    name = f"job-{os.getpid()}-{os.urandom(4).hex()}"
    launch = [sys.executable, "-m", "dlrover_run", f"--rdzv-id={name}", str(script)]
    with subprocess.Popen(launch, stdin=subprocess.PIPE) as job:
        try:
            until(lambda: complete_job(name) == [name], "no agent answers")
            assert complete_job(name[:-1]) == [name]
            assert complete_job(str(job.pid)) == [str(job.pid)]
            context: Any = SimpleNamespace(params={"job": name}, find_root=lambda: SimpleNamespace(obj=DLROVER_RUN))
            assert "0" in complete_node(context, "")
            assert complete_job("no-such-job") == []
        finally:
            job.terminate()


def test_a_number_for_scale_is_taken_for_a_number_of_nodes() -> None:
    done = command("scale", "2")
    assert done.returncode == 2
    assert "did you mean --nodes=2?" in done.stderr


def test_the_help_names_every_choice_of_a_flag() -> None:
    described = {flag.name: f"{flag.value} {flag.help}" for flag in TABLE if flag.choices}
    assert described
    for flag in TABLE:
        assert [word for word in flag.choices if not re.search(rf"\b{word}\b", described[flag.name])] == []


COMPLETE = """
eval "$COMPLETION"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_dlrover_run_completion dlrover-run
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_completion() -> str:
    """The script that dlrover-run prints for bash."""
    return command(_DLROVER_RUN_COMPLETE="source_bash").stdout


@pytest.fixture
def bash_path(tmp_path: Path) -> str:
    """A PATH whose `dlrover-run` is this checkout's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "dlrover-run"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dlrover_run "$@"\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def in_bash(line: str, bash_path: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A line that bash runs to its end."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *words],
        env={**os.environ, "PATH": bash_path, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["--nproc"], ["--nproc-per-node"]),
        (["--max_restarts", "1", "--numa-binding", "s"], ["socket"]),
        (["--nproc_per_node", ""], ["auto", "gpu", "cpu", "xpu"]),
        (["--role", "=", "a", "--stand"], ["--standalone"]),
        (["--network-check", "--stand"], ["--standalone"]),
        (["--network-check", "=", "always", "--stand"], ["--standalone"]),
        (["--network-check", "train.py", "--stand"], [""]),
        (["--network-check", ""], [""]),
        (["--precheck", ""], ["0", "1", "2"]),
        (["train.py", "--nproc"], [""]),
        (["--nnodes", "1", "tr"], [""]),
    ],
)
def test_bash_completes_flags_and_values_but_not_those_of_the_script(
    bash_path: str, bash_completion: str, words: list[str], offered: list[str]
) -> None:
    """Where nothing is offered bash itself falls back on file names."""
    done = in_bash(COMPLETE, bash_path, "dlrover-run", *words, COMPLETION=bash_completion)
    assert done.stdout.splitlines() == offered
    assert done.stderr == ""


@pytest.mark.parametrize("program", [DLROVER_RUN, TF_PS_RUN], ids=["dlrover-run", "tf-ps-run"])
def test_the_list_of_subcommands_has_the_first_paragraph_of_the_help_of_each(program: Program) -> None:
    """They are listed without importing their modules."""
    for path, summary in program.subcommands.values():
        module, _, function = path.partition(":")
        text = inspect.getdoc(getattr(importlib.import_module(module), function)) or ""
        assert " ".join(text.split("\n\n")[0].split()) == summary


def test_completion_is_installed_for_bash(bash_path: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    # With a second command bash does not replace itself by the launcher: the shell must be found among its ancestors.
    done = in_bash("dlrover-run --install-completion; exit $?", bash_path, HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "dlrover-run.sh" in (home / ".bashrc").read_text()
    assert "_DLROVER_RUN_COMPLETE" in (home / ".bash_completions" / "dlrover-run.sh").read_text()


COMPLETION_FILES = {
    "bash": ".bash_completions/dlrover-run.sh",
    "zsh": ".zfunc/_dlrover-run",
    "fish": ".config/fish/completions/dlrover-run.fish",
}


@pytest.mark.parametrize("shell", COMPLETION_FILES)
def test_completion_is_installed_for_the_named_shell(bash_path: str, tmp_path: Path, shell: str) -> None:
    """In whichever shell the command is typed, here bash."""
    done = in_bash(f"dlrover-run --install-completion={shell}; exit $?", bash_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{shell} completion installed in {tmp_path / COMPLETION_FILES[shell]}" in done.stdout.replace("\n", " ")
    written = [name for name, path in COMPLETION_FILES.items() if (tmp_path / path).exists()]
    assert written == [shell]
    assert "_DLROVER_RUN_COMPLETE" in (tmp_path / COMPLETION_FILES[shell]).read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_the_script_is_printed_for_the_named_shell(shell: str) -> None:
    assert command("--show-completion", shell).stdout == command("--print-completion", shell).stdout != ""


def test_a_failed_installation_of_completion_is_reported_in_one_sentence(tmp_path: Path) -> None:
    unknown = command("--install-completion", "csh")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "--install-completion 'csh' is not valid: give bash, zsh or fish." in unknown.stderr
    (tmp_path / "home").write_text("")
    nowhere = command("--install-completion", "zsh", HOME=str(tmp_path / "home"))
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert re.fullmatch(r"dlrover-run: --install-completion cannot write .*\n", nowhere.stderr)


SHELLS = {
    "bash": (
        ["env", "TERM=dumb", "bash", "--norc", "--noprofile", "-i"],
        """eval "$(dlrover-run --print-completion bash)"; PS1=rea''dy""",
    ),
    "zsh": (
        ["env", "TERM=dumb", "zsh", "-f", "-i"],
        """autoload -Uz compinit; compinit -D -u; eval "$(dlrover-run --print-completion zsh)"; PROMPT=rea''dy""",
    ),
    "tcsh": (
        ["env", "TERM=vt100", "tcsh", "-f"],
        "dlrover-run --print-completion tcsh > completion; source completion; set prompt=rea''dy",
    ),
}
"""How each shell is started without the files of this machine's user, and which lines make it complete and prompt.

The terminal echoes the input: the quotes distinguish the prompt from it. tcsh completes nothing on a dumb terminal, and
zsh writes no complete words on any other.
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_with_the_printed_script(bash_path: str, tmp_path: Path, shell: str) -> None:
    argv, setup = SHELLS[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(argv[0], argv, {**os.environ, "PATH": bash_path, "HOME": str(tmp_path)})
    try:
        type_and_see(terminal, f"{setup}\n", "ready")
        # The space shows that the word is complete.
        type_and_see(terminal, "dlrover-run --nproc\t", "--nproc-per-node ")
        type_and_see(terminal, "gp\t", "gpu ")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def type_and_see(terminal: int, keys: str, awaited: str) -> None:
    """Type into a terminal, and wait until it shows `awaited` after that."""
    os.write(terminal, keys.encode())
    shown, deadline = "", time.monotonic() + LIMIT
    while awaited not in shown:
        readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"{awaited!r} was not shown: {shown!r}"
        shown += os.read(terminal, 65536).decode(errors="replace")


def test_the_first_line_of_a_zsh_completion_script_names_the_program() -> None:
    """zsh searches the files of `fpath` for it there."""
    assert command("--print-completion=zsh").stdout.startswith("#compdef dlrover-run\n")


@pytest.mark.parametrize(
    "words",
    [["--print-completion"], ["--print-completion", "csh"], ["--print-completion", "--"], ["--print-completion="]],
)
def test_print_completion_needs_a_known_shell(words: list[str]) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dlrover-run: --print-completion ")
