"""The arithmetic of `benchmarks/`: ratios, targets, and what counts as recovered or lost. One test starts processes."""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from check_world import Computing, NodeTruth, World, whole
from harness import calls_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import check_cost
import check_decide
import launch
import node_check
import progress_cost
import recovery
import rendezvous
import tf_recovery
from core import processes, report
from core.cases import Case, Limits, run_case
from core.launchers import SPAWN, Job
from core.meetings import crowd_sizes
from core.processes import Process
from core.ratios import Late, Measured, Reading, Row, Sample, pair_ratios, summarise
from core.run import Report, Run, all_ranks, until_last
from core.steps import Step, effective_share, kept_steps, longest_pause, read_steps, step_rate
from recovery import NEW_WORLD, OLD_ENDED
from tf_recovery import OF_WORKER

ROOT = Path(__file__).resolve().parents[2]
SECOND = 1_000_000_000
MACHINE = report.Machine("CPU", 2, 8.0, "6.1", "3.11", "2.13", (0.5, 0.25, 0.0), "2030-01-01T10:00:00", "abc")


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
    assert row.ratio == pytest.approx(0.5)  # of 0.1, 0.5 and 0.6; the medians alone would give 0.3
    assert row.spread == pytest.approx((0.1, 0.6))
    assert (row.median, row.low, row.high) == (3.0, 1.0, 10.0)


def test_a_pair_whose_baseline_was_lost_is_left_out() -> None:
    ours = {1: Reading(1.0), 2: Reading(4.0)}
    assert pair_ratios(ours, {1: Reading(None), 2: Reading(8.0)}) == [0.5]


def test_a_lost_run_counts_as_infinite_and_misses_the_target() -> None:
    few = rows_of(runs("ours", 1.0, None, 1.0) + runs("theirs", 4.0, 4.0, 4.0), {("ours", ""): 0.5})["ours"]
    assert (few.ratio, few.spread, few.lost, few.reached) == (0.25, (0.25, "lost"), 1, False)
    most = rows_of(runs("ours", None, None, 1.0) + runs("theirs", 4.0, 4.0, 4.0), {("ours", ""): 0.5})["ours"]
    assert most.ratio == "lost"
    rows = rows_of(runs("ours", None) + runs("theirs", 4.0), {("ours", ", a part"): 0.25})
    assert (rows["ours, a part"].reached, rows["ours, a part"].lost) == (False, 1)


def test_a_target_is_reached_on_its_edge_and_unknown_without_a_baseline() -> None:
    targets = {("ours", ""): 0.25}
    assert rows_of(runs("ours", 1.0) + runs("theirs", 4.0), targets)["ours"].reached is True
    assert rows_of(runs("ours", 1.1) + runs("theirs", 4.0), targets)["ours"].reached is False
    assert rows_of(runs("ours", 1.0) + runs("theirs", None), targets)["ours"].reached is None


def test_a_baseline_that_did_not_end_gives_an_upper_bound() -> None:
    rows = rows_of([*runs("ours", 4.5), hung("theirs", 1, 90.0)], {("ours", ""): 0.1})
    assert (rows["ours"].ratio, rows["ours"].bound, rows["ours"].reached) == (0.05, True, True)
    assert (rows["theirs"].limit, rows["theirs"].lost, rows["theirs"].ratio) == (90.0, 1, None)


def test_a_run_that_did_not_end_is_no_better_than_a_lost_one() -> None:
    row = rows_of([hung("ours", 1, 2.0), *runs("theirs", 90.0)], {("ours", ""): 1.0})["ours"]
    assert (row.ratio, row.reached) == ("lost", False)
    neither = rows_of([hung("ours", 1, 2.0), hung("theirs", 1, 90.0)], {("ours", ""): 1.0})["ours"]
    assert neither.reached is None, "there is nothing to compare"


def test_a_part_is_compared_with_the_same_part_or_else_with_the_whole_or_within_its_run() -> None:
    samples = [
        Sample("ours", 1, Measured({"": 4.0, ", all": 6.0, ", less": 2.0})),
        Sample("theirs", 1, Measured({"": 8.0, ", all": 24.0})),
    ]
    rows = rows_of(samples)
    assert [rows[title].ratio for title in ("ours", "ours, all", "ours, less")] == [0.5, 0.25, 0.25]
    assert summarise(samples, "theirs", {}, {"": ", less"})[0].ratio == 2.0


def test_a_rival_takes_as_many_turns_as_its_case_allows_beside_a_known_baseline() -> None:
    case = Case(
        "cut", "cut", "s", (SPAWN, replace(SPAWN, name="absent", prefix=("/nowhere",))), "known",
        lambda rival, run, limits: Measured({"": 18.0}), warm_up=False, known_baseline=9.0, max_turns=2,
    )  # fmt: skip
    result = run_case(case, 5, Limits(), MACHINE)
    assert {row.title: row.samples for row in result.rows} == {SPAWN.name: (18.0, 18.0), "known": (9.0, 9.0)}
    assert result.rows[0].ratio == 2.0
    assert result.absent.keys() == {"absent"}


CASES = (*launch.CASES, *recovery.cases(recovery.Storm()), *tf_recovery.cases("python"), *check_cost.CASES)


def test_every_target_names_a_rival_of_its_case() -> None:
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


def test_a_worker_is_known_by_its_report_and_a_launcher_by_not_descending_from_one() -> None:
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


def test_a_recovery_ends_with_the_first_step_of_the_slowest_rank_in_the_world_that_did_it() -> None:
    measured = recovery.recovery_parts(RECOVERY, {10: 190, 12: 150, 13: 101}, 100, 2, [10, 12], limit=9.0)
    assert measured.values == pytest.approx({OLD_ENDED: 50e-9, NEW_WORLD: 500e-9, "": 700e-9})
    assert not measured.unended


def test_a_part_of_a_recovery_that_has_not_come_by_the_limit_takes_longer() -> None:
    measured = recovery.recovery_parts(RECOVERY[:7], {10: 150}, 100, 2, [10], limit=9.0)
    assert measured.values == pytest.approx({OLD_ENDED: 50e-9, NEW_WORLD: 100e-9, "": 9.0})
    assert (measured.unended, measured.note) == ({""}, "no step in 9 s")
    assert recovery.recovery_parts([], {}, 100, 1, [10], limit=9.0).unended == {OLD_ENDED, NEW_WORLD, ""}


def every_second(first: int, count: int, done: int = 0, saved: int = 0) -> list[Step]:
    """Steps at the seconds from `first` on, the first of them after `done` others."""
    return [Step((first + at) * SECOND, done + at + 1, saved) for at in range(count)]


def test_steps_are_read_from_all_leaders_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "steps-20").write_text("51 50 700\n52 50 800\n53 5")
    (tmp_path / "steps-10").write_text("1 0 100\n2 0 200\n")
    (tmp_path / "steps-30").write_text("53 5")
    assert [step.count for step in read_steps(tmp_path)] == [1, 2, 51, 52]


def test_a_pause_counts_that_began_before_or_goes_on_after() -> None:
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


def test_what_the_check_adds_is_the_difference_of_each_turn_against_the_task_of_that_turn() -> None:
    samples = [*runs(check_cost.WITH, 4.0, 9.0), *runs(check_cost.WITHOUT, 1.0), hung(check_cost.WITHOUT, 2, 60.0)]
    samples = check_cost.add_difference(samples + runs(check_cost.TASK, 2.0, 2.0))
    rows = {row.title: row for row in summarise(samples, check_cost.TASK, {(check_cost.ADDED, ""): 1.5})}
    assert rows[check_cost.ADDED].samples == (3.0, None)
    assert rows[check_cost.ADDED].reached is False


def trial(rival: str, nodes: int, turn: int, time: float, limit: float = 45.0) -> rendezvous.Trial:
    unended = frozenset({""} if time >= limit else ())
    return rendezvous.Trial(rival, nodes, turn, {"last-joiner": Measured({"": time}, "", unended)})


EMPTY = report.Result("", "", "s", "", [], {}, MACHINE, "1 repetition")


def test_rendezvous_are_compared_at_the_same_number_of_nodes_and_lost_ones_miss_the_target() -> None:
    trials = [
        trial("dlrover-run", 2, 1, 0.01),
        trial("c10d", 2, 1, 1.0),
        rendezvous.Trial("dlrover-run", 8, 1, {}, "no"),
    ]
    rows = {
        row.title: row for row in rendezvous.tables([*trials, trial("c10d", 8, 1, 45.0)], (2, 8), {}, EMPTY)[0].rows
    }
    assert (rows["dlrover-run, 2 nodes"].ratio, rows["dlrover-run, 2 nodes"].reached) == (0.01, True)
    assert (rows["dlrover-run, 8 nodes"].lost, rows["c10d, 8 nodes"].limit) == (1, 45.0)


def test_torch_is_not_tried_again_with_a_size_that_it_did_not_bring_together() -> None:
    def attempt(rival: rendezvous.Rival, nodes: int, turn: int) -> rendezvous.Trial:
        return trial(rival.name, nodes, turn, 45.0 if nodes >= 8 else 1.0)

    tried, absent = rendezvous.take_turns((rendezvous.OURS, rendezvous.C10D), (2, 8, 32), 2, attempt)
    assert [one.nodes for one in tried if one.rival == "c10d"] == [2, 8, 2]
    assert len(tried) == 3 + 6, "ours is always tried"
    assert absent == {"c10d, 32 nodes": "it did not bring 8 together"}


def test_renewals_of_leases_are_shown_and_in_no_sum() -> None:
    measured = rendezvous.per_node(Counter({"Txn": 6, "LeaseKeepAlive": 9, "LeaseGrant": 3}), 3)
    assert measured.values == {"": 3.0, ", LeaseGrant": 1.0, ", LeaseKeepAlive": 3.0, ", Txn": 2.0}


def test_every_node_but_the_last_is_in_a_crowd_and_none_twice() -> None:
    for nodes in range(2, 40):
        sizes = crowd_sizes(nodes)
        assert (sum(sizes), sizes[-1], min(sizes)) == (nodes, 1, 1)


def result(name: str = "start") -> report.Result:
    rows = summarise([*runs("ours", 1.0, None), *runs("theirs", 4.0), hung("theirs", 2, 90.0)], "theirs", {})
    return replace(EMPTY, name=name, title="a | title", baseline="theirs", rows=rows, absent={"gone": "not installed"})


def test_a_result_survives_json_and_the_newest_of_each_case_is_kept(tmp_path: Path) -> None:
    report.write_json(tmp_path / "x.json", {"cases": [result()]})
    assert report.read(tmp_path / "x.json") == [result()]
    newer = replace(result(), how="2 repetitions")
    assert report.merge([result(), result("old")], [newer, result("other")], ["other", "start"]) == [
        result("other"),
        newer,
    ]
    (tmp_path / "x.json").write_text('{"cases": [{"name": "kill"}]}')
    with pytest.raises(ValueError, match="no result of this benchmark"):
        report.read(tmp_path / "x.json")


def test_the_tables_distinguish_bounds_from_figures_and_name_the_machine() -> None:
    text = report.markdown("Launching", [result()])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(report.COLUMNS) + 1}
    assert "> 90.000 s" in text
    assert "load at start 0.50, 0.25, 0.00" in text
    assert "gone did not run: not installed." in text
    assert (report.ratio_text(0.052, bound=True), report.ratio_text(0.0043)) == ("<= 0.052", "0.0043")


@pytest.mark.parametrize("benchmark", [launch, recovery, tf_recovery, check_cost, rendezvous])
def test_stored_results_are_read_and_have_the_tables_beside_them(benchmark: object) -> None:
    stored = benchmark.BENCHMARK  # type: ignore[attr-defined]
    path = report.RESULTS / stored.json
    results = report.read(path)
    assert [one.name for one in results] == stored.names()
    assert path.with_suffix(".md").read_text() == report.markdown(stored.title, results)
    for one in results:
        titles = {row.title for row in one.rows}
        assert not one.baseline or any(title.startswith(one.baseline) for title in titles)
        assert all(row.reached is not None for row in one.rows if row.target is not None and row.samples)


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
def test_the_published_rule_names_what_was_seen_of_it(truth: NodeTruth, nodes: int, named: set[int]) -> None:
    world = World((truth, *whole(nodes - 1).nodes), noise=0.0)
    assert node_check.published(world, random.Random(0), node_check.CPU_SHARE) == named


def test_the_manual_has_the_ranges_of_the_results() -> None:
    """Of each kind of fault, over all sizes."""
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
    case = next(case for case in recovery.cases(recovery.Storm()) if case.name == "worker-death")
    result = run_case(replace(case, rivals=(SPAWN,)), 1, Limits(settle=0.1), MACHINE)
    rows = {row.title: row.median for row in result.rows}
    noticed, formed, stepped = (rows[SPAWN.name + part] for part in (OLD_ENDED, NEW_WORLD, ""))
    assert (noticed or 0) > 0
    assert 0 < (formed or 0) < (stepped or math.inf)


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
