"""What an agent does so that its workers can outlive their round: the line to each of them, what it knows of them, and
the steps that are due. Imported only by a job with `--survivors=keep`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey, RankAssignment, RoundKey
from dlrover_run.features.survivors import line
from dlrover_run.features.survivors.line import Formed, WorkerHello
from dlrover_run.features.survivors.model import SurvivorsAssignment, SurvivorsReport
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.features.survivors.worker_record import (
    Step,
    WorkerRecord,
    ended_before_its_group,
    follow,
    next_step,
    node_part,
)
from dlrover_run.processes.line_connection import LineConnection
from dlrover_run.processes.line_listener import LineListener
from dlrover_run.processes.ports import HeldPort
from dlrover_run.training.agent_line import LINE_VARIABLE, TOKEN_VARIABLE
from dlrover_run.words.reasons import Reasons
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker
from dlrover_run.workers.store_process import StoreProcess

LATE = 0.5
"""Seconds by which a timer may be late. One that is later shows that this process was stalled, and perhaps all of the
machine, so the workers get that time too."""


class GroupStore:
    """The store of a job whose workers outlive their round, which this node runs, or could run, at `port`. It belongs
    to the agent, lasts for more than one round, and ends with the agent, also by SIGKILL.

    `log` is called with a sentence for the user, `on_end` when it has ended by itself. Then `port` is another one,
    because a port stands for one store.
    """

    def __init__(self, log: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self._log = log
        self._on_end = on_end
        self._store = self._hold()

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._store.number

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return self._store.pids

    def start(self) -> None:
        """Start the process, if it does not run. Raises OSError."""
        self._store.listen()
        self._store.start()

    def close(self) -> None:
        """End the process, and release the port."""
        self._store.release()

    def _hold(self) -> StoreProcess:
        return StoreProcess(HeldPort(), self._log, self._note_end)

    def _note_end(self, how: str) -> None:
        self._store = self._hold()
        self._log(f"the store of the workers {how}: the next round has another one, and its workers start anew")
        self._on_end()


class Survivors:
    """The workers of this node, by local rank, as processes that may outlive their round.

    `on_formed` is called with the local rank of a worker that has joined the group of its round, `wake` when a step may
    be due, and `log` with a sentence for the user. To be used in the thread of a running loop.
    """

    def __init__(self, on_formed: Callable[[int], None], wake: Callable[[], None], log: Callable[[str], None]) -> None:
        self._on_formed = on_formed
        self._wake = wake
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._listener: LineListener[int] = LineListener("dlrover-run", line.MAX_LINE, self)
        self._listener.open()
        self._store = GroupStore(log, wake)
        self._store_client: tuple[RoundKey, str] | None = None
        self._no_block: Reasons = ()
        self._records: dict[int, WorkerRecord] = {}
        self._part: SurvivorsAssignment | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_set_at = 0.0

    @property
    def pids(self) -> set[int]:
        """The pid of the store, while it runs here."""
        return self._store.pids

    @property
    def _timeout(self) -> float:
        return 0.0 if self._part is None else self._part.timeout

    @property
    def any_able(self) -> bool:
        """Whether a worker may keep its process in a round whose store is not known yet."""
        return any(record.able and record.store is not None for record in self._records.values())

    def follow(self, assignment: Assignment, ranks: RankAssignment | None) -> None:
        """Take the part of an assignment; `ranks` are those of this node. Idempotent."""
        if ranks is None:
            self._part = None
            self._set_timer(None)
        else:
            before, self._part = self._part, follow(self._part, SurvivorsAssignment.find(assignment.parts), ranks.key)
            if before is None or before.key != ranks.key:
                self._no_block = ()

    def advance(self, current: WorkerRound, ranks: RankAssignment) -> frozenset[int] | None:
        """Send the workers that run the orders that are due for the round `ranks`, and kill those that do not answer.
        Returns the local ranks of those that go on in it while others take the places of the rest; None if they end
        with their round, as in any other job, or if the round is complete. Idempotent."""
        is_same = current.key == ranks.key
        if is_same and current.has_failed:
            self._set_timer(None)
            return None
        steps = self._orders(ranks)
        late = f"within {self._timeout:g} s"
        replaced = []
        for worker in not_stopping(current):
            step = steps.get(worker.spec.local_rank)
            if step is Step.REPLACE:
                replaced.append(worker)
            elif step is Step.GIVE_UP:
                worker.stop(signal.SIGKILL, 0)
                self._log(f"{worker.spec.name} did not leave its last group {late}: it is replaced")
            elif step is Step.FAIL and is_same:
                lost_peer = self._records[worker.spec.local_rank].lost == ranks.key
                why = f"--reconfigure-timeout, as it did not join its group {late}"
                if lost_peer:
                    why = f"--reconfigure-timeout, as no round followed its group {late}"
                current.kill([worker.spec.rank], why, lost_peer)
        if not is_same and len(replaced) == len(not_stopping(current)):
            # They end with their round, as in any other job.
            return None
        # One that has been stopped may have ended already.
        stopped = replaced or any(worker.stopped_with for worker in (*current.group.running, *current.group.ended))
        if is_same and not stopped:
            return None
        return frozenset(worker.spec.local_rank for worker in not_stopping(current) if worker not in replaced)

    def variables(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        """The variables of a worker that is about to start for that round."""
        store = None if self._part is None else self._part.store
        self._records[local_rank] = WorkerRecord(started=key, store=store)
        return {LINE_VARIABLE: self._listener.address, TOKEN_VARIABLE: self._listener.expect(local_rank)}

    def start_store(self, node: NodeKey) -> None:
        """Start the store, if this node is to run it and does not yet. Raises OSError."""
        store = None if self._part is None else self._part.store
        if store is not None and store.node == node and store.port == self._store.port:
            self._store.start()

    def note_store_client(self, key: RoundKey, address: str) -> None:
        """A client has connected to the store of the round `key`, which this node serves."""
        self._store_client = key, address
        self._wake()

    def note_end(self, worker: Worker) -> None:
        """The process of a worker has ended. One of an earlier round that succeeds before the group of this one has
        formed counts as stopped, so that another one takes its place: the others wait for it."""
        local_rank, part = worker.spec.local_rank, self._part
        self._listener.finish(local_rank)
        record = self._records.pop(local_rank, None)
        if record is None or part is None or worker.stopped_with is not None:
            return
        if ended_before_its_group(record, part.key, worker.code or 0):
            worker.stopped_with = signal.SIGTERM

    def _orders(self, ranks: RankAssignment) -> dict[int, Step]:
        """Send the workers the orders that are due, and return what is due for their processes: to replace, give up or
        fail them."""
        part, now = self._part, self._loop.time()
        if part is None or part.key != ranks.key:
            return {}
        self._allow_for_stall(now)
        self._look_for_plain_script(part)
        found: dict[int, Step] = {}
        times: list[float] = []
        for local_rank, record in sorted(self._records.items()):
            due = next_step(record, part, now)
            if due.step in (Step.ASK, Step.FORM):
                forms = due.step is Step.FORM
                self._listener.send_latest(local_rank, line.order_line(ranks, local_rank, part, forms))
                if forms and part.formation is not None:
                    record = record.note_informed(part.formation, now)
                else:
                    record = record.note_asked(part.key, now)
                self._records[local_rank] = record
                due = next_step(record, part, now)
            if due.step is not Step.WAIT:
                found[local_rank] = due.step
            elif due.at is not None:
                times.append(due.at)
        self._set_timer(min(times, default=None))
        return found

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report of this node with what holds for its workers."""
        part = self._part
        if part is None:
            return replace(report, parts=with_part(report.parts, SurvivorsReport(port=self._store.port)))
        records = [record for _, record in sorted(self._records.items())]
        own = node_part(records, report.workers, part, self._store.port)
        return replace(report, parts=with_part(report.parts, replace(own, unable=self._no_block or own.unable)))

    async def close(self) -> None:
        """End the lines and the store."""
        self._set_timer(None)
        self._listener.close()
        self._store.close()

    # The lines of workers: see `LineHandler`.

    def token_of(self, text: bytes) -> str:
        """The token in a hello."""
        try:
            message = line.read_message(text)
        except ValueError:
            return ""
        return message.token if isinstance(message, WorkerHello) else ""

    def begin(self, local_rank: int, connection: LineConnection, hello: bytes) -> None:
        """A worker has connected."""
        self.line(local_rank, connection, hello)

    def line(self, local_rank: int, connection: LineConnection, text: bytes) -> None:
        """Take a message of a worker."""
        record = self._records.get(local_rank)
        try:
            message = line.read_message(text)
        except ValueError as error:
            self._log(f"a worker has sent what is no message of a survivor ({error}); it restarts with the next round")
            connection.close()
            return
        if record is None:
            return
        self._records[local_rank] = after = line.after_message(record, message, self._loop.time())
        if isinstance(message, Formed) and after.formed != record.formed:
            self._on_formed(local_rank)
        self._wake()

    def end(self, local_rank: int, connection: LineConnection) -> None:
        """A worker has ended its line: it has left its block, or has ended."""
        if (record := self._records.get(local_rank)) is not None:
            self._records[local_rank] = replace(record, able=False)
            self._wake()

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at, self._wake)
        self._timer_set_at = self._loop.time()

    def _allow_for_stall(self, now: float) -> None:
        """Give the workers anew the time that they had left when the timer was set, if it is late."""
        if self._timer is None or now - self._timer.when() <= LATE:
            return
        late = now - self._timer_set_at
        for local_rank, record in self._records.items():
            self._records[local_rank] = replace(
                record,
                asked_at=record.asked_at + late,
                informed_at=record.informed_at + late,
                lost_at=record.lost_at + late,
            )

    def _look_for_plain_script(self, part: SurvivorsAssignment) -> None:
        """A worker without a block of `Survivor` has no line to its agent: it waits for the others at the store of the
        round, where they will not come. The node of that store sees it there before it is known how the group forms."""
        if self._store_client is None or part.store is None or part.own_formation or self._no_block:
            return
        key, address = self._store_client
        if key == part.key:
            self._no_block = (SurvivorsCode.NO_BLOCK(worker=f"a worker at {address}"),)
            self._wake()


def not_stopping(current: WorkerRound) -> list[Worker]:
    """The workers that run, and are not being stopped."""
    return [worker for worker in current.group.running if worker.stopped_with is None]
