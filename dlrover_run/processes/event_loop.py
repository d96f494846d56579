"""The event loop of the launcher's processes: it handles signals, ends quietly, and learns of the end of a process: a
child through its pidfd, or SIGCHLD where the kernel gives no pidfds, any other process through a pipe.

A *parent-death pipe* is a pipe whose writing end only one process holds. The kernel closes it when that process ends,
also by SIGKILL, and the reader sees the end of file.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from dlrover_run import linux
from dlrover_run.processes import tree

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new event loop in the main thread and return its result, as `asyncio.run` does.

    Turns the garbage collector on, which `__main__` has turned off for the imports before.
    """
    # What was imported stays: a collection need not look at it, and does not copy pages that a child shares.
    gc.freeze()
    gc.enable()
    # Not debug: PYTHONDEVMODE and PYTHONASYNCIODEBUG are meant for the workers, and would have asyncio write of the
    # launcher's own slow callbacks to the console.
    with asyncio.Runner(loop_factory=_EventLoop, debug=False) as runner:
        return runner.run(main)


class _EventLoop(asyncio.SelectorEventLoop):
    """Python writes the number of each signal to a pipe of the loop, the wakeup descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self._children: dict[int, Callable[[], None]] = {}
        self._on_child_signal: Callable[[], object] | None = None

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        if sig == signal.SIGCHLD:
            self._on_child_signal = functools.partial(callback, *args)
            super().add_signal_handler(sig, self._handle_child_signal)
        else:
            super().add_signal_handler(sig, callback, *args)
        # Many children that end at once fill the pipe. A further SIGCHLD is then lost, but the ones in the pipe have
        # the same meaning, and the end of a worker is also reported by its pidfd. So no warning is printed.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)

    def watch_child_by_signal(self, pid: int, on_end: Callable[[], None]) -> None:
        """As `watch_child`, by SIGCHLD."""
        self._children[pid] = on_end
        if self._on_child_signal is None:
            self.add_signal_handler(signal.SIGCHLD, lambda: None)
        # It may have ended before the handler was set.
        self.call_soon(self._report_ended_children)

    def _handle_child_signal(self) -> None:
        # Before the handler reaps orphans: the kernel shows one ended child at a time.
        self._report_ended_children()
        if self._on_child_signal is not None:
            self._on_child_signal()

    def _report_ended_children(self) -> None:
        # One signal may stand for many children.
        for pid in [pid for pid in self._children if tree.has_ended(pid)]:
            if on_end := self._children.pop(pid, None):
                on_end()

    def close(self) -> None:
        # asyncio closes the pipe first and only then removes the handlers. A signal between the two (the end of a
        # child, for example) would be written to a closed descriptor, and Python prints a traceback for that, or to
        # another file that has got the same number.
        signal.set_wakeup_fd(-1)
        super().close()


def watch_pipe(fd: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once when every holder of the other end of this pipe has ended."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        loop.remove_reader(fd)
        on_end()

    loop.add_reader(fd, readable)


def watch_child(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once when this child has ended.

    `on_end` has to collect the exit status. Until then the pid stays the child's, so signals cannot reach another
    process.
    """
    loop = asyncio.get_running_loop()
    if not linux.has_pidfd() and isinstance(loop, _EventLoop):
        loop.watch_child_by_signal(pid, on_end)
        return
    pidfd = linux.pidfd_open(pid)

    def ended() -> None:
        os.close(pidfd)
        on_end()

    # A pidfd becomes readable when its process ends.
    watch_pipe(pidfd, ended)
