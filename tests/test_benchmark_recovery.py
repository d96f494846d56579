"""`benchmarks/recovery.py`: its pure parts, and the faults under a rival that follows a script. No time is asserted."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import recovery
from comparison import machine, report
from comparison.lost import Lost
from comparison.ratios import Sample, summarise
from launch_bench.case import Limits, Measured
from launch_bench.rivals import OURS_SPAWN, Job, Rival
from launch_bench.room import Report, Room, parse_report
from recovery_bench import record
from recovery_bench.cut import CUT, KEEP_ALIVE, KEEP_ALIVE_TIMEOUT
from recovery_bench.deaths import (
    DEATHS,
    PAUSE_BEFORE,
    WORKER_AFTER,
    WORKER_BEFORE,
    find_master,
    growth,
    master_death,
    node_death,
    worker_death,
)
from recovery_bench.ettr import STORM, Storm, ettr, survive, victim
from recovery_bench.fault import Fault, result_of, run_fault
from recovery_bench.plot import bar_of, plot, words
from recovery_bench.recovery import NEW_WORLD, OLD_ENDED, sum_up
from recovery_bench.steps import Step, effective_share, longest_pause, parse_steps, rate, read_steps, standing

SECOND = 1_000_000_000
FAULTS = recovery.faults(STORM)


def reports(*lines: str) -> list[Report]:
    return [parse_report(line) for line in lines]


def every_second(first: int, count: int, done: int = 0, kept: int = 0) -> list[Step]:
    """Steps that are done at the seconds from `first` on, the first of them after `done` others."""
    return [Step((first + at) * SECOND, done + at + 1, kept) for at in range(count)]


def test_a_recovery_has_three_moments() -> None:
    heard = reports(
        "step-of-2 0 0 10 50", "step-of-2 1 0 11 50", "world-of-2 0 1 20 300", "world-of-2 1 1 21 400",
        "step-of-2 1 1 21 600", "step-of-2 0 1 20 500",
    )  # fmt: skip
    measured = sum_up(heard, {10: 150}, began_ns=100, world=2, survivors=[10], limit=9.0)
    assert measured.values == pytest.approx({OLD_ENDED: 50e-9, NEW_WORLD: 300e-9, "": 500e-9})
    assert not measured.unended


def test_the_fault_is_noticed_when_the_first_of_the_spared_has_ended_and_not_by_who_died_of_it() -> None:
    heard = reports("world-of-1 0 1 20 300", "step-of-1 0 1 20 400")
    measured = sum_up(heard, {10: 190, 11: 150, 12: 101}, began_ns=100, world=1, survivors=[10, 11], limit=9.0)
    assert measured.values[OLD_ENDED] == pytest.approx(50e-9)


def test_of_several_worlds_the_one_counts_that_did_the_step() -> None:
    heard = reports(
        "world-of-2 0 1 20 200", "world-of-2 1 1 21 200", "world-of-2 0 2 30 500", "world-of-2 1 2 31 600",
        "step-of-2 0 2 30 700", "step-of-2 1 2 31 700",
    )  # fmt: skip
    measured = sum_up(heard, {10: 150}, began_ns=100, world=2, survivors=[10], limit=9.0)
    assert measured.values[NEW_WORLD] == pytest.approx(500e-9)


def test_what_has_not_come_by_the_limit_takes_longer() -> None:
    measured = sum_up(reports("world-of-2 0 1 20 300"), {10: 150}, began_ns=100, world=2, survivors=[10], limit=9.0)
    assert measured.values == pytest.approx({OLD_ENDED: 50e-9, NEW_WORLD: 9.0, "": 9.0})
    assert measured.unended == {NEW_WORLD, ""}
    unnoticed = sum_up([], {}, began_ns=100, world=1, survivors=[10], limit=9.0)
    assert unnoticed.unended == {OLD_ENDED, NEW_WORLD, ""}


def test_steps_are_read_from_all_who_led_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "steps-20").write_text("51 50 700\n52 50 800\n53 5")
    (tmp_path / "steps-10").write_text("1 0 100\n2 0 200\n")
    (tmp_path / "checkpoint").write_text("50")
    assert [step.count for step in read_steps(tmp_path)] == [1, 2, 51, 52]
    assert parse_steps("53 5") == []


def test_a_pause_counts_that_began_before_or_goes_on_after() -> None:
    steps = [Step(at * SECOND, at, 0) for at in (1, 2, 5, 6)]
    assert longest_pause(steps, 3 * SECOND, 6 * SECOND) == pytest.approx(3.0)
    assert longest_pause(steps, 5 * SECOND, 16 * SECOND) == pytest.approx(10.0)
    assert longest_pause(steps, 5 * SECOND, 6 * SECOND) == pytest.approx(1.0)


def test_the_rate_is_that_of_the_steps_between_two_moments() -> None:
    assert rate(every_second(0, 100), 10 * SECOND, 20 * SECOND) == pytest.approx(1.0)
    assert rate(every_second(0, 5), 3 * SECOND + 1, 9 * SECOND) == 0.0


def test_steps_after_the_checkpoint_are_thrown_away_by_a_kill_until_somebody_steps_again() -> None:
    steps = [*every_second(0, 8, kept=5), *every_second(12, 3, done=5, kept=5)]
    assert standing(steps, [], 7 * SECOND) == 8
    assert standing(steps, [8 * SECOND], 9 * SECOND) == 5
    assert standing(steps, [8 * SECOND], 13 * SECOND) == 7
    assert standing([], [8 * SECOND], 9 * SECOND) == 0


def test_the_effective_share_counts_a_step_once_that_had_to_be_done_again() -> None:
    steps = [*every_second(1, 10, kept=5), *every_second(16, 10, done=5, kept=5)]
    assert effective_share(steps, [11 * SECOND], 5 * SECOND, 25 * SECOND, 1.0) == pytest.approx(50.0)


def test_a_run_that_never_came_back_keeps_what_its_checkpoint_held() -> None:
    assert effective_share(every_second(1, 50, kept=40), [51 * SECOND], 0, 100 * SECOND, 1.0) == pytest.approx(40.0)


def test_a_part_may_be_compared_within_its_own_run() -> None:
    samples = [Sample("ours", 1, {"": 2.0, ", before": 4.0}), Sample("theirs", 1, {"": 100.0, ", before": 100.0})]
    rows = {row.title: row for row in summarise(samples, "theirs", {("ours", ""): 0.5}, {"": ", before"})}
    assert (rows["ours"].ratio, rows["ours"].reached, rows["ours, before"].ratio) == (0.5, True, 0.04)
    lost = summarise([Sample("ours", 1, None)], "", {("ours", ""): 0.5}, {"": ", before"})[0]
    assert (lost.lost, lost.ratio, lost.reached) == (1, None, None)


def test_every_target_names_a_rival_of_its_fault() -> None:
    for fault in FAULTS:
        names = {rival.name for rival in fault.rivals}
        assert fault.few.keys() <= names
        assert {rival for rival, _ in fault.targets} <= names
        assert fault.baseline in {*names, KEEP_ALIVE, ""}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@dataclass(frozen=True)
class Scripted:
    """A rival that follows a script, see `scripted_launcher.py`."""

    name: str
    manner: str

    def absent(self) -> str | None:
        return None

    def start(self, room: Room, job: Job) -> int:
        assert job.node is not None
        return room.start([sys.executable, str(LAUNCHER), self.manner, str(job.node)], {})

    def start_parent(self, room: Room, job: Job) -> int:
        return self.start(room, job)

    def start_help(self, room: Room) -> int:
        raise Lost("it has no --help")

    def after_kill(self, room: Room, job: Job, killed: Report) -> None:
        raise AssertionError("a launcher does that")


LAUNCHER = Path(__file__).resolve().parent / "scripted_launcher.py"
LIMITS = Limits(start=60.0, recovery=60.0, settle=0.1)
IMPATIENT = replace(LIMITS, recovery=0.2)


def measured(fault: Callable[[Rival, Room, Limits], Measured], manner: str, limits: Limits = LIMITS) -> Measured:
    with Room() as room:
        return fault(Scripted("theirs", manner), room, limits)


@pytest.mark.parametrize(("fault", "manner"), [(worker_death, "restarts"), (node_death, "shrinks"), (growth, "grows")])
def test_each_fault_is_followed_to_the_first_step_of_the_new_world(
    fault: Callable[[Rival, Room, Limits], Measured], manner: str
) -> None:
    run = measured(fault, manner)
    assert not run.unended
    # When the old worker ended the driver saw; it may have been late for that.
    assert run.values[OLD_ENDED] > 0
    assert 0 < run.values[NEW_WORLD] < run.values[""]


def test_a_launcher_that_hangs_has_noticed_the_fault_and_is_cut_off() -> None:
    run = measured(worker_death, "hangs", replace(LIMITS, recovery=3.0))
    assert run.unended == {NEW_WORLD, ""}
    assert (run.values[""], run.note) == (3.0, "no step in 3 s")


def test_a_launcher_that_gives_up_has_lost_the_job() -> None:
    with pytest.raises(Lost, match="job ended without 'step-of-2'"):
        measured(worker_death, "gives-up")


def test_the_job_is_lost_with_the_node_that_hosts_the_meeting_place() -> None:
    with pytest.raises(Lost):
        measured(master_death, "restarts")


BEARS_THE_NAME = """
import os, signal
from dlrover_run.process_tree import tree
tree.name_process(tree.MASTER_NAME)
with open(os.environ["LAUNCH_BENCH_ROOM"] + "/reports", "w") as reports:
    reports.write(f"named 0 0 {os.getpid()} 1\\n")
signal.pause()
"""


def test_a_master_is_found_by_its_name() -> None:
    with Room() as room:
        room.patient = False
        Scripted("ours", "restarts").start(room, Job("steps.py", workers=1, node=0))
        assert find_master(room) is None
        room.start([sys.executable, "-c", BEARS_THE_NAME], {})
        room.wait_each_rank("named", 1, timeout=60.0, after_ns=0)
        assert find_master(room) == room.launchers[1].pid


STORMY = Storm(kills=1, interval=3.0, undisturbed=0.2)


def test_a_storm_is_weathered_by_who_comes_back_after_it() -> None:
    run = measured(survive(STORMY), "restarts")
    assert run.values[""] > 0
    assert run.note.startswith("1 kills, ")


def test_a_job_that_hangs_in_a_storm_is_cut_off_and_one_that_ends_is_lost_but_both_count() -> None:
    hung = measured(survive(STORMY), "hangs", IMPATIENT)
    assert hung.note.startswith("cut off: no step since kill 1")
    ended = measured(survive(replace(STORMY, interval=60.0)), "gives-up")
    assert ended.note == "job lost after kill 1"
    assert 0 <= hung.values[""] < 100
    assert 0 <= ended.values[""] < 100


def test_the_newest_worker_of_a_rank_is_killed_or_else_the_other_and_nobody_who_has_ended() -> None:
    heard = reports("started 0 0 10 1", "started 1 0 11 1", "started 0 1 20 2", "step-of-2 1 1 30 3")
    assert victim(heard, {10, 11, 20}, 0) == 20
    assert victim(heard, {11, 20}, 1) == 11
    assert victim(heard, {10, 11}, 0) == 11
    assert victim(heard, {10, 30}, 0) is None


@pytest.mark.torchrun
def test_the_real_worker_says_what_the_driver_waits_for() -> None:
    with Room() as room:
        run = worker_death(OURS_SPAWN, room, LIMITS)
        counts = [step.count for step in read_steps(room.directory)]
    assert not run.unended
    assert 0 < run.values[NEW_WORLD] < run.values[""]
    assert counts[:3] == [1, 2, 3]


def turns_of(fault: Fault, repetitions: int, absent: dict[str, str]) -> report.Result:
    return run_fault(fault, repetitions, LIMITS, absent)


def easy(fault: Fault) -> Fault:
    return replace(fault, measure=lambda rival, room, limits: Measured({"": 2.0}))


def test_a_rival_takes_as_many_turns_as_its_fault_allows_and_none_when_it_is_absent() -> None:
    fault = easy(next(fault for fault in DEATHS if fault.name == "node-death"))
    result = turns_of(fault, 5, {OURS_SPAWN.name: "not there", "of another fault": "no"})
    assert {row.title: len(row.samples) for row in result.rows} == {
        "dlrover-run forkserver": 3,
        "torchrun": 1,
        "torchrun, own store": 2,
    }
    assert result.absent == {OURS_SPAWN.name: "not there"}


def test_a_cut_is_measured_in_keep_alive_timeouts() -> None:
    result = turns_of(replace(easy(CUT), absent=lambda: None), 1, {})
    rows = {row.title: row for row in result.rows}
    assert rows[OURS_SPAWN.name].ratio == pytest.approx(2.0 / KEEP_ALIVE_TIMEOUT)
    assert rows[KEEP_ALIVE].ratio == 1.0


def test_a_fault_that_cannot_be_had_here_has_no_rows_and_says_why() -> None:
    result = turns_of(replace(CUT, absent=lambda: "this needs root"), 1, {})
    assert (result.rows, set(result.absent.values())) == ([], {"this needs root"})


MACHINE = machine.Machine("CPU", 2, 8.0, "6.1", "3.11", "2.13", (0.5, 0.25, 0.0), "2030-01-01T10:00:00", "abc")
NODE_DEATH = next(fault for fault in DEATHS if fault.name == "node-death")
MASTER_DEATH = next(fault for fault in DEATHS if fault.name == "master-death")


def came_back(rival: str, turn: int, seconds: float) -> Sample:
    return Sample(rival, turn, {OLD_ENDED: seconds / 4, NEW_WORLD: seconds / 2, "": seconds})


def hung(rival: str, turn: int) -> Sample:
    return Sample(rival, turn, {OLD_ENDED: 1.0, NEW_WORLD: 120.0, "": 120.0}, "hung", frozenset({NEW_WORLD, ""}))


def measurement(fault: Fault, *samples: Sample, date: str = MACHINE.date) -> record.Measurement:
    return record.Measurement(result_of(fault, samples, {}), replace(MACHINE, date=date), 5, quick=False)


def of_a_node() -> record.Measurement:
    ours = [came_back("dlrover-run spawn", turn, 1.0) for turn in (1, 2)]
    theirs = [came_back("torchrun, own store", 1, 40.0), hung("torchrun, own store", 2)]
    return measurement(NODE_DEATH, *ours, *theirs, hung("torchrun", 1), Sample("dlrover-run forkserver", 1, None))


def test_a_bar_is_the_median_of_those_that_came_back_and_says_how_many_did() -> None:
    result = of_a_node().result
    ours, store, plain, forks = (
        bar_of(name, result)
        for name in ("dlrover-run spawn", "torchrun, own store", "torchrun", "dlrover-run forkserver")
    )
    assert ours
    assert store
    assert plain
    assert forks
    assert (ours.middle, ours.parts) == (1.0, {OLD_ENDED: 0.25, NEW_WORLD: 0.5})
    assert (store.middle, store.came_back, store.limit) == (40.0, (40.0,), 120.0)
    assert (plain.middle, plain.parts) == (None, {OLD_ENDED: 1.0})
    assert bar_of("ft_launcher", result) is None
    assert [words(bar, result) for bar in (ours, store, plain, forks)] == [
        "1 s (<= 0.017x torchrun), 2/2 came back",
        "40 s, 1/2 came back",
        "> 120 s, 0/1 came back",
        "job lost, 0/1 came back",
    ]


def test_a_rival_that_lost_every_run_of_a_fault_with_parts_has_its_bar() -> None:
    result = measurement(MASTER_DEATH, Sample("dlrover-run spawn", 1, None), Sample("torchrun", 1, None)).result
    for name in ("dlrover-run spawn", "torchrun"):
        bar = bar_of(name, result)
        assert bar is not None
        assert words(bar, result) == "job lost, 0/1 came back"


def test_what_is_measured_again_takes_the_place_of_what_was_and_the_rest_stays(tmp_path: Path) -> None:
    pause = {"": 0.03, PAUSE_BEFORE: 0.03, WORKER_BEFORE: 1.0, WORKER_AFTER: 2.0}
    master = measurement(MASTER_DEATH, Sample("dlrover-run spawn", 1, pause), date="2030-01-02T10:00:00")
    path = tmp_path / "recovery.json"
    order = [fault.name for fault in FAULTS]
    assert record.read(path) == []
    path.write_text(record.as_json(record.merge([], {"node-death": of_a_node()}, order)))
    merged = record.merge(record.read(path), {"master-death": master}, order)
    assert merged == [of_a_node(), master], "in the order of the faults, with every sample as it was"
    again = measurement(NODE_DEATH, came_back("torchrun", 1, 3.0), date="2030-01-03T10:00:00")
    assert record.merge(merged, {"node-death": again}, order) == [again, master]
    assert record.merge(merged, {}, ["master-death"]) == [master]
    text = record.markdown("Recovering", merged)
    assert [line.split("; ")[2] for line in text.splitlines() if line.startswith("CPU, ")] == [
        "2030-01-01T10:00:00",
        "2030-01-02T10:00:00",
    ]
    assert "a worker killed after it | 2.000 s | 2.000 s | 2.000 s | 0/1 | 2.00 | <= 1.5 | no" in text


def test_an_infinite_ratio_survives_json() -> None:
    result = of_a_node().result
    forks = next(row for row in result.rows if row.title.startswith("dlrover-run forkserver"))
    assert forks.ratio == math.inf
    assert report.from_record(json.loads(json.dumps(report.as_record(result), allow_nan=False))) == result


def test_a_file_that_is_no_result_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recovery.json").write_text('{"cases": [{"name": "kill"}]}')
    with pytest.raises(SystemExit):
        recovery.main(["--only", "ettr", "--output", str(tmp_path)])
    assert "is no result of this benchmark" in capsys.readouterr().err


def test_the_picture_shows_every_kind_of_outcome(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    share = [Sample("torchrun", 1, {"": 20.0}, "job lost after kill 2"), Sample("torchrun, own store", 1, None)]
    alone = measurement(ettr(STORM), *share)
    plot([of_a_node().result, alone.result], record.caption([of_a_node(), alone]), tmp_path / "recovery.png")
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
