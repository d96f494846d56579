"""A slow node is found before the training begins, leaves, and is replaced."""

from __future__ import annotations

import re

import pytest
from check_nodes import STRAGGLER_LINE, Gate, Visit

from experiments.experiment import Experiment


@pytest.mark.long
def test_straggler(experiment: Experiment, gate: Gate) -> None:
    gate.together = 4
    gate.rules["1"] = Visit.slow
    experiment.fault("node 1 is slow")
    experiment.start("--local-nodes=4", "--nnodes=4", "--network-check", "--exclude-straggler", env=gate.env)

    rounds = experiment.finish()
    assert [(each.nodes, each.start) for each in rounds] == [({0: 0, 1: 4, 2: 2, 3: 3}, 0)]
    assert experiment.place_taken_by(4) == 1
    assert re.search(rf"^\[node 1\] \S+ dlrover-run: {re.escape(STRAGGLER_LINE)}", experiment.said, re.MULTILINE)
    assert experiment.has_said("Fault nodes are: [] and stragglers are: [1].")
    assert experiment.said.count("takes its place") == 1
