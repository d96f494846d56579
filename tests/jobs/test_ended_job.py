"""What `why` and `events` answer for a job without any flag for logs, after its end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.harness import OURS, WAIT, Finished, Mailbox, agent_of, finish, launch, run, start, until

FAILS = "import time\ntime.sleep(0.1)\nraise SystemExit(3)\n"


def fail(here: Path, *flags: str, **env: str) -> Finished:
    script = here / "fails.py"
    script.write_text(FAILS)
    return run(OURS, [*flags, script], cwd=here, env={"XDG_STATE_HOME": str(here / "state"), **env})


def operate(here: Path, *words: str) -> Finished:
    return run(OURS, words, cwd=here, env={"XDG_STATE_HOME": str(here / "state")})


def test_why_answers_for_the_job_that_has_just_ended(tmp_path: Path) -> None:
    assert fail(tmp_path, "--rdzv-id=ended-alone").code == 3
    why = operate(tmp_path, "why", "--rdzv-id=ended-alone")
    assert why.code == 0, why
    assert "rank 0 on " in why.out
    assert "exited with code 3" in why.out
    assert "the job 'ended-alone' has ended" in why.err
    events = operate(tmp_path, "events", "ended-alone")
    assert "worker.failed" in events.out
    assert "job.ended" in events.out


def test_every_command_says_that_a_job_has_ended_and_who_knows_why(tmp_path: Path) -> None:
    name = f"ended-asked-{os.getpid()}"
    assert fail(tmp_path, f"--rdzv-id={name}").code == 3
    for command in ("status", "top", "stacks", "logs", "stop", "drain 0", "scale --nodes=1"):
        asked = operate(tmp_path, *command.split(), name[:-1])
        assert asked.code == 3, asked
        assert f"the job {name!r} has ended: `dlrover-run why {name}` says why." in asked.err


SLEEPS = "post()\nwait_for_signals()\n"


def test_the_last_job_is_explained_while_others_run_and_all_are_listed(tmp_path: Path, mailbox: Mailbox) -> None:
    """By the pid of its launcher too, which is all that `ps` and the shell have shown."""
    name = f"ended-beside-{os.getpid()}"
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    env: dict[str, str | None] = {"XDG_STATE_HOME": str(tmp_path / "state")}
    begun = start(OURS, [f"--rdzv-id={name}", script, "--key=secret"], cwd=tmp_path, env=env)
    assert finish(begun).code == 3
    sleeping = mailbox.script("sleeps.py", SLEEPS)
    running = [launch(mailbox, f"--rdzv-id={name}-{letter}", sleeping, env=env) for letter in "ab"]
    try:
        mailbox.gather(2)
        why = operate(tmp_path, "why")
        assert why.code == 0, why
        assert "exited with code 3" in why.out
        assert f"the job {name!r} has ended " in why.err
        assert " run too: name one for an answer about it." in why.err
        assert "exited with code 3" in operate(tmp_path, "why", str(begun.pid)).out
        rows = {row["job"]: row for row in json.loads(operate(tmp_path, "jobs", "--all", "--json").out)}
        row = rows[name]
        assert (row["state"], row["script"], row["pid"], row["workers"]) == ("failed", "fails.py", begun.pid, 1)
        assert row["ended"] is not None
        assert [rows[f"{name}-{letter}"]["ended"] for letter in "ab"] == [None, None]
        assert name not in operate(tmp_path, "jobs").out.replace(f"{name}-", "")
        assert re.search(rf"^{name} .* failed .* \d\d:\d\d$", operate(tmp_path, "jobs", "-a").out, re.MULTILINE)
        assert "secret" not in "".join(path.read_text() for path in (tmp_path / "state").rglob("*.jsonl"))
    finally:
        for job in running:
            job.terminate()
            finish(job)


def test_a_launcher_that_was_killed_is_said_to_be(tmp_path: Path, mailbox: Mailbox) -> None:
    env: dict[str, str | None] = {"XDG_STATE_HOME": str(tmp_path / "state")}
    name = f"orphan-{os.getpid()}"
    job = launch(mailbox, f"--rdzv-id={name}", mailbox.script("sleeps.py", SLEEPS), env=env)
    mailbox.gather(1)
    agent = agent_of(job)
    job.kill()
    finish(job)
    agent.wait(WAIT)
    why = operate(tmp_path, "why", name)
    assert "with exit code 137: it was killed, or the program that had started it has ended" in why.out
    (row,) = [row for row in json.loads(operate(tmp_path, "jobs", "-a", "--json").out) if row["job"] == name]
    assert row["state"] == "stopped"


COUNTS = "import os\nif os.environ.get('COUNT'):\n    from dlrover_run import training\n    training.report()\n"


def test_what_is_not_known_without_steps_is_said(tmp_path: Path, mailbox: Mailbox) -> None:
    """A job that has counted none, beside one that has."""
    env: dict[str, str | None] = {"XDG_STATE_HOME": str(tmp_path / "state")}
    script = mailbox.script("counts.py", COUNTS + SLEEPS)
    name = f"steps-{os.getpid()}"
    running = [launch(mailbox, f"--rdzv-id={name}-{count}", script, env={**env, "COUNT": count}) for count in ("", "1")]
    try:
        mailbox.gather(2)
        # The launcher looks for steps now and then.
        step = "has made its first step"
        until(lambda: step in operate(tmp_path, "events", f"{name}-1").out, "no step is found")
        for count, says in (("", True), ("1", False)):
            status = operate(tmp_path, "status", f"{name}-{count}").out
            hint = f"steps: not counted, so a hang may not show: try `dlrover-run stacks {name}-{count}`"
            assert (hint in status) == says
            assert ("ETTR at most " in status) == says
            slow = operate(tmp_path, "why", "--slow", f"{name}-{count}")
            assert ("no steps are counted, so the time before the first one counts as training" in slow.err) == says
        why = operate(tmp_path, "why", f"{name}-")
        assert "round 1 trains since" in why.out
        assert "no steps are counted, so a worker may hang in its own code" in why.err
    finally:
        for job in running:
            job.terminate()
            finish(job)


def test_a_flag_keeps_nothing(tmp_path: Path) -> None:
    assert fail(tmp_path, "--journal=/dev/null").code == 3
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null"])
def test_a_directory_that_cannot_be_written_is_not_mentioned(tmp_path: Path, place: str) -> None:
    done = fail(tmp_path, XDG_STATE_HOME=place)
    assert done.code == 3
    assert "event log" not in done.err
    assert place not in done.err
