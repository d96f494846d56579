"""The commands of a user before a round, after a failure and at the end: what they get, and what their failure does."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import SOON, Cluster
from support.harness import OURS, WAIT, Mailbox, agent_of, finish, kill_leftovers, launch, run, still_alive, watched

HOOK = """
import json, os, sys
facts = {name[8:]: value for name, value in os.environ.items() if name.startswith("DLROVER_")}
open(sys.argv[1], "a").write(json.dumps(facts) + "\\n")
print("the first line\\nthe last line")
sys.exit(int(sys.argv[2]))
"""

FAIL_ONCE = """
import os, sys
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" else 0)
"""


class Site:
    """A directory with a command that writes what it gets, and a script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        (directory / "hook.py").write_text(HOOK)
        (directory / "train.py").write_text(FAIL_ONCE)

    def hook(self, event: str, code: int = 0) -> str:
        return f"--hook={event}={sys.executable} {self.directory / 'hook.py'} {self.log} {code}"

    @property
    def calls(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def pick(facts: dict[str, str], *names: str) -> tuple[str | None, ...]:
    return tuple(facts.get(name) for name in names)


def test_each_hook_runs_with_the_facts_of_its_event(site: Site) -> None:
    hooks = [site.hook(event) for event in ("before-round", "after-failure", "at-end")]
    flags = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=j", f"--log-dir={site.directory / 'logs'}", "-r3"]
    ended = run(OURS, [*flags, *hooks, "train.py"], cwd=site.directory)
    assert ended.code == 0, ended.err
    first, failed, second, end = site.calls
    rounds = ("HOOK", "JOB", "ROUND", "RANKS", "WORLD_SIZE", "NODE_RANK", "NODES")
    assert pick(first, *rounds) == ("before-round", "j", "1", "0-1", "2", "0", "1")
    assert pick(second, *rounds, "RESTARTS") == ("before-round", "j", "2", "0-1", "2", "0", "1", "1")
    cause = ("after-failure", "1", "1", "exited with code 3", "3")
    assert pick(failed, "HOOK", "ROUND", "FAILED_RANK", "CAUSE", "EXIT_CODE") == cause
    assert pick(end, "HOOK", "EXIT_CODE", "RESTARTS") == ("at-end", "0", "1")
    assert all(Path(call["LOG_DIR"]).is_relative_to(site.directory / "logs") for call in site.calls)
    assert "the hook " not in ended.err, "a command that succeeds prints nothing"


def test_a_command_that_fails_is_one_line_with_its_last_one_and_the_job_goes_on(site: Site) -> None:
    hooks = [site.hook("after-failure", 4), site.hook("at-end", 5)]
    ended = run(OURS, ["--nproc-per-node=2", "--max-restarts=1", *hooks, "train.py"], cwd=site.directory)
    assert ended.code == 0
    lines = [line.split("warning: ")[1] for line in ended.err.splitlines() if "warning: " in line]
    assert lines == [
        "the hook after-failure has failed: it ended with code 4: the last line",
        "the hook at-end has failed: it ended with code 5: the last line",
    ]


def test_a_failure_before_a_round_ends_a_job_of_one_node_and_starts_no_worker(site: Site) -> None:
    (site.directory / "train.py").write_text("open('started', 'w')")
    ended = run(OURS, [site.hook("before-round", 6), site.hook("at-end"), "train.py"], cwd=site.directory)
    assert ended.code == 71
    sentence = "the hook before-round keeps this node out of round 1: it ended with code 6: the last line"
    assert sentence in ended.err
    assert not (site.directory / "started").exists()
    assert pick(site.calls[-1], "HOOK", "EXIT_CODE", "CAUSE") == ("at-end", "71", sentence)


def test_a_node_that_a_hook_keeps_out_leaves_and_the_others_train_without_a_restart(cluster: Cluster) -> None:
    site = Site(cluster.directory)
    # A round with the other node does not end.
    (site.directory / "train.py").write_text(
        "import os, time\nif os.environ['WORLD_SIZE'] != '1': time.sleep(10 ** 6)\nprint('alone', flush=True)"
    )
    options: dict[str, Any] = {"script": site.directory / "train.py", "conf": SOON}
    refused = cluster.node("b", "1:2", site.hook("before-round", 7), **options)
    other = cluster.node("a", "1:2", **options)
    refused.until_prints("the hook before-round keeps this node out of round")
    assert refused.finish(WAIT) == 71
    other.until_prints("alone")
    assert other.finish(WAIT) == 0
    assert "; restart" not in other.output


@pytest.mark.parametrize("event", ["before-round", "at-end"])
def test_a_command_that_takes_too_long_is_stopped(site: Site, event: str) -> None:
    (site.directory / "train.py").write_text("")
    hook = f"--hook={event}=sh -c 'echo before; sleep 1000000'"
    ended = run(OURS, [hook, "--hook-timeout=0.2", "train.py"], cwd=site.directory)
    assert ended.code == (71 if event == "before-round" else 0)
    assert "it did not end within 0.2 s, and was stopped: before" in ended.err


@pytest.mark.parametrize("killed", ["launcher", "agent"])
def test_a_command_ends_with_its_launcher(mailbox: Mailbox, killed: str) -> None:
    hook = mailbox.script("hook.py", "import os, time\nif os.fork(): post()\ntime.sleep(10 ** 6)")
    script = mailbox.script("train.py", "")
    job = launch(mailbox, f"--hook=before-round={sys.executable} {hook}", script)
    command = psutil.Process(mailbox.receive()["pid"])
    with watched(command.pid, *(child.pid for child in command.children())) as fds:
        try:
            assert len(fds) == 2
            os.kill(job.pid if killed == "launcher" else agent_of(job).pid, signal.SIGKILL)
            assert still_alive(fds, WAIT) == 0
        finally:
            kill_leftovers(fds)
            finish(job)


def test_a_signal_ends_the_wait_for_a_command(mailbox: Mailbox) -> None:
    hook = mailbox.script("hook.py", "import time\npost()\ntime.sleep(10 ** 6)")
    script = mailbox.script("train.py", "")
    flags = ("--shutdown-timeout=1", "--hook-timeout=1000000")
    job = launch(mailbox, *flags, f"--hook=at-end={sys.executable} {hook}", script)
    mailbox.receive()
    job.terminate()
    ended = finish(job)
    assert "the hook at-end has failed: it did not end within" in ended.err


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (
            "--hook=later=true",
            "'later=true' does not begin with an event: give one of before-round, after-failure",
        ),
        ("--hook=at-end", "at-end names no program"),
        ("--hook=at-end=no-such-program", "'no-such-program' is not in PATH"),
        ("--hook=at-end='true", "cannot be split into words"),
    ],
)
def test_a_wrong_hook_is_refused_before_anything_starts(site: Site, flag: str, text: str) -> None:
    ended = run(OURS, [flag, "train.py"], cwd=site.directory)
    assert ended.code == 2
    assert text in ended.err
    assert len(ended.err.splitlines()) == 1


LEAVES_A_CHILD = """
import os, subprocess, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    child = subprocess.Popen(["sleep", "300"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    sys.exit(3)
"""

SEES_THE_CHILD = """
import os, time

def lives():
    try:
        return os.readlink(f"/proc/{open('child').read()}/exe") != ""
    except OSError:
        return False

event = os.environ["DLROVER_HOOK"]
until = time.monotonic() + (1 if event == "after-failure" else 60)
while lives() and time.monotonic() < until:
    time.sleep(0.05)
with open("seen", "a") as file:
    print(event, lives(), file=file)
"""


def test_what_a_failed_worker_left_is_there_for_the_hook_of_the_failure_and_ends_before_the_next_round(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(LEAVES_A_CHILD)
    (tmp_path / "hook.py").write_text(SEES_THE_CHILD)
    hooks = [f"--hook={event}={sys.executable} hook.py" for event in ("before-round", "after-failure")]
    ended = run(OURS, ["--nproc-per-node=1", "--max-restarts=1", *hooks, "train.py"], cwd=tmp_path)
    assert ended.code == 0, ended.err
    # It is killed at once, but its end takes its time.
    seen = ["before-round False", "after-failure True", "before-round False"]
    assert (tmp_path / "seen").read_text().splitlines() == seen
