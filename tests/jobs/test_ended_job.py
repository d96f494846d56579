"""What `why` and `events` answer for a job without any flag for logs, after its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import OURS, Finished, run

FAILS = "import time\ntime.sleep(0.1)\nraise SystemExit(3)\n"


def launch(here: Path, *flags: str, **env: str) -> Finished:
    script = here / "fails.py"
    script.write_text(FAILS)
    return run(OURS, [*flags, script], cwd=here, env={"XDG_STATE_HOME": str(here / "state"), **env})


def operate(here: Path, *words: str) -> Finished:
    return run(OURS, words, cwd=here, env={"XDG_STATE_HOME": str(here / "state")})


def test_why_answers_for_the_job_that_has_just_ended(tmp_path: Path) -> None:
    assert launch(tmp_path, "--rdzv-id=ended-alone").code == 3
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
    assert launch(tmp_path, f"--rdzv-id={name}").code == 3
    for command in ("status", "top", "stacks", "logs", "stop", "drain 0", "scale --nodes=1"):
        asked = operate(tmp_path, *command.split(), name[:-1])
        assert asked.code == 3, asked
        assert f"the job {name!r} has ended: `dlrover-run why {name}` says why." in asked.err


def test_a_flag_keeps_nothing(tmp_path: Path) -> None:
    assert launch(tmp_path, "--journal=/dev/null").code == 3
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null"])
def test_a_directory_that_cannot_be_written_is_not_mentioned(tmp_path: Path, place: str) -> None:
    done = launch(tmp_path, XDG_STATE_HOME=place)
    assert done.code == 3
    assert "event log" not in done.err
    assert place not in done.err
