"""Launchers of one job in damaged and contradictory environments: none of them becomes a job of one node.

Every environment starts as a recorded one of four nodes. Then variables are removed, replaced by invalid values or by
those of another node, the variables of a second cluster are added, and flags request something else.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from support.cluster_environments import ALL, Recorded
from support.command_lines import isolate
from support.harness import only_long
from support.places import place_of

from dlrover_run.cli import parse
from dlrover_run.environment import MARKERS
from dlrover_run.environment.records import Context
from dlrover_run.spec import JobSpec, SpecError

NONSENSE = (
    "",
    " ",
    "x",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "8",
    "1.5",
    "٣",
    "9" * 30,
    "n[1-",
    "[]",
    "a,b",
    "{}",
    "[1]",
    "n01",
    "\x1b",
)

FLAGS = (
    "",
    "--nnodes=1",
    "--nnodes=1:1",
    "--nnodes=2",
    "--nnodes=2:9",
    "--standalone",
    "--local-nodes=2",
    "--rdzv-backend=static",
    "--rdzv-backend=c10d",
    "--node-rank=0",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d --rdzv-endpoint=localhost:29400 --nnodes=1:4",
    "--rdzv-endpoint=127.0.0.1:29400",
    "--master-addr=localhost",
    "--rdzv-id=job",
)

USERS = (
    "PET_NNODES",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NODE_RANK",
    "PET_RDZV_ENDPOINT",
    "MASTER_ADDR",
    "PMI_SIZE",
    "OMPI_MCA_orte_hnp_uri",
)
"""Variables for the number of nodes or the meeting place, which no other variable can contradict."""

ONE_NODE = {"KUBERNETES_SERVICE_HOST", "LSB_JOBID", "PBS_JOBID", "CLOUD_ML_JOB_ID"}
SIGNS = {name for markers in MARKERS.values() for name in markers} - ONE_NODE


def is_marked(environ: dict[str, str]) -> bool:
    """Whether a variable is left that shows that a cluster started the launcher."""
    filled = {name for name, text in environ.items() if text.strip()}
    if environ.get("JOB_COMPLETION_INDEX") == "0":
        return False  # The index of a Job with a single pod.
    operator = {"KUBERNETES_SERVICE_HOST", "RANK"} <= filled and filled & {"WORLD_SIZE", "MASTER_ADDR"}
    return bool(filled & SIGNS or operator)


ESCAPE = "--cluster=none"


def damaged(draw: random.Random, recorded: Recorded) -> tuple[dict[str, str], bool]:
    """Variables of a recorded launcher after one or two changes, and whether they identify one cluster only."""
    environ, pure = dict(recorded.environ), True
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(sorted(recorded.environ))
        change = draw.randrange(4)
        if change == 0:
            environ.pop(name, None)
        elif change == 1:
            environ[name] = draw.choice(NONSENSE)
        elif change == 2:
            environ[name] = recorded.environ[draw.choice(sorted(recorded.environ))]
        else:
            other, pure = draw.choice(ALL), False
            added = sorted(other.environ) if draw.random() < 0.5 else [draw.choice(sorted(other.environ))]
            environ |= {each: other.environ[each] for each in added}
    return environ, pure


def outcome(recorded: Recorded, environ: dict[str, str], flags: str) -> JobSpec | str:
    """The job, or the error message that refuses it."""
    words = [*recorded.flags.split(), *flags.split(), "train.py"]
    context = Context(recorded.hostname, recorded.files.get, False, "dlrover-run train.py", lambda host: False)
    try:
        return parse(words, environ, context=context)
    except SpecError as error:
        return str(error)


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


@pytest.mark.parametrize("seeds", [range(1000), *only_long(range(1000, 20_000))], ids=len)
def test_no_contradictory_environment_makes_a_job_of_one_node(seeds: range) -> None:
    counted = {"right": 0, "refused": 0}
    for seed in seeds:
        draw = random.Random(seed)
        recorded = draw.choice(ALL)
        (environ, pure), flags = damaged(draw, recorded), draw.choice(FLAGS)
        found = outcome(recorded, environ, flags)
        case = f"seed {seed}: {recorded.name} {flags} {environ}"
        if isinstance(found, str):
            counted["refused"] += 1
            assert found.isprintable(), case
            assert found.endswith("."), case
            assert len(found) < 2000, case
            continue
        counted["right"] += 1
        if not is_marked(environ):
            continue
        assert "local_nodes" not in found.settings, case
        assert found.rendezvous.backend != "memory", case
        assert found.rules.max_nodes > 1, case
        by_hand = any(environ.get(name) != recorded.environ.get(name) for name in USERS)
        if not pure or by_hand or "PET_RDZV_BACKEND" in environ:
            continue
        if "--nnodes" not in recorded.flags + flags:
            assert found.rules.max_nodes == recorded.nodes, case
        if not {"127.0.0.1", "localhost"} & set(re.split(r"[=: ]", flags)):
            assert place_of(found).master is not None or place_of(found).store is not None, case
            host = place_of(found).master.host if place_of(found).master else (place_of(found).store or ("", 0))[0]
            assert host == recorded.endpoint.rpartition(":")[0], case
    assert min(counted.values()) > 10, "both outcomes occur"


def test_a_damaged_environment_has_no_effect_on_a_job_without_a_cluster() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        recorded = draw.choice(ALL)
        environ = {name: text for name, text in damaged(draw, recorded)[0].items() if not name.startswith("PET_")}
        found = outcome(Recorded("", {}, "n01", "", ""), environ, ESCAPE)
        assert isinstance(found, JobSpec), (seed, found)
        assert found.rendezvous.backend == "memory"
