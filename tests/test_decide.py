"""The pure core: rounds, budgets and what an agent does next, over any order of events."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.agent.reconcile import Action, Situation, reconcile
from dlrover_run.backends.local import LocalBoard
from dlrover_run.coordination.decide import Rules, decide
from dlrover_run.coordination.records import Failure, NodePhase, NodeStatus, Plan, PlanPhase, assignment
from dlrover_run.spec import Entrypoint, JobSpec


def status(
    node: int = 0,
    phase: NodePhase = NodePhase.WAITING,
    round_: int = 0,
    *,
    workers: int = 2,
    port: int = 1000,
    failure: Failure | None = None,
) -> NodeStatus:
    return NodeStatus(
        node_id=str(node),
        incarnation="one",
        address=f"host{node}",
        port=port,
        workers=workers,
        phase=phase,
        round=round_,
        failure=failure,
    )


KILLED = Failure(rank=1, host="host0", what="was killed by SIGKILL")


def test_the_first_round_waits_for_all_nodes() -> None:
    rules = Rules(nodes=2)
    early = decide(rules, Plan(), [status(0)])
    assert early.phase is PlanPhase.GATHERING
    assert early.reason == "1 of 2 nodes have reported"
    plan = decide(rules, early, [status(0), status(1, workers=3)])
    assert (plan.phase, plan.round) == (PlanPhase.TRAINING, 1)
    second = assignment(plan, status(1, workers=3))
    assert second is not None
    assert (second.first_rank, second.world_size, second.node_rank, second.nodes) == (2, 5, 1, 2)


def test_a_failure_starts_a_new_round_on_the_port_that_is_held_next() -> None:
    rules = Rules(max_restarts=1)
    plan = decide(rules, Plan(), [status(port=1000)])
    assert plan.store_port == 1000
    again = decide(rules, plan, [status(phase=NodePhase.FAILED, round_=1, port=2000, failure=KILLED)])
    assert (again.round, again.restart_count, again.store_port) == (2, 1, 2000)
    assert again.reason == "rank 1 on host0 was killed by SIGKILL"


def test_a_store_that_flags_name_stays_where_it_is() -> None:
    rules = Rules(max_restarts=1, store=("10.0.0.1", 29500))
    plan = decide(rules, Plan(), [status()])
    again = decide(rules, plan, [status(phase=NodePhase.FAILED, round_=1, failure=KILLED)])
    assert (again.store_address, again.store_port) == ("10.0.0.1", 29500)


def test_the_report_of_an_old_round_changes_nothing() -> None:
    rules = Rules(max_restarts=5)
    failed = status(phase=NodePhase.FAILED, round_=1, port=2000, failure=KILLED)
    plan = decide(rules, decide(rules, Plan(), [status()]), [failed])
    assert decide(rules, plan, [failed]) == plan


def test_a_stranger_and_an_older_incarnation_get_no_assignment() -> None:
    plan = decide(Rules(), Plan(), [status()])
    assert assignment(plan, msgspec.structs.replace(status(), incarnation="another")) is None
    assert assignment(plan, status(7)) is None


@given(
    st.integers(0, 5),
    st.lists(st.sampled_from([NodePhase.RUNNING, NodePhase.FAILED, NodePhase.SUCCEEDED]), max_size=30),
    st.booleans(),
)
def test_any_order_of_events_keeps_the_budget(budget: int, events: list[NodePhase], repeat: bool) -> None:
    rules = Rules(max_restarts=budget)
    plan = decide(rules, Plan(), [status()])
    failures = 0
    for event in events:
        over = plan.phase in (PlanPhase.FINISHED, PlanPhase.FAILED)
        said = status(
            phase=event,
            round_=plan.round,
            port=1000 + plan.round,
            failure=KILLED if event is NodePhase.FAILED else None,
        )
        before = plan
        plan = decide(rules, plan, [said])
        if repeat:
            assert decide(rules, plan, [said]) == plan
        if over:
            assert plan == before
            continue
        failures += event is NodePhase.FAILED
        assert plan.restart_count == min(failures, budget)
        assert plan.round == 1 + plan.restart_count
        assert (plan.phase is PlanPhase.FAILED) == (failures > budget)


def spec(**changes: object) -> JobSpec:
    return msgspec.structs.replace(JobSpec(entrypoint=Entrypoint("script", "a.py"), run_id="x"), **changes)


def test_a_static_node_decides_alone_for_the_whole_world() -> None:
    job = JobSpec(
        entrypoint=Entrypoint("script", "a.py"),
        run_id="x",
        nodes=3,
        node_rank=1,
        workers_per_node=2,
        backend="static",
        master_addr="10.0.0.1",
        master_port=29500,
    )
    plans: list[Plan] = []
    board = LocalBoard(job, plans.append)
    mine = status(1)
    board.publish(mine)
    given_ = assignment(board.plan, mine)
    assert given_ is not None
    assert (given_.node_rank, given_.first_rank, given_.world_size) == (1, 2, 6)
    board.publish(status(1, NodePhase.SUCCEEDED, 1))
    assert board.plan.phase is PlanPhase.FINISHED
    assert len(plans) == 2


situations = st.builds(
    Situation,
    plan_phase=st.sampled_from(PlanPhase),
    plan_round=st.integers(0, 3),
    group_round=st.integers(0, 3),
    live=st.booleans(),
    asked_to_end=st.booleans(),
)


@given(situations)
def test_an_agent_never_leaves_or_starts_anew_while_workers_live(situation: Situation) -> None:
    action = reconcile(situation)
    if situation.live:
        assert action in (Action.STOP, Action.WAIT)
    if situation.asked_to_end:
        assert action in (Action.STOP, Action.LEAVE)
    if action is Action.START:
        assert situation.plan_phase is PlanPhase.TRAINING
        assert situation.group_round != situation.plan_round
