"""The report of a failed job as text, case by case."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.golden import assert_screens
from support.scripted_agent import rank_assignment
from support.virtual_loop import run_virtually

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


def elsewhere(*ends: WorkerExit, trace: str = "", **more: object) -> str:
    failure = Failure(3, "node-b", "raised ValueError: bad label 11", trace=trace)
    report = FailureReport("train.py", "node-a", failure, ends, restarts=0, max_restarts=0, exit_code=1)
    return render_failure(replace(report, **more))  # type: ignore[arg-type]


def test_the_reports_are_those_of_the_golden_file() -> None:
    peer = PEER.format(port=36863)
    recorded = RecordedError("KeyError: 'w'", "Traceback (most recent call last):\n  File x\nKeyError: 'w'\n", MOMENT)
    hundred = "".join(f"line {number}\n" for number in range(100))
    early = {"restarts": 4, "max_restarts": 10, "why_over": "5 rounds in succession failed so"}
    used = {"restarts": 3, "max_restarts": 3, "why_over": "all 3 restarts were used"}
    windowed = {"restarts": 7, "max_restarts": 3, "why_over": "all 3 restarts of 600 s were used"}
    screens = {
        "an exception, and what the others did": render(
            end(1, 1, stderr_tail=TRACE),
            end(0, 1, 0.12, stderr_tail=peer),
            *map(stopped, (2, 3, 4)),
            restarts=3,
            max_restarts=3,
        ),
        "an exit code": render(end(0, 3)),
        "SIGKILL by another process": render(end(0, -9)),
        "a segmentation fault": render(end(0, -11)),
        "out of memory": render(end(0, -9, oom_kill="the limit was hit")),
        "an error file": render(end(12, 3, error_file="/logs/error.json")),
        "a recorded traceback is preferred to the end of the output": render(
            end(0, 1, error=recorded, stderr_tail=TRACE)
        ),
        "without a traceback the end of standard error": render(end(0, 3, stderr_tail=hundred)),
        "log files": render(end(0, 1, stderr_path="/logs/0/stderr.log", stdout_path="/logs/0/stdout.log")),
        "a log file of standard output alone": render(end(0, 1, stdout_path="/logs/0/stdout.log")),
        "others: success, a failure at once, a failure before a stop, SIGKILL": render(
            end(0, 3),
            end(1, 0),
            end(2, 4, 0.001),
            replace(stopped(3), error=RecordedError("KeyError: 'w'", "", MOMENT)),
            stopped(4, by=signal.SIGKILL),
        ),
        "the traceback of a stopped worker that recorded nothing": render(
            end(0, 1, stderr_tail=peer), replace(stopped(1), stderr_tail=TRACE), stopped(2)
        ),
        "some restarts were used": render(end(0, 3), restarts=1, max_restarts=2, exit_code=7),
        "the one restart was used": render(end(0, 3), restarts=1, max_restarts=1, exit_code=7),
        "the job stops before its restarts are used": render(end(0, 3), **early),
        "all restarts were used": render(end(0, 3), **used),
        "all restarts of a window were used": render(end(0, 3), **windowed),
        "the failure of another node, on a node with workers": elsewhere(
            end(0, 1, 0.1, stderr_tail=PEER.format(port=1)),
            stopped(1),
            trace="Traceback (most recent call last):\n  File x\nValueError: bad label 11",
            max_restarts=3,
        ),
    }
    assert_screens(Path(__file__).with_name("failure_report.txt"), screens)
    # Each report is a screen of its own, and says of no worker that it failed where another one did.
    assert all(text.count("Root Cause") == 1 for text in screens.values())


def test_the_lines_are_those_of_the_golden_file() -> None:
    failure = Failure(3, "gpu09", "raised ValueError: x", node_rank=1)
    place = rank_assignment(3, node_rank=1, nodes=2, first_rank=2, world_size=6, store_address="::1", store_port=4711)
    lines = {
        "a node that did not fail": render_remote_failure(f"{failure}; all 2 restarts were used", failure, 74),
        "a signal, one node": render_shutdown("workers", None, alone=True, again=False),
        "a signal, one of several nodes": render_shutdown("workers", None, alone=False, again=True),
        "a signal, with the time to end": render_shutdown("workers", 30.0, alone=True, again=False),
        "the same on a terminal": render_shutdown("workers", 30.0, alone=False, again=True),
        "a restart": render_restart("rank 1 raised ValueError:\n  x.", 1, 3, 12.34),
        "a restart that counts in a window": render_restart("rank 1 exited with code 3", 7, 3, 12.34, 600.0),
        "a round that costs nothing": render_membership_change("node-b was lost", rank_assignment(3, nodes=2), 185),
        "the ranks of a node with one worker": render_rank_assignment(replace(place, workers=1)),
        "the ranks of a node with four": render_rank_assignment(replace(place, workers=4)),
        "a node waits": render_waiting("1 of 2 nodes is here: a", None),
        "a node waits for some seconds": render_waiting("for b", 29.2),
        "a node waits for some minutes": render_waiting("for b", 599),
        "times": ", ".join(format_duration(seconds) for seconds in (0.04, 9.94, 12.3, 59.7, 185, 7380)),
        "ranks": "; ".join(format_ranks(ranks) for ranks in ([3], [5, 0, 1], [4, 2, 3, 9])),
    }
    assert_screens(Path(__file__).with_name("failure_lines.txt"), lines)
    assert all(len(text.splitlines()) == 1 for text in lines.values())


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


def test_a_spare_has_nothing_of_its_own_to_report() -> None:
    assert "The workers of this node" not in elsewhere()


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
