"""Every rule of jobs with parameter servers, in virtual time: which tasks are started, what ends a version, and what
that costs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import assert_screens
from support.virtual import play, texts
from support.virtual_servers import LEFT, REPEATED, SUCCESS, ServersJob, rules

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
    "a last call is made where more may come": (
        rules(1, 0, max_ps=4),
        "come a; wait 29; phase gathering; wait 1.1; ps ps-0 ps-1;"
        "because version nodes_here last_call_over fewer_servers",
    ),
    "a job to which too few come fails": (
        rules(2, 0), "come a ps=1; wait 601; phase failed; because too_few_nodes shortage",
    ),
    "a job that goes on from a checkpoint says from which step": (
        rules(), "come a workers=4 ps=4; wait 30.1; train restored=126; because version nodes_here restored",
    ),
    # The end of a server.
    "a dead server makes a version in which all is new": (
        rules(),
        RUN + "step chief-0 step=140 saved=126; end ps-1; number 2; ps ps-2 ps-3; chief chief-1;"
        "worker worker-2 worker-3; train restored=126;"
        "because version lost takes_place all_restart restored at_least_lost",
    ),
    "no step is lost after a save at the last step": (
        rules(),
        RUN + "step chief-0 step=126 saved=126; end ps-1; train restored=126;"
        "because version lost takes_place all_restart restored last_reported",
    ),
    "a node that knows more steps than were reported counts": (
        rules(),
        RUN + "step chief-0 step=140 saved=126; end ps-1; train restored=126 reached=143;"
        "because version lost takes_place all_restart restored at_least_lost",
    ),
    "a chief that counts no steps says nothing of them": (
        rules(),
        RUN + "step chief-0 step=140 saved=126; end ps-1; train restored=-1 reached=143;"
        "because version lost takes_place all_restart",
    ),
    "a job that has trained nothing begins anew": (
        rules(),
        RUN + "step chief-0 step=0 saved=-1; end ps-1; train;"
        "because version lost takes_place all_restart begun_anew",
    ),
    "what is lost is known when the version after a pause never trained": (
        rules(1, 0, max_ps=3),
        RUN + "scale ps=2; obey; ready ps-3 ps-4; saved chief-0 200; end ps-3; train restored=200; number 3;"
        "because version lost takes_place all_restart restored no_step_lost",
    ),
    "a lost node is replaced by another one for nothing": (
        rules(), APART + "lose c; wait 1.1; ps_on b d; failures; because version lost takes_place_on all_restart",
    ),
    "fewer servers go on where there is no room": (
        rules(min_ps=1), APART + "lose c d; wait 1.1; ps_on b; because version lost fewer_servers",
    ),
    "too few servers wait for others, and the job fails when none joins": (
        rules(),
        APART + "lose c d; wait 1.1; phase gathering; wait 601; phase failed;"
        "because lost shortage too_few_nodes shortage",
    ),
    "a process of an earlier version that never ends fails the job": (
        rules(),
        APART + "leaving b; deaf b; end ps-1; ps_on d c; obey; ready ps-2 ps-3 chief-1; wait 601;"
        "phase failed; because version lost takes_place all_restart leftover",
    ),
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
    "a worker is replaced alone": (
        rules(),
        RUN + "end worker-0; number 1; worker worker-2 worker-1; ps ps-0 ps-1; open a;"
        "because lost takes_place",
    ),
    "a chief on another node makes a version, since the queues of the data were with it": (
        rules(),
        APART + "lose a; wait 1.1; number 2; stage starting; chief_on d; ps ps-2 ps-3; failures;"
        "because version lost chief_moves",
    ),
    "a node that leaves gives its chief away once that has saved": (
        rules(),
        APART + "leaving a; stage changing; chief_on a; because asked_to_leave chief_leaves next_start; obey;"
        "ready ps-2 ps-3; reshaped worker-2 worker-3; stage saving; saved chief-0 40; number 2; chief_on d;"
        "train restored=40; because version started_anew saved restored no_step_lost",
    ),
    "an evaluator that fails after the chief has succeeded is reported at the end": (
        rules(evaluator=1),
        EVALUATED + "ready evaluator-0; succeed chief-0 worker-0 worker-1; end evaluator-0; phase finished;"
        "because chief_succeeded purpose_failed",
    ),
    "a chief without room is not waited for for ever": (
        rules(1, 0),
        "come a ps=0; come b chief=0 ps=1; train; lose a; wait 602; phase failed;"
        "because lost no_slot no_task",
    ),
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
    "a change goes on without those that do not leave in time": (
        RANGE, PAUSE + "wait 60.1; number 2; because version resized not_saved",
    ),
    "a change that fails too often is given up and training goes on": (
        rules(1, 2, max_ps=3, max_restarts=0),
        RUN + "scale ps=2; obey; end ps-3; phase training; stage training; because lost no_restarts change_given_up",
    ),
    "one server of the next version answers": (
        rules(1, 0, max_ps=2), RUN + "scale ps=1; obey; ready ps-2; stage saving; because next_ready",
    ),
    "a request waits for the model": (
        rules(1, 0, max_ps=2),
        "come a; obey; scale ps=1; because request; ready ps-0 ps-1; step chief-0 restored=5; stage changing",
    ),
    "workers come and go without a new version": (
        rules(2, 3),
        RUN + "scale workers=1; worker worker-0; number 1; because too_many; obey;"
        "scale workers=3; worker worker-0 worker-3 worker-4; number 1",
    ),
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
    "the job fails when the budget of a role is used up": (
        rules(max_restarts=1),
        RUN + "end worker-0; obey; end worker-2; phase failed; outcome failure;"
        "because lost restarts_used",
    ),
    "memory doubles up to the most": (
        rules(worker_memory=100, max_memory=300),
        RUN + "oom worker-0; worker_memory 200 100; obey; oom worker-2; worker_memory 300 100; obey;"
        "memory_restarts worker=2; failures; oom worker-3; phase failed; because lost memory_exhausted",
    ),
    "memory has a budget of its own": (
        rules(worker_memory=100, memory_restarts=1),
        RUN + "oom worker-0; obey; oom worker-2; phase failed;"
        "because lost restarts_used",
    ),
    "a new limit of memory is named": (
        rules(worker_memory=512, max_memory=4096, ps_memory=4096),
        RUN + "oom worker-0; worker_memory 1024 512; because lost takes_place gets_memory; obey; end worker-2;"
        "because lost takes_place",
    ),
    "of several servers those that get more memory are named": (
        rules(ps_memory=4096),
        RUN + "oom_together ps-0 ps-1; ps_memory 8192 8192;"
        "because version lost lost takes_place one_gets_memory one_gets_memory",
    ),
    "a server that is not ready in time is replaced": (
        rules(), "come a; obey; ready ps-1; wait 300.1; failures ps=1; because version lost takes_place all_restart",
    ),
    "a chief that is not ready in time is replaced": (
        rules(), "come a; obey; ready ps-0 ps-1; wait 300.1; failures chief=1; because lost takes_place",
    ),
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
    "the other tasks have their grace, and the job is finished": (
        rules(),
        RUN + "succeed chief-0; stage ending; open a; succeed worker-0; phase training; succeed worker-1;"
        "phase finished; because chief_succeeded",
    ),
    "a process that does not end is ended": (rules(), RUN + "succeed chief-0; wait 30.1; phase finished;"
        "because chief_succeeded did_not_end"),
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
    "a successor gives nodes the time to come back": (
        rules(), APART + "away c; successor; wait 5.9; number 1; back c; wait 10; number 1",
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


class TestServers:
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


class TestOthers:
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
        assert all(job.spent(role).failures == 0 for role in Role)

    def test_a_swollen_server_gets_more_memory_before_it_is_killed(self) -> None:
        job = running(ps_memory=100, max_memory=300)
        job.report_task("ps-0", TaskStage.READY, near_memory_limit=True)
        assert (job.stage, job.spent(Role.PS).memory_restarts) == (Stage.CHANGING, 1)
        assert [task.memory_mib for task in job.cluster.next_servers] == [200, 100]


SPARES = {
    "all train": "",
    "a worker has succeeded": "succeed worker-0",
    "a worker and the evaluator have succeeded": "succeed worker-0; succeed evaluator-0",
    "the chief has succeeded": "succeed chief-0",
}
"""What has happened when a node that hosts no task reads what it waits for."""

REQUESTS = (
    "ps=7", "workers=9", "workers=7", "ps=5", "ps=5 workers=7", "ps=3 workers=7", "ps=2 workers=3", "ps=1 workers=2",
)  # fmt: skip
"""Requests of an operator, of which a job with 2 to 6 servers and up to 8 workers refuses the first six as a whole."""


def test_what_people_read() -> None:
    """The reasons of each plan of each scenario, what a node without a task waits for, and answers to operators."""
    screens = {title: texts(play(ServersJob(job_rules), script)) for title, (job_rules, script) in SCENARIOS.items()}
    for title, script in SPARES.items():
        job = play(running(evaluator=1), script)
        screens[f"a node without a task, when {title}"] = job.coordinator.waiting(job.now).text
    for roles in ((Role.PS, Role.WORKER), (Role.PS, Role.CHIEF), (Role.CHIEF,)):
        cluster = running().cluster
        left = msgspec.structs.replace(cluster, tasks=tuple(task for task in cluster.tasks if task.role in roles))
        screens[f"a node without a task, where there are {' '.join(roles)}"] = render(training(left))
    for request in REQUESTS:
        screens[f"tf-ps-run scale {request}"] = answer(running(2, 8, max_ps=6), request)
    assert_screens(Path(__file__).with_name("cluster_decide.txt"), screens)


def answer(job: ServersJob, request: str) -> str:
    """Return the answer to a request. A refusal changes nothing."""
    before = job.plan
    try:
        return job.scale(**{name: int(number) for name, _, number in (word.partition("=") for word in request.split())})
    except RequestFailed as refusal:
        assert job.plan == before
        return f"refused: {refusal}"


class TestScaleRequests:
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

    def test_a_number_that_is_not_given_stays(self) -> None:
        job = running(1, 3, max_ps=2)
        job.scale(workers=2)
        job.scale(ps=1)
        assert job.cluster.desired == DesiredReplicas(ps=1, workers=2)

    def test_a_number_of_nodes_is_refused(self) -> None:
        job = running(1, 3)
        with pytest.raises(RequestFailed, match="tf-ps-run scale"):
            job.coordinator.request(OperatorRequest(Action.SCALE, max_nodes=2), job.now)


def test_the_same_exception_again_ends_the_job_with_its_traceback() -> None:
    job = running()
    job.end("worker-0", how=REPEATED)
    assert job.plan.phase is PlanPhase.FAILED
    assert job.plan.failure is not None
    assert job.plan.failure.trace == REPEATED.trace


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
