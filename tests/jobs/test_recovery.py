"""After a worker is killed the group recovers with one restart: each time, with both start methods."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from pathlib import Path

import psutil
import pytest
from support.harness import OURS, WAIT, WORKERS, Mailbox, finish, launch, start

from dlrover_run.events.ledger import build_ledger
from dlrover_run.events.reader import read_logs
from dlrover_run.events.records import WorkerExited
from dlrover_run.events.timeline import TimePhase
from dlrover_run.features.inspect.why import Question, explain
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn

pytestmark = pytest.mark.torchrun


def kill_and_recover(mailbox: Mailbox, method: str, kills: int, workers: int = 2) -> None:
    """Kill one worker after each recovery. A restart that failed would appear as a count that increases by more than
    one.
    """
    choose = random.Random(kills)
    job = launch(
        mailbox,
        f"--start-method={method}",
        f"--nproc-per-node={workers}",
        f"--max-restarts={kills}",
        WORKERS / "initialise.py",
    )
    recovered = 0
    try:
        for attempt in range(kills + 1):
            group = mailbox.gather(workers)
            assert [(m["restart"], m["rank"], m["world"]) for m in group] == [
                (attempt, r, workers) for r in range(workers)
            ]
            if attempt < kills:
                os.kill(choose.choice(group)["pid"], signal.SIGKILL)
                recovered = attempt
    finally:
        job.terminate()
        ended = finish(job)
    print(f"{method}: {recovered + 1} kills, {kills} recoveries at the first restart")
    assert ended.code == 128 + signal.SIGTERM
    assert ended.err.count("; restart ") == kills


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_hundred_kills_a_hundred_recoveries(mailbox: Mailbox, method: str) -> None:
    kill_and_recover(mailbox, method, 100)


def test_a_restart_budget_that_is_used_up_ends_the_job(mailbox: Mailbox) -> None:
    script = mailbox.directory / "fail.py"
    script.write_text("raise SystemExit(9)")
    journal = mailbox.directory / "journal"
    ended = finish(start(OURS, ["--max-restarts=2", f"--journal={journal}", script], cwd=mailbox.directory))
    assert ended.code == 9
    assert "2 of 2 restarts were used" in ended.err
    assert re.findall(r"rank 0 exited with code 9; (restart .*)$", ended.err, re.MULTILINE) == [
        "restart 1 of 2",
        "restart 2 of 2",
    ]
    (log,) = logs = read_logs(journal)
    assert [event.code for event in log.events if isinstance(event, WorkerExited)] == [9, 9, 9]
    job, worker = explain(logs, Question.NOW).codes
    assert job == ("why.job_failed", "worker_failed", "restarts_used")
    assert worker[:2] == ("why.failed_worker", "why.lived")
    # The memory of a worker that lives for a moment is measured, or it is not.
    assert worker[2:] in ((), ("why.used_memory",))
    assert build_ledger(logs).totals()[TimePhase.UNKNOWN] == 0


def test_a_script_that_never_starts_to_work_ends_early_with_the_reason(mailbox: Mailbox) -> None:
    script = mailbox.directory / "fail.py"
    script.write_text("raise SystemExit(9)")
    ended = finish(start(OURS, ["--max-restarts=10", script], cwd=mailbox.directory))
    assert ended.code == 9
    assert ended.err.count("exited with code 9; restart ") == 4
    message = " ".join(ended.err.split())
    assert "4 of 10 restarts were used. 5 rounds in succession failed before any worker had got through" in message
    assert "--rdzv-conf early_failure_limit=0 goes on" in message


@pytest.mark.long
@pytest.mark.parametrize(
    ("work", "flags"),
    [
        ("from dlrover_run.training import CheckpointDirectory; CheckpointDirectory('checkpoints').save(1, {})", []),
        ("pass", ["--rdzv-conf=early_failure_limit=0"]),
    ],
    ids=["checkpoint", "no limit"],
)
def test_a_script_that_worked_or_disabled_the_limit_uses_all_restarts(
    mailbox: Mailbox, work: str, flags: list[str]
) -> None:
    script = mailbox.directory / "fail.py"
    script.write_text(f"import sys\n{work}\nraise SystemExit(9)\n")
    ended = finish(start(OURS, ["--max-restarts=5", *flags, script], cwd=mailbox.directory))
    assert "5 of 5 restarts were used." in ended.err


@pytest.mark.long
def test_a_world_of_one_worker_with_a_process_group_uses_all_restarts(mailbox: Mailbox) -> None:
    kill_and_recover(mailbox, "forkserver", 6, workers=1)


def test_a_restart_does_not_need_files_that_a_cleaner_removed_from_tmp(mailbox: Mailbox) -> None:
    script = mailbox.directory / "clean.py"
    script.write_text(
        "import os, pathlib, shutil\n"
        "for left in pathlib.Path(os.environ['TMPDIR']).iterdir(): shutil.rmtree(left)\n"
        "raise SystemExit(9)\n"
    )
    temporary = mailbox.directory / "tmp"
    temporary.mkdir()
    job = start(OURS, ["--max-restarts=2", script], cwd=mailbox.directory, env={"TMPDIR": str(temporary)})
    assert finish(job).code == 9
    assert list(temporary.iterdir()) == []


def test_the_loss_of_the_template_is_harmless(mailbox: Mailbox) -> None:
    flags = ["--start-method=forkserver", "--nproc-per-node=2", "--max-restarts=1"]
    job = launch(mailbox, *flags, WORKERS / "initialise.py")
    first = mailbox.gather(2)
    workers = {m["pid"] for m in first}
    below = psutil.Process(job.pid).children(recursive=True)
    template = next(p for p in below if p.pid not in workers and "_dlrover_template" in " ".join(p.cmdline()))
    template.kill()
    os.kill(first[1]["pid"], signal.SIGKILL)
    assert [(m["restart"], m["rank"]) for m in mailbox.gather(2)] == [(1, 0), (1, 1)]
    job.terminate()
    assert finish(job).code == 128 + signal.SIGTERM


def test_a_fixed_port_is_available_again_although_a_child_of_rank_0_still_listens(
    mailbox: Mailbox, free_port: int
) -> None:
    """Where rank 0 hosts the store, a forked child, such as a data loader, inherits its socket and outlives its parent
    for a moment."""
    script = mailbox.script(
        "listen.py",
        "import os, signal, socket\n"
        "store = socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    while True: signal.pause()\n"
        "post()\n"
        "signal.pause()\n",
    )
    flags = [f"--master-port={free_port}", "--max-restarts=2"]
    job = launch(mailbox, *flags, script, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    for attempt in range(2):
        message = mailbox.receive()
        assert message["restart"] == attempt
        os.kill(message["pid"], signal.SIGKILL)
    assert mailbox.receive()["restart"] == 2
    job.terminate()
    assert finish(job).code == 128 + signal.SIGTERM


def test_a_signal_to_a_worker_that_has_just_exited_does_not_make_it_a_victim() -> None:
    """The kernel accepts a signal for a zombie, and it has no effect."""

    async def scenario() -> ManagedProcess[ProcessSpec]:
        given = ProcessSpec(name="rank 0", argv=("sh", "-c", "exit 7"), environment=os.environ)
        ended: asyncio.Future[ManagedProcess[ProcessSpec]] = asyncio.get_running_loop().create_future()
        worker = ManagedProcess(spawn(given), given, ended.set_result)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        worker.stop(signal.SIGTERM, grace=WAIT)
        return await asyncio.wait_for(ended, WAIT)

    worker = asyncio.run(scenario())
    assert (worker.code, worker.stopped_with) == (7, None)


FAILURES = 20

SCRIPT = """
import atexit, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
if "slow exit" in sys.argv and dist.get_rank() == 1:
    # Handlers run in the reverse of their order: the connections close, and the process goes on for a while.
    atexit.register(time.sleep, 30)
    atexit.register(dist.destroy_process_group)
try:
    dist.all_reduce(one)
    if dist.get_rank() == 1:
        raise ValueError("a bad label")
    dist.all_reduce(one)
finally:
    if "closed first" in sys.argv:
        dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["by itself", "closed first", "slow exit"])
def test_the_worker_with_an_error_of_its_own_is_the_root_cause_and_not_its_peer(how: str, tmp_path: Path) -> None:
    """Its connections close before its peer can see the reason, and its peer may exit first."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node=2", "--start-method=forkserver", f"--max-restarts={FAILURES - 1}"]
    ended = finish(start(OURS, [*flags, script, how], cwd=tmp_path), timeout=600)
    named = re.findall(r"into the round, (rank \d)", " ".join(ended.err.split()))
    assert named == ["rank 1"] * (FAILURES - 1), ended.err
    assert "rank 1 raised ValueError: a bad label" in ended.err.partition("Root Cause")[2]
