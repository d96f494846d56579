"""Processes that keep what their scripts have loaded: pretended tasks in the children of `hooks.rebuild`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import psutil
import pytest
from harness import WAIT, kill_leftovers, still_alive, watched
from interpreters import python_215, python_221
from pretended import Job, agent_of, scale
from scripted_cluster import BOOT

from dlrover_run.coordination.cluster.records import Role
from tf_ps_runner.agent.kept import Kept, KeptAside
from tf_ps_runner.agent.reconcile import Spare

KEEPING = Path(__file__).parent / "workers" / "pretend_keeping.py"
TASKS = ("ps-0", "chief-0", "worker-0")

Start = Callable[..., Job]


def loaded(job: Job, name: str) -> int:
    """The process that has loaded what that task needs."""
    return int(job.hear(lambda told: told["name"] == name and told["at"] == "loaded")["pid"])


def up(job: Job, name: str, keeper: int) -> int:
    """Wait for that task, which is a child of that process."""
    pid = int(job.up(name)["pid"])
    assert psutil.Process(pid).ppid() == keeper
    return pid


def begin(start: Start, *flags: str) -> tuple[Job, dict[str, int]]:
    """A job that trains, and the processes that keep for its chief and its worker."""
    job = start("--ps=1", "--workers=1", *flags, script=KEEPING)
    keepers = {name: loaded(job, name) for name in ("chief-0", "worker-0")}
    job.up("ps-0")
    for name, keeper in keepers.items():
        up(job, name, keeper)
    job.train()
    job.told("worker-0", open=True)
    return job, keepers


def lose_server(job: Job, name: str) -> None:
    os.kill(loaded(job, name), signal.SIGKILL)


def test_what_was_loaded_outlives_a_server_and_each_version_has_new_children(start: Start) -> None:
    job, keepers = begin(start)
    children = [psutil.Process(keeper).children()[0].pid for keeper in keepers.values()]
    with watched(*children) as before:
        lose_server(job, "ps-0")
        up(job, "chief-1", keepers["chief-0"])
        worker = job.up("worker-1")
        assert still_alive(before, 0) == 0
    assert (worker["version"], worker["rank"]) == (2, 0)
    assert psutil.Process(worker["pid"]).ppid() == keepers["worker-0"]
    job.train("chief-1", "checkpoint", 126, "/data/model.ckpt-126")
    job.told("worker-1", open=True)
    lose_server(job, "ps-1")
    up(job, "chief-2", keepers["chief-0"])
    up(job, "worker-2", keepers["worker-0"])
    job.train("chief-2", "checkpoint", 127, "/data/model.ckpt-127")
    with watched(*keepers.values()) as kept:
        out = job.finish("chief-2")
        assert still_alive(kept, 0) == 0
    assert "[worker-0]:worker-2 begins\n" in out


def test_what_was_loaded_outlives_a_planned_change(start: Start) -> None:
    job, keepers = begin(start, "--ps=1:2")
    job.up("ps-1")
    assert scale(job, "--ps=1").returncode == 0
    job.told("chief-0", save=True)
    up(job, "chief-1", keepers["chief-0"])
    job.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    up(job, "worker-1", keepers["worker-0"])
    assert "steps lost" not in job.finish("chief-1")


def test_it_outlives_a_planned_change_also_on_a_node_that_hosts_nothing_meanwhile(start: Start, free_port: int) -> None:
    meet = ("--rdzv-backend=master", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--ps=1", "--workers=1")
    chief, leaving, worker = (start(*meet, f"--role={role}", script=KEEPING) for role in ("chief", "ps", "worker"))
    keepers = {name: loaded(chief, name) for name in ("chief-0", "worker-0")}
    chief.up("ps-0")
    for name, keeper in keepers.items():
        up(chief, name, keeper)
    chief.train()
    chief.told("worker-0", open=True)
    other = start(*meet, "--role=ps", script=KEEPING)
    # It says so only once it is known to the coordinator.
    assert other.process.stdout is not None
    assert "waiting" in other.process.stdout.readline()
    leaving.process.terminate()
    chief.told("chief-0", save=True)
    up(chief, "chief-1", keepers["chief-0"])
    chief.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    up(chief, "worker-1", keepers["worker-0"])
    leaving.ended(143)
    chief.finish("chief-1")
    other.ended(0)
    worker.ended(0)


def test_a_process_that_does_not_let_go_is_killed_and_loads_anew(start: Start) -> None:
    job, keepers = begin(start)
    child = psutil.Process(keepers["worker-0"]).children()[0].pid
    os.kill(keepers["worker-0"], signal.SIGSTOP)
    with watched(keepers["worker-0"], child) as before:
        lose_server(job, "ps-0")
        up(job, "worker-1", loaded(job, "worker-1"))
        assert still_alive(before, WAIT) == 0
    up(job, "chief-1", keepers["chief-0"])
    job.train("chief-1", "checkpoint", 5, "/data/model.ckpt-5")
    job.finish("chief-1")


def test_a_process_that_keeps_and_is_killed_is_a_death_as_any_other(start: Start) -> None:
    job, keepers = begin(start, "--max-restarts=1")
    child = psutil.Process(keepers["worker-0"]).children()[0].pid
    with watched(child) as before:
        os.kill(keepers["worker-0"], signal.SIGKILL)
        assert still_alive(before, WAIT) == 0
    up(job, "worker-1", keeper := loaded(job, "worker-1"))
    assert keeper != keepers["worker-0"]
    job.finish("chief-0")


@pytest.mark.parametrize(("command", "code"), [("exit 41", 41), ("raise ValueError: no such column", 1)])
def test_however_a_child_ends_its_keeper_ends_like_it(start: Start, command: str, code: int) -> None:
    job, _ = begin(start, "--max-restarts=0")
    job.do("worker-0", command)
    out = job.ended(code)
    assert ("exited with code 41" if code == 41 else "worker-0 raised ValueError: no such column\n") in out


def test_a_child_that_is_killed_by_a_signal_costs_a_restart_and_says_which(start: Start) -> None:
    job, keepers = begin(start, "--max-restarts=0")
    os.kill(psutil.Process(keepers["worker-0"]).children()[0].pid, signal.SIGSEGV)
    assert "SIGSEGV" in job.ended(128 + signal.SIGSEGV)


def test_what_a_worker_too_many_has_loaded_is_given_up(start: Start) -> None:
    job, keepers = begin(start, "--workers=0:2")
    extra = loaded(job, "worker-1")
    up(job, "worker-1", extra)
    with watched(extra) as gone:
        assert scale(job, "--workers=1").returncode == 0
        job.told("worker-1", pause=True)
        assert still_alive(gone, WAIT) == 0
    assert psutil.pid_exists(keepers["worker-0"])
    job.finish("chief-0")


def test_a_signal_to_the_one_who_keeps_is_for_its_child_to_answer(start: Start) -> None:
    job = start("--ps=1", "--workers=1", args=("stay",), script=KEEPING)
    keepers = {name: loaded(job, name) for name in ("chief-0", "worker-0")}
    children = {name: up(job, name, keeper) for name, keeper in keepers.items()}
    job.train()
    with watched(keepers["worker-0"], children["worker-0"]) as ended:
        for keeper in keepers.values():
            os.kill(keeper, signal.SIGTERM)
        assert still_alive(ended, WAIT) == 0
    up(job, "worker-1", loaded(job, "worker-1"))
    # The chief takes no notice of that signal, and so its keeper does not either.
    assert psutil.Process(children["chief-0"]).ppid() == keepers["chief-0"]
    job.finish("chief-0")


def test_a_signal_reaches_the_children_and_ends_all(start: Start) -> None:
    job, keepers = begin(start)
    children = [psutil.Process(keeper).children()[0].pid for keeper in keepers.values()]
    with watched(*keepers.values(), *children) as all_of_them:
        job.process.terminate()
        job.ended(143)
        assert still_alive(all_of_them, 0) == 0


@pytest.mark.parametrize("victims", ["guard", "agent", "both"])
def test_nothing_is_left_after_the_death_of_the_launcher(start: Start, victims: str) -> None:
    job, keepers = begin(start)
    children = [psutil.Process(keeper).children()[0].pid for keeper in keepers.values()]
    agent = agent_of(job)
    with watched(*keepers.values(), *children, agent.pid) as all_of_them:
        if victims != "guard":
            os.kill(agent.pid, signal.SIGKILL)
        if victims != "agent":
            os.kill(job.process.pid, signal.SIGKILL)
        job.process.communicate(timeout=WAIT)
        left = still_alive(all_of_them, WAIT)
        kill_leftovers(all_of_them)
    assert left == 0


def test_a_process_with_another_thread_keeps_nothing_and_says_so(start: Start) -> None:
    job = start("--ps=1", "--workers=0", args=("thread",), script=KEEPING)
    assert loaded(job, "chief-0") == job.up("chief-0")["pid"]
    job.train()
    out = job.finish("chief-0")
    assert "tf-ps-run: rebuild: the thread loader is running" in out


def test_a_spare_process_is_not_kept_for_ever_where_nobody_says_what_comes() -> None:
    class Process:
        pid = 7
        signals: ClassVar[list[int]] = []

        def send(self, number: int) -> None:
            self.signals.append(number)
            ended.set()

    async def test() -> None:
        process: Any = Process()
        kept = Kept(Spare(Role.WORKER, 0, 0), process, *cast("tuple[Any, Any, Any]", (None, None, None)))
        aside = KeptAside(cast("Any", None), patience=0.0)
        aside.put(kept)
        assert aside.spares == (kept.spare,)
        await asyncio.wait_for(ended.wait(), WAIT)
        # It is looked after until it has ended, and nobody may have it any more.
        assert (aside.spares, aside.pids, process.signals) == ((), {7}, [signal.SIGKILL])

    ended = asyncio.Event()
    asyncio.run(test())


def test_without_tf_ps_run_it_is_an_ordinary_call(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import os\nfrom tf_ps_runner import hooks\nprint(hooks.rebuild(lambda: 'trained'), hooks.rebuild(os.getpid))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    process = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=WAIT)
    assert out == f"trained {process.pid}\n"


@pytest.mark.tensorflow
@pytest.mark.parametrize("interpreter", [python_221, python_215])
def test_tensorflow_may_have_been_imported_but_not_used(interpreter: Callable[[], Path]) -> None:
    program = (
        "import tf_ps_boot, tensorflow as tf\n"
        "from tf_ps_runner.worker.rebuild import why_not\n"
        "print(why_not())\n"
        "tf.constant(1)\n"
        "print(why_not())\n"
    )
    done = subprocess.run(
        [interpreter(), "-c", program],
        env={**os.environ, "PYTHONPATH": str(BOOT.parent), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT,
        check=True,
    )
    before, after = done.stdout.splitlines()
    assert before == "None"
    assert after.startswith("TensorFlow was used before")
