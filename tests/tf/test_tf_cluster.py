"""The tasks that tf-ps-run hosts on each node of a cluster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.cluster_environments import INDEXED_JOB, SLURM, Recorded
from support.command_lines import isolate
from support.places import place_of

from tf_ps_runner.cli import parse
from tf_ps_runner.cluster.model import Role
from tf_ps_runner.spec import PsJobSpec

NODES = ("gpu07", "gpu09", "gpu10", "gpu12")


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def job(recorded: Recorded, flags: str, **changed: str) -> tuple[PsJobSpec, list[str]]:
    printed: list[str] = []
    spec = parse(
        [*flags.split(), "train.py"], {**recorded.environ, **changed}, inform=printed.append, context=recorded.context()
    )
    return spec, printed


def test_the_nodes_of_a_step_together_host_all_tasks() -> None:
    hosted: Counter[Role] = Counter()
    for rank, node in enumerate(NODES):
        spec, printed = job(SLURM, "--ps=2 --workers=3 --evaluator", SLURM_NODEID=str(rank), SLURMD_NODENAME=node)
        assert (spec.slots(Role.CHIEF) == 1) == (rank == 0)
        assert bool(printed) == (rank == 0)
        assert place_of(spec.job).master is not None
        assert (place_of(spec.job).master.host, spec.job.node_rank) == ("gpu07", None)
        hosted.update({part.role: part.slots for part in spec.capacity})
    assert hosted == {Role.CHIEF: 1, Role.PS: 2, Role.WORKER: 3, Role.EVALUATOR: 1}


def test_a_pod_hosts_one_task() -> None:
    spec, _ = job(INDEXED_JOB, "--ps=2 --workers=3")
    assert [(part.role, part.slots) for part in spec.capacity] == [(Role.PS, 1)]


def test_a_role_and_an_endpoint_take_precedence() -> None:
    spec, _ = job(SLURM, "--role=ps --rdzv-backend=master --rdzv-endpoint=chief:29400 --rdzv-id=ads")
    assert [(part.role, part.slots) for part in spec.capacity] == [(Role.PS, 1)]
    assert place_of(spec.job).master is not None
    assert (place_of(spec.job).master.host, spec.job.run_id) == ("chief", "ads")


STEP_OF_ONE = {
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "gpu10",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(("flags", "variables"), [("", STEP_OF_ONE), ("--cluster=none", {})])
def test_a_single_node_hosts_the_whole_job(flags: str, variables: dict[str, str]) -> None:
    spec, printed = job(SLURM, f"--ps=2 {flags}", **variables)
    assert (spec.job.rendezvous.backend, spec.slots(Role.PS), printed) == ("memory", 2, [])
