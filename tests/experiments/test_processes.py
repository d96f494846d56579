"""A worker is killed or hangs, or the master is killed; no node is lost."""

from __future__ import annotations

import os
import signal

import pytest

from experiments.experiment import ALSO_ON_ETCD, Experiment

pytestmark = pytest.mark.long


@ALSO_ON_ETCD
def test_process_killed(experiment: Experiment) -> None:
    """A training process is killed, and the workers start again from the checkpoint."""
    middle, before = experiment.begin("--nnodes=3:4")

    with experiment.chaos("kill-process", f"node 1: killed local rank 0, process {before.pids[1]}"):
        after = experiment.until_world({0, 1, 2, 3}, after=before)
    middle.release()

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert not set(after.pids.values()) & set(before.pids.values())
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 3)]
    assert "rank 1 was killed by SIGKILL" in experiment.console
    assert "takes its place" not in experiment.console


def test_hang(experiment: Experiment) -> None:
    """A hanging worker cannot be distinguished from a long step, so the others wait until it continues.

    If it is killed, they restart from the checkpoint.
    """
    later = experiment.hold(9, 1)
    middle, before = experiment.begin("--nnodes=3:4")
    worker = before.pids[1]

    with experiment.chaos("stop-process", f"node 1: stopped 1 workers: {worker}"):
        # It handles the signal before the next step, however busy the machine is.
        middle.release()
        assert experiment.rounds[-1].end == 5
    # It continues now, and so do the workers that waited for it.
    meanwhile = experiment.until_held(9, 1)
    assert (meanwhile.name, meanwhile.pids) == (before.name, before.pids)

    with experiment.chaos("stop-process", f"node 1: stopped 1 workers: {worker}"):
        os.kill(worker, signal.SIGKILL)
        experiment.until_printed("node 1: the processes that were stopped have gone")
        later.release()
        after = experiment.until_world({0, 1, 2, 3}, after=before)

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 9)]
    assert "rank 1 was killed by SIGKILL" in experiment.console


def test_hang_beyond_the_timeout_of_the_script(experiment: Experiment) -> None:
    """The timeout of the script's own process group ends a step that is too long."""
    middle, before = experiment.begin("--nnodes=3:4", env={"EXPERIMENT_PATIENCE": "10"})

    with experiment.chaos("stop-process", f"node 1: stopped 1 workers: {before.pids[1]}"):
        middle.release()
        # The worker that hangs has to exit too, and is released for that.
        after = experiment.until_world({0, 1, 2, 3}, after=before)

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert after.pids[1] != before.pids[1]
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 3)]
    assert "restart 1 of 3" in experiment.console


def test_master_killed(experiment: Experiment) -> None:
    """Training does not stop, and the next failure is handled as usual."""
    later = experiment.hold(9, 2)
    middle, before = experiment.begin("--nnodes=3:4")

    # The supervisor would restart it at once; here it is absent for four steps.
    experiment.signal_supervisor(signal.SIGSTOP)
    experiment.master().kill()
    middle.release()
    meanwhile = experiment.until_held(9, 2)
    assert (meanwhile.name, meanwhile.pids) == (before.name, before.pids)
    experiment.signal_supervisor(signal.SIGCONT)
    experiment.until_printed("the master has ended; it is started again, and training goes on meanwhile")

    os.kill(before.pids[2], signal.SIGKILL)
    later.release()
    after = experiment.until_world({0, 1, 2, 3}, after=before)

    rounds = experiment.finish()
    assert after.nodes == before.nodes
    assert [(each.world, each.start) for each in rounds] == [(4, 0), (4, 9)]
    assert "takes its place" not in experiment.console
