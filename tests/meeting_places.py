"""Where the nodes of a job can meet: what each place is to a node, and what holds there when a job is over.

What a job promises it promises wherever its nodes meet, so a test of that runs at each of these places.
"""

from __future__ import annotations

import abc
import base64
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import psutil
import pytest
from cluster import is_master, listens, quiet_port
from etcd_server import Etcd, serving
from harness import only_long

from dlrover_run.coordination.rules import RESULT_RETENTION

EVERYWHERE = pytest.mark.parametrize("place", ["c10d", *only_long("etcd", "etcd of three")], indirect=True)
"""For tests of what a job promises on every rendezvous backend. `make test` runs them on the built-in master only, for
the simulation holds both clients to the same laws; `make test-long` runs them on etcd too."""


class MeetingPlace(abc.ABC):
    """One place, which serves one test. `name` is what nodes call it, `ports` are those on loopback where it is, and
    `conf` is what every node is told. `guest` is told to a node that shall only visit it. `refusal` is what stands
    before the reason why it lets a node not in."""

    name: str
    refusal: str
    ports: tuple[int, ...]
    conf: Mapping[str, object] = {}
    guest: Mapping[str, object] = {}
    alert: Mapping[str, object]
    """Settings under which a node that is silent is lost in seconds, for the few tests that wait for that. A node that
    a busy machine does not schedule for as long is lost as well, so no other test has them."""

    @abc.abstractmethod
    def flags(self, ports: Sequence[int]) -> list[str]:
        """The words of a command line that lead there by `ports`."""

    @property
    def pids(self) -> frozenset[int]:
        """Processes that belong to the place and to no job."""
        return frozenset()

    def identity(self, name: str) -> Mapping[str, str]:
        """Variables that give a node an id by which `expire` finds it."""
        return {}

    def expire(self, node_id: str) -> None:  # noqa: B027
        """Have a node that is dead or stopped be lost now where only a time-out would tell that it is gone."""

    def left(self) -> list[str]:
        """What is left of the job there."""
        return []


class AtMaster(MeetingPlace):
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
        """Masters of the job that live, also those that got away from below the test, which only ends what is there."""
        living = [process for process in psutil.process_iter() if is_master(process)]
        return [f"the master {p.pid}" for p in living for port in self.ports if listens(p, port)]


class InEtcd(MeetingPlace):
    """Keys below a path in etcd that no other test has. `user` is who may read them, empty for everybody."""

    user = ""
    name = "etcd"
    refusal = "waiting: "
    alert: Mapping[str, object] = {"keep_alive_interval": 2}

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.ports = tuple(port for _, port in etcd.places)
        self.prefix = f"/test-{os.urandom(6).hex()}"
        # A lease of 18 s. A node whose agent a busy machine does not schedule for that long is lost, so it is much
        # longer than any pause; what a test kills is lost at once by `expire`. Below RESULT_KEPT, see `left`.
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
        """As when its lease runs out by etcd's clock. One that has run out by now leaves nothing to do."""
        for key, lease in self._leases_by_key().items():
            if key.endswith(f"/nodes/{node_id}"):
                self.etcd.ctl("lease", "revoke", lease, user=self.user)

    def left(self) -> list[str]:
        """All but what runs out by itself: the result of a job that a node may still come back to learn."""
        keys = self._leases_by_key()
        kept = {lease for key, lease in keys.items() if key.endswith("/unaware") and self._runs_out_soon(lease)}
        return [key for key, lease in keys.items() if lease not in kept]

    def all_keys(self) -> list[str]:
        """The keys of the test's jobs as they are now."""
        return list(self._leases_by_key())

    def elected(self) -> str:
        """The node id of the elected agent; AssertionError when there is none."""
        keys = self.all_keys()
        leaders = [key for key in keys if key.endswith("/leader")]
        assert len(leaders) == 1, f"no agent is elected: {keys}"
        return self.etcd.ctl("get", "--print-value-only", *leaders, user=self.user).strip()

    def leases(self) -> set[str]:
        """Under which the keys of the test's jobs are now, as etcdctl writes them."""
        return set(self._leases_by_key().values())

    def _leases_by_key(self) -> dict[str, str]:
        answer = json.loads(self.etcd.ctl("get", "--prefix", "--write-out=json", f"{self.prefix}/", user=self.user))
        return {base64.b64decode(kv["key"]).decode(): f"{kv.get('lease', 0):x}" for kv in answer.get("kvs", ())}

    def _runs_out_soon(self, lease: str) -> bool:
        life = self.etcd.ctl("lease", "timetolive", lease, user=self.user)
        granted = re.search(r"granted with TTL\((\d+)s\)", life)
        return granted is not None and int(granted[1]) <= RESULT_RETENTION


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One server for all tests of a file that do nothing to it."""
    with serving(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def shared_etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Three servers for all tests of a file that do nothing to them."""
    with serving(tmp_path_factory.mktemp("etcd"), 3) as etcd:
        yield etcd


@pytest.fixture
def place(request: pytest.FixtureRequest) -> MeetingPlace:
    """Where the nodes of a test meet: at a master, unless the test says otherwise."""
    servers = {"etcd": "shared_etcd", "etcd of three": "shared_etcd_cluster"}
    name = servers.get(getattr(request, "param", "c10d"))
    return AtMaster() if name is None else InEtcd(request.getfixturevalue(name))
