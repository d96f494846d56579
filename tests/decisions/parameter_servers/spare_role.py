"""Run by `test_spare_role.py`: adds a role to the table before any other module reads it, and follows it everywhere."""

from __future__ import annotations

import json

from tf_ps_runner.cluster.model import Capacity, EndCause, PlannedTask, Role, Stage, TaskKey

SPARE = str.__new__(Role, "spare")
SPARE._name_, SPARE._value_ = "SPARE", "spare"
Role._member_names_.append("SPARE")
Role._member_map_["SPARE"] = SPARE
Role._value2member_map_["spare"] = SPARE

from tf_ps_runner.cluster import rules  # noqa: E402

rules.ROLES[SPARE] = rules.RoleSpec(
    noun="spare",
    loss=rules.Loss.RESTART,
    replicas=lambda rules: (1, 2),
    address_awaited=False,
    required=False,
    purpose="spares",
)

from support.virtual_servers import KILLED, SUCCESS, ServersJob  # noqa: E402
from support.virtual_servers import rules as job_rules  # noqa: E402

from dlrover_run.coordination.records.plan import PlanPhase  # noqa: E402
from dlrover_run.environment.records import Detected  # noqa: E402
from dlrover_run.failures.worker_exit import WorkerExit  # noqa: E402
from dlrover_run.spec import FlagValue  # noqa: E402
from tf_ps_runner.agent.desired import LocalTask, task_states  # noqa: E402
from tf_ps_runner.agent.exits import ExitInfo, classify_exit  # noqa: E402
from tf_ps_runner.cluster import text  # noqa: E402
from tf_ps_runner.cluster.orders import NodeOrder  # noqa: E402
from tf_ps_runner.command_line import options  # noqa: E402
from tf_ps_runner.command_line.cluster import tasks_of_node  # noqa: E402
from tf_ps_runner.spec import whole_job  # noqa: E402
from tf_ps_runner.tf_config import tf_config  # noqa: E402


def command_line() -> None:
    assert "spare" in options.ROLE_CHOICES
    (flag,) = (flag for flag in options.TABLE if flag.name == "role")
    assert "spare" in flag.choices
    assert "[b]spare[/]" in flag.help
    limits = rules.ClusterRules()
    assert Capacity(SPARE, 2) in whole_job(limits)
    found = Detected(cluster="x", title="x", nodes=None, node_rank=FlagValue("RANK", "2"))
    assert tasks_of_node(found, limits) == (Capacity(SPARE, 1),)
    assert "1 to 2 spares" in limits.job_size()


def environment() -> None:
    key = TaskKey(SPARE, 7)
    task = PlannedTask(key=key, rank=1, version=3, node_id="n", incarnation="i", host="h", address="h", port=5)
    order = NodeOrder(version=3, servers=("s:1",), chief="c:1", tasks=(task,))
    value = json.loads(tf_config(order, task, sparse=False) or "")
    assert value == {"cluster": {"chief": ["c:1"], "ps": ["s:1"]}, "task": {"type": "spare", "index": 1}}
    # Stop order: it is stopped before the servers that it uses.
    (state,) = task_states(order, [LocalTask(key=key, rank=1, version=3, live=True)])
    assert (state.serves, state.served) == (False, True)


def exits() -> None:
    end = WorkerExit(0, 0, 7, 0, 1.0, stderr_tail="", name="spare-0")
    assert classify_exit(ExitInfo(SPARE, end, lived=1.0)).cause is EndCause.SUCCESS


def job() -> ServersJob:
    job = ServersJob(job_rules(1, 0, max_restarts=1))
    job.come("a", workers=0, ps=1, spare=2)
    job.train()
    assert job.ids(SPARE) == ["spare-0", "spare-1"]
    return job


def placement() -> None:
    few = ServersJob(job_rules(1, 0))
    few.come("a", workers=0, ps=1)
    assert few.plan.phase is PlanPhase.GATHERING
    few.come("b", chief=0, workers=0, ps=0, spare=1)
    few.wait(30.1)
    assert (few.plan.phase, few.hosts(SPARE)) == (PlanPhase.TRAINING, ["b"])


def failures() -> None:
    first = job()
    first.end("spare-1")
    assert (first.ids(SPARE), first.cluster.version) == (["spare-0", "spare-2"], 1), "it restarts alone"
    assert first.spent(SPARE).failures == 1
    first.obey()
    first.end("spare-2", how=KILLED)
    assert first.plan.phase is PlanPhase.TRAINING
    assert first.cluster.role_state(SPARE).given_up
    assert text.ClusterCode.GOES_ON_WITHOUT.within(first.plan.reasons)
    assert first.ids(SPARE) == ["spare-0"], "the other one goes on"
    first.end("chief-0", how=SUCCESS)
    first.end("spare-0", how=SUCCESS)
    assert text.ClusterCode.PURPOSE_FAILED.within(first.plan.reasons)


def new_version() -> None:
    last = job()
    last.end("ps-0", how=KILLED)
    assert last.cluster.version == 2
    assert last.ids(SPARE) == ["spare-2", "spare-3"], "it uses the servers, so it starts again with them"


def texts() -> None:
    train, *_ = text.training(job().cluster)
    assert "2 spares" in train.params["tasks"]
    assert text.replicas(SPARE, 1) == "1 spare"
    assert text.too_few_tasks(SPARE, 0, 1, 9.0).code == text.ClusterCode.TOO_FEW_TASKS.code


def end() -> None:
    last = job()
    last.end("chief-0", how=SUCCESS)
    assert last.stage is Stage.ENDING, "it has its grace"
    last.end("spare-0", "spare-1", how=SUCCESS)
    assert last.plan.phase is PlanPhase.FINISHED


for check in (command_line, environment, exits, placement, failures, new_version, texts, end):
    check()
    print(check.__name__)
