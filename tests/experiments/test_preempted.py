"""A node is taken away, its replacement joins, and training goes on from the checkpoint."""

from __future__ import annotations

import pytest

from experiments.experiment import ALSO_ON_ETCD, Experiment


@pytest.mark.long
@ALSO_ON_ETCD
def test_preempted(experiment: Experiment) -> None:
    fault, later = experiment.hold(5, 1), experiment.hold(7, 0)
    experiment.start("--local-nodes=4", "--nnodes=3:4")
    before = experiment.until_held(5, 1)
    assert before.nodes == {0: 0, 1: 1, 2: 2, 3: 3}

    experiment.fault("node 1 is killed")
    experiment.kill_nodes(1)
    fault.release()
    after = experiment.until_world({0, 2, 3, 4}, after=before)
    later.release()

    rounds = experiment.finish()
    assert experiment.has_said("node 1 was killed by SIGKILL; node 4 takes its place (1 of 3 node restarts)")
    assert after.nodes == {0: 0, 1: 4, 2: 2, 3: 3}
    assert (rounds[-1].name, rounds[-1].start) == (after.name, 3)
    # The others may have trained without it, until the replacement came.
    assert [set(each.nodes.values()) for each in rounds[1:-1]] in ([], [{0, 2, 3}])
