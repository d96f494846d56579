"""Nodes with a node check before training, and a gate: a server that each check process waits for before it measures.
At the gate a test can hold, kill or slow down a process, or make its result wrong.

Check processes connect to the gate themselves (`workers/check_gate.py`), so no test has to find them in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.cluster import Cluster, Node
from support.harness import WAIT, WORKERS

SPEEDS = {"compute": 0.1, "link": 1.0}
"""The speed that every measurement of a healthy node reports: TFLOP/s, and GB/s. The check process really measures,
but its result depends on the load of the machine, so a test never uses it."""

SLOWER = 10
"""How many times slower a slow node is, and each of its links."""

FAULT_LINE = "RuntimeError: The node network is breakdown."
STRAGGLER_LINE = "RuntimeError: The node is a straggler and exits."


@dataclass(eq=False)
class Visit:
    """One measurement of a check process, from its connection to the gate to its end. A pidfd refers to the process."""

    node: str
    local_rank: int
    stage: str
    link: str
    """The name of the link; empty for computing."""
    world: int
    """How many processes the link has; 1 for computing."""
    pid: int
    connection: socket.socket
    pidfd: int
    slowed: bool = False

    def go(self) -> None:
        """Let the process measure."""
        self._send(b"go")

    def spoil(self) -> None:
        """Let the process measure, with a wrong product."""
        self._send(b"wrong")

    def kill(self) -> None:
        """Kill the process."""
        self._signal(signal.SIGKILL)

    def slow(self) -> None:
        """Let the process measure, and report a speed that is `SLOWER` times lower."""
        self.slowed = True
        self._send(b"go")

    def report(self, speed: float) -> None:
        """Send a process that has measured the speed that it is to report."""
        self._send(str(speed).encode())

    def _send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(word)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


Act = Callable[[Visit], None]
"""An action on a measurement that waits at the gate."""


class Gate:
    """A server at which each measurement of a check process waits until the test releases it.

    Computing begins when `together` nodes have connected for it. `rules` maps the name of a node to the action on its
    measurements; actions run in the thread of this gate. A measurement without a rule is released at once.
    """

    def __init__(self, directory: Path) -> None:
        self.together = 1
        self.visits: list[Visit] = []
        self.rules: dict[str, Act] = {}
        self._news = threading.Condition()
        self._name = f"dlrover-gate-{os.getpid()}-{os.urandom(4).hex()}"
        self._site = _install_plugin(directory)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(f"\0{self._name}")
        self._server.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._bell, bell = socket.socketpair()
        self._selector.register(bell, selectors.EVENT_READ)
        self._bell_end = bell
        self._waiting: list[Visit] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that let the check processes of a node find this gate."""
        path = os.pathsep.join(filter(None, (str(self._site), os.environ.get("PYTHONPATH"))))
        return {"CHECK_GATE": self._name, "PYTHONPATH": path}

    def until(self, holds: Callable[[Sequence[Visit]], bool]) -> None:
        """Wait until the condition holds for the list of all measurements so far."""
        with self._news:
            assert self._news.wait_for(lambda: holds(self.visits), WAIT), [(v.node, v.stage) for v in self.visits]

    def until_at(self, stage: str, *names: str) -> list[Visit]:
        """Wait until each of these nodes has connected for that stage. Return the first measurement of each."""
        self.until(lambda visits: {v.node for v in visits if v.stage == stage}.issuperset(names))
        return [next(v for v in self.visits if v.node == name and v.stage == stage) for name in names]

    def of(self, *names: str, stage: str | None = None) -> list[Visit]:
        """Return the measurements of these nodes so far."""
        with self._news:
            return [v for v in self.visits if v.node in names and stage in (None, v.stage)]

    def close(self) -> None:
        """Accept no more connections, and release the processes that wait."""
        self._bell.close()
        self._thread.join()
        self._selector.close()
        for visit in self.visits:
            visit.connection.close()
            os.close(visit.pidfd)
        self._server.close()
        self._bell_end.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._bell_end:
                    return
                if key.fileobj is self._server:
                    self._selector.register(self._server.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj, key.data)

    def _receive(self, connection: socket.socket, visit: Visit | None) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if visit is None and data:
            self._admit(connection, json.loads(data))
            return
        if visit is not None and data:
            visit.report(self._speed(visit))
            return
        self._selector.unregister(connection)
        if visit is None:
            connection.close()
        elif visit in self._waiting:
            self._waiting.remove(visit)

    def _speed(self, visit: Visit) -> float:
        """Return the planted speed. A link is as slow as its slowest node. All nodes of a link have connected before
        any of them has finished."""
        concerned = [each for each in self.visits if each.link == visit.link][-visit.world :] if visit.link else [visit]
        return SPEEDS[visit.stage] / (SLOWER if any(each.slowed for each in concerned) else 1)

    def _admit(self, connection: socket.socket, about: dict[str, Any]) -> None:
        try:
            pidfd = os.pidfd_open(about["pid"])
        except ProcessLookupError:
            self._selector.unregister(connection)
            connection.close()
            return
        visit = Visit(**about, connection=connection, pidfd=pidfd)
        self._selector.modify(connection, selectors.EVENT_READ, visit)
        with self._news:
            self.visits.append(visit)
            self._news.notify_all()
        if visit.stage == "link":
            self._call(visit)
            return
        self._waiting.append(visit)
        if len({each.node for each in self.visits if each.stage == "compute"}) >= self.together:
            while self._waiting:
                self._call(self._waiting.pop(0))

    def _call(self, visit: Visit) -> None:
        self.rules.get(visit.node, Visit.go)(visit)


def hold(visit: Visit) -> None:
    """Leave the process waiting at the gate."""


def kill_once() -> Act:
    """Return an action that kills the first process that connects, and releases all others."""
    killed: list[Visit] = []

    def act(visit: Visit) -> None:
        killed.append(visit)
        visit.kill() if len(killed) == 1 else visit.go()

    return act


def at(stage: str, act: Act) -> Act:
    """Return an action that does `act` at that stage, and releases processes at other stages."""
    return lambda visit: act(visit) if visit.stage == stage else visit.go()


class CheckedCluster:
    """Starts nodes with a node check. Their names are letters, and a node prefers the rank that is the index of its
    letter in the alphabet. That is also its index in the first check of a job."""

    def __init__(self, cluster: Cluster, gate: Gate) -> None:
        self.cluster = cluster
        self.gate = gate

    def node(self, name: str, nnodes: str, *flags: str | Path, rank: int | None = None, **options: Any) -> Node:
        """Start one node. `rank` is the rank of the node that it replaces."""
        node_rank = ord(name) - ord("a") if rank is None else rank
        env = {**self.gate.env, "NODE_ID": f"node-{name}", "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        flags = ("--network-check", f"--node-rank={node_rank}", *flags)
        return self.cluster.node(name, nnodes, *flags, env=env, **options)

    def nodes(self, count: int, *flags: str | Path, **options: Any) -> list[Node]:
        """Start all `count` nodes of a job. The first computation waits until all have connected for it."""
        self.gate.together = count
        return [self.node(name, str(count), *flags, **options) for name in letters(count)]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate for the check processes of one test."""
    there = Gate(tmp_path)
    yield there
    there.close()


@pytest.fixture
def checked(cluster: Cluster, gate: Gate) -> CheckedCluster:
    """Nodes that one test starts, and the gate to which their check processes connect."""
    return CheckedCluster(cluster, gate)


def letters(count: int) -> str:
    """Return the names of `count` nodes."""
    return "abcdefghijklmnop"[:count]


def check_processes(node: Node) -> list[psutil.Process]:
    """Return the running check processes of a node."""
    found = []
    for process in node.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word.endswith("/node_check") for word in process.cmdline()):
                found.append(process)
    return found


def _install_plugin(directory: Path) -> Path:
    site = directory / "gate-site"
    info = site / "gate-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dlrover_run.accelerators]\ngate = check_gate:find\n")
    (site / "check_gate.py").symlink_to(WORKERS / "check_gate.py")
    return site
