"""The agent's side of `--start-method=forkserver`: start a template, have workers forked from it, let it learn.

A template is a fresh interpreter of the user's that imports what the workers import; `dlrover_run/workers/template` is
what runs in it. The agent must be the child subreaper before it asks for the first worker: each worker becomes its
child, to be watched through a pidfd and reaped as one that it started itself. Nothing here blocks the event loop;
requests are answered in order, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dlrover_run import linux
from dlrover_run.background import Background, TimeLimit
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.processes import event_loop, signals
from dlrover_run.processes.process import ProcessSpec
from dlrover_run.processes.unix_sockets import messages

PREPARE_TIMEOUT = 300.0
"""Seconds for the template to start and import; a cold network disk can take minutes over torch."""

LEARN_TIMEOUT = 300.0
"""Seconds for importing what the last generation imported, twice: once as a trial."""

FORK_TIMEOUT = 60.0
"""Seconds for one fork, which takes about 20 ms; more means that the machine has no memory left to copy page tables."""

CLOSE_TIMEOUT = 1.0
"""Seconds for the template to end by itself; being killed then costs nothing."""

MAX_ANSWER = 65_536

TEMPLATE_FOLDER = Path(__file__).resolve().parent / "template"

BOOT = """\
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
package = type(sys)("_dlrover_template")
package.__path__ = [sys.argv[1]]
sys.modules["_dlrover_template"] = package
from _dlrover_template.serve import serve
worker = serve(int(sys.argv[2]), int(sys.argv[3]))
with globals().pop("worker") as run:
    globals().pop("run")()
"""
"""What the template's interpreter is given with `-c`.

It goes past `serve` only in workers, whose program then runs at the top of the stack, in the true `__main__`, so that
the interpreter itself ends them. The worker and the program are popped because no name of ours may be left in
`__main__`.
"""

ProgramKind = Literal["script", "module", "run_path"]

_CONF_VARIABLES = ("MALLOC_CONF", "JE_MALLOC_CONF", "JE_ARROW_MALLOC_CONF", "_RJEM_MALLOC_CONF")
"""The variables that copies of jemalloc read: its own, with its usual prefix, pyarrow's, and that of Rust (polars)."""

_NO_THREAD = "background_thread:false"


class TemplateError(Exception):
    """The template cannot be used, any more or for this request; the message is one sentence."""


class UnsafeToFork(TemplateError):
    """The template imported something that makes a fork unsafe or different from a fresh interpreter. `module` is what
    another template may leave out, empty if that does not help."""

    def __init__(self, reason: str, module: str = "") -> None:
        super().__init__(reason)
        self.module = module


class Imported(msgspec.Struct, frozen=True):
    """What the template imported, and one sentence for each module that it had to skip."""

    imported: tuple[str, ...]
    skipped: tuple[str, ...]


class ImportedFiles(msgspec.Struct, frozen=True):
    """Files of modules: `own` are the user's, which the last recorded worker has imported, `missing` those in which the
    modules would be that it has not found, and `kept` those of installed modules, which the template has imported."""

    own: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Template:
    """A running template. Make one with `start`, then `prepare` it; `closed` is done when its process has ended."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        # The caller raises the error of an exchange. One of a caller that was cancelled needs no report: it is the
        # answer to a question that has been dropped, and the next exchange has an answer of its own.
        self._background = Background(lambda error: None)
        self._answer: asyncio.Future[bytes] | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(control.fileno(), self._readable)
        event_loop.watch_child(process.pid, self._ended)

    @property
    def pid(self) -> int:
        """The template's process."""
        return self._process.pid

    @classmethod
    def start(cls, python: str, env: Mapping[str, str], cwd: str) -> Template:
        """Start a template, which forks nothing before `prepare`.

        `env` is what all workers have in common, so that libraries read it while they are imported. What imports print
        goes to standard error, once. No allocator runs a thread in it. Raises TemplateError when it could not be
        started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        arguments = [str(TEMPLATE_FOLDER), str(theirs.fileno()), str(os.getpid())]
        try:
            with signals.held_back():
                process = subprocess.Popen(
                    [python, "-u", "-c", BOOT, *arguments],
                    env=without_threads(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    stderr=2,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise TemplateError(f"the template {python} could not be started: {error.strerror or error}") from error
        finally:
            theirs.close()
        return cls(process, ours)

    async def prepare(
        self,
        preload: Sequence[str],
        program: tuple[ProgramKind, str] | None = None,
        ours: Sequence[str] = (),
        leave_out: Sequence[str] = (),
    ) -> Imported:
        """Have it import `preload` and what `program` (kind, target) imports while it starts: installed modules, and
        what lies in the directories `ours`, except the modules `leave_out`, which the workers import.

        Raises UnsafeToFork when its workers would not be sound, TemplateError when it ended. It is of no use then.
        """
        kind, target = program or (None, "")
        request = {
            "op": "prepare",
            "preload": list(preload),
            "kind": kind,
            "target": target,
            "ours": list(ours),
            "leave_out": list(leave_out),
        }
        try:
            return _imported(await self._request(request, (), PREPARE_TIMEOUT))
        except BaseException:
            await self._kill()
            raise

    async def fork(
        self,
        spec: ProcessSpec,
        program: tuple[ProgramKind, str],
        cwd: str,
        start_code: str | None = None,
        until: Awaitable[object] | None = None,
        watch: bool = False,
    ) -> int:
        """Fork a process that runs `program` (kind, target) with `spec.args`, and return its pid: it becomes a child of
        the agent. It begins when `until` is done, and never if the caller is cancelled.

        `ps` shows `spec.argv`. Before its program, it calls the function `begin` of the file `start_code`. With `watch`
        a process that records its imports does so until its end, for `files`.
        """
        request = fork_request(spec, program, cwd, start_code) | {"watch": watch}
        # The descriptors belong to the caller, which may close them after it is cancelled.
        given = [os.dup(fd) for fd in spec.stdio]
        reader, go = os.pipe()
        given.append(reader)
        try:
            pid = int((await self._request(request, given, FORK_TIMEOUT))["pid"])
            if until is not None:
                await until
            # A worker whose template died before it reported the fork is unknown here and never gets this byte.
            with contextlib.suppress(BrokenPipeError):
                os.write(go, b"g")
            return pid
        finally:
            os.close(go)

    async def fork_ahead(self, spec: ProcessSpec, cwd: str, local_rank: int, device: bool) -> tuple[int, socket.socket]:
        """Fork a process that waits to become a worker, as `workers/ahead.py` has it: its pid, and our end of its
        socket. It begins when it gets a byte. `spec` is a worker's, whose environment has nothing of a round."""
        request = {
            "op": "ahead",
            "env": dict(spec.environment),
            "cwd": cwd,
            "affinity": _affinity(spec),
            "local_rank": local_rank,
            "device": device,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            return int((await self._request(request, [theirs.detach()], FORK_TIMEOUT))["pid"]), ours
        except BaseException:
            # A process that was forked nevertheless ends by that.
            ours.close()
            raise

    async def learn(self, goes_on: bool = False) -> Imported:
        """Import what the recording workers imported since the last call, without what would make a fork unsafe. With
        `goes_on` the one that was forked last goes on recording."""
        return _imported(await self._request({"op": "learn", "goes_on": goes_on}, (), LEARN_TIMEOUT))

    async def files(self) -> ImportedFiles:
        """The files of the modules that the last process with `watch` and the template have imported."""
        with open(linux.memfd_create("dlrover-run files"), "rb") as answer:
            await self._request({"op": "files"}, [os.dup(answer.fileno())], FORK_TIMEOUT)
            answer.seek(0)
            return msgspec.json.decode(answer.read(), type=ImportedFiles)

    async def close(self) -> None:
        """End the template; its workers go on."""
        self._close_control()
        await asyncio.wait([self.closed], timeout=CLOSE_TIMEOUT)
        await self._kill()

    async def _kill(self) -> None:
        if not self.closed.done():
            self._process.kill()
        await asyncio.wait([self.closed])

    async def _request(self, request: Mapping[str, Any], fds: Sequence[int], timeout: float) -> dict[str, Any]:
        """Send a request with `fds`, which are closed afterwards, and return the answer.

        A caller that is cancelled does not cancel the request: the template answers it all the same, and the next
        request would take that answer for its own.
        """
        exchange = self._background.start(self._exchange(request, fds, timeout))

        def finished(exchange: asyncio.Future[dict[str, Any]]) -> None:
            for fd in fds:
                os.close(fd)

        exchange.add_done_callback(finished)
        return await asyncio.shield(exchange)

    async def _exchange(self, request: Mapping[str, Any], fds: Sequence[int], timeout: float) -> dict[str, Any]:
        async with self._turn:
            if self.closed.done() or self._control.fileno() < 0:
                raise TemplateError(self._how_it_ended())
            self._answer = self._loop.create_future()
            try:
                send_request(self._control, request, fds)
                async with TimeLimit(timeout):
                    answer: dict[str, Any] = json.loads(await self._answer)
            except TimeoutError:
                self._process.kill()
                raise TemplateError(f"the template did not answer within {timeout:g} seconds and was killed") from None
            except (BrokenPipeError, ConnectionResetError):
                await asyncio.wait([self.closed])
                raise TemplateError(self._how_it_ended()) from None
            finally:
                self._answer = None
        if "unsafe" in answer:
            raise UnsafeToFork(answer["unsafe"], answer.get("module", ""))
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer

    def _readable(self) -> None:
        # The end of the process, which follows the last one, is what fails a waiting request.
        for packet in messages(self._control, MAX_ANSWER):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(packet)

    def _ended(self) -> None:
        self._process.poll()
        # An answer that was sent just before the end still counts.
        if self._control.fileno() >= 0:
            self._readable()
        self._close_control()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TemplateError(self._how_it_ended()))
        self.closed.set_result(None)

    def _close_control(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        return f"the template {'was closed' if code is None else describe_exit_code(code)}"


def fork_request(
    spec: ProcessSpec, program: tuple[ProgramKind, str], cwd: str, start_code: str | None
) -> dict[str, Any]:
    """What a process gets that is to run `program` (kind, target) as a worker."""
    kind, target = program
    return {
        "op": "fork",
        "argv_title": spec.argv,
        "kind": kind,
        "target": target,
        "args": spec.args,
        "env": dict(spec.environment),
        "cwd": cwd,
        "affinity": _affinity(spec),
        "record": spec.record_imports,
        "start_code": start_code,
    }


def send_request(line: socket.socket, request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Send a request with descriptors, which stay the caller's."""
    with open(linux.memfd_create("dlrover-run request"), "wb") as body:
        body.write(json.dumps(request).encode())
        body.flush()
        # One request is under way at a time, so a packet of one byte always finds room.
        socket.send_fds(line, [b"r"], [body.fileno(), *fds])


def _affinity(spec: ProcessSpec) -> list[int] | None:
    return None if spec.cpus is None else sorted(spec.cpus)


def _imported(answer: Mapping[str, Any]) -> Imported:
    return Imported(tuple(answer["imported"]), tuple(answer["skipped"]))


def without_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a template, in which no jemalloc starts a thread, which would forbid a fork. Other settings
    are kept: of two settings of one option the last counts.

    jemalloc may return memory in a thread of its own, which no fork has: pyarrow asks for that thread when it is
    imported, and so do pandas, scikit-learn and datasets, which import pyarrow. jemalloc turns the thread off in every
    child that is forked, so a worker of a template loses nothing if the template never had it.
    """
    own = {name: ",".join(filter(None, [environment.get(name), _NO_THREAD])) for name in _CONF_VARIABLES}
    return {**environment, **own}
