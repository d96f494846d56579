"""Launches a master as a child process on the node that the endpoint names. It outlives that node's launcher.

Binding the address is the mutex: if several agents on the host start a master at once, one succeeds and the masters of
the others exit. The master exits by itself when the last node has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dlrover_run.launch_request import memory_file
from dlrover_run.spec import MasterSpec
from dlrover_run.supervisor.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.transport.addresses import Address, UnresolvedHost, bind_error, is_in_use, is_local_address, resolve

READY_TIMEOUT = 60.0
"""Seconds for a master to start and listen. That takes 0.2 s; imports from a cold network disk can take many seconds.

A master that is not ready by then is killed.
"""

MAX_READY = 65_536
"""Bytes of a master's ready message; more is not read."""

MAX_REPORT = 65_536
"""Bytes of a line that a master reports; a longer one is passed on in pieces. Enough for 4,000 nodes."""

Say = Callable[[str], None]


class MasterNotReady(Exception):
    """A master could not be started; the message is a clause that says why. `is_user_error`: its command line
    is why, such as a state directory that cannot be made, so that another attempt fails in the same way."""

    def __init__(self, reason: str, is_user_error: bool = False) -> None:
        super().__init__(reason)
        self.is_user_error = is_user_error


class MasterProcess:
    """A master that listens at `listen` (HOST:PORT) with what `spec` says of token, TLS and journal.

    `say` is called with each line that it reports. It exits after `idle_timeout` seconds without a node; with `bound`
    also as soon as this process has ended, however that happens.
    """

    pid: int

    def __init__(
        self, spec: MasterSpec, listen: str, say: Say, *, idle_timeout: float | None = None, bound: bool = False
    ) -> None:
        self._spec = spec
        self._listen = listen
        self._say = say
        self._idle_timeout = idle_timeout
        self._bound = bound
        self._parent_pipe = -1
        self._ready = -1
        self._process: ManagedProcess[ProcessSpec] | None = None

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the process; `on_end` is called once when it has ended. Raises OSError when it cannot be started."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as kept:

            def pipe() -> tuple[int, int]:
                """Our reading end and the child's end, which is closed here once the child has it."""
                ours, theirs = os.pipe()
                kept.callback(os.close, ours)
                passed_on.callback(os.close, theirs)
                return ours, theirs

            ready, theirs = pipe()
            reports, report = pipe()
            inherited = {"--ready-fd": theirs, "--report-fd": report}
            if self._spec.token:
                inherited["--token-fd"] = passed_on.enter_context(memory_file(self._spec.token.encode()))
            if self._bound:
                inherited["--parent-pipe-fd"], self._parent_pipe = os.pipe()
                passed_on.callback(os.close, inherited["--parent-pipe-fd"])
                kept.callback(os.close, self._parent_pipe)
            spec = self._process_spec(inherited)
            self.pid = spawn(spec)
            kept.pop_all()
        self._ready = ready
        _pass_on_lines(reports, self._say)
        self._process = ManagedProcess(self.pid, spec, lambda _: self._note_end(on_end))

    async def ready(self) -> int:
        """Wait until it listens; return its port. Raises MasterNotReady."""
        try:
            told = await asyncio.wait_for(_read_to_end(self._ready), READY_TIMEOUT)
        except TimeoutError:
            self.kill()
            raise MasterNotReady(f"it did not listen within {READY_TIMEOUT:g} s and was killed") from None
        finally:
            os.close(self._ready)
        return _port_in(told, self._listen)

    def end(self) -> None:
        """End a master that is `bound`, as the end of this process would."""
        if self._parent_pipe >= 0:
            os.close(self._parent_pipe)
            self._parent_pipe = -1

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _note_end(self, on_end: Callable[[], None]) -> None:
        self.end()
        on_end()

    def _process_spec(self, inherited: dict[str, int]) -> ProcessSpec:
        command = [sys.executable, "-m", "dlrover_run.master", "--listen", self._listen]
        if self._idle_timeout is not None:
            command += ["--idle-timeout", f"{self._idle_timeout:g}"]
        for flag, fd in inherited.items():
            command += [flag, str(fd)]
        if self._spec.state_dir is not None:
            command += ["--state-dir", os.path.abspath(self._spec.state_dir)]
        if self._spec.tls is not None:
            files = {"--tls-ca": self._spec.tls.ca, "--tls-cert": self._spec.tls.cert, "--tls-key": self._spec.tls.key}
            for flag, path in files.items():
                command += [flag, os.path.abspath(path)] if path else []
        if self._spec.auth_required:
            command += ["--auth-required"]
        # It leads a session of its own, by which `process_tree.tree` recognizes a master.
        return ProcessSpec(
            name="the master",
            argv=tuple(command),
            environment=_environment(),
            # It keeps no file system in use, and a reader of this process's output does not wait for its end.
            directory="/",
            stdio=(subprocess.DEVNULL, subprocess.DEVNULL, subprocess.DEVNULL),
            fds=tuple(inherited.values()),
            # Other nodes need it after this launcher has ended.
            dies_with_parent=False,
            signals_blocked=True,
        )


def _environment() -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DLROVER_RDZV_TOKEN")}
    # In its own working directory it would not find a package that was imported from ours.
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def _pass_on_lines(fd: int, say: Say) -> None:
    """Call `say` with each line that a master reports, until it has ended. It has no console of its own."""
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
                say(line.decode(errors="replace"))
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


def _port_in(told: bytes, listen: str) -> int:
    """The port in a master's ready message. Raises MasterNotReady for any other message."""
    with contextlib.suppress(ValueError):
        answer = json.loads(told)
        if isinstance(answer, dict) and isinstance(answer.get("port"), int):
            return int(answer["port"])
        if isinstance(answer, dict) and "error" in answer:
            raise MasterNotReady(str(answer["error"]).rstrip("."), answer.get("is_user_error") is True)
    said_by = f"`{sys.executable} -m dlrover_run.master --listen {listen}` says why"
    raise MasterNotReady(f"it ended before it listened; {said_by}")


IDLE_TIMEOUT = 15.0
"""Seconds without any node after which a master that we started exits: as long as a node may take to come back."""

START_PAUSE = 10.0
"""Seconds after a master could not be started until the next try, which will most often fail in the same way."""


class CannotLaunchMaster(Exception):
    """Only this node can start the master, and every attempt will fail; the message is a sentence."""


class MasterLauncher:
    """Ensures that a master runs at the endpoint if this node is its host. `say` prints one line to the console.

    `problem` says why no master could be started; None otherwise.
    """

    def __init__(self, spec: MasterSpec, say: Say) -> None:
        self._spec = spec
        self._say = say
        self._told: set[str] = set()
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
            places = await resolve(self._spec.bind, self._spec.port) if self._spec.bind else own
        except UnresolvedHost as unknown:
            self._fail(f"--rdzv-conf bind: {unknown}")
            return
        if not places:
            self._fail(
                f"--rdzv-conf is_host, but {self._spec.host} is no address of this machine: "
                "name the one to listen on with --rdzv-conf bind=ADDRESS"
            )
            return
        refusals = [bind_error(place) for place in places]
        if any(error is not None and is_in_use(error) for error in refusals):
            self.problem = None
        elif refusals[0] is not None:
            self._fail(f"{places[0]} cannot be listened on ({refusals[0].strerror}): name another --rdzv-endpoint")
        elif asyncio.get_running_loop().time() >= self._not_before:
            await self._start(places)

    async def _start(self, places: Sequence[Address]) -> None:
        place = places[0]
        self._warn(place)
        error = await self._run(place)
        if error is None or any(_taken(place) for place in places):
            # Another agent on this host may have been faster.
            self.problem = None
            return
        self._not_before = asyncio.get_running_loop().time() + START_PAUSE
        self._fail(str(error))
        if error.is_user_error:
            assert self.problem is not None, "it was just set"
            raise CannotLaunchMaster(self.problem)

    async def _run(self, place: Address) -> MasterNotReady | None:
        """Start a master and wait until it listens; return why it does not."""
        master = MasterProcess(self._spec, str(place), self._say, idle_timeout=IDLE_TIMEOUT)
        try:
            master.start(lambda: self._collect(master))
        except OSError as error:
            return MasterNotReady(f"its process could not be started: {error.strerror or error}")
        self.pids.add(master.pid)
        try:
            await master.ready()
        except MasterNotReady as why:
            return why
        return None

    def _collect(self, master: MasterProcess) -> None:
        self.pids.discard(master.pid)

    def _fail(self, reason: str) -> None:
        self.problem = f"no master can be started on this node: {reason}"
        self._tell(self.problem)

    def _warn(self, place: Address) -> None:
        """Warn of an address that other nodes cannot reach, or that is open to every client."""
        where = self._spec.host
        if place.loopback and not self._spec.bind and where not in ("localhost", place.host):
            self._tell(
                f"warning: {where} stands for {place.host} on this machine, which no other machine can reach; "
                "correct /etc/hosts, name the endpoint by its address, or give --rdzv-conf bind=ADDRESS"
            )
        if not place.loopback and not self._spec.token and self._spec.tls is None:
            self._tell(
                f"warning: the master listens on {place} with neither token nor TLS, so whoever reaches that port can "
                "take part in the job; set DLROVER_RDZV_TOKEN on all nodes, or --rdzv-conf tls_ca, tls_cert and tls_key"
            )

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)


def _taken(place: Address) -> bool:
    error = bind_error(place)
    return error is not None and is_in_use(error)
