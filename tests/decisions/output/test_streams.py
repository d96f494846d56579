"""Where the workers' output goes: the plan, the directories, the end of a log."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_run.output.destinations import (
    Destination,
    Inherited,
    LogFile,
    Nowhere,
    RankStreams,
    Relayed,
    SameAsStderr,
    Tee,
    line_prefix,
    plan_streams,
    share_console,
)
from dlrover_run.output.opening import open_destination, show_files
from dlrover_run.output.ring import read_log_tail
from dlrover_run.output.run_directory import (
    RunDir,
    create_run_dir,
    make_attempt_dirs,
    make_temp_dir,
    next_free_attempt,
    prune_empty,
    remove_run_dir,
)
from dlrover_run.spec import LogSpec, SpecError, Std, StreamMap
from tf_ps_runner.agent.task_start import plan_outputs

BOTH = StreamMap(Std.ALL)


def test_without_flags_stdout_is_inherited_and_stderr_passes_the_relay() -> None:
    plan = plan_streams(LogSpec(), "/run", 0, 2)
    assert plan.tees == ()
    assert plan.ranks == tuple(
        RankStreams(rank, Inherited(), Relayed(shown=True), f"/run/attempt_0/{rank}/error.json") for rank in (0, 1)
    )


def test_redirect_names_the_files_of_torchruns_layout() -> None:
    plan = plan_streams(LogSpec(redirects=BOTH), "/run", 3, 1)
    assert plan.directory == "/run/attempt_3"
    assert plan.ranks[0].stdout == LogFile("/run/attempt_3/0/stdout.log")
    assert plan.ranks[0].stderr == LogFile("/run/attempt_3/0/stderr.log")
    assert plan.tees == ()


def test_tee_is_a_file_that_is_shown() -> None:
    logs = LogSpec(tee=StreamMap(by_rank={10: Std.OUT, 1: Std.ERR}), stderr_filters=("loss",))
    plan = plan_streams(logs, "/run", 0, 11)
    assert plan.tees == (
        Tee(1, 2, "/run/attempt_0/1/stderr.log", ("loss",), "/run/attempt_0/filtered_stderr.log"),
        Tee(10, 1, "/run/attempt_0/10/stdout.log"),
    )
    assert plan.ranks[10].stdout == LogFile("/run/attempt_0/10/stdout.log")
    assert plan.ranks[10].stderr == Relayed(shown=True)
    assert plan.ranks[1].stdout == Inherited()


def test_a_hidden_rank_keeps_its_files_and_its_tail_but_shows_nothing() -> None:
    logs = LogSpec(tee=StreamMap(by_rank={1: Std.OUT}), shown_ranks=frozenset({0}))
    plan = plan_streams(logs, "/run", 0, 3)
    assert plan.tees == ()
    assert plan.ranks[1].stdout == LogFile("/run/attempt_0/1/stdout.log")
    assert plan.ranks[2].stdout == Nowhere()
    assert plan.ranks[2].stderr == Relayed(shown=False)
    assert plan.ranks[0].stdout == Inherited()


def test_on_one_console_only_what_both_streams_show_there_goes_one_way() -> None:
    plan = plan_streams(LogSpec(), "/run", 0, 1)
    assert share_console(plan, one_place=False) == plan
    ordered = share_console(plan, one_place=True)
    assert ordered.ranks[0].stdout == SameAsStderr()
    assert ordered.ranks[0].stderr == plan.ranks[0].stderr


def test_workers_share_a_console_where_two_of_them_write_to_it() -> None:
    assert plan_streams(LogSpec(), "/run", 0, 2).shared
    assert not plan_streams(LogSpec(), "/run", 0, 1).shared
    assert not plan_streams(LogSpec(shown_ranks=frozenset({1})), "/run", 0, 2).shared
    first_only = LogSpec(redirects=BOTH, tee=StreamMap(by_rank={0: Std.ALL}))
    assert not plan_streams(first_only, "/run", 0, 2).shared
    assert plan_streams(LogSpec(redirects=BOTH, tee=BOTH), "/run", 0, 2).shared


def test_lines_of_a_shared_console_pass_the_relay_unless_they_go_elsewhere() -> None:
    logs = LogSpec(redirects=StreamMap(by_rank={1: Std.OUT, 2: Std.ERR}), shown_ranks=frozenset({0, 1, 2}))
    plan = plan_streams(logs, "/run", 0, 4)
    file, shown = plan.ranks[1].stdout, Relayed(shown=True)

    def stdouts(*, one_place: bool, searched: bool = False) -> list[Destination]:
        routed = share_console(plan, one_place=one_place, searched=searched)
        assert [rank.stderr for rank in routed.ranks] == [rank.stderr for rank in plan.ranks]
        return [rank.stdout for rank in routed.ranks]

    assert stdouts(one_place=False) == [shown, file, shown, Nowhere()]
    # On one console both take one way, where both of them go to it.
    assert stdouts(one_place=True) == [SameAsStderr(), file, shown, Nowhere()]
    # Steps are searched in what is shown nowhere, too.
    assert stdouts(one_place=True, searched=True) == [SameAsStderr(), file, shown, Relayed(shown=False)]


def test_a_single_workers_lines_pass_the_relay_where_they_get_a_prefix() -> None:
    plan = plan_streams(LogSpec(), "/run", 0, 1)
    assert share_console(plan, one_place=False, prefixed=True).ranks[0].stdout == Relayed(shown=True)


def test_an_empty_set_of_shown_ranks_hides_nothing() -> None:
    plan = plan_streams(LogSpec(shown_ranks=frozenset()), "/run", 0, 1)
    assert plan.ranks[0].stdout == Inherited()


@pytest.mark.parametrize("run_dir", [None, "/run"])
def test_dev_null_writes_no_file_at_all(run_dir: str | None) -> None:
    logs = LogSpec(log_dir="/dev/null", redirects=BOTH, tee=BOTH, stdout_filters=("x",))
    plan = plan_streams(logs, run_dir, 0, 1)
    assert plan.directory is None
    assert plan.tees == ()
    assert plan.ranks[0] == RankStreams(0, Inherited(), Relayed(shown=True), None)


def test_prefix_follows_the_template_and_leaves_unknown_names() -> None:
    assert line_prefix(None, "trainer", 5, 1, "gpu09") == "[trainer1]:"
    template = "${hostname}/${role_name}/${rank}/${local_rank} ${host} $"
    assert line_prefix(template, "trainer", 5, 1, "gpu09") == "gpu09/trainer/5/1 ${host} $"


def test_run_dir_under_a_log_dir_that_is_made(tmp_path: Path) -> None:
    run = create_run_dir(LogSpec(log_dir=str(tmp_path / "a" / "logs")), "job/7")
    assert run.keep
    assert run.path is not None
    assert Path(run.path).parent == tmp_path / "a" / "logs"
    assert Path(run.path).name.startswith("job_7_")


def test_the_latest_of_several_runs_has_the_link(tmp_path: Path) -> None:
    first, second = (create_run_dir(LogSpec(log_dir=str(tmp_path)), name) for name in ("a", "b"))
    assert first.path is not None
    assert second.path is not None
    assert os.readlink(tmp_path / "latest") == Path(second.path).name
    remove_run_dir(first)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([Path(second.path).name, "latest"])
    # It has not succeeded, so it leaves nothing behind.
    remove_run_dir(second)
    assert list(tmp_path.iterdir()) == []


def test_what_people_have_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").write_text("precious")
    create_run_dir(LogSpec(log_dir=str(tmp_path)), "a")
    assert (tmp_path / "latest" / "mine").read_text() == "precious"


@pytest.mark.parametrize(("redirects", "keep"), [(StreamMap(), False), (BOTH, True)])
def test_run_dir_without_a_log_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redirects: StreamMap, keep: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = create_run_dir(LogSpec(redirects=redirects), "job")
    assert run.keep is keep
    removed: list[str] = []
    if not keep:
        assert list(tmp_path.iterdir()) == [], "no process would remove it if the watchdog were killed now"
        assert make_temp_dir(run, removed.append) == run
        assert removed == [run.path]
    assert [entry.name.startswith("dlrover_run_") for entry in tmp_path.iterdir()] == [True]


def test_where_nothing_can_be_written_a_job_runs_unless_it_wants_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/null/nowhere")
    assert make_temp_dir(create_run_dir(LogSpec(), "job"), lambda path: None) == RunDir(None, keep=False)
    with pytest.raises(SpecError, match=r"--redirects, --tee: .*; name one with --log-dir"):
        create_run_dir(LogSpec(redirects=BOTH), "job")
    with pytest.raises(SpecError, match=r"--log-dir: cannot make a directory in /proc/x .*; name another one"):
        create_run_dir(LogSpec(log_dir="/proc/x"), "job")


def test_run_dir_for_dev_null() -> None:
    run = create_run_dir(LogSpec(log_dir="/dev/null", redirects=BOTH), "job")
    assert run.path is None


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_as_log_dir_is_reported_in_a_sentence(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"--log-dir: .*/file.* is not a directory"):
        create_run_dir(LogSpec(log_dir=str(tmp_path / "file") + below), "job")


def test_no_attempt_is_overwritten(tmp_path: Path) -> None:
    plan = plan_streams(LogSpec(redirects=BOTH), str(tmp_path), 0, 2)
    make_attempt_dirs(str(tmp_path / "attempt_0"), range(2))
    fd = open_destination(plan.ranks[1].stdout, -1)
    os.write(fd, b"precious")
    os.close(fd)
    with pytest.raises(SpecError, match="exists already"):
        make_attempt_dirs(str(tmp_path / "attempt_0"), range(2))
    assert (tmp_path / "attempt_0" / "1" / "stdout.log").read_text() == "precious"
    assert [next_free_attempt(str(tmp_path), number) for number in (0, 1, 7)] == [1, 1, 7]
    assert next_free_attempt(None, 3) == 3


def test_outputs_are_opened_to_append_and_not_inherited_by_chance(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"))
    first, second = open_destination(log, -1), open_destination(log, -1)
    assert not os.get_inheritable(first)
    os.write(first, b"one\n")
    os.write(second, b"two\n")
    os.close(first)
    os.close(second)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert open_destination(Inherited(), 1) == 1
    null = open_destination(Nowhere(), -1)
    assert os.fstat(null).st_rdev == os.stat(os.devnull).st_rdev
    os.close(null)


def test_prune_leaves_what_holds_something(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "attempt_0" / "0").mkdir(parents=True)
    (run / "attempt_0" / "1").mkdir()
    (run / "attempt_1" / "0").mkdir(parents=True)
    (run / "attempt_0" / "1" / "stdout.log").write_text("")
    prune_empty(str(run))
    assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == [
        "attempt_0",
        "attempt_0/1",
        "attempt_0/1/stdout.log",
    ]
    (run / "attempt_0" / "1" / "stdout.log").unlink()
    prune_empty(str(run))
    assert not run.exists()


def test_read_log_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first line\nsecond\nthird \xff\n")
    assert read_log_tail(str(log)) == "first line\nsecond\nthird \ufffd\n"
    assert read_log_tail(str(log), 12) == "third \ufffd\n"
    log.write_bytes(b"x" * 100)
    assert read_log_tail(str(log), 10) == "x" * 10
    assert read_log_tail(str(tmp_path / "none")) == ""


def test_what_an_earlier_process_wrote_into_a_log_file_is_not_shown_again(tmp_path: Path) -> None:
    """A parameter server that is started again writes to the same file."""
    plan = plan_outputs(LogSpec(tee=StreamMap(Std.OUT), redirects=BOTH), str(tmp_path))
    assert [tee.out for tee in plan.tees] == [1]
    shown: list[tuple[object, ...]] = []
    relay: Any = SimpleNamespace(add_tail=lambda path, *_, start: shown.append((path, start)))
    for earlier in ("", "from the first start\n"):
        (tmp_path / "stdout.log").write_text(earlier)
        show_files([(tee, "[ps-0]:") for tee in plan.tees], relay)
    assert shown == [(str(tmp_path / "stdout.log"), 0), (str(tmp_path / "stdout.log"), 21)]


@pytest.mark.parametrize(
    ("redirects", "tee", "shown"), [((), (), {1, 2}), ((1,), (), {2}), ((1, 2), (2,), {2}), ((1, 2), (), set())]
)
def test_the_outputs_of_a_task_are_shown_unless_they_are_redirected(
    redirects: tuple[int, ...], tee: tuple[int, ...], shown: set[int]
) -> None:
    logs = LogSpec(redirects=StreamMap(Std(sum(redirects))), tee=StreamMap(Std(sum(tee))))
    plan = plan_outputs(logs, "/run/ps-0")
    assert plan.ranks[0].log_paths == ["/run/ps-0/stdout.log", "/run/ps-0/stderr.log"]
    assert {one.out for one in plan.tees} == shown
