"""The pure parts of `benchmarks/launch.py`: no rival runs here."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from comparison import machine, memory, report
from comparison.lost import Late, Lost
from comparison.ratios import Reading, Row, Sample, pair_ratios, summarise
from launch_bench import processes
from launch_bench.case import until_last
from launch_bench.cases import CASES
from launch_bench.processes import Process
from launch_bench.rivals import CommandRival, Floor, Job
from launch_bench.room import Report, Room, all_ranks, each_rank, parse_report


def rows_of(samples: list[Sample], targets: dict[tuple[str, str], float] | None = None) -> dict[str, Row]:
    return {row.title: row for row in summarise(samples, "theirs", targets or {})}


def runs(rival: str, *values: float | None) -> list[Sample]:
    return [Sample(rival, at, None if value is None else {"": value}) for at, value in enumerate(values, start=1)]


def test_a_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians() -> None:
    row = rows_of(runs("ours", 1.0, 10.0, 3.0) + runs("theirs", 10.0, 20.0, 5.0))["ours"]
    assert row.ratio == pytest.approx(0.5)  # of 0.1, 0.5 and 0.6; the medians alone would say 0.3
    assert (row.median, row.low, row.high) == (3.0, 1.0, 10.0)


def test_a_pair_whose_baseline_was_lost_is_left_out() -> None:
    ours = {1: Reading(1.0), 2: Reading(4.0)}
    assert pair_ratios(ours, {1: Reading(None), 2: Reading(8.0)}) == [0.5]


def test_a_lost_run_of_ours_counts_as_infinite_and_misses_the_target() -> None:
    few = rows_of(runs("ours", 1.0, None, 1.0) + runs("theirs", 4.0, 4.0, 4.0), {("ours", ""): 0.5})["ours"]
    assert (few.ratio, few.lost, few.reached) == (0.25, 1, False)
    most = rows_of(runs("ours", None, None, 1.0) + runs("theirs", 4.0, 4.0, 4.0), {("ours", ""): 0.5})["ours"]
    assert most.ratio is not None
    assert math.isinf(most.ratio)


def test_a_target_is_reached_on_its_edge_and_unknown_without_a_baseline() -> None:
    targets = {("ours", ""): 0.25}
    assert rows_of(runs("ours", 1.0) + runs("theirs", 4.0), targets)["ours"].reached is True
    assert rows_of(runs("ours", 1.1) + runs("theirs", 4.0), targets)["ours"].reached is False
    assert rows_of(runs("ours", 1.0) + runs("theirs", None), targets)["ours"].reached is None


def test_a_target_does_not_vanish_when_its_rival_lost_every_run() -> None:
    rows = rows_of(runs("ours", None) + runs("theirs", 4.0), {("ours", ", a part"): 0.25})
    assert rows["ours, a part"].reached is False
    assert rows["ours, a part"].lost == 1


def test_a_baseline_that_did_not_end_gives_an_upper_bound() -> None:
    hung = [Sample("theirs", 1, {"": 90.0}, "did not end", frozenset({""}))]
    rows = rows_of(runs("ours", 4.5) + hung, {("ours", ""): 0.1})
    assert (rows["ours"].ratio, rows["ours"].bound, rows["ours"].reached) == (0.05, True, True)
    assert (rows["theirs"].limit, rows["theirs"].lost, rows["theirs"].ratio) == (90.0, 1, None)


def test_a_run_of_ours_that_did_not_end_is_no_better_than_a_lost_one() -> None:
    late = [Sample("ours", 1, {"": 2.0}, "did not end", frozenset({""}))]
    row = rows_of(late + runs("theirs", 90.0), {("ours", ""): 1.0})["ours"]
    assert row.ratio == math.inf
    assert row.reached is False
    hung = [Sample("theirs", 1, {"": 90.0}, "did not end", frozenset({""}))]
    assert rows_of(late + hung, {("ours", ""): 1.0})["ours"].reached is None, "neither ended: nothing to compare"


def test_a_part_is_compared_with_the_same_part_or_else_with_the_whole() -> None:
    samples = [
        Sample("ours", 1, {"": 4.0, ", all": 6.0, ", less": 2.0}),
        Sample("theirs", 1, {"": 8.0, ", all": 24.0}),
    ]
    rows = rows_of(samples)
    assert [rows[title].ratio for title in ("ours", "ours, all", "ours, less")] == [0.5, 0.25, 0.25]


def test_notes_are_counted() -> None:
    samples = [Sample("ours", at, {"": 1.0}, note) for at, note in enumerate(("restarts: 1", "restarts: 2") * 2)]
    assert rows_of(samples)["ours"].notes == "restarts: 1 (2x); restarts: 2 (2x)"


def test_processes_are_told_apart_by_who_reported_and_who_descends_from_whom() -> None:
    tree = [
        Process(10, 1, "python -m dlrover_run train.py"),
        Process(11, 10, "agent"),
        Process(12, 11, "python -c template"),
        Process(20, 12, "train.py"),
        Process(21, 20, "a template of the worker's own"),
        Process(30, 1, "relay that left the tree"),
    ]
    roles = processes.classify(tree, workers=[20])
    assert roles == {10: "launcher", 11: "launcher", 12: "template", 20: "worker", 21: "worker", 30: "launcher"}
    taken = processes.add_up(roles, {10: 1, 11: 2, 12: 4, 20: 8, 21: 16})
    assert taken == processes.Memory(launcher=3, template=4, workers=24)


def test_pss_is_read_in_bytes_and_never_from_a_line_that_only_begins_alike(tmp_path: Path) -> None:
    text = "55d0-7ffc ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss_Dirty: 7 kB\nPss:   123 kB\n"
    assert memory.parse_pss(text) == 123 * 1024
    with pytest.raises(ValueError, match="no Pss line"):
        memory.parse_pss("Rss: 900 kB\n")
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "smaps_rollup").write_text(text)
    assert memory.read_pss([5, 6], proc=tmp_path) == {5: 123 * 1024}


def test_the_mark_finds_a_process_outside_the_tree(tmp_path: Path) -> None:
    for pid, room in ((os.getppid(), b"/tmp/here"), (os.getpid(), b"/tmp/here")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(b"A=1\0LAUNCH_BENCH_ROOM=" + room + b"\0")
    found = [process.pid for process in processes.of_run([], "/tmp/here", proc=tmp_path)]
    assert found == [os.getppid()], "the caller itself is never part of a run"
    assert processes.of_run([], "/tmp/elsewhere", proc=tmp_path) == []


def test_all_ranks_takes_the_first_complete_attempt_and_each_rank_once() -> None:
    lines = ["up 0 0 10 1", "up 1 0 11 2", "up 0 1 12 3", "up 1 2 15 7", "up 0 2 14 6", "down 1 1 13 4", "up 0 2 14 9"]
    reports = [parse_report(line) for line in lines]
    assert all_ranks(reports, "up", 2) == [Report("up", 0, 0, 10, 1), Report("up", 1, 0, 11, 2)]
    assert all_ranks(reports, "up", 2, first_attempt=1) == [Report("up", 0, 2, 14, 6), Report("up", 1, 2, 15, 7)]
    assert all_ranks(reports, "up", 2, first_attempt=3) is None


def test_each_rank_counts_whatever_its_attempt_and_nothing_from_before() -> None:
    reports = [parse_report(line) for line in ("step 0 0 10 1", "step 1 0 11 2", "step 1 1 12 5", "other 0 0 13 6")]
    assert each_rank(reports, "step", 2, after_ns=2) is None
    reports.append(parse_report("step 0 0 14 7"))
    found = each_rank(reports, "step", 2, after_ns=2)
    assert found == [Report("step", 0, 0, 14, 7), Report("step", 1, 1, 12, 5)]


def test_a_run_that_is_late_is_measured_as_longer_than_its_limit() -> None:
    def late(limit: float) -> list[Report]:
        raise Late("nothing came")

    measured = until_last(0, 90.0, late)
    assert (measured.values, measured.unended) == ({"": 90.0}, frozenset({""}))
    last = until_last(500, 90.0, lambda limit: [Report("up", 0, 0, 1, 1500), Report("up", 1, 0, 2, 2500)])
    assert last.values[""] == pytest.approx(2e-6)
    assert not last.unended


def test_a_node_dies_with_all_its_workers_and_a_dead_one_cannot_be_killed() -> None:
    job = Job("wait.py", workers=2)
    with Room() as room:
        room.patient = False
        Floor().start_parent(room, job)
        reports = room.wait_reports("ready", 2, timeout=60)
        assert room.kill_node(0) > max(report.at_ns for report in reports)
        assert room.launchers[0].wait(60) == -9
        with pytest.raises(Lost, match="ended of itself"):
            room.kill_node(0)


def test_the_floor_restarts_with_a_new_attempt_and_the_room_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PET_NNODES", "3")
    floor, job = Floor(), Job("wait.py", workers=2)
    with Room() as room:
        assert "PET_NNODES" not in room.environment
        began = floor.start(room, job)
        victim = room.wait_reports("ready", 2, timeout=60)[1]
        assert victim.rank == 1
        assert room.kill(victim.pid) > victim.at_ns > began
        floor.after_kill(room, job, victim)
        again = room.wait_reports("ready", 2, timeout=60, first_attempt=1)
        assert [report.attempt for report in again] == [1, 1]
        directory = room.directory
    assert not directory.exists()
    assert [launcher.returncode for launcher in room.launchers] == [-15, -9, 0, 0]


def test_a_command_names_the_flags_of_both_launchers() -> None:
    rival = CommandRival("ours", ("python", "-m", "ours"), ("--start-method=spawn",))
    (command,) = rival.commands(Job("wait.py", workers=2, max_restarts=3))
    assert command[:-1] == ["python", "-m", "ours", "--nproc-per-node=2", "--max-restarts=3", "--start-method=spawn"]
    assert Path(command[-1]).is_file()


def test_every_node_of_a_job_gets_the_same_command() -> None:
    rival = CommandRival("ours", ("ours",))
    job = Job("wait.py", workers=1, nodes=2, nnodes="1:2", port=29400, conf="last_call_timeout=5")
    one, other = rival.commands(job)
    assert one == other
    assert {"--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:29400", "--rdzv-conf=last_call_timeout=5"} <= set(one)
    assert rival.commands(replace(job, node=1)) == [one]


def test_every_target_names_a_rival_of_its_case() -> None:
    for case in CASES:
        names = {rival.name for rival in case.rivals}
        assert case.baseline in names
        assert {rival for rival, _ in case.targets} <= names


def result() -> report.Result:
    targets = {("ours", ""): 0.35, ("gone", ""): 1.0}
    samples = runs("ours", 1.0, 1.0) + runs("theirs", 4.0, 5.0) + runs("gone", None, None)
    rows = summarise(samples, "theirs", targets)
    return report.Result("start", "a | title", "s", "theirs", rows, {"absent": "not installed"})


MACHINE = machine.Machine("CPU", 2, 8.0, "6.1", "3.11", "2.13", (0.5, 0.25, 0.0), "2030-01-01", "abc")


def test_the_table_says_what_was_reached_and_what_was_lost() -> None:
    ours, theirs, gone = report.table(result())
    assert ours == ["ours", "1.000 s", "1.000 s", "1.000 s", "0/2", "0.23", "<= 0.35", "yes", ""]
    assert theirs[5:8] == ["1.00", "", ""]
    assert gone == ["gone", "-", "-", "-", "2/2", "lost", "<= 1", "no", ""]
    assert report.left_out(result()) == ["absent did not run: not installed."]
    assert report.figure(3 * 1024**2 / 2, "bytes") == "1.5 MiB"


def test_a_bound_is_told_from_a_figure() -> None:
    assert report.figure(90.0, "s", limit=90.0) == "> 90.000 s"
    assert report.figure(3.0, "s", limit=90.0) == "3.000 s"
    assert (report.ratio_text(0.052, bound=True), report.ratio_text(0.0043)) == ("<= 0.052", "0.0043")


def test_markdown_keeps_its_columns_and_names_the_machine() -> None:
    text = report.markdown("Launching", [result()], MACHINE, "2 repetitions")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(report.COLUMNS) + 1}
    assert "load at start 0.50, 0.25, 0.00" in text
    assert "absent did not run: not installed." in text


def test_json_is_strict_and_keeps_every_sample() -> None:
    document = json.loads(report.as_json([result()], MACHINE, {"repetitions": 2}))
    rows = {row["title"]: row for row in document["cases"][0]["rows"]}
    assert rows["ours"]["samples"] == [1.0, 1.0]
    assert rows["gone"]["samples"] == [None, None]
    assert rows["gone"]["ratio"] == "lost"
    assert document["machine"]["commit"] == "abc"


def test_the_machine_is_read_from_proc() -> None:
    assert machine.cpu_model("processor\t: 0\nmodel name\t: Some CPU: fast\n") == "Some CPU: fast"
    assert machine.cpu_model("processor\t: 0\n") == "unknown"
    assert machine.memory_gib("MemTotal:        8388608 kB\nMemFree: 1 kB\n") == 8.0
