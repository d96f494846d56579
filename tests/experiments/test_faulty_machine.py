"""A machine on which no process of the node check lives long is found, leaves, and is replaced."""

from __future__ import annotations

import re

import pytest
from check_nodes import FAULT_LINE, Gate

from experiments.experiment import Experiment


@pytest.mark.long
def test_faulty_machine(experiment: Experiment, gate: Gate) -> None:
    gate.together = 4
    gate.rules["1"] = lambda _: experiment.say("a check process of node 1 is held")
    experiment.start("--local-nodes=4", "--nnodes=4", "--network-check", "--exclude-straggler", env=gate.env)
    # Nodes compute only when all have come to do so, and one whose process was killed before that has not.
    experiment.until_says("a check process of node 1 is held")
    with experiment.chaos("kill-process", "node 1: killed local rank 0"):
        experiment.until_says("node 1 was found broken by the node check; node 4 takes its place")

    rounds = experiment.finish()
    assert [(each.nodes, each.start) for each in rounds] == [({0: 0, 1: 4, 2: 2, 3: 3}, 0)]
    assert re.search(rf"^\[node 1\] \S+ dlrover-run: {re.escape(FAULT_LINE)}", experiment.said, re.MULTILINE)
    assert experiment.has_said("Fault nodes are: [1] and stragglers are: [].")
    assert experiment.said.count("takes its place") == 1
