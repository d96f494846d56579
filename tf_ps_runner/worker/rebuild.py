"""Keep what a script has loaded over the versions of the cluster: training is done in a child that is forked for each.

Nothing of TensorFlow can be taken down in a living process: a server keeps its port, a session that lost its servers
keeps its threads and memory. So the process that the agent started, which has loaded the data, never uses TensorFlow.
It *keeps*: it waits beside its child, lets go of it when the agent says so, and forks the next one when there is a
version again. The child returns from `rebuild` and goes on as the script; however it ends, but for a change of the
cluster, the process that keeps ends in the same way.

Standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from tf_ps_runner.worker.channel import AGENT, TOKEN, channel, note
from tf_ps_runner.worker.leaving import EXIT_MEMBERSHIP
from tf_ps_runner.worker.task import task

Result = TypeVar("Result")

MAX_ORDER = 1 << 20
"""Bytes of one line of the agent: the variables of a task of a cluster of the largest size are less."""

AGENT_SILENT = 10.0
"""Seconds that the agent has for its first word. It gives it at once; after that, training begins without keeping."""

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
"""Signals that go on to the child, which has a process group of its own."""

ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel")
"""Devices whose state does not survive a fork."""

SETTLING_FORKS = 3
"""Trial forks before a thread counts as there to stay: libraries such as OpenBLAS end theirs at a fork, and one that
has just ended may stay listed for a moment."""

_PR_SET_PDEATHSIG = 1


def rebuild(train: Callable[[], Result]) -> Result:
    """Call `train()` anew for each version of the cluster, in a child of this process, and return what it returns.

    Only the child returns. Where nothing can be kept `train()` is called here, once: outside of `tf-ps-run`, in a
    server or an evaluator, and, with a line that says why, where this process is not fit to be forked.
    """
    mine = task()
    if mine is None or not (mine.chief or mine.worker) or _Keeper.left_behind:
        return train()
    # The line of this process is its own from here on, also after a trial fork.
    channel().claim()
    why = why_not()
    if why is not None:
        note(f"rebuild: {why}, so nothing can be kept: each version starts this script anew")
        return train()
    try:
        line = _greet()
    except OSError as error:
        note(f"rebuild: nothing can be kept, for this process has no agent that answers ({error})")
        return train()
    # What was loaded is not looked at again by the collector, which would write to each page that the child shares.
    gc.collect()
    gc.freeze()
    _Keeper(*line).keep()
    return train()


def why_not() -> str | None:
    """Why no child of this process could train, as a clause; None where nothing speaks against it."""
    if threading.current_thread() is not threading.main_thread():
        return "it was called in another thread than the main one"
    if channel().opened:
        return "training has begun in this process before"
    device = next((target for target in _open_files() if target.startswith(ACCELERATORS)), None)
    if device is not None:
        return f"the accelerator {device} is open"
    threads = _threads_that_stay()
    if threads and _tensorflow_used():
        return "TensorFlow was used before, and its threads would be missing in a child"
    return f"the thread {threads[0]} is running, which would be missing in a child" if threads else None


def _tensorflow_used() -> bool:
    """Whether TensorFlow has begun to compute here, as far as it can be told."""
    eager = sys.modules.get("tensorflow.python.eager.context")
    return bool(getattr(getattr(eager, "_context", None), "_initialized", False))


def _open_files() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


def _thread_names() -> list[str]:
    """The kernel's names of the threads beside the main one."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as name:
                names.append(name.read().strip())
    return names


def _threads_that_stay() -> list[str]:
    """The threads that are still there after trial forks, by Python's names where it knows them."""
    for _ in range(SETTLING_FORKS):
        if not _thread_names():
            return []
        child = os.fork()
        if child == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    left = _thread_names()
    known = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return (known or left) if left else []


def _greet() -> tuple[socket.socket, _Orders, _Order]:
    """Tell the agent that this process keeps; the line to it, and the first of what it tells. Raises OSError."""
    path = os.environ[AGENT]
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(AGENT_SILENT)
        line.connect("\0" + path[1:] if path.startswith("@") else path)
        hello = {"say": "hello", "token": os.environ.get(TOKEN, ""), "pid": os.getpid()}
        line.sendall(_packed(hello) + _packed({"say": "keeps"}))
        orders = _Orders(line)
        while True:
            orders.receive()
            for order in orders.take():
                if order["tell"] == "begin":
                    line.settimeout(None)
                    return line, orders, order
    except BaseException:
        line.close()
        raise


_Order = dict[str, Any]


class _Orders:
    """What the agent tells a process that keeps, line by line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._heard = b""

    def receive(self) -> None:
        """Read what is there, or wait for it. Raises ConnectionError at the end."""
        data = self._line.recv(MAX_ORDER)
        self._heard += data
        if not data or len(self._heard) > MAX_ORDER:
            raise ConnectionError("it has ended the line")

    def take(self) -> Iterator[_Order]:
        """The whole lines that were read."""
        while b"\n" in self._heard:
            text, _, self._heard = self._heard.partition(b"\n")
            order = json.loads(text)
            if isinstance(order, dict) and order.get("tell") in ("begin", "let_go"):
                yield order


class _Keeper:
    """The process that keeps: it has one child at most, that of the turn which the agent has given.

    `left_behind` is true in each child: there is one who keeps already."""

    left_behind = False

    def __init__(self, line: socket.socket, orders: _Orders, first: _Order) -> None:
        self._line = line
        self._orders = orders
        self._first = first
        self._child = 0
        self._turn = -1
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handlers: dict[signal.Signals, Any] = {}
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former_wake = -1

    def keep(self) -> None:
        """Return in each child, and never in this process."""
        self._listen_to_signals()
        if self._begin(self._first):
            return
        events = select.poll()
        events.register(self._line, select.POLLIN)
        events.register(self._woken, select.POLLIN)
        while True:
            for ready, _ in events.poll():
                if ready == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                else:
                    self._hear()
            self._collect()
            for order in self._orders.take():
                if order["tell"] == "begin":
                    if self._begin(order):
                        return
                elif order["turn"] == self._turn and self._child:
                    self._let_go()

    def _hear(self) -> None:
        try:
            self._orders.receive()
        except OSError:
            # The agent has ended, or wants nothing of us any more; in either case nobody else does.
            self._end(-signal.SIGKILL)

    def _listen_to_signals(self) -> None:
        for number in PASSED_ON:
            # One that is not Python's own, as faulthandler's, could not be given back to the child.
            if signal.getsignal(number) is not None:
                self._handlers[number] = signal.signal(number, self._pass_on)
        # With a handler, the end of a child is a byte in the pipe.
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None) or signal.SIG_DFL
        self._former_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def _pass_on(self, number: int, frame: object) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, number)
        elif number != signal.SIGCONT and self._handlers[signal.Signals(number)] is not signal.SIG_IGN:
            self._end(-number)

    def _begin(self, order: _Order) -> bool:
        """Fork the child of a turn; whether this is that child."""
        os.environ.update(order["variables"])
        self._turn = order["turn"]
        for stream in (sys.stdout, sys.stderr):
            # What is held back would be written twice.
            with contextlib.suppress(Exception):
                stream.flush()
        parent = os.getpid()
        # A signal that comes meanwhile waits until it is clear whose it is.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        child = os.fork()
        if child == 0:
            self._become_task(parent)
        else:
            # Both do it, for either may be the first to need it.
            with contextlib.suppress(OSError):
                os.setpgid(child, child)
            self._child = child
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return child == 0

    def _become_task(self, parent: int) -> None:
        """Be a process of the cluster, as one that the agent has started."""
        if self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(self._former_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._line.close()
        os.close(self._woken)
        os.close(self._wake)
        channel().inherit()
        _Keeper.left_behind = True

    def _let_go(self) -> None:
        """End the child at once. What it had started is left to the agent's sweep, as with every process that is
        killed: Python's resource tracker must outlive it for a moment, to remove what it has in /dev/shm."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        # SIGKILL takes effect when the kernel can; the agent does not wait for longer than it names.
        os.waitpid(self._child, 0)
        self._be_free(left=False)

    def _collect(self) -> None:
        """See whether the child has ended by itself."""
        if not self._child:
            return
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        if code != EXIT_MEMBERSHIP:
            self._child = 0
            self._end(code)
        self._be_free(left=True)

    def _be_free(self, left: bool) -> None:
        self._child = 0
        try:
            self._line.sendall(_packed({"say": "free", "turn": self._turn, "left": left}))
        except OSError:
            self._end(-signal.SIGKILL)

    def _end(self, code: int) -> NoReturn:
        """End as the child did, whose end was that of the script."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if code < 0:
            with contextlib.suppress(OSError, ValueError):
                # The child has left a core where one was wanted.
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
            os.kill(os.getpid(), -code)
            # Only a signal that ends nobody by default comes here.
            code = 128 - code
        os._exit(code)


def _packed(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
