"""`benchmarks/tf_recovery.py`: its sums, its supervisor, and the faults under plain processes with a script that only
pretends to train. Nothing here starts TensorFlow, and no time is asserted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import tf_recovery
from comparison.lost import Lost
from launch_bench.case import Limits, Measured
from launch_bench.room import Report, Room, parse_report
from recovery_bench.fault import run_fault
from tf_recovery_bench.faults import chief_death, faults, newest, planned_change, server_death
from tf_recovery_bench.rivals import STRATEGY, PlainProcesses, Rival, TfPsRun, furnish, roles_of
from tf_recovery_bench.supervisor import config_of, tasks_of
from tf_recovery_bench.way_back import OF_THE_WORKER, steps_lost, sum_up

PRETENDER = Path(__file__).parent / "workers" / "pretend_training.py"
LIMITS = Limits(start=60.0, recovery=60.0, settle=0.1)
BOTH = ("chief", "worker")


def reports(*lines: str) -> list[Report]:
    return [parse_report(line) for line in lines]


FAULT = reports(
    "chief-session 0 0 10 50", "chief-step 0 7 10 80", "worker-step 0 8 11 90", "chief-step 0 9 10 101",
    "chief-session 0 0 20 300", "chief-step 0 6 20 500", "worker-session 0 0 21 600", "worker-step 0 7 21 800",
)  # fmt: skip


def test_a_fault_ends_with_the_first_step_of_the_next_session() -> None:
    measured = sum_up(FAULT, BOTH, began_ns=100, limit=9.0, planned=False)
    assert measured.values == pytest.approx({"": 400e-9, OF_THE_WORKER: 700e-9})
    assert (measured.unended, measured.note) == (frozenset(), "3 steps lost")


def test_a_planned_change_begins_with_the_last_step_before_it_and_loses_what_was_done_meanwhile_too() -> None:
    measured = sum_up(FAULT, BOTH, began_ns=100, limit=9.0, planned=True)
    assert measured.values == pytest.approx({"": 399e-9, OF_THE_WORKER: 710e-9})
    assert measured.note == "4 steps lost"


def test_a_session_without_a_step_takes_longer_than_the_limit() -> None:
    measured = sum_up(FAULT[:5], BOTH, began_ns=100, limit=9.0, planned=False)
    assert measured.values == {"": 9.0, OF_THE_WORKER: 9.0}
    assert (measured.unended, measured.note) == ({"", OF_THE_WORKER}, "no step in 9 s")


def test_a_worker_that_does_not_come_back_is_no_way_for_the_chief_to_be_late() -> None:
    measured = sum_up(FAULT[:6], BOTH, began_ns=100, limit=9.0, planned=False)
    assert measured.values == pytest.approx({"": 400e-9, OF_THE_WORKER: 9.0})
    assert (measured.unended, measured.note) == ({OF_THE_WORKER}, "3 steps lost")


def test_a_chief_that_goes_on_in_the_live_model_has_lost_nothing() -> None:
    live = reports(
        "chief-step 0 7 10 80", "worker-step 0 9 11 110", "chief-session 0 0 20 300", "worker-step 0 11 11 310",
        "chief-step 0 12 20 320",
    )  # fmt: skip
    assert steps_lost(live, 100, planned=False) == 0
    assert steps_lost(live[:2], 100, planned=False) is None


def test_a_new_worker_may_be_ahead_of_the_word_of_its_chief() -> None:
    ahead = reports(
        "chief-step 0 7 10 80", "chief-step 0 8 10 110", "worker-step 0 9 21 290", "chief-session 0 0 20 300",
        "chief-step 0 10 20 320",
    )  # fmt: skip
    assert steps_lost(ahead, 100, planned=True) == 0
    assert steps_lost(ahead, 100, planned=False) == 0


def test_every_target_names_a_rival_of_its_fault_and_every_baseline_is_one() -> None:
    everything = faults("python")
    for fault in everything:
        names = [rival.name for rival in fault.rivals]
        assert len(set(names)) == len(names)
        assert fault.baseline in names
        assert {rival for rival, _ in fault.targets} <= set(names)
        # A table compares what trains in the same way.
        assert len({roles_of(rival.script) for rival in fault.rivals}) == 1
    assert len({fault.name for fault in everything}) == len(everything)


def test_each_process_is_told_the_same_cluster_and_itself() -> None:
    ports = {task: 4000 + at for at, task in enumerate(tasks_of(2))}
    assert json.loads(config_of(("ps", 1), ports)) == {
        "cluster": {
            "ps": ["127.0.0.1:4000", "127.0.0.1:4001"],
            "chief": ["127.0.0.1:4002"],
            "worker": ["127.0.0.1:4003"],
        },
        "task": {"type": "ps", "index": 1},
    }


def test_the_shell_of_the_caller_does_not_steer_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("STOP_FILE", "/dev/null")
    with Room() as room:
        furnish(room)
        assert {"TF_CONFIG", "STOP_FILE"}.isdisjoint(room.environment)
        assert room.environment["MODEL_DIR"].startswith(str(room.directory))


def printable(again: str = "all", script: str = str(PRETENDER)) -> PlainProcesses:
    return PlainProcesses("plain processes", sys.executable, script, again)


def measured(fault: Callable[[Rival, Room, Limits], Measured], rival: Rival) -> tuple[Measured, list[Report]]:
    with Room() as room:
        found = fault(rival, room, LIMITS)
        return found, room.reports


def processes(heard: list[Report], role: str) -> int:
    return len({report.pid for report in heard if report.event == f"{role}-begun"})


def test_plain_processes_are_all_started_again_whoever_dies() -> None:
    run, heard = measured(server_death, printable())
    assert not run.unended
    assert run.values.keys() == {"", OF_THE_WORKER}
    assert all(value > 0 for value in run.values.values())
    assert (processes(heard, "chief"), processes(heard, "worker")) == (2, 2)
    run, heard = measured(chief_death, printable())
    assert not run.unended
    assert processes(heard, "chief") == 2


def test_where_only_the_dead_are_started_again_the_others_stay() -> None:
    run, heard = measured(chief_death, printable("one"))
    assert not run.unended
    assert (processes(heard, "chief"), processes(heard, "worker"), processes(heard, "ps")) == (2, 1, 2)


def test_plain_processes_are_stopped_by_a_file_and_started_with_one_server_more() -> None:
    run, heard = measured(planned_change, printable())
    assert (run.unended, run.note) == (frozenset(), "0 steps lost")
    assert [report.rank for report in heard if report.event == "chief-servers"] == [1, 2]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_run() -> None:
    _, heard = measured(server_death, printable())
    # An orphan that has ended may wait for a while until init reaps it.
    assert {pid for pid in {report.pid for report in heard} if is_alive(pid)} == set()


def test_nobody_is_killed_who_is_not_of_this_run() -> None:
    with Room() as room:
        room.patient = False
        room.start([sys.executable, "-c", "import signal; signal.pause()"], {})
        room.reports.append(Report("ps-begun", 1, 0, os.getpid(), 1))
        with pytest.raises(Lost, match="ps 1 is not among the processes of this run"):
            newest(room, "ps", 1)


def test_a_launcher_that_refuses_the_job_has_lost_the_run() -> None:
    with pytest.raises(Lost, match="job ended"):
        measured(server_death, TfPsRun("ours", "/nowhere/python"))


def test_the_turns_of_all_rivals_are_compared_in_pairs() -> None:
    def easy(rival: Rival, room: Room, limits: Limits) -> Measured:
        return Measured({"": 10.0 if rival.name == "plain processes" else 2.0}, "0 steps lost")

    result = run_fault(replace(faults("python")[0], measure=easy), 2, LIMITS, {})
    rows = {row.title: row for row in result.rows}
    assert (rows["tf-ps-run forkserver"].ratio, rows["tf-ps-run forkserver"].reached) == (0.2, True)
    assert rows["tf-ps-run forkserver"].notes == "0 steps lost (2x)"


def test_without_tensorflow_nobody_takes_part_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tf_recovery.main(["--python", "/nowhere/python", "--output", str(tmp_path / "results")])
    assert "nobody can take part" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_strategy_has_steps_of_the_chief_alone() -> None:
    assert roles_of(STRATEGY) == ("chief",)
