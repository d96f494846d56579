"""The rendezvous backends of the tests (*places*): the settings of a node for each, and what must hold there after a
job.

What a job promises holds with every rendezvous backend, so a test of that runs with each of them.
"""

from __future__ import annotations

import abc
import base64
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from dlrover_run.coordination.records.rules import RESULT_RETENTION
from support.cluster import is_master, listens, quiet_port
from support.etcd_server import Etcd, serving
from support.harness import only_long

EVERYWHERE = pytest.mark.parametrize("place", ["c10d", *only_long("etcd", "etcd of three")], indirect=True)
"""For tests of what a job promises on every rendezvous backend. `make test` runs them with the built-in master only,
because the simulation checks the same invariants for both clients; `make test-long` runs them with etcd too."""


class RendezvousBackend(abc.ABC):
    """A rendezvous backend for one test. `name` is its name in the output of nodes, `ports` are its ports on loopback,
    and `conf` are the settings of every node. `guest` are the settings of a node that must not start the master.
    `refusal` is the text before the reason for which a node is refused."""

    name: str
    refusal: str
    ports: tuple[int, ...]
    conf: Mapping[str, object] = {}
    guest: Mapping[str, object] = {}
    alert: Mapping[str, object]
    """Settings with which a node without heartbeats is declared lost within seconds, for the few tests that wait for
    that. A node that a busy machine does not schedule for this long is lost as well, so no other test has them."""

    @abc.abstractmethod
    def flags(self, ports: Sequence[int]) -> list[str]:
        """Return the command line flags that select this backend at `ports`."""

    @property
    def pids(self) -> frozenset[int]:
        """Processes that belong to the backend and to no job."""
        return frozenset()

    def identity(self, name: str) -> Mapping[str, str]:
        """Return variables that give a node an id by which `expire` finds it."""
        return {}

    def expire(self, node_id: str) -> None:  # noqa: B027
        """Have a killed or stopped node declared lost now, if this backend would notice that only by a timeout."""

    def left(self) -> list[str]:
        """Return what is left of the job in the backend."""
        return []


class MasterBackend(RendezvousBackend):
    """The master that one of the nodes starts, or one that the test has started."""

    name = "the master"
    refusal = "refuses this node: "
    guest: Mapping[str, object] = {"is_host": 0}
    alert: Mapping[str, object] = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5}

    def __init__(self) -> None:
        self.ports = (quiet_port(),)

    def flags(self, ports: Sequence[int]) -> list[str]:
        (port,) = ports
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]

    def left(self) -> list[str]:
        """Return the running masters of the job, also those that are no descendants of the test any more: the test ends
        only its descendants."""
        living = [process for process in psutil.process_iter() if is_master(process)]
        return [f"the master {p.pid}" for p in living for port in self.ports if listens(p, port)]


class EtcdBackend(RendezvousBackend):
    """Keys below a prefix in etcd that no other test has. `user` is the user that may read them; empty: every user."""

    user = ""
    name = "etcd"
    refusal = "waiting: "
    alert: Mapping[str, object] = {"keep_alive_interval": 2}

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.ports = tuple(port for _, port in etcd.places)
        self.prefix = f"/test-{os.urandom(6).hex()}"
        # A lease of 18 s. A node whose agent a busy machine does not schedule for that long is lost, so it is much
        # longer than any pause; `expire` makes a killed node lost at once. Less than RESULT_RETENTION, see `left`.
        self.conf = {"keep_alive_interval": 6, "prefix": self.prefix}
        self._identities = itertools.count()

    def flags(self, ports: Sequence[int]) -> list[str]:
        return ["--rdzv-backend=etcd", f"--rdzv-endpoint={','.join(f'127.0.0.1:{port}' for port in ports)}"]

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(member.process.pid for member in self.etcd.members if member.runs)

    def identity(self, name: str) -> Mapping[str, str]:
        return {"NODE_ID": f"{name}-{next(self._identities)}"}

    def expire(self, node_id: str) -> None:
        """Revoke the lease of the node, as if it had expired. If it has expired already, there is nothing to do."""
        for key, lease in self._leases_by_key().items():
            if key.endswith(f"/nodes/{node_id}"):
                self.etcd.ctl("lease", "revoke", lease, user=self.user)

    def left(self) -> list[str]:
        """Return all keys without those that expire by themselves: the result of a job, for a node that reconnects."""
        keys = self._leases_by_key()
        kept = {lease for key, lease in keys.items() if key.endswith("/unaware") and self._runs_out_soon(lease)}
        return [key for key, lease in keys.items() if lease not in kept]

    def all_keys(self) -> list[str]:
        """Return the current keys of the test's jobs."""
        return list(self._leases_by_key())

    def elected(self) -> str:
        """Return the node id of the elected agent. Raises AssertionError if there is none."""
        keys = self.all_keys()
        leaders = [key for key in keys if key.endswith("/leader")]
        assert len(leaders) == 1, f"no agent is elected: {keys}"
        return self.etcd.ctl("get", "--print-value-only", *leaders, user=self.user).strip()

    def leases(self) -> set[str]:
        """Return the leases of the current keys of the test's jobs, as etcdctl writes them."""
        return set(self._leases_by_key().values())

    def _leases_by_key(self) -> dict[str, str]:
        answer = json.loads(self.etcd.ctl("get", "--prefix", "--write-out=json", f"{self.prefix}/", user=self.user))
        return {base64.b64decode(kv["key"]).decode(): f"{kv.get('lease', 0):x}" for kv in answer.get("kvs", ())}

    def _runs_out_soon(self, lease: str) -> bool:
        life = self.etcd.ctl("lease", "timetolive", lease, user=self.user)
        granted = re.search(r"granted with TTL\((\d+)s\)", life)
        return granted is not None and int(granted[1]) <= RESULT_RETENTION


class EtcdWithCertificates(EtcdBackend):
    """Keys for which a client needs a certificate: `client` of `etcd_certificates`."""

    def __init__(self, etcd: Etcd, folder: Path) -> None:
        super().__init__(etcd)
        files = {"cacert": "ca.pem", "cert": "client.pem", "key": "client.key"}
        self.conf = {**self.conf, **{name: folder / file for name, file in files.items()}}


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One server for all tests of a file that neither stop nor change it."""
    with serving(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def shared_etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Three servers for all tests of a file that neither stop nor change them."""
    with serving(tmp_path_factory.mktemp("etcd"), 3) as etcd:
        yield etcd


@pytest.fixture
def place(request: pytest.FixtureRequest) -> RendezvousBackend:
    """The rendezvous backend of a test: a master, unless the test is parametrized otherwise."""
    servers = {"etcd": "shared_etcd", "etcd of three": "shared_etcd_cluster"}
    name = servers.get(getattr(request, "param", "c10d"))
    return MasterBackend() if name is None else EtcdBackend(request.getfixturevalue(name))
