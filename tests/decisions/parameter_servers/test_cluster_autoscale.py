"""Jobs with parameter servers that choose their own numbers of workers and servers, in virtual time."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec.structs import replace
from support.virtual_scaled import LIMITS, TICK, Model, ScaledCluster, autoscaled
from support.virtual_servers import OUT_OF_MEMORY, SUCCESS, ServersJob, rules

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.size_choice import SizeChoice
from dlrover_run.coordination.records.validation import config_mismatch
from dlrover_run.features.autoscale.measure import Estimate
from dlrover_run.features.autoscale.model import Condition
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.features.operate.display.text import render_status
from dlrover_run.features.operate.web.metrics import JobFigures, render_metrics
from dlrover_run.words.reasons import codes
from tf_ps_runner.cluster.choice import CHIEFS, Baseline, ServersChoice
from tf_ps_runner.cluster.model import Cluster, Role, ServerBounds, Stage
from tf_ps_runner.cluster.server_load import (
    HIGH,
    LASTING,
    ServersView,
    awaits_measurement,
    decide_servers,
)
from tf_ps_runner.cluster.size_text import ServersCode, WorkersCode, of_workers

KNEE = Model(alone=0.1, served=0.04)
"""Each task that trains makes 10 steps per second, and each server serves 25."""

ONE_TABLE = Model(alone=0.1, served=0.04, hot=True)
"""The same, and all tables are on the first server."""


def settled(model: Model, **more: int) -> ScaledCluster:
    job = ScaledCluster(model, **more)
    job.settle_search()
    assert job.workers.condition.has_settled
    return job


def choice_of(job: ServersJob) -> SizeChoice:
    choice = job.cluster.size_choice
    assert choice is not None
    return choice


def test_workers_that_pay_for_themselves_are_kept() -> None:
    job = settled(Model(alone=0.1))
    assert job.history == [(7, 1), (3, 1), (7, 1)]
    assert job.workers.condition is Condition.LARGEST
    assert not any(state.failures for state in job.cluster.roles)
    # No worker has caused a new version.
    assert job.cluster.version == 1


def test_workers_that_the_servers_cannot_serve_are_not_kept() -> None:
    job = ScaledCluster(KNEE, autoscaled(ps=(1, 1)))
    job.settle_search()
    # 2 trainers make 20 steps per second and 3 make 25, which is the most.
    assert job.numbers in [(1, 1), (2, 1)]
    assert job.workers.condition is Condition.BEST
    assert choice_of(job).wanted_nodes == job.numbers[0]


def test_servers_are_added_while_their_processors_are_the_limit() -> None:
    job = settled(KNEE)
    assert job.history == [(7, 1), (7, 2), (7, 3), (3, 3), (7, 3)]
    # Planned changes: training has paused, and no step was lost.
    assert job.cluster.version == 3
    assert job.cluster.paused
    assert not any(state.failures for state in job.cluster.roles)


def test_a_server_that_brings_nothing_is_the_last_one_for_a_while() -> None:
    job = settled(ONE_TABLE)
    assert [servers for _, servers in job.history] == [1, 2, 2, 2, 2, 2]
    assert job.servers.refusals == 1
    assert codes(job.servers.reasons) == (ServersCode.NOT_WORTH.code,)


def test_a_server_is_added_for_memory_without_a_measurement() -> None:
    job = ScaledCluster(Model(size=150))
    job.run(60, until=lambda: job.numbers[1] == 2)
    assert job.numbers == (7, 2)
    assert not job.workers.table


def test_a_short_peak_adds_no_server() -> None:
    job = ScaledCluster(Model(size=150))
    job.run(LASTING * LIMITS.block - 5)
    job.model = Model()
    job.settle_search()
    assert job.numbers[1] == 1


def test_a_number_of_servers_that_the_tables_exclude_is_never_proposed() -> None:
    job = ScaledCluster(Model(size=150))
    job.tick()
    job.report_task(job.ids(Role.CHIEF)[0], server_bounds=ServerBounds(least=1, most=1, table="user", parts=1))
    job.run(150)
    assert {servers for _, servers in job.history} == {1}
    assert job.servers.target == 1
    assert codes(job.servers.reasons) == (ServersCode.MOST.code,)


def test_a_number_that_turns_out_to_be_excluded_is_given_up() -> None:
    job = ScaledCluster(Model(alone=0.1, size=150))
    job.run(60, until=lambda: job.numbers[1] == 2)
    # The chief of the new version does not restore the model: its tables have one part.
    job.report_task(job.ids(Role.CHIEF)[0], server_bounds=ServerBounds(least=1, most=1, table="u", parts=1, refused=2))
    job.run(20)
    assert job.numbers[1] == job.servers.target == 1
    job.run(300)
    assert {servers for _, servers in job.history} == {1, 2}
    assert job.history[-1][1] == 1
    # The search for workers goes on.
    assert any(one.blocks for one in job.workers.table)


def test_a_server_without_room_is_only_a_wish() -> None:
    job = ScaledCluster(Model(size=150), ps=1)
    job.run(60)
    servers = choice_of(job).servers
    assert servers is not None
    assert (servers.wanted, job.servers.target, job.numbers[1]) == (2, 1, 1)
    job.come("b", chief=0, workers=0, ps=1)
    job.run(30)
    assert job.numbers[1] == 2
    servers = choice_of(job).servers
    assert servers is not None
    assert servers.wanted == 2


def test_a_job_begins_with_the_fewest_servers_and_all_workers() -> None:
    job = ScaledCluster(Model(), autoscaled(ps=(2, 3), workers=(1, 4)))
    job.tick()
    assert job.numbers == (4, 2)


def test_nothing_changes_before_a_step_is_reported() -> None:
    job = ScaledCluster(Model(alone=1e9))
    job.run(200)
    assert job.history == [(7, 1)]
    assert codes(choice_of(job).reasons) == (WorkersCode.NO_STEPS.code,)


def test_nothing_changes_after_the_first_success() -> None:
    job = ScaledCluster(KNEE)
    job.run(20)
    # The size that trains is wanted from the first version on, so that newcomers do not begin it anew.
    size = CHIEFS + len(job.ids(Role.WORKER))
    job.end(job.ids(Role.WORKER)[0], how=SUCCESS)
    job.run(200)
    assert {servers for _, servers in job.history} == {1}
    assert (job.workers.target, job.workers.changes, job.workers.table) == (size, 0, ())


def test_workers_that_fail_at_a_number_that_is_only_tried_cost_no_restart() -> None:
    job = ScaledCluster(Model(alone=0.1), here=False)
    job.come("a", workers=2, ps=3)
    job.wait(30.1)
    job.failing = lambda workers: workers > 3
    job.run(150)
    job.come("b", chief=0, workers=5, ps=0)
    job.run(400)
    assert any(one.crashes for one in job.workers.table)
    assert job.numbers[0] <= 3
    assert not job.spent(Role.WORKER).failures
    assert not job.spent(Role.WORKER).memory_restarts
    assert job.plan.phase is PlanPhase.TRAINING


def test_a_worker_that_fails_at_a_known_number_is_charged() -> None:
    job = settled(Model(alone=0.1))
    job.end(job.ids(Role.WORKER)[0], how=OUT_OF_MEMORY)
    assert job.spent(Role.WORKER).memory_restarts == 1
    job.run(30)
    assert job.numbers[0] == 7


def test_workers_without_room_are_given_up_for_a_time() -> None:
    job = ScaledCluster(Model(alone=0.1), here=False)
    job.come("a", workers=2, ps=1)
    job.wait(30.1)
    job.run(300)
    assert job.numbers[0] == 2
    assert job.workers.condition is Condition.STOP
    job.come("b", chief=0, workers=5, ps=0)
    job.settle_search()
    assert job.numbers[0] == 7


def test_an_operator_fixes_numbers_and_gives_them_back() -> None:
    job = settled(Model(alone=0.1))
    job.scale(workers=2)
    job.run(100)
    assert job.numbers == (2, 1)
    assert choice_of(job).paused
    job.request_auto(Role.WORKER)
    job.run(60)
    assert job.numbers == (7, 1)
    assert not choice_of(job).paused


def test_servers_that_an_operator_has_asked_for_stay_when_they_are_given_back() -> None:
    job = settled(Model(alone=0.1))
    job.scale(ps=3)
    job.run(30)
    assert job.numbers[1] == 3
    servers = choice_of(job).servers
    assert servers is not None
    assert servers.paused
    job.request_auto(Role.PS)
    job.run(300)
    assert job.numbers[1] == 3
    assert job.cluster.desired.ps is None


def test_a_fixed_number_of_servers_is_not_changed_whatever_their_load() -> None:
    job = ScaledCluster(Model(alone=0.1, served=0.04, size=150))
    job.scale(ps=1)
    job.run(150)
    assert {servers for _, servers in job.history} == {1}


def test_servers_are_chosen_while_the_number_of_workers_is_fixed() -> None:
    job = ScaledCluster(KNEE)
    job.tick()
    job.scale(workers=6)
    job.run(300)
    assert job.numbers == (6, 3)
    assert not any(one.blocks for one in job.workers.table)


def test_auto_gives_a_job_that_does_not_choose_as_many_as_fit() -> None:
    job = ScaledCluster(Model(), rules(1, 2, max_ps=3))
    job.wait(30.1)
    job.scale(ps=1)
    assert job.cluster.desired.ps == 1
    job.request_auto(Role.PS)
    assert job.cluster.desired.ps is None
    assert job.cluster.choice is None
    with pytest.raises(RequestFailed):
        job.scale(ps=4)


def test_only_one_thing_changes_at_a_time() -> None:
    job = ScaledCluster(KNEE)
    job.settle_search()
    for before, after in zip(job.history, job.history[1:], strict=False):
        assert (before[0] != after[0]) + (before[1] != after[1]) == 1


def test_the_search_goes_on_after_a_change_of_the_coordinator() -> None:
    job = ScaledCluster(KNEE)
    job.run(200)
    before = job.choice
    assert before.servers.target > 1
    job.take_over(with_journal=True)
    assert job.choice.servers.target == before.servers.target
    assert job.choice.workers.table == before.workers.table
    job.settle_search()
    assert job.numbers == (7, 3)


def test_what_was_found_survives_a_coordinator_without_a_journal() -> None:
    job = settled(KNEE)
    before, numbers = job.choice, job.numbers
    changes = len(job.history)
    job.take_over(with_journal=False)
    assert job.choice.servers.target == before.servers.target
    assert [one.size for one in job.workers.table] == [one.size for one in before.workers.table]
    job.run(200)
    assert job.numbers == numbers
    assert len(job.history) == changes


def test_other_servers_begin_another_search() -> None:
    job = settled(Model(alone=0.1))
    changes = len(job.history)
    job.scale(ps=2)
    job.run(30)
    assert job.numbers[1] == 2
    assert not any(one.blocks for one in job.workers.table)
    job.settle_search()
    assert len(job.history) > changes


def test_new_servers_that_fail_are_given_up() -> None:
    job = ScaledCluster(Model(size=150), autoscaled(max_restarts=0))
    while job.stage is not Stage.CHANGING:
        job.tick()
        job.wait(TICK)
    job.obey()
    job.end(*(str(task.key) for task in job.cluster.next_servers))
    job.run(20)
    assert job.plan.phase is PlanPhase.TRAINING
    assert job.servers.target == job.numbers[1] == 1


def test_a_worker_that_starts_again_is_no_other_size() -> None:
    job = settled(Model(alone=0.1))
    losses, changes = job.workers.losses, len(job.history)
    job.end(job.ids(Role.WORKER)[3])
    job.obey()
    assert job.stage is Stage.TRAINING
    job.run(60)
    assert job.workers.losses == losses
    assert job.workers.condition is Condition.LARGEST
    assert set(job.history[changes:]) <= {(7, 1)}


def test_the_status_and_the_metrics_show_both_numbers_and_why() -> None:
    job = settled(Model(alone=0.1, served=0.03))
    found = job.coordinator.status("ads", job.now)
    shown = render_status(found)
    assert "autoscale: 7 workers wanted, ReachMaxReplicas" in shown
    assert "servers: 3 parameter servers wanted" in shown
    assert re.search(r"\n7  <  +80 ", shown)
    metrics = render_metrics([JobFigures(found, {})], 0.0)
    assert 'dlrover_job_wanted_tasks{dlrover_job="ads",role="worker"} 7' in metrics
    assert 'dlrover_job_wanted_tasks{dlrover_job="ads",role="ps"} 3' in metrics
    assert "dlrover_job_wanted_nodes{" not in metrics
    job.scale(workers=2)
    shown = render_status(job.coordinator.status("ads", job.now))
    assert "scale --workers=auto" in shown


def test_a_node_with_other_flags_is_named() -> None:
    assert "--ps (most) is 3, not 2" in config_mismatch(autoscaled(), autoscaled(ps=(1, 2)))
    without = autoscaled(limits=AutoscaleRules())
    assert "--autoscale" in config_mismatch(autoscaled(), without)
    assert config_mismatch(autoscaled(), autoscaled()) == ""


def test_each_reason_of_the_autoscaler_has_a_text_for_workers() -> None:
    # Only a round of torch says why a failure costs no restart; a job with servers charges the failures of each task.
    assert {code.name for code in WorkersCode} == {code.name for code in AutoscaleCode} - {"TRIED_SIZE"}
    (reason,) = of_workers((AutoscaleCode.BEST(size=3, sizes="1, 2, 3"),))
    assert (reason.code, reason.params) == (WorkersCode.BEST.code, {"size": 2, "sizes": "0, 1, 2"})


def test_the_choice_is_a_part_of_the_stored_cluster() -> None:
    job = settled(KNEE)
    again = msgspec.json.decode(msgspec.json.encode(job.cluster), type=Cluster)
    assert again == job.cluster


# The rule for servers alone.

BUSY = ServersView(version=1, servers=2, most=4, room=4, size=5, steady=True, may_try=True, processor=95, memory=10)
KNOWN = Estimate(3.0, 0.01, 10)
WINDOW = LASTING * LIMITS.block


def after_window(state: ServersChoice, view: ServersView, now: float = 1000.0) -> ServersChoice:
    """Return the state once that view has lasted."""
    return decide_servers(LIMITS, decide_servers(LIMITS, state, view, now - WINDOW), view, now)


STATE = ServersChoice(target=2, version=1)


def test_a_busy_processor_adds_a_server_once_the_throughput_is_known() -> None:
    unknown = after_window(STATE, BUSY)
    assert unknown.target == 2
    assert awaits_measurement(LIMITS, unknown, BUSY, 1000.0)
    known = decide_servers(LIMITS, unknown, BUSY._replace(rate=KNOWN), 1000.0)
    assert known.target == 3
    assert known.baseline == Baseline(2, 5, 3.0, 0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"processor": HIGH - 1},
        {"steady": False},
        {"size": 0},
        {"most": 2},
        {"room": 2},
        {"may_try": False},
        {"processor": None, "memory": None},
    ],
)
def test_no_server_is_added(changes: dict[str, object]) -> None:
    view = BUSY._replace(rate=KNOWN)._replace(**changes)
    assert after_window(STATE, view).target == 2


def test_servers_that_failed_too_often_are_named_as_the_reason() -> None:
    tried = replace(STATE, target=3)
    found = after_window(tried, BUSY._replace(rate=KNOWN, may_try=False))
    assert found.target == 2
    assert ServersCode.FAILED.within(found.reasons)


def test_the_load_of_an_earlier_version_does_not_count() -> None:
    state = decide_servers(LIMITS, STATE, BUSY._replace(rate=KNOWN), 1000.0 - WINDOW)
    assert decide_servers(LIMITS, state, BUSY._replace(rate=KNOWN, version=2), 1000.0).target == 2


@pytest.mark.parametrize(("gain", "refusals"), [(0.3, 0), (0.0, 1), (-0.2, 1)])
def test_an_addition_is_compared_at_the_same_number_of_workers(gain: float, refusals: int) -> None:
    state = ServersChoice(target=3, version=2, baseline=Baseline(2, 5, 3.0, 0.01))
    view = BUSY._replace(version=2, servers=3, rate=KNOWN._replace(rate=3.0 + gain), processor=10)
    found = decide_servers(LIMITS, state, view, 1000.0)
    assert (found.baseline, found.refusals) == (None, refusals)
    # It is never taken away.
    assert found.target == 3


def test_after_an_addition_without_effect_others_wait_longer_each_time() -> None:
    state = ServersChoice(target=3, version=2, baseline=Baseline(2, 5, 3.0, 0.01), refusals=2)
    view = BUSY._replace(version=2, servers=3, rate=KNOWN)
    refused = after_window(state, view)
    assert refused.quiet_until > 1000.0 - WINDOW + 3 * LIMITS.retry
    assert decide_servers(LIMITS, refused, view, refused.quiet_until - 1).target == 3
    assert decide_servers(LIMITS, refused, view, refused.quiet_until + 1).target == 4


def test_memory_does_not_wait_for_that() -> None:
    state = ServersChoice(target=2, version=1, quiet_until=1e9, refusals=3)
    assert after_window(state, BUSY._replace(memory=HIGH)).target == 3


def test_servers_that_are_here_are_not_taken_away() -> None:
    assert decide_servers(LIMITS, ServersChoice(target=1), BUSY._replace(processor=5), 0.0).target == 2


def test_a_decision_is_idempotent() -> None:
    view = BUSY._replace(rate=KNOWN)
    once = after_window(STATE, view)
    assert decide_servers(LIMITS, once, view, 1000.0) == once
    assert replace(once, target=2) != once
