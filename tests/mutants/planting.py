"""Runs tests against one mutant in a fork of this process, which has imported and collected everything before."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

from dlrover_run.processes.tree import die_with_parent
from mutants.coverage_of_tests import runs
from mutants.operators import Mutant, mutated

MAX_MEMORY = 4 << 30
"""Bytes of memory of a fork: a mutant may allocate without end."""

MIN_CPU_SECONDS, CPU_FACTOR = 3, 10
"""A test against a mutant has that many seconds of processor time, and this times what it takes without the mutant. It
is no time of the clock, so a busy machine does not end it."""

MIN_WALL_SECONDS, WALL_FACTOR = 90.0, 100
"""The same by the clock, for a mutant that waits for ever."""


class Found(NamedTuple):
    """The tests that failed, and why the last of them ended the process, if one did: "timeout" or "crash"."""

    killers: list[int]
    ended: str = ""


class Planter:
    """`functions` are the live functions by file, first line and qualified name."""

    def __init__(self, root: Path, sources: Mapping[str, str]) -> None:
        self._root, self._sources = root, sources
        for name in sources:
            # Some are imported only when they are needed, which no test may have done yet.
            importlib.import_module(name.removesuffix(".py").replace("/", "."))
        files = {str(root / name) for name in sources}
        self.functions: dict[tuple[str, int, str], list[FunctionType]] = {}
        # conftest.py has frozen what was collected, and what is frozen is not listed.
        gc.unfreeze()
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename in files:
                self.functions.setdefault(_place(each.__code__), []).append(each)
        # The objects of this process are shared with each fork as long as no collection writes to them.
        gc.collect()
        gc.freeze()

    def plant(self, mutant: Mutant) -> None:
        """Change the function in this process. Raises LookupError if no object of it lives, and ValueError or
        SyntaxError if the change is no function that could take its place."""
        path = str(self._root / mutant.module)
        module = compile(mutated(self._sources[mutant.module], mutant), path, "exec", dont_inherit=True)
        # Of a property and its setter, which have one name, the last was changed.
        code = [code for code in _codes(module) if code.co_qualname == mutant.function][-1]
        targets = self.functions.get(_place(code))
        if not targets:
            raise LookupError(mutant.function)
        for target in targets:
            target.__code__ = code

    def run(
        self, mutant: Mutant, tests: Sequence[int], items: Sequence[pytest.Item], seconds: Sequence[float], enough: int
    ) -> Found | None:
        """Run the tests until `enough` have failed. None: the mutant cannot be planted."""

        def body(tell: Callable[[str], None]) -> None:
            try:
                self.plant(mutant)
            except (LookupError, ValueError, SyntaxError):
                tell("i 0")
                return
            killers = 0
            for test in tests:
                tell(f"r {test}")
                spent = time.process_time()
                limit = int(spent + MIN_CPU_SECONDS + CPU_FACTOR * seconds[test]) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
                if not runs(items[test]):
                    tell(f"k {test}")
                    killers += 1
                    if killers >= enough:
                        break
            tell("e 0")

        killers: list[int] = []
        running, wall = tests[0], MIN_WALL_SECONDS
        with _fork(body) as (pid, lines):
            while True:
                line = lines(wall)
                if not line:
                    break
                kind, number = line.split()
                match kind:
                    case "r":
                        running = int(number)
                        wall = MIN_WALL_SECONDS + WALL_FACTOR * seconds[running]
                    case "k":
                        killers.append(int(number))
                    case "e":
                        return Found(killers)
                    case "i":
                        return None
            ended = "timeout" if line is None or _was_slow(pid) else "crash"
        return Found([*killers, running], ended)


def in_a_fork(work: Callable[[], None]) -> None:
    """Do something in a fork, which leaves this process as it is. Raises RuntimeError if it fails."""

    def body(tell: Callable[[str], None]) -> None:
        work()
        tell("e 0")

    with _fork(body, memory=resource.RLIM_INFINITY) as (_, lines):
        if not lines(None):
            raise RuntimeError("the tests could not be measured: see above")


@contextlib.contextmanager
def _fork(
    body: Callable[[Callable[[str], None]], None], memory: int = MAX_MEMORY
) -> Iterator[tuple[int, Callable[[float | None], str | None]]]:
    """A fork that runs `body` in a session of its own. At the end of the context all processes of it are killed.
    Gives its pid, and what reads one line of it: empty at its end, None after a timeout in seconds."""
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(parent)
            os.setsid()
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if memory != resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
                nothing = os.open(os.devnull, os.O_RDWR)
                for standard in range(3):
                    os.dup2(nothing, standard)
            body(lambda line: void(os.write(write, f"{line}\n".encode())))
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(code)
    os.close(write)
    buffer = bytearray()

    def line(timeout: float | None) -> str | None:
        while b"\n" not in buffer:
            if not select.select([read], [], [], timeout)[0]:
                return None
            data = os.read(read, 4096)
            if not data:
                return ""
            buffer.extend(data)
        first, _, rest = bytes(buffer).partition(b"\n")
        buffer[:] = rest
        return first.decode()

    try:
        yield pid, line
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def void(_: object) -> None:
    """Drop a result."""


def _was_slow(pid: int) -> bool:
    """Whether the kernel has ended the fork for its processor time. Its pipe is closed a moment before it has ended; a
    mutant that closes the pipe and lives on is ended later."""
    watched = os.pidfd_open(pid)
    select.select([watched], [], [], MIN_WALL_SECONDS)
    os.close(watched)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is not None and ended.si_status == signal.SIGXCPU


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
