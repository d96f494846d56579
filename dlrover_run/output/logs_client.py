"""The agent's side of `--logs-specs`: ask the plugin's process once a round, and make its answer a `StreamPlan`."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from dlrover_run.failures import process_end
from dlrover_run.output import logs_plugin
from dlrover_run.output.logs_plugin import Answer, Setup
from dlrover_run.output.streams import RankStreams, Stream, StreamPlan, Tee
from dlrover_run.process_tree import ends, tree
from dlrover_run.spec import LogSpec, SpecError

ANSWER_TIMEOUT = 300.0
"""Seconds for one answer; before the first one torch is imported, which takes minutes from a cold network disk."""

CLOSE_TIMEOUT = 2.0
"""Seconds that the plugin gets to end, once its input has ended, before it is killed."""

MAX_ANSWER = 64 << 20
"""Bytes of one answer: the environments of some thousand workers fit."""


class LogsPlugin:
    """The plugin as the agent sees it; its process is started by the first question."""

    def __init__(self, logs: LogSpec) -> None:
        self._name = logs.plugin or ""
        self._logs = logs
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return {self._process.pid} if self._process is not None and self._process.returncode is None else set()

    async def ask(self, environments: Mapping[int, Mapping[str, str]]) -> Answer:
        """Where the output of one round's workers goes. Raises SpecError when the plugin fails or does not answer."""
        flag = f"--logs-specs {self._name!r}"
        if self._process is None:
            await self._start()
        self._send(environments)
        try:
            line = await asyncio.wait_for(self._reader.readline(), ANSWER_TIMEOUT)
        except TimeoutError:
            raise SpecError(f"{flag}: the plugin did not answer within {ANSWER_TIMEOUT:g} s.") from None
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            await self.close()
            how = process_end(self._ended.result())
            raise SpecError(f"{flag}: the plugin's process {how} before it answered; what it wrote is above.")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.problem:
            raise SpecError(f"{flag}: {answer.problem}; the plugin's traceback is above.")
        if unnamed := environments.keys() - (answer.stdouts.keys() & answer.stderrs.keys()):
            raise SpecError(f"{flag}: the plugin gives local rank {min(unnamed)} no stdout or no stderr.")
        return answer

    async def close(self) -> None:
        """End the process."""
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
            # First, since whoever cancels this wait could not end a process that nothing leads to yet.
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_ANSWER)
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", logs_plugin.__name__],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                preexec_fn=lambda: tree.die_with_parent(parent),  # There is one thread, so this is safe.
            )
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ends.watch_child(process.pid, lambda: self._ended.set_result(process.wait()))
        self._send(Setup(self._name, sys.path, self._logs))

    def _send(self, message: object) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")


def plan_from(answer: Answer, logs: LogSpec) -> StreamPlan:
    """The streams of one attempt as the plugin has placed them; /dev/null is nowhere, an empty path our console."""

    def stream(path: str, console: Stream, nowhere: Stream) -> Stream:
        return console if not path else nowhere if path == os.devnull else Stream("file", path)

    ranks: list[RankStreams] = []
    tees: list[Tee] = []
    for rank in sorted(answer.environments):
        stdout = stream(answer.stdouts[rank], Stream("inherit"), Stream("null"))
        # Hidden, it still passes the relay, so that the report can quote how the worker ended.
        stderr = stream(answer.stderrs[rank], Stream("relay", shown=True), Stream("relay", shown=False))
        error_file = answer.error_files.get(rank, "")
        ranks.append(RankStreams(rank, stdout, stderr, None if error_file in ("", os.devnull) else error_file))
        if (path := answer.tee_stdouts.get(rank, os.devnull)) != os.devnull:
            tees.append(Tee(rank, 1, path, logs.stdout_filters, answer.filtered_stdout))
        if (path := answer.tee_stderrs.get(rank, os.devnull)) != os.devnull:
            tees.append(Tee(rank, 2, path, logs.stderr_filters, answer.filtered_stderr))
    return StreamPlan(None, tuple(ranks), tuple(tees))
