"""`tf-ps-run logs` of a job of fake tasks: which are named by their roles, not by ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from pretended import SERVERS, Job
from support.harness import WAIT

from dlrover_run.features.operate.commands.asker import REFUSED


def logs(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*SERVERS.command, "logs", job.run_id, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


def test_the_output_of_tasks_is_read_by_their_names_and_followed_to_the_end(start: Callable[..., Job]) -> None:
    job = start("--ps=1", "--workers=1")
    for name in ("chief-0", "worker-0"):
        job.up(name)
    every = logs(job)
    assert (every.returncode, every.stderr) == (0, "")
    assert {"[chief-0]: chief-0 begins", "[worker-0]: worker-0 begins"} <= set(every.stdout.splitlines())
    one = logs(job, "--rank=worker-0")
    assert (one.returncode, one.stdout) == (0, "worker-0 begins\n")
    none = logs(job, "--rank=worker-7")
    assert none.returncode == REFUSED
    assert "there is no output of rank worker-7" in none.stderr
    command = [*SERVERS.command, "logs", "-f", job.run_id, "--rank=chief-0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "chief-0 begins\n"
        job.finish("chief-0")
        rest = following.communicate(timeout=WAIT)
    assert following.returncode == 0, rest
