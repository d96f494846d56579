"""The recipe of docs/architecture.md: a backend is added by five operations and a row, here with a store in memory."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from simulation.backends import Backend
from simulation.nodes import Node, NodeClient
from support.memory_store import MemoryStore, Shelf
from test_conformance import FACTS, FACTS_OF_SEVERAL, TWO, Fact, named, train

from dlrover_run.cli import parse
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import backends, kinds
from dlrover_run.rendezvous.backends import key_value
from dlrover_run.spec import JobSpec, SpecError
from tf_ps_runner import cli as tf_cli

ROOT = Path(__file__).resolve().parents[2]

FLAGS = ["--nnodes=1:2", "--rdzv-backend=shelf", "--rdzv-id=job"]
JOB = [*FLAGS, "--rdzv-endpoint=shelf0", "--no-python", "true"]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """The row is in the table for the time of a test."""
    there = Shelf()
    row = key_value("shelf", lambda place, rules: MemoryStore(there), port=7)
    monkeypatch.setattr(backends, "TABLE", (*backends.TABLE, row))
    return there


def test_the_command_line_takes_its_name(shelf: Shelf) -> None:
    spec = parse(JOB, {})
    assert spec.rendezvous == kinds.Store((("shelf0", 7),), name="shelf")
    assert (spec.rules.lost_after, spec.rendezvous.backend, spec.nodes_apart) == (0.0, "shelf", False)
    assert backends.words() == ("static", "c10d", "master", "etcd", "shelf")
    with pytest.raises(SpecError, match=r"--rdzv-backend 'shelf' needs an endpoint: give .* of an shelf"):
        parse([*FLAGS, "--no-python", "true"], {})
    with pytest.raises(SpecError, match=r"give c10d, etcd, shelf or static, or leave it out"):
        parse(["--rdzv-backend=shelve", "--no-python", "true"], {})


def test_the_command_line_of_parameter_servers_takes_its_name(shelf: Shelf) -> None:
    line = ["--role=ps", "--rdzv-backend=shelf", "--rdzv-endpoint=shelf0"]
    assert tf_cli.parse([*line, __file__], {}).job.rendezvous == kinds.Store((("shelf0", 7),), name="shelf")
    with pytest.raises(SpecError, match=r"--rdzv-backend 'static' is not valid: give c10d, master, etcd or shelf"):
        tf_cli.parse(["--role=ps", "--rdzv-backend=static", "--rdzv-endpoint=a", __file__], {})


def test_flags_that_have_no_effect_with_it_are_warned_of(shelf: Shelf) -> None:
    warnings: list[str] = []
    parse(
        [*JOB[:-2], "--rdzv-conf=state_dir=x,user=me", *JOB[-2:]], {"DLROVER_ETCD_PASSWORD": "p"}, warn=warnings.append
    )
    assert warnings == [
        "state_dir of --rdzv-conf has no effect with shelf: shelf itself stores the state of the job.",
        "the password goes to shelf unencrypted: give --rdzv-conf protocol=https, or protocol=http if you mean it.",
    ]


class OnShelf(Backend):
    """The bed of the conformance tests, whose clients are opened by the table."""

    def _alone(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        opened = NodeClient(node)
        opened.leaving = 30.0
        place = parse(JOB, {}).rendezvous
        opened.client = backends.open_client(msgspec.structs.replace(spec, rendezvous=place), on_change, node.note)
        return opened


def on_shelf(shelf: Shelf, rules: JobRules) -> Backend:
    bed = OnShelf("local", rules)
    shelf.clock = lambda: bed.timeline.now
    return bed


@pytest.mark.parametrize("fact", FACTS, ids=named)
def test_a_fact_holds_on_it(shelf: Shelf, fact: Fact) -> None:
    with on_shelf(shelf, FACTS[fact]) as backend:
        fact(backend)


@pytest.mark.parametrize("fact", FACTS_OF_SEVERAL, ids=named)
def test_a_fact_of_several_nodes_holds_on_it(shelf: Shelf, fact: Fact) -> None:
    with on_shelf(shelf, FACTS_OF_SEVERAL[fact]) as backend:
        fact(backend)


def test_an_operator_asks_about_a_job_in_it(shelf: Shelf) -> None:
    with on_shelf(shelf, TWO) as backend:
        train(backend, backend.node("a"), backend.node("b"))
    asker = backends.of(parse(JOB, {}).rendezvous).asker
    assert asker is not None
    status = asyncio.run(asker(parse(JOB, {})).ask())
    assert (status.job, len(status.nodes)) == ("job", 2)


NAMES = frozenset({"memory", "static", "master", "c10d", "etcd", "etcd-v2"})

OF_OTHERS = frozenset({"dlrover_run/rendezvous/backends.py", "tf_ps_runner/memory/task_cgroup.py"})
"""The table itself, and a module that looks for the controller `memory` of control groups."""


def compared(text: str) -> list[int]:
    """The lines that compare something with the name of a backend, or look one up in a dictionary by it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = [
                each for side in sides for each in (side.elts if isinstance(side, ast.Tuple | ast.Set) else [side])
            ]
            if any(isinstance(word, ast.Constant) and word.value in NAMES for word in words):
                found.append(node.lineno)
    return found


def test_no_module_outside_of_the_table_compares_the_name_of_a_backend() -> None:
    assert compared('if spec.backend == "static": pass\nx = y in ("master", "etcd")\nz = 1 == 2') == [1, 2]
    files = [file for package in ("dlrover_run", "tf_ps_runner") for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    found = {str(file.relative_to(ROOT)): compared(file.read_text()) for file in files}
    assert {name: lines for name, lines in found.items() if lines and name not in OF_OTHERS} == {}


def test_only_the_rendezvous_asks_of_which_kind_it_is() -> None:
    """The rest of the product asks for a property of the kind, so that a fifth kind needs no edit there."""
    users = [
        str(file.relative_to(ROOT))
        for package in ("dlrover_run", "tf_ps_runner")
        for file in (ROOT / package).rglob("*.py")
        if "isinstance(" in (text := file.read_text()) and ", kinds." in text
    ]
    assert [name for name in users if not name.startswith("dlrover_run/rendezvous/")] == [
        "dlrover_run/command_line/access.py"
    ]
