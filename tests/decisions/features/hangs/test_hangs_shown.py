"""A hang comes first where an operator looks: in the headline, the order and the pace of `status`, and in `top`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.golden import assert_screens

from dlrover_run.coordination.records.activity import WAITS, TaskActivity
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.operate.display.text import render_status, status_lines
from dlrover_run.features.operate.display.top import window
from dlrover_run.features.operate.protocol import TaskProgress
from dlrover_run.job_status.hang_text import HangingNode, hang_headline, stall_reason
from dlrover_run.job_status.progress import (
    HangingTask,
    NodeProgress,
    node_progress,
)
from dlrover_run.job_status.status import (
    JobState,
    JobStatus,
    NodeCondition,
    NodeStatus,
)

STOPPED = GuiltCode.STOPPED.code
OPERATION = "all_reduce 4,812 of the default group"


def hanging(*codes: str, awaited: str = "") -> NodeProgress:
    """The progress of a node whose ranks from 0 on have these codes; the empty one makes progress."""
    tasks = [TaskActivity(f"rank {rank}", 7, 0.5, stalled=code) for rank, code in enumerate(codes)]
    found = node_progress(tasks, 0.0, awaited)
    assert found is not None
    return found


def job(*progress: NodeProgress) -> JobStatus:
    """A job that trains, with a node for each."""
    nodes = tuple(
        NodeStatus(
            node=place, host=f"h{place}", node_id=str(place), state=NodeCondition.TRAINING, seconds=1.0, workers=1,
            first_rank=place, progress=one,
        )
        for place, one in enumerate(progress)
    )  # fmt: skip
    hangs = [HangingNode(f"node {place}", one) for place, one in enumerate(progress) if one.stalled]
    return JobStatus(
        job="17e9c1b2-0000-4000-8000-000000000000", state=JobState.TRAINING, seconds=2340.0, age=4000.0, epoch=1,
        round=2, min_nodes=1, max_nodes=len(nodes), round_nodes=len(nodes), workers=len(nodes), max_restarts=3,
        restarts_left=3, node_counts={"training": len(nodes)}, nodes=nodes, hang=hang_headline(hangs, "worker"),
    )  # fmt: skip


def test_the_headlines_and_reasons_are_those_of_the_golden_file() -> None:
    nodes = {
        "no worker hangs": [hanging("", "")],
        "one worker hangs": [hanging("", ""), hanging(STOPPED)],
        "others wait for it": [hanging(WAITS, WAITS), hanging(GuiltCode.LOCKED.code)],
        "the operation in which they wait is known": [
            hanging(WAITS, awaited=OPERATION),
            hanging(GuiltCode.LAGS.code, awaited=OPERATION),
        ],
        "it is not known for which they wait": [hanging(WAITS, WAITS)],
        "a code of a later version": [hanging("later.version")],
        "five workers hang": [hanging(*[STOPPED] * 5)],
    }
    reasons = {
        "of a node with one that hangs": stall_reason(hanging(STOPPED, WAITS), culprit_known=True),
        "of a node that waits": stall_reason(hanging(WAITS), culprit_known=True),
        "of one that waits, and it is not known for which": stall_reason(hanging(WAITS), culprit_known=False),
        "of a node that makes progress": stall_reason(hanging(""), culprit_known=True),
        "the whole status, with the node that hangs first": render_status(
            job(hanging(""), hanging(WAITS), hanging(STOPPED))
        ),
    }
    headlines = {
        title: hang_headline([HangingNode(f"node {place}", node) for place, node in enumerate(given)], "worker")
        for title, given in nodes.items()
    }
    assert [title for title, text in (headlines | reasons).items() if not text] == [
        "no worker hangs",
        "of a node that makes progress",
    ]
    assert_screens(Path(__file__).with_name("hangs_shown.txt"), headlines | reasons)


def test_the_node_that_hangs_is_first_and_red_and_has_no_pace() -> None:
    lines = status_lines(job(hanging(""), hanging(WAITS), hanging(STOPPED)))
    assert lines.top[0] == ("1 worker hangs: rank 0 on node 2 (stopped by a signal); 1 worker waits for it", True)
    assert [(line.text.split()[0], line.bad) for line in lines.nodes] == [("2", True), ("0", False), ("1", False)]
    columns = lines.head[-1].text.split("  ")
    assert "STEP/S" in columns
    # The pace that its agent here reads is that of the past too.
    here = {str(place): [TaskProgress(name="rank 0", steps=7, idle=9.0, period=0.5)] for place in range(3)}
    for known in (None, here):
        paces = [line.text[lines.head[-1].text.index("STEP/S") :].split()[0] for line in status_lines(
            job(hanging(""), hanging(WAITS), hanging(STOPPED)), None, known).nodes]  # fmt: skip
        assert paces == ["-", "2", "-"]


@pytest.mark.parametrize("width", [80, 100])
def test_what_is_known_of_a_job_stays_on_a_narrow_terminal(width: int) -> None:
    """A job's id of 36 characters pushed the last figures out of it."""
    lines = [line.text for line in status_lines(job(hanging("")), width=width).top]
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("job 17e9c1b2   training for 39 min")
    assert "up 1 h 6 min" in " ".join(lines)
    assert "1 node " in lines[0], "not `1 of 1 nodes`"


def test_top_shows_how_many_nodes_are_left_out_and_scrolls() -> None:
    status = status_lines(job(*[hanging("")] * 39, hanging(STOPPED)))
    first = window(status, 24, 0)
    assert len(first.lines) == 24
    assert first.lines[5].text.startswith("39 "), "the node that hangs"
    assert first.lines[-1].text.startswith("… 22 more nodes")
    last = window(status, 24, 1000)
    assert len(last.lines) == 24
    assert last.lines[-2].text.startswith("38 ")
    assert last.lines[-1].text.startswith("22 above")
    assert last.first == 22
    assert [line.text for line in window(status, 60, 5).lines[:-1]] == render_status(
        job(*[hanging("")] * 39, hanging(STOPPED))
    ).split("\n")


def test_workers_that_make_progress_wait_in_no_operation() -> None:
    assert hanging("", awaited=OPERATION).awaited == ""


def test_the_code_of_a_hang_travels_with_the_status() -> None:
    assert hanging(STOPPED, WAITS, "").hangs == (HangingTask("rank 0", STOPPED),)
    assert hanging(STOPPED, WAITS, "").stalled == ("rank 0", "rank 1")
