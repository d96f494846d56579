"""The report of a failed job as text, case by case."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_agent import rank_assignment
from virtual_loop import run_virtually

from dlrover_run.console.console import REFRESH_SECONDS, REPEAT_SECONDS, Console
from dlrover_run.console.failure_report import (
    MAX_GROUPS,
    MAX_TRACE_LINES,
    FailureReport,
    render_failure,
    render_remote_failure,
)
from dlrover_run.console.rounds import (
    render_membership_change,
    render_rank_assignment,
    render_restart,
    render_shutdown,
    render_waiting,
)
from dlrover_run.console.text import format_duration, use_color
from dlrover_run.coordination.records.round import Failure
from dlrover_run.failures.causes import root_cause
from dlrover_run.failures.worker_exit import RecordedError, WorkerExit
from dlrover_run.words.text import format_ranks

MOMENT = 1_763_647_884.0

TRACE = """step 40
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ada/mnist/cnn_train.py", line 96, in train
[rank1]:     raise ValueError(f"bad label {label}")
[rank1]: ValueError: bad label 11
[rank1]:[W1120 14:11:24.075 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called
"""
PEER = """Traceback (most recent call last):
  File "/home/ada/mnist/cnn_train.py", line 90, in train
    loss.backward()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:{port}
"""


def end(rank: int, code: int, after: float = 0.0, **more: object) -> WorkerExit:
    made = WorkerExit(rank=rank, local_rank=rank, pid=4240 + rank, code=code, unix_time=MOMENT + after)
    return replace(made, **more)  # type: ignore[arg-type]


def stopped(rank: int, after: float = 0.2, by: signal.Signals = signal.SIGTERM) -> WorkerExit:
    return end(rank, -by, after, stopped_with=by)


def render(*ends: WorkerExit, width: int = 80, color: bool = False, **more: object) -> str:
    root = root_cause(ends)
    assert root is not None
    report = FailureReport("train.py", "node-a", root, ends, restarts=0, max_restarts=0, exit_code=1)
    return render_failure(replace(report, **more), width, color, UTC)  # type: ignore[arg-type]


def test_an_exception_from_its_traceback_to_what_the_others_did() -> None:
    text = render(
        end(1, 1, stderr_tail=TRACE),
        end(0, 1, 0.12, stderr_tail=PEER.format(port=36863)),
        stopped(2),
        stopped(3),
        stopped(4),
        restarts=3,
        max_restarts=3,
    )
    rule, thin = "=" * 80, "-" * 80
    assert (
        text
        == f"""{rule}
train.py FAILED
{thin}
Root Cause (first observed failure):
  rank 1 raised ValueError: bad label 11
  time      : 2025-11-20_14:11:24   host      : node-a
  rank      : 1 (local_rank: 1)     exitcode  : 1 (pid: 4241)
  error_file: <N/A>

    Traceback (most recent call last):
      File "/home/ada/mnist/cnn_train.py", line 96, in train
        raise ValueError(f"bad label {{label}}")
    ValueError: bad label 11

  Its output is above, on this console; --log-dir DIR -r 3 keeps it in files.
Others:
  rank 0 failed 0.1 s later (lost a peer): raised RuntimeError: Connection
    closed by peer [127.0.0.1]:36863
  ranks 2-4 were stopped by the launcher (SIGTERM)
{thin}
3 of 3 restarts were used.
The launcher exits with code 1.
{rule}"""
    )


@pytest.mark.parametrize(
    ("one", "words", "field"),
    [
        (end(0, 3), "rank 0 exited with code 3", "exitcode  : 3 (pid: 4240)"),
        (end(0, -9), "rank 0 was killed by SIGKILL, not by the launcher", "  : -9 (pid: 4240) (SIGKILL)"),
        (end(0, -11), "was killed by SIGSEGV (segmentation fault)", "exitcode  : -11 (pid: 4240) (SIGSEGV)"),
        (end(0, -9, oom_kill="the limit was hit"), "by SIGKILL: the limit was hit", "exitcode  : -9 (pid: 4240)"),
        (end(12, 3, error_file="/logs/error.json"), "rank 12 exited with code 3", "error_file: /logs/error.json"),
    ],
)
def test_other_ways_to_die(one: WorkerExit, words: str, field: str) -> None:
    text = render(one)
    assert words in text
    assert field in text


def test_a_recorded_traceback_is_preferred_to_the_end_of_the_output() -> None:
    recorded = RecordedError("KeyError: 'w'", "Traceback (most recent call last):\n  File x\nKeyError: 'w'\n", MOMENT)
    text = render(end(0, 1, error=recorded, stderr_tail=TRACE))
    assert "    KeyError: 'w'\n" in text
    assert "bad label" not in text


def test_without_a_traceback_the_end_of_standard_error_is_shown() -> None:
    tail = "".join(f"line {number}\n" for number in range(100))
    text = render(end(0, 3, stderr_tail=tail))
    assert "  The end of its output:\n    line 70\n" in text
    assert "    line 99\n" in text
    assert "line 69\n" not in text


def test_a_long_traceback_keeps_its_head_and_its_end() -> None:
    frames = "".join(f'  File "deep.py", line {number}, in f\n' for number in range(200))
    text = render(end(0, 1, stderr_tail=f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n"))
    shown = text.split("\n\n")[1].splitlines()
    assert len(shown) == MAX_TRACE_LINES
    assert shown[0].strip() == "Traceback (most recent call last):"
    assert shown[1].strip() == "... 173 lines left out ..."
    assert shown[2].strip() == 'File "deep.py", line 173, in f'
    assert shown[-1].strip() == "RecursionError: too deep"


def test_of_a_long_chain_only_the_last_traceback_is_shown() -> None:
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    frames = "".join(f'  File "deep.py", line {number}, in f\n' for number in range(20))
    first, last = (f"Traceback (most recent call last):\n{frames}{name}: x\n" for name in ("KeyError", "OSError"))
    text = render(end(0, 1, stderr_tail=first + link + last))
    assert "OSError: x" in text
    assert "KeyError: x" not in text
    assert "left out" not in text


def test_the_log_files_are_named_where_there_are_any() -> None:
    text = render(end(0, 1, stderr_path="/logs/0/stderr.log", stdout_path="/logs/0/stdout.log"))
    assert "  Full log:   /logs/0/stderr.log\n  Its output: /logs/0/stdout.log\n" in text
    assert "--log-dir" not in text
    half = render(end(0, 1, stdout_path="/logs/0/stdout.log"))
    assert "  Its standard error is above, on this console.\n  Its output: /logs/0/stdout.log\n" in half


def test_sixty_four_ranks_stay_on_one_screen() -> None:
    peers = [end(rank, 1, 0.1 + rank / 100, stderr_tail=PEER.format(port=30000 + rank)) for rank in range(1, 32)]
    text = render(end(63, 1, stderr_tail=TRACE), *peers, *[stopped(rank) for rank in (0, *range(32, 63))])
    assert len(text.splitlines()) <= 30
    joined = " ".join(text.split())
    assert "ranks 1-31 failed 0.1 s to 0.4 s later (lost a peer): raised RuntimeError: Connection closed" in joined
    assert "(rank 1; the others alike)" in joined
    assert "ranks 0, 32-62 were stopped by the launcher (SIGTERM)" in joined


def test_kinds_of_other_failures_are_bounded() -> None:
    names = "abcdefghijklmnop"
    others = [end(rank, 1, 1.0, error=RecordedError(f"{name}Error: x", "", 0)) for rank, name in enumerate(names, 1)]
    text = render(end(0, 3), *others)
    assert len(re.findall("failed 1.0 s later", text)) == MAX_GROUPS
    assert f"  and {len(names) - MAX_GROUPS} more groups of exits\n" in text


def test_others_that_succeeded_failed_at_once_or_had_failed_before_they_were_stopped() -> None:
    had_failed = replace(stopped(3), error=RecordedError("KeyError: 'w'", "", MOMENT))
    text = render(end(0, 3), end(1, 0), end(2, 4, 0.001), had_failed, stopped(4, by=signal.SIGKILL))
    assert "  rank 1 finished with code 0\n" in text
    assert "  rank 2 failed at once after it: exited with code 4\n" in text
    assert "(SIGTERM); the last error of rank 3 was KeyError: 'w'" in " ".join(text.split())
    assert "  rank 4 was stopped by the launcher (SIGKILL)\n" in text


def test_a_stopped_workers_traceback_is_mentioned_although_nothing_was_recorded() -> None:
    text = render(end(0, 1, stderr_tail=PEER.format(port=1)), replace(stopped(1), stderr_tail=TRACE), stopped(2))
    assert "the last error of rank 1 was ValueError: bad label 11" in " ".join(text.split())


def test_restarts_are_reported_with_the_flag_that_allows_them() -> None:
    assert "No restarts were allowed; --max-restarts N allows N.\n" in render(end(0, 3))
    assert "1 of 2 restarts were used.\nThe launcher exits with code 7.\n" in render(
        end(0, 3), restarts=1, max_restarts=2, exit_code=7
    )


@pytest.mark.parametrize(("width", "most"), [(60, 60), (80, 80), (200, 100)])
def test_prose_keeps_to_the_width(width: int, most: int) -> None:
    killed = end(0, -9, oom_kill="the kernel's memory limit was hit (cgroup limit 512 MiB)")
    assert max(len(line) for line in render(killed, *map(stopped, range(1, 64)), width=width).splitlines()) == most


def test_colour_changes_nothing_but_the_colour() -> None:
    ends = [end(1, 1, stderr_tail=TRACE), stopped(0)]
    coloured = render(*ends, color=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]+m", "", coloured) == render(*ends)
    assert render(*ends).isascii()


def test_a_workers_control_characters_do_not_reach_the_terminal() -> None:
    text = render(end(0, 1, stderr_tail="\x1b]0;title\x07\x1b[2Jgone\n\x1b[31mred\n"))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert "    red\n" in text


EVIL = "\x1b]0;title\x07a\x1b[2J\x9b2Jb\x9d0;title\x9c\u202e\x85\x1bPq\x1b\\c\x07\x7f"


def test_text_of_another_node_does_not_control_the_terminal() -> None:
    failure = Failure(3, f"node{EVIL}", f"raised {EVIL}", trace=f"Traceback\n{EVIL}")
    report = FailureReport("train.py", "node-a", failure, (), 0, 2, exit_code=1, why_over=f"x{EVIL}")
    text = render_failure(report)
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text) == []
    assert "rank 3 on nodeabc raised abc" in text
    assert "    abc\n" in text
    assert "Xabc." in text


@pytest.mark.parametrize(
    ("terminal", "environ", "colored"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_what_decides_on_colour(terminal: bool, environ: dict[str, str], colored: bool) -> None:
    assert use_color(terminal, environ) is colored


def test_lines_have_the_time_of_day_and_the_name_before_it() -> None:
    written: list[str] = []
    moment = datetime(2026, 11, 22, 4, 12, 7).timestamp()
    for name in ("", "node 1"):
        console = Console(written.append, lambda: None, name=name, clock=lambda: moment)
        console.info("hello")
        console.print("a report\nof lines")
    Console(written.append, lambda: 80, clock=lambda: moment, color=True).error("it ended")
    assert written == [
        "04:12:07 dlrover-run: hello\n",
        "a report\nof lines\n",
        "[node 1] 04:12:07 dlrover-run: hello\n",
        "[node 1] a report\n[node 1] of lines\n",
        "04:12:07 \x1b[1;31mdlrover-run: it ended\x1b[0m\n",
    ]


def test_a_node_that_did_not_fail_prints_in_one_line_where_the_report_is() -> None:
    failure = Failure(3, "gpu09", "raised ValueError: x", node_rank=1)
    assert render_remote_failure(f"{failure}; all 2 restarts were used", failure, 74) == (
        "the job failed: rank 3 on node 1 (gpu09) raised ValueError: x; all 2 restarts were used; "
        "the full report is on the console of node 1 (gpu09); this launcher exits with code 74"
    )


@pytest.mark.parametrize(
    ("seconds", "alone", "again", "words"),
    [
        (None, True, False, "this job stops"),
        (None, False, True, "this node leaves the job"),
        (30.0, True, False, "the workers have 30 s to end"),
        (30.0, False, True, "the workers have 30 s to end; press Ctrl-C again to kill them at once"),
    ],
)
def test_what_a_signal_leads_to(seconds: float | None, alone: bool, again: bool, words: str) -> None:
    assert render_shutdown("workers", seconds, alone=alone, again=again) == words


def test_a_restart_is_one_line() -> None:
    line = render_restart("rank 1 raised ValueError:\n  x.", 1, 3, 12.34)
    assert line == "12 s into the round, rank 1 raised ValueError: x; restart 1 of 3"


def test_a_restart_that_counts_in_a_window_names_it() -> None:
    line = render_restart("rank 1 exited with code 3", 7, 3, 12.34, 600.0)
    assert line == "12 s into the round, rank 1 exited with code 3; restart 7 (at most 3 in 600 s)"


def test_a_round_that_costs_nothing_has_a_text_of_its_own() -> None:
    assert (
        render_membership_change("node-b was lost", rank_assignment(3, nodes=2), 185)
        == "3 min 5 s into the round, node-b was lost; round 3 with 2 nodes"
    )


@pytest.mark.parametrize(("workers", "ranks"), [(1, "rank 2"), (4, "ranks 2 to 5")])
def test_ranks_are_one_line_where_each_node_reports_its_own(workers: int, ranks: str) -> None:
    place = rank_assignment(
        3, node_rank=1, nodes=2, first_rank=2, workers=workers, world_size=6, store_address="::1", store_port=4711
    )
    assert render_rank_assignment(place) == f"round 3: {ranks} of 6, as node rank 1 of 2; the store is at [::1]:4711"


def elsewhere(*ends: WorkerExit, trace: str = "", **more: object) -> str:
    failure = Failure(3, "node-b", "raised ValueError: bad label 11", trace=trace)
    report = FailureReport("train.py", "node-a", failure, ends, restarts=0, max_restarts=0, exit_code=1)
    return render_failure(replace(report, **more))  # type: ignore[arg-type]


def test_the_failure_of_another_node_is_reported_with_its_traceback_and_what_this_node_did() -> None:
    trace = "Traceback (most recent call last):\n  File x\nValueError: bad label 11"
    text = elsewhere(end(0, 1, 0.1, stderr_tail=PEER.format(port=1)), stopped(1), trace=trace, max_restarts=3)
    rule, thin = "=" * 80, "-" * 80
    assert (
        text
        == f"""{rule}
train.py FAILED
{thin}
Root Cause (first observed failure):
  rank 3 on node-b raised ValueError: bad label 11
  host      : node-b
  rank      : 3

    Traceback (most recent call last):
      File x
    ValueError: bad label 11

  Its output is on node-b: on that launcher's console, or in its log files.
The workers of this node (node-a):
  rank 0 failed (lost a peer): raised RuntimeError: Connection closed by peer
    [127.0.0.1]:1
  rank 1 was stopped by the launcher (SIGTERM)
{thin}
0 of 3 restarts were used.
The launcher exits with code 1.
{rule}"""
    )


def test_a_spare_has_nothing_of_its_own_to_report() -> None:
    assert "The workers of this node" not in elsewhere()


def test_a_job_that_stops_before_its_restarts_are_used_has_a_reason() -> None:
    text = render(end(0, 3), restarts=4, max_restarts=10, why_over="5 rounds in succession failed so")
    assert "4 of 10 restarts were used.\n5 rounds in succession failed so.\nThe launcher exits" in text
    used = render(end(0, 3), restarts=3, max_restarts=3, why_over="all 3 restarts were used")
    assert used.count("were used") == 1
    windowed = render(end(0, 3), restarts=7, max_restarts=3, why_over="all 3 restarts of 600 s were used")
    assert "\nAll 3 restarts of 600 s were used.\n" in windowed
    assert "7 of 3" not in windowed


def test_the_line_of_a_waiting_node_names_what_is_left() -> None:
    assert render_waiting("1 of 2 nodes is here: a", None) == "waiting: 1 of 2 nodes is here: a"
    assert render_waiting("for b", 29.2) == "waiting: for b; at most 30 s more"
    assert render_waiting("for b", 599) == "waiting: for b; at most 9 min 59 s more"


class TestWaiting:
    """The line that changes, in virtual time."""

    def shown(self, play: Callable[[Console], Coroutine[Any, Any, None]], columns: int | None) -> list[str]:
        written: list[str] = []

        async def run() -> None:
            await play(Console(written.append, lambda: columns))

        run_virtually(run())
        return written

    def test_a_short_wait_prints_nothing(self) -> None:
        async def play(console: Console) -> None:
            console.show_waiting("for b", 30)
            await asyncio.sleep(REFRESH_SECONDS / 2)
            console.clear_waiting()
            await asyncio.sleep(5 * REFRESH_SECONDS)

        assert self.shown(play, 80) == self.shown(play, None) == []

    def test_on_a_terminal_one_line_counts_down_and_goes(self) -> None:
        async def play(console: Console) -> None:
            console.show_waiting("for b", 30)
            await asyncio.sleep(2.5 * REFRESH_SECONDS)
            console.info("hello")
            console.clear_waiting()
            await asyncio.sleep(5 * REFRESH_SECONDS)

        line = "\r\x1b[Kdlrover-run: waiting: for b; at most {} s more".format
        assert self.shown(play, 80) == [line(29), line(28), "\r\x1b[K", "dlrover-run: hello\n", line(28), "\r\x1b[K"]

    def test_a_narrow_terminal_gets_what_fits_in_one_line(self) -> None:
        async def play(console: Console) -> None:
            console.show_waiting("for b", None)
            await asyncio.sleep(5 * REFRESH_SECONDS)

        assert self.shown(play, 20) == ["\r\x1b[Kdlrover-run: waitin"]

    def test_no_text_of_another_node_controls_the_terminal(self) -> None:
        async def play(console: Console) -> None:
            console.show_waiting(f"for {EVIL}\nd", None)
            await asyncio.sleep(1.5 * REFRESH_SECONDS)
            console.info(f"lost {EVIL}")
            console.clear_waiting()

        assert self.shown(play, None) == ["dlrover-run: waiting: for abc d\n", "dlrover-run: lost abc\n"]

    def test_in_a_file_each_text_is_written_once_and_not_too_often(self) -> None:
        async def play(console: Console) -> None:
            for number in range(1, 60):
                console.show_waiting(f"{number // 10} nodes", 100 - number)
                await asyncio.sleep(1)
            console.clear_waiting()
            await asyncio.sleep(5 * REPEAT_SECONDS)

        assert [line.split(";")[0] for line in self.shown(play, None)] == [
            f"dlrover-run: waiting: {number} nodes" for number in range(6)
        ]


def test_text_of_times_and_ranks() -> None:
    assert [format_duration(s) for s in (0.04, 9.94, 12.3, 59.7, 185, 7380)] == [
        "0.0 s", "9.9 s", "12 s", "1 min 0 s", "3 min 5 s", "2 h 3 min",
    ]  # fmt: skip
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([5, 0, 1]) == "ranks 0, 1, 5"
    assert format_ranks([4, 2, 3, 9]) == "ranks 2-4, 9"
