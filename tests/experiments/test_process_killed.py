"""A training process is killed: the nodes stay, and the workers start again from the checkpoint."""

from __future__ import annotations

import pytest

from experiments.experiment import ALSO_ON_ETCD, Experiment


@pytest.mark.long
@ALSO_ON_ETCD
def test_process_killed(experiment: Experiment) -> None:
    middle = experiment.hold(5, 1)
    experiment.start("--local-nodes=4", "--nnodes=3:4")
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}

    with experiment.chaos("kill-process", f"node 1: killed local rank 0, process {before.pids[1]}"):
        after = experiment.until_world({0, 1, 2, 3}, after=before)
    middle.release()

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert not set(after.pids.values()) & set(before.pids.values())
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 3)]
    assert experiment.has_said("rank 1 was killed by SIGKILL")
    assert not experiment.has_said("takes its place")
