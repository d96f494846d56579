"""Rendezvous in etcd: what flags and variables resolve to. Secrets are in `test_rendezvous_options.py`."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from support.command_lines import fake_etcd3, isolate, job, launched, run_python, watched, write_pems
from support.places import place_of

import dlrover_run
from dlrover_run.cli import parse
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import kinds

TWO = "--nnodes=2 --rdzv-backend=etcd"
AT_A = f"{TWO} --rdzv-endpoint=a"
A = (("a", 2379),)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one script, a package that can be found, and no variable that changes a job."""
    isolate(tmp_path, monkeypatch)
    fake_etcd3(monkeypatch)
    return tmp_path


def in_etcd(line: str, **environ: str) -> kinds.Store:
    """The rendezvous of this job in etcd."""
    spec = job(line, **environ)
    assert (spec.rendezvous.backend, place_of(spec).master, place_of(spec).store) == ("etcd", None, None)
    assert place_of(spec).etcd is not None
    return place_of(spec).etcd


@pytest.mark.parametrize(
    ("endpoint", "endpoints"),
    [
        ("a", [("a", 2379)]),
        ("10.0.0.1,b.svc:1,[::1]:65535", [("10.0.0.1", 2379), ("b.svc", 1), ("::1", 65535)]),
        ("a:1,a:2", [("a", 1), ("a", 2)]),
        ("http://a,http://B:1/,c/", [("a", 2379), ("B", 1), ("c", 2379)]),
        ("HTTP://[fe80::1]", [("fe80::1", 2379)]),
    ],
)
def test_an_endpoint_names_the_members(endpoint: str, endpoints: list[tuple[str, int]]) -> None:
    assert in_etcd(f"{TWO} --rdzv-endpoint={endpoint}") == kinds.Store(tuple(endpoints))


def test_blanks_between_members_and_in_a_prefix_are_kept_apart() -> None:
    argv = [*TWO.split(), "--rdzv-endpoint", " a , b:1 ", "--rdzv-conf=prefix=jobs/of us", "train.py"]
    assert place_of(parse(argv, {})).etcd == kinds.Store((("a", 2379), ("b", 1)), "/jobs/of us")


@pytest.mark.parametrize("line", ["--nnodes=1", "--nnodes=1:1 --rdzv-endpoint=a,b", "--standalone --rdzv-endpoint=a:x"])
def test_a_single_node_needs_no_rendezvous_and_no_package(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3", None)
    spec = job(f"--rdzv-backend=etcd {line}", DLROVER_ETCD_PASSWORD="")
    assert (spec.rendezvous.backend, place_of(spec).etcd, spec.rules) == (
        "memory",
        None,
        watched(JobRules(lost_after=0.0)),
    )


def test_ranks_names_and_rules_are_those_of_a_job_with_a_master() -> None:
    """Except that a node is lost when its lease expires, not after a timeout, unless `lost_after` is given."""
    spec = job(f"{AT_A} --spares=1 --node-unit=2", NODE_RANK="3", NODE_ID="pod-1", DLROVER_MASTER_ADDR="m:x")
    assert spec.rules == watched(JobRules(min_nodes=2, max_nodes=2, spares=1, node_unit=2, lost_after=0.0))
    assert (spec.node_rank, spec.node_id, spec.run_id, place_of(spec).etcd) == (3, "pod-1", "none", kinds.Store(A))


@pytest.mark.parametrize(
    ("conf", "prefix"),
    [
        ("prefix=/jobs/", "/jobs"),
        ("etcd_prefix=/jobs", "/jobs"),
        ("etcd_prefix=jobs,prefix=/jobs/", "/jobs"),
        (f"prefix=/{254 * 'a'}", f"/{254 * 'a'}"),
    ],
)
def test_the_prefix_is_normalized(conf: str, prefix: str) -> None:
    assert in_etcd(f"{AT_A} --rdzv-conf={conf}") == kinds.Store(A, prefix)


@pytest.mark.parametrize(
    ("endpoint", "conf", "names"),
    [
        ("http://a", "protocol=http", None),
        ("a", "protocol=https", ()),
        ("a,https://b", "join_timeout=5", ()),
        ("https://a", "protocol=HTTPS", ()),
        ("a", "cert=cert,key=key", ("cert", "key")),
        ("https://a", "cacert=ca,cert=cert,key=key,auth=required", ("ca", "cert", "key")),
        ("a", "protocol=https,ca_cert=ca,ssl_cert=cert,ssl_cert_key=key", ("ca", "cert", "key")),
        ("a", "cacert=ca,ca_cert=ca", ("ca",)),
    ],
)
def test_https_or_any_tls_file_encrypts(endpoint: str, conf: str, names: tuple[str, ...] | None, here: Path) -> None:
    """Without a CA file the authorities of the system are trusted."""
    pems = write_pems(here)
    tls = None if names is None else kinds.TlsSpec(**{name: pems[name] for name in names})
    assert in_etcd(f"{TWO} --rdzv-endpoint={endpoint} --rdzv-conf={conf}").tls == tls


@pytest.mark.parametrize("line", [f"{AT_A} --rdzv-conf=user=root,protocol=http", f"{TWO} --rdzv-endpoint=http://a"])
def test_an_unencrypted_password_gives_no_warning_where_http_is_explicit(line: str) -> None:
    found = in_etcd(line if "user=" in line else f"{line} --rdzv-conf=user=root", DLROVER_ETCD_PASSWORD="open-sesame")
    assert (found.user, found.password, found.tls) == ("root", "open-sesame", None)


@pytest.mark.parametrize("absent", [None, types.ModuleType("etcd3")])
def test_a_missing_package_is_reported_in_one_line_with_a_hint(
    absent: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "etcd3", absent)
    assert run(DLROVER_RUN, [*AT_A.split(), "train.py"]) == 2
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
    done = run_python("-c", code, *AT_A.split(), "train.py", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_configuration_of_several_nodes_is_the_same_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pems = write_pems(here)
    (here / "password").write_text("open-sesame")
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
    assert spec.rules == watched(JobRules(min_nodes=1, max_nodes=4, spares=1, max_restarts=3, lost_after=0.0))
    members = (("a", 2379), ("b", 1))
    assert place_of(spec).etcd == kinds.Store(
        members, "/dlrover-run", "root", "open-sesame", kinds.TlsSpec(ca=pems["ca"])
    )
    assert (spec.rendezvous.backend, spec.run_id, spec.node_rank, spec.workers_per_node) == ("etcd", "none", 1, 2)
