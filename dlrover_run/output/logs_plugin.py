"""The process in which `--logs-specs` runs: a plugin of torchrun's that decides where the workers' output goes.

The plugin is a class of torch's `LogsSpecs`, and the launcher never imports torch. This process loads and constructs it
as torchrun does, and answers one JSON line a round on the socket that is its standard input and output: the
environments of the workers come in, the destinations and the environments as the plugin left them go out. It lives as
long as the job, for such a plugin may remember earlier rounds, and ends at the end of its input. `logs_client` is the
agent's side.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec

from dlrover_run.process_tree import signals
from dlrover_run.spec import LogSpec, StreamMap


class Setup(msgspec.Struct, frozen=True):
    """The first line to the child. `path` is the launcher's `sys.path`, where the plugin's name was found."""

    name: str
    path: list[str]
    logs: LogSpec


class Answer(msgspec.Struct, frozen=True):
    """One round's destinations by local rank, as torch's `LogsDest` has them: an empty path is the console.

    `environments` are the workers' as the plugin left them. `problem` says why there is nothing else.
    """

    problem: str = ""
    environments: dict[int, dict[str, str]] = {}
    stdouts: dict[int, str] = {}
    stderrs: dict[int, str] = {}
    tee_stdouts: dict[int, str] = {}
    tee_stderrs: dict[int, str] = {}
    error_files: dict[int, str] = {}
    filtered_stdout: str = ""
    filtered_stderr: str = ""


def main() -> None:
    """The life of the child."""
    # What a scheduler sends to every process of a job step. A plugin may start programs, so it is caught, not ignored.
    signals.catch(lambda number: None, but={signal.SIGTERM, signal.SIGINT})
    lines, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a plugin reads or prints is none of the conversation.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = msgspec.json.decode(lines.readline(), type=Setup)
    plugin = None
    for line in lines:
        try:
            plugin = plugin or _construct(setup)
            answer = _reify(plugin, msgspec.json.decode(line, type=dict[int, dict[str, str]]))
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = Answer(f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def _construct(setup: Setup) -> Any:
    from importlib.metadata import entry_points

    sys.path[:] = setup.path
    from torch.distributed.elastic.multiprocessing import Std

    def streams(chosen: StreamMap) -> object:
        by_rank = {rank: Std(value) for rank, value in chosen.by_rank.items()}
        return by_rank or Std(chosen.default)

    found = entry_points(group="torchrun.logs_specs", name=setup.name)
    return next(iter(found)).load()(
        log_dir=setup.logs.log_dir,
        redirects=streams(setup.logs.redirects),
        tee=streams(setup.logs.tee),
        local_ranks_filter=set(setup.logs.shown_ranks) if setup.logs.shown_ranks else None,
    )


def _reify(plugin: Any, environments: dict[int, dict[str, str]]) -> Answer:
    """One round's answer; paths may be `Path` objects, and only what `LogsDest` has is asked for."""
    placed = plugin.reify(environments)

    def texts(paths: dict[int, Any]) -> dict[int, str]:
        return {rank: os.fspath(path) for rank, path in paths.items()}

    return Answer(
        environments=environments,
        stdouts=texts(placed.stdouts),
        stderrs=texts(placed.stderrs),
        tee_stdouts=texts(placed.tee_stdouts),
        tee_stderrs=texts(placed.tee_stderrs),
        error_files=texts(placed.error_files),
        filtered_stdout=os.fspath(placed.filtered_stdout),
        filtered_stderr=os.fspath(placed.filtered_stderr),
    )


if __name__ == "__main__":
    main()
