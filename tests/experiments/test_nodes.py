"""Nodes are lost, replaced, cut off, slow, faulty, added or removed; training resumes from the checkpoint."""

from __future__ import annotations

import re
import signal

import pytest
from support.check_nodes import FAULT_LINE, STRAGGLER_LINE, Gate, Visit

from dlrover_run.features.local_nodes.network import why_not
from experiments.experiment import ALSO_ON_ETCD, BATCH_SIZE, NEVER, Experiment

pytestmark = pytest.mark.long

WHY_NOT = why_not()
CUT = {"keep_alive_interval": 1, "cut_off_timeout": 0}

isolated = pytest.mark.skipif(WHY_NOT is not None, reason=f"nodes cannot have networks of their own here: {WHY_NOT}")


@ALSO_ON_ETCD
def test_preempted(experiment: Experiment) -> None:
    """A node is killed, and its replacement joins."""
    later = experiment.hold(7, 0)
    middle, before = experiment.begin("--nnodes=3:4")

    experiment.kill_nodes(1)
    middle.release()
    after = experiment.until_world({0, 2, 3, 4}, after=before)
    later.release()

    rounds = experiment.finish()
    assert "node 1 was killed by SIGKILL; node 4 takes its place (1 of 3 node restarts)" in experiment.console
    assert after.nodes == {0: 0, 1: 4, 2: 2, 3: 3}
    # The others may have trained without it until the replacement had prepared, past a further checkpoint.
    assert rounds[-1].name == after.name
    assert rounds[-1].start in (3, 6)
    assert [set(each.nodes.values()) for each in rounds[1:-1]] in ([], [{0, 2, 3}])


def test_all_nodes_killed(experiment: Experiment) -> None:
    """The same number of new nodes replaces them."""
    middle, before = experiment.begin("--nnodes=4", "--node-restarts=4")

    experiment.kill_nodes(0, 1, 2, 3)
    middle.release()
    after = experiment.until_world({4, 5, 6, 7})

    rounds = experiment.finish()
    assert {rank: experiment.place_taken_by(node) for rank, node in after.nodes.items()} == before.nodes
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 3)]


@ALSO_ON_ETCD
def test_scale_down(experiment: Experiment) -> None:
    """A node is lost and not replaced, and the others share its remaining samples."""
    middle, _ = experiment.begin("--nnodes=3:4", "--node-restarts=0", held=3)

    experiment.kill_nodes(3)
    middle.release()
    after = experiment.until_world({0, 1, 2})

    rounds = experiment.finish()
    assert after.nodes == {0: 0, 1: 1, 2: 2}
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3)]
    assert "no node is replaced in this job, so the others go on without it" in experiment.console
    completed = 3 * 4 * BATCH_SIZE
    left = -(-(experiment.digits.size - completed) // 3)
    printed = re.findall(r"Load epoch = (\d+), completed num = (\d+), num_samples = (\d+)$", experiment.console, re.M)
    assert printed == [("0", str(completed), str(left))]


def test_scale_up(experiment: Experiment) -> None:
    """Three nodes train, and a fourth joins them after the next checkpoint, so that no step before it is repeated."""
    middle, later = experiment.hold(5, 1), experiment.hold(8, 1)
    conf = {"last_call_timeout": 0.1, "scale_wait": NEVER}
    experiment.start("--local-nodes=3:4", "--nnodes=3:4", f"--node-join-after={NEVER}", conf=conf)
    assert experiment.until_held(5, 1).nodes == {0: 0, 1: 1, 2: 2}

    experiment.signal_supervisor(signal.SIGUSR1)
    experiment.until_printed("this one takes part after the next checkpoint")
    middle.release()
    after = experiment.until_world({0, 1, 2, 3})
    later.release()

    rounds = experiment.finish()
    assert after.nodes == {0: 0, 1: 1, 2: 2, 3: 3}
    assert [(each.world, each.start) for each in rounds] == [(3, 0), (4, 6)]
    assert "node 3 joined, so 4 nodes train instead of 3" in experiment.console


@isolated
def test_network_breakdown(experiment: Experiment) -> None:
    """The others continue without the node whose network is cut, and it rejoins when the network is restored."""
    later = experiment.hold(8, 0)
    middle, before = experiment.begin("--nnodes=3:4", "--isolate-nodes", conf=CUT)

    with experiment.chaos("network-loss", "node 1: eth0 is down"):
        middle.release()
        without = experiment.until_world({0, 2, 3}, after=before)
        experiment.until_held(8, 0)
    after = experiment.until_world({0, 1, 2, 3}, after=without)
    later.release()

    rounds = experiment.finish()
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3), (4, 6)]
    assert after.nodes == before.nodes
    assert "node 1 was lost" in experiment.console
    assert "takes its place" not in experiment.console


@isolated
def test_a_node_that_stays_cut_off_is_replaced(experiment: Experiment) -> None:
    later = experiment.hold(8, 0)
    middle, before = experiment.begin("--nnodes=3:4", "--isolate-nodes", conf={**CUT, "cut_off_timeout": 3})

    with experiment.chaos("network-loss", "node 1: eth0 is down"):
        middle.release()
        without = experiment.until_world({0, 2, 3}, after=before)
        experiment.until_held(8, 0)
        after = experiment.until_world({0, 2, 3, 4}, after=without)
    later.release()

    rounds = experiment.finish()
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3), (4, 6)]
    assert after.nodes == {0: 0, 1: 4, 2: 2, 3: 3}
    assert "node 1 was cut off from the other nodes; node 4 takes its place" in experiment.console


def test_hang_of_a_node(experiment: Experiment) -> None:
    """The agent is stopped too, so the node sends nothing, and the others continue without it."""
    later = experiment.hold(8, 0)
    middle, before = experiment.begin("--nnodes=3:4", conf={"keep_alive_interval": 1})

    with experiment.stopped(1):
        middle.release()
        without = experiment.until_world({0, 2, 3}, after=before)
        experiment.until_held(8, 0)
    after = experiment.until_world({0, 1, 2, 3}, after=without)
    later.release()

    rounds = experiment.finish()
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (3, 3), (4, 6)]
    assert after.nodes == before.nodes
    assert "node 1 was lost" in experiment.console


CHECKED = ("--local-nodes=4", "--nnodes=4", "--network-check", "--exclude-straggler")


def check_replaced(experiment: Experiment, line: str, result: str) -> None:
    """Fail unless node 1 was found before the training, printed that line, and was replaced."""
    rounds = experiment.finish()
    assert [(each.nodes, each.start) for each in rounds] == [({0: 0, 1: 4, 2: 2, 3: 3}, 0)]
    assert re.search(rf"^\[node 1\] \S+ dlrover-run: {re.escape(line)}", experiment.console, re.MULTILINE)
    assert result in experiment.console
    assert experiment.console.count("takes its place") == 1


def test_straggler(experiment: Experiment, gate: Gate) -> None:
    """A slow node is found before the training begins, leaves, and is replaced."""
    gate.together = 4
    gate.rules["1"] = Visit.slow
    experiment.start(*CHECKED, env=gate.env)
    check_replaced(experiment, STRAGGLER_LINE, "Fault nodes are: [] and stragglers are: [1].")


def test_faulty_machine(experiment: Experiment, gate: Gate) -> None:
    """A node on which no process of the node check survives is replaced in the same way."""
    gate.together = 4
    gate.rules["1"] = lambda _: experiment.print("a check process of node 1 is held")
    experiment.start(*CHECKED, env=gate.env)
    # Nodes compute only after all are ready for it; a node whose process was killed before that has not computed.
    experiment.until_printed("a check process of node 1 is held")
    with experiment.chaos("kill-process", "node 1: killed local rank 0"):
        experiment.until_printed("node 1 was found broken; node 4 takes its place")
    check_replaced(experiment, FAULT_LINE, "Fault nodes are: [1] and stragglers are: [].")
