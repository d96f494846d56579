"""Records that live in a master: this node's end of the stream, kept up for as long as the node takes part in the job.

The master may die, be silent, come back, or be another one. Workers never notice; what the coordinator wants is what
it said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable

import msgspec

from dlrover_run.backends.board import Listener
from dlrover_run.backends.hosting import Hosting
from dlrover_run.backends.own_address import Address, Unknown, look_up, route_source
from dlrover_run.backends.patience import Search, Silence
from dlrover_run.backends.session import MasterRefuses, MasterUnproven, Session, SessionEnded
from dlrover_run.coordination.records import MAX_WHAT, OVER, Assignment, NodePhase, NodeStatus, Waiting
from dlrover_run.spec import JobSpec
from dlrover_run.wire.address import join_address
from dlrover_run.wire.messages import Assigned, BadMessage, Report, Welcome, rules_from

CLOSE_TIMEOUT = 2.0
"""Seconds that a node which leaves gives its last status to reach the master; then the master finds it lost instead."""


class MasterBoard:
    """Keeps one stream to the master of the job, in a task of its own on the running loop.

    The address that this node advertises is filled in here: who reaches the master knows from which of his addresses.
    """

    def __init__(self, spec: JobSpec, listener: Listener, say: Callable[[str], None]) -> None:
        assert spec.master is not None, "the backend `master` comes with the place of one"
        self._spec = spec
        self._master = spec.master
        self._place = join_address(spec.master.host, spec.master.port)
        self._listener = listener
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._rules = spec.rules
        self._search = Search(spec.rules.join_timeout, self._loop.time(), random.random)
        self._hosting = Hosting(spec.master, say)
        self._status: NodeStatus | None = None
        self._changed = asyncio.Event()
        self._own_address = spec.local_addr
        self._epoch = 0
        self._met = False
        self._connected = False
        self._told_lost = False
        self._closing = False
        self._told: set[str] = set()
        self.assignment = Assignment()
        self.problem: str | None = None
        self.mistaken = False
        self._task = asyncio.ensure_future(self._take_part())
        self._task.add_done_callback(self._note_defect)

    @property
    def pids(self) -> set[int]:
        """The master, where this node has started it: it outlives the agent for the sake of the other nodes."""
        return set(self._hosting.pids)

    def publish(self, status: NodeStatus) -> None:
        """Put this node's latest status on the board; one that has not changed costs nothing."""
        if status != self._status:
            self._status = status
            self._search.see(status.phase, self._loop.time())
            self._changed.set()

    async def close(self) -> None:
        """Let the last status reach the master, if there is one now, and let go of the connection."""
        self._closing = True
        self._changed.set()
        if self._connected:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _take_part(self) -> None:
        await self._changed.wait()
        while not (self._closing or self.problem or self.assignment.phase in OVER):
            await asyncio.sleep(self._search.pause())
            try:
                await self._attempt()
            except SessionEnded as ended:
                self._note_end(str(ended))
            except MasterUnproven:
                self._note_unproven()
            except MasterRefuses as refusal:
                self._note_refusal(refusal)

    async def _attempt(self) -> None:
        """Find the master, which this node starts if it is the host, and stay connected until that ends."""
        try:
            addresses = await look_up(self._master.host, self._master.port)
        except Unknown as unknown:
            raise SessionEnded(str(unknown)) from None
        await self._hosting.ensure(addresses)
        ended = SessionEnded("it has no address")
        # A name may stand for addresses of two families, of which gRPC takes one at a time.
        for _, group in itertools.groupby(addresses, lambda address: address.family):
            try:
                return await self._meet(list(group))
            except SessionEnded as error:
                if self._connected:
                    raise
                ended = error
        raise ended

    async def _meet(self, addresses: list[Address]) -> None:
        if self._spec.local_addr is None:
            self._own_address = route_source(addresses[0]) or self._own_address
        session = Session(self._master, addresses)
        try:
            status = self._own_status()
            welcome = await session.join(self._spec.run_id, status, self._rules)
            self._take_welcome(welcome)
            await self._stay(session, status)
        finally:
            await session.close()

    async def _stay(self, session: Session, joined: NodeStatus) -> None:
        """Report and listen until the stream ends, which is SessionEnded, or `close` has been carried out."""
        silence = Silence(self._rules.silence_limit, self._loop.time())
        listening = asyncio.ensure_future(self._listen(session, silence))
        reporting = asyncio.ensure_future(self._report(session, silence, joined, listening))
        try:
            await asyncio.wait([reporting, listening], return_when=asyncio.FIRST_COMPLETED)
            if reporting.done():
                reporting.result()
            await listening
        finally:
            for task in (reporting, listening):
                task.cancel()
            # Both may have failed; one has been heard.
            await asyncio.gather(reporting, listening, return_exceptions=True)

    async def _report(
        self, session: Session, silence: Silence, sent: NodeStatus, listening: asyncio.Future[None]
    ) -> None:
        """Send each change of the status, and a sign of life in each interval, until nobody listens any more."""
        interval = self._rules.keep_alive_interval
        next_report = self._loop.time() + interval
        # A cancellation is not enough: before Python 3.12 `wait_for` loses one that comes in the very moment in which
        # what it waits for is done, and the end of a stream is what both of them wait for.
        while not listening.done():
            due = min(next_report, silence.deadline)
            if self._own_status() == sent and not self._closing:
                await self._wait_for_change(due)
            now = self._loop.time()
            if silence.too_long(due, now):
                raise SessionEnded(f"it has been silent for {self._rules.silence_limit:g} s")
            status = self._own_status()
            if status != sent or now >= next_report:
                try:
                    await asyncio.wait_for(session.tell(Report(status)), self._rules.silence_limit)
                except asyncio.TimeoutError:
                    raise SessionEnded(f"it has read nothing for {self._rules.silence_limit:g} s") from None
                sent = status
                next_report = now + interval
            if self._closing and self._own_status() == sent:
                await session.finish()
                return

    async def _wait_for_change(self, due: float) -> None:
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), due - self._loop.time())

    async def _listen(self, session: Session, silence: Silence) -> None:
        while True:
            message = await session.hear()
            silence.hear(self._loop.time())
            if isinstance(message, Assigned):
                self._take(message.assignment)

    def _take(self, wanted: Assignment) -> None:
        if wanted.epoch < self._epoch:
            # From a coordinator that has a successor and has not noticed yet.
            return
        self._epoch = wanted.epoch
        if wanted.key < self.assignment.key and wanted.phase not in OVER:
            # From a master that began anew and is still to hear of the latest round, whose workers go on.
            return
        if wanted != self.assignment:
            self.assignment = wanted
            self._listener()

    def _take_welcome(self, welcome: Welcome) -> None:
        try:
            self._rules = rules_from(welcome.rules)
        except BadMessage as error:
            raise SessionEnded(f"what it said is {error}") from None
        self._search.join_timeout = self._rules.join_timeout
        self._search.connected(self._loop.time())
        self._met = self._connected = True
        if self._told_lost:
            self._told_lost = False
            self._say(f"the master at {self._place} is back")
        if welcome.notice:
            self._tell_once(f"warning: {welcome.notice}")

    def _note_end(self, reason: str) -> None:
        """The stream has ended, or an attempt has failed."""
        now = self._loop.time()
        if self._connected:
            self._connected = False
            self._search.lost(now)
        else:
            self._search.failed()
        if self._closing or self.assignment.phase in OVER:
            return
        if self._met and not self._told_lost:
            self._told_lost = True
            then = "the workers train on" if self._trains else "this node goes on looking for it"
            self._say(f"lost the master at {self._place}; {then}")
        left = self._search.left(now)
        if left == 0:
            self._give_up(self._why_away(reason))
        elif not self._met:
            self._wait_for(f"a master at {self._place} ({self._hosting.problem or reason})", left)

    def _note_unproven(self) -> None:
        """Whoever sits at the endpoint of a running job cannot end it; at the start somebody has mistaken the token."""
        if self._met:
            self._note_end("what answers there does not know the job's token")
        else:
            self._give_up(
                f"the master at {self._place} does not know this job's token, so this node does not obey it: "
                "give every node and the master the same one, by DLROVER_RDZV_TOKEN or --rdzv-conf token_file=PATH"
            )

    def _note_refusal(self, refusal: MasterRefuses) -> None:
        """The master has ended the stream with a reason, or lets the node in no more."""
        reason = f"the master at {self._place} refuses this node: {refusal}"
        if self._connected and refusal.retry:
            self._note_end(str(refusal))
        elif self._trains and not self._connected:
            # A master that came back has nothing to set against workers that train: it may be the one that is wrong.
            self._note_end(str(refusal))
            self._tell_once(f"{reason}; the workers train on")
        elif self._search.refused(self._loop.time()) or not refusal.retry:
            self._give_up(reason)
        else:
            self._wait_for(reason, None)

    def _why_away(self, reason: str) -> str:
        for_seconds = f"{self._search.join_timeout:g} s (--rdzv-conf join_timeout)"
        if self._met:
            return f"the master at {self._place} has been away for {for_seconds}: {self._hosting.problem or reason}"
        found_none = f"no master was found at {self._place} within {for_seconds}"
        if self._hosting.problem is not None:
            return f"{found_none}: {self._hosting.problem}"
        return f"{found_none}: {reason}; the node whose address that is starts one, or `python -m dlrover_run.master`"

    def _wait_for(self, what: str, seconds: float | None) -> None:
        """Show what the node waits for, while no coordinator says so."""
        if self.assignment.seat is None:
            waiting = Waiting(what[:MAX_WHAT], seconds)
            self.assignment = msgspec.structs.replace(self.assignment, waiting=waiting)
            self._listener()

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._listener()

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)

    @property
    def _trains(self) -> bool:
        return self._status is not None and self._status.phase is NodePhase.RUNNING

    def _own_status(self) -> NodeStatus:
        assert self._status is not None, "nothing is done before the first status"
        if self._own_address is None:
            return self._status
        return msgspec.structs.replace(self._status, address=self._own_address)

    def _note_defect(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"internal error with the master at {self._place}: {error!r}; please report it")
