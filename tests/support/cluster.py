"""Several nodes on this machine: launchers that rendezvous on loopback, and standalone masters."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dlrover_run.processes import tree
from support.harness import OURS, WORKERS, Mailbox, agent_of, environment, start
from support.job import CapturedProcess, Processes, kill_at_once

if TYPE_CHECKING:
    from support.rendezvous_backends import RendezvousBackend

MEMBER = WORKERS / "member.py"

NEVER = 10_000
"""Seconds of a time-out that a test must not need."""

SETTINGS = {"last_call_timeout": NEVER, "lost_after": 0.2}
"""Settings of every node. The first round has the maximum number of nodes, so none is left out because it started
late."""

SOON = {"last_call_timeout": 0.1}
"""Settings of a job that begins with the minimum number of nodes."""

World = list[dict[str, Any]]


class Node(CapturedProcess):
    """One launcher, on the rendezvous backend of its job."""

    def __init__(self, name: str, process: subprocess.Popen[str], place: RendezvousBackend, node_id: str) -> None:
        super().__init__(name, process)
        self._place = place
        self._node_id = node_id

    @property
    def agent(self) -> psutil.Process:
        return agent_of(self.process)

    @property
    def processes(self) -> list[psutil.Process]:
        """The watchdog and its descendants, except for a master, which belongs to the job."""
        watchdog = psutil.Process(self.pid)
        return [watchdog, *(process for process in watchdog.children(recursive=True) if not is_master(process))]

    def lose(self) -> None:
        """Kill all processes of the node at the same moment, as in a power failure, and have it lost at once."""
        self.kill()
        self.expire()

    def kill(self) -> None:
        """Kill all processes of the node at the same moment."""
        kill_at_once(self.processes)
        assert self.finish() == -signal.SIGKILL

    def expire(self) -> None:
        """Have the node declared lost now. Some backends cannot notice that its processes were killed or stopped."""
        self._place.expire(self._node_id)


class Cluster:
    """The nodes of one job, whose workers post to the mailbox, and the rendezvous backend of the job."""

    def __init__(self, mailbox: Mailbox, place: RendezvousBackend) -> None:
        self.mailbox = mailbox
        self.directory = mailbox.directory
        self.place = place
        self._processes = Processes(lambda: self.place.pids)

    @property
    def port(self) -> int:
        """The port of the master, for a test of masters."""
        (port,) = self.place.ports
        return port

    def node(
        self,
        name: str,
        nnodes: str,
        *flags: str | Path,
        script: Path = MEMBER,
        args: Sequence[str] = (),
        conf: Mapping[str, object] | None = None,
        endpoint: int | Sequence[int] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Node:
        """Start a launcher that joins; its workers post `name`. `endpoint` replaces the ports on loopback of the
        rendezvous backend; 0 leaves the flag out."""
        settings = ",".join(f"{k}={v}" for k, v in {**SETTINGS, **self.place.conf, **(conf or {})}.items())
        ports = (endpoint,) if isinstance(endpoint, int) else endpoint or self.place.ports
        place = self.place.flags(ports) if all(ports) else []
        variables = {**self.place.identity(name), **(env or {})}
        process = start(
            OURS,
            [f"--nnodes={nnodes}", *place, f"--rdzv-conf={settings}", *flags, script, *args],
            cwd=self.directory,
            env={"TEST_MAILBOX": self.mailbox.name, "TEST_NODE": name, **variables},
            stderr=subprocess.STDOUT,
        )
        return self._processes.add(Node(name, process, self.place, variables.get("NODE_ID") or ""))

    def nodes(self, names: str, nnodes: str, *flags: str | Path, **options: Any) -> list[Node]:
        """Start a launcher for each letter."""
        return [self.node(name, nnodes, *flags, **options) for name in names]

    def stand_alone_master(
        self, *flags: str | Path, port: int | None = None, env: Mapping[str, str | None] | None = None
    ) -> CapturedProcess:
        """Start `python -m dlrover_run.master` and wait until it listens."""
        listen = f"127.0.0.1:{port or self.port}"
        process = subprocess.Popen(
            [sys.executable, "-m", "dlrover_run.master", "--listen", listen, *map(str, flags)],
            cwd=self.directory,
            env=environment(dict(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        master = self._processes.add(CapturedProcess("master", process))
        master.until_prints("listens on")
        return master

    def master(self) -> psutil.Process:
        """The master that one of the nodes has started. A master that came too late to bind the port ends by itself."""
        found = [process for process in self._processes.living() if is_master(process) and listens(process, self.port)]
        assert len(found) == 1, f"{len(found)} masters"
        return found[0]

    def world(self, size: int) -> World:
        """Return the next `size` workers that post, in the order of their ranks. They must belong to one round."""
        try:
            world = self.mailbox.gather(size)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.outputs()}") from None
        seen = [(m["rank"], m["world"]) for m in world]
        assert seen == [(rank, size) for rank in range(size)], world
        assert len({(m["port"], m["restart"], m["nodes"]) for m in world}) == 1, world
        return world

    def step_of(self, world: World, since: int) -> int:
        """Return the step of a world of `workers/count.py`. It must be later than `since`, and the same for all of
        these workers."""
        os.kill(world[0]["pid"], signal.SIGUSR2)
        reports = self.world(len(world))
        assert [(m["rank"], m["pid"], m["port"]) for m in reports] == [(m["rank"], m["pid"], m["port"]) for m in world]
        (step,) = {member["step"] for member in reports}
        assert step > since
        return int(step)

    def close(self) -> None:
        """Fail unless the test has ended its launchers and all other processes have ended by themselves."""
        self._processes.close()
        if all(captured.process.returncode == 0 for captured in self._processes.captured):
            # No round of this test was stopped, so each worker that has posted belongs to a round that the test
            # expected. In a test that stops or kills a launcher, a worker may post at that moment.
            unread = [message for message in self.mailbox.pending() if "world" in message]
            assert unread == [], f"a round that no step of the test accounts for: {unread}{self.outputs()}"

    def check_place(self) -> None:
        """Fail unless the rendezvous backend is as if there had been no job."""
        assert (left := self.place.left()) == [], f"left in {self.place.name}: {left}{self.outputs()}"

    def outputs(self) -> str:
        """Return the output so far of all processes that were started, for the message of a failing test."""
        return self._processes.outputs()


def is_master(process: psutil.Process) -> bool:
    """Whether the process is a running master."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == tree.MASTER_NAME and process.status() != psutil.STATUS_ZOMBIE
    return False


def listens(process: psutil.Process, port: int) -> bool:
    """Whether a process, which must be of this user, is running and listens on a port."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp"))
    return False


_BLOCK = 100
"""Ports that a process reserves at a time."""

_BLOCKS: list[socket.socket] = []
"""Locks that show other test runs on this machine, such as other workers of pytest-xdist, which blocks are reserved:
sockets with names that only one process can have, and that end with it."""


def _quiet_ports() -> Iterator[int]:
    for first in random.sample(range(20_000, 32_000, _BLOCK), 12_000 // _BLOCK):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0dlrover-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        _BLOCKS.append(claim)
        yield from range(first, first + _BLOCK)


_QUIET_PORTS = _quiet_ports()


def quiet_port() -> int:
    """Return a port on which no process listens, which is outside the kernel's ephemeral range, and which no other
    test was given."""
    for port in _QUIET_PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port has been given to a test")


def send_signal(world: World, number: signal.Signals) -> None:
    """Send a signal to all workers of a world."""
    for member in world:
        os.kill(member["pid"], number)


def places(world: World) -> dict[str, int]:
    """The node rank of each node."""
    return {member["node"]: member["node_rank"] for member in world}


def succeed(world: World, *nodes: Node) -> None:
    """Let all workers end with success, and assert that all nodes leave together."""
    send_signal(world, signal.SIGUSR1)
    assert [node.finish() for node in nodes] == [0] * len(nodes), "".join(node.output for node in nodes)


def leave(node: Node) -> None:
    """Send a node SIGTERM, and wait until it has ended."""
    node.signal(signal.SIGTERM)
    assert node.finish() == 128 + signal.SIGTERM, node.output
