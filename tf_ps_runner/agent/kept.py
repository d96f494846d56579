"""Processes that keep what their scripts have loaded: the line to each, and those that are no task at the moment.

`hooks.rebuild` makes one of the process that was started for a task. The task is a child of it from then on, whose end
for a change of the cluster leaves the process *spare*, to become the next task of its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlrover_run.agent.process import WorkerProcess
from dlrover_run.coordination.cluster.records import Task
from dlrover_run.output.relay_client import Relay
from tf_ps_runner.agent import words
from tf_ps_runner.agent.conversation import Conversation
from tf_ps_runner.agent.outputs import Outputs
from tf_ps_runner.agent.reconcile import Spare
from tf_ps_runner.agent.words import Free
from tf_ps_runner.memory.hold import MemoryHold

LET_GO_TIMEOUT = 2.0
"""Seconds that a process which keeps has to end its child and to say so. Then both are killed, and the next task of the
place starts from scratch: a model that stands still for one process costs all of them."""


SPARE_TIMEOUT = 60.0
"""Seconds, above what a planned change may take to save, after which a process that is still spare is ended: a node
that hosts nothing is not told whether anything will come, and what was loaded takes memory."""


class Keeper:
    """The line to a process that keeps, which `talk` was handed over for. `on_free` is called when it says that the
    child of its present turn has ended."""

    def __init__(self, talk: Conversation, on_free: Callable[[Keeper, bool], None]) -> None:
        self._talk = talk
        self._on_free = on_free
        self._turn = 0
        self._busy = False
        self.gone = False
        talk.hand_over(self._hear, self._end)

    def begin(self, variables: Mapping[str, str]) -> None:
        """Have it fork a child with these variables."""
        self._turn += 1
        self._busy = True
        self._talk.answer(words.begin_line(self._turn, variables))

    def let_go(self) -> None:
        """Have it kill that child and be free."""
        self._talk.answer(words.let_go_line(self._turn))

    def close(self) -> None:
        """End the line; a process that still lives at its other end ends with it."""
        self._talk.close()

    def _hear(self, talk: Conversation, line: bytes) -> None:
        try:
            said = words.read_line(line)
        except words.BadLine:
            return
        # An answer to a turn that is over by now says nothing of this one.
        if isinstance(said, Free) and said.turn == self._turn and self._busy:
            self._busy = False
            self._on_free(self, said.left)

    def _end(self, talk: Conversation) -> None:
        self.gone = True


@dataclass(frozen=True, eq=False)
class Kept:
    """A process that keeps and is no task, with all that goes with it from task to task: its console, whose name stays
    that of the first, and what holds it to its memory."""

    spare: Spare
    process: WorkerProcess
    keeper: Keeper
    outputs: Outputs
    memory: MemoryHold

    def close(self, relay: Relay) -> None:
        """It has ended: let go of what was its own."""
        self.keeper.close()
        self.outputs.forget(relay)
        with contextlib.suppress(OSError):
            self.memory.close()


class KeptAside:
    """The spare processes of a node, and those of them that are about to end. None is spare for more than `patience`
    seconds."""

    def __init__(self, relay: Relay, patience: float) -> None:
        self._relay = relay
        self._patience = patience
        self._timers: dict[Spare, asyncio.TimerHandle] = {}
        self._spare: dict[Spare, Kept] = {}
        self._ending: list[Kept] = []

    @property
    def spares(self) -> tuple[Spare, ...]:
        """Those that may become tasks."""
        return tuple(self._spare)

    @property
    def pids(self) -> set[int]:
        """The processes of all that live."""
        return {kept.process.pid for kept in [*self._spare.values(), *self._ending]}

    def put(self, kept: Kept) -> None:
        """One is spare from now on."""
        self.discard(kept.spare)
        self._spare[kept.spare] = kept
        loop = asyncio.get_running_loop()
        self._timers[kept.spare] = loop.call_later(self._patience, self.discard, kept.spare)

    def take(self, task: Task) -> Kept | None:
        """One that may become that task, for the caller to make it so."""
        suiting = next((spare for spare in self._spare if spare.suits(task)), None)
        if suiting is None:
            return None
        if self._spare[suiting].keeper.gone:
            self.discard(suiting)
            return None
        return self._remove(suiting)

    def discard(self, spare: Spare) -> None:
        """End one. It has nothing to lose that anybody could still want."""
        if spare in self._spare:
            kept = self._remove(spare)
            self._ending.append(kept)
            kept.process.send(signal.SIGKILL)

    def discard_all(self) -> None:
        """End all of them."""
        for spare in self.spares:
            self.discard(spare)

    def ended(self, process: WorkerProcess) -> bool:
        """Whether the process that has ended was one of these; then it is none any more."""
        kept = next((one for one in [*self._spare.values(), *self._ending] if one.process is process), None)
        if kept is None:
            return False
        kept.close(self._relay)
        if kept in self._ending:
            self._ending.remove(kept)
        else:
            self._remove(kept.spare)
        return True

    def close(self) -> None:
        """No task runs any more."""
        self.discard_all()
        for kept in self._ending:
            kept.close(self._relay)

    def _remove(self, spare: Spare) -> Kept:
        self._timers.pop(spare).cancel()
        return self._spare.pop(spare)
