"""The flags of local nodes: the job, its rendezvous, and the flags that they exclude."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.command_lines import fake_etcd3, isolate, job, parsed, watched
from support.places import place_of
from support.policy_parts import check_rules, fold

from dlrover_run import exit_codes
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.flags import BY_DEST, TABLE
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.local_nodes import network
from dlrover_run.features.local_nodes.flags import LOCAL_CLUSTER, LOCAL_CUT_OFF_TIMEOUT, LOCAL_LAST_CALL_TIMEOUT
from dlrover_run.features.local_nodes.settings import LocalSettings
from dlrover_run.features.node_check.rules import CHECK_ONCE, NodeCheckRules
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import JobSpec

OWN_MASTER = kinds.Master(host="127.0.0.1", port=0, is_host=False)
IN_ETCD = "--rdzv-backend=etcd --rdzv-endpoint=etcd0:4000"
WITHOUT_EFFECT = "has no effect with --local-nodes, which starts its own master."


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, a package that can be found, and no variable that changes a job."""
    isolate(tmp_path, monkeypatch)
    fake_etcd3(monkeypatch)
    return tmp_path


def local_of(spec: JobSpec) -> LocalSettings:
    return spec.settings_of("local_nodes", LocalSettings)


def rules(least: int, most: int, **others: int) -> JobRules:
    """The rules of a job on this machine with only these flags."""
    times = {
        "last_call_timeout": LOCAL_LAST_CALL_TIMEOUT,
        "cut_off_timeout": LOCAL_CUT_OFF_TIMEOUT,
    }
    return watched(JobRules(least, most, **times, **fold(NodeCheckRules, others)))


@pytest.mark.parametrize(
    ("line", "local", "least", "most"),
    [
        ("--local-nodes=4", LocalSettings(4, 4), 4, 4),
        ("--local_nodes 3:4 --rdzv-backend=c10d", LocalSettings(3, 4), 3, 4),
        ("--local-nodes=1 --rdzv-backend=master", LocalSettings(1, 1), 1, 1),
        ("--local-nodes=4 --nnodes=3:4", LocalSettings(4, 4), 3, 4),
        ("--local-nodes=2 --nnodes=1:8", LocalSettings(2, 2), 1, 8),
        ("--local-nodes=2:3 --nnodes=2:3", LocalSettings(2, 3), 2, 3),
    ],
)
def test_local_nodes_use_a_local_master(line: str, local: LocalSettings, least: int, most: int) -> None:
    spec = job(line)
    assert (local_of(spec), spec.rules) == (local, rules(least, most))
    assert (spec.rendezvous.backend, place_of(spec).master, place_of(spec).etcd) == ("master", OWN_MASTER, None)


def test_each_job_on_local_nodes_has_its_own_name_unless_it_is_given_one() -> None:
    assert len({job("--local-nodes=2").run_id for _ in range(3)} | {"none"}) == 4
    assert job("--local-nodes=2 --rdzv-id=mine").run_id == "mine"


def test_each_option_of_local_nodes_has_a_flag_and_a_variable() -> None:
    by_flag = job("--local-nodes=2:3 --node-restarts=0 --node-join-after=0.5")
    assert local_of(by_flag) == LocalSettings(2, 3, restarts=0, join_after=0.5)
    environ = {"PET_LOCAL_NODES": "2:3", "PET_NODE_RESTARTS": "0", "PET_NODE_JOIN_AFTER": "0.5"}
    assert replace(job("", **environ), run_id=by_flag.run_id) == by_flag
    assert local_of(job("--local-nodes=3 --nnodes=3", PET_LOCAL_NODES="x")) == LocalSettings(3, 3)


def test_the_nodes_of_a_job_that_chooses_its_size_start_together_unless_a_time_is_given() -> None:
    flags = ("", "--autoscale", "--autoscale --node-join-after=7")
    assert [local_of(job(f"--local-nodes=1:3 {more}")).join_after for more in flags] == [30.0, 0.0, 7.0]


def test_the_table_has_the_defaults_of_local_spec() -> None:
    record = LocalSettings(1, 1)
    assert BY_DEST["node_restarts"].default == f"{record.restarts}"
    assert BY_DEST["node_join_after"].default == f"{record.join_after:g}"


def test_local_nodes_keep_a_prefix_that_is_given() -> None:
    assert job("--local-nodes=2").logs.prefix_template is None
    template = job("--local-nodes=2", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}]: ").logs.prefix_template
    assert template == "[${rank}]: "


@pytest.mark.parametrize(
    ("conf", "rule", "seconds"),
    [
        ("cut_off_timeout=300", "cut_off_timeout", 300),
        ("cut_off_timeout=0", "cut_off_timeout", 0),
        ("lost_after=1", "cut_off_timeout", 30),
        ("last_call_timeout=30", "last_call_timeout", 30),
        (f"join_timeout=5 {IN_ETCD}", "last_call_timeout", 3),
    ],
)
def test_the_timeouts_of_local_nodes_are_short_unless_given(conf: str, rule: str, seconds: float) -> None:
    assert getattr(job(f"--local-nodes=2:3 --rdzv-conf={conf}").rules, rule) == seconds


def test_local_nodes_ignore_the_rank_and_the_name_of_the_machine() -> None:
    environ = {"NODE_RANK": "3", "WORKER_RANK": "x", "NODE_ID": "a/b", "WORKER_ID": "pod-3", "NODE_NUM": "7"}
    for line in ("--local-nodes=2", f"--local-nodes=2 {IN_ETCD}"):
        spec = job(line, **environ)
        assert (spec.node_rank, spec.node_id, spec.rules.max_nodes) == (None, "", 2)


@pytest.mark.parametrize("nodes", ["1", "2:3"])
def test_local_nodes_use_an_etcd_that_is_given(nodes: str) -> None:
    spec = job(f"--local-nodes={nodes} {IN_ETCD} --rdzv-id=mine", DLROVER_MASTER_ADDR="a")
    assert place_of(spec).etcd is not None
    assert (spec.rendezvous.backend, place_of(spec).master, spec.run_id) == ("etcd", None, "mine")
    assert (place_of(spec).etcd.endpoints, spec.rules.lost_after) == ((("etcd0", 4000),), 0.0)


@pytest.mark.parametrize(
    ("line", "environ", "without"),
    [
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
        # A local master has its own token.
        ("", {"DLROVER_RDZV_TOKEN": "open-sesame", "DLROVER_RDZV_TOKEN_FILE": "none"}, []),
    ],
)
def test_options_of_a_master_have_no_effect_on_a_local_master(
    line: str, environ: dict[str, str], without: list[str]
) -> None:
    spec, warnings = parsed(f"--local-nodes=2 {line}", **environ)
    assert (spec.rendezvous.backend, place_of(spec).master, spec.rules) == ("master", OWN_MASTER, rules(2, 2))
    assert sorted(warnings) == sorted(f"{what} {WITHOUT_EFFECT}" for what in without)


@pytest.mark.parametrize(
    ("line", "spares"),
    [
        ("--local-nodes=4 --nnodes=4", 0),
        ("--local-nodes=5 --nnodes=4", 1),
        ("--local-nodes=3:7 --nnodes=2:4", 3),
        ("--local-nodes=2 --nnodes=1:4", 0),
        ("--local-nodes=4 --nnodes=4 --spares=2", 2),
    ],
)
def test_surplus_local_nodes_are_spares(line: str, spares: int) -> None:
    assert job(line).rules.spares == spares


def test_local_nodes_may_share_an_address() -> None:
    assert job("--local-nodes=2 --local-addr=127.0.0.2").local_addr == "127.0.0.2"
    assert job("--local-nodes=2", PET_STANDALONE="0").rendezvous.backend == "master"


def test_a_variable_for_isolated_nodes_is_a_warning_without_local_nodes() -> None:
    assert parsed("", PET_ISOLATE_NODES="0")[1] == []
    assert parsed("", PET_ISOLATE_NODES="1")[1] == ["PET_ISOLATE_NODES has no effect without --local-nodes."]


def test_isolated_local_nodes_are_accepted_where_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "why_not", lambda: None)
    spec = job("--local-nodes=2 --isolate-nodes", PET_RDZV_BACKEND="c10d")
    assert (local_of(spec), place_of(spec).master) == (LocalSettings(2, 2, isolated=True), OWN_MASTER)


def test_isolated_local_nodes_are_refused_in_one_line_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real search for `ip` finds none, and nothing is started."""
    monkeypatch.setenv("PATH", str(here))
    assert run(DLROVER_RUN, ["--local-nodes=2", "--isolate-nodes", "train.py"]) == exit_codes.BAD_COMMAND_LINE
    reason = network.why_not()
    assert reason
    assert capsys.readouterr().err == f"dlrover-run: --isolate-nodes is not possible here, since {reason}.\n"


def test_auto_config_uses_the_number_of_local_nodes() -> None:
    spec = job("--auto-config --local-nodes=4")
    assert (spec.rules, spec.workers_per_node) == (rules(4, 4, check=CHECK_ONCE), 8)
    spec, warnings = parsed("--auto-config --local-nodes=4", NODE_NUM="3")
    assert (spec.rules.max_nodes, len(warnings)) == (4, 1)
    assert warnings[0].startswith("--local-nodes 4 takes precedence over NODE_NUM=3")


def test_local_nodes_are_checked() -> None:
    assert check_rules(job("--local-nodes=2 --network-check").rules).check == CHECK_ONCE


def test_the_page_lists_every_flag_of_local_nodes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    table = page.partition("## Flags of our own")[2].partition("\n## ")[0]
    assert [flag.name for flag in TABLE if flag.panel == LOCAL_CLUSTER and f"`--{flag.name}" not in table] == []
