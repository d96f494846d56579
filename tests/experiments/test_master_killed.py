"""The master is killed and started again: training does not stop, and the next failure is handled as ever."""

from __future__ import annotations

import os
import signal

import pytest

from experiments.experiment import Experiment


@pytest.mark.long
def test_master_killed(experiment: Experiment) -> None:
    middle, later = experiment.hold(5, 1), experiment.hold(9, 2)
    experiment.start("--local-nodes=4", "--nnodes=3:4")
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}

    # The supervisor would start it again at once; here it is away for four steps.
    experiment.tell_supervisor(signal.SIGSTOP)
    experiment.fault("the master is killed")
    experiment.master().kill()
    middle.release()
    meanwhile = experiment.until_held(9, 2)
    assert (meanwhile.name, meanwhile.pids) == (before.name, before.pids)
    experiment.tell_supervisor(signal.SIGCONT)
    experiment.until_says("the master has ended; it is started again, and training goes on meanwhile")

    experiment.fault("the worker with rank 2 is killed")
    os.kill(before.pids[2], signal.SIGKILL)
    later.release()
    after = experiment.until_world({0, 1, 2, 3}, after=before)

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 9)]
    assert not experiment.has_said("takes its place")
