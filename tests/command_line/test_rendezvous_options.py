"""The rendezvous of a job: what flags and variables resolve to, the keys of --rdzv-conf, and secrets.

`command_line_messages.txt` has the errors and their messages.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from support.command_lines import (
    AT_NODE0,
    error,
    fake_etcd3,
    isolate,
    job,
    launched,
    parsed,
    run_python,
    watched,
    write_pems,
)
from support.places import place_of

from dlrover_run.api import LaunchConfig, elastic_launch
from dlrover_run.cli import parse
from dlrover_run.command_line import credentials, rdzv_keys
from dlrover_run.command_line.entry_point import job_or_code
from dlrover_run.command_line.flags import OF_FEATURES
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.coordination.records.bounds import NodeId
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.features.node_check.rules import CHECK_ONCE, NodeCheckRules
from dlrover_run.features.registry import decode_part
from dlrover_run.launch_request import LaunchRequest
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.transport import messages

SECRET = "open-sesame-open-sesame"
SEVERAL = f"--nnodes=2 {AT_NODE0}"
IN_ETCD = "--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=https://node0"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, and no variable of the machine that could change a job."""
    isolate(tmp_path, monkeypatch)
    fake_etcd3(monkeypatch)
    return tmp_path


def at_master(line: str, **environ: str) -> kinds.Master:
    """The master of a job of two nodes."""
    spec, _ = parsed(f"--nnodes=2 {line}", **environ)
    assert (spec.rendezvous.backend, place_of(spec).store) == ("master", None)
    assert place_of(spec).master is not None
    return place_of(spec).master


@pytest.mark.parametrize(("nodes", "least", "most"), [("2", 2, 2), ("1:2", 1, 2)])
def test_several_nodes_use_the_master_of_the_endpoint(nodes: str, least: int, most: int) -> None:
    spec = job(f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=node0")
    assert spec.rules == watched(JobRules(min_nodes=least, max_nodes=most))
    assert place_of(spec).master == kinds.Master("node0", 29400)
    assert (spec.rendezvous.backend, spec.run_id, spec.node_rank, spec.node_id) == ("master", "none", None, "")


@pytest.mark.parametrize("line", ["", "--standalone", f"--nnodes=1:1 {AT_NODE0}"])
def test_a_single_node_needs_no_rendezvous(line: str) -> None:
    spec = job(line, DLROVER_MASTER_ADDR="node0:4000", NODE_RANK="3", NODE_ID="no/name", DLROVER_RDZV_TOKEN="")
    assert (spec.rendezvous.backend, place_of(spec).master, spec.node_rank, spec.node_id) == ("memory", None, None, "")
    assert spec.rules == watched(JobRules(lost_after=0.0))


@pytest.mark.parametrize(
    ("backend", "rules"), [("master", JobRules(spares=1)), ("etcd", JobRules(spares=1, lost_after=0.0))]
)
def test_one_node_with_a_spare_needs_a_rendezvous(backend: str, rules: JobRules) -> None:
    spec = job(f"--spares=1 --rdzv-backend={backend} --rdzv-endpoint=node0")
    assert (spec.rendezvous.backend, spec.rules) == (backend, watched(rules))


def test_static_nodes_have_ranks_a_store_and_no_master() -> None:
    spec = job("--nnodes=2 --node-rank=1 --master-addr=node0", NODE_RANK="7")
    assert (spec.rendezvous, spec.node_rank) == (kinds.Static(("node0", 29500)), 1)
    assert spec.rules == JobRules(min_nodes=2, max_nodes=2, lost_after=0.0)
    assert parsed("--nnodes=2")[0].node_rank == 0


def test_spares_units_and_restarts_are_rules_of_the_job() -> None:
    spec = job(f"--nnodes=2:5 --spares=1 --node-unit=2 --max-restarts=3 {AT_NODE0}")
    assert spec.rules == watched(JobRules(min_nodes=2, max_nodes=5, spares=1, node_unit=2, max_restarts=3))
    by_variable = job(f"--nnodes=2:5 {AT_NODE0}", PET_SPARES="1", PET_NODE_UNIT="2", PET_MAX_RESTARTS="3")
    assert by_variable.rules == spec.rules


@pytest.mark.parametrize("flag", ["--rdzv-id", "--role"])
@pytest.mark.parametrize("name", [256 * "a", "a\x1b[2J", "\udcff"])
def test_a_name_that_cannot_be_sent_to_other_nodes_is_refused(flag: str, name: str) -> None:
    assert error(f"{SEVERAL} {flag}={name}").startswith(f"{flag} {name!r} must be ")


def test_the_longest_name_of_a_job_fits_a_message() -> None:
    spec = job(f"{SEVERAL} --rdzv-id={255 * 'a'}")
    assert msgspec.convert(spec.run_id, messages.JobId) == spec.run_id


@pytest.mark.parametrize(
    ("line", "host", "port", "is_host"),
    [
        ("--rdzv-backend=c10d --rdzv-endpoint=node0", "node0", 29400, None),
        ("--rdzv-backend=c10d --rdzv-endpoint=[::1]:5", "::1", 5, None),
        ("--rdzv-backend=c10d", "master.svc", 4001, False),
        ("", "master.svc", 4001, False),
        ("--rdzv-backend=master --rdzv-conf=is_host=1", "master.svc", 4001, True),
        (f"{AT_NODE0} --rdzv-conf=is_host=No", "node0", 4000, False),
    ],
)
def test_the_endpoint_takes_precedence_over_the_variable(line: str, host: str, port: int, is_host: bool | None) -> None:
    """A node that finds the master by the variable does not start one, even at an address of this machine."""
    master = at_master(line, DLROVER_MASTER_ADDR="master.svc:4001")
    assert (master.host, master.port, master.is_host) == (host, port, is_host)


@pytest.mark.parametrize(
    "line", ["--rdzv-backend=static", "--rdzv-endpoint=node0:1", "--master-addr=node0", "--master-port=1"]
)
def test_a_flag_of_static_rendezvous_takes_precedence_over_the_variable(line: str) -> None:
    assert parsed(f"--nnodes=2 {line}", DLROVER_MASTER_ADDR="master.svc:4001")[0].rendezvous.backend == "static"


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
    assert job(f"{SEVERAL} {line}", **environ).node_rank == rank


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
    assert job(SEVERAL, **environ).node_id == name
    assert not name or msgspec.convert(name, NodeId) == name


@pytest.mark.parametrize("name", ["a/b", "a b", 129 * "a", "ä"])
def test_a_variable_that_holds_no_node_id_is_left_out_with_a_warning(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, NodeId)
    for given in (name, f"{name}\n"):
        spec, warnings = parsed(SEVERAL, WORKER_ID=given)
        assert spec.node_id == ""
        assert [each.partition("(")[0] for each in warnings] == [f"WORKER_ID={given!r} is no name of a node "]


@pytest.mark.parametrize("text", ["worker-0", "-1", "1.0", "1000001", " 1", "٣", 5000 * "1"])
def test_a_variable_that_holds_no_rank_is_left_out_with_a_warning(text: str) -> None:
    for name in ("NODE_RANK", "WORKER_RANK"):
        spec, warnings = parsed(SEVERAL, **{name: text})
        assert spec.node_rank is None
        assert warnings == [f"{name}={text!r} is no rank (0 to 1000000) and is not used."]
    assert job(SEVERAL, NODE_RANK=text, WORKER_RANK="4").node_rank == 4


def test_our_own_variable_that_holds_no_rank_is_refused() -> None:
    assert error(SEVERAL, PET_NODE_RANK="worker-0").startswith("PET_NODE_RANK 'worker-0' is not an integer")


KEYS = {
    "join_timeout": 60.5,
    "last_call_timeout": 0.25,
    "pend_timeout": 0,
    "lost_after": 2,
    "scale_up_delay": 5,
    "scale_wait": 30,
    "restart_window": 3600,
    "keep_alive_interval": 0.5,
    "early_failure_limit": 0,
}


def test_keys_of_rdzv_conf_become_rules() -> None:
    conf = ",".join(f"{key}={value}" for key, value in KEYS.items())
    line = f"--nnodes=2 --rdzv-endpoint=a --rdzv-conf={conf},keep_alive_max_attempt=6"
    for backend in ("c10d", "etcd"):
        assert parsed(f"{line} --rdzv-backend={backend}")[0].rules == watched(
            JobRules(min_nodes=2, max_nodes=2, keep_alive_attempts=6, **KEYS)
        )


DEFAULTS = rdzv_keys.defaults()


def test_every_rule_has_a_key_or_a_flag() -> None:
    of_autoscale = {f"autoscale_{name}" for name in AutoscaleRules.__struct_fields__}
    # What --autoscale itself sets, and what a user has no reason to set.
    of_autoscale -= {f"autoscale_{name}" for name in ("scaling", "command", "max_measure", "drift", "horizon")}
    of_features = {key.name for feature in OF_FEATURES.values() for key in feature.keys}
    by_key = {key.name if key.name in of_features else key.field for key in rdzv_keys.TABLE if key.name in DEFAULTS}
    by_flag = {"min_nodes", "max_nodes", "node_unit", "spares", "max_restarts", "store"}
    by_flag |= {"check", "straggler_threshold", "exclude_stragglers", "measure_links"}
    # In etcd the time of a lease, which the keep-alive keys set; and what a policy sets.
    by_place = {"detection_delay", "wanted_nodes"}
    rules = {*JobRules.__struct_fields__} - {"parts"} | {*NodeCheckRules.__struct_fields__} | of_autoscale
    assert by_key | by_flag | by_place == rules


def test_bind_state_dir_and_is_host_reach_the_master(here: Path) -> None:
    master = at_master(f"{AT_NODE0} --rdzv-conf=bind=[::],state_dir=journal,is_host=1")
    assert (master.bind, master.state_dir, master.is_host) == ("::", str(here / "journal"), True)


def test_keys_of_torchrun_without_meaning_here_have_no_effect() -> None:
    conf = "timeout=5,close_timeout=5,heartbeat_timeout=5,read_timeout=5,store_type=file,rank=3,etcd_prefix=/x"
    spec = job(f"{SEVERAL} --rdzv-conf={conf}")
    assert (spec.rules, spec.node_rank) == (watched(JobRules(min_nodes=2, max_nodes=2)), None)


def test_tls_files_become_absolute_paths(here: Path) -> None:
    pems = write_pems(here)
    master = at_master(f"{AT_NODE0} --rdzv-conf=tls_ca=ca,tls_cert=cert,tls_key=key,auth=required")
    assert (master.tls, master.auth_required) == (kinds.TlsSpec(**pems), True)
    assert at_master(f"{AT_NODE0} --rdzv-conf=tls_ca=ca").tls == kinds.TlsSpec(ca=pems["ca"])


# --- Secrets. One function reads and validates both kinds.


def secret_of(spec: JobSpec) -> str:
    """The job's token or password."""
    if place_of(spec).etcd is not None:
        return place_of(spec).etcd.password
    assert place_of(spec).master is not None
    return place_of(spec).master.token


every_secret = pytest.mark.parametrize(
    ("line", "setting", "variable"),
    [
        pytest.param(SEVERAL, "auth=required,token_file=one", "DLROVER_RDZV_TOKEN", id="token"),
        pytest.param(IN_ETCD, "user=root,auth=required,password_file=one", "DLROVER_ETCD_PASSWORD", id="password"),
    ],
)


@every_secret
def test_a_secret_comes_from_the_setting_then_the_variable_then_its_file(
    line: str, setting: str, variable: str, here: Path
) -> None:
    texts = {"one": "from the setting", "two": "from the: file, x"}
    for name, text in texts.items():
        (here / name).write_text(f"{text}\r\n")
        (here / name).chmod(0o600)
    by_file = {f"{variable}_FILE": "two"}
    by_text = {**by_file, variable: "from the variable\n"}
    without_setting = f"{line} --rdzv-conf={setting.rpartition(',')[0]}"
    assert secret_of(job(f"{line} --rdzv-conf={setting}", **by_text)) == "from the setting"
    assert secret_of(job(without_setting, **by_text)) == "from the variable"
    assert secret_of(job(without_setting, **by_file)) == "from the: file, x"
    assert secret_of(job(line)) == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\n", "contains an empty token"),
        (b"a" * 4097, "contains a token of more than 4096 characters"),
        (b"\xff" * 9, "is not text"),
        ("ä".encode() * 4096, ""),
        (b"a" * 4096 + b"\r\n", ""),
    ],
)
def test_an_invalid_token_is_refused_without_showing_it(content: bytes, sentence: str, here: Path) -> None:
    (here / "token").write_bytes(content)
    line = f"{SEVERAL} --rdzv-conf=token_file=token"
    if not sentence:
        assert secret_of(parsed(line)[0]) == content.decode().strip()
        return
    assert f"--rdzv-conf token_file 'token' {sentence}" in error(line)


def test_a_token_in_a_variable_is_checked_too() -> None:
    """An empty variable is refused: its author assumes that the job has a token."""
    assert error(SEVERAL, DLROVER_RDZV_TOKEN="").startswith("DLROVER_RDZV_TOKEN contains an empty")
    assert "is not text" in error(SEVERAL, DLROVER_RDZV_TOKEN="\udcff")


@pytest.mark.parametrize(
    "conf",
    [
        f"token={SECRET}",
        f" Token = {SECRET}",
        f"a=1,token={SECRET},x",
        f"bad,'token={SECRET}'",
        f" Password = {SECRET}",
        f"user=root:a,{SECRET}",
        f"bad,'user=root:{SECRET}'",
    ],
)
@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(conf: str, backend: str) -> None:
    with pytest.raises(SpecError, match=r"contains a (token|password), which every process list shows") as refused:
        parse([f"--rdzv-backend={backend}", "--rdzv-conf", conf, "train.py"], {})
    assert SECRET not in str(refused.value)


@every_secret
def test_a_job_never_shows_its_secret_and_carries_it_to_the_launcher(
    line: str, setting: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, SECRET)
    spec = job_or_code(DLROVER_RUN, [*line.split(), f"--rdzv-conf={setting.rpartition(',')[0]}", "train.py"])
    assert isinstance(spec, JobSpec)
    # Parsing a command line does not change the environment.
    assert (secret_of(spec), os.environ[variable]) == (SECRET, SECRET)
    assert SECRET not in repr(spec)
    sent = msgspec.json.encode(LaunchRequest(spec, 0, 0))
    assert msgspec.json.decode(sent, type=LaunchRequest, dec_hook=decode_part).spec == spec


SHOW = """
import os
from pathlib import Path
process = os.getpid()
for role in ("worker", "agent", "watchdog"):
    print(role, *(Path(f"/proc/{process}/{name}").read_bytes() for name in ("cmdline", "environ")))
    process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
print(sorted(name for name in os.environ if name.startswith(("DLROVER_RDZV", "DLROVER_ETCD"))), os.environ["KEPT"])
"""

PROGRAM = f"""
import os, dlrover_run
if __name__ == '__main__':
    dlrover_run.main(['train.py'])
    assert os.environ['DLROVER_RDZV_TOKEN'] == {SECRET!r}
"""


@pytest.mark.parametrize("command", [("-m", "dlrover_run", "train.py"), ("program.py",)], ids=["command", "Python"])
def test_no_process_of_a_launch_shows_a_secret(command: tuple[str, ...], here: Path) -> None:
    """Neither in its command line nor in its environment."""
    (here / "train.py").write_text(SHOW)
    (here / "program.py").write_text(PROGRAM)
    done = run_python(*command, **dict.fromkeys(credentials.VARIABLES, SECRET), KEPT="kept")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("[] kept\n")
    assert SECRET not in done.stdout


def test_a_weak_token_of_the_job_gives_a_warning() -> None:
    for length, warnings in ((15, 1), (16, 0)):
        assert len(parsed(SEVERAL, DLROVER_RDZV_TOKEN="x" * length)[1]) == warnings


# --- From Python.


def test_a_configuration_of_several_nodes_is_the_same_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "token").write_text(SECRET)
    config = LaunchConfig(
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
    assert spec.rules == watched(
        JobRules(
            min_nodes=2,
            max_nodes=4,
            spares=1,
            node_unit=2,
            max_restarts=3,
            join_timeout=60,
            parts=(NodeCheckRules(check=CHECK_ONCE, exclude_stragglers=1, straggler_threshold=1.5),),
        )
    )
    assert place_of(spec).master == kinds.Master("node0", 4000, is_host=True, token=SECRET)
    assert (spec.run_id, spec.node_rank, spec.workers_per_node) == ("none", 1, 2)


def test_a_configuration_finds_its_master_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_MASTER_ADDR", "node0:4000")
    spec = launched(LaunchConfig(2, 2, 1, run_id="job7"), monkeypatch)
    assert (place_of(spec).master, spec.run_id) == (kinds.Master("node0", 4000, is_host=False), "job7")


def test_a_value_with_a_comma_is_refused() -> None:
    config = LaunchConfig(1, 1, 1, rdzv_configs={"state_dir": "a,b"})
    with pytest.raises(SpecError, match="the value of 'state_dir' contains a comma"):
        elastic_launch(config, "ls")()
