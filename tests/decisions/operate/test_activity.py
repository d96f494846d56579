"""The activity of the tasks of a node: when it is reported, that no decision depends on it, and what is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.golden import assert_screens
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.records.activity import (
    MAX_TASKS,
    NodeActivity,
    PhaseTimes,
    TaskActivity,
)
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.features.operate.display.text import render_status
from dlrover_run.features.operate.protocol import TaskProgress
from dlrover_run.job_status.progress import NodeProgress, node_progress
from dlrover_run.job_status.status import JobStatus, NodeStatus
from dlrover_run.observe.activity_report import MIN_INTERVAL, ActivityReport, with_activity
from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.observe.tick import Activities, Activity
from dlrover_run.transport.messages import MAX_NODE_MESSAGE, Report, decode_from_node, encode

REFRESH = 5.0


def done(steps: int, at: float, period: float | None = 0.5, waited: float = 0.0) -> Activity:
    progress = Progress(steps, 0, waited, int(at * 1e9), StepSource.REPORT, Phase.TRAINING)
    return Activity(progress, period)


def activities(steps: int, at: float, **changes: float) -> Activities:
    return {"rank 0": done(steps, at, **changes), "rank 1": done(steps, at)}


class TestWhenItIsReported:
    def test_the_first_at_once_and_then_each_refresh(self) -> None:
        report = ActivityReport(REFRESH)
        reported = [now for now in range(100, 130) if report.take(activities(2 * now, now), {}, now)]
        assert reported == [100, 105, 110, 115, 120, 125]

    def test_nothing_where_nothing_counts_steps(self) -> None:
        report = ActivityReport(REFRESH)
        assert not any(report.take({}, {}, now) for now in range(100, 130))
        assert report.current is None

    def test_a_task_that_makes_no_steps_any_more_is_not_repeated(self) -> None:
        report = ActivityReport(REFRESH)
        report.take(activities(10, 100.0), {}, 100.0)
        changes = [now for now in range(101, 200) if report.take(activities(10, 100.0), {}, now)]
        assert len(changes) <= 99 / REFRESH
        assert report.current is not None
        assert report.current.tasks[0].idle >= 90

    @pytest.mark.parametrize(
        ("change", "counts"),
        [({"period": 0.7}, True), ({"period": 0.3}, True), ({"period": 0.55}, False), ({"period": None}, True)],
    )
    def test_another_pace_is_news_and_a_little_more_is_not(self, change: dict[str, float], counts: bool) -> None:
        report = ActivityReport(REFRESH)
        report.take(activities(10, 100.0), {}, 100.0)
        assert report.take(activities(12, 101.0, **change), {}, 101.0) is counts

    def test_a_stall_is_reported_within_a_second_and_its_end_too(self) -> None:
        report = ActivityReport(REFRESH)
        report.take(activities(10, 100.0), {}, 100.0)
        assert not report.take(activities(10, 100.0), {"rank 1": "stall.locked"}, 100.0 + MIN_INTERVAL / 2)
        assert report.take(activities(10, 100.0), {"rank 1": "stall.locked"}, 100.0 + MIN_INTERVAL)
        assert report.current is not None
        assert [task.stalled for task in report.current.tasks] == ["", "stall.locked"]
        assert report.take(activities(11, 102.0), {}, 102.0)

    def test_a_stall_is_reported_where_nothing_counts_steps(self) -> None:
        report = ActivityReport(REFRESH)
        assert report.take({}, {"rank 3": "stall.stopped"}, 100.0)
        assert report.current == NodeActivity((TaskActivity("rank 3", stalled="stall.stopped"),))

    def test_the_operation_in_which_stalled_tasks_wait_is_news(self) -> None:
        report = ActivityReport(REFRESH)
        for at, awaited in ((100.0, "all_reduce 3"), (102.0, "all_reduce 4")):
            assert report.take({}, {"rank 3": "stall.stopped"}, at, awaited=awaited)
            assert report.current is not None
            assert report.current.awaited == awaited

    def test_the_share_of_waiting_is_that_since_the_last_report(self) -> None:
        report = ActivityReport(REFRESH)
        report.take(activities(10, 100.0, waited=40.0), {}, 100.0)
        assert report.current is not None
        assert report.current.tasks[0].data_wait is None
        assert report.take(activities(10, 104.0, waited=43.0), {}, 105.0)
        assert [task.data_wait for task in report.current.tasks] == [0.6, None]

    def test_a_new_round_begins_without_the_steps_of_the_last_one(self) -> None:
        report = ActivityReport(REFRESH)
        report.follow_round(1, running=True)
        report.take(activities(10, 100.0), {}, 100.0)
        report.follow_round(1, running=True)
        assert report.current is not None
        report.follow_round(2, running=True)
        assert report.current is None
        assert report.take(activities(1, 100.5), {}, 100.5)
        report.follow_round(2, running=False)
        assert report.current is None

    def test_it_is_bounded(self) -> None:
        report = ActivityReport(REFRESH)
        many = {f"rank {rank}": done(2**53, 1e6, 1 / 3, 1e6) for rank in range(2 * MAX_TASKS)}
        report.take(many, dict.fromkeys(many, "s" * 64), 1e9)
        report.take(many, {}, 1e9 + 7)
        sent = NodeReport(node_id="a", incarnation="1", host="h" * 255, address="a", port=1, workers=2)
        message = encode(Report(with_activity(sent, report.current)))
        assert len(message) < MAX_NODE_MESSAGE / 4
        assert decode_from_node(message) == Report(with_activity(sent, report.current))


def duo(**changes: object) -> TorchJob:
    """A job that trains with a and b, both running, with c as its spare."""
    job = TorchJob(rules(2, 2, spares=1, **changes))
    job.come("a", "b", "c")
    for name in "ab":
        job.report(name, phase=NodePhase.RUNNING, ranks=job.coordinator.ranks(job.statuses[name].key))
    return job


def activity(steps: int, idle: float = 1.0, **changes: object) -> NodeActivity:
    slow = TaskActivity("rank 0", steps, 0.5, 0.1, idle)
    return NodeActivity((slow, msgspec.structs.replace(slow, name="rank 1", steps=steps + 1, **changes)))


def send(job: TorchJob, name: str, what: NodeActivity | None) -> bool:
    """Send a report in which only this is new. Return whether the coordinator would decide."""
    job.statuses[name] = msgspec.structs.replace(job.statuses[name], activity=what)
    return job.coordinator.receive(job.statuses[name], job.now)


def node(job: TorchJob, name: str, aged: bool = True) -> NodeStatus:
    status: JobStatus = job.coordinator.status("resnet", job.now, aged=aged)
    return next(each for each in status.nodes if each.node_id == name)


class TestTheCoordinator:
    def test_decides_nothing_for_it(self) -> None:
        job = duo()
        plan, members = job.plan, dict(job.coordinator.nodes)
        for steps in range(5):
            assert not send(job, "a", activity(steps))
        assert not send(job, "a", None)
        assert job.coordinator.nodes == members
        assert job.plan is plan

    def test_sees_what_comes_with_it(self) -> None:
        job = duo()
        job.statuses["a"] = msgspec.structs.replace(job.statuses["a"], phase=NodePhase.LEAVING)
        assert send(job, "a", activity(1))
        job.settle()
        assert job.coordinator.nodes[job.statuses["a"].key].report.activity is None

    def test_counts_the_changes_for_those_that_listen(self) -> None:
        job = duo()
        for what in (activity(1), activity(1), activity(2)):
            send(job, "a", what)
        assert job.coordinator.activities.changes == 2

    def test_shows_the_slowest_task_and_the_last_step_of_any(self) -> None:
        job = duo()
        send(job, "a", activity(10, idle=3.0))
        send(job, "b", activity(12, idle=1.0, data_wait=0.4))
        job.wait(2)
        assert node(job, "a").progress == NodeProgress(steps=10, step_seconds=0.5, data_wait=0.1, idle=5.0)
        assert node(job, "b").progress == NodeProgress(steps=12, step_seconds=0.5, data_wait=0.4, idle=3.0)
        assert node(job, "c").progress is None

    def test_an_age_grows_from_the_first_time_that_it_was_reported(self) -> None:
        job = duo()
        send(job, "a", activity(10, idle=1.0))
        job.wait(4)
        send(job, "a", activity(10, idle=1.0))
        job.wait(4)
        progress = node(job, "a").progress
        assert progress is not None
        assert progress.idle == pytest.approx(9.0, abs=0.1)

    def test_a_reader_of_records_knows_no_age(self) -> None:
        job = duo()
        send(job, "a", activity(10))
        progress = node(job, "a", aged=False).progress
        assert progress is not None
        assert (progress.steps, progress.idle) == (10, None)

    def test_a_stalled_worker_is_the_reason_that_is_shown(self) -> None:
        job = duo()
        send(job, "a", activity(10, stalled="stall.locked"))
        assert node(job, "a").progress is not None
        assert "rank 1" in node(job, "a").reason
        send(job, "a", activity(10))
        assert node(job, "a").reason == ""

    def test_forgets_it_with_the_node(self) -> None:
        job = duo(lost_after=4.0)
        send(job, "c", activity(1))
        job.lose("c")
        job.wait(10)
        assert not job.coordinator.activities.by_node


def test_the_screens_are_those_of_the_golden_file() -> None:
    job = duo()
    without = render_status(job.coordinator.status("resnet", job.now))
    send(job, "a", activity(10, idle=3.0))
    status = job.coordinator.status("resnet", job.now)
    here = {"a": (TaskProgress(name="rank 0", steps=17, idle=0.2, period=0.5),)}
    screens = {
        "without steps there are no columns for them": without,
        "the steps of a node elsewhere": render_status(status),
        "what an agent here reads is newer": render_status(status, None, here),
    }
    assert_screens(Path(__file__).with_name("steps.txt"), screens)


def test_a_node_without_a_task_has_no_progress() -> None:
    assert node_progress((), 0.0) is None


def times(**seconds: float) -> PhaseTimes:
    """Two workers that train now."""
    return PhaseTimes(seconds, {"train": 2})


def test_the_times_of_a_job_are_those_of_all_its_workers_and_go_on() -> None:
    job = duo()
    send(job, "a", with_times(activity(1), times(start=4.0, train=10.0)))
    send(job, "b", with_times(activity(1), PhaseTimes({"import": 3.0}, {"import": 1})))
    job.wait(2)
    shown = job.coordinator.status("job", job.now)
    assert shown.times == pytest.approx({"start": 4.0, "train": 14.0, "import": 5.0})
    assert shown.time_places == {"train": 2, "import": 1}
    read = job.coordinator.status("job", job.now, aged=False)
    assert read.times == {"start": 4.0, "train": 10.0, "import": 3.0}, "a reader of records knows no age"


def test_the_times_of_a_node_that_is_gone_stay_and_do_not_go_on() -> None:
    job = duo(lost_after=4.0)
    send(job, "a", with_times(activity(1), times(train=10.0)))
    send(job, "c", with_times(activity(1), times(spare=20.0)))
    job.lose("c")
    assert job.coordinator.status("job", job.now).time_places == {"train": 2}
    job.wait(10)
    shown = job.coordinator.status("job", job.now)
    assert "c" not in [node.node_id for node in shown.nodes]
    assert (shown.times["spare"], shown.time_places) == (20.0, {"train": 2})


def with_times(what: NodeActivity, spent: PhaseTimes) -> NodeActivity:
    return msgspec.structs.replace(what, times=spent)


@pytest.mark.parametrize("bad", [{"seconds": {"Train": 1.0}, "places": {}}, {"seconds": {"train": -1.0}, "places": {}}])
def test_times_out_of_bounds_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        msgspec.json.decode(msgspec.json.encode({"tasks": [], "times": bad}), type=NodeActivity)
