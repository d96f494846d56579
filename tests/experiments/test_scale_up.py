"""Three nodes train, and a fourth joins them."""

from __future__ import annotations

import signal

import pytest

from experiments.experiment import NEVER, Experiment


@pytest.mark.long
def test_scale_up(experiment: Experiment) -> None:
    middle = experiment.hold(5, 1)
    experiment.start("--local-nodes=3:4", "--nnodes=3:4", f"--node-join-after={NEVER}", conf={"last_call_timeout": 0.1})
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2}

    experiment.fault("node 3 joins")
    experiment.tell_supervisor(signal.SIGUSR1)
    after = experiment.until_world({0, 1, 2, 3})
    middle.release()

    rounds = experiment.finish()
    assert after.nodes == {0: 0, 1: 1, 2: 2, 3: 3}
    assert [(each.world, each.start) for each in rounds] == [(3, 0), (4, 3)]
    assert experiment.has_said("node 3 joined, so 4 nodes train instead of 3")
