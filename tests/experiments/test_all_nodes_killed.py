"""Every node is killed at once, and as many others take their places and go on from the checkpoint."""

from __future__ import annotations

import pytest

from experiments.experiment import Experiment


@pytest.mark.long
def test_all_nodes_killed(experiment: Experiment) -> None:
    middle = experiment.hold(5, 1)
    experiment.start("--local-nodes=4", "--nnodes=4", "--node-restarts=4")
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}

    experiment.fault("all nodes are killed")
    experiment.kill_nodes(0, 1, 2, 3)
    middle.release()
    after = experiment.until_world({4, 5, 6, 7})

    rounds = experiment.finish()
    places = {rank: experiment.place_taken_by(node) for rank, node in after.nodes.items()}
    assert places == before.nodes
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 3)]
