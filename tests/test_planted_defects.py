"""Planted defects of the agent, each with a test of `make test` that finds it.

The simulation plants its own defects in decisions. Code that talks to the kernel is not simulated, so its defects are
planted in a copy of the packages, and the test that is named here runs against that copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.harness import only_long

from dlrover_run.processes import tree

ROOT = Path(__file__).resolve().parents[1]
RUN_TIMEOUT = 300.0
"""Timeout in seconds of the test that is to find a defect. A run that reaches it hangs, and is ended."""

MAX_HEALTHY_RUN = RUN_TIMEOUT / 2
"""Maximum seconds of the same test without a defect: only because this is much less, a run that reaches RUN_TIMEOUT
shows that a job hangs."""

TEST_TIMEOUT = 90
"""Timeout of the test itself with one set of parameters: many defects make a job hang."""


@dataclass(frozen=True)
class Defect:
    """A text in a source file, its replacement, and a test that must fail because of it."""

    file: str
    right: str
    wrong: str
    found_by: str


DEFECTS = {
    "a worker that does not leave its last group is asked to end": Defect(
        "dlrover_run/features/survivors/survivors.py",
        "worker.stop(signal.SIGKILL, 0)",
        "pass",
        "test_survivor_jobs.py::test_a_worker_that_does_not_leave_its_last_group_is_replaced_in_time_and_without_a_charge",
    ),
    "all workers restart with each round": Defect(
        "dlrover_run/features/survivors/survivors.py",
        "if not is_same and len(replaced) ==",
        "if not is_same and True or len(replaced) ==",
        "test_survivor_jobs.py::test_a_failure_replaces_the_dead_worker_and_the_others_keep_their_processes",
    ),
    "a look at the descriptors of a worker leaves copies open": Defect(
        "dlrover_run/training/reconfigurable_group.py",
        "            os.close(copy)\n",
        "",
        "test_gloo_connections.py::test_the_connections_of_a_group_end_and_no_others",
    ),
    "a reader of a progress page takes a record that is being written": Defect(
        "dlrover_run/observe/page.py",
        "if len(checksum) < _CHECKSUM.size or _CHECKSUM.pack(zlib.crc32(record)) != checksum:",
        "if len(checksum) < _CHECKSUM.size:",
        "test_progress_interleavings.py::test_no_interleaving_of_stores_and_loads_shows_a_torn_record",
    ),
    "a writer of a progress page overwrites its last record": Defect(
        "dlrover_run/observe/page.py",
        "start = self._area + (number & 1) * SLOT_BYTES",
        "start = self._area",
        "test_progress_interleavings.py::test_the_last_complete_record_is_read_between_any_two_stores",
    ),
    "work that a worker has kept counts as lost": Defect(
        "dlrover_run/events/ledger.py",
        "            case WorkerKept():\n                self._at_stake = None\n",
        "",
        "test_event_ledger.py::test_the_seconds_of_each_phase",
    ),
    "a checkpoint leaves memory before it is on the disk": Defect(
        "dlrover_run/features/checkpoints/held.py",
        "return [each.number for files in old for each in files if each.written]",
        "return [each.number for files in old for each in files]",
        "test_checkpoint_memory.py::test_no_step_leaves_memory_before_it_is_on_the_disk",
    ),
    "a save to the disk leaves an earlier state of its step in memory": Defect(
        "dlrover_run/training/checkpoint.py",
        "self._memory.forget(self._place, file)",
        "pass",
        "test_held_checkpoints.py::test_a_save_to_the_disk_is_not_overwritten_by_an_earlier_state_of_its_step",
    ),
    "the agent ends before checkpoints in memory are on the disk": Defect(
        "dlrover_run/features/checkpoints/node.py",
        "await self._memory.drain(self._drain_timeout)",
        "await self._memory.kill()",
        "test_held_checkpoint_jobs.py::test_all_is_on_the_disk_when_a_job_ends",
    ),
    "another node keeps what a lost node had not written": Defect(
        "dlrover_run/features/checkpoints/copies.py",
        "self._memory.adopt(received)",
        "pass",
        "test_held_copies.py::test_the_other_node_writes_what_a_lost_node_had_not_written",
    ),
    "a task starts where another one still runs": Defect(
        "dlrover_run/agent/reconcile.py",
        "if task.place not in occupied:",
        "if True:",
        "test_reconcile.py::test_what_follows_from_what_is_desired_and_what_is_here",
    ),
    "servers end before the tasks that use them": Defect(
        "dlrover_run/agent/reconcile.py",
        "if not (any_served and state.serves)]",
        "if True]",
        "test_reconcile.py::test_at_the_end_all_that_runs_gets_a_signal_once_and_servers_get_it_last",
    ),
    "a task is stopped again and again": Defect(
        "dlrover_run/agent/reconcile.py",
        "return [] if state.stopping is not None and state.stopping >= mode else [Stop(state.key, mode)]",
        "return [Stop(state.key, mode)]",
        "test_reconcile.py::test_what_follows_from_what_is_desired_and_what_is_here",
    ),
    "a leaving node takes new ranks": Defect(
        "dlrover_run/agent/agent.py",
        "            if not leaving:\n",
        "            if True:\n",
        "test_agent_rounds.py::TestLeaving::test_it_takes_no_new_ranks_while_its_workers_end",
    ),
    "a dismissed node stays": Defect(
        "dlrover_run/agent/agent.py",
        "return dismissed or assignment.phase",
        "return assignment.phase",
        "test_health_check.py::TestLeaving::test_a_dismissed_node_leaves_with_a_code_of_its_own_and_a_reason",
    ),
    "a node leaves without a report": Defect(
        "dlrover_run/agent/agent.py",
        "if (last := self._adapter.leave_report(error)) is not None:",
        "if (last := None) is not None:",
        "test_agent_rounds.py::test_the_same_ranks_from_another_coordinator_leave_the_workers_alone",
    ),
    "a checkpoint from before the announcement counts": Defect(
        "dlrover_run/workers/checkpoint_marks.py",
        "            self._marks.read()\n            self._change",
        "            self._change",
        "test_worker_round.py::test_only_a_checkpoint_after_its_announcement_counts_for_a_planned_change",
    ),
    "the workers of an ended round count": Defect(
        "dlrover_run/workers/adapter.py",
        "if current is None or current.key != state.round:",
        "if current is None:",
        "test_agent_rounds.py::test_a_node_that_loses_its_ranks_stops_its_workers_and_starts_new_ones_with_the_next",
    ),
    "a success is forgotten when the node leaves": Defect(
        "dlrover_run/workers/adapter.py",
        "if current.group.succeeded:",
        "if current.group.succeeded and not leaving:",
        "test_agent_rounds.py::TestLeaving::test_no_other_node_restarts_when_its_workers_have_succeeded",
    ),
    "a worker that ignores SIGTERM is never killed": Defect(
        "dlrover_run/processes/process.py",
        "self._kill_timer = asyncio.get_running_loop().call_later(grace,",
        "self._kill_timer = asyncio.get_running_loop().call_later(1e6,",
        "test_signals.py::test_a_worker_that_ignores_the_signal_is_killed_after_its_grace_period",
    ),
    "data loaders get the worker's SIGTERM": Defect(
        "dlrover_run/processes/process.py",
        "if self.spec.signal_group:",
        "if True:",
        "test_step_signals.py::test_data_loaders_live_until_their_worker_has_saved",
    ),
    "a stopped worker does not see its SIGTERM": Defect(
        "dlrover_run/processes/process.py",
        "        self._kill(signal.SIGCONT)\n",
        "        pass\n",
        "test_signals.py::test_a_stopped_worker_is_resumed_to_handle_the_stop_signal",
    ),
    "a signal of the whole step reaches a worker twice": Defect(
        "dlrover_run/processes/process.py",
        "        if delivered_at is None or self._started > delivered_at:\n            self._kill(number)\n        # A",
        "        self._kill(number)\n        # A",
        "test_step_signals.py::test_a_worker_gets_one_stop_signal_though_the_whole_step_gets_it",
    ),
    "a worker outlives its agent": Defect(
        "dlrover_run/processes/process.py",
        "if spec.dies_with_parent:\n            tree",
        "if False:\n            tree",
        "test_process_tree.py::test_a_process_exits_with_its_parent",
    ),
    "what a killed agent leaves is left alone": Defect(
        "dlrover_run/processes/watchdog.py",
        "if refused := tree.end_children():",
        "if refused := []:",
        "test_process_tree.py::test_nothing_outlives_a_kill",
    ),
    "orphans go to process 1": Defect(
        "dlrover_run/processes/tree.py",
        "    _prctl(_PR_SET_CHILD_SUBREAPER, 1)\n",
        "    pass\n",
        "test_process_tree.py::test_nothing_outlives_a_kill",
    ),
    "a master is ended with the launcher that started it": Defect(
        "dlrover_run/processes/tree.py",
        "if relative.session != relative.pid or title != MASTER_NAME.encode():",
        "if True:",
        "test_hosting.py::test_the_master_outlives_the_launcher_that_started_it",
    ),
    "children of an ended worker live on": Defect(
        "dlrover_run/processes/orphans.py",
        "        self._ended_sessions.add(worker)\n",
        "        pass\n",
        "test_process_tree.py::test_orphans_of_a_worker_are_killed_although_the_other_workers_continue",
    ),
    "a kill for memory is a plain SIGKILL": Defect(
        "dlrover_run/workers/exits.py",
        "if worker.stopped_with is None and causes.may_be_oom_kill",
        "if False and causes.may_be_oom_kill",
        "test_failures.py::test_a_kill_for_memory_is_looked_for_where_this_launcher_did_not_kill",
    ),
    "every SIGKILL is a kill for memory": Defect(
        "dlrover_run/failures/oom_kills.py",
        "if not _rose(then[own.path].kills, own.kills):",
        "if False:",
        "test_failures.py::test_v2_names_the_nearest_limit_that_was_hit",
    ),
    "ranks begin at 0 on each node": Defect(
        "dlrover_run/workers/environment.py",
        "    rank = ranks.first_rank + local_rank\n",
        "    rank = local_rank\n",
        "test_two_nodes.py::test_a_round_starts_at_once_with_the_maximum_number_of_nodes",
    ),
    "workers have no bound on threads": Defect(
        "dlrover_run/workers/environment.py",
        "    if workers > 1:\n",
        "    if False:\n",
        "test_worker_contract.py::test_the_environment_of_a_worker",
    ),
    "a second Ctrl-C waits for the workers": Defect(
        "dlrover_run/agent/shutdown.py",
        "elif number is signal.SIGINT and self._interrupted:",
        "elif False:",
        "test_signals.py::test_a_second_interrupt_kills_at_once",
    ),
    "a lost watchdog goes unnoticed": Defect(
        "dlrover_run/agent/shutdown.py",
        "            self.orphaned = True\n",
        "            pass\n",
        "test_process_tree.py::test_nothing_outlives_a_kill",
    ),
    "a stuck console is read for": Defect(
        "dlrover_run/output/relay/sources.py",
        "return self.sink is None or self.sink.has_room",
        "return True",
        "test_output_sources.py::test_a_console_that_takes_nothing_makes_the_worker_wait_and_then_gets_everything",
    ),
    "a known keep-alive is training": Defect(
        "dlrover_run/observe/carriers.py",
        "if self.is_keepalive and self.large <= LARGE_BYTES:",
        "if False:",
        "test_carriers.py::test_a_heartbeat_is_known_and_counts_no_more",
    ),
    "small data at any times are a keep-alive": Defect(
        "dlrover_run/observe/carriers.py",
        "UNEVEN = 2.5",
        "UNEVEN = 250.0",
        "test_carriers.py::test_small_data_at_uneven_times_are_no_heartbeat",
    ),
    "many small messages in a second are a keep-alive": Defect(
        "dlrover_run/observe/carriers.py",
        " and max(age for _, age in self.beats) >= SLOW",
        "",
        "test_carriers.py::test_small_data_of_a_job_that_makes_many_steps_are_no_heartbeat",
    ),
    "small data are progress of a main thread that never ran": Defect(
        "dlrover_run/features/hangs/search/changes.py",
        "return main is not Main.STILL",
        "return True",
        "test_keepalives.py::test_what_counts_as_progress",
    ),
    "a main thread that waits long for a processor runs now and then": Defect(
        "dlrover_run/features/hangs/search/changes.py",
        "if one.figures.never_waited(before.figures):",
        "if False:",
        "test_keepalives.py::test_a_heartbeat_is_no_progress_of_a_main_thread_that_waits_long_for_a_processor",
    ),
    "heartbeats are progress of a main thread that polls": Defect(
        "dlrover_run/features/hangs/search/changes.py",
        "exchanged = exchanged and not (beats and polls)",
        "pass",
        "test_keepalives.py::test_a_worker_that_tries_again_and_again_makes_no_progress_by_heartbeats",
    ),
    "the memory of a helper thread is progress of a main thread that spins": Defect(
        "dlrover_run/features/hangs/search/changes.py",
        "if main is Main.SPINS and now.main_faults is not None",
        "if False and now.main_faults is not None",
        "test_keepalives.py::test_a_thread_that_copies_does_not_hide_a_stall",
    ),
    "before the pauses of a round are known a stopped rank is named after a minute": Defect(
        "dlrover_run/features/hangs/search/round_detectors.py",
        "looks_early=True",
        "looks_early=False",
        "test_stall_watch.py::test_before_the_pauses_are_known_only_what_never_ends_is_named_in_seconds",
    ),
    "a first step of some seconds is a stall": Defect(
        "dlrover_run/features/hangs/node/diagnosis.py",
        "if quiet.stalled.early and not is_certain_early(finding, quiet.suspects):",
        "if False:",
        "test_stall_watch.py::test_before_the_pauses_are_known_only_what_never_ends_is_named_in_seconds",
    ),
    "a first step of some seconds is a stall of several nodes": Defect(
        "dlrover_run/features/hangs/stalls/observer.py",
        "or (early and not is_certain_early(finding, suspects))",
        "",
        "test_stall_nodes.py::test_before_the_pauses_of_a_node_are_known_only_what_never_ends_is_a_stall",
    ),
    "a node whose pauses are not known reports its quiet workers once": Defect(
        "dlrover_run/features/hangs/node/diagnosis.py",
        "self._again_at = quiet.stalled.since + UNLEARNED_LIMIT",
        "pass",
        "test_stall_nodes.py::test_a_node_whose_pauses_are_not_known_reports_again_when_they_do_not_matter_any_more",
    ),
    "a round without data learns from when it was looked at": Defect(
        "dlrover_run/features/hangs/search/detector.py",
        "if self._is_silent and not early:",
        "if self._is_silent:",
        "test_keepalives.py::test_a_round_without_data_learns_no_pauses_from_when_it_is_looked_at",
    ),
    "the rank that answers is never the one that is cut off": Defect(
        "dlrover_run/features/hangs/collectives/compare.py",
        "if lag.source is Source.RAS and shown.isdisjoint(missing)",
        "if False and shown.isdisjoint(missing)",
        "test_collective_positions.py::test_a_rank_that_hears_as_few_as_are_missing_may_be_the_one_that_is_cut_off",
    ),
    "a rank that is cut off is held back as one that computes": Defect(
        "dlrover_run/features/hangs/search/guilt.py",
        "is_cut = unheard and any(one.unsent for one in known if one.rank in ranks)",
        "is_cut = False",
        "test_behind.py::test_a_rank_that_nobody_hears_and_whose_data_is_not_acknowledged_does_not_compute",
    ),
    "no rank is behind of which nothing is known": Defect(
        "dlrover_run/features/hangs/search/behind.py",
        "if len(positions) < max(2, len(suspects)) or compare(positions):",
        "if compare(positions):",
        "test_behind.py::test_that_no_rank_is_behind_is_said_only_of_positions_of_all_that_may_wait",
    ),
    "a helper thread that reads a figure makes progress": Defect(
        "dlrover_run/features/hangs/search/changes.py",
        "OUTPUT_BYTES if main in (Main.RUNS, Main.UNKNOWN) else HELPER_BYTES * seconds",
        "OUTPUT_BYTES",
        "test_keepalives.py::test_what_counts_as_progress",
    ),
    "a round without data of training learns no rhythm": Defect(
        "dlrover_run/features/hangs/search/detector.py",
        "return self._beats and self._sampled is not None",
        "return False and self._sampled is not None",
        "test_keepalives.py::test_without_data_all_progress_is_the_rhythm",
    ),
    "a worker that holds the lock of the interpreter waits for its device": Defect(
        "dlrover_run/features/hangs/search/suspects.py",
        "if stack.holds_lock:",
        "if False:",
        "test_device_waits.py::test_where_a_main_thread_is",
    ),
    "a wait for a device is named at once": Defect(
        "dlrover_run/features/hangs/search/suspects.py",
        "outside=place is Place.DEVICE or ",
        "outside=",
        "test_device_waits.py::test_a_long_kernel_of_all_ranks_is_reported_late_and_only_if_no_python_has_run",
    ),
    "a sleep of days is waited for": Defect(
        "dlrover_run/features/hangs/search/suspects.py",
        " and not sleeps_on)",
        ")",
        "test_device_waits.py::test_a_sleep_that_ends_after_a_worker_would_be_named_is_not_waited_for",
    ),
    "without an accelerator a lock is named at once": Defect(
        "dlrover_run/features/hangs/search/suspects.py",
        "one.place is Place.LOCK and one.state ==",
        "False and one.state ==",
        "test_device_waits.py::test_without_an_accelerator_one_that_waits_for_a_lock_is_named_later",
    ),
    "one that sleeps waits for its device while others spin": Defect(
        "dlrover_run/features/hangs/search/guilt.py",
        "(computes or (spin and not one.busy))",
        "computes",
        "test_device_waits.py::test_the_one_that_is_not_on_its_device_while_the_others_are",
    ),
    "a job that goes on slowly is stalled": Defect(
        "dlrover_run/features/hangs/search/guilt.py",
        "if any(one.moved for one in running) and",
        "if False and",
        "test_device_waits.py::test_a_worker_that_has_run_python_since_the_stall_began_does_not_hang",
    ),
    "workers on their devices do not wait for another": Defect(
        "dlrover_run/features/hangs/search/guilt.py",
        "(len(suspects) > 1 and any(map(_on_device, running)))",
        "False",
        "test_device_waits.py::test_all_on_their_devices_at_one_place",
    ),
    "positions in collectives name no rank": Defect(
        "dlrover_run/features/hangs/search/behind.py",
        "return lags[0] if lags and lags[0].final else None",
        "return None",
        "test_behind.py::test_positions_name_a_rank_that_looks_like_the_others",
    ),
    "a mismatch waits until no kernel can take so long": Defect(
        "dlrover_run/features/hangs/search/guilt.py",
        "is_certain=is_cut or lag.kind in (LagKind.MISMATCH, LagKind.ORDER),",
        "is_certain=is_cut,",
        "test_behind.py::test_a_mismatch_names_both_sides",
    ),
    "a stopped process that answers nothing is not named": Defect(
        "dlrover_run/features/hangs/search/guilt.py",
        "by_state = found.code in STATES and not is_explained",
        "by_state = False",
        "test_behind.py::test_the_state_of_another_process_goes_before_the_positions",
    ),
    "who enters operations hangs": Defect(
        "dlrover_run/features/hangs/search/suspects.py",
        "position.entered > entered.get(position.counter, position.entered)",
        "False",
        "test_behind.py::test_a_job_whose_workers_enter_operations_goes_on",
    ),
}

SAMPLE = ("a task starts where another one still runs", "a leaving node takes new ranks")
"""Defects that `make test` plants too, to show that this file works."""


def locate(test: str) -> str:
    """Return a test with the path of its file, in whichever folder of the tests it is."""
    file, separator, name = test.partition("::")
    (path,) = (ROOT / "tests").rglob(file)
    return f"{path}{separator}{name}"


@dataclass(frozen=True)
class Run:
    """A run of one test: the exit code of pytest (None if the run reached RUN_TIMEOUT), its seconds and its output."""

    code: int | None
    seconds: float
    output: str


def run_against(packages: Path, test: str) -> Run:
    """Run one test against a copy of the packages, with the parameters that `make test` uses."""
    # The working directory and PYTHONPATH come before the installed packages.
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    options = ["-x", "-q", f"--timeout={TEST_TIMEOUT}", "-p", "no:cacheprovider", "-m", "not long and not rival"]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *options]
    # Agents of a job that hangs keep inherited descriptors open, such as a pipe; their orphans come to this
    # process, which ends them.
    output = packages / "output"
    tree.become_subreaper()
    earlier = tree.children()
    began = time.monotonic()
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [*command, locate(test)],
            cwd=packages,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(RUN_TIMEOUT)
    finally:
        process.kill()
        process.wait()
        tree.end_children(earlier)
    return Run(code, time.monotonic() - began, output.read_text(errors="replace"))


def assert_passes(packages: Path, test: str) -> None:
    """Assert that a test passes, and takes much less than RUN_TIMEOUT."""
    run = run_against(packages, test)
    assert run.code == pytest.ExitCode.OK, run.output
    assert run.seconds < MAX_HEALTHY_RUN, run.output


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return the directory of a copy of the packages."""
    for package in ("dlrover_run", "tf_ps_runner"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_each_planted_defect_still_has_its_place() -> None:
    counts = {name: (ROOT / each.file).read_text().count(each.right) for name, each in DEFECTS.items()}
    assert counts == dict.fromkeys(DEFECTS, 1)


@pytest.mark.timeout(2 * RUN_TIMEOUT + 60)
@pytest.mark.parametrize("name", [*SAMPLE, *only_long(*(name for name in DEFECTS if name not in SAMPLE))])
def test_a_planted_defect_is_found(packages: Path, name: str) -> None:
    defect = DEFECTS[name]
    file = packages / defect.file
    source = file.read_text()
    assert source.count(defect.right) == 1, f"{defect.file} has changed: plant {name!r} elsewhere"
    file.write_text(source.replace(defect.right, defect.wrong))
    run = run_against(packages, defect.found_by)
    if run.code is None:
        file.write_text(source)
        assert_passes(packages, defect.found_by)
    else:
        assert run.code == pytest.ExitCode.TESTS_FAILED, run.output


@pytest.mark.long
@pytest.mark.timeout(RUN_TIMEOUT + 60)
@pytest.mark.parametrize("test", sorted({defect.found_by for defect in DEFECTS.values()}))
def test_without_a_defect_the_same_test_passes(packages: Path, test: str) -> None:
    assert_passes(packages, test)
