"""How much work a planned change of a running job costs. Real processes."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from support.cluster import SOON, Cluster, World, succeed
from support.harness import WORKERS, until
from support.rendezvous_backends import EVERYWHERE

pytestmark = [EVERYWHERE, pytest.mark.long]

SCRIPT = WORKERS / "save_steps.py"

UNSAVED = 5
"""Steps after the checkpoint that a change which does not wait makes again."""


def save(cluster: Cluster, world: World) -> int:
    """Have rank 0 save; the step of the checkpoint."""
    os.kill(world[0]["pid"], signal.SIGUSR2)
    (message,) = cluster.mailbox.gather(1)
    return int(message["saved"])


def steps(cluster: Cluster) -> list[int]:
    """The steps of rank 0 in all rounds, in order."""
    return [int(line) for line in (cluster.directory / "steps-0").read_text().split()]


def make_steps(cluster: Cluster, number: int) -> None:
    """Wait until rank 0 has made this many more steps."""
    wanted = len(steps(cluster)) + number
    until(lambda: len(steps(cluster)) >= wanted, lambda: f"no {number} steps were made{cluster.outputs()}")


def repeated(cluster: Cluster) -> list[int]:
    return [step for step, times in Counter(steps(cluster)).items() if times > 1]


@pytest.mark.parametrize("waits", [True, False])
def test_steps_repeated_when_a_node_joins(cluster: Cluster, waits: bool) -> None:
    conf = {**SOON, **({} if waits else {"scale_wait": 0})}
    pair = cluster.nodes("ab", "2:3", conf=conf, script=SCRIPT)
    world = cluster.world(2)
    save(cluster, world)
    make_steps(cluster, UNSAVED)
    third = cluster.node("c", "2:3", conf=conf, script=SCRIPT)
    if waits:
        third.until_prints("this one takes part after the next checkpoint")
        save(cluster, world)
    world = cluster.world(3)
    make_steps(cluster, UNSAVED)
    succeed(world, *pair, third)
    again = repeated(cluster)
    print(f"{len(again)} steps repeated when a node joins, {'waiting' if waits else 'not waiting'} for a checkpoint")
    if waits:
        assert not again
    else:
        assert len(again) >= UNSAVED
