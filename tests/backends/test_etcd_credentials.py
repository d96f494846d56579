"""Jobs in an etcd that requires authentication: a certificate, or a user and a password. Real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, send_signal, succeed
from support.etcd_server import PASSWORD, Etcd, Tls, serving
from support.harness import OURS, WORKERS, only_long, run
from support.rendezvous_backends import EtcdBackend, RendezvousBackend

PERMITTED = "/permitted"
"""The only prefix that the user `trainer` may read and write."""

WRONG = "another-secret-entirely"
"""A password that no user has."""

KNOWN = {"DLROVER_ETCD_PASSWORD": PASSWORD}

PUBLIC = ("environ", "cmdline")
"""Files of a process that other users can read on many machines."""


@pytest.fixture(scope="module")
def etcd_of_certificates(tmp_path_factory: pytest.TempPathFactory, etcd_certificates: Path) -> Iterator[Etcd]:
    """A server with TLS that requires a client certificate signed by `ca`."""
    with serving(tmp_path_factory.mktemp("etcd"), tls=Tls(etcd_certificates)) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def etcd_of_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A server without TLS with the users `trainer`, and `reader`, which may only read."""
    with serving(tmp_path_factory.mktemp("etcd")) as etcd:
        etcd.demand_users(prefix=f"{PERMITTED}/")
        for command in (
            ("user", "add", f"reader:{PASSWORD}"),
            ("role", "add", "readers"),
            ("role", "grant-permission", "--prefix=true", "readers", "read", f"{PERMITTED}/"),
            ("user", "grant-role", "reader", "readers"),
        ):
            etcd.ctl(*command, user="root")
        yield etcd


class OfUsers(EtcdBackend):
    """Keys for which a client needs a user."""

    user = "trainer"

    def __init__(self, etcd: Etcd) -> None:
        super().__init__(etcd)
        self.prefix = f"{PERMITTED}{self.prefix}"
        # Without TLS a flag has to allow that the password is sent unencrypted.
        self.conf = {**self.conf, "prefix": self.prefix, "user": self.user, "protocol": "http"}


@pytest.fixture
def place(etcd_of_users: Etcd) -> RendezvousBackend:
    return OfUsers(etcd_of_users)


@pytest.mark.long
@pytest.mark.torchrun
def test_two_nodes_train_and_continue_after_a_failure(cluster: Cluster, place: EtcdBackend) -> None:
    """With certificates: `jobs/test_resumed_training.py`."""
    nodes = cluster.nodes("ab", "2", "--max-restarts=1", script=WORKERS / "train.py", env=KNOWN)
    world = cluster.world(2)
    assert place.all_keys(), "the job's keys are below the prefix"
    send_signal(world[:1], signal.SIGKILL)
    world = cluster.world(2)
    assert {m["restart"] for m in world} == {1}
    succeed(world, *nodes)


@pytest.mark.parametrize(
    ("way", "method"), [("variable", "spawn"), *only_long(("file of a variable", "forkserver"), ("setting", "spawn"))]
)
def test_the_password_is_in_no_environment_command_line_log_or_output(
    cluster: Cluster, tmp_path: Path, way: str, method: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(PASSWORD + "\n")
    file.chmod(0o600)
    env = {"variable": KNOWN, "file of a variable": {"DLROVER_ETCD_PASSWORD_FILE": str(file)}}.get(way, {})
    conf = {"password_file": file} if way == "setting" else {}
    logs = tmp_path / "logs"
    options = ("2", "--max-restarts=1", f"--log-dir={logs}", "-r", "3", f"--start-method={method}")
    nodes = cluster.nodes("ab", *options, env={**env, "LOGLEVEL": "DEBUG"}, conf=conf)
    os.kill(cluster.world(2)[0]["pid"], signal.SIGKILL)
    world = cluster.world(2)
    processes = [process for node in nodes for process in node.processes]
    # The watchdog, the agent, the relay and the worker of each node.
    assert len(processes) >= 8
    seen = {(p.pid, name): Path(f"/proc/{p.pid}/{name}").read_bytes() for p in processes for name in PUBLIC}
    assert {m["pid"] for m in world} <= {pid for pid, _ in seen}
    for member in world:
        inherited = seen[member["pid"], "environ"]
        assert b"TEST_MAILBOX" in inherited, "the test can read environments"
        assert b"DLROVER_ETCD_PASSWORD" not in inherited, "the environment of a worker has no password"
    assert not [where for where, content in seen.items() if PASSWORD.encode() in content]
    succeed(world, *nodes)
    written = [path for path in logs.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]
    assert not [node.name for node in nodes if PASSWORD in node.output]


def refused(etcd: Etcd, directory: Path, conf: dict[str, object], password: str | None = None) -> str:
    """The one line that a launcher prints before it exits with code 2, as for a wrong flag."""
    settings = ",".join(f"{name}={value}" for name, value in conf.items())
    done = run(
        OURS,
        [
            *("--nnodes=2", "--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoints}", f"--rdzv-conf={settings}"),
            *("--no-python", "touch", "started"),
        ],
        cwd=directory,
        env={"DLROVER_ETCD_PASSWORD": password},
    )
    assert (done.code, done.out) == (2, ""), done
    (line,) = done.err.splitlines()
    assert not (directory / "started").exists()
    assert not password or password not in line
    assert line.startswith("dlrover-run: ")
    return line


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("trainer", WRONG, "no user 'trainer' with the password that was given"),
        *only_long(
            ("reader", PASSWORD, f"The user 'reader' may not read and write below {PERMITTED}/ in etcd: grant that to"),
        ),
    ],
)
def test_a_node_that_cannot_log_in_reports_it_in_one_line(
    etcd_of_users: Etcd, tmp_path: Path, user: str, password: str, words: str
) -> None:
    conf: dict[str, object] = {"user": user, "protocol": "http", "prefix": PERMITTED}
    assert words in refused(etcd_of_users, tmp_path, conf, password)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"cacert": "ca.pem"}, "demands a certificate of this node: cert is missing, or not accepted"),
        *only_long(({}, "it uses TLS, and this node does not: protocol=https is missing")),
    ],
)
def test_a_node_with_a_wrong_certificate_or_none_reports_it_in_one_line(
    etcd_of_certificates: Etcd, etcd_certificates: Path, tmp_path: Path, files: dict[str, str], words: str
) -> None:
    conf: dict[str, object] = {name: etcd_certificates / file for name, file in files.items()}
    assert words in refused(etcd_of_certificates, tmp_path, {"join_timeout": 60, **conf})
