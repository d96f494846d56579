"""The template's loop: handle the agent's requests in order, and fork.

`serve` returns only in a worker, at the top of the interpreter's stack, so that the script runs and ends as in any
interpreter. A worker is forked twice: the intermediate process ends at once, so the worker becomes a child of the
agent, and the template's death does not affect it.

A request is one packet whose first descriptor is a memory file with JSON, so its size is practically unlimited. A reply
is one packet of JSON.

A process that is forked ahead of its round (`ahead`) becomes a worker in the same way, when the agent sends it what
another one would be forked with.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Any

from . import ahead, fork_blockers, process_title
from .import_scan import ImportRoots, can_preload, find_import_roots, scan_imports
from .importer import OURS, PATH_MARK, ImportLog, ImportRecorder, Preloader, import_modules, nothing_collected
from .source_files import SourceFiles
from .termination_signals import TERMINATION_SIGNALS
from .worker import (
    EXIT_ABANDONED,
    EXIT_NOT_STARTED,
    TemplateState,
    Worker,
    apply_env_delta,
    die_with_parent,
    env_delta,
    set_environment,
)

MAX_ANSWER = 60_000
"""Maximum bytes of a reply; lists in it are shortened to fit."""

MAX_DESCRIPTORS = 5
"""The request, and for a worker its three streams and the pipe through which the agent lets it begin; for a process
that is forked ahead, its socket."""

MAX_TRIAL_IMPORTS = 3
"""Trial imports of learned modules in a throwaway child; after each one the module that forbids a fork is left out."""


class Unsafe(Exception):
    """The template must not be forked; the text is the reason. `module` is the one whose import has made it so, empty
    if that is none that could be left out."""

    def __init__(self, reason: str, module: str = "") -> None:
        super().__init__(reason)
        self.module = module


class Server:
    """The template's state between requests."""

    def __init__(
        self, control: socket.socket, agent: int, boot_code: CodeType, handlers: dict[int, Any] | None = None
    ) -> None:
        self._handlers = handlers or {}
        self._control = control
        self._agent = agent
        self._template = TemplateState(boot_code)
        self._startup = [name for name in sys.modules if not name.startswith(OURS)]
        self._libc = ctypes.CDLL(None)
        self._search_path = list(sys.path)
        self._preloader: Preloader
        self._logs: list[ImportLog] = []
        self._recorded: dict[str, None] = {}
        self._device_variable = ""
        self._considered: set[str] = set()
        self._watched: ImportLog | None = None
        self._files = SourceFiles()
        self._unfit: set[str] = set()
        self._learns = True
        self._program: tuple[str | None, str] = (None, "")
        self._worker_path: list[str] = []
        self._finders: list[Any] = []
        self._where = ImportRoots()
        self.unsafe: str | None = None

    def answer(self, request: dict[str, Any], received: Sequence[int]) -> dict[str, Any] | Worker:
        """Handle a request; returns a Worker if this process has become one."""
        if request["op"] == "prepare":
            return self._prepare(request)
        if self.unsafe is not None:
            raise Unsafe(self.unsafe)
        if request["op"] == "files":
            return self._write_files(received[1])
        return self._learn(request) if request["op"] == "learn" else self._fork(request, received)

    def _write_files(self, target: int) -> dict[str, Any]:
        """Write the files that the last recorded worker and this template have imported into a file, as JSON: they may
        be more than one packet."""
        recorded = [] if self._watched is None else self._watched.names()
        found = self._files.find(recorded, self._program, self._worker_path, self._where, self._finders)
        with open(target, "wb", closefd=False) as file:
            file.write(json.dumps(found).encode())
        return {}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        kind, target, directory = request["kind"], request["target"], None
        self._program = (kind, target)
        if kind in ("module", "run_path") and not self._template.safe_path:
            directory = os.getcwd()
        elif kind == "script" and not self._template.safe_path:
            directory = os.path.abspath(target) if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
        stdlib = os.path.dirname(os.__file__)
        self._where = find_import_roots(self._search_path, directory, stdlib, request.get("ours", ()))
        self._preloader = preloader = Preloader(self._where, self._search_path, self._startup)
        self._worker_path = [directory, *self._search_path] if directory is not None else self._search_path
        self._finders = [f for f in preloader.gate.finders if not type(f).__module__.startswith("_distutils_hack")]
        names, notes = list(request["preload"]), list[str]()
        if kind is not None:
            scan = scan_imports(kind, target, self._where, self._worker_path, self._finders)
            names += [name for name in scan.names if name not in names]
            self._device_variable = scan.device_variable
            if scan.stopped_at is not None:
                self._learns = False
                notes.append(f"what is imported after {scan.stopped_at}, which changes os.environ or sys.path")
        self._unfit = set(request.get("leave_out", ()))
        # Such as a library of LD_PRELOAD that runs a thread: no import is to blame.
        if (reason := fork_blockers.fork_blocker({self._control.fileno()})) is not None:
            self.unsafe = f"before any import {reason}"
            raise Unsafe(self.unsafe)
        notes += [f"{name}: a fork after its import is not safe" for name in names if self._is_unfit(name)]
        names = [name for name in names if not self._is_unfit(name)]
        wanted = [name for name in names if self._can_preload(name.partition(":")[0])]
        answer = self._import(wanted)
        notes += [f"{name}: no installed module has this name" for name in names if name not in wanted]
        return {**answer, "skipped": notes + answer["skipped"]}

    def _import(self, names: Sequence[str]) -> dict[str, Any]:
        preloader = self._preloader
        ours = {self._control.fileno()}
        with nothing_collected():
            imported, skipped, reason, module = import_modules(
                preloader.load, names, lambda: fork_blockers.fork_blocker_between_imports(ours)
            )
        skipped += [f"{name}: it is not an installed module" for name in preloader.drop_unshared()]
        if reason is None:
            reason, module = preloader.find_shadowed_import(), ""
        if reason is None:
            reason, module = fork_blockers.fork_blocker(ours), ""
        if reason is not None:
            module = module.partition(":")[0]
            self.unsafe = f"after `import {module}` {reason}" if module else reason
            fork_blockers.end_children()
            raise Unsafe(self.unsafe, module)
        # Objects that the garbage collector never touches stay on pages that all workers share. The little garbage
        # among them is not worth a collection, for which the start of the workers would wait.
        gc.freeze()
        return {"imported": imported, "skipped": skipped}

    def _learn(self, request: dict[str, Any]) -> dict[str, Any]:
        self._read_logs()
        # One worker records at a time; the last log may be that of one that runs.
        kept = self._logs[-1:] if request["goes_on"] else []
        for log in self._logs:
            if log not in kept and log is not self._watched:
                log.finish()
        self._logs = kept
        # Each name once: what could not be imported then cannot be now, and a restart may wait for this.
        names = [name for name in self._recorded if name not in self._considered]
        self._considered.update(names)
        names = [
            name for name in names if name not in sys.modules and not self._is_unfit(name) and self._can_preload(name)
        ]
        notes: list[str] = []
        for _ in range(MAX_TRIAL_IMPORTS):
            if not names:
                break
            reason, module = self._trial_import(names)
            if reason is None:
                answer = self._import(names)
                return {**answer, "skipped": notes + answer["skipped"]}
            notes.append(f"{module or names[0]}: {reason}")
            self._unfit.add(module)
            names = [name for name in names if module and name != module and not name.startswith(module + ".")]
        self._considered.difference_update(names)
        return {"imported": [], "skipped": notes}

    def _read_logs(self) -> None:
        if self._learns:
            names = (name for log in self._logs for name in log.names())
            self._recorded.update(dict.fromkeys(name for name in names if not name.startswith(PATH_MARK)))
        if any(log.device_changed for log in self._logs):
            self._device_variable = self._device_variable or "a variable of the device"

    def _is_unfit(self, name: str) -> bool:
        module = name.partition(":")[0]
        return any(module == unfit or module.startswith(f"{unfit}.") for unfit in self._unfit)

    def _can_preload(self, name: str) -> bool:
        return can_preload(name, self._where, self._worker_path, self._finders)

    def _trial_import(self, names: Sequence[str]) -> tuple[str | None, str]:
        """Import in a throwaway child; returns the reason why the template must not, and the module that causes it."""
        preloader = self._preloader
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        template = os.getpid()
        self._libc.fflush(None)
        child = os.fork()
        if child == 0:
            try:
                die_with_parent(template)
                quiet = os.open(os.devnull, os.O_RDWR)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                os.close(reader)
                ours = {self._control.fileno(), quiet, writer}

                def find_blocker() -> str | None:
                    return preloader.find_shadowed_import() or fork_blockers.fork_blocker_between_imports(ours)

                _, _, reason, module = import_modules(preloader.load, names, find_blocker)
                if reason is None:
                    reason = fork_blockers.fork_blocker(ours)
                fork_blockers.end_children()
                os.write(writer, json.dumps([reason, module]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        # Processes that the child started may hold the pipe open, so its end is not waited for.
        try:
            result = os.read(reader, 4096)
        except BlockingIOError:
            result = b""
        os.close(reader)
        if not result:
            return "the interpreter died during a trial import", ""
        reason, module = json.loads(result)
        return reason, module

    def _fork(self, request: dict[str, Any], received: Sequence[int]) -> dict[str, Any] | Worker:
        ours = {self._control.fileno(), *received}
        reason = fork_blockers.quick_fork_blocker(ours)
        if reason is not None:
            self.unsafe = reason
            raise Unsafe(reason)
        is_ahead = request["op"] == "ahead"
        records = not is_ahead and request["record"]
        watched = records and request.get("watch", False)
        log = ImportLog() if records else None
        pid_reader, pid_writer = os.pipe()
        # The content of C's output buffers would otherwise be printed by every worker.
        self._libc.fflush(None)
        # The template ignores signals. A signal for the worker stays pending until the worker handles signals itself.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)
        try:
            middle = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        if middle == 0:
            try:
                worker = os.fork()
            except OSError:
                os._exit(1)
            if worker:
                os.write(pid_writer, str(worker).encode())
                os._exit(0)
            os.close(pid_writer)
            try:
                os.close(pid_reader)
                if is_ahead:
                    return self._ahead(request, received, mask)
                return self._worker(request, log, received, mask)
            except BaseException as error:
                # This process must never return into the template's loop.
                os.write(2, f"dlrover-run: a forked worker could not start: {error}\n".encode(errors="replace"))
                os._exit(EXIT_NOT_STARTED)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(pid_writer)
        pid = os.read(pid_reader, 32)
        os.close(pid_reader)
        os.waitpid(middle, 0)
        if not pid:
            raise OSError("the fork failed: the limit on processes or memory is reached")
        if log is not None:
            self._logs.append(log)
        if watched:
            self._watched = log
        # The intermediate process has ended, so the worker is now a child of the agent, which lets it begin.
        return {"pid": int(pid)}

    def _worker(
        self,
        request: dict[str, Any],
        log: ImportLog | None,
        received: Sequence[int],
        mask: set[int | signal.Signals],
    ) -> Worker:
        if os.read(received[-1], 1) != b"g":
            os._exit(EXIT_ABANDONED)
        self._begin_process(mask)
        recorder = ImportRecorder(log, request["env"], request.get("watch", False)) if log is not None else None
        return self._become(request, received[1:4], [*received, self._control.detach()], recorder)

    def _begin_process(self, mask: set[int | signal.Signals]) -> None:
        """Handle signals as a new interpreter, in a session of its own that ends with the agent."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        die_with_parent(self._agent)

    def _become(
        self, command: dict[str, Any], streams: Sequence[int], ours: Sequence[int], recorder: ImportRecorder | None
    ) -> Worker:
        worker = Worker(self._template, command, streams, ours, recorder)
        worker.initialize(self._preloader.worker_path(), self._preloader.worker_finders(), self._where.own)
        return worker

    def _ahead(self, request: dict[str, Any], received: Sequence[int], mask: set[int | signal.Signals]) -> Worker:
        """Prepare this process, wait, and return the worker that it becomes."""
        self._control.close()
        line = ahead.AgentLine(received[1])
        os.close(received[0])
        line.wait()
        self._begin_process(mask)
        ahead.close_streams()
        os.chdir(request["cwd"])
        if request["affinity"] is not None:
            os.sched_setaffinity(0, request["affinity"])
        set_environment(apply_env_delta(request["env"], env_delta(self._template.environment, os.environ)))
        self._template.environment = request["env"]
        process_title.set_process_title((ahead.TITLE,), request["env"])
        line.send(_packed(self._prepare_ahead(request)))
        self._libc.fflush(None)
        command, fds = line.command()
        return self._become(command, fds[1:4], [*fds, line.detach()], None)

    def _prepare_ahead(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import what the recording workers have imported, also what would make a fork unsafe, and open the device."""
        self._read_logs()
        names = [name for name in self._recorded if name not in sys.modules and self._can_preload(name)]
        with nothing_collected():
            imported, _, _, _ = import_modules(self._preloader.load, names, lambda: None)
        self._preloader.drop_unshared()
        if (reason := self._preloader.find_shadowed_import()) is not None:
            return {"unfit": reason}
        if request["device"] and self._device_variable:
            # It may set it later, when a device that is open does not follow it.
            return {"imported": imported, "device": f"the script names {self._device_variable}"}
        return {"imported": imported, "device": ahead.open_device(request["local_rank"]) if request["device"] else ""}


def serve(control_fd: int, agent: int) -> Worker:
    """Serve until the agent closes the socket, which ends the process; returns only in workers."""
    die_with_parent(agent)
    # The agent started this process with signals blocked. Signals are for the launcher and for workers.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in TERMINATION_SIGNALS}
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    control = socket.socket(fileno=control_fd)
    server = Server(control, agent, sys._getframe(1).f_code, handlers)
    while True:
        try:
            packet, received, _, _ = socket.recv_fds(control, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            packet = b""
        if not packet:
            os._exit(0)
        try:
            answer = server.answer(ahead.read_request(received[0]), received)
        except Unsafe as unsafe:
            answer = {"unsafe": str(unsafe), "module": unsafe.module}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
            answer = {"error": text}
        if isinstance(answer, Worker):
            return answer
        for fd in received:
            os.close(fd)
        # The agent may have closed the socket meanwhile; the next receive reports that.
        with contextlib.suppress(ConnectionError):
            control.send(_packed(answer))


def _packed(answer: dict[str, Any]) -> bytes:
    """The reply as JSON, with its lists halved until it fits into one packet."""
    while len(packed := json.dumps(answer).encode()) > MAX_ANSWER:
        for key, value in answer.items():
            answer[key] = value[: len(value) // 2] if isinstance(value, (list, str)) else value
    return packed
