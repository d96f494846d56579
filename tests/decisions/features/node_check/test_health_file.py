"""The JSON file of a node check in the log directory: its content, its path, and when there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from support.policy_parts import with_part
from support.scripted_agent import rank_assignment

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.features.node_check.decision.model import (
    DeviceSpeed,
    HealthStatus,
    LinkRow,
    NodeCheckAssignment,
    NodeHealth,
)
from dlrover_run.features.node_check.node.health_file import FILE_NAME, HealthFile, HealthResult, write_health_file
from dlrover_run.output.run_directory import RunDir, create_run_dir, remove_run_dir
from dlrover_run.spec import LogSpec

OWN = NodeHealth(node_id="1-a", incarnation="a", host="gpu-a", status=HealthStatus.PASSED, tflops=0.084, gigabytes=1.25)
OTHER = NodeHealth(
    node_id="2-b",
    incarnation="b",
    host="gpu-\x1b[31m漢",
    status=HealthStatus.FAULT,
    reason="its check process was killed by SIGKILL",
    dismissed=True,
)
LINKS = (LinkRow(0, 0, 9.5), LinkRow(0, 1, 0, "it timed out"))
DEVICES = (DeviceSpeed(1, "H200", 0.084), DeviceSpeed(0, "H200", 0.5))
FIRST = Assignment(
    phase=PlanPhase.TRAINING,
    ranks=rank_assignment(nodes=2, world_size=2),
    parts=(NodeCheckAssignment(health=OWN, health_table=(OWN, OTHER)),),
)


def kept(directory: Path) -> RunDir:
    return RunDir(str(directory), keep=True)


def content(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / FILE_NAME).read_text())
    del found["time"]
    return found


def follow(directory: Path, *assignments: Assignment) -> list[str]:
    """The warnings."""
    lines: list[str] = []
    file = HealthFile(kept(directory), lines.append)
    for assignment in assignments:
        file.follow(assignment, DEVICES)
    return lines


def test_a_node_writes_what_it_receives_of_itself(tmp_path: Path) -> None:
    assert write_health_file(str(tmp_path), HealthResult(OWN, DEVICES), 1_763_647_884.0) is None
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {
        "version": 1,
        "time": "2025-11-20T14:11:24Z",
        "node": {
            "node_id": "1-a",
            "host": "gpu-a",
            "status": "passed",
            "dismissed": False,
            "tflops": 0.084,
            "gigabytes": 1.25,
            "reason": "",
        },
        "devices": [
            {"local_rank": 1, "name": "H200", "tflops": 0.084},
            {"local_rank": 0, "name": "H200", "tflops": 0.5},
        ],
    }


def test_the_node_with_rank_0_writes_all_nodes_and_links(tmp_path: Path) -> None:
    assert write_health_file(str(tmp_path), HealthResult(OWN, others=(OWN, OTHER), links=LINKS), 0) is None
    found = content(tmp_path)
    assert found["nodes"] == [
        found["node"],
        {
            "node_id": "2-b",
            "host": "gpu-\x1b[31m漢",
            "status": "fault",
            "dismissed": True,
            "tflops": None,
            "gigabytes": None,
            "reason": "its check process was killed by SIGKILL",
        },
    ]
    assert found["links"] == [
        {"one": 0, "other": 0, "gigabytes": 9.5, "problem": ""},
        {"one": 0, "other": 1, "gigabytes": None, "problem": "it timed out"},
    ]


def test_text_of_a_node_does_not_control_the_terminal_of_a_reader_of_the_file(tmp_path: Path) -> None:
    write_health_file(str(tmp_path), HealthResult(OTHER), 0)
    text = (tmp_path / FILE_NAME).read_text()
    assert text.isascii()
    assert "\x1b" not in text


def test_only_news_is_written(tmp_path: Path) -> None:
    lines: list[str] = []
    file = HealthFile(kept(tmp_path), lines.append)
    file.follow(FIRST, DEVICES)
    (tmp_path / FILE_NAME).unlink()
    for repeated in (FIRST, Assignment(parts=(NodeCheckAssignment(health=OWN),)), FIRST):
        file.follow(repeated, DEVICES)
    assert not (tmp_path / FILE_NAME).exists()
    file.follow(with_part(FIRST, NodeCheckAssignment, health_table=(OWN,)), DEVICES)
    assert content(tmp_path)["nodes"] == [content(tmp_path)["node"]]
    assert lines == []


def test_a_node_that_waits_keeps_what_it_knew_of_the_others(tmp_path: Path) -> None:
    later = msgspec.structs.replace(OWN, gigabytes=2.5)
    follow(tmp_path, FIRST, Assignment(parts=(NodeCheckAssignment(health=later),)))
    found = content(tmp_path)
    assert "nodes" in found
    assert found["node"] == {**found["node"], "gigabytes": 2.5}


@pytest.mark.parametrize("node_health", [None, msgspec.structs.replace(OWN, status=HealthStatus.PENDING)])
def test_before_there_is_a_result_there_is_no_file(tmp_path: Path, node_health: NodeHealth | None) -> None:
    assert follow(tmp_path, Assignment(parts=(NodeCheckAssignment(health=node_health),))) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("log_dir", ["/dev/null", ""])
def test_a_run_without_log_flags_gets_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_dir: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = create_run_dir(LogSpec(log_dir=log_dir), "job")
    HealthFile(run_dir, pytest.fail).follow(FIRST, DEVICES)
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []
    remove_run_dir(run_dir)


def test_it_stays_in_a_log_directory_that_is_kept(tmp_path: Path) -> None:
    run_dir = create_run_dir(LogSpec(log_dir=str(tmp_path / "logs")), "job")
    HealthFile(run_dir, pytest.fail).follow(FIRST, DEVICES)
    remove_run_dir(run_dir)
    assert run_dir.path is not None
    assert os.listdir(run_dir.path) == [FILE_NAME]


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    assert follow(tmp_path / "gone", FIRST) == []
    assert (tmp_path / "gone" / FILE_NAME).exists()


def test_where_it_cannot_be_written_one_line_reports_it_and_no_file_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = follow(tmp_path / "file", FIRST, with_part(FIRST, NodeCheckAssignment, health_table=()), FIRST)
    where = tmp_path / "file" / FILE_NAME
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: {where} cannot be written (")
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_full_disk_refused_is_written_with_the_next_assignment(tmp_path: Path) -> None:
    lines: list[str] = []
    file = HealthFile(kept(tmp_path), lines.append)
    os.symlink("/dev/full", tmp_path / f"{FILE_NAME}.new")
    file.follow(FIRST, DEVICES)
    assert not (tmp_path / FILE_NAME).exists()
    file.follow(FIRST, DEVICES)
    assert (tmp_path / FILE_NAME).exists()
    assert len(lines) == 1


def test_a_disk_that_is_full_leaves_the_last_file_as_it_was(tmp_path: Path) -> None:
    follow(tmp_path, FIRST)
    before = (tmp_path / FILE_NAME).read_bytes()
    os.symlink("/dev/full", tmp_path / f"{FILE_NAME}.new")
    lines = follow(tmp_path, with_part(FIRST, NodeCheckAssignment, health_table=()))
    assert len(lines) == 1
    assert "No space left on device" in lines[0]
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert os.listdir(tmp_path) == [FILE_NAME]
