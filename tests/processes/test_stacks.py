"""Real processes write their stacks in any state; a process that would die of the request gets none."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlrover_run.agent.worker_stacks import AskedWorker, node_stacks
from dlrover_run.coordination.stacks import MissingStacks, NodeStacks, StackProblem
from dlrover_run.stall import register
from dlrover_run.stall.ask import RoundStacks, StackFiles
from dlrover_run.stall.stacks import Stack

WAIT = 60
BEGIN = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("register", {register.__file__!r})
register = importlib.util.module_from_spec(spec)
spec.loader.exec_module(register)
"""


@contextmanager
def worker(files: StackFiles, tmp_path: Path, script: str, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that registers and runs a script; the script prints a line when it has started."""
    (tmp_path / "train.py").write_text(script)
    start = f"{BEGIN}{before}\nregister.install({files.path(0)!r})\nimport runpy\nrunpy.run_path('train.py')"
    with subprocess.Popen([sys.executable, "-uc", start], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def files() -> Iterator[StackFiles]:
    opened = StackFiles(1)
    yield opened
    opened.close()


def ask(files: StackFiles, pid: int, *, main: bool = False) -> Stack:
    stacks = RoundStacks(files, {5: (0, pid)})
    before = stacks.dumped(5)
    assert stacks.request(5, main=main)
    end = time.monotonic() + WAIT
    while (found := stacks.answer(5)) is None:
        assert time.monotonic() < end, "the process has written no stack"
        time.sleep(0.01)
    assert stacks.dumped(5) > before
    return found


SCRIPTS = {
    "sleeps": "import time\nprint('begun')\ndef wait():\n    time.sleep(1000)\nwait()",
    "spins": "print('begun')\ndef wait():\n    while True: pass\nwait()",
    "spins in C": "import re\nprint('begun')\ndef wait():\n    re.match('(a+)+$', 'a' * 60 + 'b')\nwait()",
    "has more threads than are written": (
        "import threading, time\nthreads = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in "
        "range(150)]\nfor one in threads: one.start()\nprint('begun')\ndef wait(): threads[0].join()\nwait()"
    ),
    "waits for a lock": (
        "import threading\nprint('begun'); lock = threading.Lock(); lock.acquire()\ndef wait(): lock.acquire()\nwait()"
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_the_stack_of_a_process_that(what: str, files: StackFiles, tmp_path: Path) -> None:
    with worker(files, tmp_path, SCRIPTS[what]) as process:
        end = time.monotonic() + WAIT
        while (line := ask(files, process.pid).user_line) is None or line.function != "wait":
            assert time.monotonic() < end, "the script has not reached its wait"
        assert Path(line.file).name == "train.py"
        assert process.poll() is None


def test_the_stack_of_the_main_thread_alone(files: StackFiles, tmp_path: Path) -> None:
    with worker(files, tmp_path, SCRIPTS["has more threads than are written"]) as process:
        ask(files, process.pid)
        (thread,) = ask(files, process.pid, main=True).threads
        assert thread.frames[-1].function == "<module>"


def test_a_process_that_became_another_program_gets_no_request(files: StackFiles, tmp_path: Path) -> None:
    script = "import os\nos.execvp('sh', ['sh', '-c', 'echo begun; exec sleep 100'])"
    with worker(files, tmp_path, script) as process:
        assert not files.request(0, process.pid)
        assert process.poll() is None


def test_a_process_that_has_closed_the_file_gets_no_request(files: StackFiles, tmp_path: Path) -> None:
    script = "import os, time\nos.closerange(3, 4096)\nprint('begun')\ntime.sleep(1000)"
    with worker(files, tmp_path, script) as process:
        assert not files.request(0, process.pid)


def test_a_signal_with_a_handler_is_not_replaced(files: StackFiles, tmp_path: Path) -> None:
    first = signal.SIGRTMAX - register.FIRST_SIGNAL
    taken = f"import signal\nsignal.signal({first}, signal.SIG_IGN)"
    script = (
        f"import signal, time\nprint('begun')\nassert signal.getsignal({first}) == signal.SIG_IGN\ntime.sleep(1000)"
    )
    with worker(files, tmp_path, script, taken) as process:
        assert ask(files, process.pid).main


def test_a_process_that_has_not_started_gets_no_request(files: StackFiles) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        assert not files.request(0, process.pid)
        process.kill()
    assert files.answer(0) is None


def test_a_request_stands_until_it_is_answered(files: StackFiles, tmp_path: Path) -> None:
    with worker(files, tmp_path, SCRIPTS["sleeps"]) as process:
        process.send_signal(signal.SIGSTOP)
        for _ in range(3):
            assert files.request(0, process.pid)
        assert files.answer(0) is None
        process.send_signal(signal.SIGCONT)
        end = time.monotonic() + WAIT
        while files.answer(0) is None:
            assert time.monotonic() < end, "the process has written no stack"
            time.sleep(0.01)
        written = files.dumped(0)
        assert ask(files, process.pid).main
        # Three requests wrote as much as the one after them.
        assert files.dumped(0) < 3 * written


def test_a_node_answers_for_each_of_its_workers(files: StackFiles, tmp_path: Path) -> None:
    with worker(files, tmp_path, SCRIPTS["sleeps"]) as process, subprocess.Popen(["sleep", "100"]) as other:
        asked = [AskedWorker(4, process.pid, files), AskedWorker(5, other.pid, None)]
        end = time.monotonic() + WAIT
        while True:
            found = asyncio.run(node_stacks(asked))
            assert [stack.workers for stack in found.stacks] == [(4,)]
            if "wait" in [frame.function for frame in found.stacks[0].frames]:
                break
            assert time.monotonic() < end, "the script has not reached its wait"
        assert found.missing == (MissingStacks(StackProblem.NOT_REGISTERED, (5,)),)

        process.send_signal(signal.SIGSTOP)
        found = asyncio.run(node_stacks(asked[:1]))
        assert found == NodeStacks((), (MissingStacks(StackProblem.STOPPED, (4,)),))
        other.kill()
    assert asyncio.run(node_stacks(asked[1:])).missing == (MissingStacks(StackProblem.ENDED, (5,)),)
