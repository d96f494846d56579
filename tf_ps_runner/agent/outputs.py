"""Where the output of one task goes: line by line to the console, each line with the task's name before it, and to
files where there is a directory for them.

    <run directory>/<role>-<id>/stdout.log, stderr.log
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from dlrover_run.output import streams
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir
from dlrover_run.spec import LogSpec, SpecError, Std


@dataclass(frozen=True)
class Outputs:
    """The outputs of one task. `stdio` are the descriptors that become 0, 1 and 2, closed with `release`; the paths are
    those of its log files, None without them."""

    name: str
    stdio: tuple[int, int, int]
    stdout_path: str | None = None
    stderr_path: str | None = None

    def release(self) -> None:
        """Close our copies, once the task has its own or will not be started."""
        for fd in set(self.stdio):
            if fd > 2:
                os.close(fd)

    async def last_words(self, relay: RelayClient) -> str:
        """The end of the standard error of a task that has ended."""
        if self.stderr_path is not None:
            return streams.read_tail(self.stderr_path)
        return (await relay.tails([self.name])).get(self.name, "")

    def forget(self, relay: RelayClient) -> None:
        """Nothing more comes of this task: what is still on its way to the console gets there."""
        relay.release([self.name], [path for path in (self.stdout_path, self.stderr_path) if path is not None])


def open_outputs(logs: LogSpec, run_dir: RunDir, relay: RelayClient, name: str) -> Outputs:
    """Open the outputs of the task `name`: to the console, with `--redirects` to files alone, and else to both where a
    directory was asked for. Raises SpecError when the files cannot be had."""
    filed = run_dir.path is not None and run_dir.keep
    prefix = f"[{name}]:"
    if not filed or run_dir.path is None:
        stderr = relay.open_stderr(name, show=True, prefix=prefix)
        # What a task writes to the two has an order that people rely on, which only one way to one console keeps.
        stdout = stderr if relay.single_console else relay.open_stdout(name, prefix)
        return Outputs(name, (0, stdout, stderr))
    directory = os.path.join(run_dir.path, name)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--log-dir: {directory} cannot be made ({error.strerror}); name another one") from None
    paths = os.path.join(directory, "stdout.log"), os.path.join(directory, "stderr.log")
    fds: list[int] = []
    for path, out, std in zip(paths, (1, 2), (Std.OUT, Std.ERR), strict=True):
        fd = streams.open_output(streams.Stream("file", path))
        assert fd is not None, "a file is opened"
        fds.append(fd)
        if not logs.redirects.default & std:
            relay.add_tail(path, 1 if out == 1 else 2, prefix)
    return Outputs(name, (0, fds[0], fds[1]), *paths)
