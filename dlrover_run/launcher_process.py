"""A launcher in a process of its own, for a Python program: started, told of signals, and asked for its verdict.

A caller's process may hold threads, devices and children that a launcher in it could neither fork safely nor tell from
its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dlrover_run.agent.result import JobResult
from dlrover_run.command_line import credentials
from dlrover_run.launch_request import LaunchRequest, command
from dlrover_run.memory_file import memory_file
from dlrover_run.spec import JobSpec


@dataclass(frozen=True)
class LauncherEnd:
    """How the launcher ended: its exit code as `subprocess` has it, and its verdict, None when it left none.

    `stopped_by` is the first signal that this process got meanwhile and passed on.
    """

    code: int
    verdict: JobResult | None
    stopped_by: signal.Signals | None


def run_launcher(spec: JobSpec) -> LauncherEnd:
    """Run one job with a launcher of its own, and wait for its end."""
    verdict_read, verdict_write = os.pipe()
    # The launcher reads the end of this pipe when this process is gone, however it went.
    parent_pipe_read, parent_pipe_write = os.pipe()
    request = LaunchRequest(spec=spec, parent_pipe=parent_pipe_read, verdict=verdict_write)
    inherited = [parent_pipe_read, verdict_write]
    if spec.entrypoint.payload_fd >= 0:
        inherited.append(spec.entrypoint.payload_fd)
    try:
        with (
            memory_file(msgspec.json.encode(request)) as request_fd,
            _Forwarding((*spec.signals, *spec.forward_signals)) as forwarding,
        ):
            launcher = subprocess.Popen(
                command(request_fd),
                pass_fds=[request_fd, *inherited],
                env={name: value for name, value in os.environ.items() if name not in credentials.VARIABLES},
                # In our process group a Ctrl-C would reach it twice: from the terminal and from us.
                start_new_session=True,
            )
            forwarding.to(launcher)
            os.close(verdict_write)
            verdict_write = -1
            with open(verdict_read, "rb", closefd=False) as stream:
                answer = stream.read()
            code = launcher.wait()
    finally:
        for fd in (verdict_read, verdict_write, parent_pipe_read, parent_pipe_write):
            if fd >= 0:
                os.close(fd)
    verdict = msgspec.json.decode(answer, type=JobResult) if answer else None
    return LauncherEnd(code, verdict, forwarding.seen)


class _Forwarding:
    """Passes the signals that would end this process on to the launcher while it runs, and remembers the first.

    One that this process ignores, as after nohup, stays ignored, here and in the launcher that inherits this. Only a
    main thread may set handlers; a launch from another thread leaves them alone.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._previous: dict[signal.Signals, Any] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self.seen: signal.Signals | None = None

    def __enter__(self) -> _Forwarding:
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def to(self, launcher: subprocess.Popen[bytes]) -> None:
        """Name the process that gets the signals; one that came before is passed on now."""
        self._launcher = launcher
        if self.seen is not None:
            launcher.send_signal(self.seen)

    def _take(self, number: int, frame: object) -> None:
        self.seen = self.seen or signal.Signals(number)
        if self._launcher is not None:
            self._launcher.send_signal(number)
