"""A worker that outlives its round: when another worker fails, or the job changes its size, it forms the next process
group in place, and keeps its process with all that it has loaded, compiled and computed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from dlrover_run.training import peers
from dlrover_run.training.agent_line import AgentLine, Order
from dlrover_run.training.reconfigurable_group import ReconfigurableGroup

logger = logging.getLogger(__name__)


class NextRound(Exception):
    """Leaves the block of a round, because the next one has begun. The block takes it."""


class Survivor:
    """The rounds of one worker. It takes the place of `init_process_group`:

        for round in Survivor("gloo").rounds():
            with round:
                step, state = round.newest(step, lambda: model.state_dict())
                if state is not None:
                    model.load_state_dict(state)
                while step < steps:
                    train_one_step()
                    step += 1
                    round.check()

    The block is left when another worker has ended or the next round has begun, and entered again with the group of
    that round. `rounds` is over when the block has come to its end. No collective may come between the first change of
    the state and the change of the number of steps, or a rank whose collective fails there has half a step.

    In a process that `dlrover-run` has not started for this, and with a torch older than 2.14, there is one round, with
    the group of `init_process_group`, and a failure restarts the worker. So it is if a worker of the job has no such
    block.
    """

    def __init__(
        self, backend: str | None = None, *, group: ReconfigurableGroup | None = None, line: AgentLine | None = None
    ) -> None:
        self._group = group or ReconfigurableGroup(backend)
        self._line = line
        # What the thread that reads orders may interrupt.
        self._lock = threading.Lock()
        self._training: Order | None = None
        self._finished = False

    def rounds(self) -> Generator[Round, None, None]:
        """The rounds of this worker, each as a block. Raises AgentGone, and RuntimeError if the other workers of a
        round do not come."""
        line = self._line or AgentLine.from_environment()
        if line is None:
            self._group.open_as_in_any_script()
            yield Round(self, self._group, None, None)
            return
        try:
            yield from self._rounds_of(line)
        finally:
            line.close()

    def _rounds_of(self, line: AgentLine) -> Generator[Round, None, None]:
        able = self._group.able
        if not able:
            logger.warning("torch %s cannot keep this worker over a failure; 2.14 can", self._group.version)
        line.on_order = self._interrupt
        line.begin(able, self._group.version)
        last: Order | None = None
        while not self._finished:
            last = self._join(line, last)
            in_place = last.uuid != 0
            with self._lock:
                self._training = last if in_place else None
            yield Round(self, self._group, line if in_place else None, last)
            if not in_place:
                return

    def _join(self, line: AgentLine, last: Order | None) -> Order:
        """Form the group of the next round, and of a later one if it cannot be formed; return its order."""
        timeout = None if last is None else last.start_timeout
        order = line.wait(lambda order: last is None or order.round != last.round, timeout)
        while True:
            if order is None:
                raise RuntimeError(f"no round follows round {last.round[1] if last else 0}: this worker waits in vain")
            if order.uuid == 0:
                self._group.open_as_in_any_script()
                line.formed(order.round)
                return order
            if order.uuid is None:
                last, order = order, self._offer(line, order)
            elif self._form(order, order.uuid):
                line.formed(order.round)
                # For what reads them, as they were when the process started.
                os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(order.world_size))
                return order
            else:
                line.lost(order.round)
                lost = last = order
                order = line.wait(lambda order, lost=lost: order.round != lost.round, order.start_timeout)  # type: ignore[misc]

    def _offer(self, line: AgentLine, order: Order) -> Order:
        """Offer a handle, and wait until all others have; or until another round begins."""
        line.offer(order.round, self._group.handle(order.address, order.port, order.rank, order.world_size))
        following = line.wait(lambda other: other.round != order.round or other.uuid is not None, order.start_timeout)
        if following is None:
            raise RuntimeError(
                f"the other workers of round {order.round[1]} have not come to their groups within "
                f"{order.start_timeout:g} s: see what they do by dlrover-run stacks"
            )
        return following

    def _form(self, order: Order, uuid: int) -> bool:
        try:
            # The other half of the time is for the agents to learn why, and for the next round to begin.
            self._group.form(uuid, order.handles, order.timeout / 2)
        except RuntimeError as error:
            logger.warning("The group of round %d could not be formed: %s", order.round[1], error)
            return False
        return True

    def _interrupt(self, order: Order) -> None:
        with self._lock:
            if self._training is not None and order.round != self._training.round:
                # A collective may wait for a rank that takes part in another round.
                self._abort(self._training)

    def _abort(self, order: Order) -> None:
        try:
            self._group.abort()
        except (OSError, RuntimeError) as error:
            # The agents end the workers that wait, after their limit.
            logger.warning("The group of round %d could not be interrupted: %s", order.round[1], error)

    def _leave(self) -> None:
        with self._lock:
            self._training = None

    def _finish(self) -> None:
        self._finished = True


class Round:
    """One round of a worker, as a block; see `Survivor`."""

    def __init__(
        self, survivor: Survivor, group: ReconfigurableGroup, line: AgentLine | None, order: Order | None
    ) -> None:
        self._survivor = survivor
        self._group = group
        self._line = line
        self._order = order

    @property
    def rank(self) -> int:
        """The rank of this worker in the round."""
        return int(os.environ.get("RANK", "0")) if self._order is None else self._order.rank

    @property
    def world_size(self) -> int:
        """How many workers the round has."""
        return int(os.environ.get("WORLD_SIZE", "1")) if self._order is None else self._order.world_size

    def check(self) -> None:
        """Leave the block if the next round has begun. Call it after each step."""
        if self._has_successor:
            raise NextRound

    def newest(self, step: int, state: Callable[[], Any]) -> tuple[int, Any]:
        """The highest number of steps that any rank has made, and the state after them; None for a rank that has made
        as many. `step` is this rank's own number, from a checkpoint for a worker that has just started. `state` is
        called on one rank that has the newest. All ranks call this, before their first step in a round."""
        steps = self._group.of_all(step)
        newest = max(steps)
        if min(steps) == newest:
            return newest, None
        source = steps.index(newest)
        sent = self._group.of_rank(state() if source == self.rank else None, source)
        return newest, None if step == newest else sent

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._survivor._leave()
        if error is None:
            self._survivor._finish()
            return False
        if self._line is None or self._order is None:
            return False
        if isinstance(error, NextRound):
            return True
        if not (peers.is_lost_peer(error) or (isinstance(error, RuntimeError) and self._has_successor)):
            return False
        logger.info("Round %d has lost a worker: %s", self._order.round[1], error)
        # Ranks that are not connected to the lost one wait for this one.
        self._survivor._abort(self._order)
        self._line.lost(self._order.round)
        return True

    @property
    def _has_successor(self) -> bool:
        if self._line is None or self._order is None:
            return False
        order = self._line.order
        return order is not None and order.round != self._order.round
