"""The description of the cluster for a task: a `TF_CONFIG` that TensorFlow accepts, and the other variables."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from scripted_cluster import run_booted

from tf_ps_runner.cluster.model import PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.tf_config import proxy_exceptions, task_variables, tf_config

SERVERS = ("h1:21", "h2:22")
ORDER = NodeOrder(version=3, servers=SERVERS, chief="h0:10", workers=("h3:31", "h4:32"), next_servers=("h1:41",))


def task(role: Role, rank: int = 0, version: int = 3, host: str = "h4", port: int = 32) -> PlannedTask:
    return PlannedTask(
        key=TaskKey(role, rank + 7),
        rank=rank,
        version=version,
        node_id="n",
        incarnation="i",
        host=host,
        address=host,
        port=port,
    )


def config(order: NodeOrder, wanted: PlannedTask, sparse: bool = False, gaps: bool = False) -> object:
    text = tf_config(order, wanted, sparse, gaps)
    return None if text is None else json.loads(text)


def test_every_task_has_the_whole_cluster_by_rank_without_evaluators() -> None:
    cluster = {"chief": ["h0:10"], "worker": ["h3:31", "h4:32"], "ps": ["h1:21", "h2:22"]}
    for role in Role:
        assert config(ORDER, task(role)) == {"cluster": cluster, "task": {"type": role.value, "index": 0}}


def test_a_job_without_workers_lists_none() -> None:
    alone = msgspec.structs.replace(ORDER, workers=())
    assert config(alone, task(Role.CHIEF)) == {
        "cluster": {"chief": ["h0:10"], "ps": ["h1:21", "h2:22"]},
        "task": {"type": "chief", "index": 0},
    }


def test_a_sparse_config_has_the_task_itself_the_chief_and_the_servers_by_index() -> None:
    servers = {"0": "h1:21", "1": "h2:22"}
    assert config(ORDER, task(Role.WORKER, 1), sparse=True) == {
        "cluster": {"chief": {"0": "h0:10"}, "worker": {"1": "h4:32"}, "ps": servers},
        "task": {"type": "worker", "index": 1},
    }
    assert config(ORDER, task(Role.PS, 1), sparse=True) == {
        "cluster": {"chief": {"0": "h0:10"}, "ps": servers},
        "task": {"type": "ps", "index": 1},
    }


def test_a_server_of_the_next_version_has_the_servers_of_its_own_version() -> None:
    found = config(ORDER, task(Role.PS, 0, version=4))
    assert isinstance(found, dict)
    assert found["cluster"]["ps"] == ["h1:41"]


def test_an_evaluator_of_an_earlier_version_has_the_current_servers() -> None:
    found = config(ORDER, task(Role.EVALUATOR, 0, version=2))
    assert isinstance(found, dict)
    assert found["cluster"]["ps"] == list(SERVERS)


@pytest.mark.parametrize(
    "change",
    [{"servers": ()}, {"servers": ("h1:21", "")}, {"chief": ""}, {"version": 5}],
    ids=["no server", "one server missing", "no chief", "a version that has gone"],
)
def test_no_task_starts_before_the_addresses_of_chief_and_servers_are_known(change: dict[str, object]) -> None:
    order = msgspec.structs.replace(ORDER, **change)
    assert config(order, task(Role.WORKER, 1), gaps=True) is None
    assert config(order, task(Role.WORKER, 1), sparse=True) is None


def test_no_task_starts_before_its_own_address_is_in_the_order() -> None:
    assert config(ORDER, task(Role.WORKER, 1, port=0), gaps=True) is None


def test_the_address_of_a_lost_worker_is_waited_for_and_then_replaced_by_that_of_the_chief() -> None:
    order = msgspec.structs.replace(ORDER, workers=("", "h4:32"))
    assert config(order, task(Role.WORKER, 1)) is None
    assert config(order, task(Role.WORKER, 1), sparse=True) is not None
    found = config(order, task(Role.WORKER, 1), gaps=True)
    assert isinstance(found, dict)
    assert found["cluster"]["worker"] == ["h0:10", "h4:32"]


def test_an_address_with_colons_is_in_brackets() -> None:
    assert task(Role.WORKER, host="fe80::1").endpoint == "[fe80::1]:32"


def test_the_other_variables_are_those_of_pods() -> None:
    assert task_variables(ORDER, task(Role.WORKER, 1), "{}", "m:29400") == {
        "TF_CONFIG": "{}",
        "WORKER_TYPE": "worker",
        "WORKER_ID": "8",
        "WORKER_RANK": "1",
        "WORKER_NUM": "2",
        "DLROVER_MASTER_ADDR": "m:29400",
        "TF_PS_VERSION": "3",
        "TF_PS_GATE": "1",
        "TF_PS_READY_AT_START": "0",
    }
    assert task_variables(ORDER, task(Role.PS, 0, version=4), "{}", "")["WORKER_NUM"] == "1"


PARSE = """
import json, os, sys
import tensorflow as tf
for text in json.loads(sys.argv[1]):
    os.environ["TF_CONFIG"] = text
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec, place = resolver.cluster_spec(), json.loads(text)["task"]
    role, index = resolver.task_type, resolver.task_id
    address = None if role == "evaluator" else spec.task_address(role, index)
    print(json.dumps([role, index, address, spec.num_tasks("ps"), sorted(spec.jobs)]))
"""


@pytest.mark.tensorflow
def test_tensorflows_own_parser_accepts_every_form(tensorflow: Path) -> None:
    tasks = [task(role, rank) for role, rank in ((Role.CHIEF, 0), (Role.WORKER, 1), (Role.PS, 1), (Role.EVALUATOR, 0))]
    texts = [tf_config(ORDER, one, sparse) for one in tasks for sparse in (False, True)]
    done = run_booted(tensorflow, "-c", PARSE, json.dumps(texts))
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines()]
    dense, few = ["chief", "ps", "worker"], ["chief", "ps"]
    assert parsed == [
        ["chief", 0, "h0:10", 2, dense],
        ["chief", 0, "h0:10", 2, few],
        ["worker", 1, "h4:32", 2, dense],
        ["worker", 1, "h4:32", 2, dense],
        ["ps", 1, "h2:22", 2, dense],
        ["ps", 1, "h2:22", 2, few],
        ["evaluator", 0, None, 2, dense],
        ["evaluator", 0, None, 2, few],
    ]


HOSTS = "h1,h2,h0,h3,h4"


@pytest.mark.parametrize(
    ("environment", "changed"),
    [
        ({}, {}),
        # gRPC does not read the name in capitals.
        ({"HTTP_PROXY": "http://p:1"}, {}),
        ({"http_proxy": ""}, {}),
        ({"http_proxy": "http://p:1"}, {"no_proxy": HOSTS}),
        ({"https_proxy": "http://p:1", "no_proxy": "a.example, h2"}, {"no_proxy": "a.example,h2,h1,h0,h3,h4"}),
        # Python reads it as long as the other one is not set.
        ({"grpc_proxy": "http://p:1", "NO_PROXY": "a.example"}, {"no_proxy": f"a.example,{HOSTS}"}),
        ({"grpc_proxy": "p:1", "no_grpc_proxy": "b"}, {"no_grpc_proxy": f"b,{HOSTS}", "no_proxy": HOSTS}),
    ],
)
def test_a_task_reaches_the_others_without_the_proxy(environment: dict[str, str], changed: dict[str, str]) -> None:
    assert proxy_exceptions(ORDER, task(Role.CHIEF), environment) == changed
