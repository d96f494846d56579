"""Every rule of jobs with parameter servers, in virtual time: which tasks are started, what ends a version, and what
that costs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.virtual import play
from support.virtual_servers import KILLED, LEFT, OUT_OF_MEMORY, REPEATED, SUCCESS, ServersJob, rules

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.requests import Action, OperatorRequest, RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import render
from tf_ps_runner.cluster.model import DesiredReplicas, Role, Stage, TaskStage
from tf_ps_runner.cluster.placement import spread
from tf_ps_runner.cluster.rules import RESTARTS
from tf_ps_runner.cluster.text import training
from tf_ps_runner.cluster.view import ClusterView


def running(ps: int = 2, workers: int = 2, restored: int = 0, **changes: object) -> ServersJob:
    """A job that trains on one node."""
    job = ServersJob(rules(ps, workers, **changes))
    job.come("a", workers=4, ps=4, evaluator=int(bool(changes.get("evaluator"))))
    if job.plan.phase is PlanPhase.GATHERING:
        job.wait(30.1)
    job.train(restored)
    return job


RUN = "come a workers=4 ps=4; wait 30.1; train;"
"""A job that trains on one node."""

EVALUATED = "come a workers=4 ps=4 evaluator=1; wait 30.1; train;"
"""The same with room for an evaluator."""

APART = "come a ps=0; come b chief=0 workers=0 ps=1; come c chief=0 workers=0 ps=1; come d ps=1; train;"
"""A job that trains on four nodes: the chief and two workers on `a`, a server on `b` and on `c`, nothing on `d`."""

TWO_NODES = "come a workers=1 ps=1; come b chief=0 workers=1 ps=1; train;"
"""A job that trains on two nodes, each with a server and a worker; the chief is on `a`."""

PAUSE = RUN + "ps ps-0 ps-1 ps-2; scale ps=2; obey; ready ps-3 ps-4; stage pausing;"
"""A job that goes from three servers to two, whose workers have to leave."""


def apart(**changes: object) -> ServersJob:
    job = play(ServersJob(rules(2, 2, **changes)), APART)
    return play(job, "ps_on b c; chief_on a; worker_on a a")


RANGE = rules(1, 2, max_ps=3)

SCENARIOS = {
    "a job begins at once where one node has room for all": (
        rules(2, 3),
        "come a workers=3; phase training; number 1; ps ps-0 ps-1; chief chief-0; worker worker-0 worker-1 worker-2",
    ),
    "it waits for room for the least of everything and a chief": (
        rules(2, 1, min_workers=1),
        "come a chief=0 workers=1 ps=1; come b chief=0 workers=0 ps=1; phase gathering;"
        "come c chief=1 workers=0 ps=0; phase training",
    ),
    # The end of a server.
    "only the node of a dead server is tried first": (rules(), APART + "end ps-1; ps_on b c"),
    "nodes of one rack that are lost together cost one version and no restart": (
        rules(min_ps=1), APART + "lose b c; wait 0.9; number 1; wait 0.2; number 2; ps_on d; failures",
    ),
    "too few servers go on when a node joins": (
        rules(),
        APART + "lose c d; wait 1.1; phase gathering; obey; come e chief=0 workers=0 ps=1;"
        "phase training; number 2; ps_on b e",
    ),
    "a silent server counts as a failure": (rules(), RUN + "silent ps-0; number 2; failures ps=1"),
    "servers that end at once cost one restart": (
        rules(4, 2, max_restarts=1), RUN + "end_together ps-0 ps-1 ps-2 ps-3; number 2; failures ps=1",
    ),
    "failures of other tasks that it explains are not charged": (
        rules(max_restarts=1), RUN + "end_together ps-0 chief-0 worker-0 worker-1; failures ps=1",
    ),
    # The end of another task.
    "a chief is replaced alone": (rules(), RUN + "end chief-0; number 1; stage training; chief chief-1"),
    "a chief moves in the same version before any data can have been used": (
        rules(1, 0),
        "come a ps=0; come b chief=0 ps=1; come c ps=0; chief_on a; lose a; wait 1.1; number 1; chief_on c",
    ),
    "a chief without room is waited for": (
        rules(1, 0),
        "come a ps=0; come b chief=0 ps=1; train; lose a; wait 1.1; phase training; number 1; chief;"
        "come c ps=0; number 2; chief_on c",
    ),
    "a worker that has succeeded is started again only when the model goes back": (
        rules(), RUN + "succeed worker-0; worker worker-1; end ps-0; worker worker-2 worker-3",
    ),
    "an evaluator outlives versions": (
        rules(evaluator=1),
        EVALUATED
        + "ready evaluator-0; end ps-0; evaluator evaluator-0; end evaluator-0; evaluator evaluator-1; number 2",
    ),
    "a node of the role evaluator may join last": (
        rules(), RUN + "come e chief=0 workers=0 ps=0 evaluator=1; evaluator evaluator-0; number 1",
    ),
    "without that node the job goes on": (
        rules(), RUN + "come e chief=0 workers=0 ps=0 evaluator=1; obey; lose e; wait 10; evaluator; number 1",
    ),
    "an evaluator that has succeeded is not started again": (
        rules(evaluator=1), EVALUATED + "succeed evaluator-0; evaluator",
    ),
    # A planned change.
    "the chief saves only when dismissed workers are gone too": (
        RANGE, PAUSE + "reshaped worker-0; scale ps=2 workers=0; stage pausing; reshaped worker-1; stage saving",
    ),
    "a server that dies meanwhile is replaced by those that were coming": (
        RANGE, RUN + "scale ps=2; end ps-0; number 2; ps ps-3 ps-4",
    ),
    "a server that dies while the chief saves makes it unplanned": (
        RANGE, PAUSE + "reshaped worker-0 worker-1; end ps-0; number 2; stage starting; ps ps-3 ps-4; failures ps=1",
    ),
    "a chief that dies before it has saved is replaced and saves": (
        RANGE, PAUSE + "reshaped worker-0 worker-1; end chief-0; number 1; stage saving; chief chief-1",
    ),
    "a next server that dies disturbs no task": (
        RANGE, RUN + "scale ps=2; obey; end ps-3; stage changing; next ps-5 ps-6; number 1",
    ),
    "a request that is withdrawn ends the change": (RANGE, RUN + "scale ps=2; scale ps=3; stage training; next"),
    "another request begins another change": (RANGE, RUN + "scale ps=2; scale ps=1; next ps-5"),
    "a node that leaves gives its server away without a loss": (
        rules(), APART + "leaving c; stage changing; next_on b d",
    ),
    "a node that comes makes room for more": (
        rules(1, 0, max_ps=2), "come a ps=1; wait 31; train; come b chief=0 ps=1; stage changing; next ps-1 ps-2",
    ),
    # The restart budget of each role.
    "each role has a budget of its own": (
        rules(max_restarts=1),
        RUN + "end worker-0; end chief-0; end ps-0; failures chief=1 worker=1 ps=1; phase training",
    ),
    "an end is charged once however often it is reported": (
        rules(), RUN + "end worker-0; end worker-0; successor; failures worker=1",
    ),
    "a worker may leave for a change three times in a row": (
        rules(max_restarts=1),
        RUN + "reshaped worker-0; obey; reshaped worker-2; obey; reshaped worker-3; obey; failures;"
        "reshaped worker-4; failures worker=1",
    ),
    "a worker that waits at the gate is not late": (
        rules(), "come a; obey; wait 299; failures",
    ),
    # The end of the job.
    "workers that were never let in are not waited for": (
        rules(), "come a; obey; ready ps-0 ps-1; succeed chief-0; phase finished",
    ),
    "a server that dies at the end matters no more": (
        rules(), RUN + "succeed chief-0; end ps-0; phase training; number 1",
    ),
    "a chief that succeeds while a change goes on ends the job": (
        rules(1, 0, max_ps=3), RUN + "scale ps=2; succeed chief-0; phase finished",
    ),
    "the job fails when every node has left": (rules(), RUN + "left a; phase failed"),
    # The same two departures in either order, as for rounds of workers.
    "a node that is lost while the last one leaves is waited for": (
        rules(), TWO_NODES + "lose b; wait 0.5; leaving a; left a; lose a; wait 5; phase gathering"
    ),
    "a node that is lost after the last one has left is waited for": (
        rules(), TWO_NODES + "leaving a; left a; lose a; wait 0.1; lose b; wait 5; phase gathering"
    ),
    "a successor decides on the end of a server": (rules(), RUN + "successor; end ps-0; number 2"),
    "a successor decides on the end of a worker": (
        rules(), RUN + "successor; end worker-0; number 1; worker worker-2 worker-1",
    ),
    "a successor decides on the end of a chief": (rules(), RUN + "successor; end chief-0; number 1; chief chief-1"),
}  # fmt: skip


@pytest.mark.parametrize(("job_rules", "script"), SCENARIOS.values(), ids=SCENARIOS)
def test_what_follows_from_events(job_rules: JobRules, script: str) -> None:
    play(ServersJob(job_rules), script)


class TestStart:
    def test_has_a_last_call_where_more_may_come(self) -> None:
        job = ServersJob(rules(1, 0, max_ps=4))
        job.come("a")
        job.wait(29)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(1.1)
        assert job.ids(Role.PS) == ["ps-0", "ps-1"]
        assert "no other node came for 30 s" in job.plan.reason

    def test_fails_when_too_few_come(self) -> None:
        job = ServersJob(rules(2, 0))
        job.come("a", ps=1)
        job.wait(601)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reason == "after 600 s a is here: there is room for 1 of at least 2 parameter servers"

    def test_starts_nothing_before_every_address_is_known(self) -> None:
        job = ServersJob(rules(2, 0))
        job.deaf.add("b")
        job.come("a", ps=1)
        job.come("b", chief=0, workers=0, ps=1)
        job.obey()
        order = job.order("a")
        assert order.servers == ()
        assert order.chief == ""
        job.deaf.clear()
        job.obey()
        order = job.order("a")
        assert len(order.servers) == 2
        assert order.chief

    def test_opens_the_gate_once_servers_answer_and_the_chief_has_a_model(self) -> None:
        job = ServersJob(rules(2, 1))
        job.come("a")
        job.obey()
        for name in ("ps-0", "chief-0", "ps-1"):
            order = job.order("a")
            assert not order.open
            job.ready(name)
        order = job.order("a")
        assert order.open
        assert job.stage is Stage.TRAINING

    def test_reports_from_which_step_it_continues(self) -> None:
        assert running(restored=126).plan.reason == "version 1: 1 node is here; restored from step 126"


class TestServers:
    def test_a_dead_one_makes_a_version_in_which_all_is_new(self) -> None:
        job = running()
        job.report_task("chief-0", TaskStage.READY, step=140, saved=126)
        job.end("ps-1")
        assert job.plan.key.number == 2
        assert job.ids(Role.PS) == ["ps-2", "ps-3"]
        assert job.ids(Role.CHIEF) == ["chief-1"]
        assert job.ids(Role.WORKER) == ["worker-2", "worker-3"]
        job.train(restored=126)
        assert job.plan.reason == (
            "version 2: ps-1 (rank 1) on a was killed by SIGKILL; ps-3 takes its place, "
            "and all other processes are started again too; "
            "restored from step 126, at least 14 steps lost"
        )

    @pytest.mark.parametrize(
        ("step", "saved", "restored", "reached", "text"),
        [
            pytest.param(126, 126, 126, -1, "restored from step 126, the last step that was reported", id="saved"),
            pytest.param(140, 126, 126, 143, "restored from step 126, at least 17 steps lost", id="known to its node"),
            pytest.param(140, 126, -1, 143, "all other processes are started again too", id="it counts no steps"),
            pytest.param(0, -1, 0, -1, "; begun anew", id="it has trained nothing"),
        ],
    )
    def test_the_reason_ends_with_the_steps_that_are_lost(
        self, step: int, saved: int, restored: int, reached: int, text: str
    ) -> None:
        job = running()
        job.report_task("chief-0", TaskStage.READY, step=step, saved=saved)
        job.end("ps-1")
        job.train(restored, reached)
        assert job.plan.reason.endswith(text)

    def test_what_is_lost_is_known_when_the_version_after_a_pause_never_trained(self) -> None:
        job = running(1, 0, max_ps=3)
        job.scale(ps=2)
        job.obey()
        job.ready("ps-3", "ps-4")
        job.report_task("chief-0", TaskStage.ENDED, step=200, saved=200, end=LEFT)
        job.end("ps-3")
        job.train(restored=200)
        assert (job.plan.key.number, job.plan.reason.endswith("step 200, no step lost")) == (3, True)

    def test_a_lost_node_is_replaced_by_another_one_for_nothing(self) -> None:
        job = apart()
        job.lose("c")
        job.wait(1.1)
        assert job.hosts(Role.PS) == ["b", "d"]
        assert job.spent(Role.PS).failures == 0
        assert "ps-1 (rank 1) on c was lost with its node; ps-3 on d takes its place" in job.plan.reason

    def test_fewer_go_on_where_there_is_no_room(self) -> None:
        job = apart(min_ps=1)
        job.lose("c", "d")
        job.wait(1.1)
        assert job.hosts(Role.PS) == ["b"]
        assert job.plan.reason.endswith("there is room for 1 parameter server")

    def test_too_few_wait_for_others_and_the_job_fails_when_none_joins(self) -> None:
        job = apart()
        job.lose("c", "d")
        job.wait(1.1)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(601)
        assert job.plan.phase is PlanPhase.FAILED
        assert "after 600 s a and b are here: there is room for 1 of at least 2 parameter servers" in job.plan.reason

    def test_the_gate_stays_closed_while_a_process_of_before_lives(self) -> None:
        job = apart()
        job.report_leaving("b", NodePhase.LEAVING)
        job.deaf.add("b")
        job.end("ps-1")
        assert job.hosts(Role.PS) == ["d", "c"]
        job.obey()
        job.ready(*job.ids(Role.PS))
        assert job.order("d").chief == job.order("a").chief != ""
        job.ready("chief-1")
        assert job.stage is Stage.STARTING
        job.deaf.clear()
        job.obey()
        assert job.stage is Stage.TRAINING

    def test_a_process_that_never_ends_fails_the_job(self) -> None:
        job = apart()
        job.report_leaving("b", NodePhase.LEAVING)
        job.deaf.add("b")
        job.end("ps-1")
        job.obey()
        job.ready(*job.ids(Role.PS), "chief-1")
        job.wait(601)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reason.endswith("ps-0 of an earlier version on b does not end, so training cannot start")


class TestOthers:
    def test_a_worker_is_replaced_alone(self) -> None:
        job = running()
        job.end("worker-0")
        assert job.plan.key.number == 1
        assert job.ids(Role.WORKER) == ["worker-2", "worker-1"]
        assert job.ids(Role.PS) == ["ps-0", "ps-1"]
        assert job.plan.reason == "worker-0 (rank 0) on a was killed by SIGKILL; worker-2 takes its place"
        order = job.order("a")
        assert order.open

    def test_one_on_another_node_makes_a_version_since_the_queues_of_the_data_were_with_it(self) -> None:
        job = apart()
        job.lose("a")
        job.wait(1.1)
        assert (job.plan.key.number, job.stage, job.hosts(Role.CHIEF)) == (2, Stage.STARTING, ["d"])
        assert job.ids(Role.PS) == ["ps-2", "ps-3"]
        assert job.plan.reason.startswith(
            "version 2: chief-0 on a was lost with its node, and with it the position in the data"
        )
        assert (job.spent(Role.CHIEF).failures, job.spent(Role.PS).failures) == (0, 0)

    def test_a_node_that_leaves_gives_its_chief_away_once_that_has_saved(self) -> None:
        job = apart()
        job.report_leaving("a", NodePhase.LEAVING)
        assert (job.stage, job.hosts(Role.CHIEF)) == (Stage.CHANGING, ["a"])
        assert job.plan.reason.startswith("a was asked to leave, and the chief moves: ps-2 and ps-3 are started")
        job.obey()
        job.ready("ps-2", "ps-3")
        job.end(*job.ids(Role.WORKER), how=LEFT)
        assert job.stage is Stage.SAVING
        job.report_task("chief-0", TaskStage.ENDED, step=40, saved=40, end=LEFT)
        assert (job.plan.key.number, job.hosts(Role.CHIEF)) == (2, ["d"])
        job.train(restored=40)
        assert job.plan.reason.endswith("restored from step 40, no step lost")

    def test_a_second_chief_is_not_started_while_the_first_one_lives(self) -> None:
        job = apart()
        job.report_leaving("a", NodePhase.LEAVING)
        job.deaf.add("a")
        job.end("ps-0")
        assert job.hosts(Role.CHIEF) == ["d"]
        job.obey()
        order = job.order("d")
        assert order.chief == ""
        job.deaf.clear()
        job.obey()
        order = job.order("d")
        assert order.chief.startswith("d:")

    def test_an_evaluator_that_fails_too_often_is_given_up_and_training_goes_on(self) -> None:
        job = running(evaluator=1)
        for number in range(RESTARTS + 1):
            job.end(f"evaluator-{number}")
            job.obey()
        assert (job.plan.phase, job.stage, job.ids(Role.EVALUATOR)) == (PlanPhase.TRAINING, Stage.TRAINING, [])
        assert (job.spent(Role.EVALUATOR).given_up, job.cluster.outcome) == (True, None)
        assert "training goes on" in job.plan.reason
        # Neither another version nor another coordinator starts it again.
        job.end("ps-0")
        job.succeed_coordinator()
        job.train()
        assert job.ids(Role.EVALUATOR) == []
        job.end(*job.ids(Role.CHIEF), how=SUCCESS)
        job.end(*job.ids(Role.WORKER), how=SUCCESS)
        assert job.plan.phase is PlanPhase.FINISHED
        assert "the evaluation has failed" in job.plan.reason

    def test_an_evaluator_that_fails_after_the_chief_has_succeeded_is_reported_at_the_end(self) -> None:
        job = running(evaluator=1)
        job.ready("evaluator-0")
        job.end("chief-0", *job.ids(Role.WORKER), how=SUCCESS)
        job.end("evaluator-0")
        assert job.plan.phase is PlanPhase.FINISHED
        assert "the evaluation has failed" in job.plan.reason

    def test_but_not_for_ever(self) -> None:
        job = ServersJob(rules(1, 0))
        job.come("a", ps=0)
        job.come("b", chief=0, ps=1)
        job.train()
        job.lose("a")
        job.wait(602)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reason.endswith("after 600 s there is no room for a chief")


def test_a_change_goes_on_without_those_that_do_not_leave_in_time() -> None:
    job = play(ServersJob(RANGE), PAUSE + "wait 60.1; number 2")
    assert "worker-0 and worker-1 did not leave within 60 s, so what was not saved is lost" in job.plan.reason


class TestPlannedChange:
    def test_starts_the_next_servers_while_training_goes_on_then_pauses_saves_and_loses_nothing(self) -> None:
        job = running(1, 2, max_ps=3)
        assert job.ids(Role.PS) == ["ps-0", "ps-1", "ps-2"]
        job.scale(ps=2)
        assert (job.stage, job.plan.key.number) == (Stage.CHANGING, 1)
        job.obey()
        order = job.order("a")
        assert order.open
        assert len(order.next_servers) == 2
        job.ready("ps-3", "ps-4")
        assert job.stage is Stage.PAUSING
        order = job.order("a")
        assert order.pause
        assert not order.save
        assert not order.open
        job.end("worker-0", "worker-1", how=LEFT)
        assert job.stage is Stage.SAVING
        job.report_task("chief-0", TaskStage.READY, step=200)
        job.report_task("chief-0", TaskStage.ENDED, step=200, saved=200, end=LEFT)
        assert (job.plan.key.number, job.ids(Role.PS)) == (2, ["ps-3", "ps-4"])
        job.train(restored=200)
        assert job.plan.reason == (
            "version 2: 2 parameter servers instead of 3; chief-0 saved at step 200; "
            "restored from step 200, no step lost"
        )
        assert all(job.spent(role).failures == 0 for role in Role)

    def test_a_change_that_fails_too_often_is_given_up_and_training_goes_on(self) -> None:
        job = running(1, 2, max_ps=3, max_restarts=0)
        job.scale(ps=2)
        job.obey()
        job.end("ps-3")
        assert (job.plan.phase, job.stage) == (PlanPhase.TRAINING, Stage.TRAINING)
        assert "the change is given up, and training goes on" in job.plan.reason

    def test_a_swollen_server_gets_more_memory_before_it_is_killed(self) -> None:
        job = running(ps_memory=100, max_memory=300)
        job.report_task("ps-0", TaskStage.READY, near_memory_limit=True)
        assert (job.stage, job.spent(Role.PS).memory_restarts) == (Stage.CHANGING, 1)
        assert [task.memory_mib for task in job.cluster.next_servers] == [200, 100]


class TestWords:
    def test_one_server_answers(self) -> None:
        job = running(1, 0, max_ps=2)
        job.scale(ps=1)
        job.obey()
        job.ready("ps-2")
        assert job.plan.reason == "1 parameter server of the next version answers, so training pauses"

    def test_a_new_limit_of_memory_is_named(self) -> None:
        job = running(worker_memory=512, max_memory=4096, ps_memory=4096)
        job.end("worker-0", how=OUT_OF_MEMORY)
        assert job.plan.reason.endswith(
            "was killed for its memory; worker-2 takes its place and gets 1Gi instead of 512Mi"
        )
        job.obey()
        job.end("worker-2")
        assert job.plan.reason.endswith("was killed by SIGKILL; worker-3 takes its place")

    def test_of_several_servers_those_that_get_more_memory_are_named(self) -> None:
        job = running(ps_memory=4096)
        job.end_together("ps-0", "ps-1", how=OUT_OF_MEMORY)
        text = "ps-2 and ps-3 take their places, ps-2 gets 8Gi instead of 4Gi, ps-3 gets 8Gi instead of 4Gi"
        assert text in job.plan.reason

    def test_a_request_that_waits_for_the_model_is_reported_once(self) -> None:
        job = ServersJob(rules(1, 0, max_ps=2))
        job.come("a")
        job.obey()
        job.scale(ps=1)
        assert job.plan.reason == "ann asked for 1 parameter server"
        job.ready("ps-0", "ps-1")
        job.ready("chief-0", restored=5)
        assert job.stage is Stage.CHANGING
        assert job.lines == ["restored from step 5"]

    def test_a_node_that_hosts_nothing_receives_which_tasks_have_succeeded(self) -> None:
        job = running(evaluator=1)
        assert waiting(job) == "2 parameter servers, a chief and 2 workers train; " + STEPS_IN
        job.end("worker-0", how=SUCCESS)
        size = "2 parameter servers, a chief and 1 worker train"
        assert waiting(job) == f"{size}, and 1 worker has succeeded; {STEPS_IN}"
        job.end("evaluator-0", how=SUCCESS)
        assert waiting(job) == f"{size}, and 1 worker and the evaluator have succeeded; {STEPS_IN}"
        job.end("chief-0", how=SUCCESS)
        assert waiting(job) == "the chief has succeeded, and the other tasks end"

    @pytest.mark.parametrize(
        ("roles", "text"),
        [
            ((Role.PS, Role.WORKER), "2 parameter servers and 2 workers train"),
            ((Role.PS, Role.CHIEF), "2 parameter servers and a chief train"),
            ((Role.CHIEF,), "a chief trains"),
        ],
    )
    def test_roles_without_a_task_are_not_named(self, roles: tuple[Role, ...], text: str) -> None:
        cluster = running().cluster
        left = msgspec.structs.replace(cluster, tasks=tuple(task for task in cluster.tasks if task.role in roles))
        assert render(training(left)) == f"{text}; {STEPS_IN}"


STEPS_IN = "this node waits as a spare"


def waiting(job: ServersJob) -> str:
    """Return what a node that hosts no task receives."""
    return job.coordinator.waiting(job.now).text


class TestScaleRequests:
    def test_workers_come_and_go_without_a_new_version(self) -> None:
        job = running(2, 3)
        job.scale(workers=1)
        assert (job.ids(Role.WORKER), job.plan.key.number) == (["worker-0"], 1)
        assert job.plan.reason.startswith("1 worker is wanted, so worker-1 (rank 1) on a and worker-2 (rank 2) on a")
        job.obey()
        job.scale(workers=3)
        assert (job.ids(Role.WORKER), job.plan.key.number) == (["worker-0", "worker-3", "worker-4"], 1)

    @pytest.mark.parametrize(
        ("targets", "why"),
        [
            ({"ps": 7}, "started with --ps=2:6, so it cannot have 7: give 2 to 6"),
            ({"workers": 9}, "started with --workers=0:8, so it cannot have 9: give 0 to 8"),
            ({"workers": 7}, "there is room for 4 workers now"),
            ({"ps": 5}, "there is room for 4 parameter servers now"),
            ({"ps": 5, "workers": 7}, "there is room for 4 parameter servers and 4 workers now"),
            ({"ps": 3, "workers": 7}, "there is room for 4 workers now"),
        ],
    )
    def test_one_that_cannot_be_carried_out_is_refused_as_a_whole(self, targets: dict[str, int], why: str) -> None:
        job = running(2, 8, max_ps=6)
        before = job.plan
        with pytest.raises(RequestFailed, match=why):
            job.scale(**targets)
        assert job.plan == before

    def test_one_with_a_fixed_number_names_the_flag_for_a_range(self) -> None:
        with pytest.raises(RequestFailed, match="start it with --ps=MIN:MAX"):
            running().scale(ps=3)

    def test_while_a_node_is_disconnected_the_refusal_says_that_it_may_come_back(self) -> None:
        job = ServersJob(rules(2, 4))
        job.come("a")
        job.come("d", chief=0, ps=0)
        job.wait(30.1)
        job.train()
        job.coordinator.disconnect(job.statuses["d"].key, job.now)
        with pytest.raises(RequestFailed, match="may come back"):
            job.scale(workers=4)
        job.report_leaving("d", NodePhase.WAITING)
        assert "4 workers" in job.scale(workers=4)
        job.lose("d")
        job.wait(60)
        with pytest.raises(RequestFailed) as failed:
            job.scale(workers=4)
        assert "may come back" not in str(failed.value)

    def test_servers_that_have_failed_too_often_are_not_tried_again(self) -> None:
        job = running(1, 2, max_ps=3, max_restarts=0)
        job.scale(ps=2)
        job.obey()
        job.end("ps-3")
        with pytest.raises(RequestFailed, match="failed too often to be tried again, so training goes on with 3"):
            job.scale(ps=2)
        assert job.scale(ps=3, workers=1)

    def test_what_follows_is_the_answer(self) -> None:
        job = running(1, 3, max_ps=2)
        assert job.scale(ps=2, workers=3) == "2 parameter servers are there already; 3 workers are there already"
        answer = job.scale(ps=1, workers=2)
        assert answer.startswith("1 parameter server: a new set is started")
        assert answer.endswith("; 2 workers: no other process pauses for that")

    def test_a_number_that_is_not_given_stays(self) -> None:
        job = running(1, 3, max_ps=2)
        job.scale(workers=2)
        job.scale(ps=1)
        assert job.cluster.desired == DesiredReplicas(ps=1, workers=2)

    def test_a_number_of_nodes_is_refused(self) -> None:
        job = running(1, 3)
        with pytest.raises(RequestFailed, match="tf-ps-run scale"):
            job.coordinator.request(OperatorRequest(Action.SCALE, max_nodes=2), job.now)


class TestBudgets:
    def test_the_job_fails_when_one_is_used_up(self) -> None:
        job = running(max_restarts=1)
        job.end("worker-0")
        job.obey()
        job.end("worker-2")
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reason == "worker-2 (rank 0) on a was killed by SIGKILL; the one restart of workers was used"
        assert job.cluster.outcome == KILLED

    def test_memory_doubles_up_to_the_most(self) -> None:
        job = running(worker_memory=100, max_memory=300)
        for number, memory in ((0, 200), (2, 300)):
            job.end(f"worker-{number}", how=OUT_OF_MEMORY)
            job.obey()
            assert [task.memory_mib for task in job.cluster.tasks if task.role is Role.WORKER][-1] == memory
        assert (job.spent(Role.WORKER).memory_restarts, job.spent(Role.WORKER).failures) == (2, 0)
        job.end("worker-3", how=OUT_OF_MEMORY)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reason.endswith("more than 300 MiB are not allowed (--max-memory)")

    def test_memory_has_a_budget_of_its_own(self) -> None:
        job = running(worker_memory=100, memory_restarts=1)
        job.end("worker-0", how=OUT_OF_MEMORY)
        job.obey()
        job.end("worker-2", how=OUT_OF_MEMORY)
        assert job.plan.reason.endswith("the one restart of workers with more memory was used")

    def test_the_same_exception_again_ends_the_job_with_its_traceback(self) -> None:
        job = running()
        job.end("worker-0", how=REPEATED)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.failure is not None
        assert job.plan.failure.trace == REPEATED.trace

    @pytest.mark.parametrize(("role", "name"), [(Role.PS, "ps-0"), (Role.CHIEF, "chief-0")])
    def test_what_is_not_ready_in_time_is_replaced(self, role: Role, name: str) -> None:
        job = ServersJob(rules())
        job.come("a")
        job.obey()
        job.ready(*(one for one in ("ps-0", "ps-1") if one != name))
        job.wait(300.1)
        assert job.spent(role).failures == 1
        assert f"{name} " in job.plan.reason
        assert "was not ready after 300 s" in job.plan.reason


class TestEnd:
    def test_the_others_have_their_grace_and_the_job_is_finished(self) -> None:
        job = running()
        job.end("chief-0", how=SUCCESS)
        assert job.stage is Stage.ENDING
        order = job.order("a")
        assert order.ending
        assert order.open
        job.end("worker-0", how=SUCCESS)
        assert job.plan.phase is PlanPhase.TRAINING
        job.end("worker-1", how=SUCCESS)
        assert (job.plan.phase, job.plan.reason) == (PlanPhase.FINISHED, "chief-0 on a has succeeded")

    def test_a_process_that_does_not_end_is_ended(self) -> None:
        job = running()
        job.end("chief-0", how=SUCCESS)
        job.wait(30.1)
        assert job.plan.phase is PlanPhase.FINISHED
        assert job.plan.reason.endswith("worker-0 and worker-1 had 30 s to end, and did not")


class TestTakeOver:
    def test_no_node_is_lost_before_there_was_time_to_come_back(self) -> None:
        job = apart()
        status = job.statuses.pop("c")
        job.succeed_coordinator()
        job.wait(5.9)
        assert job.plan.key.number == 1
        job.statuses["c"] = status
        job.coordinator.receive(status, job.now)
        job.wait(10)
        assert job.plan.key.number == 1


NODES = [NodeKey(name, "1") for name in "abcd"]


@settings(deadline=None)
@given(
    ranks=st.integers(0, 8),
    free=st.dictionaries(st.sampled_from(NODES), st.integers(0, 3)),
    before=st.dictionaries(st.integers(0, 8), st.sampled_from(NODES)),
)
def test_placing_fills_the_lowest_ranks_and_no_room_twice(
    ranks: int, free: dict[NodeKey, int], before: dict[int, NodeKey]
) -> None:
    places = spread(range(ranks), free, before)
    assert sorted(places) == list(range(min(ranks, sum(free.values()))))
    hosted = list(places.values())
    assert all(hosted.count(node) <= free[node] for node in hosted)


def test_a_decision_on_workers_that_end_together_looks_at_each_of_them_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers leave in one network failure. A decision that looked at all of them for each of them kept
    the master from reading heartbeats for 8 s where there were 800, and for 57 s where there were 1,600."""
    number = 200
    job = ServersJob(rules(ps=1, workers=number))
    job.come("a", chief=1, workers=number, ps=1)
    job.train()
    looks = 0
    loss_of = ClusterView.loss_of

    def counted(view: ClusterView, *args: object) -> object:
        nonlocal looks
        looks += 1
        return loss_of(view, *args)

    monkeypatch.setattr(ClusterView, "loss_of", counted)
    job.end_together(*(f"worker-{index}" for index in range(number)), how=LEFT)
    job.wait(0.1)
    assert not any(task.key.id < number for task in job.cluster.tasks if task.key.role is Role.WORKER), (
        "all are replaced"
    )
    assert looks < number * 20
