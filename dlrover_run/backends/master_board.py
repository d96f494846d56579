"""Records that live in a master: this node's end of the stream, kept up for as long as the node takes part in the job.

The master may die, be silent, come back, or be another one. Workers never notice; what the coordinator wants is what
it said last.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from dlrover_run.backends.board import Listener
from dlrover_run.backends.clock import tell_skew
from dlrover_run.backends.hosting import CannotHost, Hosting
from dlrover_run.backends.patience import Silence
from dlrover_run.backends.remote_board import RemoteBoard
from dlrover_run.backends.session import MasterRefuses, MasterUnproven, Session, SessionEnded
from dlrover_run.coordination.records import NodeStatus
from dlrover_run.coordination.rules import CHECK_NEVER
from dlrover_run.spec import JobSpec
from dlrover_run.wire.address import join_address
from dlrover_run.wire.messages import Assigned, BadMessage, Report, Welcome, rules_from
from dlrover_run.wire.own_address import Address, Unknown, look_up, route_source


class MasterBoard(RemoteBoard):
    """Keeps one stream to the master of the job."""

    def __init__(self, spec: JobSpec, listener: Listener, say: Callable[[str], None]) -> None:
        assert spec.master is not None, "the backend `master` comes with the place of one"
        self._master = spec.master
        self._rules = spec.rules
        self._hosting = Hosting(spec.master, say)
        self._skew_told = False
        super().__init__(spec, f"the master at {join_address(spec.master.host, spec.master.port)}", listener, say)

    @property
    def pids(self) -> set[int]:
        """The master, where this node has started it: it outlives the agent for the sake of the other nodes."""
        return set(self._hosting.pids)

    async def _attempt(self) -> None:
        try:
            await self._find()
        except SessionEnded as ended:
            self._note_end(str(ended))
        except MasterUnproven:
            self._note_unproven()
        except MasterRefuses as refusal:
            self._note_word(refusal)
        except CannotHost as reason:
            if self._met:
                # It could once; workers may be running, and the directory may come back.
                self._note_end(str(reason))
            else:
                self._give_up(str(reason), mistaken=True)

    async def _find(self) -> None:
        """Find the master, which this node starts if it is the host, and stay connected until that ends."""
        try:
            addresses = await look_up(self._master.host, self._master.port)
        except Unknown as unknown:
            raise SessionEnded(str(unknown)) from None
        if not self._visits and not self._leaves:
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
            self._note_skew(session.skew)
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
                except TimeoutError:
                    raise SessionEnded(f"it has read nothing for {self._rules.silence_limit:g} s") from None
                sent = status
                next_report = now + interval
            if self._closing and self._own_status() == sent:
                await session.finish()
                return

    async def _listen(self, session: Session, silence: Silence) -> None:
        while True:
            message = await session.hear()
            silence.hear(self._loop.time())
            if isinstance(message, Assigned):
                self._take(message.assignment)

    def _take_welcome(self, welcome: Welcome) -> None:
        try:
            self._rules = rules_from(welcome.rules)
        except BadMessage as error:
            raise SessionEnded(f"what it said is {error}") from None
        self._search.join_timeout = self._rules.join_timeout
        self._note_connected()
        if welcome.notice:
            self._tell_once(f"warning: {welcome.notice}")

    def _note_skew(self, skew: float | None) -> None:
        """Tell of clocks that do not agree, once, where the job checks its nodes."""
        if skew is not None and self._rules.check != CHECK_NEVER and not self._skew_told:
            self._skew_told = True
            self._say(f"warning: {tell_skew(skew)}")

    def _note_unproven(self) -> None:
        """Whoever sits at the endpoint of a running job cannot end it; at the start somebody has mistaken the token."""
        if self._met:
            self._note_end("what answers there does not know the job's token")
        else:
            self._give_up(
                f"{self._place} does not know this job's token, so this node does not obey it: "
                "give every node and the master the same one, by DLROVER_RDZV_TOKEN or --rdzv-conf token_file=PATH"
            )

    def _note_word(self, refusal: MasterRefuses) -> None:
        """The master has ended the stream with a reason, or lets the node in no more."""
        reason = f"{self._place} refuses this node: {refusal}"
        if (self._connected and refusal.retry) or (self._met and not refusal.proven):
            # Another process may have taken the place of a lost master: it cannot end a job that has begun.
            self._note_end(str(refusal))
        elif self._trains and not self._connected:
            # A master that came back has nothing to set against workers that train: it may be the one that is wrong.
            self._note_end(str(refusal))
            self._tell_once(f"{reason}; the workers train on")
        else:
            self._note_refusal(reason, refusal.retry)

    def _why_away(self, reason: str) -> str:
        said = super()._why_away(self._hosting.problem or reason)
        if self._met or self._hosting.problem is not None:
            return said
        return f"{said}; the node whose address that is starts one, or `python -m dlrover_run.master`"

    def _why_not_yet(self, reason: str) -> str:
        return self._hosting.problem or reason
