"""One node's tasks as real processes: scripts that stand in for TensorFlow's, under the launcher as it is."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster import quiet_port
from harness import WAIT, kill_leftovers, only_long, still_alive, watched
from pretended import PRETEND, Job, agent_of, scale

from dlrover_run.events.ledger import build_ledger
from dlrover_run.events.reader import read_logs
from dlrover_run.events.records import CheckpointRestored, WorkerFailed, WorkerStarted
from dlrover_run.failures import Cause

PRETEND_DATA = PRETEND.with_name("pretend_data.py")

BACKENDS = ["master", *only_long("etcd", "memory")]


def test_a_job_starts_lets_its_workers_in_and_ends_with_its_chief(start: Callable[..., Job]) -> None:
    job = start("--ps=2", "--workers=2")
    up = [job.up(name) for name in ("ps-0", "ps-1", "chief-0", "worker-0", "worker-1")]
    clusters = [told["cluster"] for told in up]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {role: len(listed) for role, listed in clusters[0].items()} == {"chief": 1, "worker": 2, "ps": 2}
    ports = [address for listed in clusters[0].values() for address in listed]
    assert len(set(ports)) == 5
    job.told("worker-0", open=False)
    job.train()
    for name in ("worker-0", "worker-1"):
        job.told(name, open=True)
    job.do("chief-0", "exit 0")
    for name in ("worker-0", "worker-1"):
        job.told(name, ending=True)
    out = job.ended(0)
    assert "[worker-1]:worker-1 begins\n" in out
    assert "tf-ps-run: chief-0: begins with a fresh model at step 0\n" in out


def test_a_server_that_is_killed_takes_all_with_it_and_all_come_back_where_they_were(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start("--ps=2", "--workers=1", f"--journal={tmp_path / 'journal'}")
    first = {name: job.up(name) for name in ("ps-0", "ps-1", "chief-0", "worker-0")}
    job.train()
    job.told("worker-0", open=True)
    job.send("chief-0", type="step", step=141)
    with watched(*(told["pid"] for told in first.values())) as before:
        os.kill(first["ps-0"]["pid"], signal.SIGKILL)
        second = {name: job.up(name) for name in ("ps-2", "ps-3", "chief-1", "worker-1")}
        assert still_alive(before, WAIT) == 0
    assert {told["version"] for told in second.values()} == {2}
    assert [second[name]["rank"] for name in ("ps-2", "ps-3")] == [0, 1]
    assert second["chief-1"]["cluster"] == first["chief-0"]["cluster"]
    job.train("chief-1", "checkpoint", 126, "/data/model.ckpt-126")
    job.told("worker-1", open=True)
    out = job.finish("chief-1")
    assert "tf-ps-run: chief-1: has restored /data/model.ckpt-126, and goes on after step 126\n" in out
    assert "restored from step 126, at least 15 steps lost" in out
    assert "ps-0 (rank 0) on " in out
    (log,) = read_logs(tmp_path / "journal")
    (failed,) = [event for event in log.events if isinstance(event, WorkerFailed)]
    assert (failed.name, failed.pid, failed.cause) == ("ps 0", first["ps-0"]["pid"], Cause.SIGNAL)
    started = [event for event in log.events if isinstance(event, WorkerStarted)]
    assert Counter((event.role, event.round) for event in started) == {
        (role, version): 2 if role == "ps" else 1 for role in ("ps", "chief", "worker") for version in (1, 2)
    }
    assert Counter(event.local_rank for event in started) == dict.fromkeys(range(4), 2)
    assert [event.step for event in log.events if isinstance(event, CheckpointRestored)] == [0, 126]
    assert len(build_ledger([log]).places) == 4


def test_a_worker_that_only_serves_is_not_waited_for_at_the_end(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=1", "--end-grace=100000", args=("serve",))
    for name in ("ps-0", "chief-0", "worker-0"):
        job.up(name)
    job.train()
    job.finish("chief-0")


@pytest.mark.parametrize(
    ("how", "step", "said"),
    [
        ("fresh", 2001, "chief-0: begins at step 2001, with a model that the script has restored by itself\n"),
        ("live", -1, "chief-0: goes on with the live model; the script decides from where\n"),
    ],
)
def test_what_is_known_of_a_model_is_reported(start: Callable[..., Job], how: str, step: int, said: str) -> None:
    job = start("--ps=1", "--workers=0")
    job.up("ps-0")
    job.up("chief-0")
    job.train(how=how, step=step)
    assert said in job.finish("chief-0")


@pytest.mark.parametrize("name", ["worker-0", "chief-0"])
def test_of_a_worker_or_a_chief_that_is_killed_only_that_one_is_started_again(
    start: Callable[..., Job], name: str
) -> None:
    job = start("--ps=1", "--workers=1")
    first = {each: job.up(each) for each in ("ps-0", "chief-0", "worker-0")}
    job.train()
    job.told("worker-0", open=True)
    os.kill(first[name]["pid"], signal.SIGKILL)
    successor = job.up(name.replace("-0", "-1"))
    assert (successor["rank"], successor["version"]) == (0, 1)
    assert successor["cluster"] == first[name]["cluster"]
    for other in {"ps-0", "chief-0", "worker-0"} - {name}:
        assert psutil.pid_exists(first[other]["pid"])
    chief = "chief-1" if name == "chief-0" else "chief-0"
    if name == "chief-0":
        job.train("chief-1", "live", 77)
    out = job.finish(chief)
    assert ("goes on with the live model at step 77; no step lost" in out) == (name == "chief-0")


def test_an_evaluator_that_fails_too_often_ends_no_training(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=0", "--evaluator", "--max-restarts=1")
    for name in ("ps-0", "chief-0", "evaluator-0"):
        job.up(name)
    job.train()
    job.do("evaluator-0", "exit 3")
    job.up("evaluator-1")
    job.do("evaluator-1", "exit 3")
    assert job.process.stdout is not None
    assert any("training goes on without evaluation" in line for line in job.process.stdout), "the job is over"
    job.send("chief-0", type="step", step=5)
    assert "the evaluation has failed" in job.finish("chief-0")


def test_a_server_that_does_not_answer_any_more_is_given_up(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=0")
    server = job.up("ps-0")
    job.up("chief-0")
    job.train()
    job.told("chief-0", open=True)
    os.kill(server["pid"], signal.SIGSTOP)
    job.up("ps-1")
    job.up("chief-1")
    job.train("chief-1")
    out = job.finish("chief-1")
    assert "ps-0 (rank 0) on " in out
    assert "does not answer any more" in out


def test_servers_are_added_while_training_goes_on_and_the_chief_saves_before(start: Callable[..., Job]) -> None:
    job = start("--ps=1:2", "--workers=1")
    for name in ("ps-0", "ps-1", "chief-0", "worker-0"):
        job.up(name)
    job.train()
    job.told("worker-0", open=True)
    scaled = scale(job, "--ps=1")
    coming = job.up("ps-2")
    assert coming["version"] == 2
    assert len(coming["cluster"]["ps"]) == 1
    job.told("worker-0", pause=True)
    job.told("chief-0", save=True)
    chief = job.up("chief-1")
    assert chief["cluster"]["ps"] == coming["cluster"]["ps"]
    assert scaled.returncode == 0, scaled.stderr
    job.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    job.up("worker-1")
    out = job.finish("chief-1")
    assert "tf-ps-run: chief-0 has saved step 7: /pretend/model.ckpt-7\n" in out
    assert "steps lost" not in out


@pytest.mark.long
def test_a_chief_whose_workers_only_serve_it_is_informed_of_a_planned_change_and_leaves_before_them(
    start: Callable[..., Job],
) -> None:
    # Without that the change would wait for the workers until the test gives up.
    job = start("--ps=1:2", "--workers=1", "--save-timeout=3600", args=("serve",))
    for name in ("ps-0", "ps-1", "chief-0", "worker-0"):
        job.up(name)
    job.train()
    scale(job, "--ps=1")
    job.told("chief-0", pause=True, save=False)
    assert len(job.up("chief-1")["cluster"]["ps"]) == 1
    job.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    job.up("worker-1")
    out = job.finish("chief-1")
    assert "1 parameter server instead of 2; chief-0 saved at step 7" in out
    assert "steps lost" not in out


def meeting(request: pytest.FixtureRequest, backend: str) -> tuple[str, ...]:
    """The flags with which nodes meet, and `scale` finds the job; none for one that is reached on its machine."""
    if backend == "master":
        return ("--rdzv-backend=master", f"--rdzv-endpoint=127.0.0.1:{quiet_port()}")
    if backend == "etcd":
        host, port = request.getfixturevalue("shared_etcd").places[0]
        return ("--rdzv-backend=etcd", f"--rdzv-endpoint={host}:{port}")
    return ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chief_whose_table_allows_no_other_number_of_servers_has_it_refused(
    start: Callable[..., Job], request: pytest.FixtureRequest, backend: str
) -> None:
    meet = meeting(request, backend)
    job = start("--ps=1:3", "--workers=0:1", *meet)
    for name in ("ps-0", "ps-1", "ps-2", "chief-0", "worker-0"):
        job.up(name)
    bounds = {"least": 3, "most": 3, "table": "users", "parts": 3, "refused": 0}
    job.send("chief-0", type="note", text="'users' has 3 parts", server_bounds=bounds)
    job.train()
    job.told("worker-0", open=True)
    refused = scale(job, "--ps=2", "--workers=0", *meet)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "refuses: the number of parameter servers stays 3: the table 'users' has 3 parts" in refused.stderr
    # What was refused is not asked for again with what comes next.
    granted = scale(job, "--workers=0", *meet)
    assert granted.returncode == 0, granted.stderr
    job.told("worker-0", pause=True)
    out = job.finish("chief-0")
    assert out.count("'users' has 3 parts\n") == 1
    assert "ps-3" not in out


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_says_that_new_servers_are_not_tried_again(
    start: Callable[..., Job], request: pytest.FixtureRequest, backend: str
) -> None:
    meet = meeting(request, backend)
    job = start("--ps=1:3", "--workers=0", "--max-restarts=0", *meet, args=("fail later",))
    job.up("chief-0")
    job.train()
    job.told("chief-0", open=True)
    granted = scale(job, "--ps=2", *meet)
    assert (granted.returncode, granted.stderr) == (0, "")
    assert "2 parameter servers: a new set is started" in granted.stdout
    assert job.process.stdout is not None
    assert any("the change is given up, and training goes on" in line for line in job.process.stdout), "the job is over"
    refused = scale(job, "--ps=2", *meet)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "refuses: new parameter servers have failed too often to be tried again" in refused.stderr
    there = scale(job, "--ps=3", *meet)
    assert (there.returncode, there.stderr) == (0, "")
    assert "3 parameter servers are there already" in there.stdout
    job.finish("chief-0")


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_scale_says_that_there_is_no_room(
    start: Callable[..., Job], request: pytest.FixtureRequest, backend: str
) -> None:
    meet = meeting(request, backend)
    # Nobody else comes, so that nothing depends on how long the last call is.
    flags = (*meet, "--ps=1:3", "--workers=0:2", "--rdzv-conf=last_call_timeout=0.1")
    nodes = [start(*flags, f"--role={role}") for role in ("chief", "ps", "worker")]
    job = nodes[0]
    for name in ("ps-0", "chief-0", "worker-0"):
        job.up(name)
    job.train()
    job.told("worker-0", open=True)
    for way in ((), meet):
        for wish, room in (("--ps=2", "1 parameter server"), ("--workers=2", "1 worker")):
            refused = scale(job, wish, *way)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert f"refuses: there is room for {room} now" in refused.stderr
    job.finish("chief-0")
    for node in nodes[1:]:
        node.ended(0)


@pytest.mark.parametrize("backend", ["master", *only_long("memory")])
def test_scale_outside_the_range_of_the_job_is_refused_wherever_it_comes_from(
    start: Callable[..., Job], request: pytest.FixtureRequest, backend: str
) -> None:
    meet = meeting(request, backend)
    job = start("--ps=1:3", "--workers=0", *meet)
    job.up("chief-0")
    job.train()
    for wish, why in (("--ps=4", "it cannot have 4: give 1 to 3"), ("--workers=1", "start it with --workers=MIN:MAX")):
        refused = scale(job, wish, *meet)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert why in refused.stderr
    job.finish("chief-0")


def test_a_forwarded_signal_reaches_each_process_once_and_the_job_goes_on(start: Callable[..., Job]) -> None:
    job = start("--ps=2", "--workers=1", "--forward-signals=USR1")
    names = ("ps-0", "ps-1", "chief-0", "worker-0")
    for name in names:
        job.up(name)
    job.train()
    job.told("worker-0", open=True)
    for _ in range(2):
        job.process.send_signal(signal.SIGUSR1)
        for name in names:
            job.hear(lambda told, name=name: (told["name"], told["at"]) == (name, "signalled"))
    job.send("chief-0", type="step", step=8)
    out = job.finish("chief-0")
    assert not job.heard_more("signalled")
    assert not re.search("(ps-2|chief-1|worker-1) begins", out)


def test_a_chief_that_does_not_restore_the_model_is_given_the_servers_of_the_checkpoint(
    start: Callable[..., Job],
) -> None:
    job = start("--ps=1:3", "--workers=0", "--max-restarts=0")
    job.up("chief-0")
    bounds = {"least": 2, "most": 2, "table": "users", "parts": 2, "refused": 3}
    job.send_last("chief-0", type="note", text="not restored", server_bounds=bounds)
    chief = job.up("chief-1")
    assert (chief["version"], len(chief["cluster"]["ps"])) == (2, 2)
    job.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    out = job.finish("chief-1")
    assert "the script makes 3 with 3 parameter servers, so 2 parameter servers are needed" in out


def test_a_job_that_cannot_have_the_servers_of_the_checkpoint_ends_and_names_the_table(
    start: Callable[..., Job],
) -> None:
    job = start("--ps=1", "--workers=0")
    job.up("chief-0")
    bounds = {"least": 2, "most": 2, "table": "users", "parts": 2, "refused": 1}
    job.send_last("chief-0", type="note", text="not restored", server_bounds=bounds)
    out = " ".join(job.ended(1).split())
    assert "it holds 2 parts of the table 'users', and the script makes 1 with 1 parameter server" in out
    assert "start the job with --ps=2" in out.lower()
    # This console is where its report belongs.
    assert "Root Cause (first observed failure):" in out
    assert "full report is on" not in out


@pytest.mark.long
def test_a_worker_too_many_leaves_and_no_other_is_disturbed(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=0:2")
    for name in ("ps-0", "chief-0", "worker-0", "worker-1"):
        job.up(name)
    job.train()
    job.told("worker-1", open=True)
    assert scale(job, "--workers=1").returncode == 0
    job.told("worker-1", pause=True)
    assert scale(job, "--workers=2").returncode == 0
    assert job.up("worker-2")["rank"] == 1
    job.finish("chief-0")


def test_the_same_exception_at_once_ends_the_job_with_its_words_and_its_code(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=1")
    for number in (0, 1):
        job.up(f"worker-{number}")
        job.do(f"worker-{number}", "raise ValueError: no such column")
    out = job.ended(1)
    assert "  worker-1 raised ValueError: no such column\n" in out
    assert "Traceback (most recent call last):\n" in out


def test_the_same_exception_ends_the_job_also_where_it_names_another_temporary_file(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=0")
    for number in (0, 1):
        job.up(f"chief-{number}")
        job.do(
            f"chief-{number}",
            f"raise PermissionDeniedError: part-0.tempstate{123456789 + number}; Read-only file system",
        )
    assert "soon after its start" in " ".join(job.ended(1).split())


def test_an_exit_code_comes_through_when_no_restart_is_left(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=1", "--max-restarts=0")
    job.up("worker-0")
    job.do("worker-0", "exit 41")
    out = job.ended(41)
    assert "  worker-0 exited with code 41\n" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_tasks_and_is_the_exit_code(
    start: Callable[..., Job], number: signal.Signals, code: int
) -> None:
    job = start("--ps=1", "--workers=1")
    pids = [job.up(name)["pid"] for name in ("ps-0", "chief-0", "worker-0")]
    with watched(*pids) as tasks:
        job.process.send_signal(number)
        out = job.ended(code)
        assert still_alive(tasks, 0) == 0
    assert f"tf-ps-run: {number.name} received: the tasks have" in out


def test_when_a_lone_node_was_requested_to_leave_no_shortage_is_reported(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=1", args=("stay",))
    pids = [job.up(name)["pid"] for name in ("ps-0", "chief-0", "worker-0")]
    job.train()
    job.told("worker-0", open=True)
    with watched(pids[2]) as worker, watched(pids[0]) as server:
        job.process.terminate()
        assert still_alive(worker, WAIT) == 0
        assert still_alive(server, 0) == 1, "the chief may still save"
    job.do("chief-0", "exit 0")
    out = job.ended(143)
    assert out.endswith("tf-ps-run: SIGTERM received: the tasks have 30 s to end\n")


@pytest.mark.parametrize("keep", [False, True], ids=["no logs", "logs"])
def test_tasks_are_given_a_directory_that_goes_with_the_job(
    start: Callable[..., Job], tmp_path: Path, keep: bool
) -> None:
    job = start("--ps=1", "--workers=0", *([f"--log-dir={tmp_path / 'logs'}"] if keep else []))
    pids = [job.up(name)["pid"] for name in ("ps-0", "chief-0")]
    (scratch,) = {Path(psutil.Process(pid).environ()["TF_PS_SCRATCH"]) for pid in pids}
    (scratch / "generated.py").touch()
    job.train()
    job.finish("chief-0")
    assert not scratch.exists()
    assert not scratch.is_relative_to(tmp_path / "logs")


@pytest.mark.parametrize("victim", ["watchdog", "agent"])
def test_nothing_is_left_after_the_death_of_the_launcher(start: Callable[..., Job], victim: str) -> None:
    job = start("--ps=1", "--workers=1")
    pids = [job.up(name)["pid"] for name in ("ps-0", "chief-0", "worker-0")]
    agent = agent_of(job)
    with watched(*pids, agent.pid) as all_of_them:
        os.kill(job.process.pid if victim == "watchdog" else agent.pid, signal.SIGKILL)
        job.process.communicate(timeout=WAIT)
        left = still_alive(all_of_them, WAIT)
        kill_leftovers(all_of_them)
    assert left == 0


def test_logs_are_kept_for_each_task_where_they_are_asked_for(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("--ps=1", "--workers=0", f"--log-dir={tmp_path / 'logs'}")
    job.up("ps-0")
    job.up("chief-0")
    job.train()
    out = job.finish("chief-0")
    assert "[chief-0]:chief-0 begins\n" in out
    (run,) = (entry for entry in (tmp_path / "logs").iterdir() if not entry.is_symlink())
    assert sorted(path.name for path in run.iterdir()) == ["chief-0", "events.jsonl", "ps-0"]
    assert (run / "chief-0" / "stdout.log").read_text() == "chief-0 begins\n"
    assert re.match(r"pretend-", run.name)


@pytest.mark.long
def test_nodes_that_host_one_task_each_make_one_job_and_mend_it(start: Callable[..., Job], free_port: int) -> None:
    meet = ("--rdzv-backend=master", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--ps=2", "--workers=1")
    nodes = [start(*meet, f"--role={role}") for role in ("chief", "ps", "ps", "worker")]
    first = nodes[0]
    names = ("ps-0", "ps-1", "chief-0", "worker-0")
    up = {name: first.up(name) for name in names}
    assert len({json.dumps(told["cluster"]) for told in up.values()}) == 1
    first.train()
    first.told("worker-0", open=True)
    os.kill(up["ps-1"]["pid"], signal.SIGKILL)
    again = {name: first.up(name) for name in ("ps-2", "ps-3", "chief-1", "worker-1")}
    assert {told["version"] for told in again.values()} == {2}
    first.train("chief-1", "checkpoint", 5, "/data/model.ckpt-5")
    first.told("worker-1", open=True)
    out = first.finish("chief-1")
    assert "has restored /data/model.ckpt-5, and goes on" in out
    for node in nodes[1:]:
        assert "ps-1 (rank 1) on " in node.ended(0)


def took(job: Job, name: str) -> int:
    """Where the next batch begins that a worker has taken."""
    return int(job.hear(lambda told: told["name"] == name and told["at"] == "took")["begin"])


def test_a_worker_on_another_node_than_the_chief_takes_its_data_and_the_next_one_goes_on(
    start: Callable[..., Job], free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", "the-token-of-this-job-and-no-other")
    meet = ("--rdzv-backend=master", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--ps=1", "--workers=1")
    chief, ps, worker = (start(*meet, f"--role={role}", script=PRETEND_DATA) for role in ("chief", "ps", "worker"))
    for name in ("ps-0", "chief-0"):
        chief.up(name)
    chief.train()
    pid = int(chief.hear(lambda told: told["at"] == "begins")["pid"])
    assert [took(chief, "worker-0") for _ in range(4)] == [0, 10, 20, 30]
    os.kill(pid, signal.SIGKILL)
    # The batch at 30 was not used up. It comes first, or once it is clear that the connection is not coming back.
    assert sorted(took(chief, "worker-1") for _ in range(3)) == [30, 40, 50]
    chief.finish("chief-0")
    for node in (ps, worker):
        node.ended(0)


def test_a_node_that_is_asked_to_leave_has_its_server_moved_and_nothing_is_lost(
    start: Callable[..., Job], free_port: int
) -> None:
    meet = ("--rdzv-backend=master", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--ps=1", "--workers=1")
    chief, one, worker = (start(*meet, f"--role={role}") for role in ("chief", "ps", "worker"))
    before = {name: chief.up(name) for name in ("ps-0", "chief-0", "worker-0")}
    chief.train()
    chief.told("worker-0", open=True)
    other = start(*meet, "--role=ps")
    # It says so only once it is known to the coordinator.
    assert other.process.stdout is not None
    assert "waiting" in other.process.stdout.readline()
    one.process.terminate()
    coming = chief.up("ps-1")
    assert coming["cluster"]["ps"] != before["ps-0"]["cluster"]["ps"]
    chief.told("worker-0", pause=True)
    chief.told("chief-0", save=True)
    chief.up("chief-1")
    assert "SIGTERM received: what runs here is moved to other nodes" in one.ended(143)
    chief.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    assert re.search("was ended by SIGTERM: ps-1 is started", chief.finish("chief-1"))
    other.ended(0)
    worker.ended(0)


def test_a_chief_that_makes_no_step_any_more_is_given_up(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=0", "--hang-timeout=1")
    job.up("chief-0")
    job.train()
    job.send("chief-0", type="step", step=5)
    job.up("chief-1")
    job.train("chief-1", "live", 5)
    assert "chief-0 on " in (out := job.finish("chief-1"))
    assert "has made no step for 1 s" in out


def test_all_servers_at_once_cost_one_version(start: Callable[..., Job]) -> None:
    job = start("--ps=2", "--workers=0", "--max-restarts=1")
    servers = [job.up(name)["pid"] for name in ("ps-0", "ps-1")]
    job.up("chief-0")
    job.train()
    agent = agent_of(job)
    agent.suspend()
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    agent.resume()
    assert job.up("chief-1")["version"] == 2
    job.train("chief-1", "checkpoint", 1, "/data/model.ckpt-1")
    job.finish("chief-1")
