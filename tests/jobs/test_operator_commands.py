"""The operator's commands for a job of several nodes on this machine, from its first round until after its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.harness import OURS, WAIT, Finished, finish, run, start, status_of, until

from dlrover_run import exit_codes
from dlrover_run.command_line import help
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.events.records import FILE_NAME, LogOpened, WorkerFailed
from dlrover_run.events.writer import EventFile
from dlrover_run.features.operate.commands.asker import NO_JOB, REFUSED

NAME = f"operated-{os.getpid()}"


def operate(here: Path, *words: str) -> Finished:
    return run(OURS, words, cwd=here)


def until_round(rounds: int, **counts: int) -> dict[str, object]:
    """Return the status of the job once it is in that round and has these numbers of nodes."""

    def find() -> dict[str, object] | None:
        found = status_of(OURS, NAME)
        return found if found and (found["round"], found["node_counts"]) == (rounds, counts) else None

    return until(find, f"round {rounds} with {counts} was not reached")


@pytest.mark.long
def test_a_job_is_watched_drained_stopped_and_explained(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    flags = ["--local-nodes=3", "--nnodes=2", "--spares=1", "--node-restarts=0", f"--rdzv-id={NAME}", "--log-dir=logs"]
    job = start(OURS, [*flags, script], cwd=tmp_path)
    try:
        first = until_round(1, spare=1, training=2)
        nodes = first["nodes"]
        assert isinstance(nodes, list)
        assert [(node["node"], node["first_rank"]) for node in nodes] == [(0, 0), (1, 1), (None, None)]

        drained = operate(tmp_path, "drain", "1", "--wait", f"--rdzv-id={NAME}")
        assert drained.code == exit_codes.SUCCESS, drained
        assert drained.out.endswith("node 1 has left\n"), drained
        second = until_round(2, training=2)
        assert second["restarts"] == 0
        assert operate(tmp_path, "drain", "1", f"--rdzv-id={NAME}").code == REFUSED

        assert operate(tmp_path, "stop", f"--rdzv-id={NAME}").code == exit_codes.SUCCESS
        ended = finish(job)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
            job.wait()
    assert ended.code == exit_codes.STOPPED_ON_REQUEST
    assert operate(tmp_path, "status", f"--rdzv-id={NAME}").code == NO_JOB
    why = operate(tmp_path, "why", "--json", "logs")
    assert json.loads(why.out)[0][1]["code"] == "stopped_on_request"
    events = operate(tmp_path, "events", "--json", "logs").out.splitlines()
    drained = [json.loads(line) for line in events if '"drained":true' in line]
    assert [event["event"] for event in drained] == ["dlrover.stop.requested"]


@pytest.mark.long
def test_a_job_is_scaled(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    job = start(OURS, ["--local-nodes=2", "--nnodes=1:2", f"--rdzv-id={NAME}", script], cwd=tmp_path)
    try:
        until_round(1, training=2)
        scaled = operate(tmp_path, "scale", "--nodes=1", f"--rdzv-id={NAME}")
        assert (scaled.code, f"the job {NAME!r} accepts: " in scaled.out) == (exit_codes.SUCCESS, True), scaled
        found = until_round(2, spare=1, training=1)
        assert (found["desired_nodes"], found["min_nodes"], found["max_nodes"], found["restarts"]) == ("1", 1, 2, 0)
        for size, code in (("3", REFUSED), ("0", exit_codes.BAD_COMMAND_LINE), ("x", exit_codes.BAD_COMMAND_LINE)):
            assert operate(tmp_path, "scale", f"--nodes={size}", f"--rdzv-id={NAME}").code == code
        assert operate(tmp_path, "scale", "--nodes=1:2", f"--rdzv-id={NAME}").code == exit_codes.SUCCESS
        assert until_round(3, training=2)["desired_nodes"] == ""
        stopped = operate(tmp_path, "stop", "--wait", f"--rdzv-id={NAME}")
        assert stopped.code == exit_codes.SUCCESS, stopped
        assert stopped.out.endswith(f"the job '{NAME}' has ended\n"), stopped
        finish(job)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
            job.wait()
    assert operate(tmp_path, "scale", "--nodes=1", f"--rdzv-id={NAME}").code == NO_JOB


COUNTS = """
import os, time
from dlrover_run.training import report
for step in range(100_000):
    report()
    if os.environ["RANK"] == "1" and step >= 20:
        time.sleep(1000)
    time.sleep(0.05)
"""


@pytest.mark.long
def test_the_steps_and_the_stacks_of_all_nodes(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNTS)
    name = f"{NAME}-stacks"
    flags = ["--local-nodes=2", "--nnodes=2", "--nproc-per-node=1", "--stall-action=report", f"--rdzv-id={name}"]
    job = start(OURS, [*flags, script], cwd=tmp_path)
    try:

        def shown() -> bool:
            nodes = status_of(OURS, name).get("nodes", [])
            steps = [node["progress"]["steps"] for node in nodes if node["progress"]]
            return len(steps) == 2 and sum(steps) >= 60

        until(shown, "the steps of both nodes are not shown")
        found = json.loads(operate(tmp_path, "stacks", "--json", f"--rdzv-id={name}").out)
        assert (found["missing"], found["silent"]) == ([], [])
        lines = {tuple(stack["workers"]): stack["frames"][-1]["line"] for stack in found["stacks"]}
        assert lines == {(0,): 8, (1,): 7}
        one = operate(tmp_path, "stacks", "--rank=1", f"--rdzv-id={name}")
        assert (one.code, "rank 1:" in one.out, "rank 0" in one.out) == (exit_codes.SUCCESS, True, False)
        assert operate(tmp_path, "stacks", "--rank=2", f"--rdzv-id={name}").code == REFUSED
        assert operate(tmp_path, "stop", "--wait", f"--rdzv-id={name}").code == exit_codes.SUCCESS
        finish(job)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
            job.wait()


@pytest.mark.long
def test_the_only_job_here_is_found_without_flags(tmp_path: Path) -> None:
    """In its own network namespace, where no other job is visible."""
    script = tmp_path / "wait.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    words = " ".join(map(str, OURS.command))
    shell = (
        f"{words} {script} & for _ in $(seq 100); do {words} status > status.txt 2>&1 && break; sleep 0.2; done; "
        f"{words} stop; wait $!"
    )
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-c", shell],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT, check=False,
    )  # fmt: skip
    assert done.returncode == exit_codes.STOPPED_ON_REQUEST, done.stderr
    assert "training" in (tmp_path / "status.txt").read_text()


def test_the_failures_of_each_node_are_printed_as_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = LogOpened(time=datetime.now(UTC), schema=1, job="j", host="n1", node_id="a", pid=1, workers=1, began=1)
    log = EventFile(tmp_path / FILE_NAME, head)
    log.append(WorkerFailed(round=1, rank=0, local_rank=0, pid=9, code=1, cause="exception", what="raised KeyError: 1"))
    log.close()
    assert help.run(DLROVER_RUN, ["events", "--by-node", "--json", str(tmp_path)]) == exit_codes.SUCCESS
    (node,) = json.loads(capsys.readouterr().out)
    assert node == {"host": "n1", "agents": 1, "failures": 1, "last_failure": "rank 0 raised KeyError: 1"}
