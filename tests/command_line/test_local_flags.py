"""The flags of local nodes: the job, its rendezvous, and the flags that they exclude."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import fake_etcd3, isolate, parsed
from policy_parts import check_rules, fold

from dlrover_run import exit_codes
from dlrover_run.cli import main
from dlrover_run.command_line import job_size, options
from dlrover_run.coordination.rules import JobRules
from dlrover_run.local_cluster import network
from dlrover_run.policies.health.rules import CHECK_ONCE, HealthRules
from dlrover_run.spec import JobSpec, LocalSpec, MasterSpec

OWN_MASTER = MasterSpec(host="127.0.0.1", port=0, is_host=False)
IN_ETCD = "--rdzv-backend=etcd --rdzv-endpoint=etcd0:4000"
WITHOUT_EFFECT = "has no effect with --local-nodes, which starts its own master."


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, a package that can be found, and no variable that changes a job."""
    isolate(tmp_path, monkeypatch)
    fake_etcd3(monkeypatch)
    return tmp_path


def job(line: str, **environ: str) -> JobSpec:
    """A job about which there was nothing to say."""
    spec, said = parsed(line, **environ)
    assert said == []
    return spec


def rules(least: int, most: int, **others: int) -> JobRules:
    """The rules of a job on this machine where nothing else was said."""
    times = {"last_call_timeout": job_size.LOCAL_LAST_CALL_TIMEOUT, "cut_off_timeout": job_size.LOCAL_CUT_OFF_TIMEOUT}
    return JobRules(least, most, **times, **fold(HealthRules, others))


@pytest.mark.parametrize(
    ("line", "local", "least", "most"),
    [
        ("--local-nodes=4", LocalSpec(4, 4), 4, 4),
        ("--local_nodes 3:4", LocalSpec(3, 4), 3, 4),
        ("--local-nodes=1", LocalSpec(1, 1), 1, 1),
        ("--local-nodes=4 --nnodes=3:4", LocalSpec(4, 4), 3, 4),
        ("--local-nodes=2 --nnodes=1:8", LocalSpec(2, 2), 1, 8),
        ("--local-nodes=2:3 --nnodes=2:3", LocalSpec(2, 3), 2, 3),
    ],
)
@pytest.mark.parametrize("backend", ["", "--rdzv-backend=c10d", "--rdzv-backend=master"])
def test_local_nodes_use_a_local_master(line: str, local: LocalSpec, least: int, most: int, backend: str) -> None:
    spec = job(f"{line} {backend}")
    assert (spec.local, spec.rules) == (local, rules(least, most))
    assert (spec.backend, spec.master, spec.etcd) == ("master", OWN_MASTER, None)


def test_each_job_on_local_nodes_has_a_name_of_its_own_unless_it_is_given_one() -> None:
    assert len({job("--local-nodes=2").run_id for _ in range(3)} | {"none"}) == 4
    assert job("--local-nodes=2 --rdzv-id=mine").run_id == "mine"


def test_each_option_of_local_nodes_has_a_flag_and_a_variable() -> None:
    by_flag = job("--local-nodes=2:3 --node-restarts=0 --node-join-after=0.5")
    assert by_flag.local == LocalSpec(2, 3, restarts=0, join_after=0.5)
    environ = {"PET_LOCAL_NODES": "2:3", "PET_NODE_RESTARTS": "0", "PET_NODE_JOIN_AFTER": "0.5"}
    assert replace(job("", **environ), run_id=by_flag.run_id) == by_flag
    assert job("--local-nodes=3 --nnodes=3", PET_LOCAL_NODES="x").local == LocalSpec(3, 3)


def test_the_table_has_the_defaults_of_local_spec() -> None:
    record = LocalSpec(1, 1)
    assert options.BY_DEST["node_restarts"].default == f"{record.restarts}"
    assert options.BY_DEST["node_join_after"].default == f"{record.join_after:g}"


def test_a_job_without_local_nodes_is_unchanged() -> None:
    spec = job("")
    assert (spec.local, spec.backend, spec.logs.prefixed) == (None, "memory", False)


def test_every_console_line_of_local_nodes_has_a_prefix() -> None:
    assert job("--local-nodes=2").logs.prefixed
    assert job("--local-nodes=2").logs.prefix_template is None
    template = job("--local-nodes=2", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}]: ").logs.prefix_template
    assert template == "[${rank}]: "


@pytest.mark.parametrize(
    ("conf", "seconds"), [("cut_off_timeout=300", 300), ("cut_off_timeout=0", 0), ("lost_after=1", 30)]
)
def test_a_local_node_that_is_cut_off_is_replaced_soon_unless_given(conf: str, seconds: float) -> None:
    assert job(f"--local-nodes=2:3 --rdzv-conf={conf}").rules.cut_off_timeout == seconds


@pytest.mark.parametrize(("conf", "seconds"), [("last_call_timeout=30", 30), ("join_timeout=5", 3)])
def test_the_last_call_timeout_of_local_nodes_is_short_unless_given(conf: str, seconds: float) -> None:
    assert job(f"--local-nodes=2:3 --rdzv-conf={conf}").rules.last_call_timeout == seconds
    assert job(f"--local-nodes=2:3 --rdzv-conf={conf} {IN_ETCD}").rules.last_call_timeout == seconds


def test_local_nodes_ignore_the_rank_and_the_name_of_the_machine() -> None:
    environ = {"NODE_RANK": "3", "WORKER_RANK": "x", "NODE_ID": "a/b", "WORKER_ID": "pod-3", "NODE_NUM": "7"}
    for line in ("--local-nodes=2", f"--local-nodes=2 {IN_ETCD}"):
        spec = job(line, **environ)
        assert (spec.node_rank, spec.node_id, spec.rules.max_nodes) == (None, "", 2)


@pytest.mark.parametrize("nodes", ["1", "2:3"])
@pytest.mark.parametrize("backend", [IN_ETCD, IN_ETCD.replace("=etcd ", "=etcd-v2 ")])
def test_local_nodes_use_an_etcd_that_is_given(nodes: str, backend: str) -> None:
    spec, said = parsed(f"--local-nodes={nodes} {backend} --rdzv-id=mine --rdzv-conf=bind=::", DLROVER_MASTER_ADDR="a")
    assert spec.etcd is not None
    assert (spec.backend, spec.master, spec.run_id) == ("etcd", None, "mine")
    assert (spec.etcd.endpoints, spec.rules.lost_after) == ((("etcd0", 4000),), 0.0)
    assert said[-1] == "bind of --rdzv-conf has no effect with etcd: no node listens there."
    assert len(said) == (1 if backend is IN_ETCD else 2)


@pytest.mark.parametrize(
    ("line", "environ", "without"),
    [
        ("--rdzv-endpoint=node0:1", {}, ["--rdzv-endpoint"]),
        ("--rdzv-backend=c10d --rdzv-endpoint=node0:1", {}, ["--rdzv-endpoint"]),
        ("--rdzv-backend=master", {"DLROVER_MASTER_ADDR": "node0:1"}, ["DLROVER_MASTER_ADDR"]),
        ("", {"DLROVER_MASTER_ADDR": "?", "PET_RDZV_ENDPOINT": "?"}, ["PET_RDZV_ENDPOINT", "DLROVER_MASTER_ADDR"]),
        ("", {"DLROVER_MASTER_ADDR": " ", "PET_RDZV_ENDPOINT": ""}, []),
        (
            "--rdzv-conf=is_host=1,bind=::,state_dir=train.py,token_file=none,tls_ca=none,tls_cert=x,auth=required",
            {},
            [f"{key} of --rdzv-conf" for key in ("is_host", "bind", "state_dir", "token_file", "tls_ca", "tls_cert")],
        ),
        ("--rdzv-conf=auth=required,timeout=5,lost_after=1", {}, []),
    ],
)
def test_options_of_a_master_have_no_effect_on_a_local_master(
    line: str, environ: dict[str, str], without: list[str]
) -> None:
    spec, said = parsed(f"--local-nodes=2 {line}", **environ)
    assert (spec.backend, spec.master, spec.rules) == ("master", OWN_MASTER, rules(2, 2))
    assert sorted(said) == sorted(f"{what} {WITHOUT_EFFECT}" for what in without)


def test_a_local_master_does_not_use_the_token_of_the_environment() -> None:
    assert job("--local-nodes=2", DLROVER_RDZV_TOKEN="open-sesame", DLROVER_RDZV_TOKEN_FILE="none").master == OWN_MASTER


@pytest.mark.parametrize(
    ("line", "spares", "waiting"),
    [
        ("--local-nodes=4 --nnodes=4", 0, ""),
        ("--local-nodes=5 --nnodes=4", 1, ""),
        ("--local-nodes=3:7 --nnodes=2:4", 3, ""),
        ("--local-nodes=2 --nnodes=1:4", 0, ""),
        ("--local-nodes=5 --nnodes=4 --spares=1", 1, ""),
        ("--local-nodes=4 --nnodes=4 --spares=2", 2, ""),
        ("--local-nodes=5 --nnodes=4 --spares=0", 0, "--nnodes and --spares use 4 of the nodes of --local-nodes, "),
        ("--local-nodes=8 --nnodes=4 --spares=2", 2, "--nnodes and --spares use 6 of the nodes of --local-nodes, "),
    ],
)
def test_surplus_local_nodes_are_spares(line: str, spares: int, waiting: str) -> None:
    spec, said = parsed(line)
    assert spec.rules.spares == spares
    more = "and 1 more waits as a spare too." if "=5" in line else "and 2 more wait as spares too."
    assert said == ([waiting + more] if waiting else [])


def test_local_nodes_may_share_an_address() -> None:
    assert job("--local-nodes=2 --local-addr=127.0.0.2").local_addr == "127.0.0.2"
    assert job("--local-nodes=2", PET_STANDALONE="0").backend == "master"


def test_options_of_local_nodes_are_warned_of_without_them() -> None:
    spec, said = parsed("--isolate-nodes --node-restarts=1 --node-join-after=5")
    assert spec.local is None
    assert said == [
        "--node-restarts has no effect without --local-nodes.",
        "--isolate-nodes has no effect without --local-nodes.",
        "--node-join-after has no effect without --local-nodes.",
    ]
    assert parsed("", PET_ISOLATE_NODES="0")[1] == []
    assert parsed("", PET_ISOLATE_NODES="1")[1] == ["PET_ISOLATE_NODES has no effect without --local-nodes."]


def test_node_join_after_is_warned_of_if_no_node_joins_later() -> None:
    said = "--node-join-after has no effect, since --local-nodes 2 has no nodes that join later."
    assert parsed("--local-nodes=2 --node-join-after=5")[1] == [said]


def test_isolated_local_nodes_are_accepted_where_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "why_not", lambda: None)
    assert job("--local-nodes=2 --isolate-nodes").local == LocalSpec(2, 2, isolated=True)
    assert job("--local-nodes=2 --isolate-nodes", PET_RDZV_BACKEND="c10d").master == OWN_MASTER


def test_isolated_local_nodes_are_refused_in_one_line_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real search for `ip` finds none; nobody is started."""
    monkeypatch.setenv("PATH", str(here))
    assert main(["--local-nodes=2", "--isolate-nodes", "train.py"]) == exit_codes.BAD_COMMAND_LINE
    reason = network.why_not()
    assert reason
    assert capsys.readouterr().err == f"dlrover-run: --isolate-nodes is not possible here, since {reason}.\n"


def test_local_nodes_are_the_number_of_nodes_of_auto_config() -> None:
    spec = job("--auto-config --local-nodes=4")
    assert (spec.rules, spec.workers_per_node) == (rules(4, 4, check=CHECK_ONCE), 8)
    spec, said = parsed("--auto-config --local-nodes=4", NODE_NUM="3")
    assert (spec.rules.max_nodes, len(said)) == (4, 1)
    assert said[0].startswith("--local-nodes 4 takes precedence over NODE_NUM=3")


def test_local_nodes_are_checked() -> None:
    assert check_rules(job("--local-nodes=2 --network-check").rules).check == CHECK_ONCE


def test_the_page_lists_every_flag_of_local_nodes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    table = page.partition("## Flags of our own")[2].partition("\n## ")[0]
    assert [
        flag.name for flag in options.TABLE if flag.panel == options.LOCAL_CLUSTER and f"`--{flag.name}" not in table
    ] == []
