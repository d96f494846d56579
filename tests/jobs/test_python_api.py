"""Launching from Python: results, failures and the state of the caller's process afterwards."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.harness import WAIT, Mailbox, environment, kill_leftovers, only_long, still_alive, watched

import dlrover_run


def config(workers: int = 2, **options: Any) -> dlrover_run.LaunchConfig:
    return dlrover_run.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=workers, max_restarts=0, **options)


def describe(first: int, second: object) -> dict[str, Any]:
    return {"rank": os.environ["RANK"], "args": (first, second), "parent": os.getppid()}


def fail(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise ValueError("the reason")
    signal.pause()


def test_a_function_runs_on_every_rank_and_its_results_come_back() -> None:
    results = dlrover_run.elastic_launch(config(3), describe)(1, "rank ${local_rank}")
    assert {rank: (r["rank"], r["args"]) for rank, r in results.items()} == {
        rank: (str(rank), (1, f"rank {rank}")) for rank in range(3)
    }
    assert dlrover_run.elastic_launch(config(1), bytes)(3_000_000) == {0: bytes(3_000_000)}


def test_a_failing_function_raises_with_the_first_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(dlrover_run.ChildFailedError, match="ValueError: the reason") as failed:
        dlrover_run.elastic_launch(config(2), fail)(1)
    rank, end = failed.value.get_first_failure()
    assert rank == 1
    assert end.error is not None
    assert end.error.message == "ValueError: the reason"
    assert list(failed.value.failures) == [1]
    assert "rank 1 raised ValueError: the reason" in capfd.readouterr().err


def test_a_command_returns_no_result_for_each_rank_as_in_torch(capfd: pytest.CaptureFixture[str]) -> None:
    assert dlrover_run.elastic_launch(config(2), "echo")("hello", "$local_rank") == {0: None, 1: None}
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "hello 0", "hello 1"]


@pytest.fixture
def no_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make cloudpickle unimportable, here and in programs that are started."""
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


@pytest.mark.usefixtures("no_cloudpickle")
def test_a_function_that_cannot_be_pickled_is_reported_in_one_sentence() -> None:
    with pytest.raises(dlrover_run.SpecError, match=r"install cloudpickle, .* put a top-level function into a file"):
        dlrover_run.elastic_launch(config(), lambda: None)()


def test_a_function_that_only_cloudpickle_can_pickle_runs_on_every_rank() -> None:
    """A closure, and what Ray makes of a function of its driver: a function of a main module that does not have it."""
    base = 40
    assert dlrover_run.elastic_launch(config(2), lambda more: base + more)(2) == {0: 42, 1: 42}
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("class Answer:\n    rank = 0\ndef work():\n    a = Answer()\n    a.rank = 7\n    return a", space)
    assert [answer.rank for answer in dlrover_run.elastic_launch(config(2), space["work"])().values()] == [7, 7]


def test_a_function_that_nothing_can_pickle_is_reported_in_one_sentence() -> None:
    with pytest.raises(dlrover_run.SpecError, match=r"an argument cannot be pickled \(.*lock"):
        dlrover_run.elastic_launch(config(), print)(threading.Lock())


class Hostile:
    """A result that a worker can pickle and the caller cannot unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def give_hostile() -> Hostile:
    return Hostile()


def give_lambda() -> Any:
    return lambda: None


def leave(code: int) -> None:
    os._exit(code)


def test_a_result_that_cannot_be_unpickled_is_reported_in_one_sentence() -> None:
    with pytest.raises(
        dlrover_run.SpecError, match=r"the return value of rank 0 cannot be unpickled here \(ValueError"
    ):
        dlrover_run.elastic_launch(config(1), give_hostile)()


def test_a_result_that_cannot_be_pickled_is_reported_and_the_error_can_be_pickled() -> None:
    with pytest.raises(dlrover_run.ChildFailedError, match="what the function returned cannot be pickled") as failed:
        dlrover_run.elastic_launch(config(1), give_lambda)()
    copy = pickle.loads(pickle.dumps(failed.value))
    assert (str(copy), copy.exit_code, copy.get_first_failure()) == (
        str(failed.value),
        1,
        failed.value.get_first_failure(),
    )


CATCH_TORCHS = """
import os, pickle, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
import dlrover_run
def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    import signal; signal.pause()
@record
def main():
    config = dlrover_run.LaunchConfig(1, 1, 2, max_restarts=0)
    try:
        dlrover_run.elastic_launch(config, fail)()
    except ChildFailedError as error:
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, ChildFailedError) and isinstance(copy, dlrover_run.ChildFailedError)
        rank, failure = error.get_first_failure()
        print(rank, list(error.failures), failure.exitcode, failure.local_rank, failure.signal_name())
        print(failure.message["message"], failure.timestamp > 0, error.format_msg().count("ValueError: the reason"))
        raise
if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@pytest.mark.torchrun
def test_a_failure_is_torchs_exception_where_torch_is_imported(tmp_path: Path) -> None:
    """It has the attributes that torch's `@record`, which reads it, and the code of users need."""
    (tmp_path / "program.py").write_text(CATCH_TORCHS)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=WAIT
    )
    assert done.stdout == "1 [1] 1 1 <N/A>\nValueError: the reason True 1\n", done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the reason")
    assert "During handling" not in done.stderr


def test_an_exception_does_not_import_torch() -> None:
    source = "import sys, dlrover_run\ntry:\n    dlrover_run.main(['--no-python', 'false'])\n"
    source += "except dlrover_run.ChildFailedError as error:\n    print(error.exit_code, 'torch' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT)
    assert done.stdout == "1 False\n", done.stderr


def finders() -> list[str]:
    return [type(finder).__module__ for finder in sys.meta_path]


@pytest.mark.long
def test_the_steps_of_a_function_s_optimizer_are_counted() -> None:
    found = dlrover_run.elastic_launch(config(1, progress="optimizer"), finders)()
    assert "dlrover_run.observe.optimizer_steps" in found[0]


@pytest.mark.parametrize("end", [sys.exit, leave])
def test_a_function_that_exits_its_process_with_success_returns_none(end: Any) -> None:
    assert dlrover_run.elastic_launch(config(2), end)(0) == {0: None, 1: None}


PROGRAM = """
import dlrover_run, os
def work(): return "worked"
{guard}
    for function in (work, os.getpgid):
        try:
            results = dlrover_run.elastic_launch(dlrover_run.LaunchConfig(1, 1, 1, max_restarts=0), function)
            print(results() if function is work else sorted(results(0)))
        except Exception as error:
            print(type(error).__name__, error)
"""


GUARD, NONE = "if __name__ == '__main__':", "if True:"
REFUSED = "SpecError elastic_launch: the function or an argument is defined in a notebook"
WAYS = {"file": ["program.py"], "module": ["-m", "program"], "command": ["-c"], "input": ["-"]}


@pytest.mark.parametrize(
    ("how", "guard", "cloudpickle", "printed"),
    [
        ("file", GUARD, True, "{0: 'worked'}"),
        ("module", GUARD, True, "{0: 'worked'}"),
        ("command", NONE, True, "{0: 'worked'}"),
        ("input", NONE, True, "{0: 'worked'}"),
        ("command", NONE, False, REFUSED),
        ("input", NONE, False, REFUSED),
    ],
)
def test_a_function_of_the_main_module_is_found_sent_by_its_code_or_refused(
    how: str, guard: str, cloudpickle: bool, printed: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not cloudpickle:
        request.getfixturevalue("no_cloudpickle")
    first, second = run_program(WAYS[how], guard, tmp_path).splitlines()
    assert first.startswith(printed)
    assert cloudpickle or "install cloudpickle" in first
    assert second == "[0]"


def test_a_main_module_that_launches_during_its_import_is_reported(tmp_path: Path) -> None:
    shown = run_program(WAYS["file"], NONE, tmp_path)
    assert "RuntimeError" in shown
    assert GUARD in shown


def run_program(words: list[str], guard: str, directory: Path) -> str:
    source = PROGRAM.format(guard=guard)
    (directory / "program.py").write_text(source)
    command = [sys.executable, *words, *([source] if words == ["-c"] else [])]
    done = subprocess.run(command, input=source, cwd=directory, capture_output=True, text=True, timeout=WAIT)
    return done.stdout


def test_two_programs_are_one_job_of_two_nodes(tmp_path: Path, free_port: int) -> None:
    """Each gets the results of its own ranks, and only the launchers have the job's secret."""
    (tmp_path / "program.py").write_text(
        "import os, dlrover_run\n"
        "def work():\n"
        "    return os.environ['WORLD_SIZE'], 'DLROVER_RDZV_TOKEN' in os.environ\n"
        "if __name__ == '__main__':\n"
        "    meeting = {'auth': 'required', 'is_host': os.environ['WISH'] == '0', 'rank': int(os.environ['WISH'])}\n"
        "    config = dlrover_run.LaunchConfig(\n"
        f"        2, 2, 1, rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:{free_port}', rdzv_configs=meeting\n"
        "    )\n"
        "    print(dlrover_run.elastic_launch(config, work)(), 'DLROVER_RDZV_TOKEN' in os.environ)\n"
    )
    programs = [
        subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=environment({"DLROVER_RDZV_TOKEN": "secret", "WISH": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, program in enumerate(programs):
            out, err = program.communicate(timeout=WAIT)
            assert (out, program.returncode) == (f"{{{rank}: ('2', False)}} True\n", 0), err
    finally:
        for program in programs:
            program.kill()


@pytest.mark.torchrun
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_logs_specs_redirect_and_name_ranks(tmp_path: Path, whose: str) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    specs = {
        "ours": dlrover_run.LogsSpecs(log_dir=str(tmp_path), redirects={1: 1}),
        "torch's": DefaultLogsSpecs(log_dir=str(tmp_path), redirects={1: Std.OUT}),
    }[whose]
    dlrover_run.elastic_launch(config(2, logs_specs=specs, run_id="job"), "echo")("x")
    logs = [path.relative_to(next(tmp_path.glob("job_*"))).as_posix() for path in tmp_path.rglob("*.log")]
    assert logs == ["attempt_0/1/stdout.log"]


def test_main_accepts_a_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('ran')")
    dlrover_run.main(["--rdzv-conf=unheard_of=1", str(script), str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == "ran"
    assert "warning: --rdzv-conf contains 'unheard_of'" in capfd.readouterr().err
    script.write_text("raise SystemExit(5)")
    with pytest.raises(dlrover_run.ChildFailedError) as failed:
        dlrover_run.main([str(script)])
    assert failed.value.exit_code == 5


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--help"], 0, "--nproc-per-node"),
        (["--version"], 0, "dlrover-run "),
        (["--nproc-per-node=none", "x.py"], 2, "--nproc-per-node 'none'"),
    ],
)
def test_main_exits_as_argparse_does_where_no_job_starts(
    words: list[str], code: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        dlrover_run.main(words)
    printed = capfd.readouterr()
    assert left.value.code == code
    assert shown in (printed.err if code else printed.out)
    assert printed.err.count("\n") <= 2


def test_the_package_imports_nothing_until_it_is_used() -> None:
    code = "import sys, dlrover_run; print(sorted(m for m in sys.modules if m.startswith('dlrover_run')))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "['dlrover_run']"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, *only_long(signal.SIGINT)])
def test_the_end_of_the_caller_ends_the_job(mailbox: Mailbox, number: signal.Signals, tmp_path: Path) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text(
        "import sys, dlrover_run\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'workers')!r})\n"
        "def work():\n"
        "    import signal\n"
        "    from post import post\n"
        "    post()\n"
        "    signal.pause()\n"
        "if __name__ == '__main__':\n"
        "    dlrover_run.elastic_launch(dlrover_run.LaunchConfig(1, 1, 2), work)()\n"
    )
    process = subprocess.Popen(
        [sys.executable, caller], env=environment({"TEST_MAILBOX": mailbox.name}), stderr=subprocess.DEVNULL
    )
    with watched(*(message["pid"] for message in mailbox.gather(2))) as workers:
        process.send_signal(number)
        assert process.wait(WAIT) != 0
        assert still_alive(workers, WAIT) == 0
    assert json.dumps(mailbox.pending()) == "[]"


FORKS_WHILE_IT_RUNS = """\
import os, signal, threading
import dlrover_run
from post import post
def work():
    post()
    signal.pause()
if __name__ == "__main__":
    launch = dlrover_run.elastic_launch(dlrover_run.LaunchConfig(1, 1, 1), work)
    threading.Thread(target=launch, daemon=True).start()
    input()
    # As a Pool or a DataLoader does.
    if (forked := os.fork()) == 0:
        os.close(1)
        signal.pause()
    print(forked, flush=True)
    signal.pause()
"""


def test_a_fork_of_the_caller_does_not_keep_the_job_alive(mailbox: Mailbox, tmp_path: Path) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text(FORKS_WHILE_IT_RUNS)
    variables = environment({"TEST_MAILBOX": mailbox.name, "PYTHONPATH": str(Path(__file__).parents[1] / "workers")})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, caller], env=variables, text=True, **pipes)
    assert process.stdout is not None
    assert process.stdin is not None
    with watched(*(message["pid"] for message in mailbox.gather(1))) as workers:
        process.stdin.write("\n")
        process.stdin.flush()
        fork = int(process.stdout.readline())
        try:
            process.kill()
            assert process.wait(WAIT) == -signal.SIGKILL
            assert still_alive(workers, 60.0) == 0
        finally:
            os.kill(fork, signal.SIGKILL)


def test_the_result_comes_while_a_fork_of_the_caller_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread forks just when the pipe of the result has been made."""
    forks: list[int] = []
    popen = subprocess.Popen

    def fork_first(*args: Any, **options: Any) -> Any:
        forks.append(fork := os.fork())
        if not fork:
            signal.pause()
            os._exit(0)
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", fork_first)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(dlrover_run.elastic_launch(config(1), len)("one")), daemon=True
    )
    thread.start()
    thread.join(60.0)
    for fork in forks:
        os.kill(fork, 0)
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
    assert results == [{0: 3}]


def test_a_configuration_ignores_the_variables_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "none")
    monkeypatch.setenv("PET_STANDALONE", "none")
    assert dlrover_run.elastic_launch(config(1), len)("one") == {0: 3}


def test_a_rendezvous_timeout_is_a_setting_as_in_torch() -> None:
    assert config(rdzv_timeout=7, rdzv_configs={"rank": 0}).rdzv_configs == {"rank": 0, "timeout": 7}
    assert config().rdzv_configs == {}


def test_a_signal_that_the_caller_ignores_stays_ignored(mailbox: Mailbox, tmp_path: Path) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text(
        "import os, signal, dlrover_run\n"
        "def work():\n"
        f"    import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'workers')!r})\n"
        "    from post import post\n"
        "    post()\n"
        f"    os.open({str(tmp_path / 'turn')!r}, os.O_RDONLY)\n"
        "    return 'worked'\n"
        "if __name__ == '__main__':\n"
        "    print(dlrover_run.elastic_launch(dlrover_run.LaunchConfig(1, 1, 1, max_restarts=0), work)())\n"
    )
    os.mkfifo(tmp_path / "turn")
    process = subprocess.Popen(
        [sys.executable, caller],
        env=environment({"TEST_MAILBOX": mailbox.name}),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    with watched(mailbox.receive()["pid"]) as workers:
        try:
            process.send_signal(signal.SIGHUP)
            # Opened for reading and writing it does not block, even if the worker is gone.
            turn = os.open(tmp_path / "turn", os.O_RDWR)
            assert process.communicate(timeout=WAIT)[0] == "{0: 'worked'}\n"
            assert process.returncode == 0
            os.close(turn)
        finally:
            process.kill()
            kill_leftovers(workers)
