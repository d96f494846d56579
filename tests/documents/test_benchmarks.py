"""The arithmetic of `benchmarks/`: ratios, targets, what counts as recovered or lost. Three tests start processes."""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from support.check_world import Computing, NodeTruth, World, whole
from support.harness import calls_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import autoscale
import check_cost
import check_decide
import checkpoint_pause
import imports
import launch
import ledger
import node_check
import progress_cost
import recovery
import reload
import rendezvous
import round_store
import stalls
import tf_recovery
import warm_workers
from core import against, indices, processes, report, series, truth
from core import run as run_module
from core.cases import Benchmark, Case, Limits, Turn, result_of, take_turn
from core.launchers import SPAWN, TORCHRUN, Job
from core.meetings import crowd_sizes
from core.processes import Process
from core.ratios import Late, Lost, Measured, Reading, Row, Sample, compare, pair_ratios, summarise
from core.run import Report, Run, all_ranks, until_last
from core.steps import (
    Step,
    effective_share,
    kept_steps,
    longest_pause,
    pauses,
    read_steps,
    repeated_steps,
    step_rate,
    training_rate,
)
from core.storms import Storm
from core.trees import Tree, open_tree
from recovery import NEW_WORLD, OLD_ENDED
from stall_matrix import kinds
from stall_matrix import report as stall_report
from stall_matrix import trial as stall_trial
from tf_recovery import OF_WORKER

from dlrover_run.events.ledger import Ledger, PlaceTimes
from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import CheckpointSeen, LogOpened, WorkerExited, WorkerReady, WorkerStalled
from dlrover_run.events.timeline import TimePhase, TimeSegment
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.words.reasons import Reason

ROOT = Path(__file__).resolve().parents[2]
SECOND = 1_000_000_000
MACHINE = report.Machine("CPU", 2, 8.0, "6.1", "3.11", "2.13", (0.5, 0.25, 0.0), "2030-01-01T10:00:00", "abc")


def result_in(case: Case, repetitions: int) -> report.Result:
    """The result of some turns of a case."""
    turns = (take_turn(case, turn, Limits(settle=0.1), warm=turn > 1) for turn in case.turns(repetitions))
    return result_of(case, [series.Kept(turn, MACHINE) for turn in turns])


def rows_of(samples: list[Sample], targets: dict[tuple[str, str], float] | None = None) -> dict[str, Row]:
    return {row.title: row for row in summarise(samples, "theirs", targets or {})}


def runs(rival: str, *values: float | None) -> list[Sample]:
    measured = (Measured(None if value is None else {"": value}) for value in values)
    return [Sample(rival, turn, one) for turn, one in enumerate(measured, start=1)]


def hung(rival: str, turn: int, limit: float) -> Sample:
    return Sample(rival, turn, Measured({"": limit}, "did not end", frozenset({""})))


def reports(*lines: str) -> list[Report]:
    return [Report.parse(line) for line in lines]


def test_a_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians() -> None:
    row = rows_of(runs("ours", 1.0, 10.0, 3.0) + runs("theirs", 10.0, 20.0, 5.0))["ours"]
    assert row.ratio == pytest.approx(0.5)  # The median of 0.1, 0.5 and 0.6; the ratio of the medians would be 0.3.
    assert row.spread == pytest.approx((0.1, 0.6))
    assert (row.median, row.low, row.high) == (3.0, 1.0, 10.0)


def test_a_pair_whose_baseline_was_lost_is_ignored() -> None:
    ours = {1: Reading(1.0), 2: Reading(4.0)}
    assert pair_ratios(ours, {1: Reading(None), 2: Reading(8.0)}) == [0.5]


def test_a_lost_run_counts_as_infinite_and_misses_the_target() -> None:
    few = rows_of(runs("ours", 1.0, None, 1.0) + runs("theirs", 4.0, 4.0, 4.0), {("ours", ""): 0.5})["ours"]
    assert (few.ratio, few.spread, few.lost, few.reached) == (0.25, (0.25, "lost"), 1, False)
    most = rows_of(runs("ours", None, None, 1.0) + runs("theirs", 4.0, 4.0, 4.0), {("ours", ""): 0.5})["ours"]
    assert most.ratio == "lost"
    rows = rows_of(runs("ours", None) + runs("theirs", 4.0), {("ours", ", a part"): 0.25})
    assert (rows["ours, a part"].reached, rows["ours, a part"].lost) == (False, 1)


def test_a_target_is_reached_at_its_limit_and_unknown_without_a_baseline() -> None:
    targets = {("ours", ""): 0.25}
    assert rows_of(runs("ours", 1.0) + runs("theirs", 4.0), targets)["ours"].reached is True
    assert rows_of(runs("ours", 1.1) + runs("theirs", 4.0), targets)["ours"].reached is False
    assert rows_of(runs("ours", 1.0) + runs("theirs", None), targets)["ours"].reached is None


def test_a_baseline_that_did_not_end_gives_an_upper_bound() -> None:
    rows = rows_of([*runs("ours", 4.5), hung("theirs", 1, 90.0)], {("ours", ""): 0.1})
    assert (rows["ours"].ratio, rows["ours"].bound, rows["ours"].reached) == (0.05, True, True)
    assert (rows["theirs"].limit, rows["theirs"].lost, rows["theirs"].ratio) == (90.0, 1, None)


def test_a_run_that_did_not_end_is_as_bad_as_a_lost_one() -> None:
    row = rows_of([hung("ours", 1, 2.0), *runs("theirs", 90.0)], {("ours", ""): 1.0})["ours"]
    assert (row.ratio, row.reached) == ("lost", False)
    neither = rows_of([hung("ours", 1, 2.0), hung("theirs", 1, 90.0)], {("ours", ""): 1.0})["ours"]
    assert neither.reached is None, "there is no value to compare"


def test_a_part_is_compared_with_the_same_part_or_else_with_the_whole_or_within_its_run() -> None:
    samples = [
        Sample("ours", 1, Measured({"": 4.0, ", all": 6.0, ", less": 2.0})),
        Sample("theirs", 1, Measured({"": 8.0, ", all": 24.0})),
    ]
    rows = rows_of(samples)
    assert [rows[title].ratio for title in ("ours", "ours, all", "ours, less")] == [0.5, 0.25, 0.25]
    assert summarise(samples, "theirs", {}, {"": ", less"})[0].ratio == 2.0


def test_a_compared_program_gets_as_many_turns_as_its_case_allows_beside_a_known_baseline() -> None:
    case = Case(
        "cut", "cut", "s", (SPAWN, replace(SPAWN, name="absent", prefix=("/nowhere",))), "known",
        lambda rival, run, limits: Measured({"": 18.0}), warm_up=False, known_baseline=9.0, max_turns=2,
    )  # fmt: skip
    result = result_in(case, 5)
    assert {row.title: row.samples for row in result.rows} == {SPAWN.name: (18.0, 18.0), "known": (9.0, 9.0)}
    assert result.rows[0].ratio == 2.0
    assert result.absent.keys() == {"absent"}


def test_two_programs_are_compared_by_their_medians_and_by_draws_of_their_turns() -> None:
    one = compare([(1.0, 2.0), (2.0, 2.0), (12.0, 3.0)])
    assert (one.ours, one.theirs, one.ratio) == (2.0, 2.0, 1.0)
    assert (one.low, one.high) == (0.5, 4.0)
    assert compare([(1.5, 1.0)])[2:] == (1.5, 1.5, 1.5)
    lost = compare([(None, 1.0), (1.0, 1.0), (None, 1.0)])
    assert (lost.ours, lost.ratio, lost.low, lost.high) == (math.inf, None, 1.0, None)


OLD = Tree("old", Path("/old"), "/old/python")


def test_each_program_of_the_project_is_compared_with_that_of_another_checkout() -> None:
    case = Case("kill", "kill", "s", (SPAWN, TORCHRUN), TORCHRUN.name,
                lambda rival, run, limits: Measured({"": 3.0 if rival == SPAWN else 2.0, ", a part": 1.0}),
                {(SPAWN.name, ""): 0.5}, warm_up=False, max_turns=1)  # fmt: skip
    compared = case.against(OLD)
    assert [rival.name for rival in compared.rivals] == [f"{SPAWN.name}, old", SPAWN.name]
    assert compared.rivals[0].command(Job("wait.py", 1))[:3] == ["/old/python", "-m", "dlrover_run"]
    here = [replace(rival, prefix=SPAWN.prefix) for rival in compared.rivals]
    result = result_in(replace(compared, rivals=here), 3)
    assert [(one.title, one.comparison.ratio, one.lost) for one in against.differences(result)] == [
        (SPAWN.name, 1.5, "0 and 0 of 3"),
        (f"{SPAWN.name}, a part", 1.0, "0 and 0 of 3"),
    ]
    line = "| kill | dlrover-run spawn | 2.000 s | 3.000 s | 1.50 | 1.50 to 1.50 | 1.50 to 1.50 | 0 and 0 of 3 |"
    assert line in against.markdown(OLD, report.Summary("x", [result]))


def test_the_nodes_of_a_rendezvous_are_compared_with_those_of_another_checkout() -> None:
    rivals, pairs = against.with_twins([rendezvous.OURS, rendezvous.C10D], OLD)
    assert [rival.name for rival in rivals] == ["dlrover-run, old", "dlrover-run"]
    trials = [trial(rival, 2, 1, time) for rival, time in (("dlrover-run", 1.5), ("dlrover-run, old", 1.0))]
    result = rendezvous.tables(trials, {}, replace(EMPTY, pairs=pairs))[0]
    assert all(row.target is None for row in result.rows)
    assert [one.comparison.ratio for one in against.differences(result)] == [1.5]


def other_checkout(folder: Path) -> Path:
    """A checkout whose launcher prints a line, and an interpreter that imports it."""
    for name in ("dlrover_run", "tf_ps_runner"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    (folder / "dlrover_run" / "__main__.py").write_text("print('usage')")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def test_a_launch_is_measured_beside_that_of_another_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_checkout(tmp_path / "other")
    options = [f"--against={other}", "--only=help", "--repetitions=1"]
    assert launch.BENCHMARK.main([*options, f"--output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^\| help \| dlrover-run spawn \| \d+\.\d+ s \| \d+\.\d+ s \| .* \| 0 and 0 of 1 \|$", text, re.MULTILINE
    )
    assert (tmp_path / "launch.md").read_text() == text.removesuffix("\n")
    assert [row.title for row in report.read(tmp_path / "launch.json").cases[0].rows] == [
        "dlrover-run spawn, other",
        SPAWN.name,
    ]


def test_an_environment_that_imports_another_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no interpreter"):
        open_tree(str(tmp_path))
    with pytest.raises(ValueError, match="which is this checkout"):
        open_tree(sys.executable)
    python = other_checkout(tmp_path / "other") / ".venv" / "bin" / "python"
    copied = tmp_path / "copied" / ".venv" / "bin"
    copied.mkdir(parents=True)
    (copied / "python").symlink_to(python)
    with pytest.raises(ValueError, match=r"from .*/other, not from .*/copied"):
        open_tree(str(tmp_path / "copied"))
    assert open_tree(str(python)).root == tmp_path / "other"
    own = tmp_path / "other" / "benchmarks" / "workers"
    own.mkdir(parents=True)
    (own / "crowd.py").write_text("from dlrover_run import x")
    (own / "wait.py").write_text("import time")
    tree, here = Tree("other", tmp_path / "other", str(python)), ROOT / "benchmarks" / "workers"
    assert (tree.script(here / "crowd.py"), tree.script(here / "wait.py")) == (own / "crowd.py", here / "wait.py")


CASES = (*launch.CASES, *recovery.cases(), *tf_recovery.cases("python"), *check_cost.CASES)


def test_every_target_names_a_compared_program_of_its_case() -> None:
    for case in CASES:
        names = {rival.name for rival in case.rivals}
        assert len(names) == len(case.rivals)
        assert case.turns_of.keys() <= names
        assert {rival for rival, _ in case.targets} <= {*names, check_cost.ADDED}
        assert case.baseline in {*names, ""} or case.known_baseline


def test_a_late_run_is_measured_as_longer_than_its_limit() -> None:
    def late(limit: float) -> list[Report]:
        raise Late("nothing came")

    measured = until_last(0, 90.0, late)
    assert (measured.values, measured.unended) == ({"": 90.0}, {""})
    last = until_last(500, 90.0, lambda limit: [Report("up", 0, 0, 1, 1500), Report("up", 1, 0, 2, 2500)])
    assert last.values == pytest.approx({"": 2e-6})


def test_the_first_report_of_each_rank_counts_or_the_first_complete_attempt() -> None:
    up = reports("up 0 0 10 1", "up 1 0 11 2", "up 0 1 12 3", "up 1 2 15 7", "up 0 2 14 6", "down 1 1 13 4")
    assert all_ranks(up, "up", 2, after_ns=2) == [up[2], up[3]]
    assert all_ranks(up, "up", 2, after_ns=6) is None
    assert all_ranks(up, "up", 1, only={1}) == [up[1]]
    assert all_ranks(up, "up", 2, first_attempt=0) == up[:2]
    assert all_ranks(up, "up", 2, first_attempt=1) == [up[4], up[3]]
    assert all_ranks(up, "up", 2, first_attempt=3) is None


def test_a_worker_is_found_by_its_report_and_a_launcher_by_its_ancestors() -> None:
    tree = [
        Process(10, 1, "python -m dlrover_run train.py"),
        Process(12, 10, "python -c template"),
        Process(20, 12, "train.py"),
        Process(21, 20, "a template of the worker's own"),
        Process(30, 1, "relay that left the tree"),
    ]
    roles = processes.classify(tree, workers=[20])
    assert roles == {10: "launcher", 12: "template", 20: "worker", 21: "worker", 30: "launcher"}


RECOVERY = reports(
    "step-of-2 0 0 10 50", "step-of-2 1 0 11 50", "world-of-2 0 1 20 200", "world-of-2 1 1 21 200",
    "world-of-2 0 2 30 500", "world-of-2 1 2 31 600", "step-of-2 0 2 30 700", "step-of-2 1 2 31 800",
)  # fmt: skip


def test_a_recovery_ends_with_the_first_step_of_the_slowest_rank_in_the_recovered_world() -> None:
    measured = recovery.recovery_parts(RECOVERY, {10: 190, 12: 150, 13: 101}, 100, 2, [10, 12], limit=9.0)
    assert measured.values == pytest.approx({OLD_ENDED: 50e-9, NEW_WORLD: 500e-9, "": 700e-9})
    assert not measured.unended


def test_a_part_of_a_recovery_that_is_missing_at_the_limit_takes_longer() -> None:
    measured = recovery.recovery_parts(RECOVERY[:7], {10: 150}, 100, 2, [10], limit=9.0)
    assert measured.values == pytest.approx({OLD_ENDED: 50e-9, NEW_WORLD: 100e-9, "": 9.0})
    assert (measured.unended, measured.note) == ({""}, "no step in 9 s")
    assert recovery.recovery_parts([], {}, 100, 1, [10], limit=9.0).unended == {OLD_ENDED, NEW_WORLD, ""}


def every_second(first: int, count: int, done: int = 0, saved: int = 0) -> list[Step]:
    """Steps at the seconds from `first` on; `done` steps precede the first of them."""
    return [Step((first + at) * SECOND, done + at + 1, saved) for at in range(count)]


def test_steps_are_read_from_all_leaders_and_a_truncated_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "steps-20").write_text("51 50 700\n52 50 800\n53 5")
    (tmp_path / "steps-10").write_text("1 0 100\n2 0 200\n")
    (tmp_path / "steps-30").write_text("53 5")
    assert [step.count for step in read_steps(tmp_path)] == [1, 2, 51, 52]


def test_a_pause_that_began_before_or_continues_after_counts() -> None:
    steps = [Step(at * SECOND, at, 0) for at in (1, 2, 5, 6)]
    assert longest_pause(steps, 3 * SECOND, 6 * SECOND) == pytest.approx(3.0)
    assert longest_pause(steps, 5 * SECOND, 16 * SECOND) == pytest.approx(10.0)
    assert longest_pause(steps, 5 * SECOND, 6 * SECOND) == pytest.approx(1.0)
    assert step_rate(every_second(0, 100), 10 * SECOND, 20 * SECOND) == pytest.approx(1.0)


def test_a_kill_loses_the_steps_after_the_checkpoint_until_there_is_another_step() -> None:
    steps = [*every_second(0, 8, saved=5), *every_second(12, 3, done=5, saved=5)]
    assert kept_steps(steps, [], 7 * SECOND) == 8
    assert kept_steps(steps, [8 * SECOND], 9 * SECOND) == 5
    assert kept_steps(steps, [8 * SECOND], 13 * SECOND) == 7
    assert effective_share(every_second(1, 50, saved=40), [51 * SECOND], 0, 100 * SECOND, 1.0) == pytest.approx(40.0)


def test_the_rate_of_training_leaves_out_the_time_from_a_kill_to_the_next_step() -> None:
    steps = [*every_second(0, 8, saved=5), *every_second(20, 3, done=5, saved=5)]
    assert training_rate(steps, [8 * SECOND], 0, 30 * SECOND) == pytest.approx(1.0)
    assert training_rate(steps, [], 0, 30 * SECOND) == pytest.approx(10 / 22)
    assert training_rate(steps, [8 * SECOND], 6 * SECOND, 10 * SECOND) == pytest.approx(1.0)
    assert training_rate([], [], 0, 30 * SECOND) == 0.0


def test_steps_that_are_done_again_and_pauses_are_counted_from_each_kill() -> None:
    steps = [Step(at * SECOND, count, 0) for at, count in ((1, 1), (2, 2), (3, 3), (6, 2), (7, 3), (8, 4), (12, 5))]
    kills = [4 * SECOND, 9 * SECOND, 13 * SECOND]
    assert repeated_steps(steps, 0, 20 * SECOND) == 2
    assert repeated_steps(steps, 6 * SECOND, 20 * SECOND) == 1
    assert pauses(steps, kills) == pytest.approx([2.0, 3.0])


TF = reports(
    "chief-session 0 0 10 50", "chief-step 0 7 10 80", "worker-step 0 8 11 90", "chief-step 0 9 10 101",
    "chief-session 0 0 20 300", "chief-step 0 6 20 500", "worker-session 0 0 21 600", "worker-step 0 7 21 800",
)  # fmt: skip
BOTH = ("chief", "worker")


def test_a_fault_of_tensorflow_ends_with_the_first_step_of_the_next_session() -> None:
    fault = tf_recovery.recovery_parts(TF, BOTH, 100, 9.0, planned=False)
    assert fault.values == pytest.approx({"": 400e-9, OF_WORKER: 700e-9})
    assert (fault.unended, fault.note) == (frozenset(), "3 steps lost")
    change = tf_recovery.recovery_parts(TF, BOTH, 100, 9.0, planned=True)
    assert change.values == pytest.approx({"": 399e-9, OF_WORKER: 710e-9})
    assert change.note == "4 steps lost"
    unended = tf_recovery.recovery_parts(TF[:6], BOTH, 100, 9.0, planned=False)
    assert (unended.unended, unended.note) == ({OF_WORKER}, "3 steps lost")


def test_a_chief_that_continues_with_the_live_model_has_lost_no_step() -> None:
    live = reports(
        "chief-step 0 7 10 80", "worker-step 0 9 11 110", "worker-step 0 10 21 290", "chief-session 0 0 20 300",
        "chief-step 0 12 20 320",
    )  # fmt: skip
    assert tf_recovery.steps_lost(live, 100, planned=False) == 0
    assert tf_recovery.steps_lost(live, 100, planned=True) == 0
    assert tf_recovery.steps_lost(live[:2], 100, planned=False) is None


def test_the_cost_of_the_check_is_the_difference_of_each_turn_to_the_task_of_that_turn() -> None:
    samples = [*runs(check_cost.WITH, 4.0, 9.0), *runs(check_cost.WITHOUT, 1.0), hung(check_cost.WITHOUT, 2, 60.0)]
    samples = check_cost.add_difference(samples + runs(check_cost.TASK, 2.0, 2.0))
    rows = {row.title: row for row in summarise(samples, check_cost.TASK, {(check_cost.ADDED, ""): 1.5})}
    assert rows[check_cost.ADDED].samples == (3.0, None)
    assert rows[check_cost.ADDED].reached is False


def trial(rival: str, nodes: int, turn: int, time: float, limit: float = 45.0) -> rendezvous.Trial:
    unended = frozenset({""} if time >= limit else ())
    key = rendezvous.Key(turn, nodes, rival, "last-joiner")
    return rendezvous.Trial(key, {"last-joiner": Measured({"": time}, "", unended)})


EMPTY = report.Result("", "", "s", "", [], {}, MACHINE, "1 repetition")


def test_rendezvous_are_compared_at_the_same_number_of_nodes_and_lost_ones_miss_the_target() -> None:
    trials = [
        trial("dlrover-run", 2, 1, 0.01),
        trial("c10d", 2, 1, 1.0),
        rendezvous.Trial(rendezvous.Key(1, 8, "dlrover-run", "last-joiner"), {}, "no"),
    ]
    rows = {row.title: row for row in rendezvous.tables([*trials, trial("c10d", 8, 1, 45.0)], {}, EMPTY)[0].rows}
    assert (rows["dlrover-run, 2 nodes"].ratio, rows["dlrover-run, 2 nodes"].reached) == (0.01, True)
    assert (rows["dlrover-run, 8 nodes"].lost, rows["c10d, 8 nodes"].limit) == (1, 45.0)


def test_torch_is_not_run_again_with_a_size_at_which_it_failed() -> None:
    rivals = (rendezvous.OURS, rendezvous.C10D)
    of_torch = rendezvous.series_of(rivals, 45.0, {}, {}, "")
    keys = rendezvous.keys(rivals, (2, 8, 32), 2, ("last-joiner",))
    kept: list[series.Kept[rendezvous.Trial]] = []
    for key in keys:
        if not of_torch.absent(key, kept):
            time = 45.0 if key.rival == "c10d" and key.nodes >= 8 else 1.0
            kept.append(series.Kept(trial(key.rival, key.nodes, key.turn, time), MACHINE))
    assert [one.run.key.nodes for one in kept if one.run.key.rival == "c10d"] == [2, 8, 2]
    assert len(kept) == 3 + 6, "ours always runs again"
    (table, *_) = of_torch.tables(kept)
    assert isinstance(table, report.Result)
    assert table.absent == {"c10d, 32 nodes": "it did not bring 8 together"}


def test_a_rendezvous_is_measured_as_often_as_its_rivals_have_it() -> None:
    rivals = (rendezvous.OURS, rendezvous.ETCD, rendezvous.C10D)
    keys = rendezvous.keys(rivals, (2,), 1, tuple(rendezvous.MEASUREMENTS))
    assert Counter(key.measurement for key in keys) == {"at-once": 3, "last-joiner": 3, "death": 2, "elected-death": 1}
    assert {figure for figures in rendezvous.MEASUREMENTS.values() for figure in figures} == rendezvous.TABLES.keys()
    pair, _ = against.with_twins([rendezvous.OURS], OLD)
    names = [key.rival for key in rendezvous.keys(pair, (2,), 2, ("at-once",))]
    assert names == ["dlrover-run, old", "dlrover-run", "dlrover-run", "dlrover-run, old"]


def test_renewals_of_leases_are_shown_and_not_added() -> None:
    measured = rendezvous.per_node(Counter({"Txn": 6, "LeaseKeepAlive": 9, "LeaseGrant": 3}), 3)
    assert measured.values == {"": 3.0, ", LeaseGrant": 1.0, ", LeaseKeepAlive": 3.0, ", Txn": 2.0}


def test_every_node_is_in_one_crowd_and_the_last_node_is_alone() -> None:
    for nodes in range(2, 40):
        sizes = crowd_sizes(nodes)
        assert (sum(sizes), sizes[-1], min(sizes)) == (nodes, 1, 1)


def result(name: str = "start") -> report.Result:
    rows = summarise([*runs("ours", 1.0, None), *runs("theirs", 4.0), hung("theirs", 2, 90.0)], "theirs", {})
    return replace(EMPTY, name=name, title="a | title", baseline="theirs", rows=rows, absent={"gone": "not installed"})


def test_a_summary_survives_json_and_the_newest_of_each_table_is_kept(tmp_path: Path) -> None:
    table = report.Table("a table", "here", ("x",), (("1",),), "Heading", "Before it:", (0,))
    summary = report.Summary("title", [result()], [table])
    report.write_json(tmp_path / "x.json", summary)
    read = report.read(tmp_path / "x.json")
    assert report.markdown(read) == report.markdown(summary)
    assert [line.count("{") for line in (tmp_path / "x.json").read_text().splitlines() if '"ours"' in line] == [1]
    newer = replace(result(), how="2 repetitions")
    old = report.Summary("title", [result(), result("old")])
    assert report.merge(old, [newer, result("other")], ["other", "start"]).parts == [result("other"), newer]
    assert report.merge(old, [newer, table]).parts == [newer, result("old"), table]
    (tmp_path / "x.json").write_text('{"cases": [{"name": "kill"}]}')
    with pytest.raises(ValueError, match="no result of this benchmark"):
        report.read(tmp_path / "x.json")


def test_the_tables_distinguish_bounds_from_figures_and_name_the_machine() -> None:
    text = report.markdown(report.Summary("Launching", [result()]))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(report.COLUMNS) + 1}
    assert "> 90.000 s" in text
    assert "load at start 0.50, 0.25, 0.00" in text
    assert "gone did not run: not installed." in text
    assert (report.ratio_text(0.052, bound=True), report.ratio_text(0.0043)) == ("<= 0.052", "0.0043")


PUBLISHED: list[series.Series[Any]] = [
    *(
        one.BENCHMARK.series((), Limits(), report.this_machine)
        for one in (launch, recovery, tf_recovery, check_cost, round_store)
    ),
    *(
        one.SERIES
        for one in (
            rendezvous,
            stalls,
            autoscale,
            check_decide,
            node_check,
            progress_cost,
            imports,
            warm_workers,
            reload,
        )
    ),
    ledger.series_of(Storm()),
    checkpoint_pause.series_of(None),
]


def test_the_benchmarks_are_all_there_are() -> None:
    # The results of the experiments are pages that are written by hand.
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"experiments"}
    assert len(PUBLISHED) == len(programs)
    assert {path.with_suffix("") for path in report.RESULTS.rglob("*.json")} == {
        report.RESULTS / one.name for one in PUBLISHED
    }


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_stored_results_are_read_and_have_the_tables_beside_them(published: series.Series[Any]) -> None:
    path = report.RESULTS / f"{published.name}.json"
    summary = report.read(path)
    assert summary.title == published.title
    assert summary.parts
    assert path.with_suffix(".md").read_text() == report.markdown(summary)
    assert not published.order or [one.name for one in summary.parts] == list(published.order)
    assert path.with_suffix(".png").exists() == (published.draw is not series.draw_nothing)
    for one in summary.cases:
        titles = {row.title for row in one.rows}
        assert not one.baseline or any(title.startswith(one.baseline) for title in titles)
        assert all(row.reached is not None for row in one.rows if row.target is not None and row.samples)


def test_the_time_after_a_save_is_judged_by_turns_and_has_its_median_and_its_tail() -> None:
    turns = [[0.1 * number, 1.0 * number, 0.5 * number] for number in range(1, 21)]
    sessions = [reload.Session(reload.Key(2, number), turns[10 * number : 10 * number + 10]) for number in (0, 1)]
    text = report.markdown(report.Summary("", tables=reload.tables([series.Kept(one, MACHINE) for one in sessions])))
    lines = [re.sub(r" +", " ", line) for line in text.splitlines()]
    assert "| 2 | dlrover-run --reload | 1.05 s | 1.90 s | 20 | - | - |" in lines
    assert "| 2 | torchrun | 10.50 s | 19.00 s | 20 | 10.0 x | 10.0 to 10.0 |" in lines
    assert reload.line(sessions[0]).endswith("torchrun 5.50 s, bare Popen 2.75 s")


def test_the_published_results_are_small() -> None:
    """Single runs belong to no commit: each measurement would write them anew."""
    assert sum(path.stat().st_size for path in report.RESULTS.rglob("*.json")) < 300_000


SLOW_NETWORK = NodeTruth(drag=4.5)
CRASH = NodeTruth(computing=Computing.FAILS)


@pytest.mark.parametrize(
    ("truth", "nodes", "named"),
    [
        (SLOW_NETWORK, 4, set()),
        (SLOW_NETWORK, 8, {0}),
        (CRASH, 2, {0, 1}),
        (CRASH, 3, {0, 1, 2}),
        (CRASH, 4, {0}),
    ],
)
def test_the_published_rule_names_the_observed_figures(truth: NodeTruth, nodes: int, named: set[int]) -> None:
    world = World((truth, *whole(nodes - 1).nodes), noise=0.0)
    assert node_check.published(world, random.Random(0), node_check.CPU_SHARE) == named


def test_the_manual_has_the_ranges_of_the_results() -> None:
    """For each kind of fault, over all sizes."""
    results = (ROOT / "benchmarks/results/node-check/rates.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in results if re.match(r"\| +\d", line)]
    manual = (ROOT / "docs/node-check.md").read_text().splitlines()
    kinds = dict.fromkeys(row[1] for row in cells)
    assert len(kinds) == len(node_check.PLANTS)
    for kind in kinds:
        columns = zip(*(row[2:] for row in cells if row[1] == kind), strict=True)
        assert "| " + " | ".join([kind, *map(range_of, columns)]) + " |" in manual


def range_of(rates: Sequence[str]) -> str:
    shares = [float(rate.removesuffix(" %")) for rate in rates if rate != "-"]
    if not shares:
        return "-"
    low, high = f"{min(shares):.0f}", f"{max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


@pytest.mark.parametrize("world", check_decide.WORLDS)
def test_deciding_about_four_times_the_nodes_is_about_four_times_the_work(world: str) -> None:
    few, many = (calls_of(lambda nodes=nodes: check_decide.check(nodes, world)) for nodes in (30, 120))
    assert many < 6 * few


@pytest.mark.long
@pytest.mark.torchrun
def test_real_jobs_are_measured() -> None:
    with Run() as run:
        assert not rendezvous.join_at_once(run, rendezvous.OURS, 3, limit=60.0)["at-once"].unended
    case = next(case for case in recovery.cases() if case.name == "worker-death")
    result = result_in(replace(case, rivals=(SPAWN,)), 1)
    rows = {row.title: row.median for row in result.rows}
    noticed, formed, stepped = (rows[SPAWN.name + part] for part in (OLD_ENDED, NEW_WORLD, ""))
    assert (noticed or 0) > 0
    assert 0 < (formed or 0) < (stepped or math.inf)


@pytest.mark.torchrun
def test_clients_of_a_store_exchange_their_addresses() -> None:
    with Run() as run:
        measured = round_store.exchange(3)(round_store.OURS, run, Limits())
    assert not measured.unended
    assert measured.values is not None
    assert measured.values.keys() == {"", round_store.OF_SERVER}


def test_how_workers_were_started_follows_from_the_output_of_the_launcher() -> None:
    left_out = (
        "08:00:00 dlrover-run: --start-method=forkserver: after `import polars` the thread polars-ooc-clea is running; "
        "each worker imports polars itself, and is forked with the rest"
    )
    assert imports.describe("x\n") == "forked"
    assert imports.describe(left_out) == (
        "forked without polars (after `import polars` the thread polars-ooc-clea is running)"
    )
    assert imports.describe(f"{left_out}\n--start-method=forkserver: x; {imports.SPAWNED}") == "spawned"


def test_a_command_has_the_flags_of_both_launchers() -> None:
    job = Job("wait.py", workers=1, max_restarts=3, nodes=2, nnodes="1:2", port=29400, conf="last_call_timeout=5")
    command = SPAWN.command(job)
    flags = {"--nproc-per-node=1", "--max-restarts=3", "--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:29400"}
    assert {*flags, "--rdzv-conf=last_call_timeout=5", "--start-method=spawn"} < set(command)
    assert Path(command[-1]).is_file()


def test_the_cost_of_a_report_is_a_ratio_within_four_blocks() -> None:
    cost = progress_cost.cost_of(3, "0 0.2\n1 0.202\n1 0.404\n0 0.4\n")
    assert cost.ratios == pytest.approx((1.01,))
    assert cost.seconds == pytest.approx((0.006 / (2 * progress_cost.BLOCK),))


def test_a_quantile_is_a_value_that_the_share_does_not_exceed() -> None:
    values = [float(value) for value in range(20, 0, -1)]
    assert [series.quantile(values, share) for share in (0.05, 0.5, 0.95, 1.0)] == [1.0, 10.0, 19.0, 20.0]
    assert (series.quantile([7.0], 0.5), series.percent(1, 3), series.percent(0, 0)) == (7.0, "33 %", "-")
    assert series.share_within([0.01, -0.02, 0.011], 0.01) == "33 %"


NOTES = [
    *(truth.Note(rank, 0, what, at) for rank in (0, 1) for what, at in (("begins", 10.0), ("works", 12.0))),
    *(truth.Note(0, 0, "saved", at) for at in (13.0, 15.0)),
    truth.Note(1, 0, "fails", 16.0),
    *(truth.Note(rank, 1, what, at) for rank in (0, 1) for what, at in (("begins", 16.5), ("works", 18.0))),
    truth.Note(0, 1, "succeeds", 20.0),
    truth.Note(1, 1, "succeeds", 21.0),
]


def test_the_truth_of_a_rank_ends_with_the_failure_of_any_and_loses_the_work_since_the_checkpoint() -> None:
    first, second = truth.truth_of(NOTES, 2, 2)
    assert first == truth.Truth(start=2.0 + 1.5, train=3.0 + 2.0, lost=1.0, restart=0.5)
    assert second == replace(first, train=3.0 + 3.0)


def seconds(*phases: tuple[TimePhase, float]) -> tuple[TimeSegment, ...]:
    found, at = [], 0
    for phase, long in phases:
        found.append(TimeSegment(at, at + round(1e6 * long), phase))
        at = found[-1].end
    return tuple(found)


OPENED = LogOpened(schema=1, job="j", host="h", node_id="n", pid=1, workers=1, began=0.0, program="p")
ACCOUNT = Ledger((
    PlaceTimes(OPENED, 0, seconds(
        (TimePhase.IMPORT, 3.5), (TimePhase.TRAIN, 4.0), (TimePhase.LOST, 1.0), (TimePhase.TRAIN, 1.5),
    )),
))  # fmt: skip


def test_a_figure_of_the_ledger_is_compared_over_all_ranks() -> None:
    pairs = truth.compare(ACCOUNT, [truth.Truth(start=3.5, train=5.0, lost=1.25, restart=0.0)], wall=10.0)
    errors = {name: pair.error for name, pair in pairs.items()}
    assert errors == pytest.approx(
        {"start": 0.0, "train": 0.1, "lost": -0.2, "restart": None, "wall": 0.0, "sum": 0.0, "ettr": 0.1}
    )
    assert ledger.share_between(ACCOUNT, 7.0, 10.0) == pytest.approx(100 * 2.0 / 3.0)


def test_errors_of_the_ledger_come_from_moments_that_the_agent_sees_later() -> None:
    def left(rank: int, mono: float, code: int) -> WorkerExited:
        return WorkerExited(round=1, rank=rank, local_rank=rank, pid=1, code=code, mono=mono)

    def ready(rank: int, since: float) -> WorkerReady:
        return WorkerReady(round=1, rank=rank, local_rank=rank, stage="step", since=since, mono=99.0)

    events = (
        ready(0, 12.5), ready(0, 18.0), ready(1, 12.0), CheckpointSeen(mono=13.25), CheckpointSeen(mono=15.0),
        left(0, 16.5, -15), left(1, 16.25, -9), left(0, 20.5, 0), left(1, 21.0, 0),
    )  # fmt: skip
    assert truth.delays(AgentLog(OPENED, events), NOTES, 2) == {
        "first step": [0.5, 0.0],  # One of rank 1 is missing, so its others cannot be paired.
        "checkpoint": [0.25, 0.0],
        "failure": [0.25],
        "success": [0.5, 0.0],
    }


PLANS = [(2, 28, 85), (1, 58, 165), (1, 57, 128)]


def test_the_plan_of_a_seed_stays_what_it_was() -> None:
    assert [(one.workers, one.save_every, one.rounds[-1].steps) for one in map(truth.plan_of, range(3))] == PLANS
    assert [one.steps for one in truth.plan_of(1, scale=3).rounds] == [3 * one.steps for one in truth.plan_of(1).rounds]


def outcome(case: str, number: int, ledger_: float) -> ledger.Outcome:
    late = {"first step": [0.001], "checkpoint": [0.002], "failure": [0.03], "success": [-0.001]}
    figures = {name: truth.Pair(ledger_, 1.0) for name in ledger.TARGETS} if case == ledger.CHAOS else {}
    return ledger.Outcome(case, 1, number, 4, figures or {"ettr": truth.Pair(ledger_, 90.0)}, late)


def test_runs_are_kept_merged_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[int] = []

    def measure(key: ledger.Key) -> ledger.Outcome:
        measured.append(key.number)
        if key.number == 2:
            raise Lost("killed")
        return outcome(key.case, key.number, 1.02)

    kept = series.Series("Ledger", "x/x", ledger.Outcome, measure, ledger.tables, ledger.line,
                         absent=lambda key, kept: "no seven" if key.number == 7 else None)  # fmt: skip
    parser = argparse.ArgumentParser()
    kept.add_options(parser)

    def take(*numbers: int, options: Sequence[str] = (), trial: bool = False) -> list[int]:
        measured.clear()
        arguments = parser.parse_args([f"--output={tmp_path}", *options])
        assert kept.run(parser, arguments, [ledger.Key(ledger.CHAOS, 1, number) for number in numbers], trial) == 0
        return list(measured)

    assert take(1, 2, 7) == [1, 2]
    assert "left out: no seven" in capsys.readouterr().err
    assert take(1, 2, 3) == [2, 3]
    assert take(4, options=["--budget=0"]) == []
    assert take(4, options=["--redraw"]) == []
    other = tmp_path / "other" / "x.jsonl"
    runs = [outcome(ledger.CHAOS, 3, 1.5), outcome("spawn", 1, 91.0)]
    series.write(other, [series.Kept(run, MACHINE) for run in runs])
    assert take(options=[f"--merge={other}"]) == []
    found = [one.run for one in series.read(tmp_path / "x.jsonl", ledger.Outcome)]
    assert [(*one.key, one.figures["ettr"].ledger) for one in found] == [
        (ledger.CHAOS, 1, 1, 1.02), (ledger.CHAOS, 1, 3, 1.5), ("spawn", 1, 1, 91.0),
    ]  # fmt: skip
    text = (tmp_path / "x.md").read_text()
    assert "| ettr | 2 | 1 % | 0 % | 26.00 % | 50.00 % | 50.00 % |" in re.sub(r" +", " ", text)
    assert "| train | 2 | 5 % | 50 % |" in re.sub(r" +", " ", text)
    assert "+1.11 %" in text
    # What a killed process has begun to write is no run.
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('{"run": {"case"')
    assert len(series.read(tmp_path / "x.jsonl", ledger.Outcome)) == 3
    assert take(1, options=["--fresh"]) == [1]
    assert len(series.read(tmp_path / "x.jsonl", ledger.Outcome)) == 3
    assert take(1, trial=True) == [1], "a trial repeats each run"
    assert len(series.read(tmp_path / "x.jsonl", ledger.Outcome)) == 3, "and keeps none"
    other.write_text('{"runs": 3}\n')
    with pytest.raises(SystemExit):
        take(1, options=[f"--merge={other}"])


def test_tables_without_runs_on_this_machine_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs lie in a folder that git ignores, and the tables where the published ones are, by default."""
    monkeypatch.setattr(series, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(series, "RUNS", tmp_path / "runs")
    kept = ledger.series_of(Storm())
    kept = replace(kept, measure=lambda key: outcome(key.case, key.number, 91.0), absent=lambda key, kept: None)
    parser = argparse.ArgumentParser()
    kept.add_options(parser)
    table = report.Table("errors-1", "elsewhere", ("x",), (("1",),), "100 jobs")
    report.write_json(tmp_path / "results" / "ledger.json", report.Summary("old", tables=[table]))
    assert kept.run(parser, parser.parse_args([]), [ledger.Key("spawn", 1, 1)]) == 0
    assert [one.name for one in report.read(tmp_path / "results" / "ledger.json").tables] == ["errors-1", "storms"]
    assert len(series.read(tmp_path / "runs" / "ledger.jsonl", ledger.Outcome)) == 1


def test_what_was_measured_is_published_although_the_next_run_fails(tmp_path: Path) -> None:
    def measure(key: ledger.Key) -> ledger.Outcome:
        if key.number == 2:
            raise RuntimeError("a defect")
        return outcome(key.case, key.number, 1.0)

    kept = replace(ledger.series_of(Storm()), measure=measure, absent=lambda key, kept: None)
    parser = argparse.ArgumentParser()
    kept.add_options(parser)
    with pytest.raises(RuntimeError):
        kept.run(
            parser, parser.parse_args([f"--output={tmp_path}"]), [ledger.Key(ledger.CHAOS, 1, at) for at in (1, 2)]
        )
    assert "## 1 jobs" in (tmp_path / "ledger.md").read_text()


def test_a_turn_is_kept_with_all_rivals_and_warmed_up_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = Counter[str]()

    def measure(rival: Any, run: Run, limits: Limits) -> Measured:
        count[rival.name] += 1
        return Measured({"": float(count[rival.name])})

    first, second = SPAWN, replace(SPAWN, name="theirs")
    case = Case("kill", "kill", "s", (first, second), "theirs", measure, turns_of={"theirs": 1})
    benchmark = Benchmark("Rivals", "x/x", lambda options: (case,), 2, draw=series.draw_nothing)
    assert benchmark.main([f"--output={tmp_path}", "--repetitions=1"]) == 0
    assert count == {SPAWN.name: 2, "theirs": 2}, "a warm-up and a turn"
    assert benchmark.main([f"--output={tmp_path}"]) == 0
    assert count == {SPAWN.name: 4, "theirs": 3}
    kept = [one.run for one in series.read(tmp_path / "x.jsonl", Turn)]
    assert [(one.key.turn, list(one.measured)) for one in kept] == [(1, [SPAWN.name, "theirs"]), (2, [SPAWN.name])]
    (found,) = report.read(tmp_path / "x.json").cases
    assert {row.title: row.samples for row in found.rows} == {SPAWN.name: (2.0, 4.0), "theirs": (2.0,)}
    assert benchmark.main([f"--output={tmp_path}", "--quick"]) == 0
    assert "# Rivals" in capsys.readouterr().out
    assert len(series.read(tmp_path / "x.jsonl", Turn)) == 2, "what is quick is not kept"


def stalled(rank: int, mono: float, since: float, *, guilty: bool = False, function: str = "spin") -> WorkerStalled:
    place = GuiltCode.PLACE(file="/a/benchmarks/workers/stalling.py", line=7, function=function)
    reasons = (GuiltCode.SPINNING(), place) if guilty else ()
    return WorkerStalled(round=1, rank=rank, local_rank=rank, since=since, mono=mono, guilty=guilty, reasons=reasons)


SPIN = kinds.Key("spin", 2, 1)


def test_a_hang_is_judged_by_the_first_report_after_it() -> None:
    events = [
        *(stalled(rank, 80.0, 76.0) for rank in (0, 1)),
        *(stalled(rank, 104.0, 99.9, guilty=rank == 1) for rank in (0, 1)),
        *(stalled(rank, 130.0, 120.0, guilty=rank == 0) for rank in (0, 1)),
    ]
    trial = stall_trial.trial_of(SPIN, 1, 100.0, events, watched=20.0)
    assert (trial.seconds, trial.named, trial.code, trial.function) == (4.0, (1,), "spinning", "spin")
    assert (trial.right_rank, trial.right_line, trial.wrong_reports, trial.reported) == (True, True, 1, "spinning")
    assert not stall_trial.trial_of(SPIN, 0, 100.0, events, watched=20.0).right_rank
    elsewhere = stall_trial.trial_of(SPIN, 1, 100.0, [stalled(1, 104.0, 99.9, guilty=True, function="train")], 20.0)
    assert (elsewhere.right_rank, elsewhere.right_line) == (True, False)


def test_an_innocent_job_has_only_wrong_reports_and_a_silent_hang_has_none() -> None:
    events = [stalled(rank, 80.0, 76.0) for rank in (0, 1)]
    pause = stall_trial.trial_of(kinds.Key("checkpoint", 2, 1, 60.0), 0, math.inf, events, watched=90.0)
    assert (pause.seconds, pause.wrong_reports, pause.right_rank) == (None, 1, False)
    silent = stall_trial.trial_of(SPIN, 0, 100.0, [], watched=20.0)
    assert (silent.seconds, silent.reported, silent.wrong_reports) == (None, stall_trial.NO_REPORT, 0)
    unnamed = stall_trial.trial_of(SPIN, 0, 100.0, [stalled(0, 104.0, 99.9)], watched=20.0)
    assert (unnamed.seconds, unnamed.reported, unnamed.named) == (4.0, stall_trial.NO_RANK, ())


@pytest.mark.parametrize(
    ("fault", "ranks", "named", "right"),
    [
        ("spin", 2, (0, 1), False),
        ("mismatch", 2, (0, 1), True),
        ("mismatch", 4, (0, 1), False),
        ("mismatch", 4, (1,), True),
        ("cut-node", 4, (2, 3), True),
        ("cut-node", 4, (), False),
    ],
)
def test_of_two_that_wait_for_each_other_both_may_be_named(
    fault: str, ranks: int, named: tuple[int, ...], right: bool
) -> None:
    events = [stalled(rank, 104.0, 99.9, guilty=rank in named) for rank in range(ranks)]
    assert stall_trial.trial_of(kinds.Key(fault, ranks, 1), 1, 100.0, events, 20.0).right_rank is right


def test_the_runs_of_the_matrix_are_even_over_the_kinds_and_drawn_from_their_key() -> None:
    found = kinds.keys(kinds.FAULTS, [one.name for one in kinds.FAULTS], (2, 4), range(1, 21), 60.0)
    with_gloo = {one.name for one in kinds.FAULTS if kinds.GLOO in one.shapes}
    assert Counter(Counter(key[:2] for key in found).values()) == {20: 2 * len(with_gloo)}
    assert {key.fault for key in found[: 2 * len(with_gloo)]} == with_gloo
    for ranks in (2, 4):
        drawn = {key.draw.randrange(ranks) for key in found if key[:2] == ("spin", ranks)}
        assert drawn == set(range(ranks))
    pauses = kinds.keys(kinds.INNOCENTS, ["checkpoint"], (2,), stalls.turns("2"), 5.0)
    assert pauses == [kinds.Key("checkpoint", 2, turn, 5.0) for turn in (1, 2)]
    assert pauses[0].draw.random() == pauses[0]._replace(pause=60.0).draw.random()
    both = kinds.keys(kinds.FAULTS, ["spin", "endless-kernel"], (2,), stalls.turns("1"), 0.0, kinds.SHAPES)
    assert [(key.fault, key.shape) for key in both] == [
        ("spin", "gloo"),
        ("spin", "device"),
        ("endless-kernel", "device"),
    ]
    one_rank = kinds.keys(kinds.INNOCENTS, ["one-rank"], (2, 4), stalls.turns("1"), 5.0, kinds.SHAPES)
    assert [(key.ranks, key.shape) for key in one_rank] == [(1, "device")]
    assert {key.device_options["tcp"] for key in kinds.keys(kinds.FAULTS, ["cut"], (2,), range(1, 9), 0.0)} == {1}
    assert [key.turn for key in kinds.keys(kinds.CALMS, ["calm"], (4,), stalls.turns("11:12"), 900.0)] == [11, 12]


def test_the_confusion_matrices_count_each_run_once(tmp_path: Path) -> None:
    right = [stalled(rank, 104.0, 99.9, guilty=rank == 1) for rank in (0, 1)]
    both = [stalled(rank, 110.0, 99.9, guilty=True) for rank in (0, 1)]
    trials = [
        stall_trial.trial_of(SPIN, 1, 100.0, right, watched=20.0),
        stall_trial.trial_of(SPIN._replace(turn=2), 1, 100.0, both, watched=20.0),
        stall_trial.trial_of(SPIN._replace(turn=3), 0, 100.0, [], watched=20.0),
        stall_trial.trial_of(kinds.Key("stopped", 2, 1), 0, 100.0, [stalled(0, 104.0, 99.9)], watched=20.0),
        stall_trial.trial_of(kinds.Key("debugger", 2, 1, 60.0), 0, math.inf, right, watched=2520.0),
        stall_trial.trial_of(kinds.Key("calm", 2, 1, 900.0), 0, math.inf, [], watched=1000.0),
    ]
    runs = [series.Kept(one, MACHINE) for one in trials]
    series.write(tmp_path / "stalls.jsonl", runs)
    assert series.read(tmp_path / "stalls.jsonl", stall_trial.Trial) == runs
    text = report.markdown(report.Summary("Stalls", tables=stall_report.tables(runs)))
    lines = [re.sub(r" +", " ", line) for line in text.splitlines()]
    spins = "spins in Python"
    assert f"| 2 | {spins} | 3 | 67 % | 7.0 s | 10.0 s | 10.0 s | 33 % | 33 % | 33 % | 33 % | 0 |" in lines
    assert "| the guilty rank | runs | spinning | no rank | no report |" in lines
    assert f"| {spins} | 3 | 2 | | 1 |" in lines
    assert "| stopped by SIGSTOP | 1 | | 1 | |" in lines
    assert "| 2 | 0 | 2 | | | | 2 |" in lines
    assert "| 2 | 1 | 2 | | 1 | 1 | |" in lines
    assert "| 2 | one rank is in pdb | 60 s | 1 | 1 |" in lines
    assert "| 2 | trains, with pauses drawn at random | 900 s | 1 | 0 |" in lines
    assert "Jobs without a fault, or before it, were watched for 3600 s (1.00 hours): 1 false reports." in lines


def test_the_runs_with_the_shape_of_a_device_have_tables_of_their_own() -> None:
    key = SPIN._replace(shape=kinds.DEVICE)
    found_by = Reason("stall.behind", {"operation": "all_reduce", "number": 121})
    event = stalled(1, 104.0, 99.9, guilty=True)
    event = msgspec.structs.replace(event, reasons=(found_by, *event.reasons[1:]))
    named = stall_trial.trial_of(key, 1, 100.0, [event], 20.0, awaited="all_reduce 121", asked=2)
    other = stall_trial.trial_of(key._replace(turn=2), 1, 100.0, [event], 20.0, awaited="all_reduce 122")
    unknown = stall_trial.trial_of(key._replace(turn=3), 1, 100.0, [event], 20.0)
    assert (named.key, named.operation, named.right_line) == (key, "all_reduce 121", True)
    assert (named.right_operation, other.right_operation, unknown.right_operation) == (True, False, False)
    both = Reason("stall.differ", {"operation": "all_gather", "number": 3, "own": "all_reduce", "own_number": 121})
    assert stall_trial.named_operation((both,)) == "all_gather 3, all_reduce 121"
    runs = [series.Kept(one, MACHINE) for one in (named, other, unknown, stall_trial.trial_of(SPIN, 1, 100.0, [], 1.0))]
    found = {table.name: table for table in stall_report.tables(runs)}
    assert [*found] == ["hangs", "reasons", "ranks", "hangs-device", "reasons-device", "ranks-device"]
    assert [row[-1] for row in found["hangs-device"].rows] == ["50 %", "50 %"]
    assert "asked for their operations 2 times before the fault" in found["hangs-device"].about
    assert "no report" in stall_trial.outcome(runs[-1].run)
    assert "spin 2 1 device: guilty 1: 4.0 s, rank 1" in stall_trial.outcome(named)


def test_a_kind_is_chosen_in_its_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stalls.main([f"--output={tmp_path}", "--only=spin", "--budget=0", "--repetitions=3", "--shape=gloo"]) == 0
    assert "6 of 6 are missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        stalls.main([f"--output={tmp_path}", "--only=spin", "--innocent"])
    assert "spin is no innocent pause" in capsys.readouterr().err


def test_each_kind_is_one_of_the_worker_or_is_done_from_outside() -> None:
    worker = (ROOT / "benchmarks/workers/stalling.py").read_text()
    for kind in (*kinds.FAULTS, *kinds.INNOCENTS):
        assert kind.cuts or kind.outside is not None or f'"{kind.name}": ' in worker, kind.name
        assert all(f"def {function}(" in worker for function in kind.functions)
    assert len(kinds.BY_NAME) == len(kinds.FAULTS) + len(kinds.INNOCENTS) + len(kinds.CALMS)


def test_of_steps_that_sleep_the_cost_is_a_share_of_the_clock() -> None:
    cost = progress_cost.cost_of(0, "0 0.2\n1 0.202\n1 0.404\n0 0.4\n", step=0.001)
    assert cost.ratios == pytest.approx((1 + 0.006 / (2 * progress_cost.BLOCK * 0.001),))


def test_what_everything_costs_is_the_difference_within_four_jobs() -> None:
    times = [("off", 0.001, 0.005), ("on", 0.006, 0.007), ("on", 0.008, 0.008), ("off", 0.003, 0.006)]
    turns = [progress_cost.JobTimes(mode, one, two, 500.0) for mode, one, two in times]
    cost = progress_cost.job_cost(turns, rate=1000.0)
    assert (cost.launcher, cost.step) == pytest.approx((0.005, 0.004))
    assert [mode for mode, *_ in times] == list(progress_cost.TURNS)


def test_the_processor_time_of_another_process_is_read() -> None:
    began = processes.processor_time(os.getpid())
    sum(range(1_000_000))
    assert processes.processor_time(os.getpid()) > began > 0
    assert processes.processor_time(2**22 + 1) == 0


def test_what_a_job_prints_is_waited_for() -> None:
    with Run() as run:
        run.ends_by_itself = False
        run.start(["sh", "-c", "echo first; sleep 0.1; echo second; exec sleep 60"])
        assert run.wait_output("first", 60.0)
        assert run.wait_output("second", 60.0, after=len("first\n"))
        assert not run.wait_output("first", 0.0, after=len("first\n"))
    with Run() as run:
        run.start(["true"])
        with pytest.raises(Lost):
            run.wait_output("first", 60.0)


def test_a_benchmark_that_is_ended_while_a_job_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_end = run_module.wait_for_end

    def ended(pids: Any, timeout: float) -> Any:
        monkeypatch.setattr(run_module, "wait_for_end", wait_for_end)
        raise SystemExit(143)

    monkeypatch.setattr(run_module, "wait_for_end", ended)
    with pytest.raises(SystemExit), Run() as run:
        run.start(["sleep", "600"])
    assert run.launchers[0].returncode == -9
    assert not run.directory.exists()


def note(what: Literal["resumed", "step"], port: int, step: int, rank: int = 0, *samples: int) -> indices.Line:
    return indices.Line(what, 0.0, port, rank, step, step // 2, samples)


def test_samples_of_steps_that_a_restore_has_undone_do_not_count() -> None:
    first = [
        note("resumed", 1, 0, 0),
        note("resumed", 1, 0, 1),
        *(note("step", 1, step, rank, 2 * (step % 2) + rank) for step in (0, 1) for rank in (0, 1)),
    ]
    assert indices.use_of(first, 4) == indices.Use(rounds=1, repeated=0, epochs=1, wrong=0)
    again = [
        note("resumed", 2, 1),
        note("step", 2, 1, 0, 2, 3),
        note("step", 2, 2, 0, 0, 1),
        note("step", 2, 3, 0, 2, 3),
    ]
    assert indices.use_of([*first, *again], 4) == indices.Use(rounds=2, repeated=1, epochs=2, wrong=0)
    assert indices.use_of([*first[:-1], *again], 4) == indices.Use(rounds=2, repeated=0, epochs=2, wrong=0)
    # Without the restore's step one epoch has used two samples twice; without a rank's share one lacks a sample.
    doubled = [note("resumed", 2, 2), *again[1:]]
    assert indices.use_of([*first, *doubled], 4).wrong == 1
    assert indices.use_of(first[:-1], 4).wrong == 1


def test_the_cost_of_a_search_is_what_the_work_would_not_have_taken_at_the_best_size() -> None:
    slow = [(float(second), 10.0) for second in range(11)]
    fast = [(20.0 + second, 20.0) for second in range(1, 11)]
    # Ten seconds at half of the rate, a pause of ten, and ten seconds at the whole rate.
    assert autoscale.missing_seconds([*fast, *slow], 30.0, 20.0) == (30.0, 15.0)
    with pytest.raises(Lost):
        autoscale.missing_seconds([], 30.0, 20.0)


def test_jobs_that_scale_themselves_are_compared_with_the_best_fixed_size() -> None:
    runs = [
        autoscale.Trial("mnist", what, "300", 1, size, 0, seconds, 0.0, None, 0, 300, 0)
        for what, size, seconds in (("autoscale", 2, 110.0), ("1", 1, 150.0), ("2", 2, 100.0))
    ]
    assert [row[4] for row in autoscale.mnist_rows(runs)] == ["1.100", "1.500", "1.000"]
    flat = autoscale.Trial("planted", "flat", "default", 1, 1, 2, 200.0, 3.0, 36.0)
    assert autoscale.planted_rows([flat])[0][-1] == "1.00 %"


def test_the_ratio_of_warm_workers_is_that_of_the_medians() -> None:
    times = {"forkserver": (5.5, 6.0, 50.0), "warm workers": (0.2, 0.1, 3.0)}
    kept = [
        series.Kept(warm_workers.Row(way, turn, at), report.this_machine())
        for way in times
        for turn, at in enumerate(times[way])
    ]
    (table,) = warm_workers.tables(kept)
    assert [row[1] for row in table.rows] == ["6.00 s", "0.20 s"]
    assert [row[3] for row in table.rows] == ["-", "30"]
