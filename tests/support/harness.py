"""Shared by the tests of whole launches: running a launcher, and receiving messages of workers without polling."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

WAIT = 240.0
"""Timeout in seconds for events that take at most a few seconds; it expires only because of a defect."""

Found = TypeVar("Found")

WORKERS = Path(__file__).parents[1] / "workers"


def only_long(*values: object) -> list[Any]:
    """Return values of a test parameter that only `make test-long` uses."""
    return [
        pytest.param(*value, marks=pytest.mark.long)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.long)
        for value in values
    ]


@dataclass(frozen=True)
class Launcher:
    """A command that starts workers. A test branches on `name` where the two differ on purpose."""

    name: str
    command: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        return self.name == "dlrover-run"

    def is_older_than(self, *version: int) -> bool:
        """Whether this is a torchrun of an earlier version, which lacks what came later."""
        installed = metadata.version("torch").split(".")[: len(version)]
        return not self.is_ours and tuple(map(int, installed)) < version


OURS = Launcher("dlrover-run", (sys.executable, "-m", "dlrover_run"))
TORCHRUN = Launcher("torchrun", (sys.executable, "-m", "torch.distributed.run"))


@dataclass(frozen=True)
class Finished:
    """A launch that has ended."""

    code: int
    out: str
    err: str


def environment(extra: dict[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment without variables for launchers, updated with `extra` (None removes)."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PET_", "TORCHELASTIC_")) and key not in ("OMP_NUM_THREADS", "PYTHON_EXEC")
    }
    for key, value in (extra or {}).items():
        if value is None:
            clean.pop(key, None)
        else:
            clean[key] = value
    return clean


def start(
    launcher: Launcher,
    args: Sequence[str | Path],
    *,
    cwd: Path,
    env: dict[str, str | None] | None = None,
    **popen: Any,
) -> subprocess.Popen[str]:
    """Start a launch in the background, with pipes for its output."""
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "stdin": subprocess.DEVNULL,
        **popen,
    }
    # torchrun leaves a directory in TMPDIR after each run; pytest removes it if that is the directory of the test.
    variables = environment({"TMPDIR": str(cwd), **(env or {})})
    command = [*launcher.command, *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, env=variables, text=True, errors="replace", **options)


def finish(process: subprocess.Popen[str], timeout: float = WAIT) -> Finished:
    """Wait for the end of a launch. If it does not end in time, it is killed, and the test fails."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the launch did not end within {timeout} s\n--- out\n{out}\n--- err\n{err}") from None
    return Finished(process.returncode, out or "", err or "")


def run(
    launcher: Launcher,
    args: Sequence[str | Path],
    *,
    cwd: Path,
    env: dict[str, str | None] | None = None,
    **popen: Any,
) -> Finished:
    """Run a launch to its end."""
    return finish(start(launcher, args, cwd=cwd, env=env, **popen))


def status_of(launcher: Launcher, job: str) -> dict[str, Any]:
    """Return what `status --json` shows of a job; empty while no agent of the job answers."""
    command = [*launcher.command, "status", "--json", f"--rdzv-id={job}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=WAIT, check=False)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


class Mailbox:
    """A socket to which workers send one JSON object at a time (see `workers/post.py`)."""

    def __init__(self, directory: Path) -> None:
        # The path of a Unix socket has at most 107 bytes, which pytest's directories may exceed; an abstract name has
        # no path.
        self.name = f"dlrover-test-{os.getpid()}-{os.urandom(4).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.directory = directory

    def receive(self, timeout: float = WAIT) -> dict[str, Any]:
        """Return the next message. Raises AssertionError if none arrives."""
        if not select.select([self._socket], [], [], timeout)[0]:
            raise AssertionError(f"no worker reported within {timeout} s")
        message: dict[str, Any] = json.loads(self._socket.recv(1 << 20))
        return message

    def gather(self, count: int, timeout: float = WAIT) -> list[dict[str, Any]]:
        """Return the next `count` messages, in the order of (restart, rank)."""
        deadline = time.monotonic() + timeout
        messages = [self.receive(max(0.0, deadline - time.monotonic())) for _ in range(count)]
        return sorted(messages, key=lambda m: (m.get("restart", 0), m.get("rank", 0)))

    def pending(self) -> list[dict[str, Any]]:
        """Return all messages that have arrived and were not received."""
        messages = []
        while select.select([self._socket], [], [], 0)[0]:
            messages.append(json.loads(self._socket.recv(1 << 20)))
        return messages

    def script(self, name: str, body: str) -> Path:
        """Write a worker script that imports `sys`, `post` and `wait_for_signals` before its `body`."""
        path = self.directory / name
        head = f"import sys; sys.path.insert(0, {str(WORKERS)!r})\nfrom post import post, wait_for_signals\n"
        path.write_text(f"{head}{body}")
        return path

    def close(self) -> None:
        self._socket.close()


def launch(
    mailbox: Mailbox,
    *args: str | Path,
    launcher: Launcher = OURS,
    env: dict[str, str | None] | None = None,
    **popen: Any,
) -> subprocess.Popen[str]:
    """Start a launch in the mailbox's directory whose workers post to it."""
    return start(launcher, args, cwd=mailbox.directory, env={"TEST_MAILBOX": mailbox.name, **(env or {})}, **popen)


def is_agent(process: psutil.Process) -> bool:
    """Whether this is a running agent, of either program."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith(("dlrover-agent", "tf-ps-agent"))
    return False


def agent_of(watchdog: subprocess.Popen[str]) -> psutil.Process:
    """Return the agent of a running launch."""
    return next(filter(is_agent, psutil.Process(watchdog.pid).children()))


def until(
    find: Callable[[], Found | None],
    what: str | Callable[[], str] = "this was never reached",
    timeout: float = WAIT,
    interval: float = 0.02,
) -> Found:
    """Poll until `find` returns something true, and return it: for what neither the kernel nor a process reports.

    `what` is the message of the failure, or returns it.
    """
    deadline = time.monotonic() + timeout
    while not (found := find()):
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(interval)
    return found


def child_named(parent: psutil.Process, name: str) -> psutil.Process:
    """Return the child of `parent` that calls itself `name`: a process may be seen before it has its name."""

    def find() -> psutil.Process | None:
        for child in parent.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    return until(find, lambda: f"process {parent.pid} has no child {name}: {parent.children()}")


def open_descriptors() -> set[tuple[int, str]]:
    """Return the descriptors of this process with what each is of, for a test that shows which of them are new.

    Only what is new shows something: descriptors of earlier tests are closed whenever the garbage collector finds them.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The one with which the folder was listed is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def calls_of(act: Callable[[], object]) -> int:
    """Return how many functions `act` calls: a measure of work that does not depend on the load of the machine."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


@contextlib.contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Return pidfds of running processes, so a reused pid cannot be mistaken for one of them."""
    fds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def still_alive(pidfds: Sequence[int], timeout: float) -> int:
    """Return how many of the processes of `pidfds` are still running after at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    left = set(pidfds)
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for fd, _ in ended:
            poll.unregister(fd)
            left.discard(fd)
        if not ended:
            break
    return len(left)


def kill_leftovers(pidfds: Sequence[int]) -> None:
    """Kill the processes that a failed test would leave behind."""
    for fd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
