"""Opens what `destinations` planned: descriptors for the outputs of one process, and its log files on the console."""

from __future__ import annotations

import os
from collections.abc import Iterable

from dlrover_run.output.destinations import (
    Destination,
    Inherited,
    LogFile,
    Nowhere,
    RankStreams,
    Relayed,
    SameAsStderr,
    Tee,
)
from dlrover_run.output.relay_client import RelayClient, StepSearch


def open_outputs(
    planned: RankStreams,
    relay: RelayClient,
    key: str,
    *,
    prefix: str | None = None,
    whole_lines: bool = False,
    steps: StepSearch | None = None,
) -> tuple[int, int]:
    """The descriptors that become standard output and standard error of a process; the caller closes those that are not
    1 and 2 once it is started. `key` names the process at the relay; for the rest see `RelayClient.open_stderr`.

    `workers/specs` calls it for each worker of a round, and `tf-ps-run` for each task that it starts. Raises OSError.
    """
    match planned.stderr:
        case Relayed(shown=shown):
            stderr = relay.open_stderr(key, show=shown, prefix=prefix, whole_lines=whole_lines, steps=steps)
        case other:
            stderr = open_destination(other, 2)
    match planned.stdout:
        case SameAsStderr():
            stdout = stderr
        case Relayed(shown=shown):
            stdout = relay.open_stdout(key, prefix, show=shown, steps=steps)
        case other:
            stdout = open_destination(other, 1)
    return stdout, stderr


def open_destination(destination: Destination, inherited: int) -> int:
    """A new close-on-exec descriptor for a file or for nowhere, or `inherited`. Raises OSError.

    The file is opened in append mode, so that children of the worker that write to the same file overwrite nothing.
    """
    match destination:
        case LogFile(path=path):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        case Nowhere():
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        case Inherited():
            return inherited
        case Relayed() | SameAsStderr():
            raise AssertionError(f"{destination} has no descriptor of its own")


def show_files(tees: Iterable[tuple[Tee, str]], relay: RelayClient) -> None:
    """Show log files on the console, each with its prefix, from their present end on: what an earlier round wrote into
    them has been shown already. Called at a start, before the processes that write them begin."""
    for tee, prefix in tees:
        relay.add_tail(tee.path, tee.out, prefix, tee.needles, tee.filtered, start=size_of(tee.path))


def size_of(path: str) -> int:
    """The size of a log file from an earlier round; 0 for one that does not exist. Called before the process starts
    that writes the file, for the position from which it is shown or searched."""
    return os.path.getsize(path) if os.path.exists(path) else 0
