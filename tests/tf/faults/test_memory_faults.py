"""Tasks that take more memory than they may, under a limit that the kernel keeps: they are told of, and get twice as
much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from job import GRAPH, PAUSES, RESTORED, MakeJob, both_ways, check_exactly_once, check_learned

from tf_ps_runner.memory.cgroups import find_cgroup_parent

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

LIMIT, MEAL = 700, 800
"""MiB that a task may have, and that it takes at once when it is fed: too much, but not for twice the limit."""


@pytest.fixture(autouse=True)
def groups() -> None:
    if find_cgroup_parent() is None:
        pytest.skip("no control group can be made here, of version 1 or 2: that takes root, or a delegated group")


def group_of(process: psutil.Process) -> str:
    """The name of the control group that a task has for itself."""
    lines = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
    return next(name for line in lines if (name := line.rpartition("/")[2]).startswith("tf-ps-run."))


def left_of(name: str) -> list[Path]:
    place = find_cgroup_parent()
    assert place is not None
    return [path for path in place.folder.iterdir() if path.name == name]


@both_ways
def test_a_worker_that_takes_too_much_gets_twice_as_much(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script, PACE_EAT=f"worker:{MEAL}")
    node = job.start("--ps=1", "--workers=1", f"--worker-memory={LIMIT}Mi", "--max-memory=4Gi")
    job.train(100)
    groups = [group_of(node.up("worker-0"))]
    job.feed()
    node.until(rf"worker-0 \(rank 0\) on .* was killed by SIGKILL: it used more than its memory limit of {LIMIT}Mi")
    groups.append(group_of(node.up("worker-1")))
    job.train(150, since=100)
    job.feed()
    node.until(rf"\[worker-1\]:has eaten {MEAL} MiB")
    check_exactly_once(job.finish(node), usual)
    assert node.others_stayed("ps-0", "chief-0")
    assert [left_of(name) for name in groups] == [[], []]


@both_ways
def test_a_server_that_takes_too_much_gets_twice_as_much(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script, PACE_EAT=f"ps:{MEAL}")
    node = job.start("--ps=1", "--workers=1", f"--ps-memory={LIMIT}Mi", "--max-memory=4Gi")
    job.train(100)
    job.feed()
    node.until(rf"ps-0 \(rank 0\) on .* was killed by SIGKILL: it used more than its memory limit of {LIMIT}Mi")
    assert int(node.until(RESTORED)[1]) >= 50
    job.feed()
    node.until(rf"\[ps-1\]:has eaten {MEAL} MiB")
    check_learned(job.finish(node), usual)


def test_a_server_that_is_near_its_limit_is_replaced_before_it_is_killed(
    make_job: MakeJob, undisturbed: Callable[[str], float]
) -> None:
    usual = undisturbed(GRAPH)
    # With what a server takes by itself, 40 to 100 MiB here, that is between nine tenths of the limit and the whole.
    near = 2000
    job = make_job(GRAPH, PACE_EAT="ps:1830")
    node = job.start("--ps=1", "--workers=1", f"--ps-memory={near}Mi", "--max-memory=4Gi")
    job.train(100)
    job.feed()
    node.until(rf"ps-0 \(rank 0\) on .* is near its limit of {near}Mi, and is to get {2 * near}Mi")
    node.until(PAUSES)
    job.allow(20)
    node.until(r"chief-0 saved at step \d+")
    check_exactly_once(job.finish(node), usual)
