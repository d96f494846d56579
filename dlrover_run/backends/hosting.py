"""A master started by the node that the endpoint names: a process of its own, which outlives that node's launcher.

Binding the address is the mutex: of several agents on the host that start a master at once, one succeeds, and the
masters of the others end. The master ends itself when the last node has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dlrover_run.descent import lifeline
from dlrover_run.spec import MasterSpec
from dlrover_run.wire.own_address import Address, Unknown, is_own, is_taken, look_up, why_not_free

IDLE_TIMEOUT = 15.0
"""Seconds without any node after which a master that we started ends: as long as a node may take to come back."""

READY_TIMEOUT = 60.0
"""Seconds for a master to start and listen, which takes 0.2 s; a cold network disk can take many over its imports.

One that has not said anything by then is killed.
"""

START_PAUSE = 10.0
"""Seconds after a master could not be started until the next try, which will most often fail in the same way."""

MAX_READY = 65_536
"""Bytes of what a master says about its start; more is not read."""

MAX_REPORT = 65_536
"""Bytes of a line that a master reports; a longer one is passed on in pieces. It has room for 4,000 nodes."""

Say = Callable[[str], None]


class Hosting:
    """Has a master at the endpoint where this node is its host. `say` prints one line for the person at the console.

    `problem` says why no master could be started, None while there is no reason to think so.
    """

    def __init__(self, spec: MasterSpec, say: Say) -> None:
        self._spec = spec
        self._say = say
        self._told: set[str] = set()
        self._not_before = 0.0
        self.pids: set[int] = set()
        self.problem: str | None = None

    async def ensure(self, endpoint: Sequence[Address]) -> None:
        """Start a master unless somebody listens already or another node is the host.

        Returns as soon as one listens, or with `problem` set.
        """
        if self._spec.is_host is False:
            return
        own = [address for address in endpoint if is_own(address)]
        if self._spec.is_host is None and not own:
            return
        try:
            places = await look_up(self._spec.bind, self._spec.port) if self._spec.bind else own
        except Unknown as unknown:
            self._fail(f"--rdzv-conf bind: {unknown}")
            return
        if not places:
            self._fail(
                f"--rdzv-conf is_host, but {self._spec.host} is no address of this machine: "
                "name the one to listen on with --rdzv-conf bind=ADDRESS"
            )
            return
        refusals = [why_not_free(place) for place in places]
        if any(error is not None and is_taken(error) for error in refusals):
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
            # Another agent on this host may have been quicker.
            self.problem = None
            return
        self._not_before = asyncio.get_running_loop().time() + START_PAUSE
        self._fail(error)

    async def _run(self, place: Address) -> str | None:
        """Start a master and wait until it listens; or why it does not."""
        with contextlib.ExitStack() as ours:
            try:
                ready, theirs = os.pipe()
                ours.callback(os.close, ready)
                with contextlib.ExitStack() as passed_on:
                    passed_on.callback(os.close, theirs)
                    token = _memory_file(self._spec.token.encode()) if self._spec.token else None
                    if token is not None:
                        passed_on.callback(os.close, token)
                    reports, report = os.pipe()
                    passed_on.callback(os.close, report)
                    _pass_on_lines(reports, self._say)
                    pid = _spawn(self._spec, place, theirs, report, token)
            except OSError as error:
                return f"its process could not be started: {error.strerror or error}"
            self.pids.add(pid)
            lifeline.watch_child(pid, lambda: self._collect(pid))
            try:
                told = await asyncio.wait_for(_read_to_end(ready), READY_TIMEOUT)
            except asyncio.TimeoutError:
                self._kill(pid)
                return f"it did not listen within {READY_TIMEOUT:g} s and was killed"
        return _problem_in(told, place)

    def _collect(self, pid: int) -> None:
        self.pids.discard(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def _kill(self, pid: int) -> None:
        # Until it has been collected the number is still its own.
        if pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _fail(self, reason: str) -> None:
        self.problem = f"no master can be started on this node: {reason}"
        self._tell(self.problem)

    def _warn(self, place: Address) -> None:
        """Say what will keep the other nodes out, or will let strangers in."""
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
    error = why_not_free(place)
    return error is not None and is_taken(error)


def _spawn(spec: MasterSpec, place: Address, ready: int, report: int, token: int | None) -> int:
    command = [sys.executable, "-m", "dlrover_run.master", "--listen", str(place)]
    command += ["--idle-timeout", f"{IDLE_TIMEOUT:g}", "--ready-fd", str(ready), "--report-fd", str(report)]
    if spec.state_dir is not None:
        command += ["--state-dir", os.path.abspath(spec.state_dir)]
    if token is not None:
        command += ["--token-fd", str(token)]
    if spec.tls is not None:
        files = {"--tls-ca": spec.tls.ca, "--tls-cert": spec.tls.cert, "--tls-key": spec.tls.key}
        for flag, path in files.items():
            command += [flag, os.path.abspath(path)] if path else []
    if spec.auth_required:
        command += ["--auth-required"]
    process = subprocess.Popen(
        command,
        env=_environment(),
        # It keeps no file system busy, and nobody who reads our output waits for its end.
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(ready, report) if token is None else (ready, report, token),
        # A session of its own is half of what tells our sweeps that this is a master (see `lineage`).
        start_new_session=True,
    )
    # It is collected through a pidfd; with a return code set, Popen does not warn that it is still running.
    process.returncode = 0
    return process.pid


def _environment() -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DLROVER_RDZV_TOKEN")}
    # From its own working directory it would not find a package that only ours leads to.
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("dlrover-run token")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pass_on_lines(fd: int, say: Say) -> None:
    """Say each line that a master reports, until it has ended. It has no other console than this node's."""
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


def _problem_in(told: bytes, place: Address) -> str | None:
    """What a master's word about its start has to say against it."""
    with contextlib.suppress(ValueError):
        answer = json.loads(told)
        if isinstance(answer, dict) and "port" in answer:
            return None
        if isinstance(answer, dict) and "error" in answer:
            return str(answer["error"]).rstrip(".")
    return f"it ended before it listened; `{sys.executable} -m dlrover_run.master --listen {place}` says why"
