"""Every command in README.md, docs/ and the pages of the examples is accepted by the program that it starts.

The parsers of the programs parse the command lines in this process. A few commands are run unchanged. `NOT_RUN` has the
reason for each program that is not run.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.cluster_environments import OPEN_MPI, SLURM
from support.doc_pages import (
    DOCS,
    EXAMPLES,
    PAGES,
    README,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    inline_commands,
    normalized,
    prose,
    run_block,
)
from support.harness import OURS, WAIT, finish, start
from support.places import place_of
from support.torchrun_tables import VERSIONS, torchrun

from dlrover_run.cli import parse
from dlrover_run.command_line.parse import CommandLine, parse_argv
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.exit_reasons import RETRIED
from dlrover_run.master import command as master
from dlrover_run.spec import JobSpec
from tf_ps_runner import cli as tf_ps_run
from tf_ps_runner.command_line.options import TF_PS_RUN

NOT_RUN = {
    "etcdctl": "needs the administrator of an etcd",
    "openssl": "prints a random number",
    "scontrol": "needs a Slurm cluster; the tests of scripts for Slurm have a stand-in",
    "srun": "needs a Slurm cluster; the same",
    "mpirun": "needs several machines; `test_clusters_page.py` has a stand-in",
    "pdsh": "the same",
    "head": "a program of every system",
    "kill": "needs the process id of a worker",
    "mkdir": "needs a data set of 46 million rows",
    "split": "the same",
    "cd": "the same",
    "mv": "the same",
    "wait": "a word of the shell",
    "for": "a word of the shell",
    "do": "a word of the shell",
    "test": "a word of the shell",
    "exit": "a word of the shell",
    "done": "a word of the shell",
}
"""Programs whose command lines are not checked, and why."""

LANGUAGES = {"bash", "console", "yaml", "toml", "python", ""}

STARTERS = {"srun": SLURM, "mpirun": OPEN_MPI}
"""The variables that programs set for the launchers that they start on each node."""


@pytest.fixture(autouse=True)
def _directory_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with the files that the commands name."""
    for script in ("train.py", "my/package/train.py"):
        file = tmp_path / script
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (tmp_path / "hosts").write_text(f"n01\n{socket.gethostname()}\n")
    for name in ("examples", "scripts", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM_", "DLROVER_", "MASTER_"))]:
        monkeypatch.delenv(name)


def job_of(words: list[str], environ: dict[str, str]) -> JobSpec | CommandLine:
    """The job of a command line of dlrover-run, which must give no warning; or its request, such as `--version`."""
    line = parse_argv(words)
    if line.request is not None:
        return line
    # A flag after the script belongs to the script, which is rarely what the page means.
    assert not {word.partition("=")[0] for word in line.script_args} & set(DLROVER_RUN.by_spelling)
    warnings: list[str] = []
    spec = parse(words, environ, count_workers=lambda kind, environ: 8, warn=warnings.append)
    assert warnings == []
    return spec


def check_subcommand(path: str, words: list[str]) -> None:
    """Check the flags of a subcommand, whose function is `module:function`."""
    module, _, function = path.partition(":")
    app = typer.Typer()
    app.command()(getattr(importlib.import_module(module), function))
    typer.main.get_command(app).make_context(words[0], words[1:])


def check_dlrover_run(words: list[str], environ: dict[str, str]) -> None:
    if words[0] in DLROVER_RUN.subcommands:
        check_subcommand(DLROVER_RUN.subcommands[words[0]].function, words)
    else:
        job_of(words, environ)


def check_tf_ps_run(words: list[str], environ: dict[str, str]) -> None:
    if words[0] in TF_PS_RUN.subcommands:
        check_subcommand(TF_PS_RUN.subcommands[words[0]].function, words)
    elif parse_argv(words, TF_PS_RUN).request is None:
        # A command that users copy prints no warning.
        warnings: list[str] = []
        tf_ps_run.parse(words, environ, warn=warnings.append)
        assert not warnings


def check_python(words: list[str], environ: dict[str, str]) -> None:
    if words[0] != "-m":
        assert Path(words[0]).is_file(), words[0]
    elif words[1] == "dlrover_run.master":
        if words[2:]:
            master._parser().parse_args(words[2:])
    else:
        check = {"dlrover_run": check_dlrover_run, "tf_ps_runner": check_tf_ps_run}[words[1]]
        if words[2:]:
            check(words[2:], environ)


def check_torchrun(words: list[str], environ: dict[str, str]) -> None:
    """Its flags exist in every recorded torchrun. The value of --rdzv-backend is the plug-in's name."""
    line = parse_argv(words)
    assert line.script is not None
    for version in VERSIONS:
        assert set(line.values) <= set(torchrun(version).flags)


def check_make(words: list[str], environ: dict[str, str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"\b{name}\b *\??=|\({name}\)|\({name}," if is_variable else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


def check_pip(words: list[str], environ: dict[str, str]) -> None:
    assert words[0] == "install"
    (package,) = [word for word in words if word.startswith("dlrover-run")] or ["."]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(.*)\]", package)) <= set(extras)


def check_bash(words: list[str], environ: dict[str, str]) -> None:
    assert words[0] == "scripts/start_chaos.sh"
    verbs = re.search(r"^case \$1 in$.*?^esac$", (ROOT / words[0]).read_text(), re.MULTILINE | re.DOTALL)
    assert verbs is not None
    assert re.search(rf"(^|\| ){words[1]}( \||\))", verbs[0], re.MULTILINE), words[1]


CHECKS: dict[str, Callable[[list[str], dict[str, str]], None]] = {
    "dlrover-run": check_dlrover_run,
    "tf-ps-run": check_tf_ps_run,
    "python": check_python,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "bash": check_bash,
}

VALUES = {"$head": "gpu07", "$SLURM_JOB_ID": "4711", "$SLURM_NNODES": "4"}
"""The values of the shell variables in arguments."""


def check(command: Command) -> str | None:
    """Check a command, also after a program that starts it. Return None if there is nothing to check."""
    words = command.words
    for at, word in enumerate(words):
        if word in CHECKS:
            arguments = [re.sub(r"\$\w+", lambda name: VALUES[name[0]], word) for word in words[at + 1 :]]
            assert at == 0 or words[0] in NOT_RUN, f"unknown program {words[0]!r}"
            started_by = STARTERS.get(words[0])
            CHECKS[word](arguments, {**(started_by.environ if started_by else {}), **command.variables})
            return word
    assert not words or words[0] in NOT_RUN, f"no check knows {words[0]!r}: add one, or a reason to NOT_RUN"
    return None


def check_part(command: Command) -> None:
    """Check what a sentence names of a command."""
    program, *words = command.words
    if program in ("dlrover-run", "torchrun") and words[0].startswith("-"):
        parse_argv(words)
    elif program == "tf-ps-run" and words[0].startswith("-"):
        parse_argv(words, TF_PS_RUN)
    elif program not in ("dlrover-run", "torchrun") and words[0] not in ("-c", "-u") and words[-1] != "--help":
        check(command)


def shell_commands() -> list[Command]:
    return [command for page in PAGES for block in blocks(page, "bash", "console") for command in commands(block)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_each_command_is_accepted_by_its_program(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in EXAMPLES:
        monkeypatch.chdir(page.parent)
    for block in blocks(page, "bash", "console"):
        for command in commands(block):
            try:
                check(command)
            except Exception as problem:
                raise AssertionError(f"{command.place}: {' '.join(command.words)}: {problem}") from problem


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_command_in_the_prose_names_what_exists(page: Path) -> None:
    """These are often parts of a command line, so only their flags, targets and files are looked at."""
    for command in inline_commands(page, *CHECKS):
        try:
            check_part(command)
        except Exception as problem:
            raise AssertionError(f"{page.name}: `{' '.join(command.words)}`: {problem}") from problem


def test_the_commands_are_found() -> None:
    """A change in the format of the pages must not leave this file with nothing to check."""
    checked = [check(command) for command in shell_commands()]
    counts = {program: checked.count(program) for program in CHECKS}
    assert counts["dlrover-run"] > 12, counts
    assert counts["tf-ps-run"] > 8, counts
    assert all(counts.values()), counts
    assert {command.words[0] for command in shell_commands() if command.words} >= {"srun", "etcdctl", "openssl"}


@pytest.mark.parametrize(
    "line",
    [
        "dlrover-run --nnodez=2 train.py",
        "dlrover-run train.py --nnodes=2",
        "tf-ps-run --pss=2 train.py",
        "make demos",
        "mystery --flag",
        "bash scripts/start_chaos.sh kill",
    ],
)
def test_a_wrong_command_is_detected(line: str) -> None:
    with pytest.raises(Exception, match=r".*"):
        check(Command("page.md:1", {}, line.split()))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_each_block_names_its_language_and_is_fenced(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text().count("```") == 2 * len(blocks(page))
    assert re.findall(r"\n\n {4}\S.*", prose(page)) == []


# --- Commands that are run unchanged.


TRAIN = """\
import os, pathlib, signal, time

rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps_done = pathlib.Path(f"steps-of-{restarts}")
if rank == 0:
    for step in ((100, 200), (300, 400))[restarts]:
        print(f"step {step}: loss {90 / step if step < 400 else float('nan'):.2f}", flush=True)
    steps_done.touch()
while rank == 0 or not steps_done.exists():
    time.sleep(0.02)
if restarts == 0:
    os.kill(os.getpid(), signal.SIGKILL)
step = 400
raise ValueError(f"loss is nan at step {step}")
"""


def test_the_console_of_the_readme_is_what_the_launcher_prints(tmp_path: Path) -> None:
    (block,) = blocks(README, "console")
    (command,) = commands(block)
    (tmp_path / "train.py").write_text(TRAIN)
    assert command.words[0] == OURS.name
    ended = finish(start(OURS, command.words[1:], cwd=tmp_path, stderr=subprocess.STDOUT))
    assert ended.code == 1
    shown = normalized("\n".join(line for line in block.text.splitlines()[1:] if line != "..."))
    printed = normalized(ended.out)
    assert [line for line in shown if line not in printed] == []
    # The output of workers and that of the launcher reach the console on two paths.
    in_order = [line for line in shown if not line.startswith("step")]
    rest = iter(printed)
    assert all(line in rest for line in in_order), ended.out


def test_the_script_for_ci_kills_a_node_and_succeeds(tmp_path: Path) -> None:
    """The block at the end of docs/local-nodes.md, run by bash."""
    (block,) = blocks(DOCS / "local-nodes.md", "bash")
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('node-' + os.environ['DLROVER_LOCAL_NODE']).touch()\n"
        "while not pathlib.Path('node-3').exists():\n"
        "    time.sleep(0.05)\n"
    )
    program = tmp_path / "bin" / "dlrover-run"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\nexec {sys.executable} -m dlrover_run "$@"\n')
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    # In its own session, so that a job that does not end can be killed completely.
    script = subprocess.Popen(
        ["bash", "-c", block.text],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = script.communicate(timeout=WAIT)
    except subprocess.TimeoutExpired:
        os.killpg(script.pid, signal.SIGKILL)
        raise
    assert script.returncode == 0, printed
    assert "takes its place (1 of 3 node restarts)" in printed


def test_each_target_of_the_readme_exists() -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    targets = [word for command in commands_of(README) if command.words[0] == "make" for word in command.words[1:]]
    assert targets == ["demo", "test"]
    for target in targets:
        plan = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)
        assert plan.stdout


def commands_of(page: Path) -> list[Command]:
    return [command for block in blocks(page, "bash", "console") for command in commands(block) if command.words]


# --- Slurm


SLURM_SCRIPTS = [block for page in PAGES for block in blocks(page, "bash") if "srun " in block.text]
SLURM_SCRIPTS = [block for block in SLURM_SCRIPTS if "dlrover-run" in block.text]


@pytest.mark.parametrize("block", SLURM_SCRIPTS, ids=lambda block: block.place)
def test_the_slurm_scripts_start_the_launcher(block: Block, tmp_path: Path) -> None:
    """With stand-ins for Slurm's programs, and the variables that Slurm sets."""
    stand_ins = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "dlrover-run": 'printf "%s\\n" "$@"',
    }
    spec = job_of(run_block(block.text, tmp_path, stand_ins, SLURM.environ), dict(SLURM.environ))
    assert isinstance(spec, JobSpec)
    assert place_of(spec).master is not None
    assert (spec.rendezvous.backend, place_of(spec).master.host, spec.run_id, spec.workers_per_node) == (
        "master",
        "gpu07",
        "4711.0",
        8,
    )
    assert spec.rules.max_nodes == 4
    (options,) = re.findall(r"^#SBATCH (.*--nodes.*)$", block.text, re.MULTILINE)
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(options.split())


@pytest.mark.parametrize(
    ("code", "restarts"), [*((code, None) for code in (0, 1, 7, 70, *sorted(RETRIED))), (137, 4), (137, 5)]
)
def test_the_job_script_requeues_by_the_codes_of_its_launcher(tmp_path: Path, code: int, restarts: int | None) -> None:
    """The lines are run after a command that ends with a code, as `srun` does."""
    (block,) = (block for block in blocks(DOCS / "schedulers.md", "bash") if "requeue" in block.text)
    environ = {"SLURM_JOB_ID": "17", **({} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)})}
    text = f"(exit {code})\n{block.text}"
    printed = run_block(text, tmp_path, {"scontrol": 'echo "scontrol $@"'}, environ, code)
    requeues = code in RETRIED and (restarts or 0) < 5
    assert [line for line in printed if line.startswith("scontrol")] == ["scontrol requeue 17"] * requeues
