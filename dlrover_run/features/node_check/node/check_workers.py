"""The processes of a node check: one for each local rank, which computes and tests links on request.

They run `dlrover_run/features/node_check/check`, by its path and in the user's interpreter, in which this project may
not be installed. Requests are written to standard input and answers read from standard output, one JSON object a line.
The end of standard error is kept, because it explains why a process has ended. A process answers every request in turn,
so the caller waits for all answers, for a process that has ended, or until a timeout. Below are the requests, and what
the answers show of the devices of this node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.records.bounds import Name
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.features.node_check.decision.evidence import lower_median
from dlrover_run.features.node_check.decision.model import CPU, CheckKey, CheckTask, DeviceSpeed, LinkEnd, Rate
from dlrover_run.features.node_check.node.health_table import format_tflops
from dlrover_run.output.ring import TAIL_BYTES
from dlrover_run.processes.process import ProcessGroup
from dlrover_run.spec import JobSpec
from dlrover_run.workers.environment import environments_beside_workers
from dlrover_run.workers.specs import Worker, WorkerSpec

MAX_ANSWER = 65_536
"""Bytes of the longest line that is read as an answer."""

MAX_LAST_LINE = 200
"""Characters of the last line of a process's standard error that are quoted in the clause about its end."""

OWN_DEVICE = "DLROVER_RUN_CHECK_OWN_DEVICE"
"""The variable that tells a check process that no other local rank has the one device that it sees (`tasks.py`).
Without it, devices that each rank sees alone look like one device that all ranks share."""

CheckRequest = Mapping[str, Any]


def check_environments(spec: JobSpec, parent: Mapping[str, str]) -> list[dict[str, str]]:
    """The environments of the check processes, by local rank. Raises what `environments_beside_workers` raises."""
    own = {OWN_DEVICE: "1"} if spec.virtual_local_rank else {}
    return [{**environment, **own} for environment in environments_beside_workers(spec, parent)]


class CheckReply(msgspec.Struct, frozen=True):
    """The reply of one process to one request. `problem` is a clause with the cause of a failure, empty if it
    succeeded. With `ends`, the process ends by itself afterwards, because something in it cannot be stopped
    otherwise. `shared` is the name of the device, if processes of the link share it."""

    done: str
    name: str = ""
    device: Name = ""
    tflops: Rate = 0.0
    gigabytes: Rate = 0.0
    shared: Name = ""
    problem: str = ""
    wrong: bool = False
    ends: bool = False


def device_speeds(replies: Sequence[CheckReply]) -> list[DeviceSpeed]:
    """The speeds of the local ranks whose devices computed."""
    good = ((rank, reply) for rank, reply in enumerate(replies) if not reply.problem)
    return [DeviceSpeed(rank, reply.device, reply.tflops) for rank, reply in good]


class CheckWorkersLost(Exception):
    """A check process has ended or does not answer, so these processes cannot be used any more. The message is a
    clause. `local` is true if the cause is on this node, whatever node was at the other end of a link."""

    def __init__(self, clause: str, local: bool = False) -> None:
        super().__init__(clause)
        self.local = local


class CheckWorkers:
    """The check processes of one node, one for each local rank, with this command line and these environments.

    Create it, `start` it, `run` requests any number of times, and `end` it in any case.
    """

    def __init__(self, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._processes: list[CheckProcess] = []
        try:
            for local_rank in range(len(environments)):
                self._processes.append(CheckProcess(local_rank))
        except OSError:
            self._close()
            raise
        specs = [
            WorkerSpec(
                name=f"the check process of local rank {process.local_rank}",
                rank=process.local_rank,
                local_rank=process.local_rank,
                argv=tuple(argv),
                environment=environment,
                stdio=process.stdio,
            )
            for process, environment in zip(self._processes, environments, strict=True)
        ]
        self._group = ProcessGroup(specs, self._note_end)
        self._ready = False
        self._asking = False

    @property
    def pids(self) -> set[int]:
        """The pids of the check processes that still run."""
        return self._group.pids

    @property
    def idle(self) -> bool:
        """Whether all processes run and have answered all requests."""
        return self._ready and not self._asking and all(process.code is None for process in self._processes)

    async def start(self, start_one: Callable[[WorkerSpec], Awaitable[int]]) -> None:
        """Start the processes with `start_one`. Raises what that raises; `end` ends those that were started."""
        try:
            await self._group.start(start_one)
        finally:
            for process in self._processes:
                process.close_stdio()
        self._ready = True

    async def run(self, requests: Sequence[CheckRequest], seconds: float) -> list[CheckReply]:
        """Send each local rank its request, and return the answers.

        Raises CheckWorkersLost if a process has ended, or does not answer within `seconds`.
        """
        self._asking = True
        answers = [process.send(request) for process, request in zip(self._processes, requests, strict=True)]
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(seconds):
                await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        # The first that ended, because the others may only have lost it.
        for process in sorted(self._processes, key=lambda process: process.end_order):
            if process.code is not None and process.answer.done() and process.answer.exception() is not None:
                raise process.lost()
        for answer, process in zip(answers, self._processes, strict=True):
            if not answer.done():
                raise CheckWorkersLost(
                    f"the check process of local rank {process.local_rank} gave no answer in {seconds:.3g} s"
                )
        found = [answer.result() for answer in answers]
        # After one has ended, these processes cannot run another request.
        self._asking = any(answer.ends for answer in found)
        return found

    async def end(self) -> None:
        """Kill all processes and return when all have ended. Raises StuckProcess when the kernel does not end one."""
        try:
            await self._group.stop(signal.SIGKILL, 0)
        finally:
            self._close()

    def kill(self) -> None:
        """Kill all processes without waiting for their ends."""
        self._group.send(signal.SIGKILL)

    def _close(self) -> None:
        for process in self._processes:
            process.close()

    def _note_end(self, worker: Worker) -> None:
        self._processes[worker.spec.local_rank].note_end(worker.code or 0, len(self._group.ended))


class CheckProcess:
    """The pipes to and from one check process. `stdio` are the descriptors for its standard streams."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.code: int | None = None
        self.end_order = 0
        self._ours: list[int] = []
        self._given: list[int] = []
        self._partial = b""
        self._last = b""
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[CheckReply] = self._loop.create_future()
        try:
            stdin, self._requests = self._pipe(0)
            self._answers, stdout = self._pipe(1)
            self._errors, stderr = self._pipe(1)
        except OSError:
            self.close()
            raise
        self.stdio = (stdin, stdout, stderr)
        self._loop.add_reader(self._answers, self._read_answers)
        self._loop.add_reader(self._errors, self._read_errors)

    def _pipe(self, theirs: int) -> tuple[int, int]:
        ends = os.pipe()
        self._given.append(ends[theirs])
        self._ours.append(ends[1 - theirs])
        os.set_blocking(ends[1 - theirs], False)
        return ends

    def close_stdio(self) -> None:
        """Close this process's copies of `stdio`, after the start or its failure."""
        while self._given:
            os.close(self._given.pop())

    def close(self) -> None:
        """Close all pipes; the end of its standard input ends a process that was not killed."""
        self.close_stdio()
        while self._ours:
            fd = self._ours.pop()
            self._loop.remove_reader(fd)
            os.close(fd)
        self.answer.cancel()

    def send(self, request: CheckRequest) -> asyncio.Future[CheckReply]:
        """Send a request and return the future of its answer, which fails if the process ends."""
        self.answer = self._loop.create_future()
        if self.code is not None:
            self._fail()
            return self.answer
        # One request is sent at a time, so the pipe has room for it. The end of a process is reported separately.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        return self.answer

    def _fail(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(self.lost())
            # Retrieved here, because no caller may be waiting.
            self.answer.exception()

    def note_end(self, code: int, place: int) -> None:
        """The process has ended, as the `place`th of the group."""
        if self._ours:
            # An answer written just before the end still counts.
            self._read_answers()
            self._read_errors()
        self.code, self.end_order = code, place
        self._fail()

    def lost(self) -> CheckWorkersLost:
        """The error that describes the end of this process, which must have ended."""
        assert self.code is not None, "the process has ended"
        lines = self._last.decode(errors="replace").split("\n")
        last_line = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
        clause = f"the check process of local rank {self.local_rank} {describe_exit_code(self.code)}"
        if last_line:
            clause += f": {last_line[:MAX_LAST_LINE]}"
        # NCCL ends its own process with SIGABRT when a connection has ended, and Python with a code.
        local = self.code < 0 and self.code != -signal.SIGABRT
        return CheckWorkersLost(clause, local)

    def _read_answers(self) -> None:
        *lines, self._partial = (self._partial + self._read(self._answers)).split(b"\n")
        self._partial = self._partial[:MAX_ANSWER]
        for line in lines:
            if self.answer.done():
                return
            try:
                self.answer.set_result(msgspec.json.decode(line, type=CheckReply))
            except msgspec.DecodeError:
                self.answer.set_result(CheckReply("", problem="the check process wrote an invalid answer"))

    def _read_errors(self) -> None:
        self._last = (self._last + self._read(self._errors))[-TAIL_BYTES:]

    def _read(self, fd: int) -> bytes:
        """All that the pipe holds now; stops reading it at its end."""
        data = b""
        try:
            while len(data) < MAX_ANSWER:
                more = os.read(fd, MAX_ANSWER)
                if not more:
                    self._loop.remove_reader(fd)
                    break
                data += more
        except BlockingIOError:
            pass
        return data


def place_in_order(task: CheckTask, link: Sequence[LinkEnd]) -> int:
    """The index of a link in the links of its group. In a triple, each link may have to wait for an end that is still
    in the previous link, whose partner never joins. So the time of each link is counted from the first."""
    nodes = sorted({end.node for each in task.links for end in each})
    request = list(itertools.combinations(nodes, 2)) if len(nodes) > 1 else [(task.node, task.node)]
    return request.index((link[0].node, link[-1].node))


def link_requests(key: CheckKey, link: Sequence[LinkEnd], node: int, timeout: float) -> list[CheckRequest]:
    """The requests to the local ranks of `node` for a link: ranks are those of the first end, then those of the other;
    rank 0 hosts the store."""
    first, last = link[0], link[-1]
    at = next(place for place, end in enumerate(link) if end.node == node)
    first_rank = sum(end.workers for end in link[:at])
    return [
        {
            "do": "link",
            "name": f"{key.epoch}/{key.number}/{key.round}/{first.node}-{last.node}",
            "address": first.address,
            "port": first.port,
            "host": rank == 0,
            "rank": rank,
            "world": sum(end.workers for end in link),
            "timeout": timeout,
        }
        for rank in range(first_rank, first_rank + link[at].workers)
    ]


def find_slow(devices: Sequence[DeviceSpeed], threshold: float) -> list[DeviceSpeed]:
    """The devices that are more than `threshold` times slower than what is usual in the node, for a warning: a check
    compares nodes by their slowest device, and finds nothing if there is only one node, or if each has a slow device.
    Ranks on the CPU share it, and that one of them is slow is no evidence of it."""
    if not devices:
        return []
    reached = lower_median([device.tflops for device in devices])
    return [device for device in devices if device.name != CPU and device.tflops * threshold < reached]


def quicker(first: Sequence[DeviceSpeed], second: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """The better of two tries of each local rank: one may be disturbed, but is never quicker than it is."""
    best: dict[int, DeviceSpeed] = {}
    for device in (*first, *second):
        known = best.get(device.local_rank)
        if known is None or known.tflops < device.tflops:
            best[device.local_rank] = device
    return list(best.values())


def describe_shared(device: str, nodes: int) -> str:
    """A sentence on a link of that number of nodes whose processes share a device."""
    who = "the workers of this node" if nodes == 1 else "this node and another one"
    return (
        f"warning: node check: {who} share one {device}: NCCL refuses that, so their link is measured with gloo, and "
        "workers need another backend too"
    )


def describe_slow(devices: Sequence[DeviceSpeed], threshold: float) -> list[str]:
    """A sentence for each of those that `find_slow` finds."""
    return [
        f"warning: local rank {device.local_rank} ({device.name}) computes at {format_tflops(device.tflops)} where the "
        f"others of this node reach {format_tflops(lower_median([device.tflops for device in devices]))}"
        for device in find_slow(devices, threshold)
    ]
