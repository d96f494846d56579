"""Tables that are looked up with `partition_strategy="mod"`: no id gets the row of another id after any change of
the servers.

    pytest -s tests/tf/faults/test_partitioned_tables.py

prints the rows before and after.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job import GRAPH, MakeJob, Node
from support.cluster import quiet_port
from support.harness import WAIT, environment

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "partitioned_table.py"
TRAINED = " ".join(f"{row + 0.5}" for row in range(12))
"""The rows of the trained table."""

ROWS = r"step (\d+): (\d+) parts on (\d+) servers: (.*)\n"


both_partitioners = pytest.mark.parametrize(
    ("tensorflow", "partitioner", "other"),
    [("2.21", "fixed", 2), ("2.21", "min_max", 1), ("2.15", "fixed", 2), ("2.15", "min_max", 1)],
    indirect=["tensorflow"],
)
"""Each partitioner that creates one part for each server if it can. `other` is a number of servers for which it creates
other parts than for the initial three.
"""


class Table:
    """A job that trains the table, on one launcher or on several that rendezvous at a master."""

    def __init__(self, make_job: MakeJob, tmp_path: Path, partitioner: str, **env: str) -> None:
        self.job = make_job(GRAPH)
        self.env = {"MODEL_DIR": str(tmp_path / "model"), "PARTITIONER": partitioner, **env}
        self._name = " ".join([partitioner, *env.values()])

    def start(self, *flags: str, name: str = "tf-ps-run") -> Node:
        return self.job.start("--workers=0", *flags, name=name, program=SCRIPT, env={**self.env, "NODE_ID": name})

    def scale(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tf_ps_runner", "scale", f"--rdzv-id={self.job.run_id}", *flags]
        return subprocess.run(command, env=environment(), timeout=WAIT, capture_output=True, text=True)

    def trained(self, node: Node, when: str) -> tuple[int, int, str]:
        """The next rows that the chief prints of a trained table: its parts, the servers, the rows."""
        while True:
            step, parts, servers, rows = node.until(ROWS).groups()
            if int(step) > 40:
                where = f"{parts} parts on {servers} servers, step {step}"
                print(f"{self._name:<15} {when:<34} {where}: {rows}", flush=True)
                return int(parts), int(servers), rows


@pytest.fixture
def make_table(make_job: MakeJob, tmp_path: Path) -> Callable[..., Table]:
    """Create the one job of a test."""

    def make(partitioner: str, **env: str) -> Table:
        return Table(make_job, tmp_path, partitioner, **env)

    return make


def change(table: Table, node: Node, servers: int) -> subprocess.CompletedProcess[str]:
    """Request another number of servers, and wait until training continues with them if the request is accepted."""
    scaled = table.scale(f"--ps={servers}")
    print(f"scale --ps={servers}: exit code {scaled.returncode}: {scaled.stdout}{scaled.stderr}", end="", flush=True)
    if scaled.returncode == 0:
        node.until(rf"{servers} parameter servers? instead of 3")
    else:
        # Lines that were printed before the refusal.
        node.until(ROWS)
        node.until(ROWS)
    return scaled


def leave(*nodes: Node) -> None:
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.finish()


@both_partitioners
def test_fewer_servers_are_refused_where_the_table_would_have_other_parts(
    make_table: Callable[..., Table], partitioner: str, other: int
) -> None:
    table = make_table(partitioner)
    node = table.start("--ps=1:3")
    before = table.trained(node, "before")
    scaled = change(table, node, other)
    after = table.trained(node, f"after scale --ps={other}")
    leave(node)
    assert before[2] == after[2] == TRAINED, node.output
    assert after == before, "the table is unchanged"
    assert scaled.returncode == 1
    assert "the table 'table' has" in scaled.stderr


@both_partitioners
def test_lost_servers_are_waited_for_where_the_table_would_have_other_parts(
    make_table: Callable[..., Table], partitioner: str, other: int
) -> None:
    lost = 3 - other
    table = make_table(partitioner)
    place = ("--ps=1:3", "--rdzv-backend=master", f"--rdzv-endpoint=127.0.0.1:{quiet_port()}")
    chief = table.start("--role=chief", *place, "--rdzv-conf=is_host=1", name="chief")
    servers = [
        table.start("--role=ps", *place, "--rdzv-conf=is_host=0", name=f"server-{number}") for number in range(3)
    ]
    before = table.trained(chief, "before")
    assert before[1] == 3, chief.output
    for server in servers[:lost]:
        server.lose()
    found = chief.search(r"there is room for \d of (exactly|at least) \d parameter server|\[chief-1\]:" + ROWS)
    if "there is room" in found[0]:
        print(found[0], flush=True)
        servers += [
            table.start("--role=ps", *place, "--rdzv-conf=is_host=0", name=f"other-{number}") for number in range(lost)
        ]
    chief.until(r"\[chief-1\]:chief 0: pid")
    after = table.trained(chief, f"after {lost} of 3 servers were lost")
    leave(chief, *servers[lost:])
    assert before[2] == after[2] == TRAINED, chief.output
    assert after[0] == before[0], "the table has as many parts as before"


@pytest.mark.parametrize(
    ("partitioner", "strategy"), [("min_max", "mod"), ("always_four", "mod"), ("fixed", "div"), ("min_max", "div")]
)
def test_fewer_servers_are_accepted_where_no_id_gets_another_row(
    make_table: Callable[..., Table], partitioner: str, strategy: str
) -> None:
    table = make_table(partitioner, PARTITION_STRATEGY=strategy)
    node = table.start("--ps=1:3")
    before = table.trained(node, "before")
    assert change(table, node, 2).returncode == 0
    after = table.trained(node, "after scale --ps=2")
    leave(node)
    assert before[2] == after[2] == TRAINED, node.output
    assert after[1] == 2
    assert "no step lost" in node.output


def test_parts_that_depend_on_the_servers_are_not_restored_and_the_servers_are_restored(
    make_table: Callable[..., Table],
) -> None:
    table = make_table("two_per_server")
    node = table.start("--ps=1:3")
    before = table.trained(node, "before")
    scaled = table.scale("--ps=2")
    assert scaled.returncode == 0, "the first request cannot know that the parts depend on the servers"
    node.until("is not restored: it holds 6 parts of the table 'table'")
    node.until("no step lost")
    after = table.trained(node, "after scale --ps=2")
    refused = table.scale("--ps=2")
    leave(node)
    assert before == after
    assert before[2] == TRAINED, node.output
    assert refused.returncode == 1, "the chief has reported it"


def test_a_job_that_is_started_with_other_servers_than_the_checkpoint_ends_and_names_the_table(
    make_table: Callable[..., Table],
) -> None:
    table = make_table("fixed")
    node = table.start("--ps=3")
    table.trained(node, "before")
    leave(node)
    again = table.start("--ps=2", name="again")
    assert again.finish() == 1
    output = " ".join(again.output.split())
    assert "it holds 3 parts of the table 'table', and the script makes 2 with 2 parameter servers" in output
    assert "start the job with --ps=3" in output
    wider = table.start("--ps=2:3", name="wider")
    assert table.trained(wider, "a new job with --ps=2:3")[2] == TRAINED
    leave(wider)
