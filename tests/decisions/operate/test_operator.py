"""What an operator sees of a job, and what follows from the requests to drain a node and to stop the job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from support.golden import assert_screens
from support.node_truth import Truth
from support.policy_parts import check_part
from support.virtual_torch import KILLED, TorchJob, rules

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.requests import Action, OperatorRequest, RequestFailed
from dlrover_run.features.node_check.rules import CHECK_ONCE
from dlrover_run.features.operate.commands.running import drain_problem
from dlrover_run.features.operate.display.ids import short_ids
from dlrover_run.features.operate.display.text import Effectiveness, render_status
from dlrover_run.features.operate.jobs.event_logs import parse_since
from dlrover_run.features.operate.jobs.job_table import JobRow, render_jobs
from dlrover_run.features.operate.jobs.survey import choose, group
from dlrover_run.features.operate.protocol import AgentInfo, TaskProgress
from dlrover_run.job_status import status as status_records
from dlrover_run.job_status.status import (
    JobState,
    JobStatus,
    NodeCondition,
    NodeStatus,
)
from dlrover_run.spec import SpecError
from dlrover_run.words.reasons import Code, codes


def trio(**changes: object) -> TorchJob:
    """A job that trains with a and b, with c as its spare."""
    job = TorchJob(rules(2, 2, spares=1, max_restarts=3, **changes))
    job.come("a", "b", "c")
    return job


def status(job: TorchJob) -> JobStatus:
    return job.coordinator.status("resnet", job.now)


def request(job: TorchJob, action: Action, node: str = "") -> None:
    job.coordinator.request(OperatorRequest(action, node, by="ann@n01"), job.now)
    job.settle()


def node(job: TorchJob, name: str) -> NodeStatus:
    return next(each for each in status(job).nodes if each.node_id == name)


class TestStatus:
    def test_a_waiting_job_shows_the_reason_and_the_time_left(self) -> None:
        job = TorchJob(rules(2, 2))
        job.come("a")
        job.wait(5)
        found = status(job)
        assert (found.state, found.round, found.workers, found.node_counts) == (JobState.WAITING, 0, 0, {"waiting": 1})
        assert found.waiting
        assert found.waiting_seconds == pytest.approx(job.rules.join_timeout - 5, abs=1)

    def test_nodes_of_the_round_come_first_and_a_spare_has_no_rank(self) -> None:
        found = status(trio())
        assert (found.state, found.round, found.round_nodes, found.workers) == (JobState.TRAINING, 1, 2, 4)
        assert [(each.node, each.host, each.first_rank) for each in found.nodes] == [
            (0, "a", 0), (1, "b", 2), (None, "c", None),
        ]  # fmt: skip
        assert found.node_counts == {"spare": 1, "training": 2}

    def test_a_failure_costs_one_restart_and_its_reason_stays(self) -> None:
        job = trio()
        job.fail("b")
        found = status(job)
        assert (found.round, found.restarts, found.restarts_left) == (2, 1, 2)
        assert Code.WORKER_FAILED.within(found.reasons)
        assert KILLED.exit_text in found.reason

    def test_a_node_whose_connection_has_ended_is_shown_until_it_is_lost(self) -> None:
        job = trio(lost_after=4.0)
        job.lose("b")
        job.wait(1)
        assert (node(job, "b").state, node(job, "b").seconds) == (NodeCondition.DISCONNECTED, 1.0)
        job.wait(5)
        assert [each.node_id for each in status(job).nodes] == ["a", "c"]

    def test_a_node_that_leaves_is_draining(self) -> None:
        job = trio()
        job.report_phase("b", NodePhase.LEAVING)
        assert node(job, "b").state is NodeCondition.DRAINING

    def test_a_node_that_is_checked_is_not_shown_as_waiting(self) -> None:
        job = TorchJob(rules(2, 2, check=CHECK_ONCE), truth=Truth())
        job.deaf = {"a", "b"}
        job.come("a", "b")
        assert {each.state for each in status(job).nodes} == {NodeCondition.CHECKING}

    def test_a_job_that_has_succeeded(self) -> None:
        job = trio()
        job.succeed("a", "b")
        found = status(job)
        assert (found.state, node(job, "a").state) == (JobState.SUCCEEDED, NodeCondition.SUCCEEDED)

    def test_times_of_a_reader_of_records_are_unknown(self) -> None:
        job = trio()
        found = job.coordinator.status("resnet", job.now, aged=False)
        assert (found.age, found.seconds, {each.seconds for each in found.nodes}) == (None, None, {None})

    def test_the_nodes_of_a_large_job_that_are_left_out_are_those_that_train(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status_records, "MAX_SHOWN", 3)
        job = TorchJob(rules(5, 6, lost_after=10.0))
        job.come(*"abcdef")
        job.lose("e")
        found = status(job)
        assert [each.node_id for each in found.nodes] == ["a", "b", "e"]
        assert (found.nodes_omitted, found.node_counts) == (3, {"disconnected": 1, "training": 5})

    def test_it_survives_encoding(self) -> None:
        found = status(trio())
        assert msgspec.json.decode(msgspec.json.encode(found), type=JobStatus) == found


class TestDrain:
    @pytest.mark.parametrize("name", ["1", "b"])
    def test_only_the_node_that_is_named_is_asked_to_leave(self, name: str) -> None:
        job = trio()
        request(job, Action.DRAIN, name)
        asked = {key.node_id: job.coordinator.assignment(key).drains for key in job.coordinator.nodes}
        assert asked == {"a": False, "b": True, "c": False}
        assert job.plan.key.number == 1

    def test_a_spare_replaces_it_and_it_costs_no_restart(self) -> None:
        job = trio()
        request(job, Action.DRAIN, "b")
        job.report_phase("b", NodePhase.LEAVING)
        job.report_phase("b", NodePhase.LEFT)
        assert (job.ranks, job.plan.restart_count, codes(job.plan.reasons)) == (["a", "c"], 0, ("left_on_request",))

    def test_a_spare_can_be_drained(self) -> None:
        job = trio()
        request(job, Action.DRAIN, "c")
        key = job.statuses["c"].key
        assert job.coordinator.assignment(key).drains

    def test_a_new_coordinator_asks_again(self) -> None:
        job = trio()
        request(job, Action.DRAIN, "b")
        job.succeed_by_another(9, with_journal=True)
        job.come_back("a", "b", "c")
        assert job.coordinator.assignment(job.statuses["b"].key).drains

    def test_a_name_that_no_node_or_several_nodes_have_is_refused(self) -> None:
        job = trio()
        with pytest.raises(RequestFailed):
            request(job, Action.DRAIN, "n99")
        same_host = TorchJob(rules(2, 2))
        same_host.come("a", "b", host="vm")
        with pytest.raises(RequestFailed, match="0, 1"):
            request(same_host, Action.DRAIN, "vm")
        request(same_host, Action.DRAIN, "1")
        assert [key.node_id for key in same_host.plan.draining] == ["b"]


class TestStop:
    def test_the_job_ends_on_every_node_without_a_failure(self) -> None:
        job = trio()
        job.fail("b")
        request(job, Action.STOP)
        assert (job.plan.phase, job.plan.failure, job.plan.reasons) == (
            PlanPhase.FAILED, None, (Code.STOPPED_ON_REQUEST(by="ann@n01"),),
        )  # fmt: skip
        assert status(job).state is JobState.FAILED

    def test_a_job_that_waits_can_be_stopped_and_one_that_is_over_cannot(self) -> None:
        job = TorchJob(rules(2, 2))
        job.come("a")
        request(job, Action.STOP)
        assert job.plan.phase is PlanPhase.FAILED
        with pytest.raises(RequestFailed):
            request(job, Action.STOP)

    def test_a_request_is_judged_after_those_that_wait_for_the_same_decision(self) -> None:
        job = trio()
        job.coordinator.request(OperatorRequest(Action.STOP), job.now)
        with pytest.raises(RequestFailed):
            job.coordinator.request(OperatorRequest(Action.DRAIN, "b"), job.now)

    def test_a_running_node_check_ends_with_the_job(self) -> None:
        job = TorchJob(rules(2, 2, check=CHECK_ONCE), truth=Truth())
        job.deaf = {"a", "b"}
        job.come("a", "b")
        request(job, Action.STOP)
        assert job.plan.phase is PlanPhase.FAILED
        assert all(check_part(job.assignment(name)).check_task is None for name in "ab")


class TestText:
    def test_control_characters_of_a_node_are_replaced(self) -> None:
        job = TorchJob(rules(2, 2))
        job.come("a", host="evil\x1b[2Jhost")
        assert "\x1b" not in render_status(status(job))


class TestDrainOfTooFew:
    def test_a_drain_is_possible_with_a_spare(self) -> None:
        assert drain_problem(status(trio()), "1") is None

    def test_a_drain_that_leaves_too_few_nodes_is_refused(self) -> None:
        job = TorchJob(rules(2, 2))
        job.come("a", "b")
        assert drain_problem(status(job), "b") is not None
        assert drain_problem(status(job), "n99") is None, "the coordinator says that there is none"

    def test_a_node_that_is_draining_does_not_count(self) -> None:
        job = trio()
        job.report_phase("c", NodePhase.LEAVING)
        assert drain_problem(status(job), "1") is not None


def agent(pid: int, job: str = "resnet", backend: str = "master") -> tuple[str, AgentInfo]:
    names = {"job": job, "program": "dlrover-run", "backend": backend, "host": "vm", "node_id": "a"}
    # In a container beside the agent has other pids than here.
    info = AgentInfo(**names, pid=1, pid_here=pid, launcher_here=1000 + pid)
    return f"s{pid}", info


class TestWhichJob:
    def test_agents_are_grouped_by_job(self) -> None:
        assert len(group([agent(1), agent(2)])) == 1
        assert len(group([agent(1, backend="static"), agent(2, backend="static")])) == 2
        assert len(group([agent(1), agent(2, job="other")])) == 2

    @pytest.mark.parametrize(
        ("word", "pids"),
        [
            ("resnet", [1]),
            ("res", [1, 2]),
            ("resnet-2", [2]),
            ("12", [12]),
            ("12f", [3]),
            ("1012", [12]),
            ("none", [4, 5]),
            ("5", [5]),
            ("x", []),
        ],
    )
    def test_a_job_is_chosen_by_its_name_a_pid_or_the_beginning_of_its_name(self, word: str, pids: list[int]) -> None:
        """A name comes first, so that a pid never hides it."""
        jobs = group(
            [
                agent(1),
                agent(2, job="resnet-2"),
                agent(3, job="12f0"),
                agent(12, job="y"),
                agent(4, job="none", backend="static"),
                agent(5, job="none", backend="static"),
            ]
        )
        assert [job[0][1].pid_here for job in choose(jobs, word)] == pids

    def test_ids_that_nobody_has_chosen_are_shown_as_far_as_they_differ(self) -> None:
        one, other = "0123abcd-0000-4000-8000-000000000000", "0123abcd-0001-4000-8000-000000000000"
        assert short_ids([one, "resnet"]) == {one: "0123abcd", "resnet": "resnet"}
        assert short_ids([one, other]) == {one: one[:13], other: other[:13]}

    @pytest.mark.parametrize("width", [80, 90])
    def test_the_table_of_jobs_fits_a_terminal(self, width: int) -> None:
        script = "train.py --data=/data/some/where/else/on/the/disk"
        row = JobRow(job="resnet", program="", script=script, pid=7, pids=(7,), user="somebody-else", state="training")
        shown = render_jobs([row, msgspec.structs.replace(row, job="a-long-name-of-job", user="ann")], width)
        assert max(map(len, shown.splitlines())) == width
        assert "train.py …" in shown or "train.py --" in shown
        assert script[:39] in render_jobs([row])


class TestSince:
    NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)

    def test_an_age_a_time_of_day_and_a_date(self) -> None:
        assert parse_since("10m", self.NOW) == self.NOW - timedelta(minutes=10)
        for text in ("00:00", "23:59", "12:00:01"):
            found = parse_since(text, self.NOW)
            assert timedelta() <= self.NOW - found <= timedelta(days=1)
            assert found.astimezone().strftime("%H:%M:%S").startswith(text)
        assert parse_since("2026-11-22T04:12:00+00:00", self.NOW) == datetime(2026, 11, 22, 4, 12, tzinfo=UTC)

    @pytest.mark.parametrize("text", ["yesterday", "25:00", "10", "", "9999999999d"])
    def test_other_text_is_refused_as_a_time(self, text: str) -> None:
        with pytest.raises(SpecError):
            parse_since(text, self.NOW)


def test_the_screens_are_those_of_the_golden_file() -> None:
    waiting, failed, silent = TorchJob(rules(2, 2)), trio(), trio(lost_after=4.0)
    waiting.come("a")
    failed.fail("b")
    silent.lose("b")
    silent.wait(1)
    here = {
        "a": (
            TaskProgress(name="rank 0", steps=12, idle=0.1, period=0.25),
            TaskProgress(name="rank 1", steps=10, idle=4.0, period=0.5),
        )
    }
    row = JobRow(job="resnet", program="", script="train.py", pid=7, pids=(7,), user="ann", state="training")
    screens = {
        "a job trains, and no steps are counted": render_status(status(trio())),
        "its agent here counts steps": render_status(status(trio()), None, here),
        "a job waits for a node": render_status(status(waiting)),
        "a worker has failed, and a restart was used": render_status(status(failed)),
        "a node is disconnected": render_status(status(silent)),
        "the share of training": render_status(status(trio()), Effectiveness(0.984, 2)),
        "its bound, where no steps are counted": render_status(status(trio()), Effectiveness(0.984, 2, is_bound=True)),
        "the jobs of a machine": render_jobs([row, msgspec.structs.replace(row, job="a-long-name-of-job", pid=12)]),
    }
    assert_screens(Path(__file__).with_name("status.txt"), screens)
    counted = [title for title, text in screens.items() if "steps: not counted" in text]
    assert [title for title in screens if title not in counted] == [
        "its agent here counts steps",
        "a job waits for a node",
        "the jobs of a machine",
    ]
