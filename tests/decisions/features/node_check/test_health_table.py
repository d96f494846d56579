"""What a user sees of a node check: the table while it runs, its results, and nothing twice."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import msgspec
import pytest
from support.golden import assert_screens
from support.screens import Screen
from support.scripted_agent import rank_assignment
from support.virtual_loop import run_virtually

from dlrover_run.console.console import REFRESH_SECONDS, Console
from dlrover_run.console.text import display_width, truncate, use_color
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import Failure
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.model import (
    HealthStatus,
    LinkRow,
    NodeCheckAssignment,
    NodeCheckProgress,
    NodeHealth,
)
from dlrover_run.features.node_check.node import NodeCheckReporter
from dlrover_run.features.node_check.node.health_table import (
    format_bandwidth,
    format_tflops,
    render_health_table,
    render_link_table,
    render_live_table,
    render_own_status,
)
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, CHECK_ONCE, NodeCheckRules
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.words.reasons import sentence
from dlrover_run.workers.reporter import ProgressReporter

PENDING, PASSED, STRAGGLER, FAULT = (
    HealthStatus.PENDING,
    HealthStatus.PASSED,
    HealthStatus.STRAGGLER,
    HealthStatus.FAULT,
)
EVIL = "a\x1b]0;owned\x07b\x1b[2J\x9b31mc\u202e\r\nd"
KILLED = "the check process of local rank 0 was killed by SIGKILL"


def node(
    host: str, status: HealthStatus = PASSED, tflops: float = 0.084, gigabytes: float = 1.25, **more: str
) -> NodeHealth:
    incarnation = more.pop("incarnation", host)
    safe = re.sub(r"\W", "-", incarnation)
    return NodeHealth(
        node_id=safe,
        incarnation=safe,
        host=host,
        status=status,
        tflops=tflops,
        gigabytes=gigabytes,
        reason=more.get("reason", ""),
    )


FOUR = (
    node("gpu-a"),
    node("gpu-b", STRAGGLER, 0.021, reason="it computes 4 times slower than the others"),
    node("gpu-c", FAULT, 0, 0, reason=KILLED),
    node("gpu-d", PENDING, 0.084, 0),
)


class TestFigures:
    @pytest.mark.parametrize(
        ("tflops", "words"),
        [(0.0843, "0.0843 TFLOP/s"), (0.084, "0.084 TFLOP/s"), (612.4, "612 TFLOP/s"), (1979, "1979 TFLOP/s"),
         (45.67, "45.7 TFLOP/s"), (1e-9, "<0.001 TFLOP/s"), (1e12, "1e+12 TFLOP/s"), (0, "-")],
    )  # fmt: skip
    def test_a_speed_has_three_digits_that_count(self, tflops: float, words: str) -> None:
        assert format_tflops(tflops) == words

    @pytest.mark.parametrize(
        ("gigabytes", "words"),
        [(1.25, "1.25 GB/s"), (0.24, "240 MB/s"), (0.0024, "2.4 MB/s"), (387.6, "388 GB/s"), (0, "-")],
    )
    def test_a_bandwidth_below_one_is_reported_in_the_smaller_unit(self, gigabytes: float, words: str) -> None:
        assert format_bandwidth(gigabytes) == words


class TestWidths:
    def test_east_asian_characters_take_two_columns(self) -> None:
        assert (display_width("ab"), display_width("漢字"), display_width("é")) == (2, 4, 1)

    def test_a_line_is_cut_before_a_character_that_has_only_half_its_room(self) -> None:
        assert [truncate("a漢字", width) for width in range(6)] == ["", "a", "a", "a漢", "a漢", "a漢字"]


class TestTable:
    def test_a_node_that_passed_with_a_note_is_marked(self) -> None:
        odd = node("gpu-a", reason="its link to gpu-b failed, and two nodes do not show which of them is faulty")
        assert "\n! gpu-a" in render_health_table([odd, node("gpu-b")])
        assert "\n  gpu-b" in render_health_table([odd, node("gpu-b")])

    def test_colours_are_for_terminals_only_and_change_no_text(self) -> None:
        plain, painted = render_health_table(FOUR, 80), render_health_table(FOUR, 80, color=True)
        assert "\x1b" not in plain
        assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain
        assert next(line for line in painted.splitlines() if "gpu-c" in line).startswith("\x1b[1;31m")

    def test_text_of_a_node_does_not_control_the_terminal(self) -> None:
        rows = [node(EVIL, FAULT, reason=EVIL), node("gpu-b")]
        links = [LinkRow(0, 1, 0, EVIL)]
        for text in (
            render_health_table(rows),
            render_link_table(rows, links, 2.0),
            "\n".join(render_live_table(rows, 79, 22)),
        ):
            assert re.fullmatch(r"[ -~\n]*", text), repr(text)
        assert len(render_health_table(rows).splitlines()) == 4
        assert "abc d" in render_health_table(rows)
        assert render_own_status(rows[0]).isprintable()

    def test_several_nodes_of_one_name_are_distinguished_by_their_ids(self) -> None:
        rows = [node("box", incarnation="7-a"), node("gpu-a"), node("box", incarnation="8-b")]
        lines = render_health_table(rows).splitlines()
        assert [line[:13].strip() for line in lines[2:]] == ["box (7-a)", "gpu-a", "box (8-b)"]


class TestFitting:
    @pytest.mark.parametrize("columns", [1, 10, 20, 39, 40, 59, 60, 79, 200])
    @pytest.mark.parametrize("lines", [-1, 0, 1, 2, 3, 5, 22, 64, 65])
    def test_a_live_table_never_takes_more_room_than_there_is(self, columns: int, lines: int) -> None:
        hosts = ["gpu-a", "漢字" * 60, EVIL, "x" * 255, "é" * 255]
        rows = [
            node(hosts[number % 5], list(HealthStatus)[number % len(HealthStatus)], 1e12, 1e12, reason=KILLED)
            for number in range(64)
        ]
        drawn = render_live_table(rows, columns, lines)
        assert len(drawn) <= max(0, lines)
        assert all(display_width(line) <= columns for line in drawn)

    def test_of_64_nodes_on_24_lines_the_most_urgent_are_shown(self) -> None:
        rows = [node(f"gpu-{number}") for number in range(64)]
        rows[60] = node("gpu-60", FAULT, 0, 0)
        rows[50] = node("gpu-50", PENDING, 0, 0)
        rows[63] = node("gpu-63", STRAGGLER, 0.01)
        drawn = render_live_table(rows, 79, 22)
        assert len(drawn) == 22
        assert [line.split()[:2] for line in drawn[-4:-1]] == [["gpu-50", "..."], ["!", "gpu-60"], ["!", "gpu-63"]]
        assert drawn[-1] == "  and 44 more: 44 passed"


class TestLinks:
    NODES = (node("gpu-a"), node("gpu-b"), node("gpu-c"), node("gpu-d"))

    def test_links_that_are_much_alike_are_not_marked(self) -> None:
        links = [LinkRow(0, 1, 6), LinkRow(0, 2, 10), LinkRow(1, 2, 11), LinkRow(2, 2, 10)]
        text = render_link_table(self.NODES, links, 2.0)
        assert "slow" not in text
        assert "!" not in text
        assert "within gpu-c" in text

    @pytest.mark.parametrize(("threshold", "marked"), [(1.5, 2), (2.0, 1), (4.0, 0)])
    def test_slow_is_what_the_job_calls_slow(self, threshold: float, marked: int) -> None:
        links = [LinkRow(0, 1, 3), LinkRow(0, 2, 6), LinkRow(0, 3, 10), LinkRow(1, 2, 10), LinkRow(1, 3, 10)]
        assert render_link_table(self.NODES, links, threshold).count("  slow") == marked


def checking(*rows: NodeHealth) -> Assignment:
    return Assignment(waiting=Waiting(sentence("round 1 of a node check"), 60.0, (NodeCheckProgress(rows),)))


def passed(*others: NodeHealth, links: tuple[LinkRow, ...] = (), own: NodeHealth = FOUR[0]) -> Assignment:
    return Assignment(
        phase=PlanPhase.TRAINING,
        ranks=rank_assignment(nodes=3, world_size=3),
        parts=(NodeCheckAssignment(health=own, health_table=others, link_table=links),),
    )


def narrated(
    columns: int | None, *assignments: Assignment, lines: int = 24, worker: str = "", rules: JobRules | None = None
) -> list[str]:
    """Return the output when each of these is reported, and reported again, and some time passes. A worker that has
    not ended yet writes its last output after the first of them."""
    written: list[str] = []
    spec = JobSpec(
        entrypoint=Entrypoint("program", "/bin/sh", ("-c", "")),
        run_id="job",
        rendezvous=kinds.Master("node0", 29400),
        rules=rules or JobRules(),
    )

    color = use_color(columns is not None, {"TERM": "xterm", **os.environ})

    async def run() -> None:
        console = Console(written.append, lambda: columns, lambda: lines, color=color)
        details = NodeCheckReporter(spec, console)
        reporter = ProgressReporter(spec, console, lambda: details)
        for number, assignment in enumerate(assignments):
            reporter.update(assignment)
            await asyncio.sleep(2.5 * REFRESH_SECONDS)
            if number == 0:
                written.append(worker)
            reporter.update(assignment)
        console.clear_waiting()

    run_virtually(run())
    return written


def screen_of(written: list[str], rows: int = 24, columns: int = 80) -> list[str]:
    screen = Screen(rows, columns)
    screen.feed("".join(written))
    return screen.lines


OPEN = (node("a", PENDING, 0.084, 0), node("b", PENDING, 0, 0), node("c", PENDING, 0.084, 0))
DONE = (node("a"), node("b", STRAGGLER, 0.02, reason="it computes 4 times slower"), node("c"))


class TestOnATerminal:
    def test_the_table_is_drawn_again_in_its_place(self) -> None:
        shown = narrated(80, checking(*OPEN), checking(DONE[0], *OPEN[1:]))
        lines = screen_of(shown[:-1])
        assert lines[0] == "dlrover-run: waiting: round 1 of a node check; at most 58 s more"
        assert [line.split() for line in lines[1:]] == [
            ["node", "compute", "communication", "status"],
            ["a", "0.084", "TFLOP/s", "1.25", "GB/s", "passed"],
            ["b", "...", "...", "..."],
            ["c", "0.084", "TFLOP/s", "...", "..."],
        ]

    def test_it_goes_with_the_end_of_the_check_and_what_has_come_of_it_stays(self) -> None:
        shown = narrated(80, checking(*OPEN), checking(*DONE), passed(*DONE))
        assert "\x1b[33m! b" in "".join(shown)
        assert screen_of(shown) == [*render_health_table(DONE, 80).splitlines(), ""]

    def test_nothing_of_it_is_left_where_nothing_has_come_of_it(self) -> None:
        assert screen_of(narrated(80, checking(*OPEN), checking(*DONE))) == [""]

    def test_the_last_lines_of_a_worker_are_neither_lost_nor_doubled(self) -> None:
        words = "".join(f"word {number}\n" for number in range(3))
        shown = narrated(80, checking(*OPEN), passed(*DONE), worker=words)
        lines = screen_of(shown)
        assert [sum(f"word {number}" in line for line in lines) for number in range(3)] == [1, 1, 1]
        assert lines[-len(DONE) - 3 :] == [*render_health_table(DONE, 80).splitlines(), ""]

    @pytest.mark.parametrize(("rows", "columns"), [(24, 80), (24, 40), (10, 80), (4, 40), (3, 80), (2, 80), (1, 80)])
    def test_64_nodes_scroll_nothing_away_but_what_was_there(self, rows: int, columns: int) -> None:
        many = [node(f"gpu-{number}" + "漢" * 50, PENDING) for number in range(64)]
        shown = narrated(columns, checking(*many), checking(*many[:-1], node("gpu-63", FAULT)), lines=rows)
        screen = Screen(rows, columns)
        screen.feed("\n" * rows + "said before\n")
        # The emulated terminal counts a wide character as one column, so there is enough room.
        screen.feed("".join(shown[:-1]))
        kept = screen.lines[screen.lines.index("said before") + 1 :]
        assert len(kept) <= max(1, rows - 1)
        assert sum("waiting" in line for line in kept) == 1


class TestElsewhere:
    def test_the_next_check_reports_its_own_news(self) -> None:
        shown = narrated(None, checking(*DONE), checking(*OPEN), checking(*DONE))
        assert sum("straggler" in line for line in shown) == 2


def lines_of(*assignments: Assignment, rules: JobRules | None = None) -> list[str]:
    """Return the lines in a file without those about waiting."""
    lines = "".join(narrated(None, *assignments, rules=rules)).splitlines()
    return [line for line in lines if "waiting" not in line]


class TestBetweenTwoRounds:
    """The cause of the end of the last round is reported before the result of the check between the rounds."""

    FAILED = Assignment(
        restart_count=1, failure=Failure(3, "b", "exited with code 1"), waiting=Waiting(sentence("for b"))
    )
    CHECKED = msgspec.structs.replace(passed(*DONE, node("d")), restart_count=1, failure=FAILED.failure)

    def test_where_no_check_comes_the_line_of_the_restart_reports_it(self) -> None:
        assert lines_of(self.FAILED, rules=JobRules(parts=(NodeCheckRules(check=CHECK_ONCE),))) == []

    def test_the_failure_of_a_round_that_trains_again_is_old(self) -> None:
        spare = msgspec.structs.replace(self.FAILED, phase=PlanPhase.TRAINING)
        assert lines_of(spare, rules=JobRules(parts=(NodeCheckRules(check=CHECK_ALWAYS),))) == []


class TestOnceForEachCheck:
    GATHERING = Assignment(
        phase=PlanPhase.GATHERING, parts=(NodeCheckAssignment(health=FOUR[0]),), waiting=Waiting(sentence("a was lost"))
    )

    def test_a_restart_of_the_workers_reports_nothing_again(self) -> None:
        assert lines_of(passed(*DONE), self.GATHERING, passed(*DONE)) == lines_of(passed(*DONE))

    def test_a_node_that_is_gone_or_has_another_rank_is_no_news(self) -> None:
        links = (LinkRow(0, 1, 2.0), LinkRow(0, 2, 1.0), LinkRow(1, 2, 1.5))
        fewer = passed(DONE[2], DONE[0], links=(LinkRow(0, 1, 1.0),))
        assert lines_of(passed(*DONE, links=links), self.GATHERING, fewer) == lines_of(passed(*DONE, links=links))

    def test_links_are_reported_once_after_the_nodes(self) -> None:
        links = (LinkRow(0, 1, 2.0), LinkRow(0, 2, 0.5), LinkRow(1, 2, 2.0))
        lines = lines_of(passed(*DONE, links=links), self.GATHERING, passed(*DONE, links=links))
        assert [line for line in lines if line.startswith("dlrover-run: ")] == [
            "dlrover-run: node check of 3 nodes: 2 passed, 1 straggler",
            "dlrover-run: bandwidth of 3 links, median 2 GB/s",
        ]

    def test_links_of_nodes_that_are_not_named_are_left_out(self) -> None:
        assert lines_of(passed(*DONE, links=(LinkRow(0, 7, 2.0),))) == lines_of(passed(*DONE))

    def test_a_node_that_leaves_for_it_reports_so_in_its_last_report_alone(self) -> None:
        dismissed = NodeHealth(
            node_id="c", incarnation="c", host="c", status=FAULT, reason=KILLED, dismissed=True
        )  # fmt: skip
        assert lines_of(Assignment(parts=(NodeCheckAssignment(health=dismissed),))) == []

    def test_what_is_still_open_is_not_reported(self) -> None:
        assert lines_of(Assignment(parts=(NodeCheckAssignment(health=OPEN[0]),))) == []


def test_the_tables_and_lines_are_those_of_the_golden_file() -> None:
    always = (NodeCheckRules(check=CHECK_ALWAYS),)
    links = [LinkRow(0, 1, 12), LinkRow(0, 2, 0.9), LinkRow(0, 3, 0, "it timed out"), LinkRow(1, 2, 11)]
    failed = TestBetweenTwoRounds.FAILED
    between = lines_of(
        passed(*DONE), failed, TestBetweenTwoRounds.CHECKED, rules=JobRules(min_nodes=3, max_nodes=3, parts=always)
    )
    alone = [lines_of(passed(*own), TestOnceForEachCheck.GATHERING, passed(*own)) for own in ((), (FOUR[0],))]
    assert alone[0] == alone[1]
    screens = {
        "three nodes": render_health_table(FOUR[:3], 120),
        "three nodes on a narrow terminal": render_health_table(FOUR[:3], 40),
        "links": render_link_table(TestLinks.NODES, links, 2.0),
        "all links failed": render_link_table(TestLinks.NODES, [LinkRow(0, 1)], 2.0),
        "this node has passed": render_own_status(FOUR[0]),
        "this node is a straggler": render_own_status(FOUR[1]),
        "this node has passed in doubt": render_own_status(node("a", gigabytes=0, reason="its link failed")),
        "in a file: bad news at once, and all the rest at the end": "".join(
            narrated(None, checking(*OPEN), checking(OPEN[0], *DONE[1:]), checking(*DONE), passed(*DONE))
        ).rstrip("\n"),
        "the failure of the last round comes before the table of the next one": "\n".join(between),
        "the same on one node": "\n".join(lines_of(failed, rules=JobRules(parts=always))),
        "a node that receives only its own row, at both rounds": "\n".join(alone[0]),
    }
    assert_screens(Path(__file__).with_name("health_tables.txt"), screens)


def test_a_tick_without_news_draws_the_same_table() -> None:
    written: list[str] = []

    async def run() -> None:
        console = Console(written.append, lambda: 80)
        console.show_waiting("for b", 30, lambda columns, lines: ["one", "two"])
        await asyncio.sleep(3.5 * REFRESH_SECONDS)
        console.show_waiting("for b", 30)
        await asyncio.sleep(REFRESH_SECONDS)
        console.clear_waiting()

    run_virtually(run())
    line = "dlrover-run: waiting: for b; at most {} s more".format
    assert written == [
        *(f"\r\x1b[J\r\none\r\ntwo\r\x1b[2A{line(left)}" for left in (29, 28, 27)),
        f"\r\x1b[J{line(30)}",
        "\r\x1b[K",
    ]
