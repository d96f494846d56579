"""The rendezvous of a job: what flags and variables resolve to, the keys of --rdzv-conf, and secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest
from command_lines import error, isolate, launched
from policy_parts import check_rules

import dlrover_run
from dlrover_run.api import elastic_launch
from dlrover_run.cli import job_or_code, parse
from dlrover_run.command_line import credentials, rdzv_conf
from dlrover_run.coordination.bounds import NodeId
from dlrover_run.coordination.rules import JobRules
from dlrover_run.launch_request import LaunchRequest
from dlrover_run.policies.health.rules import CHECK_ONCE, HealthRules
from dlrover_run.policies.registry import decode_part
from dlrover_run.spec import JobSpec, MasterSpec, SpecError, TlsSpec
from dlrover_run.transport import messages

LIMIT = 60.0
"""Seconds that a child process of a test may take before the test gives up."""

TOKEN = "open-sesame"
AT_NODE0 = "--rdzv-backend=c10d --rdzv-endpoint=node0:4000"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)
    return tmp_path


def job(line: str, **environ: str) -> JobSpec:
    """The job of these flags and variables."""
    return parse([*line.split(), "train.py"], environ)


def at_master(line: str, **environ: str) -> MasterSpec:
    """Where the nodes of this job meet."""
    spec = job(line, **environ)
    assert (spec.backend, spec.rules.store) == ("master", None)
    assert spec.master is not None
    return spec.master


@pytest.mark.parametrize("backend", ["c10d", "master"])
@pytest.mark.parametrize(("nodes", "least", "most"), [("2", 2, 2), ("1:2", 1, 2), ("2:4", 2, 4), ("3:3", 3, 3)])
def test_several_nodes_use_the_master_of_the_endpoint(backend: str, nodes: str, least: int, most: int) -> None:
    spec = job(f"--nnodes={nodes} --rdzv-backend={backend} --rdzv-endpoint=node0")
    assert spec.rules == JobRules(min_nodes=least, max_nodes=most)
    assert spec.master == MasterSpec("node0", 29400)
    assert (spec.backend, spec.run_id, spec.node_rank, spec.node_id) == ("master", "none", None, "")


@pytest.mark.parametrize("line", ["", "--nnodes=1:1", "--standalone", "--rdzv-backend=c10d", f"--nnodes=1 {AT_NODE0}"])
def test_a_single_node_needs_no_rendezvous(line: str) -> None:
    spec = job(line, DLROVER_MASTER_ADDR="node0:4000", NODE_RANK="3", NODE_ID="no/name", DLROVER_RDZV_TOKEN="")
    assert (spec.backend, spec.master, spec.node_rank, spec.node_id) == ("memory", None, None, "")
    assert spec.rules == JobRules(lost_after=0.0)


def test_one_node_with_a_spare_needs_a_rendezvous() -> None:
    spec = job(f"--nnodes=1 --spares=1 {AT_NODE0}")
    assert (spec.backend, spec.rules) == ("master", JobRules(spares=1))


def test_static_nodes_have_ranks_a_store_and_no_master() -> None:
    spec = job("--nnodes=2 --node-rank=1 --master-addr=node0", NODE_RANK="7")
    assert (spec.backend, spec.master, spec.node_rank) == ("static", None, 1)
    assert spec.rules == JobRules(min_nodes=2, max_nodes=2, lost_after=0.0, store=("node0", 29500))
    assert job("--nnodes=2").node_rank == 0


def test_spares_units_and_restarts_are_rules_of_the_job() -> None:
    spec = job(f"--nnodes=2:5 --spares=1 --node-unit=2 --max-restarts=3 {AT_NODE0}")
    assert spec.rules == JobRules(min_nodes=2, max_nodes=5, spares=1, node_unit=2, max_restarts=3)
    by_variable = job(f"--nnodes=2:5 {AT_NODE0}", PET_SPARES="1", PET_NODE_UNIT="2", PET_MAX_RESTARTS="3")
    assert by_variable.rules == spec.rules


def test_a_missing_endpoint_is_refused_with_each_remedy() -> None:
    with pytest.raises(SpecError, match=r"set DLROVER_MASTER_ADDR, or give --local-nodes=4 to start all nodes here\.$"):
        job("--nnodes=2:4")
    line = "--nnodes=2 --rdzv-backend=c10d"
    with pytest.raises(SpecError, match=r"or set DLROVER_MASTER_ADDR\.$"):
        job(line)
    with pytest.raises(SpecError, match=r"in a job of Slurm start the launcher with srun, and leave it out\.$"):
        job(line, SLURM_JOB_NODELIST="n[1-3]")


@pytest.mark.parametrize("flag", ["--rdzv-id", "--role"])
@pytest.mark.parametrize("name", [256 * "a", "a\x1b[2J", "\udcff"])
def test_a_name_that_cannot_be_sent_to_other_nodes_is_refused(flag: str, name: str) -> None:
    assert error(f"--nnodes=2 {flag}={name} {AT_NODE0}").startswith(f"{flag} {name!r} must be ")


def test_the_longest_name_of_a_job_fits_a_message() -> None:
    spec = job(f"--nnodes=2 --rdzv-id={255 * 'a'} {AT_NODE0}")
    assert msgspec.convert(spec.run_id, messages.JobId) == spec.run_id


@pytest.mark.parametrize(
    ("line", "host", "port", "is_host"),
    [
        ("--rdzv-backend=c10d --rdzv-endpoint=node0", "node0", 29400, None),
        ("--rdzv-backend=c10d --rdzv-endpoint=[::1]:5", "::1", 5, None),
        ("--rdzv-backend=c10d", "master.svc", 4001, False),
        ("--rdzv-backend=master", "master.svc", 4001, False),
        ("", "master.svc", 4001, False),
        ("--rdzv-backend=master --rdzv-conf=is_host=1", "master.svc", 4001, True),
        (f"{AT_NODE0} --rdzv-conf=is_host=No", "node0", 4000, False),
    ],
)
def test_the_endpoint_takes_precedence_over_the_variable(line: str, host: str, port: int, is_host: bool | None) -> None:
    """Who is sent to a master by the variable does not start one, even at an address of this machine."""
    master = at_master(f"--nnodes=2 {line}", DLROVER_MASTER_ADDR="master.svc:4001")
    assert (master.host, master.port, master.is_host) == (host, port, is_host)


@pytest.mark.parametrize(
    "line", ["--rdzv-backend=static", "--rdzv-endpoint=node0:1", "--master-addr=node0", "--master-port=1"]
)
def test_a_flag_of_static_rendezvous_takes_precedence_over_the_variable(line: str) -> None:
    assert job(f"--nnodes=2 {line}", DLROVER_MASTER_ADDR="master.svc:4001").backend == "static"


def test_a_bad_variable_is_named() -> None:
    assert error("--nnodes=2", DLROVER_MASTER_ADDR="a:b").startswith("DLROVER_MASTER_ADDR 'a:b' has an invalid port")
    assert error("--nnodes=2", DLROVER_MASTER_ADDR="a:0").startswith("DLROVER_MASTER_ADDR 'a:0' has port 0")


@pytest.mark.parametrize(
    ("line", "environ", "rank"),
    [
        ("", {}, None),
        ("", {"NODE_RANK": "3", "WORKER_RANK": "4"}, 3),
        ("", {"NODE_RANK": "", "WORKER_RANK": "4"}, 4),
        ("", {"PET_NODE_RANK": "0", "NODE_RANK": "3"}, 0),
        ("--node-rank=0", {"PET_NODE_RANK": "1", "NODE_RANK": "3"}, 0),
    ],
)
def test_a_preferred_rank_comes_from_the_flag_or_a_variable(
    line: str, environ: dict[str, str], rank: int | None
) -> None:
    assert job(f"--nnodes=2 {AT_NODE0} {line}", **environ).node_rank == rank


def test_an_invalid_rank_names_its_variable() -> None:
    sentence = "NODE_RANK 'worker-3' is not an integer: give an integer from 0 to 1000000."
    assert error(f"--nnodes=2 {AT_NODE0}", NODE_RANK="worker-3") == sentence


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"NODE_ID": "pod-1.a:b_C", "WORKER_ID": "2"}, "pod-1.a:b_C"),
        ({"NODE_ID": "", "WORKER_ID": "2"}, "2"),
        ({"WORKER_ID": 128 * "a"}, 128 * "a"),
        ({"NODE_RANK": "1", "WORKER_RANK": "1"}, ""),
    ],
)
def test_the_node_id_comes_from_the_cluster_manager(environ: dict[str, str], name: str) -> None:
    assert job(f"--nnodes=2 {AT_NODE0}", **environ).node_id == name
    assert not name or msgspec.convert(name, NodeId) == name


@pytest.mark.parametrize("name", ["a/b", "a b", 129 * "a", "ä"])
def test_an_invalid_node_id_is_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, NodeId)
    for given in (name, f"{name}\n"):
        sentence = error(f"--nnodes=2 {AT_NODE0}", WORKER_ID=given)
        assert sentence.startswith(f"WORKER_ID {given!r} must be 1-128 letters")


def test_keys_of_rdzv_conf_become_rules() -> None:
    conf = (
        "join_timeout=60.5,last_call_timeout=0.25,pend_timeout=0,lost_after=2,scale_up_delay=5,restart_window=3600,"
        "keep_alive_interval=0.5,keep_alive_max_attempt=6,early_failure_limit=0,check_timeout=7.5"
    )
    assert job(f"--nnodes=2 {AT_NODE0} --rdzv-conf={conf}").rules == JobRules(
        min_nodes=2,
        max_nodes=2,
        join_timeout=60.5,
        last_call_timeout=0.25,
        pend_timeout=0,
        lost_after=2,
        scale_up_delay=5,
        restart_window=3600,
        keep_alive_interval=0.5,
        keep_alive_attempts=6,
        early_failure_limit=0,
        policy=HealthRules(check_timeout=7.5),
    )


def test_every_rule_has_a_key_or_a_flag() -> None:
    by_key = {key.rule for key in rdzv_conf.TABLE if key.rule}
    by_flag = {"min_nodes", "max_nodes", "node_unit", "spares", "max_restarts", "store"}
    by_flag |= {"check", "straggler_threshold", "exclude_stragglers", "measure_links"}
    by_place = {"detection_delay"}  # In etcd a lease's time, which the keep-alive keys set.
    rules = {field.name for field in fields(JobRules)} - {"policy"} | {*HealthRules.__struct_fields__}
    assert by_key | by_flag | by_place == rules


def test_bind_state_dir_and_is_host_reach_the_master(here: Path) -> None:
    master = at_master(f"--nnodes=2 {AT_NODE0} --rdzv-conf=bind=[::],state_dir=journal,is_host=1")
    assert (master.bind, master.state_dir, master.is_host) == ("::", str(here / "journal"), True)


def test_keys_of_torchrun_without_meaning_here_change_nothing() -> None:
    conf = "timeout=5,close_timeout=5,heartbeat_timeout=5,read_timeout=5,store_type=file,rank=3,etcd_prefix=/x"
    said: list[str] = []
    spec = parse(["--nnodes=2", *AT_NODE0.split(), f"--rdzv-conf={conf}", "train.py"], {}, warn=said.append)
    assert (spec.rules, spec.node_rank, said) == (JobRules(min_nodes=2, max_nodes=2), None, [])


@pytest.fixture
def pems(here: Path) -> dict[str, str]:
    """A file of each kind that TLS takes; what is in them is never looked into further."""
    for name, kind in (("ca", "CERTIFICATE"), ("cert", "CERTIFICATE"), ("key", "EC PRIVATE KEY")):
        (here / name).write_text(f"-----BEGIN {kind}-----\nAA==\n-----END {kind}-----\n")
    return {name: str(here / name) for name in ("ca", "cert", "key")}


def test_tls_files_become_absolute_paths(pems: dict[str, str]) -> None:
    conf = "--rdzv-conf=tls_ca=ca,tls_cert=cert,tls_key=key,auth=required"
    master = at_master(f"--nnodes=2 {AT_NODE0} {conf}")
    assert (master.tls, master.auth_required) == (TlsSpec(**pems), True)
    assert at_master(f"--nnodes=2 {AT_NODE0} --rdzv-conf=tls_ca=ca").tls == TlsSpec(ca=pems["ca"])
    assert "tls_key 'cert' is not a private key" in error(
        f"--nnodes=2 {AT_NODE0} --rdzv-conf=tls_cert=cert,tls_key=cert"
    )
    # A certificate of the other side proves nothing of this one.
    assert "auth=required" in error(f"--nnodes=2 {AT_NODE0} --rdzv-conf=tls_ca=ca,auth=required")


def test_the_token_comes_from_the_setting_then_the_variable_then_its_file(here: Path) -> None:
    (here / "one").write_text("from the setting\n")
    (here / "two").write_text("from the file\r\n")
    by_file = {"DLROVER_RDZV_TOKEN_FILE": "two"}
    by_text = {**by_file, "DLROVER_RDZV_TOKEN": "from the variable\n"}
    line = f"--nnodes=2 {AT_NODE0} --rdzv-conf=auth=required"
    assert at_master(f"{line},token_file=one", **by_text).token == "from the setting"
    assert at_master(line, **by_text).token == "from the variable"
    assert at_master(line, **by_file).token == "from the file"
    assert at_master(f"--nnodes=2 {AT_NODE0}").token == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "contains an empty token"),
        (b"\n", "contains an empty token"),
        (b"a" * 4097, "contains a token of more than 4096 characters"),
        (b"\xff" * 9, "is not text"),
        ("ä".encode() * 4096, ""),
        (b"a" * 4096 + b"\r\n", ""),
    ],
)
def test_an_invalid_token_is_refused_without_showing_it(content: bytes, sentence: str, here: Path) -> None:
    (here / "token").write_bytes(content)
    line = f"--nnodes=2 {AT_NODE0} --rdzv-conf=token_file=token"
    if not sentence:
        assert at_master(line).token == content.decode().strip()
        return
    assert f"--rdzv-conf token_file 'token' {sentence}" in error(line)


def test_an_empty_token_is_refused_in_every_place() -> None:
    """Whoever sets the variable believes that his job has one."""
    assert error(f"--nnodes=2 {AT_NODE0}", DLROVER_RDZV_TOKEN="").startswith("DLROVER_RDZV_TOKEN contains an empty")
    assert "is not text" in error(f"--nnodes=2 {AT_NODE0}", DLROVER_RDZV_TOKEN="\udcff")


@pytest.mark.parametrize(
    "conf", [f"token={TOKEN}", f" Token = {TOKEN}", f"bad,'token={TOKEN}'", f"a=1,token={TOKEN},x"]
)
def test_a_token_on_the_command_line_is_refused_and_not_repeated(conf: str) -> None:
    with pytest.raises(SpecError, match="contains a token, which every process list shows") as refused:
        parse(["--rdzv-conf", conf, "train.py"], {})
    assert TOKEN not in str(refused.value)


def test_a_job_never_shows_its_token_and_carries_it_to_the_launcher() -> None:
    spec = job(f"--nnodes=2 {AT_NODE0}", DLROVER_RDZV_TOKEN=TOKEN)
    assert TOKEN not in repr(spec)
    sent = msgspec.json.encode(LaunchRequest(spec, 0, 0))
    assert msgspec.json.decode(sent, type=LaunchRequest, dec_hook=decode_part).spec == spec


def test_reading_a_command_line_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", TOKEN)
    spec = job_or_code(["--nnodes=2", *AT_NODE0.split(), "train.py"])
    assert isinstance(spec, JobSpec)
    assert spec.master is not None
    assert (spec.master.token, os.environ["DLROVER_RDZV_TOKEN"]) == (TOKEN, TOKEN)


SHOW = """
import os
from pathlib import Path
process = os.getpid()
for role in ("worker", "agent", "watchdog"):
    print(role, *(Path(f"/proc/{process}/{name}").read_bytes() for name in ("cmdline", "environ")))
    process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
print(sorted(name for name in os.environ if name.startswith(("DLROVER_RDZV", "DLROVER_ETCD"))), os.environ["KEPT"])
"""


def shown_by_a_worker(*command: str) -> str:
    """What a worker prints of the command lines and environments of itself, the agent and the watchdog."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **dict.fromkeys(credentials.VARIABLES, TOKEN), "KEPT": "kept"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_no_environment_of_the_launcher_shows_the_token(here: Path) -> None:
    (here / "train.py").write_text(SHOW)
    shown = shown_by_a_worker("-m", "dlrover_run", "train.py")
    assert shown.endswith("[] kept\n")
    assert TOKEN not in shown


def test_no_environment_of_a_launch_from_python_shows_the_token(here: Path) -> None:
    (here / "train.py").write_text(SHOW)
    (here / "program.py").write_text(
        "import os, dlrover_run\n"
        "if __name__ == '__main__':\n"
        "    dlrover_run.main(['train.py'])\n"
        "    assert os.environ['DLROVER_RDZV_TOKEN'] == 'open-sesame'\n"
    )
    shown = shown_by_a_worker("program.py")
    assert shown.endswith("[] kept\n")
    assert TOKEN not in shown


def test_a_configuration_of_several_nodes_is_the_same_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "token").write_text(TOKEN)
    config = dlrover_run.LaunchConfig(
        min_nodes=2,
        max_nodes=4,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="node0:4000",
        rdzv_configs={"join_timeout": 60, "is_host": True, "token_file": "token", "rank": 1, "bind": None},
        rdzv_timeout=5,
        spares=1,
        node_unit=2,
        network_check=True,
        exclude_straggler=True,
        straggler_threshold=1.5,
    )
    spec = launched(config, monkeypatch)
    known = JobRules(min_nodes=2, max_nodes=4, spares=1, node_unit=2, max_restarts=3, join_timeout=60)
    assert spec.rules == replace(
        known,
        policy=msgspec.structs.replace(
            check_rules(known), check=CHECK_ONCE, exclude_stragglers=1, straggler_threshold=1.5
        ),
    )
    assert spec.master == MasterSpec("node0", 4000, is_host=True, token=TOKEN)
    assert (spec.run_id, spec.node_rank, spec.workers_per_node) == ("none", 1, 2)


def test_a_configuration_finds_its_master_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_MASTER_ADDR", "node0:4000")
    spec = launched(dlrover_run.LaunchConfig(2, 2, 1, run_id="job7"), monkeypatch)
    assert (spec.master, spec.run_id) == (MasterSpec("node0", 4000, is_host=False), "job7")


def test_a_value_with_a_comma_is_refused() -> None:
    config = dlrover_run.LaunchConfig(1, 1, 1, rdzv_configs={"state_dir": "a,b"})
    with pytest.raises(SpecError, match="the value of 'state_dir' contains a comma"):
        elastic_launch(config, "ls")()


def test_a_weak_token_of_the_job_is_a_warning() -> None:
    said: list[str] = []
    line = ["--nnodes=2", *AT_NODE0.split(), "train.py"]
    parse(line, {"DLROVER_RDZV_TOKEN": "x" * 15}, warn=said.append)
    assert [sentence for sentence in said if "fewer than 16 characters" in sentence]
    said.clear()
    parse(line, {"DLROVER_RDZV_TOKEN": "x" * 16}, warn=said.append)
    assert not said
