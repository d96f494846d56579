"""Several nodes on this machine: launchers that rendezvous on loopback, standalone masters, and links that can be cut.

This process is a subreaper, so every process that a test starts stays its descendant, and a test can assert that no
process is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dlrover_run.processes import tree
from support.harness import (
    OURS,
    WAIT,
    WORKERS,
    Mailbox,
    agent_of,
    environment,
    kill_leftovers,
    start,
    still_alive,
    watched,
)

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


class CapturedProcess:
    """A process whose output is read and kept."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self.output = ""
        self.at_end = False
        self._searched = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_printed(self, words: str) -> bool:
        """Whether the output so far contains this text; line breaks count as spaces."""
        return words in " ".join(self.output.split())

    def until_prints(self, words: str, timeout: float = WAIT) -> None:
        """Wait until this text appears in the output behind the text that was waited for before."""
        deadline = time.monotonic() + timeout
        while (at := self.output.find(words, self._searched)) < 0:
            if not self._listen(deadline):
                raise AssertionError(f"{self.name} did not print {words!r} but:\n{self.output}")
        self._searched = at + len(words)

    def finish(self, timeout: float = WAIT) -> int:
        """Wait for the end of the process, and return its exit code."""
        deadline = time.monotonic() + timeout
        while self._listen(deadline):
            pass
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout} s, and printed:\n{self.output}") from None

    def catch_up(self) -> None:
        """Read the output that is available now, unless the pipe is closed."""
        assert self.process.stdout is not None
        while not self.process.stdout.closed and self._listen(0.0):
            pass

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def _listen(self, deadline: float) -> bool:
        """Read the next output. Return whether there was any before the deadline or the end."""
        return listen([self], deadline)

    def take(self) -> bool:
        """Read the available output. Return False at the end of the output."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        self.output += data.decode(errors="replace")
        self.at_end = not data
        return bool(data)


def listen(sources: Sequence[CapturedProcess], deadline: float) -> bool:
    """Read the next output of any of these processes. Return whether there was any before the deadline or the end of
    all outputs."""
    while speaking := {one.process.stdout: one for one in sources if not one.at_end}:
        ready, _, _ = select.select(list(speaking), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        if any(speaking[console].take() for console in ready):
            return True
    return False


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
        # The agent first, because it would have time for its last report.
        agent = self.agent
        for process in (agent, *self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
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
        self._captured: list[CapturedProcess] = []
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        tree.become_subreaper()

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
        node = Node(name, process, self.place, variables.get("NODE_ID") or "")
        self._captured.append(node)
        return node

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
        master = CapturedProcess("master", process)
        self._captured.append(master)
        master.until_prints("listens on")
        return master

    def master(self) -> psutil.Process:
        """The master that one of the nodes has started. A master that came too late to bind the port ends by itself."""
        found = [process for process in self._below() if is_master(process) and listens(process, self.port)]
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
        unfinished = [captured for captured in self._captured if captured.process.poll() is None]
        left: list[str] = []
        try:
            if not unfinished:
                with watched_processes(self._below()) as pidfds:
                    still_alive(pidfds, WAIT)
                left = [_describe(process) for process in self._below()]
        finally:
            self._end_all()
            ctypes.CDLL(None).prctl(tree._PR_SET_CHILD_SUBREAPER, 0)
        assert not unfinished, f"the test left {[t.name for t in unfinished]} running{self.outputs()}"
        assert not left, f"left behind: {left}{self.outputs()}"
        if all(captured.process.returncode == 0 for captured in self._captured):
            # No round of this test was stopped, so each worker that has posted belongs to a round that the test
            # expected. In a test that stops or kills a launcher, a worker may post at that moment.
            unread = [message for message in self.mailbox.pending() if "world" in message]
            assert unread == [], f"a round that no step of the test accounts for: {unread}{self.outputs()}"

    def check_place(self) -> None:
        """Fail unless the rendezvous backend is as if there had been no job."""
        assert (left := self.place.left()) == [], f"left in {self.place.name}: {left}{self.outputs()}"

    def outputs(self) -> str:
        """Return the output so far of all processes that were started, for the message of a failing test."""
        for captured in self._captured:
            captured.catch_up()
        return "".join(f"\n--- {captured.name}\n{captured.output}" for captured in self._captured)

    def _below(self) -> list[psutil.Process]:
        """Return the running descendants of this process that the test has started. Orphans that have ended are
        reaped."""
        ours = {captured.pid for captured in self._captured}
        others = self._before | self.place.pids
        living = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid in others:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
                elif process.ppid() == os.getpid() and process.pid not in ours:
                    os.waitpid(process.pid, 0)
        return living

    def _end_all(self) -> None:
        # If the watchdog were killed first, the processes that it watches could start new ones.
        while processes := self._below():
            with watched_processes(processes) as pidfds:
                kill_leftovers(pidfds)
                still_alive(pidfds, WAIT)
        for captured in self._captured:
            captured.finish()
            assert captured.process.stdout is not None
            captured.process.stdout.close()


@contextlib.contextmanager
def watched_processes(processes: Sequence[psutil.Process]) -> Iterator[list[int]]:
    """As `harness.watched`, for the processes that have not ended in the meantime."""
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                fds += stack.enter_context(watched(process.pid))
        yield fds


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


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.name()} {process.cmdline()}"
    return f"{process.pid}, which has gone by now"


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
