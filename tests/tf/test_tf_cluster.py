"""The tasks that tf-ps-run hosts on each node of a cluster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cluster_environments import ALL, INDEXED_JOB, SLURM, Recorded
from command_lines import isolate

from dlrover_run.policies.parameter_servers.model import Role
from dlrover_run.spec import SpecError
from tf_ps_runner.cli import parse
from tf_ps_runner.spec import PsJobSpec

NODES = ("gpu07", "gpu09", "gpu10", "gpu12")


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def job(recorded: Recorded, flags: str, **changed: str) -> tuple[PsJobSpec, list[str]]:
    said: list[str] = []
    spec = parse(
        [*flags.split(), "train.py"], {**recorded.environ, **changed}, inform=said.append, context=recorded.context()
    )
    return spec, said


@pytest.mark.parametrize("recorded", ALL, ids=lambda recorded: recorded.name)
def test_every_cluster_gives_the_endpoint_and_the_tasks(recorded: Recorded) -> None:
    spec, _ = job(recorded, "--ps=2 --workers=3")
    assert spec.job.master is not None
    host = recorded.endpoint.rpartition(":")[0]
    assert spec.job.master.host == host
    assert spec.job.node_rank is None
    assert sum(part.slots for part in spec.capacity) in (1, 2, 3)


def test_the_nodes_of_a_step_host_all_tasks_between_them() -> None:
    hosted: Counter[Role] = Counter()
    for rank, node in enumerate(NODES):
        spec, said = job(SLURM, "--ps=2 --workers=3 --evaluator", SLURM_NODEID=str(rank), SLURMD_NODENAME=node)
        assert (spec.slots(Role.CHIEF) == 1) == (rank == 0)
        assert bool(said) == (rank == 0)
        hosted.update({part.role: part.slots for part in spec.capacity})
    assert hosted == {Role.CHIEF: 1, Role.PS: 2, Role.WORKER: 3, Role.EVALUATOR: 1}


def test_a_pod_hosts_one_task() -> None:
    spec, _ = job(INDEXED_JOB, "--ps=2 --workers=3")
    assert [(part.role, part.slots) for part in spec.capacity] == [(Role.PS, 1)]


def test_more_nodes_than_tasks_are_refused() -> None:
    with pytest.raises(SpecError, match=r"has 4 nodes .* and the job has 3 tasks"):
        job(SLURM, "--ps=1 --workers=1")


def test_a_role_and_an_endpoint_take_precedence() -> None:
    spec, _ = job(SLURM, "--role=ps --rdzv-backend=master --rdzv-endpoint=chief:29400 --rdzv-id=ads")
    assert [(part.role, part.slots) for part in spec.capacity] == [(Role.PS, 1)]
    assert spec.job.master is not None
    assert (spec.job.master.host, spec.job.run_id) == ("chief", "ads")


def test_a_single_node_hosts_the_whole_job() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    spec, said = job(SLURM, "--ps=2", **one, SLURM_STEP_NODELIST="gpu10", SLURM_NODEID="0")
    assert (spec.job.backend, spec.slots(Role.PS), said) == ("memory", 2, [])


def test_without_a_cluster_the_job_runs_on_this_machine() -> None:
    spec, _ = job(SLURM, "--cluster=none --ps=2")
    assert spec.job.backend == "memory"
    assert spec.slots(Role.PS) == 2
