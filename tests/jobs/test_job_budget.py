"""How often the workers of several nodes may fail: counted once for the job, whoever saw it. Real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

import pytest
from cluster import Cluster, Node, World, leave, succeed, tell
from harness import only_long
from meeting_places import EVERYWHERE

pytestmark = EVERYWHERE


def one_tells(nodes: Sequence[Node], words: str) -> bool:
    """Whether those words are in the full report, which is on the console of one node."""
    return [node.has_said(words) for node in nodes].count(True) == 1


def test_failures_on_all_nodes_are_counted_once_for_the_job(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=2")
    for restart, rank in ((0, 0), (1, 1), (2, 0)):
        world = cluster.world(2)
        assert world[0]["restart"] == restart
        os.kill(world[rank]["pid"], signal.SIGKILL)
    codes = [node.finish() for node in nodes]
    assert sorted(codes) == [1, 128 + signal.SIGKILL]
    assert one_tells(nodes, "2 of 2 restarts were used")
    for node in nodes:
        assert node.said.count("; restart ") == 2


@pytest.mark.long
def test_workers_of_two_nodes_that_fail_together_cost_one_restart(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=5")
    for member in cluster.world(2):
        # The end of the first one may have ended the second one by now.
        with contextlib.suppress(ProcessLookupError):
            os.kill(member["pid"], signal.SIGKILL)
    world = cluster.world(2)
    assert world[0]["restart"] == 1
    succeed(world, *nodes)


@pytest.mark.long
def test_who_leaves_and_comes_back_has_used_what_he_used(cluster: Cluster) -> None:
    flags = ("1:2", "--max-restarts=1")
    stays = cluster.node("a", *flags)
    fickle = cluster.node("b", *flags, env={"NODE_ID": "fickle"})
    fail_on(cluster.world(2), "b")
    assert cluster.world(2)[0]["restart"] == 1
    leave(fickle)
    assert cluster.world(1)[0]["restart"] == 1
    fickle = cluster.node("b", *flags, env={"NODE_ID": "fickle"})
    world = cluster.world(2)
    assert world[0]["restart"] == 1, "what comes and goes costs nothing, and takes nothing back"
    fail_on(world, "b")
    assert (stays.finish(), fickle.finish()) == (1, 128 + signal.SIGKILL)
    assert one_tells([stays, fickle], "1 of 1 restarts were used")


def fail_on(world: World, node: str) -> None:
    """Kill the worker of a node."""
    tell([member for member in world if member["node"] == node], signal.SIGKILL)


@pytest.mark.parametrize("window", [0.01, *only_long(1000)])
def test_a_window_forgives_what_was_long_ago(cluster: Cluster, window: float) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=1", conf={"restart_window": window})
    for restart in range(3):
        world = cluster.world(2)
        assert world[0]["restart"] == restart
        tell(world[:1], signal.SIGKILL)
        if restart and window > 1:
            break
    else:
        return succeed(cluster.world(2), *nodes)
    assert sorted(node.finish() for node in nodes) == [1, 128 + signal.SIGKILL]
    assert one_tells(nodes, "1 of 1 restarts were used")
    return None


def test_a_job_that_cannot_start_stops_early_and_says_so(cluster: Cluster) -> None:
    script = cluster.mailbox.script("broken.py", "post()\nraise ImportError('no module named flash_attn')\n")
    nodes = cluster.nodes("ab", "2", "--max-restarts=100", script=script, conf={"early_failure_limit": 3})
    assert [node.finish() for node in nodes] == [1, 1]
    for node in nodes:
        assert node.has_said("3 rounds in succession failed before any worker had got through init_process_group")
    assert max(message["restart"] for message in cluster.mailbox.pending()) == 2
