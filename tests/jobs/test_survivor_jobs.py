"""Whole jobs whose workers outlive their round: real agents and processes, with a stand-in for the groups of torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.harness import (
    WAIT,
    WORKERS,
    Finished,
    Mailbox,
    agent_of,
    child_named,
    finish,
    kill_leftovers,
    launch,
    still_alive,
    watched,
)

from dlrover_run.events.ledger import build_ledger
from dlrover_run.events.reader import read_logs
from dlrover_run.events.timeline import TimePhase

KEEP = ("--survivors=keep", "--max-restarts=9")


class Job:
    """A job of `survive.py`, whose workers post when they begin a round."""

    def __init__(self, mailbox: Mailbox, *flags: str, workers: int = 3, script: Path | None = None, **env: str) -> None:
        self.mailbox = mailbox
        self.workers = workers
        path = os.pathsep.join([str(WORKERS / "stand_in_torch"), str(WORKERS), os.environ.get("PYTHONPATH", "")])
        self.process = launch(
            mailbox,
            *KEEP,
            f"--nproc-per-node={workers}",
            *flags,
            script or WORKERS / "survive.py",
            env={"PYTHONPATH": path, **env},
        )

    def round(self, workers: int = 0) -> list[dict[str, Any]]:
        """What the workers post when the next round has begun, by rank."""
        # A survivor has the number of restarts with which it was started.
        return sorted(self.mailbox.gather(workers or self.workers), key=lambda one: one["rank"])

    def end(self) -> Finished:
        """Let the workers finish."""
        (self.mailbox.directory / "stop").touch()
        return finish(self.process)

    @property
    def store(self) -> psutil.Process:
        return child_named(agent_of(self.process), "dlrover-store")


@contextmanager
def job(mailbox: Mailbox, *flags: str, **more: Any) -> Iterator[Job]:
    """A job that is ended in any case."""
    started = Job(mailbox, *flags, **more)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
            finish(started.process)


def pids(group: Sequence[dict[str, Any]]) -> list[int]:
    return [one["pid"] for one in group]


def test_a_failure_replaces_the_dead_worker_and_the_others_keep_their_processes(mailbox: Mailbox) -> None:
    with job(mailbox, f"--journal={mailbox.directory / 'journal'}") as started:
        group = started.round()
        assert [one["rank"] for one in group] == [0, 1, 2]
        for killed in (1, 0):
            os.kill(group[killed]["pid"], signal.SIGKILL)
            before, group = group, started.round()
            assert [one["rank"] for one in group] == [0, 1, 2]
            assert [one["variable"] for one in group] == ["0", "1", "2"]
            same = [one["pid"] == other["pid"] for one, other in zip(before, group, strict=True)]
            assert same == [rank != killed for rank in range(3)]
            # The newcomer takes the state of a survivor, and no survivor goes back.
            assert group[killed]["mine"] == 0
            assert {one["step"] for one in group} == {max(one["mine"] for one in group)}
            assert all(one["step"] - one["mine"] <= 1 for rank, one in enumerate(group) if rank != killed)
            assert all(one["mine"] >= before[0]["step"] for rank, one in enumerate(group) if rank != killed)
        ended = started.end()
    assert ended.code == 0
    assert len({message["done"] for message in mailbox.pending()}) == 1
    assert ended.err.count("; restart ") == 2
    assert ended.err.count("2 of 3 workers keep their processes") == 2
    logs = read_logs(mailbox.directory / "journal")
    totals = build_ledger(logs).totals()
    assert (totals[TimePhase.LOST], totals[TimePhase.UNKNOWN]) == (0, 0)


def test_a_worker_that_does_not_leave_its_last_group_is_replaced_in_time_and_without_a_charge(mailbox: Mailbox) -> None:
    with job(mailbox, "--reconfigure-timeout=1") as started:
        group = started.round()
        os.kill(group[2]["pid"], signal.SIGSTOP)
        os.kill(group[0]["pid"], signal.SIGKILL)
        after = started.round()
        assert [one["pid"] == other["pid"] for one, other in zip(group, after, strict=True)] == [False, True, False]
        assert not psutil.pid_exists(group[2]["pid"])
        ended = started.end()
    assert ended.code == 0
    assert ended.err.count("; restart ") == 1


def test_a_worker_that_does_not_join_the_next_group_fails_its_round(mailbox: Mailbox) -> None:
    script = mailbox.directory / "hang.py"
    # The third worker stops itself when it has all handles, once.
    script.write_text(
        "import os, signal, mesh_group\n"
        "real = mesh_group.MeshGroup.form\n"
        "def form(self, *given):\n"
        "    if os.environ['RANK'] == '2' and not os.path.exists('hung'):\n"
        "        open('hung', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    real(self, *given)\n"
        "mesh_group.MeshGroup.form = form\n"
        f"exec(compile(open({str(WORKERS / 'survive.py')!r}).read(), 'survive.py', 'exec'))\n"
    )
    with job(mailbox, "--reconfigure-timeout=2", script=script) as started:
        assert [one["world"] for one in started.round()] == [3, 3, 3]
        ended = started.end()
    assert ended.code == 0
    assert ended.err.count("; restart ") == 1


def test_workers_whose_scripts_have_no_block_restart_as_in_any_job(mailbox: Mailbox) -> None:
    with job(mailbox, script=WORKERS / "hold.py", workers=2) as started:
        group = started.round()
        os.kill(group[1]["pid"], signal.SIGKILL)
        after = started.round()
        assert not set(pids(group)) & set(pids(after))


@pytest.mark.parametrize("plain", [0, 1])
def test_a_worker_without_a_block_lets_all_restart_and_the_job_says_so(mailbox: Mailbox, plain: int) -> None:
    with job(mailbox, script=WORKERS / "survive_mixed.py") as started:
        group = started.round()
        (mailbox.directory / "plain").write_text(str(plain))
        for killed in (plain, 2):
            # First the newcomer has no block, then it is a survivor that fails.
            os.kill(group[killed]["pid"], signal.SIGKILL)
            before, group = group, started.round()
            assert [one["rank"] for one in group] == [0, 1, 2]
            assert not set(pids(before)) & set(pids(group))
        ended = started.end()
    assert ended.code == 0
    assert ended.err.count("; restart ") == 2
    assert ended.err.count("without a block of Survivor") == 1


def test_an_older_torch_restarts_all_and_says_why_once(mailbox: Mailbox) -> None:
    with job(mailbox, workers=2, TEST_TORCH="2.13.0") as started:
        group = started.round()
        for _ in range(2):
            os.kill(group[1]["pid"], signal.SIGKILL)
            before, group = group, started.round()
            assert not set(pids(before)) & set(pids(group))
        ended = started.end()
    assert ended.code == 0
    assert len(re.findall("dlrover-run: .*torch 2.13.0", ended.err)) == 1


def test_the_output_of_a_survivor_stays_in_its_files(mailbox: Mailbox) -> None:
    logs = mailbox.directory / "logs"
    with job(mailbox, f"--log-dir={logs}", "--redirects=1", "--tee=2", workers=2) as started:
        group = started.round()
        os.kill(group[1]["pid"], signal.SIGKILL)
        newcomer = started.round()[1]["pid"]
        assert started.end().code == 0
    text = {one.parent.parent.name + "/" + one.parent.name: one.read_text() for one in logs.rglob("stdout.log")}
    assert re.findall(r"pid (\d+) rank 0", text["attempt_0/0"]) == [str(group[0]["pid"])] * 2
    assert re.findall(r"pid (\d+) rank 1", text["attempt_1/1"]) == [str(newcomer)]
    assert "attempt_1/0" not in text


@pytest.mark.parametrize("killed", ["none", "agent", "store"])
def test_the_store_ends_with_its_agent_and_no_worker_outlives_it(mailbox: Mailbox, killed: str) -> None:
    with job(mailbox, workers=2) as started:
        group = started.round()
        store, agent = started.store, agent_of(started.process)
        workers = [psutil.Process(pid) for pid in pids(group)]
        ports = {one.laddr.port for one in store.net_connections() if one.status == psutil.CONN_LISTEN}
        assert ports
        assert not ports & {int(workers[0].environ()["MASTER_PORT"])}
        with watched(store.pid) as ended:
            if killed == "agent":
                agent.kill()
                finish(started.process)
            elif killed == "store":
                store.kill()
                os.kill(group[1]["pid"], signal.SIGKILL)
                after = started.round()
                assert not set(pids(group)) & set(pids(after))
                assert started.store.pid != store.pid
                assert started.end().code == 0
            else:
                assert started.end().code == 0
            try:
                assert not still_alive(ended, WAIT)
            finally:
                kill_leftovers(ended)


def test_a_job_is_stopped_while_its_workers_change_their_group(mailbox: Mailbox) -> None:
    with job(mailbox, "--reconfigure-timeout=60", "--shutdown-timeout=1") as started:
        group = started.round()
        os.kill(group[2]["pid"], signal.SIGSTOP)
        os.kill(group[0]["pid"], signal.SIGKILL)
        # The survivor reports its round lost, and waits for the one that is stopped.
        with watched(*pids(group)) as ended:
            started.process.send_signal(signal.SIGTERM)
            assert finish(started.process).code == 128 + signal.SIGTERM
            assert not still_alive(ended, WAIT)


def test_nodes_change_and_the_workers_of_the_others_stay(mailbox: Mailbox) -> None:
    flags = ("--local-nodes=3", "--nnodes=2:3", "--rdzv-conf=last_call_timeout=30,lost_after=1")
    with job(mailbox, *flags, workers=1) as started:
        group = started.round(3)
        assert [one["world"] for one in group] == [3, 3, 3]
        lost = psutil.Process(group[2]["pid"]).parent()
        assert lost is not None
        lost.kill()
        after: list[dict[str, Any]] = []
        while not after or after[-1]["world"] < 3 or len(after) % 3:
            after.append(mailbox.receive())
            after = [one for one in after if one["world"] == after[-1]["world"]]
        kept = set(pids(group)) & set(pids(after))
        assert kept == {group[0]["pid"], group[1]["pid"]}
        assert started.end().code == 0


def test_workers_stay_while_their_job_waits_for_another_node(mailbox: Mailbox) -> None:
    with job(mailbox, "--local-nodes=2", "--rdzv-conf=lost_after=1", workers=1) as started:
        group = started.round(2)
        lost = psutil.Process(group[1]["pid"]).parent()
        assert lost is not None
        lost.kill()
        after = started.round(2)
        assert [one["world"] for one in after] == [2, 2]
        assert group[0]["pid"] in pids(after)
        assert group[1]["pid"] not in pids(after)
        ended = started.end()
    assert ended.code == 0
    # The loss of a node costs nothing.
    assert "; restart " not in ended.err


def test_the_stop_of_a_job_leaves_nothing(mailbox: Mailbox) -> None:
    with job(mailbox, "--start-method=forkserver", workers=2) as started:
        group = started.round()
        os.kill(group[0]["pid"], signal.SIGKILL)
        after = started.round()
        assert pids(group)[1] == pids(after)[1]
        tree = [started.process.pid, *(one.pid for one in psutil.Process(started.process.pid).children(recursive=True))]
        with watched(*tree) as ended:
            started.process.send_signal(signal.SIGINT)
            subprocess.Popen.wait(started.process, WAIT)
            assert not still_alive(ended, WAIT)
