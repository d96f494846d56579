"""The crew of a node check: one process for each local rank, which computes and links when it is told to.

What runs in it is `dlrover_run/node_check`, by its path and in the user's interpreter, which may have none of this
project. Orders go to its standard input and answers come from its standard output, one JSON object a line each; what it
has to say of its end is on its standard error, of which the last is kept. A process answers every order in turn, so
whoever asks waits for all of them, for one that has ended, or until the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from dlrover_run.agent.worker_specs import Worker, WorkerSpec
from dlrover_run.coordination.bounds import Name, Rate
from dlrover_run.failures import describe_exit_code
from dlrover_run.output.lines import TailBuffer
from dlrover_run.supervisor.group import ProcessGroup

MAX_ANSWER = 65_536
"""Bytes of a line that may be an answer; a longer one is none."""

MAX_LAST_WORDS = 200
"""Characters of the line that ends a process's standard error, in the clause about its end."""

StartOne = Callable[[WorkerSpec], Awaitable[int]]
Order = Mapping[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """What one process answers to one order: `problem` is a clause that says why it failed, empty when it did not.
    `ends` says that the process ends then by itself, for something in it cannot be stopped otherwise."""

    done: str
    name: str = ""
    device: Name = ""
    tflops: Rate = 0.0
    gigabytes: Rate = 0.0
    problem: str = ""
    wrong: bool = False
    ends: bool = False


class CrewLost(Exception):
    """A process of the crew has ended or does not answer, so that the crew is of no use any more. The message is a
    clause. `own` says that this is this node's own trouble, whoever was at the other end of a link."""

    def __init__(self, clause: str, own: bool = False) -> None:
        super().__init__(clause)
        self.own = own


class Crew:
    """The check processes of one node, with these command line and environments, one for each local rank.

    Make one, `start` it, `ask` as often as wanted, and `end` it in any case.
    """

    def __init__(self, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._mates: list[_Mate] = []
        try:
            for local_rank in range(len(environments)):
                self._mates.append(_Mate(local_rank))
        except OSError:
            self._close()
            raise
        specs = [
            WorkerSpec(
                name=f"the check process of local rank {mate.local_rank}",
                rank=mate.local_rank,
                local_rank=mate.local_rank,
                argv=tuple(argv),
                environment=environment,
                stdio=mate.theirs,
            )
            for mate, environment in zip(self._mates, environments, strict=True)
        ]
        self._group = ProcessGroup(specs, self._note_end)
        self._ready = False
        self._asking = False

    @property
    def pids(self) -> set[int]:
        """The processes of the crew that have not ended, as far as we have been told."""
        return self._group.pids

    @property
    def idle(self) -> bool:
        """Whether all processes are there and have answered all that they were asked."""
        return self._ready and not self._asking and all(mate.code is None for mate in self._mates)

    async def start(self, start_one: StartOne, undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        """Start the processes with `start_one`; `undisturbed` keeps orphans from being reaped meanwhile.

        Raises what `start_one` raises; `end` ends those that were started.
        """
        try:
            with undisturbed():
                await self._group.start(start_one)
        finally:
            for mate in self._mates:
                mate.give_away()
        self._ready = True

    async def ask(self, orders: Sequence[Order], seconds: float) -> list[Answer]:
        """Give each local rank its order, and return what they answer.

        Raises CrewLost when a process has ended, or does not answer in that many seconds.
        """
        self._asking = True
        answers = [mate.ask(order) for mate, order in zip(self._mates, orders, strict=True)]
        done, late = await asyncio.wait(answers, timeout=max(0.0, seconds), return_when=asyncio.FIRST_EXCEPTION)
        # The first that ended, for the others may only have lost it.
        for mate in sorted(self._mates, key=lambda mate: mate.ended_as):
            if mate.code is not None and mate.answer in done and mate.answer.exception() is not None:
                raise mate.lost()
        for answer, mate in zip(answers, self._mates, strict=True):
            if answer in late:
                raise CrewLost(f"the check process of local rank {mate.local_rank} gave no answer in {seconds:.3g} s")
        found = [answer.result() for answer in answers]
        # With one that ends the crew is of no use for another order.
        self._asking = any(answer.ends for answer in found)
        return found

    async def end(self) -> None:
        """Kill all processes and return when all have ended. Raises StuckProcess when the kernel does not end one."""
        try:
            await self._group.stop(signal.SIGKILL, 0)
        finally:
            self._close()

    def kill(self) -> None:
        """Kill all processes, and wait for nobody."""
        self._group.send(signal.SIGKILL)

    def _close(self) -> None:
        for mate in self._mates:
            mate.close()

    def _note_end(self, worker: Worker) -> None:
        self._mates[worker.spec.local_rank].note_end(worker.code or 0, len(self._group.ended))


class _Mate:
    """What goes to and comes from one process. `theirs` are its three standard descriptors until it has them."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.code: int | None = None
        self.ended_as = 0
        self._ours: list[int] = []
        self._given: list[int] = []
        self._partial = b""
        self._last = TailBuffer()
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer] = self._loop.create_future()
        try:
            stdin, self._orders = self._pipe(0)
            self._answers, stdout = self._pipe(1)
            self._errors, stderr = self._pipe(1)
        except OSError:
            self.close()
            raise
        self.theirs = (stdin, stdout, stderr)
        self._loop.add_reader(self._answers, self._hear)
        self._loop.add_reader(self._errors, self._listen)

    def _pipe(self, theirs: int) -> tuple[int, int]:
        ends = os.pipe()
        self._given.append(ends[theirs])
        self._ours.append(ends[1 - theirs])
        os.set_blocking(ends[1 - theirs], False)
        return ends

    def give_away(self) -> None:
        """The process has its descriptors, or will never have them."""
        while self._given:
            os.close(self._given.pop())

    def close(self) -> None:
        """Let go of all pipes; the end of its standard input ends a process that was not killed."""
        self.give_away()
        while self._ours:
            fd = self._ours.pop()
            self._loop.remove_reader(fd)
            os.close(fd)
        self.answer.cancel()

    def ask(self, order: Order) -> asyncio.Future[Answer]:
        """Give an order, and wait for the answer; an error is the end of the process."""
        self.answer = self._loop.create_future()
        if self.code is not None:
            self.answer.set_exception(self.lost())
            self.answer.exception()
            return self.answer
        # One order is under way at a time, so a pipe has room for it; of a process that has just ended we hear.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        return self.answer

    def note_end(self, code: int, place: int) -> None:
        """The process has ended, as the `place`th of the crew."""
        if self._ours:
            # An answer that was given just before the end still counts.
            self._hear()
            self._listen()
        self.code, self.ended_as = code, place
        if not self.answer.done():
            self.answer.set_exception(self.lost())
            # Looked at here, for nobody may be asking.
            self.answer.exception()

    def lost(self) -> CrewLost:
        """How the process ended, for which it must have."""
        assert self.code is not None, "a process that runs is not lost"
        lines = self._last.content().decode(errors="replace").split("\n")
        words = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
        clause = f"the check process of local rank {self.local_rank} {describe_exit_code(self.code)}"
        if words:
            clause += f": {words[:MAX_LAST_WORDS]}"
        # NCCL ends its own process with SIGABRT when a connection has ended, and Python with a code.
        own = self.code < 0 and self.code != -signal.SIGABRT
        return CrewLost(clause, own)

    def _hear(self) -> None:
        *lines, self._partial = (self._partial + self._read(self._answers)).split(b"\n")
        self._partial = self._partial[:MAX_ANSWER]
        for line in lines:
            if self.answer.done():
                return
            try:
                self.answer.set_result(msgspec.json.decode(line, type=Answer))
            except msgspec.DecodeError:
                self.answer.set_result(Answer("", problem="the check process said what is no answer"))

    def _listen(self) -> None:
        self._last.add(self._read(self._errors))

    def _read(self, fd: int) -> bytes:
        """All that is there, and no more of the pipe once it has ended."""
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
