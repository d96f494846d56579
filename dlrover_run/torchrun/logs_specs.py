"""`--logs-specs`: a torchrun plugin, in a process of its own, decides where the workers' output goes.

The plugin is a subclass of torch's `LogsSpecs`, and the launcher never imports torch. So `LogsSpecsClient` (the agent's
side) starts this module as a process (`main`), which loads and constructs the plugin as torchrun does. The two talk
over a socket that is the process's standard input and output, one JSON line each way a round: the environments of the
workers go in; the destinations, and the environments as the plugin left them, come out. The process lives as long as
the job, because a plugin may remember earlier rounds, and ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover_run.background import TimeLimit, beside
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.output.destinations import (
    Destination,
    Inherited,
    LogFile,
    Nowhere,
    RankStreams,
    Relayed,
    StreamPlan,
    Tee,
)
from dlrover_run.processes import event_loop, signals, tree
from dlrover_run.spec import LogSpec, SpecError, StreamMap

ANSWER_TIMEOUT = 300.0
"""Seconds for one answer. Before the first one torch is imported, which takes minutes from a cold network disk."""

CLOSE_TIMEOUT = 2.0
"""Seconds between the end of the process's input and a SIGKILL."""

MAX_ANSWER = 64 << 20
"""Bytes of one answer: the environments of some thousand workers fit."""


class PluginSetup(msgspec.Struct, frozen=True):
    """The first line to the process. `path` is the launcher's `sys.path`, on which the plugin's name was found."""

    name: str
    path: list[str]
    logs: LogSpec


class LogsDestinations(msgspec.Struct, frozen=True):
    """One round's destinations by local rank, as in torch's `LogsDest`: an empty path is the console.

    `environments` are the workers' environments as the plugin left them. If `problem` is set, the plugin failed and the
    other fields are empty.
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


class LogsSpecsClient:
    """The agent's side; the first request starts the process."""

    def __init__(self, logs: LogSpec) -> None:
        self._name = logs.plugin or ""
        self._logs = logs
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: asyncio.Future[LogsDestinations] | None = None

    @property
    def pids(self) -> set[int]:
        return {self._process.pid} if self._process is not None and self._process.returncode is None else set()

    async def answer(self, environments: Mapping[int, Mapping[str, str]]) -> LogsDestinations | None:
        """As `ask`; None if `stop_waiting` was called before the plugin answered."""
        async with beside(self.ask(environments)) as self._asking:
            try:
                return await self._asking
            except asyncio.CancelledError:
                return None
            finally:
                self._asking = None

    def stop_waiting(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()

    async def ask(self, environments: Mapping[int, Mapping[str, str]]) -> LogsDestinations:
        """The destinations of one round's workers. Raises SpecError when the plugin fails or does not answer."""
        flag = f"--logs-specs {self._name!r}"
        if self._process is None:
            await self._start()
        self._send(environments)
        try:
            async with TimeLimit(ANSWER_TIMEOUT):
                line = await self._reader.readline()
        except TimeoutError:
            raise SpecError(f"{flag}: the plugin did not answer within {ANSWER_TIMEOUT:g} s.") from None
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            await self.close()
            how = describe_exit_code(self._ended.result())
            raise SpecError(f"{flag}: the plugin's process {how} before it answered; its output is above.")
        answer = msgspec.json.decode(line, type=LogsDestinations)
        if answer.problem:
            raise SpecError(f"{flag}: {answer.problem}; the plugin's traceback is above.")
        if unnamed := environments.keys() - (answer.stdouts.keys() & answer.stderrs.keys()):
            raise SpecError(f"{flag}: the plugin gives local rank {min(unnamed)} no stdout or no stderr.")
        return answer

    async def close(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._writer.close()
        await asyncio.wait([self._ended], timeout=CLOSE_TIMEOUT)
        if not self._ended.done():
            self._process.kill()
            await self._ended

    async def _start(self) -> None:
        parent = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            # Before the process exists: if this await is cancelled, no process is left that nothing refers to.
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_ANSWER)
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "dlrover_run.torchrun.logs_specs"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                # The agent may have other threads (events, gRPC), so this only calls prctl, loaded before the fork.
                preexec_fn=lambda: tree.die_with_parent(parent),
            )
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        event_loop.watch_child(process.pid, lambda: self._ended.set_result(process.wait()))
        self._send(PluginSetup(self._name, sys.path, self._logs))

    def _send(self, message: object) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")


def plan_from_destinations(answer: LogsDestinations, logs: LogSpec) -> StreamPlan:
    """The streams of one attempt as the plugin placed them; /dev/null is nowhere, an empty path is our console."""

    def destination(path: str, console: Destination, nowhere: Destination) -> Destination:
        return console if not path else nowhere if path == os.devnull else LogFile(path)

    ranks: list[RankStreams] = []
    tees: list[Tee] = []
    for rank in sorted(answer.environments):
        stdout = destination(answer.stdouts[rank], Inherited(), Nowhere())
        # A hidden standard error still goes through the relay, so that the failure report can quote its end.
        stderr = destination(answer.stderrs[rank], Relayed(shown=True), Relayed(shown=False))
        error_file = answer.error_files.get(rank, "")
        ranks.append(RankStreams(rank, stdout, stderr, None if error_file in ("", os.devnull) else error_file))
        if (path := answer.tee_stdouts.get(rank, os.devnull)) != os.devnull:
            tees.append(Tee(rank, 1, path, logs.stdout_filters, answer.filtered_stdout))
        if (path := answer.tee_stderrs.get(rank, os.devnull)) != os.devnull:
            tees.append(Tee(rank, 2, path, logs.stderr_filters, answer.filtered_stderr))
    return StreamPlan(None, tuple(ranks), tuple(tees))


def main() -> None:
    # A scheduler signals every process of a job step. The signals are caught, not ignored: programs that the plugin
    # starts would inherit that they are ignored.
    signals.catch(lambda number: None, but={signal.SIGTERM, signal.SIGINT})
    lines, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The plugin's own reads and prints must not get into the protocol.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = msgspec.json.decode(lines.readline(), type=PluginSetup)
    plugin = None
    for line in lines:
        try:
            plugin = plugin or _construct(setup)
            answer = _reify(plugin, msgspec.json.decode(line, type=dict[int, dict[str, str]]))
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = LogsDestinations(f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def _construct(setup: PluginSetup) -> Any:
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


def _reify(plugin: Any, environments: dict[int, dict[str, str]]) -> LogsDestinations:
    """One round's answer. Paths may be `Path` objects; only the fields of torch's `LogsDest` are read."""
    placed = plugin.reify(environments)
    paths: dict[str, Any] = {
        name: {rank: os.fspath(path) for rank, path in getattr(placed, name).items()}
        for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
    }
    filtered = {name: os.fspath(getattr(placed, name)) for name in ("filtered_stdout", "filtered_stderr")}
    return LogsDestinations(environments=environments, **paths, **filtered)


if __name__ == "__main__":
    main()
