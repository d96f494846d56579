"""Launches a master as a child process on the node of the endpoint. It outlives that node's launcher.

Binding the address is the mutex: if several agents on the host start a master at once, one succeeds and the masters of
the others exit. The master exits by itself when the last node has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.launch_request import memory_file
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.rendezvous import kinds
from dlrover_run.transport.addresses import (
    Address,
    UnresolvedHost,
    bind_error,
    is_ip_address,
    is_local_address,
    resolve,
)

READY_TIMEOUT = 60.0
"""Seconds for a master to start and listen. That takes 0.2 s; imports from a cold network disk can take many seconds.

A master that is not ready by then is killed.
"""

MAX_READY = 65_536
"""Bytes of a master's ready message; more is not read."""

MAX_REPORT = 65_536
"""Bytes of a line that a master reports; a longer one is passed on in pieces. Enough for 4,000 nodes."""


class MasterNotReady(Exception):
    """A master could not be started; the message is the reason, a clause. `is_user_error`: another attempt would fail
    too, because a setting is wrong, such as a state directory that cannot be created."""

    def __init__(self, reason: str, is_user_error: bool = False) -> None:
        super().__init__(reason)
        self.is_user_error = is_user_error


@dataclass(eq=False, repr=False)
class MasterProcess:
    """A master process that listens at `listen` (HOST:PORT) with the token, TLS files and journal of `spec`.

    `log` is called with each line that it reports. It exits after `idle_timeout` seconds without a node; with
    `ends_with_parent` also as soon as this process ends, even by SIGKILL. `lost` is for the successor of a
    master on another machine (see `Coordinator`).
    """

    pid: int = field(init=False)
    spec: kinds.Master
    listen: str
    log: Callable[[str], None]
    idle_timeout: float | None = None
    ends_with_parent: bool = False
    lost: LostMaster | None = None

    def __post_init__(self) -> None:
        self._parent_pipe = -1
        self._ready = -1
        self._process: ManagedProcess[ProcessSpec] | None = None

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the process; `on_end` is called once when it has ended. Raises OSError if it cannot be started."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as kept:

            def pipe() -> tuple[int, int]:
                """Our reading end and the child's end, which is closed here once the child has it."""
                ours, inherited_end = os.pipe()
                kept.callback(os.close, ours)
                passed_on.callback(os.close, inherited_end)
                return ours, inherited_end

            ready, child_ready = pipe()
            reports, child_reports = pipe()
            inherited = {"--ready-fd": child_ready, "--report-fd": child_reports}
            if self.spec.token:
                inherited["--token-fd"] = passed_on.enter_context(memory_file(self.spec.token.encode()))
            if self.ends_with_parent:
                inherited["--parent-pipe-fd"], self._parent_pipe = os.pipe()
                passed_on.callback(os.close, inherited["--parent-pipe-fd"])
                kept.callback(os.close, self._parent_pipe)
            spec = self._process_spec(inherited)
            self.pid = spawn(spec)
            kept.pop_all()
        self._ready = ready
        _forward_lines(reports, self.log)

        def on_exit(_: object) -> None:
            self.end()
            on_end()

        self._process = ManagedProcess(self.pid, spec, on_exit)

    async def ready(self) -> int:
        """Wait until it listens; return its port. Raises MasterNotReady."""
        try:
            async with TimeLimit(READY_TIMEOUT):
                message = await _read_to_end(self._ready)
        except TimeoutError:
            self.kill()
            raise MasterNotReady(f"it did not listen within {READY_TIMEOUT:g} s and was killed") from None
        finally:
            os.close(self._ready)
        return _parse_port(message, self.listen)

    def end(self) -> None:
        """End a master that `ends_with_parent`, as the end of this process would."""
        if self._parent_pipe >= 0:
            os.close(self._parent_pipe)
            self._parent_pipe = -1

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _process_spec(self, inherited: dict[str, int]) -> ProcessSpec:
        command = [sys.executable, "-m", "dlrover_run.master", "--listen", self.listen]
        if self.idle_timeout is not None:
            command += ["--idle-timeout", f"{self.idle_timeout:g}"]
        if self.lost is not None:
            command += ["--succeeds", f"{self.lost.nodes},{self.lost.ended}"]
        for flag, fd in inherited.items():
            command += [flag, str(fd)]
        if self.spec.state_dir is not None:
            command += ["--state-dir", os.path.abspath(self.spec.state_dir)]
        if self.spec.web is not None:
            command += ["--web", self.spec.web]
        if self.spec.tls is not None:
            files = {"--tls-ca": self.spec.tls.ca, "--tls-cert": self.spec.tls.cert, "--tls-key": self.spec.tls.key}
            for flag, path in files.items():
                command += [flag, os.path.abspath(path)] if path else []
        if self.spec.auth_required:
            command += ["--auth-required"]
        # `processes.tree` recognizes a master by its session, which it leads.
        return ProcessSpec(
            name="the master",
            argv=tuple(command),
            environment=_environment(),
            # So that it keeps no file system busy, and a reader of this process's output does not wait for its end.
            directory="/",
            stdio=(subprocess.DEVNULL, subprocess.DEVNULL, subprocess.DEVNULL),
            fds=tuple(inherited.values()),
            # Other nodes need it after the end of this launcher.
            dies_with_parent=False,
            signals_blocked=True,
        )


def _environment() -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DLROVER_RDZV_TOKEN")}
    # In its working directory it would not find a package that this process has imported from its own.
    root = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def _forward_lines(fd: int, log: Callable[[str], None]) -> None:
    """Call `log` with each line that a master reports, until it ends. It has no console of its own."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    partial = b""

    def readable() -> None:
        nonlocal partial
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, MAX_REPORT)
            *lines, partial = (partial + data).split(b"\n")
            if len(partial) > MAX_REPORT or not data:
                lines, partial = [*lines, partial], b""
            for line in filter(None, lines):
                log(line.decode(errors="replace"))
            if not data:
                loop.remove_reader(fd)
                os.close(fd)

    loop.add_reader(fd, readable)


async def _read_to_end(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    whole: asyncio.Future[bytes] = loop.create_future()
    data = bytearray()

    def readable() -> None:
        part = os.read(fd, 4096)
        data.extend(part)
        if (not part or len(data) > MAX_READY) and not whole.done():
            whole.set_result(bytes(data))

    loop.add_reader(fd, readable)
    try:
        return await whole
    finally:
        loop.remove_reader(fd)


def _parse_port(message: bytes, listen: str) -> int:
    """The port in a master's ready message. Raises MasterNotReady for any other message."""
    with contextlib.suppress(ValueError):
        answer = json.loads(message)
        if isinstance(answer, dict) and isinstance(answer.get("port"), int):
            return int(answer["port"])
        if isinstance(answer, dict) and "error" in answer:
            raise MasterNotReady(str(answer["error"]).rstrip("."), answer.get("is_user_error") is True)
    command = f"{sys.executable} -m dlrover_run.master --listen {listen}"
    raise MasterNotReady(f"it ended before it listened; `{command}` shows why")


IDLE_TIMEOUT = 15.0
"""Seconds without a node after which a launched master exits: as long as a node may take to reconnect."""

START_PAUSE = 10.0
"""Seconds from a failed start of a master to the next attempt, which will most often fail in the same way."""


class CannotLaunchMaster(Exception):
    """Only this node can start the master, and every attempt will fail; the message is a sentence."""


class MasterLauncher:
    """Ensures that a master runs at the endpoint if this node is its host. `log` prints one line to the console.

    `problem` is the reason why no master could be started; None otherwise. `lost` is as in `MasterProcess`.
    """

    def __init__(self, spec: kinds.Master, log: Callable[[str], None], lost: LostMaster | None = None) -> None:
        self._spec = spec
        self._lost = lost
        self._log = log
        self._logged: set[str] = set()
        self._not_before = 0.0
        self.pids: set[int] = set()
        self.problem: str | None = None

    async def ensure(self, endpoint: Sequence[Address]) -> None:
        """Start a master unless one listens already or another node is the host.

        Returns as soon as one listens, or with `problem` set. Raises CannotLaunchMaster.
        """
        if self._spec.is_host is False:
            return
        own = [address for address in endpoint if is_local_address(address)]
        if self._spec.is_host is None and not own:
            return
        try:
            addresses = await resolve(self._spec.bind, self._spec.port) if self._spec.bind else own
        except UnresolvedHost as unknown:
            self._fail(f"--rdzv-conf bind: {unknown}")
            return
        if not addresses:
            # A name may soon lead here; an address that is another machine's, such as that of a login node from which
            # mpirun was started, does not.
            self._fail(
                f"this node is to start the master (--rdzv-conf is_host, or it is the first of the cluster), but "
                f"{self._spec.host} is no address of this machine: run the launcher there (mpirun --hostfile), or give "
                "the address to listen on with --rdzv-conf bind=ADDRESS",
                for_good=is_ip_address(self._spec.host),
            )
            return
        error = bind_error(addresses[0])
        if any(map(_is_taken, addresses)):
            self.problem = None
        elif error is not None:
            self._fail(f"{addresses[0]} cannot be listened on ({error.strerror}): give another --rdzv-endpoint")
        elif asyncio.get_running_loop().time() >= self._not_before:
            await self._start(addresses)

    async def _start(self, addresses: Sequence[Address]) -> None:
        self._warn(addresses[0])
        error = await self._run(addresses[0])
        if error is None or any(map(_is_taken, addresses)):
            # Another agent on this host may have been faster.
            self.problem = None
            return
        self._not_before = asyncio.get_running_loop().time() + START_PAUSE
        self._fail(str(error), for_good=error.is_user_error)

    async def _run(self, address: Address) -> MasterNotReady | None:
        """Start a master and wait until it listens; return the error if it does not."""
        master = MasterProcess(self._spec, str(address), self._log, idle_timeout=IDLE_TIMEOUT, lost=self._lost)
        try:
            master.start(lambda: self.pids.discard(master.pid))
        except OSError as error:
            return MasterNotReady(f"its process could not be started: {error.strerror or error}")
        self.pids.add(master.pid)
        try:
            await master.ready()
        except MasterNotReady as error:
            return error
        return None

    def _fail(self, reason: str, *, for_good: bool = False) -> None:
        """Note why there is no master. Raises CannotLaunchMaster if that stays so `for_good`: the caller prints it, and
        may end."""
        self.problem = f"no master can be started on this node: {reason}"
        if for_good:
            raise CannotLaunchMaster(self.problem)
        self.log_once(self.problem)

    def _warn(self, address: Address) -> None:
        """Warn of an address that other nodes cannot reach, or that is open to every client."""
        host = self._spec.host
        if address.loopback and not self._spec.bind and host not in ("localhost", address.host):
            self.log_once(
                f"warning: {host} is {address.host} on this machine, which no other machine can reach; "
                "correct /etc/hosts, give the endpoint by its address, or give --rdzv-conf bind=ADDRESS"
            )
        if not address.loopback and not self._spec.token and self._spec.tls is None:
            self.log_once(
                f"warning: the master listens on {address} with neither token nor TLS, so any client that can connect "
                "can join the job; set DLROVER_RDZV_TOKEN on all nodes, or --rdzv-conf tls_ca, tls_cert and tls_key"
            )

    def log_once(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            self._log(sentence)


def _is_taken(address: Address) -> bool:
    error = bind_error(address)
    return error is not None and error.errno == errno.EADDRINUSE
