"""A worker hangs. Nobody can tell that from a long step, so nobody is blamed: the others wait for it.

They go on when it goes on, and start again from the checkpoint when somebody kills it, or when the time-out of the
script's own process group says that a step is too long.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from experiments.experiment import Experiment


@pytest.mark.long
def test_hang(experiment: Experiment) -> None:
    middle, later = experiment.hold(5, 1), experiment.hold(9, 1)
    experiment.start("--local-nodes=4", "--nnodes=3:4")
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}
    worker = psutil.Process(before.pids[1])

    with experiment.chaos("stop-process", f"node 1: stopped 1 workers: {worker.pid}"):
        # It takes the signal before it takes the next step, however busy the machine is.
        middle.release()
        assert experiment.rounds[-1].end == 5
    # It goes on now, and so do the others that waited for it.
    meanwhile = experiment.until_held(9, 1)
    assert (meanwhile.name, meanwhile.pids) == (before.name, before.pids)

    with experiment.chaos("stop-process", f"node 1: stopped 1 workers: {worker.pid}"):
        experiment.fault("the hanging worker is killed")
        os.kill(worker.pid, signal.SIGKILL)
        experiment.until_says("node 1: the processes that were stopped have gone")
        later.release()
        after = experiment.until_world({0, 1, 2, 3}, after=before)

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 9)]
    assert experiment.has_said("rank 1 was killed by SIGKILL")


@pytest.mark.long
def test_hang_that_the_script_has_no_patience_with(experiment: Experiment) -> None:
    middle = experiment.hold(5, 1)
    experiment.start("--local-nodes=4", "--nnodes=3:4", env={"EXPERIMENT_PATIENCE": "10"})
    before = experiment.until_held(5, 1)

    with experiment.chaos("stop-process", f"node 1: stopped 1 workers: {before.pids[1]}"):
        middle.release()
        # The worker that stands still has to end too, and is made to go on for that.
        after = experiment.until_world({0, 1, 2, 3}, after=before)

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert after.pids[1] != before.pids[1]
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 3)]
    assert experiment.has_said("restart 1 of 3")


@pytest.mark.long
def test_hang_of_a_node(experiment: Experiment) -> None:
    """With its agent it says nothing any more, so the others go on without it."""
    middle, later = experiment.hold(5, 1), experiment.hold(8, 0)
    experiment.start("--local-nodes=4", "--nnodes=3:4", conf={"keep_alive_interval": 1})
    before = experiment.until_held(5, 1)

    experiment.fault("node 1 stands still")
    with experiment.stopped(1):
        middle.release()
        without = experiment.until_world({0, 2, 3}, after=before)
        experiment.until_held(8, 0)
        experiment.fault("node 1 goes on")
    after = experiment.until_world({0, 1, 2, 3}, after=without)
    later.release()

    rounds = experiment.finish()
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3), (4, 6)]
    assert after.nodes == before.nodes
    assert experiment.has_said("node 1 was lost")
