"""A machine on which no process of the node check lives long is found, leaves, and is replaced."""

from __future__ import annotations

from check_nodes import FAULT_LINE, Gate, Visit

from experiments.experiment import Experiment


def test_faulty_machine(experiment: Experiment, gate: Gate) -> None:
    gate.together = 4
    gate.rules["1"] = Visit.kill
    experiment.fault("each check process of node 1 is killed")
    experiment.start("--local-nodes=4", "--nnodes=4", "--network-check", "--exclude-straggler", env=gate.env)

    rounds = experiment.finish()
    assert [(each.nodes, each.start) for each in rounds] == [({0: 0, 1: 4, 2: 2, 3: 3}, 0)]
    assert experiment.place_taken_by(4) == 1
    assert experiment.has_said(f"[node 1] dlrover-run: {FAULT_LINE}")
    assert experiment.has_said("Fault nodes are: [1] and stragglers are: [].")
    assert experiment.said.count("takes its place") == 1
