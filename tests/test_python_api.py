"""Launching from Python: results, failures and what the caller's process is left with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import WAIT, Mailbox, environment, still_alive, watched

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


def test_large_results_come_back_whole() -> None:
    assert dlrover_run.elastic_launch(config(2), bytes)(3_000_000) == {0: bytes(3_000_000), 1: bytes(3_000_000)}


def test_a_failing_function_raises_with_the_first_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(dlrover_run.ChildFailedError, match="ValueError: the reason") as failed:
        dlrover_run.elastic_launch(config(2), fail)(1)
    rank, end = failed.value.get_first_failure()
    assert rank == 1
    assert end.error is not None
    assert end.error.message == "ValueError: the reason"
    assert list(failed.value.failures) == [1]
    assert "rank 1 raised ValueError: the reason" in capfd.readouterr().err


def test_a_command_returns_no_results(capfd: pytest.CaptureFixture[str]) -> None:
    assert dlrover_run.elastic_launch(config(2), "echo")("hello", "$local_rank") == {}
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "hello 0", "hello 1"]


def test_a_function_that_cannot_be_pickled_is_one_sentence() -> None:
    with pytest.raises(dlrover_run.SpecError, match="top-level function"):
        dlrover_run.elastic_launch(config(), lambda: None)()


def test_logs_specs_redirect_and_name_ranks(tmp_path: Path) -> None:
    specs = dlrover_run.LogsSpecs(log_dir=str(tmp_path), redirects={1: 1})
    dlrover_run.elastic_launch(config(2, logs_specs=specs, run_id="job"), "echo")("x")
    assert [p.relative_to(next(tmp_path.glob("job_*"))).as_posix() for p in tmp_path.rglob("*.log")] == [
        "attempt_0/1/stdout.log"
    ]


@pytest.mark.torchrun
def test_torchs_own_logs_specs_are_understood(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.OUT)
    dlrover_run.elastic_launch(config(2, logs_specs=specs), "echo")("x")
    assert len(list(tmp_path.rglob("stdout.log"))) == 2


def test_main_takes_a_command_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('ran')")
    dlrover_run.main([str(script), str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == "ran"
    script.write_text("raise SystemExit(5)")
    with pytest.raises(dlrover_run.ChildFailedError) as failed:
        dlrover_run.main([str(script)])
    assert failed.value.exit_code == 5


def test_a_bad_command_line_leaves_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        dlrover_run.main(["--nproc-per-node=none", "x.py"])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") <= 2


def test_the_package_imports_nothing_until_it_is_used() -> None:
    code = "import sys, dlrover_run; print(sorted(m for m in sys.modules if m.startswith('dlrover_run')))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "['dlrover_run']"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_caller_ends_the_job(mailbox: Mailbox, number: signal.Signals, tmp_path: Path) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text(
        "import sys, dlrover_run\n"
        f"sys.path.insert(0, {str(Path(__file__).parent / 'workers')!r})\n"
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
