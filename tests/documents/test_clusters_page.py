"""docs/clusters.md: the commands of each cluster for torchrun and for dlrover-run start the same job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cluster_environments import INDEXED_JOB, OPEN_MPI, SLURM, TRAINJOB, Recorded
from support.command_lines import isolate
from support.doc_pages import _FENCE, DOCS, run_block
from support.places import place_of

from dlrover_run.cli import parse
from dlrover_run.spec import JobSpec

PAGE = DOCS / "clusters.md"

HOSTS = "n01\nn02\nn03 slots=8\nn04\n"

MACHINES = Recorded("machines", {}, "n03", "n01", "", files={"hosts": HOSTS})

CLUSTERS = {
    "Slurm": SLURM,
    "Kubernetes, an indexed Job": INDEXED_JOB,
    "Kubeflow, a TrainJob or a PyTorchJob": TRAINJOB,
    "Open MPI": OPEN_MPI,
    "Machines without a scheduler": MACHINES,
}

STAND_INS = {
    "scontrol": 'printf "gpu%s\\n" 07 09 10 12',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "mpirun": 'shift 6; exec "$@"',
    "pdsh": 'shift 2; exec "$@"',
    "torchrun": 'printf "%s\\n" torchrun "$@"',
    "dlrover-run": 'printf "%s\\n" dlrover-run "$@"',
}
"""Stand-ins: a program that starts launchers starts one, and a launcher prints its arguments."""


def started(block: re.Match[str], recorded: Recorded, directory: Path) -> list[str]:
    """The program and the arguments of a launcher that a block starts on one node."""
    if block[1] == "yaml":
        words = re.findall(r'"([^"]*)"', block[2])
        # Kubernetes replaces references to variables in a command.
        return [re.sub(r"\$\((\w+)\)", lambda name: recorded.environ[name[1]], word) for word in words]
    return run_block(f"set -eu\n{block[2]}", directory, STAND_INS, recorded.environ)


def place(spec: JobSpec) -> str:
    return place_of(spec).master.host if place_of(spec).master else (place_of(spec).store or ("", 0))[0]


@pytest.mark.parametrize("title", CLUSTERS)
def test_both_commands_of_a_cluster_start_the_same_job(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(tmp_path, monkeypatch)
    recorded = CLUSTERS[title]
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    theirs, ours = (started(block, recorded, tmp_path) for block in _FENCE.finditer(section))
    assert (theirs[0], ours[0]) == ("torchrun", "dlrover-run")
    warnings: list[str] = []
    by_hand = parse(["--cluster=none", *theirs[1:]], recorded.environ, context=recorded.context())
    found = parse(
        ours[1:],
        recorded.environ,
        count_workers=lambda kind, environ: 8,
        warn=warnings.append,
        context=recorded.context(),
    )
    assert warnings == []
    assert (
        (found.rules.min_nodes, found.rules.max_nodes) == (by_hand.rules.min_nodes, by_hand.rules.max_nodes) == (4, 4)
    )
    assert found.workers_per_node == by_hand.workers_per_node == 8
    if recorded is not OPEN_MPI:  # It prints the address of n01.
        assert place(found).partition(".")[0] == place(by_hand).partition(".")[0]
    assert found.node_rank == 2
    assert by_hand.node_rank in (2, None), "c10d of torchrun assigns ranks by arrival"
    assert len(ours) < len(theirs) or theirs[1:] == ours[1:]


def test_every_environment_of_the_page_is_recorded() -> None:
    titles = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert titles[: len(CLUSTERS)] == list(CLUSTERS)
