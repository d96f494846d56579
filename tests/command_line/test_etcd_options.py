"""Rendezvous in etcd: what flags and variables resolve to, what is refused, and a password that stays secret."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import command_lines
import msgspec
import pytest
from command_lines import fake_etcd3, isolate, launched, parsed

import dlrover_run
from dlrover_run.cli import job_or_code, main, parse
from dlrover_run.coordination.rules import JobRules
from dlrover_run.launch_request import LaunchRequest
from dlrover_run.policies.registry import decode_part
from dlrover_run.spec import EtcdSpec, JobSpec, SpecError, TlsSpec

LIMIT = 60.0
"""Seconds that a child process of a test may take before the test gives up."""

PASSWORD = "open-sesame"
TWO = "--nnodes=2 --rdzv-backend=etcd"
AT_A = f"{TWO} --rdzv-endpoint=a"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, a package that can be found, and no variable that changes a job."""
    isolate(tmp_path, monkeypatch)
    fake_etcd3(monkeypatch)
    return tmp_path


@pytest.fixture
def pems(here: Path) -> dict[str, str]:
    """A file of each kind that TLS takes; what is in them is never looked into further."""
    for name, kind in (("ca", "CERTIFICATE"), ("cert", "CERTIFICATE"), ("key", "EC PRIVATE KEY")):
        (here / name).write_text(f"-----BEGIN {kind}-----\nAA==\n-----END {kind}-----\n")
    return {name: str(here / name) for name in ("ca", "cert", "key")}


def in_etcd(line: str, **environ: str) -> EtcdSpec:
    """Where the nodes of this job meet, which nothing needs to be said about."""
    spec, said = parsed(line, **environ)
    assert said == []
    assert (spec.backend, spec.master, spec.rules.store) == ("etcd", None, None)
    assert spec.etcd is not None
    return spec.etcd


def error(line: str, **environ: str) -> str:
    """The one sentence with which this job is refused, which never names the password."""
    sentence = command_lines.error(line, **environ)
    assert PASSWORD not in sentence
    return sentence


@pytest.mark.parametrize(
    ("endpoint", "endpoints"),
    [
        ("a", [("a", 2379)]),
        ("a:1", [("a", 1)]),
        ("10.0.0.1,b.svc:1,[::1]:65535", [("10.0.0.1", 2379), ("b.svc", 1), ("::1", 65535)]),
        ("a:1,a:2", [("a", 1), ("a", 2)]),
        ("http://a,http://B:1/,c/", [("a", 2379), ("B", 1), ("c", 2379)]),
        ("HTTP://[fe80::1]", [("fe80::1", 2379)]),
    ],
)
def test_an_endpoint_names_the_members(endpoint: str, endpoints: list[tuple[str, int]]) -> None:
    assert in_etcd(f"{TWO} --rdzv-endpoint={endpoint}") == EtcdSpec(tuple(endpoints))


def test_blanks_between_members_are_ignored() -> None:
    spec = parse([*TWO.split(), "--rdzv-endpoint", " a , b:1 ", "train.py"], {})
    assert spec.etcd == EtcdSpec((("a", 2379), ("b", 1)))


def test_a_pytorchjob_with_etcd_runs_unchanged() -> None:
    """What Kubeflow's operator sets for an elastic policy with `rdzvBackend: etcd`."""
    spec, said = parsed(
        "",
        PET_RDZV_BACKEND="etcd",
        PET_RDZV_ENDPOINT="etcd-service:2379",
        PET_RDZV_ID="elastic-demo-etcd",
        PET_RDZV_CONF="timeout=900,read_timeout=60",
        PET_NNODES="1:3",
        PET_NPROC_PER_NODE="2",
        PET_MAX_RESTARTS="100",
        MASTER_ADDR="job-worker-0",
        MASTER_PORT="23456",
    )
    assert (spec.backend, spec.run_id, spec.workers_per_node, said) == ("etcd", "elastic-demo-etcd", 2, [])
    assert spec.rules == JobRules(min_nodes=1, max_nodes=3, max_restarts=100, lost_after=0.0)
    assert spec.etcd == EtcdSpec((("etcd-service", 2379),))


def test_etcd_v2_means_etcd_with_a_warning() -> None:
    spec, said = parsed(AT_A.replace("etcd", "etcd-v2"))
    assert [sentence.partition(" means ")[0] for sentence in said] == ["--rdzv-backend 'etcd-v2'"]
    assert spec == parsed(AT_A)[0]


@pytest.mark.parametrize("line", ["--nnodes=1", "--nnodes=1:1 --rdzv-endpoint=a,b", "--standalone --rdzv-endpoint=a:x"])
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_a_single_node_needs_no_rendezvous_and_no_package(
    line: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "etcd3", None)
    spec, said = parsed(f"--rdzv-backend={backend} {line}", DLROVER_ETCD_PASSWORD="")
    assert (spec.backend, spec.etcd, spec.rules, said) == ("memory", None, JobRules(lost_after=0.0), [])


def test_an_invalid_endpoint_of_a_single_node_is_refused() -> None:
    assert "has an invalid port" in error("--rdzv-backend=etcd --rdzv-endpoint=a,b:x")


def test_one_node_with_a_spare_needs_a_rendezvous() -> None:
    spec, said = parsed("--spares=1 --rdzv-backend=etcd --rdzv-endpoint=a")
    assert (spec.backend, spec.rules, said) == ("etcd", JobRules(spares=1, lost_after=0.0), [])


def test_the_rules_are_those_of_a_job_with_a_master() -> None:
    more = (
        "--nnodes=2:5 --spares=1 --node-unit=2 --max-restarts=3 --rdzv-conf=join_timeout=60.5,last_call_timeout=0.25,"
        "pend_timeout=0,lost_after=2,scale_up_delay=5,restart_window=3600,keep_alive_interval=0.5,"
        "keep_alive_max_attempt=6,early_failure_limit=0"
    )
    spec, said = parsed(f"{AT_A} {more}", NODE_RANK="3", NODE_ID="pod-1")
    at_master, _ = parsed(f"--rdzv-backend=c10d --rdzv-endpoint=a {more}", NODE_RANK="3", NODE_ID="pod-1")
    assert spec.rules == at_master.rules
    assert (spec.rules.lost_after, spec.rules.spares, spec.rules.pend_timeout) == (2, 1, 0)
    assert (spec.node_rank, spec.node_id, spec.run_id, said) == (3, "pod-1", "none", [])


def test_the_address_of_a_master_has_no_effect() -> None:
    assert in_etcd(AT_A, DLROVER_MASTER_ADDR="m:x") == EtcdSpec((("a", 2379),))
    sentence = error(TWO, DLROVER_MASTER_ADDR="m:1")
    assert "--rdzv-backend 'etcd' needs an endpoint" in sentence
    assert "DLROVER_MASTER_ADDR" not in sentence


@pytest.mark.parametrize(
    ("conf", "prefix"),
    [
        ("prefix=/jobs", "/jobs"),
        ("prefix=/jobs/", "/jobs"),
        ("prefix=jobs/of us", "/jobs/of us"),
        ("etcd_prefix=/jobs", "/jobs"),
        ("etcd_prefix=jobs,prefix=/jobs/", "/jobs"),
        (f"prefix=/{254 * 'a'}", f"/{254 * 'a'}"),
    ],
)
def test_the_prefix_is_normalized(conf: str, prefix: str) -> None:
    spec = parse([*AT_A.split(), f"--rdzv-conf={conf}", "train.py"], {})
    assert spec.etcd == EtcdSpec((("a", 2379),), prefix)


@pytest.mark.parametrize(
    ("endpoint", "conf", "names"),
    [
        ("a", "protocol=http", None),
        ("http://a", "protocol=http", None),
        ("a", "protocol=https", ()),
        ("a,https://b", "join_timeout=5", ()),
        ("https://a", "protocol=HTTPS", ()),
        ("a", "cacert=ca", ("ca",)),
        ("a", "cert=cert,key=key", ("cert", "key")),
        ("https://a", "cacert=ca,cert=cert,key=key,auth=required", ("ca", "cert", "key")),
        ("a", "protocol=https,ca_cert=ca,ssl_cert=cert,ssl_cert_key=key", ("ca", "cert", "key")),
        ("a", "cacert=ca,ca_cert=ca", ("ca",)),
    ],
)
def test_https_or_any_tls_file_encrypts(
    endpoint: str, conf: str, names: tuple[str, ...] | None, pems: dict[str, str]
) -> None:
    """Without a file of authorities the system's count."""
    tls = None if names is None else TlsSpec(**{name: pems[name] for name in names})
    assert in_etcd(f"{TWO} --rdzv-endpoint={endpoint} --rdzv-conf={conf}").tls == tls


def test_the_password_comes_from_the_setting_then_the_variable_then_its_file(here: Path) -> None:
    (here / "one").write_text("from the setting\n")
    (here / "two").write_text("from the file\r\n")
    by_file = {"DLROVER_ETCD_PASSWORD_FILE": "two"}
    by_text = {**by_file, "DLROVER_ETCD_PASSWORD": "from: the variable,\n"}
    line = f"{AT_A} --rdzv-conf=protocol=https,auth=required,user=root"
    assert in_etcd(f"{line},password_file=one", **by_text).password == "from the setting"
    assert in_etcd(line, **by_text).password == "from: the variable,"
    assert in_etcd(line, **by_file).password == "from the file"
    assert in_etcd(line, **by_file).user == "root"


@pytest.mark.parametrize(
    ("conf", "environ", "sentence"),
    [
        (
            "password_file=none,user=a",
            {},
            "--rdzv-conf password_file 'none' cannot be read (No such file or directory)",
        ),
        ("password_file=empty,user=a", {}, "password_file 'empty' contains an empty password"),
        ("password_file=long,user=a", {}, "password_file 'long' contains a password of more than 4096 characters"),
        ("password_file=bytes,user=a", {}, "password_file 'bytes' is not text"),
        ("user=a", {"DLROVER_ETCD_PASSWORD": ""}, "DLROVER_ETCD_PASSWORD contains an empty password"),
        ("user=a", {"DLROVER_ETCD_PASSWORD": "\udcff"}, "DLROVER_ETCD_PASSWORD is not text"),
        ("user=a", {"DLROVER_ETCD_PASSWORD_FILE": "none"}, "DLROVER_ETCD_PASSWORD_FILE 'none' cannot be read"),
        ("a=1", {"DLROVER_ETCD_PASSWORD": PASSWORD}, "etcd has a password and no user"),
        ("a=1", {"DLROVER_ETCD_PASSWORD_FILE": "train.py"}, "'train.py' contains an empty password"),
    ],
)
def test_an_invalid_password_is_refused_without_showing_it(
    conf: str, environ: dict[str, str], sentence: str, here: Path
) -> None:
    (here / "empty").write_text("\n")
    (here / "long").write_text(PASSWORD * 4096)
    (here / "bytes").write_bytes(b"\xff" + PASSWORD.encode())
    assert sentence in error(f"{AT_A} --rdzv-conf={conf}", **environ)


@pytest.mark.parametrize(
    "conf",
    [
        f"password={PASSWORD}",
        f" Password = {PASSWORD}",
        f"user=root:{PASSWORD}",
        f"user=root:a,{PASSWORD}",
        f"bad,'user=root:{PASSWORD}'",
        f"prefix=/,password={PASSWORD}",
    ],
)
def test_a_password_on_the_command_line_is_refused_and_not_repeated(conf: str) -> None:
    for backend in ("c10d", "etcd"):
        with pytest.raises(SpecError, match="contains a password, which every process list shows") as refused:
            parse([f"--rdzv-backend={backend}", "--rdzv-conf", conf, "train.py"], {})
        assert PASSWORD not in str(refused.value)


def test_an_unencrypted_password_is_warned_of_unless_http_is_explicit() -> None:
    login = {"DLROVER_ETCD_PASSWORD": PASSWORD}
    assert len(parsed(f"{AT_A} --rdzv-conf=user=root", **login)[1]) == 1
    assert parsed(f"{AT_A} --rdzv-conf=user=root,protocol=http", **login)[1] == []
    assert parsed(f"{TWO} --rdzv-endpoint=http://a --rdzv-conf=user=root", **login)[1] == []


def test_options_of_a_master_are_warned_of_with_their_replacement() -> None:
    conf = "token_file=t,tls_ca=a,tls_cert=b,tls_key=c,bind=::1,state_dir=s,is_host=1,read_timeout=5,store_type=tcp"
    spec, said = parsed(f"{AT_A} --rdzv-conf={conf}", DLROVER_RDZV_TOKEN=PASSWORD, DLROVER_RDZV_TOKEN_FILE="f")
    assert said == [
        "token_file of --rdzv-conf has no effect with etcd: give user and password_file instead.",
        "tls_ca of --rdzv-conf has no effect with etcd: give cacert instead.",
        "tls_cert of --rdzv-conf has no effect with etcd: give cert instead.",
        "tls_key of --rdzv-conf has no effect with etcd: give key instead.",
        "bind of --rdzv-conf has no effect with etcd: no node listens there.",
        "state_dir of --rdzv-conf has no effect with etcd: etcd itself stores the state of the job.",
        "DLROVER_RDZV_TOKEN has no effect with etcd: give --rdzv-conf user=NAME and set DLROVER_ETCD_PASSWORD instead.",
        "DLROVER_RDZV_TOKEN_FILE has no effect with etcd: give --rdzv-conf user=NAME and set "
        "DLROVER_ETCD_PASSWORD_FILE instead.",
    ]
    assert spec.etcd == EtcdSpec((("a", 2379),))


@pytest.mark.parametrize(
    "line", ["--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a", "--nnodes=2 --node-rank=0", "--nnodes=1"]
)
def test_options_of_etcd_are_warned_of_elsewhere_unless_torchrun_has_them(line: str) -> None:
    conf = "user=a,password_file=b,prefix=c,cacert=d,cert=e,protocol=https,etcd_prefix=c,ssl_cert_key=f"
    spec, said = parsed(f"{line} --rdzv-conf={conf}", DLROVER_ETCD_PASSWORD="")
    assert said == [
        f"{key} of --rdzv-conf has no effect: it requires several nodes, --rdzv-backend=etcd and --rdzv-endpoint."
        for key in ("user", "password_file", "prefix")
    ]
    assert spec.etcd is None


@pytest.mark.parametrize("line", ["--nnodes=2 --node-rank=0", "--rdzv-backend=etcd --rdzv-endpoint=a"])
def test_options_of_coordinated_nodes_are_warned_of_elsewhere(line: str) -> None:
    said = parsed(f"{line} --spares=0 --rdzv-conf=pend_timeout=1,lost_after=1,scale_up_delay=1,auth=required")[1]
    assert said == [
        f"{what} has no effect: it requires several nodes, --rdzv-backend=c10d (or etcd) and --rdzv-endpoint."
        for what in (
            *(f"{key} of --rdzv-conf" for key in ("pend_timeout", "lost_after", "scale_up_delay", "auth")),
            "--spares",
        )
    ]


@pytest.mark.parametrize("absent", [None, types.ModuleType("etcd3")])
def test_a_missing_package_is_one_line_with_the_remedy(
    absent: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "etcd3", absent)
    assert main([*AT_A.split(), "train.py"]) == 2
    line = (
        "dlrover-run: --rdzv-backend=etcd needs the package etcd3, which is not installed: "
        "pip install 'dlrover-run[etcd]'.\n"
    )
    assert capsys.readouterr() == ("", line)


def test_the_package_is_found_without_being_imported(here: Path) -> None:
    (here / "packages").mkdir()
    (here / "packages" / "etcd3.py").write_text("raise AssertionError('imported')")
    code = "import sys; from dlrover_run.cli import parse; parse(sys.argv[1:], {}); assert 'grpc' not in sys.modules"
    path = os.pathsep.join([str(here / "packages"), str(Path(dlrover_run.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code, *AT_A.split(), "train.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_job_never_shows_its_password_and_carries_it_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, pems: dict[str, str]
) -> None:
    monkeypatch.setenv("DLROVER_ETCD_PASSWORD", PASSWORD)
    spec = job_or_code([*AT_A.split(), "--rdzv-conf=user=root,cacert=ca", "train.py"])
    assert isinstance(spec, JobSpec)
    assert spec.etcd is not None
    assert (spec.etcd.password, os.environ["DLROVER_ETCD_PASSWORD"]) == (PASSWORD, PASSWORD)
    assert PASSWORD not in repr(spec)
    sent = msgspec.json.encode(LaunchRequest(spec, 0, 0))
    assert msgspec.json.decode(sent, type=LaunchRequest, dec_hook=decode_part).spec == spec


def test_a_configuration_of_several_nodes_is_the_same_job(
    here: Path, monkeypatch: pytest.MonkeyPatch, pems: dict[str, str]
) -> None:
    (here / "password").write_text(PASSWORD)
    config = dlrover_run.LaunchConfig(
        min_nodes=1,
        max_nodes=4,
        nproc_per_node=2,
        rdzv_backend="etcd",
        rdzv_endpoint="a,b:1",
        rdzv_configs={"protocol": "https", "cacert": "ca", "user": "root", "password_file": "password", "rank": 1},
        rdzv_timeout=5,
        spares=1,
    )
    spec = launched(config, monkeypatch)
    assert spec.rules == JobRules(min_nodes=1, max_nodes=4, spares=1, max_restarts=3, lost_after=0.0)
    assert spec.etcd == EtcdSpec((("a", 2379), ("b", 1)), "/dlrover-run", "root", PASSWORD, TlsSpec(ca=pems["ca"]))
    assert (spec.backend, spec.run_id, spec.node_rank, spec.workers_per_node) == ("etcd", "none", 1, 2)


def test_a_configuration_with_a_password_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dlrover_run.LaunchConfig(
        2, 2, 1, rdzv_backend="etcd", rdzv_endpoint="a", rdzv_configs={"password": PASSWORD}
    )
    with pytest.raises(SpecError, match="put it into a file and give password_file=PATH") as refused:
        launched(config, monkeypatch)
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize(("conf", "seconds"), [("", 0.0), ("lost_after=1", 1.0), ("lost_after=2.5", 2.5)])
def test_a_node_is_lost_when_its_lease_ends_unless_lost_after_is_given(conf: str, seconds: float) -> None:
    flags = f" --rdzv-conf={conf}" if conf else ""
    spec, _ = parsed(f"--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=e:2379{flags}")
    assert spec.rules.lost_after == seconds
