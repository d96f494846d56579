"""Four nodes train, one is lost and never replaced, and the others share what is left of its samples."""

from __future__ import annotations

import re

import pytest

from experiments.experiment import ALSO_ON_ETCD, BATCH_SIZE, Experiment


@pytest.mark.long
@ALSO_ON_ETCD
def test_scale_down(experiment: Experiment) -> None:
    middle = experiment.hold(5, 3)
    experiment.start("--local-nodes=4", "--nnodes=3:4", "--node-restarts=0")
    before = experiment.until_held(5, 3)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}

    experiment.fault("node 3 is killed")
    experiment.kill_nodes(3)
    middle.release()
    after = experiment.until_world({0, 1, 2})

    rounds = experiment.finish()
    assert after.nodes == {0: 0, 1: 1, 2: 2}
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3)]
    assert experiment.has_said("no node is replaced in this job, so the others go on without it")
    completed = 3 * 4 * BATCH_SIZE
    left = -(-(experiment.digits.size - completed) // 3)
    said = re.findall(r"Load epoch = (\d+), completed num = (\d+), num_samples = (\d+)$", experiment.said, re.M)
    assert said == [("0", str(completed), str(left))]
