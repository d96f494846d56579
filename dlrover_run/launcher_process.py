"""Runs a launcher in a separate process for a Python program, forwards signals to it, and reads its result.

The process of the caller may hold threads, devices and children. A launcher in it could neither fork safely nor
distinguish these children from its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlrover_run.agent.result import JobResult
from dlrover_run.command_line import credentials
from dlrover_run.launch_request import LaunchRequest, command, decode, encode, memory_file
from dlrover_run.processes import signals, unshared
from dlrover_run.spec import JobSpec


@dataclass(frozen=True)
class LauncherEnd:
    """The end of a launcher process: its exit code as in `subprocess`, and its result, None if it wrote none.

    `stopped_by` is the first signal that this process received and forwarded meanwhile.
    """

    code: int
    result: JobResult | None
    stopped_by: signal.Signals | None


def run_launcher(spec: JobSpec) -> LauncherEnd:
    """Run one job in a launcher process and wait for its end."""
    result_read, result_write = unshared.make_pipe()
    # The launcher reads the end of this pipe when this process ends in any way.
    parent_pipe_read, parent_pipe_write = unshared.make_pipe()
    request = LaunchRequest(spec=spec, parent_pipe=parent_pipe_read, result_fd=result_write)
    inherited = [parent_pipe_read, result_write]
    if spec.entrypoint.payload_fd >= 0:
        inherited.append(spec.entrypoint.payload_fd)
    try:
        with (
            memory_file(encode(request)) as request_fd,
            _Forwarding(spec.handled_signals) as forwarding,
        ):
            launcher = subprocess.Popen(
                command(request_fd),
                pass_fds=[request_fd, *inherited],
                env={name: value for name, value in os.environ.items() if name not in credentials.VARIABLES},
                # In this process group a Ctrl-C would reach it twice: from the terminal and from this process.
                start_new_session=True,
            )
            forwarding.to(launcher)
            unshared.close(result_write)
            result_write = -1
            with open(result_read, "rb", closefd=False) as stream:
                answer = stream.read()
            code = launcher.wait()
    finally:
        for fd in (result_read, result_write, parent_pipe_read, parent_pipe_write):
            if fd >= 0:
                unshared.close(fd)
    result = decode(answer, JobResult) if answer else None
    return LauncherEnd(code, result, forwarding.seen)


class _Forwarding:
    """Forwards the signals that would end this process to the launcher while it runs, and records the first one.

    SIGHUP stays ignored, here and in the launcher, if this process ignores it, as after nohup.
    Only a main thread may set handlers; a launch from another thread forwards nothing.
    """

    def __init__(self, handled: Sequence[signal.Signals]) -> None:
        self._signals = handled if threading.current_thread() is threading.main_thread() else ()
        self._previous: dict[signal.Signals, Any] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self.seen: signal.Signals | None = None

    def __enter__(self) -> _Forwarding:
        for number in self._signals:
            if not signals.stays_ignored(number, self._signals):
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def to(self, launcher: subprocess.Popen[bytes]) -> None:
        """Set the process that gets the signals; a signal that came before is forwarded now."""
        self._launcher = launcher
        if self.seen is not None:
            launcher.send_signal(self.seen)

    def _take(self, number: int, frame: object) -> None:
        self.seen = self.seen or signal.Signals(number)
        if self._launcher is not None:
            self._launcher.send_signal(number)
