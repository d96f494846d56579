"""The network of a node is cut while it trains: the others go on without it, and it comes back with the network."""

from __future__ import annotations

import pytest

from dlrover_run.local_cluster.network import why_not
from experiments.experiment import Experiment

WHY_NOT = why_not()
CUT = {"keep_alive_interval": 1, "cut_off_timeout": 0}


@pytest.mark.long
@pytest.mark.skipif(WHY_NOT is not None, reason=f"nodes cannot have networks of their own here: {WHY_NOT}")
def test_network_breakdown(experiment: Experiment) -> None:
    middle, later = experiment.hold(5, 1), experiment.hold(8, 0)
    experiment.start("--local-nodes=4", "--nnodes=3:4", "--isolate-nodes", conf=CUT)
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}

    with experiment.chaos("network-loss", "node 1: eth0 is down"):
        middle.release()
        without = experiment.until_world({0, 2, 3}, after=before)
        experiment.until_held(8, 0)
        experiment.fault("the network of node 1 is there again")
    after = experiment.until_world({0, 1, 2, 3}, after=without)
    later.release()

    rounds = experiment.finish()
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3), (4, 6)]
    assert after.nodes == before.nodes
    assert experiment.has_said("node 1 was lost")
    assert not experiment.has_said("takes its place")


@pytest.mark.long
@pytest.mark.skipif(WHY_NOT is not None, reason=f"nodes cannot have networks of their own here: {WHY_NOT}")
def test_a_node_that_stays_cut_off_is_replaced(experiment: Experiment) -> None:
    middle, later = experiment.hold(5, 1), experiment.hold(8, 0)
    experiment.start("--local-nodes=4", "--nnodes=3:4", "--isolate-nodes", conf={**CUT, "cut_off_timeout": 3})
    before = experiment.until_held(5, 1)

    with experiment.chaos("network-loss", "node 1: eth0 is down"):
        middle.release()
        without = experiment.until_world({0, 2, 3}, after=before)
        experiment.until_held(8, 0)
        after = experiment.until_world({0, 2, 3, 4}, after=without)
    later.release()

    rounds = experiment.finish()
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3), (4, 6)]
    assert after.nodes == {0: 0, 1: 4, 2: 2, 3: 3}
    assert experiment.has_said("node 1 was cut off from the other nodes; node 4 takes its place")
