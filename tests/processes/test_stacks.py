"""The stacks of real processes are read from outside in any state, and no read changes them."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.harness import only_long, until

from dlrover_run.job_status.stacks import MissingStacks, StackProblem
from dlrover_run.stacks import lines, read
from dlrover_run.stacks.layouts import Lines
from dlrover_run.stacks.read import Reading, RoundStacks, read_process_stacks
from dlrover_run.stacks.reader import NoPython, StackReader
from dlrover_run.stacks.stack import Stack
from dlrover_run.stacks.wait import Wait, read_wait
from dlrover_run.stacks.worker_stacks import node_stacks

WAIT = 60


def _runs(python: str | None) -> bool:
    return python is not None and not subprocess.run([python, "-c", ""], capture_output=True).returncode


OTHERS = [found for minor in range(9, 15) if _runs(found := shutil.which(f"python3.{minor}")) and found is not None]
PYTHONS = [sys.executable, *(one for one in OTHERS if Path(one).resolve() != Path(sys.executable).resolve())]
"""This interpreter, and what else is on the machine."""


@contextmanager
def worker(tmp_path: Path, script: str, python: str = sys.executable) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a script, which prints a line when it has started."""
    (tmp_path / "train.py").write_text(script)
    with subprocess.Popen([python, "-u", "train.py"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            yield process
        finally:
            process.kill()


def stack_of(pid: int, function: str, *, main: bool = False) -> Stack:
    """The stack of a process as soon as it is in that function."""

    def find() -> Stack | None:
        (found,) = read_process_stacks(pid, main=main).stacks
        return found if any(frame.function == function for frame in found.main) else None

    return until(find, "the script has not reached its wait")


SCRIPTS = {
    "sleeps": "import time\nprint('begun')\ndef wait():\n    time.sleep(1000)\nwait()",
    "spins": "print('begun')\ndef wait():\n    while True: pass\nwait()",
    "spins in C": "import re\nprint('begun')\ndef wait():\n    re.match('(a+)+$', 'a' * 60 + 'b')\nwait()",
    "has more threads than are read": (
        "import threading, time\nthreads = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in "
        "range(150)]\nfor one in threads: one.start()\nprint('begun')\ndef wait(): threads[0].join()\nwait()"
    ),
    "waits for a lock": (
        "import threading\nprint('begun'); lock = threading.Lock(); lock.acquire()\ndef wait(): lock.acquire()\nwait()"
    ),
    "blocks all signals": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nprint('begun')\n"
        "def wait(): time.sleep(1000)\nwait()"
    ),
    "is in a generator": (
        "import time\nprint('begun')\ndef wait():\n    time.sleep(1000)\n    yield\ndef outer(): yield from wait()\n"
        "sum(outer())"
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_the_stack_of_a_process_that(what: str, tmp_path: Path) -> None:
    with worker(tmp_path, SCRIPTS[what]) as process:
        found = stack_of(process.pid, "wait")
        assert found.user_line is not None
        assert (Path(found.user_line.file).name, found.user_line.function) == ("train.py", "wait")
        assert found.main[-1].function == "<module>"
        assert process.poll() is None


LAID_OUT = """
import threading, time
def wörk(n):
    if n:
        return wörk(
            n - 1)
    print('begun', flush=True)
    def inner(): time.sleep(
        1000)
    inner()
def wait():
    threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
class Model:
    def __init__(self): list(map(lambda _: wörk(1), [1]))
def batches():
    yield Model()
next(batches())
"""


@pytest.mark.parametrize("python", PYTHONS)
def test_files_lines_and_functions_of_each_version_of_python(python: str, tmp_path: Path) -> None:
    with worker(tmp_path, LAID_OUT, python) as process:
        found = stack_of(process.pid, "inner")
        calls = [(Path(one.file).name, one.line, one.function) for one in found.main]
        assert calls == [
            ("train.py", 8, "inner"),
            ("train.py", 10, "wörk"),
            ("train.py", 5, "wörk"),
            ("train.py", 15, "<lambda>"),
            ("train.py", 15, "__init__"),
            ("train.py", 17, "batches"),
            ("train.py", 18, "<module>"),
        ]
        (other, _) = found.threads
        assert ("train.py", 12, "wait") in [(Path(one.file).name, one.line, one.function) for one in other.frames]


BUSY = """
import threading, time
def words(n): return n if n == 0 else words(n - 1) + sum(i for i in range(3)) + len([str(i) for i in range(3)])
def compute():
    while True: words(30)
def begin():
    while True:
        thread = threading.Thread(target=words, args=(5,)); thread.start(); thread.join()
for each in (compute, begin): threading.Thread(target=each, daemon=True).start()
print('begun', flush=True)
compute()
"""


@pytest.mark.parametrize(
    ("python", "count"), [*((one, 500) for one in PYTHONS), *only_long(*((p, 10_000) for p in PYTHONS))]
)
def test_no_read_ends_a_process_whose_threads_compute(python: str, count: int, tmp_path: Path) -> None:
    """`faulthandler`, which runs in the process, ends it after some tens of stacks (python/cpython#140815)."""
    with worker(tmp_path, BUSY, python) as process:
        reader = StackReader(process.pid)
        whole = 0
        for _ in range(count):
            found = reader.read()
            whole += bool(found.main) and found.main[-1].function == "<module>"
        reader.close()
        assert process.poll() is None
        assert whole > 0.5 * count, "a stack is seldom torn"
    assert process.returncode == -signal.SIGKILL, "that of this test"


def test_the_stack_of_the_main_thread_alone(tmp_path: Path) -> None:
    with worker(tmp_path, SCRIPTS["has more threads than are read"]) as process:
        assert len(stack_of(process.pid, "wait").threads) == 100
        (thread,) = stack_of(process.pid, "wait", main=True).threads
        assert thread.frames[-1].function == "<module>"


def test_a_worker_that_hangs_while_the_interpreter_ends_has_a_stack(tmp_path: Path) -> None:
    script = (
        "import queue, threading\nthreading.Thread(target=queue.Queue().get, name='uploader').start()\nprint('begun')"
    )
    with worker(tmp_path, script) as process:
        assert stack_of(process.pid, "_shutdown").main


def test_a_process_that_became_another_program_has_none(tmp_path: Path) -> None:
    script = "import os\nos.execvp('sh', ['sh', '-c', 'echo begun; exec sleep 100'])"
    with worker(tmp_path, script) as process:
        assert read_process_stacks(process.pid).problem is StackProblem.NO_PYTHON
        assert process.poll() is None
        with pytest.raises(NoPython):
            StackReader(process.pid)


def test_a_fork_has_stacks_of_its_own(tmp_path: Path) -> None:
    script = (
        "import os, threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "def wait(): time.sleep(1000)\npid = os.fork()\nif not pid: wait()\nprint('begun')\nprint(pid)\n"
        "time.sleep(1000)"
    )
    with worker(tmp_path, script) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        (thread,) = stack_of(child, "wait").threads
        assert thread.frames[-1].function == "<module>"
        subprocess.run(["kill", "-9", str(child)], check=True)


def test_the_workers_of_a_round(tmp_path: Path) -> None:
    denied: list[bool] = []
    with worker(tmp_path, SCRIPTS["spins"]) as process:
        stacks = RoundStacks(lambda: {5: process.pid}, lambda: denied.append(True))
        found = asyncio.run(stacks.read([4, 5], main=True, times=10, enough=lambda found: len(found) == 3))
        assert (list(found), len(found[5])) == ([5], 3)
    assert not denied


def test_without_the_right_to_read_it_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(pid: int) -> StackReader:
        raise PermissionError

    denied: list[bool] = []
    monkeypatch.setattr(read, "StackReader", refuse)
    with worker(tmp_path, SCRIPTS["sleeps"]) as process:
        stacks = RoundStacks(lambda: {5: process.pid}, lambda: denied.append(True))
        for _ in range(2):
            assert asyncio.run(stacks.read([5])) == {}
        assert denied == [True]
        found = asyncio.run(node_stacks({5: process.pid}))
        assert found.missing == (MissingStacks(StackProblem.NOT_PERMITTED, (5,)),)


def test_a_read_that_the_kernel_holds_up_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def wait(pid: int, **_: object) -> Reading:
        begun.append(pid)
        time.sleep(3 if pid == 1 else 0)
        return Reading(state="S")

    monkeypatch.setattr(read, "read_process_stacks", wait)
    monkeypatch.setattr(read, "STACKS_TIMEOUT", 0.2)

    async def scenario() -> None:
        for _ in range(2):
            found = await read.read_stacks({1: 1, 2: 2})
            assert found == {1: Reading(problem=StackProblem.NO_ANSWER), 2: Reading(state="S")}

    asyncio.run(scenario())
    assert begun == [1, 2, 2], "one thread waits, not one for each request"


def test_a_node_answers_for_each_of_its_workers(tmp_path: Path) -> None:
    with worker(tmp_path, SCRIPTS["sleeps"]) as process, subprocess.Popen(["sleep", "100"]) as other:
        stack_of(process.pid, "wait")
        found = asyncio.run(node_stacks({4: process.pid, "ps-0": other.pid}))
        assert [stack.workers for stack in found.stacks] == [(4,)]
        assert [frame.function for frame in found.stacks[0].frames] == ["wait", "<module>"]
        assert found.missing == (MissingStacks(StackProblem.NO_PYTHON, ("ps-0",)),)

        process.send_signal(signal.SIGSTOP)
        until(lambda: asyncio.run(node_stacks({4: process.pid})).missing, "the process has not stopped")
        found = asyncio.run(node_stacks({4: process.pid}))
        assert found.missing == (MissingStacks(StackProblem.STOPPED, (4,)),)
        assert [stack.workers for stack in found.stacks] == [(4,)], "where it was stopped"
        other.kill()
        other.wait()
        assert asyncio.run(node_stacks({"ps-0": other.pid})).missing == (MissingStacks(StackProblem.ENDED, ("ps-0",)),)


@pytest.mark.parametrize("kind", Lines)
@pytest.mark.parametrize("table", [b"", b"\xff" * 40, bytes(range(256)), b"\x7f" * 9])
def test_a_table_of_lines_that_changes_while_it_is_read_gives_a_number(kind: Lines, table: bytes) -> None:
    for position in (0, 2, 4000):
        assert isinstance(lines.line_of(kind, table, 7, position), int)


@pytest.mark.parametrize("code", [f.__code__ for f in (stack_of, worker, test_the_workers_of_a_round)])
def test_the_lines_of_instructions_are_those_of_python(code: object) -> None:
    assert hasattr(code, "co_positions")
    for number, (line, *_) in enumerate(code.co_positions()):
        found = lines.line_of(Lines.LOCATIONS, code.co_linetable, code.co_firstlineno, 2 * number)  # type: ignore[attr-defined]
        assert found == (line or 0)


HOLDS = "print('begun')\ndef wait():\n    while True: pass\nwait()"
COMPUTES = (
    "import hashlib\nprint('begun')\ndef wait(steps):\n    for step in range(steps):\n"
    "        hashlib.pbkdf2_hmac('sha256', b'x', b'y', {turns})\nwait({steps})"
)


def looks(pid: int, count: int = 20) -> list[Stack]:
    """Stacks of a process that has reached its wait."""
    stack_of(pid, "wait")
    return list(read_process_stacks(pid, times=count).stacks)


@pytest.mark.parametrize("python", PYTHONS)
def test_who_runs_python_holds_the_lock_of_the_interpreter(python: str, tmp_path: Path) -> None:
    is_known = not python.endswith("python3.9")
    for script, holds in (
        (HOLDS, True),
        (SCRIPTS["sleeps"], False),
        (COMPUTES.format(turns=2**31 - 1, steps=1), False),
    ):
        with worker(tmp_path, script, python) as process:
            assert {one.holds_lock for one in looks(process.pid)} == {holds if is_known else None}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_variables_show_that_a_loop_goes_on_at_one_line(python: str, tmp_path: Path) -> None:
    is_known = not python.endswith(("python3.9", "python3.10"))
    with worker(tmp_path, COMPUTES.format(turns=2**31 - 1, steps=1), python) as process:
        found = {one.variables for one in looks(process.pid)}
        assert len(found) == 1
        assert (found != {0}) == is_known
    with worker(tmp_path, COMPUTES.format(turns=1000, steps=10**9), python) as process:
        end = time.monotonic() + WAIT
        while is_known and len({one.variables for one in looks(process.pid)} - {0}) < 3:
            assert time.monotonic() < end, "no variable has changed"


def test_how_long_a_worker_sleeps(tmp_path: Path) -> None:
    with worker(tmp_path, SCRIPTS["sleeps"]) as process:
        stack_of(process.pid, "wait")
        end = time.monotonic() + WAIT
        while (sleeps := read_wait(process.pid).sleeps) is None:
            assert time.monotonic() < end, "it does not sleep"
        assert 900 < sleeps <= 1000
    with worker(tmp_path, SCRIPTS["waits for a lock"]) as process:
        stack_of(process.pid, "wait")
        assert read_wait(process.pid) == Wait()
    assert read_wait(process.pid) == Wait(), "it has ended"


def test_a_process_that_has_an_accelerator_open(tmp_path: Path) -> None:
    fds = tmp_path / "7/fd"
    fds.mkdir(parents=True)
    (fds / "0").symlink_to("/dev/null")
    assert not read_wait(7, str(tmp_path)).has_device
    (fds / "1").symlink_to("/dev/nvidia0")
    assert read_wait(7, str(tmp_path)).has_device
