"""Tasks that make no progress and do not exit, as real processes: what each `--stall-action` does, and what the
operator's commands show. The processes stand in for TensorFlow's."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from pretended import PRETEND, SERVERS, Job
from support.harness import Finished, run, status_of, until

from dlrover_run.events.reader import read_logs
from dlrover_run.events.records import WorkerFailed, WorkerResumed, WorkerStalled, WorkerStarted
from dlrover_run.failures.causes import Cause
from dlrover_run.features.hangs.search.codes import GuiltCode

StartJob = Callable[..., Job]


def operate(here: Path, *words: str) -> Finished:
    return run(SERVERS, words, cwd=here)


def test_a_stopped_worker_is_restarted_alone(start: StartJob, tmp_path: Path) -> None:
    flags = ("--ps=1", "--workers=2", "--stall-action=restart", "--max-restarts=1", f"--journal={tmp_path / 'logs'}")
    # The workers serve the chief: without steps they may idle, and count only when they are stopped.
    job = start(*flags, args=("serve",))
    first = {name: job.up(name) for name in ("ps-0", "chief-0", "worker-0", "worker-1")}
    job.train()
    os.kill(first["worker-0"]["pid"], signal.SIGSTOP)
    replacement = job.up("worker-2")
    assert (replacement["rank"], replacement["version"]) == (first["worker-0"]["rank"], 1)
    out = job.finish("chief-0")
    assert re.search(r"no progress for \d+ s: worker-0 is stopped by a signal", out)
    (log,) = read_logs(tmp_path / "logs")
    (failed,) = [event for event in log.events if isinstance(event, WorkerFailed)]
    assert (failed.name, failed.cause) == ("worker 0", Cause.STALL)
    stalled = [event for event in log.events if isinstance(event, WorkerStalled) and event.guilty]
    assert [(event.name, GuiltCode.STOPPED.within(event.reasons)) for event in stalled] == [("worker 0", True)]
    assert len([event for event in log.events if isinstance(event, WorkerStarted)]) == len(first) + 1


def test_a_stall_is_shown_until_it_is_over(start: StartJob, tmp_path: Path) -> None:
    """A worker hangs in its script and goes on, and then a server is stopped, which its agent replaces anyway."""
    logs = tmp_path / "logs"
    job = start("--ps=1", "--workers=1", "--stall-action=dump", "--stall-timeout=1", f"--log-dir={logs}")
    server = job.up("ps-0")
    for name in ("chief-0", "worker-0"):
        job.up(name)
    job.train()
    job.ordered("worker-0", open=True)
    # It has reported its first step, and now its main thread reads a socket.
    status = until_stalled(tmp_path, job.run_id, "worker-0")
    assert "no progress: worker-0" in status
    run_dir = next(path for path in logs.iterdir() if not path.is_symlink())
    why = json.loads(operate(tmp_path, "why", "--json", str(run_dir)).out)
    assert [reason["code"] for reason in why[0][1:]][-2:] == ["stall.outside", "stall.place"]
    job.send("worker-0", type="step", step=5)
    os.kill(server["pid"], signal.SIGSTOP)
    job.up("chief-1")
    job.train("chief-1")
    out = job.finish("chief-1")
    assert re.search(rf"no progress for \d+ s: worker-0 waits outside of TensorFlow, at {PRETEND}:\d+ in listen", out)
    assert re.search(r"worker-0 makes progress again, after \d+ s", out)
    assert re.search(r"no progress for \d+ s: ps-0 is stopped by a signal", out)
    assert "in listen" in (run_dir / "stacks.txt").read_text()
    (log,) = read_logs(run_dir)
    found = [event for event in log.events if isinstance(event, WorkerStalled | WorkerResumed)]
    assert [(type(event), event.name) for event in found[:2]] == [
        (WorkerStalled, "worker 0"),
        (WorkerResumed, "worker 0"),
    ]
    assert ("ps 0", True) in [(event.name, event.guilty) for event in found if isinstance(event, WorkerStalled)]


def until_stalled(here: Path, run_id: str, name: str) -> str:
    """Wait until the status shows that the task makes no progress. The text of the status."""

    def stalled() -> bool:
        nodes = status_of(SERVERS, run_id).get("nodes", [])
        return any(name in (node["progress"] or {"stalled": ()})["stalled"] for node in nodes)

    until(stalled, f"{name} was not reported as stalled")
    return operate(here, "status", f"--rdzv-id={run_id}").out
