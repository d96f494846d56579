"""`scripts/start_chaos.sh`: it affects only the chosen node, and reverts what it did.

Nodes of clusters are stand-ins (`workers/stand_in_node.py`); those in containers are real launchers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.harness import WAIT, WORKERS, Mailbox, environment, kill_leftovers, still_alive, watched
from support.job import CapturedProcess

from dlrover_run import exit_codes
from tf_ps_runner.cluster.rules import ROLES as ROLE_TABLE
from tf_ps_runner.memory.task_cgroup import TaskCgroup, find_cgroup_parent

SCRIPT = Path(__file__).parents[2] / "scripts" / "start_chaos.sh"
HOLD = str(WORKERS / "hold.py")
NODE = str(WORKERS / "stand_in_node.py")

ROLES = ("chief", "worker", "ps")
"""The roles of the tasks of a stand-in node of tf-ps-run."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, or cut a network")


class StandIn:
    """A stand-in node: its watchdog, agent and workers, as they reported in rank order."""

    def __init__(self, watchdog: subprocess.Popen[bytes], begun: list[dict[str, Any]]) -> None:
        self.watchdog = watchdog
        self.agent: int = begun[0]["agent"]
        self.workers: list[int] = [message["pid"] for message in begun]
        self.below: list[int] = [message["below"] for message in begun]
        self.services: list[int] = [message["service"] for message in begun]

    @property
    def tasks(self) -> dict[str, int]:
        """The tasks of a node of tf-ps-run, by role."""
        return dict(zip(ROLES, self.workers, strict=True))

    @property
    def all(self) -> list[int]:
        return [self.watchdog.pid, self.agent, *self.workers, *self.below, *self.services]


class Chaos:
    """The processes that a test starts: stand-in nodes and the script."""

    def __init__(self, mailbox: Mailbox, stack: contextlib.ExitStack) -> None:
        self.mailbox = mailbox
        self._stack = stack

    def node(self, workers: int = 1, *prefix: str, program: str = "dlrover_run", **env: str) -> StandIn:
        """Start a node and wait for it; `prefix` precedes its command."""
        variables = environment({"TEST_MAILBOX": self.mailbox.name, "PYTHONPATH": str(SCRIPT.parent.parent), **env})
        command = [*prefix, sys.executable, NODE, program, str(workers)]
        watchdog = subprocess.Popen(command, env=variables, cwd=self.mailbox.directory, stdin=subprocess.PIPE)
        self._stack.enter_context(watchdog)
        node = StandIn(watchdog, self.mailbox.gather(workers))
        # A worker that is restarted after this exits at the end of the watchdog's standard input.
        self._stack.callback(kill_leftovers, self._stack.enter_context(watched(watchdog.pid, node.agent)))
        return node

    def cluster_node(self, number: int, workers: int = 1, *prefix: str, **env: str) -> StandIn:
        """Start a node of a local cluster, of which this process is the supervisor."""
        return self.node(
            workers, *prefix, DLROVER_LOCAL_NODE=str(number), DLROVER_LOCAL_CLUSTER=str(os.getpid()), **env
        )

    def script(self, verb: str, alone: bool = False, **env: str) -> CapturedProcess:
        """Start the script, in the cluster of this process unless `env` has another; `alone` in its own session."""
        variables = environment({"CHAOS_CLUSTER": str(os.getpid()), "WORKER_ID": None, **env})
        process = subprocess.Popen(
            ["bash", "-c", f"bash {SCRIPT} {verb}; exit"] if alone else ["bash", str(SCRIPT), verb],
            env=variables,
            cwd=self.mailbox.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=alone,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return CapturedProcess(verb, process)


@pytest.fixture
def chaos(mailbox: Mailbox) -> Iterator[Chaos]:
    with contextlib.ExitStack() as stack:
        yield Chaos(mailbox, stack)


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *words], env={**os.environ, **env}, capture_output=True, text=True)


def stops(pid: int) -> bool:
    """Whether a process is stopped, or will be as soon as it is scheduled."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"].startswith("T") or bool(pending >> (signal.SIGSTOP - 1) & 1)


# ---- the command line


@pytest.mark.parametrize("shell", [("bash",), ("sh",), ("bash", "--posix")])
def test_it_runs_under_each_shell(shell: tuple[str, ...]) -> None:
    """Published command lines have `sh start_chaos.sh`, and `sh` is dash on Debian."""
    done = subprocess.run([*shell, str(SCRIPT), "no-chaos"], capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "start_chaos: no chaos\n", "")


def test_the_verbs_are_named() -> None:
    verbs = "no-chaos kill-process kill-node stop-process cpu-overload memory-overload network-loss disk-full"
    shown = run("--help")
    assert (shown.returncode, [verb for verb in verbs.split() if verb not in shown.stdout]) == (0, [])


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ("", {}, "it takes one verb; start_chaos.sh --help names them"),
        ("kill-nodes", {}, "there is no 'kill-nodes'; start_chaos.sh --help names what there is"),
        ("kill-node", {"CHAOS_WAIT": "soon"}, "CHAOS_WAIT is 'soon'; it takes seconds, as in CHAOS_WAIT=2.5"),
        ("kill-process", {"CHAOS_TIMES": "0"}, "CHAOS_TIMES is '0'; it takes a whole number from 1 to 1000000"),
        ("stop-process", {"CHAOS_WHEN": "start"}, "CHAOS_WHEN is 'start'; it takes one of: check training"),
        ("kill-node", {"CHAOS_ROLE": "ps"}, "kill-node acts on a node, and CHAOS_ROLE=ps is a task"),
        ("kill-process", {"CHAOS_ROLE": "pss"}, "CHAOS_ROLE is 'pss'; it takes one of:  chief worker ps evaluator"),
    ],
)
def test_an_impossible_request_is_reported_in_one_line(words: str, settings: dict[str, str], message: str) -> None:
    refused = run(*words.split(), **settings)
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", f"start_chaos: {message}\n")


def test_each_role_can_be_chosen() -> None:
    refusal = run("kill-process", CHAOS_ROLE="?").stderr
    assert set(refusal.split("it takes one of:")[1].split()) == set(ROLE_TABLE)


def test_it_waits_for_a_node_with_a_timeout(chaos: Chaos) -> None:
    chaos.cluster_node(0)
    waiting = chaos.script("kill-node", CHAOS_WAIT="0.3", WORKER_ID="7")
    assert waiting.finish() == 1
    assert waiting.has_printed(
        f"nothing was done within CHAOS_WAIT=0.3 s: the dlrover-run of process {os.getpid()} has no node 7"
    )


# ---- in front of a launch


@contextlib.contextmanager
def in_front(
    mailbox: Mailbox, verb: str, options: str = "--standalone --nproc-per-node=2", **env: str
) -> Iterator[CapturedProcess]:
    """The command line of a container, as it is published."""
    launch = f"{sys.executable} -m dlrover_run {options} --max-restarts=3 {HOLD}"
    job = subprocess.Popen(
        ["bash", "-c", f"bash {SCRIPT} {verb} & exec {launch}"],
        env=environment({"TEST_MAILBOX": mailbox.name, "TMPDIR": str(mailbox.directory), **env}),
        cwd=mailbox.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield CapturedProcess("the job", job)
    finally:
        job.kill()
        job.communicate()


# The template of a single worker has the environment of that worker.
@pytest.mark.parametrize(("method", "workers"), [("spawn", 2), ("forkserver", 1)])
def test_in_front_of_a_launch_it_kills_a_worker_and_all_restart(mailbox: Mailbox, method: str, workers: int) -> None:
    env = {"CHAOS_LOCAL_RANK": str(workers - 1), "WORKER_ID": "1", "PET_START_METHOD": method}
    # The kill may precede the start of a worker, so not every worker of the first round has to report.
    with in_front(mailbox, "kill-process", f"--standalone --nproc-per-node={workers}", **env) as job:
        job.until_prints(f"start_chaos: node 1: killed local rank {workers - 1}, process ")
        until_restarted(mailbox, workers)
        job.signal(signal.SIGTERM)
        assert job.finish() == 128 + signal.SIGTERM
        assert job.has_printed("(1 of 1)")


def until_restarted(mailbox: Mailbox, workers: int) -> None:
    while workers:
        workers -= mailbox.receive()["restart"] == 1


def test_in_a_container_that_is_not_chosen_it_does_nothing(mailbox: Mailbox) -> None:
    with in_front(mailbox, "kill-process", WORKER_ID="2") as job:
        job.until_prints("start_chaos: this is node 2, and the chaos is for node 1: nothing is done here")
        mailbox.gather(2)
        job.signal(signal.SIGTERM)
        assert job.finish() == 128 + signal.SIGTERM
        assert mailbox.pending() == []


def test_it_exits_with_its_job(mailbox: Mailbox) -> None:
    with in_front(mailbox, "stop-process", CHAOS_DELAY="0") as job:
        job.until_prints("start_chaos: node 1: stopped 2 workers: ")
        # Stopped workers do not handle the first signal; the second one kills them.
        job.signal(signal.SIGINT)
        job.until_prints("SIGINT")
        job.signal(signal.SIGINT)
        # The end of the output: the script has the other end open too.
        assert job.finish() == 128 + signal.SIGINT
        assert job.has_printed("have gone")


def test_a_job_of_another_session_is_not_touched_and_is_named(chaos: Chaos) -> None:
    node = chaos.node(1, "setsid")
    waiting = chaos.script("kill-node", CHAOS_WAIT="0.3", CHAOS_CLUSTER="", alone=True)
    assert waiting.finish() == 1
    assert waiting.has_printed("waits for a dlrover-run of this session; CHAOS_CLUSTER=")
    assert waiting.has_printed("there is no dlrover-run")
    chosen = chaos.script("kill-node", CHAOS_CLUSTER=str(node.watchdog.pid))
    with watched(*node.all) as all_of_it:
        assert chosen.finish() == 0
        assert still_alive(all_of_it, WAIT) == 0


@needs_root
def test_in_a_container_a_process_started_from_outside_finds_the_job_and_no_other_does(mailbox: Mailbox) -> None:
    """The job has the session of process 1, as when it is the container's command."""
    node = f"{sys.executable} {NODE} dlrover_run 1"
    script = f"bash {SCRIPT} kill-node"
    others = f"CHAOS_WAIT=0.3 setsid --wait bash -c '{script}; exit'"
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash"],
        env=environment({"TEST_MAILBOX": mailbox.name, "PYTHONPATH": str(SCRIPT.parent.parent), "WORKER_ID": None}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert container.stdin is not None
    with container, container.stdin as command:
        command.write(f"sleep inf | {node} &\n")
        command.flush()
        mailbox.gather(1)
        command.write(f"{others}\necho ended with $?\n{script.replace('bash', 'setsid --wait bash', 1)}\nexit\n")
        command.flush()
        output = CapturedProcess("the container", container)
        output.until_prints("nothing was done within CHAOS_WAIT=0.3 s: there is no dlrover-run\nended with 1\n")
        output.until_prints("start_chaos: node 1: killed with all its processes")


def test_it_does_not_wait_for_a_job_that_was_refused(mailbox: Mailbox) -> None:
    with in_front(mailbox, "kill-process", "--nnodes=none") as job:
        # The launcher and the script have the other end of the pipe open.
        assert job.finish() == exit_codes.BAD_COMMAND_LINE
    assert job.has_printed("start_chaos: the process that was to start the job has ended; nothing was done")


# ---- in front of a cluster on this machine

TWO_NODES = "--local-nodes=2 --nproc-per-node=1"


def test_in_a_cluster_a_killed_node_is_replaced(mailbox: Mailbox) -> None:
    with in_front(mailbox, "kill-node", TWO_NODES, WORKER_ID="0") as job:
        job.until_prints("start_chaos: node 0: killed with all its processes")
        job.until_prints("node 2 takes its place")
        job.until_prints("[node 2] ")
        job.until_prints(" dlrover-run: round ")
        job.signal(signal.SIGTERM)
        assert job.finish() == 128 + signal.SIGTERM


# ---- processes of the chosen node


def test_it_kills_a_whole_node_and_no_other(chaos: Chaos) -> None:
    other, chosen = chaos.cluster_node(0, 2), chaos.cluster_node(1, 2)
    with watched(*other.all) as others, watched(*chosen.all) as doomed:
        killer = chaos.script("kill-node")
        assert killer.finish() == 0
        assert still_alive(doomed, WAIT) == 0
        assert still_alive(others, 0) == len(others)
    assert killer.has_printed("start_chaos: node 1: killed with all its processes")
    # No process of the node could act any more.
    assert chosen.watchdog.wait() == -signal.SIGKILL
    assert chaos.mailbox.pending() == []


def test_it_kills_the_worker_of_one_local_rank_repeatedly(chaos: Chaos) -> None:
    node = chaos.cluster_node(3, 2)
    killer = chaos.script("kill-process", WORKER_ID="3", CHAOS_LOCAL_RANK="1", CHAOS_TIMES="2", CHAOS_PERIOD="0")
    killer.until_prints(f"node 3: killed local rank 1, process {node.workers[1]} (1 of 2)")
    killer.until_prints("node 3: killed local rank 1, process ")
    killer.until_prints(" (2 of 2)")
    assert killer.finish() == 0
    # The second worker may have been killed before it started.
    messages = chaos.mailbox.gather(3)
    while messages[-1]["what"] != "begun" or [message["what"] for message in messages].count("ended") < 2:
        messages.append(chaos.mailbox.receive())
    assert {message["rank"] for message in messages} == {-1, 1, 11}


def test_a_local_rank_that_the_node_does_not_have_is_reported_in_one_line(chaos: Chaos) -> None:
    chaos.cluster_node(1, 2)
    killer = chaos.script("kill-process", CHAOS_LOCAL_RANK="2")
    assert killer.finish() == 1
    assert killer.output == "start_chaos: node 1 has no local rank 2, for it has 2 of them\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, None])
def test_it_stops_the_workers_until_it_is_terminated_or_its_time_is_over(
    chaos: Chaos, number: signal.Signals | None
) -> None:
    node = chaos.cluster_node(1, 2)
    stopper = chaos.script("stop-process", **({} if number else {"CHAOS_DURATION": "0.1"}))
    stopped = chaos.mailbox.gather(2)
    # The data loaders, the services and the agent are not stopped.
    assert [(message["what"], message["of"]) for message in stopped] == [("stopped", pid) for pid in node.workers]
    stopper.until_prints("start_chaos: node 1: stopped 2 workers")
    if number:
        stopper.signal(number)
    assert stopper.finish() == (128 + number if number else 0)
    continued = chaos.mailbox.gather(2)
    assert [(message["what"], message["of"]) for message in continued] == [("continued", pid) for pid in node.workers]


def test_a_hang_ends_when_the_hanging_process_is_killed(chaos: Chaos) -> None:
    node = chaos.cluster_node(1)
    stopper = chaos.script("stop-process")
    assert chaos.mailbox.receive()["what"] == "stopped"
    os.kill(node.workers[0], signal.SIGKILL)
    assert stopper.finish() == 0
    # The workers that replaced it are not stopped.
    assert [chaos.mailbox.receive()["what"] for _ in range(2)] == ["ended", "begun"]


def test_it_exits_when_its_node_does(chaos: Chaos) -> None:
    node = chaos.cluster_node(1)
    stopper = chaos.script("stop-process")
    stopper.until_prints("stopped")
    os.kill(node.agent, signal.SIGKILL)
    assert stopper.finish() == 0
    assert stopper.has_printed("start_chaos: node 1 has gone")


@pytest.mark.long
@pytest.mark.torchrun
def test_a_node_whose_check_processes_are_killed_is_faulty(mailbox: Mailbox) -> None:
    """As published: the command line of the script does not mention the check, and that of the launcher does."""
    with in_front(mailbox, "kill-process", PET_NETWORK_CHECK="1") as job:
        assert job.finish() == exit_codes.FAULTY_NODE
        assert job.has_printed("start_chaos: node 1: killed local rank 0, process ")
    assert mailbox.pending() == []


def test_it_kills_the_processes_of_a_node_check_and_no_worker(chaos: Chaos) -> None:
    node = chaos.cluster_node(1, STAND_IN_CHECKS="2")
    killer = chaos.script("kill-process")
    assert killer.finish() == 0
    assert killer.output.startswith(f"start_chaos: node 1: killed local rank 0, process {node.workers[0]} (1)\n")
    assert killer.output.endswith(" (2)\nstart_chaos: node 1: its check is over\n")


# ---- tasks of tf-ps-run


@pytest.mark.parametrize("role", ["", *ROLES])
def test_it_kills_the_task_of_a_role_and_without_one_a_worker(chaos: Chaos, role: str) -> None:
    node = chaos.node(len(ROLES), program="tf_ps_run", WORKER_ID="3")
    chosen = {"CHAOS_ROLE": role} if role else {}
    killer = chaos.script("kill-process", CHAOS_CLUSTER=str(node.watchdog.pid), **chosen)
    assert killer.finish() == 0
    killed = role or "worker"
    ended = chaos.mailbox.receive()
    assert (ended["what"], ended["of"]) == ("ended", node.tasks[killed])
    assert killer.output == f"start_chaos: node 1: killed {killed}-4, process {node.tasks[killed]} (1 of 1)\n"


def test_a_role_without_a_task_is_reported_in_one_line(chaos: Chaos) -> None:
    tensorflow, torch = chaos.node(len(ROLES), program="tf_ps_run"), chaos.node()
    for node, message in (
        (tensorflow, "node 1 does not run worker 7"),
        (torch, "there is no tf-ps-run"),
    ):
        env = {"CHAOS_WAIT": "0.3", "CHAOS_RANK": "7", "CHAOS_CLUSTER": str(node.watchdog.pid)}
        waiting = chaos.script("kill-process", CHAOS_ROLE="worker", **env)
        assert waiting.finish() == 1
        assert waiting.output == f"start_chaos: nothing was done within CHAOS_WAIT=0.3 s: {message}\n"


def test_it_allocates_memory_in_the_limit_of_one_task_until_the_task_is_killed(chaos: Chaos) -> None:
    parent = find_cgroup_parent()
    if parent is None:
        pytest.skip("no control group can be made here, of version 1 or 2: that takes root, or a delegated group")
    node = chaos.node(len(ROLES), program="tf_ps_run")
    load = {"CHAOS_ROLE": "chief", "CHAOS_CLUSTER": str(node.watchdog.pid)}
    refused = chaos.script("memory-overload", **load)
    assert refused.finish() == 2
    assert refused.has_printed(
        "start_chaos: chief-4 has no control group of its own: give --worker-memory or --ps-memory"
    )

    with contextlib.closing(TaskCgroup(parent, "chief-4", 64)) as group, watched(node.tasks["chief"]) as chief:
        group.add(node.tasks["chief"])
        # The memory that it allocated before it joined the group is not counted there.
        os.kill(node.tasks["chief"], signal.SIGUSR1)
        taken = chaos.mailbox.receive()
        assert taken["what"] == "taken"
        overload = chaos.script("memory-overload", **load)
        assert overload.finish() == 0
        assert overload.has_printed("start_chaos: node 1: chief-4 has ended")
        assert still_alive(chief, 0) == 0
        assert group.kills
    ended = chaos.mailbox.receive()
    assert (ended["what"], ended["of"]) == ("ended", node.tasks["chief"])


# ---- load


def test_one_node_of_a_cluster_is_slowed_down_and_no_other(chaos: Chaos) -> None:
    other, chosen = chaos.cluster_node(0), chaos.cluster_node(1)
    load = chaos.script("cpu-overload", CHAOS_CPU_LEFT="50")
    load.until_prints("start_chaos: node 1: runs for 50 % of the time")
    held = {chosen.workers[0], chosen.services[0]}
    expected = {(pid, what) for pid in held for what in ("stopped", "continued")}
    while expected:
        message = chaos.mailbox.receive()
        assert message["of"] in held
        expected.discard((message["of"], message["what"]))
    load.signal(signal.SIGTERM)
    assert load.finish() == 128 + signal.SIGTERM
    for pid in (*held, *chosen.below, *other.workers):
        assert not stops(pid)


def busy_loops(children: list[psutil.Process]) -> list[psutil.Process]:
    loops = [process for process in children if process.status() == "running"]
    assert len(loops) == len(os.sched_getaffinity(0))
    return loops


def memory_holder(children: list[psutil.Process]) -> list[psutil.Process]:
    [holder] = [process for process in children if process.name() == "tail"]
    assert psutil.Process(holder.pid).memory_info().rss > 23 << 20
    return [holder]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("verb", "text", "look"),
    [
        ("cpu-overload", "loops keep its CPUs busy", busy_loops),
        ("memory-overload", "start_chaos: node 1: 24 of ", memory_holder),
    ],
)
def test_a_machine_is_loaded_until_the_script_exits(
    chaos: Chaos,
    verb: str,
    text: str,
    look: Callable[[list[psutil.Process]], list[psutil.Process]],
    number: signal.Signals,
) -> None:
    chaos.cluster_node(1)
    load = chaos.script(verb, CHAOS_CPU="machine", CHAOS_SIZE="24", PATH="/usr/bin:/bin")
    load.until_prints(text)
    with watched(*(process.pid for process in look(psutil.Process(load.pid).children()))) as loads:
        load.signal(number)
        load.finish()
        assert still_alive(loads, WAIT) == 0


@pytest.fixture
def tools(chaos: Chaos) -> Path:
    """A folder of programs that record their arguments, first in PATH."""
    folder = chaos.mailbox.directory / "tools"
    folder.mkdir()
    return folder


def add_tool(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >>{folder}/called\n{body}\n')
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("verb", "created"),
    [
        ("cpu-overload", "blade create cpu fullload --timeout 60"),
        ("memory-overload", "blade create mem load --mode ram --mem-percent 80 --timeout 60"),
        ("network-loss", "blade create network loss --percent 100 --interface none0 --timeout 60"),
    ],
)
def test_chaosblade_is_used_where_it_is_installed(chaos: Chaos, tools: Path, verb: str, created: str) -> None:
    add_tool(tools, "blade", """echo '{"code":200,"success":true,"result":"3286ba7ef4cf6c89"}'""")
    node = chaos.node()
    load = chaos.script(
        verb,
        CHAOS_CLUSTER=str(node.watchdog.pid),
        CHAOS_DURATION="60",
        CHAOS_INTERFACE="none0",
        PATH=f"{tools}:{os.environ['PATH']}",
    )
    load.until_prints(f"start_chaos: node 1: {created.removesuffix(' --timeout 60')}")
    load.signal(signal.SIGTERM)
    assert load.finish() == 128 + signal.SIGTERM
    assert (tools / "called").read_text() == f"{created}\nblade destroy 3286ba7ef4cf6c89\n"


def test_an_error_of_chaosblade_is_reported(chaos: Chaos, tools: Path) -> None:
    add_tool(tools, "blade", """echo '{"code":40001,"success":false,"error":"no chaos_os"}'""")
    chaos.cluster_node(1)
    load = chaos.script("cpu-overload", CHAOS_CPU="machine", PATH=f"{tools}:{os.environ['PATH']}")
    assert load.finish() == 1
    assert load.has_printed('blade create cpu fullload: {"code":40001,"success":false,"error":"no chaos_os"}')


@pytest.mark.parametrize(
    ("verb", "called"), [("cpu-overload", "--cpu 0"), ("memory-overload", "--vm 1 --vm-keep --vm-bytes 24M")]
)
def test_stress_ng_is_used_where_it_is_installed_and_terminated(
    chaos: Chaos, tools: Path, verb: str, called: str
) -> None:
    os.mkfifo(tools / "begun")
    add_tool(tools, "stress-ng", f"echo $$ >{tools}/begun; exec tail -f /dev/null")
    chaos.cluster_node(1)
    load = chaos.script(verb, CHAOS_CPU="machine", CHAOS_SIZE="24", PATH=f"{tools}:/usr/bin:/bin")
    with watched(int((tools / "begun").read_text())) as stress:
        load.until_prints("node 1: ")
        load.signal(signal.SIGTERM)
        load.finish()
        assert still_alive(stress, 0) == 0
    assert (tools / "called").read_text() == f"stress-ng --quiet {called}\n"


# ---- the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small separate disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "chaos-test", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_disk_of_a_node_is_full_until_the_script_exits(chaos: Chaos, disk: Path, number: signal.Signals) -> None:
    chaos.cluster_node(1, TMPDIR=str(disk))
    filler = chaos.script("disk-full", CHAOS_LEAVE="1")
    filler.until_prints(f"start_chaos: node 1: 15 MiB of {disk} are taken")
    with pytest.raises(OSError, match="No space") as refused:
        (disk / "checkpoint").write_bytes(bytes(2 << 20))
    assert refused.value.errno == errno.ENOSPC
    filler.signal(number)
    filler.finish()
    (disk / "checkpoint").write_bytes(bytes(8 << 20))
    assert os.listdir(disk) == ["checkpoint"]


def test_the_disk_of_the_machine_is_filled_only_if_a_directory_is_given(chaos: Chaos, tmp_path: Path) -> None:
    if os.stat(tmp_path).st_dev != os.stat("/").st_dev:
        pytest.skip("temporary files are on a disk of their own")
    chaos.cluster_node(1, TMPDIR=str(tmp_path))
    refused = chaos.script("disk-full")
    assert refused.finish() == 2
    assert (
        refused.output
        == f"start_chaos: {tmp_path} is on the disk of /; CHAOS_PATH={tmp_path} fills that nevertheless\n"
    )
    filler = chaos.script("disk-full", CHAOS_PATH=str(tmp_path), CHAOS_SIZE="2", CHAOS_DURATION="0")
    assert filler.finish() == 0
    assert filler.has_printed(f"node 1: 2 MiB of {tmp_path} are taken")


# ---- the network


def test_a_node_without_its_own_network_is_refused(chaos: Chaos) -> None:
    chaos.cluster_node(1)
    refused = chaos.script("network-loss")
    assert refused.finish() == 2
    assert refused.has_printed("start the job with --isolate-nodes")


ROUTES = "default via 10.77.0.1 dev eth0 \n10.77.0.0/16 dev eth0 proto kernel scope link src 10.77.1.101 \n"

# A mailbox cannot be reached from another network namespace, so the node prints its messages.
ISOLATED_AGENT = f"""
ip link set lo up && ip link add eth0 type veth peer name far && ip link set far up &&
ip addr add 10.77.1.101/16 dev eth0 && ip link set eth0 up && ip route add default via 10.77.0.1 &&
exec {sys.executable} -c '
import sys
from dlrover_run.workers.template import process_title
process_title.name_process("dlrover-agent")
print("begun", flush=True)
sys.stdin.read()
'
"""


@needs_root
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip")
def test_the_network_of_a_node_is_cut_and_then_restored(chaos: Chaos) -> None:
    node = {"DLROVER_LOCAL_NODE": "1", "DLROVER_LOCAL_CLUSTER": str(os.getpid())}
    process = subprocess.Popen(
        ["unshare", "-n", "bash", "-c", ISOLATED_AGENT],
        env=environment({"PYTHONPATH": str(SCRIPT.parent.parent), **node}),
        cwd=chaos.mailbox.directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def ip(*words: str) -> str:
        inside = ["nsenter", "-t", str(process.pid), "-n", "ip", *words]
        return subprocess.run(inside, check=True, capture_output=True, text=True).stdout

    with process:
        try:
            CapturedProcess("the agent", process).until_prints("begun")
            assert ip("route") == ROUTES
            cutter = chaos.script("network-loss", CHAOS_WHEN="start")
            cutter.until_prints("start_chaos: node 1: eth0 is down")
            assert "state DOWN" in ip("link", "show", "eth0")
            cutter.signal(signal.SIGTERM)
            assert cutter.finish() == 128 + signal.SIGTERM
            assert cutter.output == "start_chaos: node 1: eth0 is down\n"
            assert ip("route") == ROUTES
        finally:
            process.kill()
