"""The arithmetic of `benchmarks/gpu`: phases, plans, tables, what is kept of a lost run. None needs a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.harness import WAIT
from support.nccl_ras import RasAnswers, RasServer, generated_job

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from core import report
from core.ratios import Late
from core.report import Machine
from core.run import Report
from core.series import Kept
from gpu import command, fixtures, hangs, kills, memory, pauses, picture, setting, tables
from gpu.phases import PHASES, recovery_of
from gpu.plan import (
    HANGS,
    INNOCENTS,
    KILLS,
    MEMORY,
    NO_TIME,
    PARTS,
    PAUSES,
    Key,
    Planned,
    Record,
    newest,
    plan_of,
    steps_of,
)
from gpu.setting import REHEARSAL, Clock, Setting
from stall_matrix import kinds
from stall_matrix.trial import Trial, trial_of

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("CPU", 2, 8.0, "6.1", "3.11", "2.13", (0.5, 0.25, 0.0), "2030-01-01T10:00:00", "abc")
SECOND = 1_000_000_000
GPU = "NVIDIA X, 80 GiB, driver 1, CUDA 13.0, NCCL 2.28.9"
KILLED = 100 * SECOND


def reports(pid: int, rank: int, *seconds: float | None) -> list[Report]:
    """The reports of a process so many seconds after the kill, phase by phase."""
    return [
        Report(phase, rank, 1, pid, KILLED + round(at * SECOND))
        for phase, at in zip(PHASES, seconds, strict=True)
        if at is not None
    ]


def test_a_phase_ends_with_its_last_rank_and_all_phases_are_the_whole() -> None:
    before = reports(1, 0, *([-5.0] * 5)) + reports(2, 1, *([-5.0] * 5))
    after = reports(3, 0, 0.5, 4.0, 6.0, 9.0, 9.5) + reports(4, 1, 0.25, 5.0, 5.5, 9.0, 10.0)
    found = recovery_of([*before, *after], KILLED, 2, (1, 2))
    assert found is not None
    assert found.total == 10.0
    assert found.phases == pytest.approx([0.5, 4.5, 1.0, 3.0, 1.0])
    assert sum(found.phases) == pytest.approx(found.total)


def test_without_a_step_of_all_ranks_there_is_no_recovery() -> None:
    assert recovery_of(reports(3, 0, 0.5, 4.0, 6.0, 9.0, 9.5), KILLED, 2) is None
    # A world that failed before its step does not count.
    failed = reports(3, 0, 0.5, 1.0, 2.0, None, None) + reports(4, 1, 0.5, 1.0, 2.0, None, None)
    made = reports(5, 0, 3.0, 4.0, 5.0, 6.0, 7.0) + reports(6, 1, 3.0, 4.0, 5.0, 6.0, 7.0)
    found = recovery_of([*failed, *made], KILLED, 2)
    assert found is not None
    assert found.phases == pytest.approx([3.0, 1.0, 1.0, 1.0, 1.0])


def test_a_survivor_imports_nothing_and_takes_part_in_the_communicator_and_the_step() -> None:
    survivor = reports(1, 0, None, None, None, 7.5, 8.0)
    newcomer = reports(3, 1, 0.5, 1.0, 6.0, 7.0, 7.75)
    found = recovery_of([*reports(1, 0, *([-5.0] * 5)), *survivor, *newcomer], KILLED, 2, (1, 2))
    assert found is not None
    assert found.phases == pytest.approx([0.5, 0.5, 5.0, 1.5, 0.5])


def test_what_the_survivor_did_before_a_newcomer_is_no_phase_of_its_own() -> None:
    survivor = reports(1, 0, 0.1, 0.1, 99.0, 1.0, 2.0)
    found = recovery_of([*survivor, *reports(3, 1, 0.5, 0.5, 0.75, 1.0, 2.0)], KILLED, 2, (1,))
    assert found is not None
    assert found.phases == pytest.approx([0.5, 0.0, 0.25, 0.25, 1.0])


STEPS = ([(KILLS, "a")], [(KILLS, "b")], [(HANGS, "c"), (HANGS, "d")], [(HANGS, "e"), (INNOCENTS, "f")])
TIMES = dict.fromkeys((KILLS, HANGS, INNOCENTS), (80.0, 30.0))


def test_runs_that_do_not_disturb_each_other_are_one_step() -> None:
    plan = plan_of(STEPS, TIMES)
    assert [[one.key.case for one in step] for step in steps_of(plan)] == [["a"], ["b"], ["c", "d"], ["e", "f"]]
    assert {one.limit for one in plan} == {80.0}


def test_a_case_may_have_times_of_its_own() -> None:
    plan = plan_of(STEPS, {**TIMES, "hangs/d": (150.0, 115.0)}, ["hangs"])
    assert [(one.key.case, one.limit, one.least) for one in plan] == [
        ("c", 80.0, 30.0),
        ("d", 150.0, 115.0),
        ("e", 80.0, 30.0),
    ]


def test_a_part_or_a_case_is_chosen_and_repeated() -> None:
    plan = plan_of(STEPS, TIMES, ["hangs/d", "kills"], 2)
    assert [one.key for one in plan] == [
        Key(KILLS, "a", 1),
        Key(KILLS, "b", 1),
        Key(HANGS, "d", 1),
        Key(KILLS, "a", 2),
        Key(KILLS, "b", 2),
        Key(HANGS, "d", 2),
    ]
    with pytest.raises(ValueError, match="hangs/a"):
        plan_of(STEPS, TIMES, ["hangs/a"])


def test_what_was_planned_and_has_no_record_did_not_fit() -> None:
    plan = plan_of(STEPS, TIMES)
    kept = [Kept(Record(Key(HANGS, "d", 1), GPU), MACHINE), Kept(Record(Key(KILLS, "b", 1), GPU, lost="x"), MACHINE)]
    found = newest(kept, plan)
    assert [one.key.case for one in found] == ["a", "b", "c", "d", "e", "f"]
    assert [one.why_empty for one in found] == [f"not run: {NO_TIME}", "x", *[f"not run: {NO_TIME}"], "", *[
        f"not run: {NO_TIME}"
    ] * 2]  # fmt: skip
    assert {one.device for one in found} == {GPU}


def killed(case: str, total: float | None, turn: int = 1, **figures: float) -> Kept[Record]:
    phases = dict.fromkeys(("start", "import", "device", "communicator", "first step"), 1.0)
    record = Record(Key(KILLS, case, turn), GPU, {"total": total, **phases, **figures})
    return Kept(record if total is not None else replace(record, figures={}, lost="lost: no step"), MACHINE)


def test_kills_have_the_median_of_each_time_and_the_ratio_to_torchrun() -> None:
    kept = [killed("torchrun", 14.0), killed("forkserver", 8.0), killed("forkserver", 6.0, 2), killed("spawn", None)]
    rows = {row[0]: row for row in tables.kill_rows([one.run for one in kept])}
    assert rows["torchrun"][1:3] == ["14.00 s", ""]
    forkserver = rows[kills.RIVALS["forkserver"].launcher.name]
    assert forkserver[1:4] == ["7.00 s", "0.50", "1.00 s"]
    assert rows[kills.RIVALS["spawn"].launcher.name][1:] == ["-", "", *["-"] * 5, "lost: no step"]


def test_a_warm_worker_that_was_not_ready_is_said() -> None:
    name = kills.RIVALS["warm"].launcher.name
    ready = {row[0]: row for row in tables.kill_rows([killed("warm", 1.0, ready=8.0).run])}
    assert ready[name][-1] == "warm workers were ready after 8.0 s"
    late = {row[0]: row for row in tables.kill_rows([killed("warm", 9.0).run])}
    assert late[name][-1] == "no warm worker was ready before the kill"


def trial(case: str, seconds: float | None, named: tuple[int, ...] = (1,), **fields: Any) -> Trial:
    kind = kinds.Key(hangs.CASES[case].fault, 2, 1, 0.0, kinds.DEVICE)
    silent = trial_of(kind, 1, 100.0, [], 5.0, awaited="all_reduce 121")
    found = replace(silent, seconds=seconds, named=named, code="never_entered", operation="all_reduce 121")
    return replace(found, **fields)


def row(record: Record) -> list[str]:
    return tables.hang_row(record)


def test_a_hang_says_who_where_and_in_which_operation() -> None:
    key = Key(HANGS, "sleep", 1)
    right = row(hangs.record_of(key, GPU, trial("sleep", 7.25, function="sleep")))
    assert right[1:] == ["7.25 s", "1", "yes", "yes, sleep", "all_reduce 121", "yes", "never_entered"]
    wrong = row(hangs.record_of(key, GPU, trial("sleep", 7.25, (0,), operation="all_reduce 120", wrong_reports=1)))
    assert wrong[2:5] == ["0", "no", "no"]
    assert wrong[6:] == ["no", "never_entered; the others wait in all_reduce 121; a report before the fault"]
    never = row(hangs.record_of(key, GPU, trial("sleep", None, ())))
    assert (never[1], never[-1]) == ("never", "others wait in: all_reduce 121")
    stopped = row(hangs.record_of(Key(HANGS, "stop", 1), GPU, trial("stop", 5.0)))
    assert stopped[4] == "no stack"
    assert row(Record(key, GPU, lost="lost: no fault"))[1:] == [*["-"] * 6, "lost: no fault"]


def test_an_innocent_job_is_silent_or_its_reports_are_shown() -> None:
    key = Key(INNOCENTS, "compile", 1)
    kind = kinds.Key("compilation", 2, 1, 20.0, kinds.DEVICE)
    silent = hangs.record_of(key, GPU, trial_of(kind, 1, math.inf, [], 30.0), 21.25)
    assert tables.innocent_row(silent)[1:] == ["21 s", "30 s", "yes", ""]
    loud = replace(silent, figures={**silent.figures, "false reports": 1.0}, words={"reports": "rank 1 sleeps"})
    assert tables.innocent_row(loud)[3:] == ["no: 1", "rank 1 sleeps"]


def test_the_pause_is_that_of_the_saves_after_the_first_and_its_target_follows_from_the_copy() -> None:
    printed = """
NCCL version 2.28.9
pause save 5.0
pause save 0.3
pause save 0.1
pause copy 0.5
pause copy 0.06
pause copy 0.10
pause pageable 4.0
pause restore 1.5
pause same 0
"""
    figures = pauses.figures_of(pauses.pauses_of(printed), 4.0)
    assert figures == {
        "GiB": 4.0,
        "first save": 5.0,
        "save": pytest.approx(0.2),
        "copy": pytest.approx(0.08),
        "pageable": 4.0,
        "restore": 1.5,
        "target": pytest.approx(0.24),
    }
    record = Record(Key(PAUSES, "4 GiB", 1), GPU, figures)
    assert pauses.row(record)[:3] == ["4 GiB", "5.000 s", "0.200 s"]
    assert pauses.row(record)[7] == "yes"
    assert pauses.row(replace(record, figures={**figures, "save": 0.25}))[7] == "no"
    assert len(pauses.row(record)) == len(pauses.row(replace(record, lost="lost: x"))) == len(pauses.HEAD)


def used(*samples: tuple[float, int]) -> list[memory.Sample]:
    return [memory.Sample(KILLED + round(at * SECOND), used) for at, used in samples]


def memory_reports(*found: tuple[str, float]) -> list[Report]:
    return [Report(event, 0, 1, 7, KILLED + round(at * SECOND)) for event, at in found]


def test_the_memory_is_free_once_less_than_half_of_it_is_in_use() -> None:
    samples = used((-1.0, 2), (-0.01, 60), (0.5, 60), (1.0, 29), (1.5, 60))
    assert memory.freed_ns(samples, KILLED) == KILLED + SECOND
    assert memory.freed_ns(used((-0.01, 60), (0.5, 31)), KILLED) is None
    assert memory.freed_ns([], KILLED) is None


def test_a_worker_that_starts_before_the_memory_is_free_is_early() -> None:
    key = Key(MEMORY, "forkserver", 1)
    samples = used((-0.01, 60), (0.5, 60), (1.0, 2), (3.0, 60))
    before = memory_reports(("started", -9.0), ("held", -5.0))

    def found(started: float, ended: float | None = 0.9, with_nvml: bool = True, *more: tuple[str, float]) -> Record:
        ended_ns = None if ended is None else KILLED + round(ended * SECOND)
        later = memory_reports(("started", started), ("held", 3.0), *more)
        return memory.record_of(key, GPU, [*before, *later], ended_ns, samples if with_nvml else [], KILLED)

    free = memory.row(found(1.2))
    assert free == [kills.RIVALS["forkserver"].launcher.name, "1.20 s", "0.90 s", "1.00 s", "3.00 s", "no", ""]
    early = memory.row(found(0.5, None, True, ("no-memory", 0.7)))
    assert early[1:] == ["0.50 s", "-", "1.00 s", "3.00 s", "yes", "1 of its starts failed for want of memory"]
    # Nothing is sampled in a rehearsal.
    assert [memory.row(found(at, 0.9, False))[5] for at in (0.8, 1.0)] == ["yes", "no"]
    assert len(memory.row(replace(found(1.2), lost="lost: x"))) == len(memory.HEAD)


def test_each_part_has_cases_times_a_runner_and_a_table() -> None:
    planned = {part for step in command.STEPS for part, _ in step}
    timed = {name.partition("/")[0] for name in command.TIMES}
    assert {*PARTS} == planned == timed == {*command.RUNNERS} == {*tables.SECTIONS}
    every = tables.tables([killed("spawn", 9.0)], plan_of(command.STEPS, command.TIMES))
    assert {one.name for one in every} == {*PARTS}
    for one in every:
        assert {len(cells) for cells in one.rows} == {len(one.head)}, one.name
    # What is planned takes six minutes at most, so no run may be longer than all of them.
    assert max(limit for limit, _ in command.TIMES.values()) < command.LIMIT


def test_each_case_is_one_of_the_worker_and_each_phase_is_reported() -> None:
    planned = [(part, case) for step in command.STEPS for part, case in step if part in (HANGS, INNOCENTS)]
    assert sorted(case for _, case in planned) == sorted(hangs.CASES)
    for part, case in planned:
        fault = kinds.BY_NAME[hangs.CASES[case].fault]
        assert fault.outside is None
        assert not fault.cuts
        assert fault.innocent == (part == INNOCENTS)
        assert kinds.DEVICE in fault.shapes
    for script in ("gpu_steps.py", "gpu_surviving.py"):
        text = (ROOT / "benchmarks/workers" / script).read_text()
        assert all(f'report("{phase}"' in text for phase in PHASES), script


def test_the_gpu_has_the_functions_of_the_stand_in() -> None:
    names = ("kernel", "collective", "synchronize", "ALL_REDUCE", "ALL_GATHER", "BYTES")
    for module in ("device.py", "cuda_device.py"):
        text = (ROOT / "benchmarks/workers" / module).read_text()
        for name in names:
            assert f"def {name}(" in text or f"{name} = " in text or f"{name} = range" in text or (
                name in text and "= range(5)" in text
            ), (module, name)  # fmt: skip


def keep(run: Callable[[Key], Record]) -> Callable[[Key, Setting, Clock, Path], Record]:
    return lambda key, setting, clock, recorded: run(key)


def late(key: Key) -> Record:
    raise Late("no step of all ranks in 45 s")


def test_a_run_that_does_not_fit_is_not_begun_and_a_lost_one_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned = Planned(Key(KILLS, "spawn", 1), 80.0, 30.0, 1)
    where = Setting(False, GPU)
    monkeypatch.setattr(command, "RUNNERS", {KILLS: keep(late)})
    now = time.monotonic()
    assert command.measure(planned, where, now, tmp_path).why_empty == f"not run: {NO_TIME}"
    lost = command.measure(planned, where, now + 1000.0, tmp_path)
    assert lost.why_empty == "lost: no step of all ranks in 45 s"
    assert command.outcome(lost) == "kills/spawn: lost: no step of all ranks in 45 s"


def rehearse(tmp_path: Path, *more: str) -> str:
    assert command.main(["--rehearse", f"--output={tmp_path}", "--only", "kills", *more]) == 0
    return (tmp_path / "rehearsal.md").read_text()


def test_a_rehearsal_says_so_and_repeats_only_what_has_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[str] = []
    whole: list[int] = []

    def run(key: Key) -> Record:
        began.append(key.case)
        if (tmp_path / "rehearsal.json").exists():
            whole.append(len(msgspec.json.decode((tmp_path / "rehearsal.json").read_bytes())["tables"][0]["rows"]))
        if key.case == "torchrun" and began.count("torchrun") == 1:
            raise Late("never")
        figures = dict.fromkeys(("total", "start", "import", "device", "communicator", "first step"), 1.0)
        return Record(key, REHEARSAL, figures)

    monkeypatch.setattr(command, "RUNNERS", {KILLS: keep(run)})
    text = rehearse(tmp_path)
    assert text.startswith(f"# {tables.TITLE}: {REHEARSAL}\n")
    assert "lost: never" in text
    # What was planned is in the table from the first run on.
    assert set(whole) == {len(kills.RIVALS)}
    assert began == list(kills.RIVALS)
    again = rehearse(tmp_path, "--lanes=1")
    assert began == [*kills.RIVALS, "torchrun"]
    assert "lost" not in again
    assert REHEARSAL in report.markdown(report.read(tmp_path / "rehearsal.json"))
    assert rehearse(tmp_path, "--redraw") == again
    rehearse(tmp_path, "--fresh", "--limit=0.001")
    assert (tmp_path / "rehearsal.md").read_text() == again, "a limit of nothing leaves what was published"


def test_without_a_gpu_it_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setting, "PROBE", "assert False, 'torch sees no GPU'")
    assert command.main([f"--output={tmp_path}"]) == 2
    assert "No GPU: AssertionError: torch sees no GPU. --rehearse needs none." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_a_program_that_needs_no_installation(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments, folder in (([str(ROOT / "benchmarks/gpu")], tmp_path), (["-m", "gpu"], ROOT / "benchmarks")):
        shown = subprocess.run(
            [sys.executable, *arguments, "--help"], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert shown.returncode == 0, shown.stderr
        assert "--rehearse" in shown.stdout


def test_what_ras_answers_is_recorded_with_what_was_asked() -> None:
    job = generated_job(2, lambda group, rank: {"AllReduce": 121 - rank})
    with RasServer(RasAnswers(lambda: job)) as server:
        text = fixtures.ask_ras(server.address, fixtures.RAS_COMMANDS["ras.txt"]).decode()
        assert text.startswith("> CLIENT PROTOCOL 2\nSERVER PROTOCOL 2\n> TIMEOUT 2\n")
        assert "Job summary" in text.partition("> VERBOSE STATUS\n")[2]
        as_json = fixtures.ask_ras(server.address, fixtures.RAS_COMMANDS["ras.json"])
        assert msgspec.json.decode(as_json.partition(b"> VERBOSE STATUS\n")[2])


def test_the_fixtures_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "raw" / "sleep").mkdir(parents=True)
    (tmp_path / "raw" / "sleep" / "ras.txt").write_text("one")
    fixtures.pack(tmp_path / "raw", tmp_path / "recorded.tar.gz")
    fixtures.pack(tmp_path / "absent", tmp_path / "none.tar.gz")
    with tarfile.open(tmp_path / "recorded.tar.gz") as packed:
        assert "recorded/sleep/ras.txt" in packed.getnames()
    assert not (tmp_path / "none.tar.gz").exists()


def test_the_threads_of_a_process_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures, "THREADS_OVER", 0.01)
    text = fixtures.threads_text([os.getpid()])
    assert text.startswith(f"rank 0, process {os.getpid()}, ")
    assert " main\n" in text


def test_the_picture_has_a_panel_for_what_has_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, which belongs to no environment of the tests."""
    panels: list[str] = []
    monkeypatch.setattr(picture, "_kills", lambda axes, records: panels.append(f"{len(records)} kills"))
    monkeypatch.setattr(picture, "_pauses", lambda axes, records: panels.append(f"{len(records)} pauses"))

    class Anything:
        """Axes, a drawing, and the library."""

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments, **options: None

    def subplots(rows: int, **options: Any) -> Any:
        return Anything(), SimpleNamespace(flat=[Anything()] * rows)

    library: Any = Anything()
    library.pyplot = Anything()
    library.pyplot.subplots = subplots
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", library.pyplot)
    picture.draw([killed("spawn", None).run], tmp_path / "picture.png", "")
    assert panels == []
    pause = Record(Key(PAUSES, "4 GiB", 1), GPU, {"save": 0.2, "copy": 0.08, "target": 0.24})
    picture.draw([killed("spawn", 9.0).run, killed("torchrun", 14.0).run, pause], tmp_path / "picture.png", REHEARSAL)
    assert panels == ["2 kills", "1 pauses"]


def run_script(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "benchmarks/gpu/run.sh"), "--help"]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT)


@pytest.mark.torchrun
def test_a_lent_machine_keeps_the_console_or_says_what_it_lacks(tmp_path: Path) -> None:
    done = run_script(tmp_path, sys.executable)
    assert "--rehearse" in done.stdout, done.stderr
    assert (tmp_path / "out" / "console.log").read_text() == done.stdout
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    lacking = run_script(tmp_path, str(bare))
    assert lacking.returncode == 1
    assert "missing: torch, msgspec" in lacking.stderr
