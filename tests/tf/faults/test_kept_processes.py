"""What a script has loaded outlives the servers: real TensorFlow in the children of processes that keep."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from interpreters import python_215, python_221
from job import GRAPH, PACED, STRATEGY, MakeJob, check_exactly_once, check_learned

pytestmark = pytest.mark.tensorflow

KEEPING = PACED.with_name("keeping.py")

RESTORED = r"chief-\d+: has restored .*/model\.ckpt-(\d+)"
TRAINS = r"\[{}\]:the child (\d+) of (\d+) trains on \d+ rows"
ROLES = ("chief", "worker")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "python", "method"),
    [
        (GRAPH, python_221, "forkserver"),
        (GRAPH, python_215, "forkserver"),
        (GRAPH, python_221, "spawn"),
        (STRATEGY, python_221, "forkserver"),
    ],
    ids=["2.21", "2.15", "spawned", "strategy"],
)
def test_a_server_dies_and_what_was_loaded_is_kept(
    make_job: MakeJob, script: str, python: Callable[[], Path], method: str
) -> None:
    job = make_job(script, python=python())
    node = job.start("--ps=2", "--workers=1", f"--start-method={method}", program=KEEPING)
    keepers = {role: int(node.hear(TRAINS.format(f"{role}-0"))[2]) for role in ROLES}
    job.train(100)
    begun = time.monotonic()
    node.kill("ps-1")
    assert int(node.until(RESTORED)[1]) >= 50
    job.allow(100)
    node.until(r"\]:step \d+: loss")
    print(f"{script}, {method}: {time.monotonic() - begun:.2f} s from a server's end to the next step", flush=True)
    for role in ROLES:
        # The console has the name of the first task, whose process it is.
        again = re.findall(TRAINS.format(f"{role}-0"), node.said)
        assert [int(keeper) for _, keeper in again] == [keepers[role]] * 2
        assert again[0][0] != again[1][0]
    found = job.finish(node)
    check_learned(found)
    assert len(re.findall("rows were loaded by", node.said)) == 2


@pytest.mark.long
def test_servers_are_added_and_nothing_is_lost_nor_loaded_again(make_job: MakeJob) -> None:
    job = make_job(GRAPH)
    node = job.start("--ps=1:2", "--workers=1", program=KEEPING)
    job.train(100)
    job.scale("--ps=1")
    job.allow(20)
    node.until(RESTORED)
    check_exactly_once(job.finish(node))
    assert len(re.findall("rows were loaded by", node.said)) == 2


@pytest.mark.long
def test_a_chief_that_is_killed_costs_what_it_had_loaded_and_no_step(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(GRAPH)
    node = job.start("--ps=1", "--workers=1", program=KEEPING)
    keeper = int(node.hear(TRAINS.format("chief-0"))[2])
    job.train(100)
    psutil.Process(keeper).send_signal(signal.SIGKILL)
    node.until("goes on with the live model at step")
    check_learned(job.finish(node))
    assert len(re.findall("rows were loaded by", node.said)) == 3
