"""What a worker observes, compared with torchrun: with its recorded answers, and in `make test-long` with torchrun
itself.

Each test names where ours differs on purpose.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.harness import OURS, TORCHRUN, WORKERS, Launcher, Mailbox, environment, finish, launch, only_long, run

pytestmark = pytest.mark.torchrun
OBSERVE = WORKERS / "observe.py"

FRESH_EACH_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TEST_MAILBOX"}
OURS_DIFFERS = {
    "MASTER_ADDR": "a host name that may not resolve has no advantage over the loopback address on one machine",
    "NODE_RANK": "a DLRover user expects it",
    "NODE_NUM": "a DLRover user expects it",
    "WORKER_RANK": "a DLRover user expects it",
    "WORKER_NUM": "a DLRover user expects it",
    "DLROVER_CHECKPOINT_MARK": "a job that has written a checkpoint does not stop early",
    "DLROVER_PLANNED_CHANGE": "a worker waits after its checkpoint for a change that is about to be made",
    "DLROVER_CHECKPOINT_MEMORY": "a checkpoint can be held in memory",
    "DLROVER_CHECKPOINT_MEMORY_TOKEN": "a checkpoint can be held in memory",
    "NCCL_RAS_ADDR": "NCCL can be asked where the workers of one job are, when they hang",
    "DLROVER_PROGRESS": "a worker can report its steps",
}


def observe(
    launcher: Launcher, mailbox: Mailbox, args: list[Any], workers: int = 2, **options: Any
) -> list[dict[str, Any]]:
    result = finish(launch(mailbox, *args, launcher=launcher, **options))
    assert result.code == 0, result.err
    return mailbox.gather(workers, timeout=0)


class Answers:
    """What torchrun's workers observe, by the name of a case: recorded for a version of torch or from a real launch."""

    FILE = Path(__file__).with_name("workers.json")
    PROCESS = ("argv", "orig_argv", "cwd", "path0", "executable", "unbuffered", "leads_session", "leads_group", "fds")
    FACTS = (*PROCESS, "name", "blocked", "dispositions")

    def __init__(self, mailbox: Mailbox, live: bool) -> None:
        self._mailbox, self._live = mailbox, live

    def theirs(self, case: str, args: list[Any], workers: int = 2, **options: Any) -> list[dict[str, Any]]:
        """The answer of torchrun. That of a real launch has to equal the record, which `RECORD_ANSWERS=1` replaces."""
        recorded = json.loads(self.FILE.read_text())
        if not self._live:
            return recorded["answers"][case]  # type: ignore[no-any-return]
        answers = self._observe(TORCHRUN, args, workers, **options)
        version = metadata.version("torch").partition("+")[0]
        if os.environ.get("RECORD_ANSWERS"):
            recorded["torch"] = version
            recorded["answers"][case] = answers
            self.FILE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        if version == recorded["torch"]:
            assert answers == recorded["answers"][case]
        return answers

    def ours(self, args: list[Any], workers: int = 2, **options: Any) -> list[dict[str, Any]]:
        return self._observe(OURS, args, workers, **options)

    def _observe(self, launcher: Launcher, args: list[Any], workers: int, **options: Any) -> list[dict[str, Any]]:
        before = environment({"TMPDIR": str(self._mailbox.directory), **options.get("env", {})})
        seen = observe(launcher, self._mailbox, args, workers, **options)
        return [self._portable(worker, before) for worker in seen]

    def _portable(self, worker: dict[str, Any], before: dict[str, str]) -> dict[str, Any]:
        """The facts, with the variables that the launcher set, and a placeholder for each path of this machine."""
        environ = worker["environ"]
        changed = {key: value for key, value in environ.items() if before.get(key) != value}
        facts = {fact: worker[fact] for fact in self.FACTS}
        facts["environ"] = {key: value for key, value in changed.items() if key not in FRESH_EACH_RUN}
        facts["removed"] = sorted(before.keys() - environ.keys())
        text = json.dumps(facts)
        for path, word in (
            (sys.executable, "PYTHON"),
            (os.path.realpath(sys.executable), "PYTHON"),
            (str(WORKERS), "WORKERS"),
            (str(self._mailbox.directory), "HERE"),
        ):
            text = text.replace(json.dumps(path)[1:-1], word)
        # Descriptors that multiprocessing, in which torchrun runs a path, names on the command line.
        return json.loads(re.sub(r"(tracker_fd|pipe_handle)=\d+", r"\1=N", text))  # type: ignore[no-any-return]


@pytest.fixture(params=["recorded", pytest.param("live", marks=pytest.mark.rival)])
def answers(request: pytest.FixtureRequest, mailbox: Mailbox) -> Answers:
    return Answers(mailbox, request.param == "live")


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (["--nproc-per-node=2"], {}),
        (["--nproc-per-node=1"], {}),
        (["--standalone", "--nproc_per_node=2", "--role=trainer", "--max-restarts=3"], {}),
        (["--nproc-per-node=2", "--virtual-local-rank"], {"CUDA_VISIBLE_DEVICES": "3, 5,7"}),
        (["--nproc-per-node=2", "--virtual-local-rank"], {"CUDA_VISIBLE_DEVICES": None}),
        (["--nproc-per-node=2"], {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
        (["--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1"], {"CUDA_VISIBLE_DEVICES": "1"}),
        (
            ["--master-port=0", "--nproc-per-node=2", "--rdzv-id=some-id"],
            {"PET_ROLE": "from-env", "PET_MAX_RESTARTS": "1"},
        ),
    ],
)
def test_the_environment_of_a_worker(answers: Answers, flags: list[str], env: dict[str, str | None]) -> None:
    workers = 1 if "--nproc-per-node=1" in flags else 2
    case = shlex.join([*(f"{key}={value}" for key, value in env.items()), *flags])
    theirs = answers.theirs(case, [*flags, OBSERVE], workers, env=env)
    ours = answers.ours([*flags, OBSERVE], workers, env=env)
    for their, our in zip(theirs, ours, strict=True):
        assert our["removed"] == their["removed"]
        compared = their["environ"].keys() | our["environ"].keys()
        differing = {key for key in compared if their["environ"].get(key) != our["environ"].get(key)}
        assert differing <= OURS_DIFFERS.keys()
    assert {"NODE_RANK": "0", "NODE_NUM": "1"}.items() <= ours[0]["environ"].items()


def test_a_virtual_local_rank_uses_the_variable_of_rocm_first(launcher: Launcher, mailbox: Mailbox) -> None:
    """ROCm lets it hide devices of CUDA_VISIBLE_DEVICES; torchrun before 2.15 does not change it."""
    if launcher.is_older_than(2, 15):
        pytest.skip("torchruns before leave that variable alone")
    env = {"HIP_VISIBLE_DEVICES": "4, 6", "CUDA_VISIBLE_DEVICES": "0"}
    seen = observe(launcher, mailbox, ["--nproc-per-node=2", "--virtual-local-rank", OBSERVE], env=env)
    named = [(s["environ"]["HIP_VISIBLE_DEVICES"], s["environ"]["CUDA_VISIBLE_DEVICES"]) for s in seen]
    assert named == [("4", "4"), ("6", "6")]


def test_run_ids_and_error_files_have_torchruns_form(launcher: Launcher, mailbox: Mailbox) -> None:
    seen = observe(launcher, mailbox, ["--nproc-per-node=2", OBSERVE])
    environ = seen[1]["environ"]
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", environ["TORCHELASTIC_RUN_ID"])
    assert environ["TORCHELASTIC_ERROR_FILE"].endswith("/attempt_0/1/error.json")
    assert environ["TORCHELASTIC_RUN_ID"] == seen[0]["environ"]["TORCHELASTIC_RUN_ID"]
    assert environ["MASTER_PORT"] == seen[0]["environ"]["MASTER_PORT"]


@pytest.mark.parametrize(
    "args",
    [
        [OBSERVE, "a", "", "--nproc-per-node=9", "-h", "$local_rank", "${local_rank}x", "$$", "$HOME", "--", "-m"],
        ["--", OBSERVE, "x"],
        ["-m", "observe", "--flag", "${local_rank}"],
        ["--no-python", sys.executable, OBSERVE, "plain"],
        ["--run-path", OBSERVE, "one", "--two=${local_rank}"],
    ],
    ids=["script", "double-dash", "module", "no-python", "run-path"],
)
def test_arguments_interpreter_and_process_state(
    answers: Answers, args: list[Any], request: pytest.FixtureRequest
) -> None:
    env = {"PYTHONPATH": str(WORKERS)}
    case = request.node.callspec.id.partition("-")[2]
    theirs = answers.theirs(case, ["--nproc-per-node=2", *args], env=env)
    for their, our in zip(theirs, answers.ours(["--nproc-per-node=2", *args], env=env), strict=True):
        for fact in ("argv", "cwd", "executable", "unbuffered", "leads_session", "leads_group", "name", "blocked"):
            if "--run-path" in args and fact in ("leads_session", "leads_group", "unbuffered"):
                continue  # torchrun runs it in a multiprocessing child, ours in a fresh interpreter as for a script.
            assert our[fact] == their[fact], fact
        if "--run-path" not in args:
            assert our["orig_argv"] == their["orig_argv"]
            assert our["path0"] == their["path0"]
            assert our["dispositions"] == their["dispositions"]
            assert our["fds"] == their["fds"]


def test_a_worker_that_is_not_watched_has_no_descriptor_of_ours(answers: Answers) -> None:
    env = {"PYTHONPATH": str(WORKERS)}
    args = ["--nproc-per-node=2", "--", OBSERVE, "x"]
    theirs, ours = answers.theirs("double-dash", args, env=env), answers.ours(["--stall-action=off", *args], env=env)
    assert [one["fds"] for one in ours] == [one["fds"] for one in theirs]


def test_python_exec_replaces_the_interpreter(launcher: Launcher, mailbox: Mailbox, tmp_path: Path) -> None:
    wrapper = tmp_path / "my-python"
    wrapper.write_text(f'#!/bin/sh\nTHROUGH=wrapper exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    seen = observe(launcher, mailbox, [OBSERVE], 1, env={"PYTHON_EXEC": str(wrapper)})
    assert seen[0]["environ"]["THROUGH"] == "wrapper"


def test_standard_input_is_inherited(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text("import sys; print('got', sys.stdin.read())")
    question = tmp_path / "question"
    question.write_text("anybody there?")
    with question.open() as stdin:
        assert "got anybody there?" in run(launcher, [script], cwd=tmp_path, stdin=stdin).out


@pytest.mark.long
def test_two_static_nodes_make_one_world(launcher: Launcher, mailbox: Mailbox, free_port: int) -> None:
    common = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port}"]
    nodes = [launch(mailbox, *common, f"--node-rank={rank}", WORKERS / "meet.py", launcher=launcher) for rank in (0, 1)]
    for node in nodes:
        ended = finish(node)
        assert ended.code == 0, ended.err
    seen = mailbox.gather(4, timeout=0)
    assert [m["rank"] for m in seen] == [0, 1, 2, 3]
    assert {m["sum"] for m in seen} == {6.0}
    assert [m["group_rank"] for m in seen] == ["0", "0", "1", "1"]


EXITS = {
    "exit 0": ("raise SystemExit(0)", 0),
    "exit 3": ("raise SystemExit(3)", 3),
    "exception": ("raise ValueError('x')", 1),
    "SIGKILL": ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    "SIGSEGV": ("import os; os.kill(os.getpid(), 11)", 128 + 11),
}


@pytest.mark.parametrize("case", ["SIGSEGV", *only_long(*(case for case in EXITS if case != "SIGSEGV"))])
def test_the_exit_code_of_a_worker_becomes_the_launchers_code(launcher: Launcher, tmp_path: Path, case: str) -> None:
    """torchrun exits with 1 in all cases; ours shows what happened, and `--compat-exit-codes` restores torchrun's."""
    code, ours = EXITS[case]
    script = tmp_path / "end.py"
    script.write_text(code)
    theirs = 0 if ours == 0 else 1
    assert run(launcher, [script], cwd=tmp_path).code == (ours if launcher.is_ours else theirs)
    if launcher.is_ours:
        assert run(launcher, ["--compat-exit-codes", script], cwd=tmp_path).code == theirs


def test_the_error_file_protocol(launcher: Launcher, tmp_path: Path) -> None:
    """A worker's record is read, shown, and passed on to the parent of the launcher."""
    script = tmp_path / "fail.py"
    script.write_text(
        "import os\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1': raise ValueError('the reason')\n"
        "main()\n"
    )
    mine = tmp_path / "launcher_error.json"
    result = run(launcher, ["--nproc-per-node=2", script], cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(mine)})
    assert result.code == 1
    assert "ValueError: the reason" in result.err
    recorded = json.loads(mine.read_text())["message"]
    assert recorded["message"] == "ValueError: the reason"
    assert recorded["errorCode"] == 1
    assert set(recorded["extraInfo"]) == {"py_callstack", "timestamp"}
    assert stat.S_IMODE(os.stat(mine).st_mode) & 0o400


def test_a_restart_keeps_the_contract(launcher: Launcher, mailbox: Mailbox) -> None:
    os.mkfifo(mailbox.directory / "turn")
    flags = ["--nproc-per-node=2", "--max-restarts=2"]
    result = finish(launch(mailbox, *flags, WORKERS / "fail_once.py", launcher=launcher))
    assert result.code == 0, result.err
    seen = mailbox.gather(4, timeout=0)
    assert [(m["restart"], m["rank"]) for m in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ports = [m["port"] for m in seen]
    assert ports[0] == ports[1]
    assert ports[2] == ports[3]
    if launcher.is_ours:
        # Ours differs: every round has a new store on a new port, whatever the environment says.
        assert ports[0] != ports[2]
