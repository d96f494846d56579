"""The client of a master: one connection, kept open for as long as the node takes part in the job."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest, RequestFailed
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.rendezvous import cut_off, kinds
from dlrover_run.rendezvous.client import AskFailed, AssignmentTracker, OnChange, ask_source
from dlrover_run.rendezvous.master_client import succession
from dlrover_run.rendezvous.master_client.asking import (
    ask_master,
    ask_master_for_stacks,
    send_question,
    server_name,
    verified_as,
)
from dlrover_run.rendezvous.master_client.launcher import CannotLaunchMaster, MasterLauncher
from dlrover_run.rendezvous.master_client.listed_hosts import resolve_listed
from dlrover_run.rendezvous.master_client.session import (
    HANDSHAKE_TIMEOUT,
    MasterNotAuthenticated,
    MasterRefused,
    MasterSession,
    Stay,
)
from dlrover_run.rendezvous.master_client.succession import Probe, Succession
from dlrover_run.rendezvous.reach import Reach
from dlrover_run.rendezvous.reconnect import Reaches, RemoteClient
from dlrover_run.spec import JobSpec
from dlrover_run.transport.addresses import Address, UnresolvedHost, resolve, route_source
from dlrover_run.transport.connection import Connect, Connection, ConnectionLost, GrpcConnection
from dlrover_run.transport.grpc_errors import ConnectionProblem
from dlrover_run.transport.messages import Ask, InvalidMessage, ReadStacks, StacksFound, Welcome, decode_rules
from dlrover_run.words.text import join_address

if TYPE_CHECKING:
    from dlrover_run.job_status.stacks import JobStacks
    from dlrover_run.job_status.status import JobStatus


class MasterClient(RemoteClient):
    """Keeps one connection to the master of the job. `connect` opens one; `rng` returns a random number from 0 to 1."""

    return_rule = "master_timeout"

    def __init__(
        self,
        spec: JobSpec,
        on_change: OnChange,
        log: Callable[[str], None],
        connect: Connect = GrpcConnection,
        rng: Callable[[], float] = random.random,
        reaches: Reaches = cut_off.reaches,
        probe: Probe = succession.probe,
    ) -> None:
        assert isinstance(spec.rendezvous, kinds.Master), "the job has a master"
        self._master = spec.rendezvous
        self._rules = spec.rules
        self._connect = connect
        self._probe = probe
        self._succession = Succession()
        self._recalling: asyncio.Task[None] | None = None
        self._launcher = MasterLauncher(self._master, log)
        self._successor: MasterLauncher | None = None
        self._successor_at = ""
        self._other_places: tuple[str, ...] = ()
        self._connection: Connection | None = None
        self._trying = ""
        self._is_elsewhere = False
        super().__init__(spec, server_name(self._master), on_change, log, rng, reaches=reaches)

    @property
    def pids(self) -> set[int]:
        """The master, if this node has started it. It outlives the agent because the other nodes need it."""
        return self._launcher.pids | (set() if self._successor is None else self._successor.pids)

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        if self.is_away and self._latest_report is not None:
            if request is not None:
                raise AskFailed(f"{self._absence}; only `status`, `stacks` and `stop` of this node work")
            # Imported only here: a node that joins does not wait for it.
            from dlrover_run.rendezvous.master_client.own_node import own_status

            return own_status(self._spec.run_id, self._rules, self._latest_report, self._absence)
        return await ask_master(self._master, self._spec.run_id, request, self._connect, self._succession.place)

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        if self.is_away and self._latest_report is not None and self.stack_source is not None:
            from dlrover_run.rendezvous.master_client.own_node import own_stacks

            try:
                return own_stacks(
                    self._spec.run_id, self._latest_report, query, await ask_source(self.stack_source, query)
                )
            except RequestFailed as failed:
                raise AskFailed(f"{failed}, and {self._absence}") from None
        place = self._succession.place
        return await ask_master_for_stacks(self._master, self._spec.run_id, query, self._connect, place)

    @property
    def _absence(self) -> str:
        return f"{self._server} cannot be reached{self._at_most()}"

    async def _attempt(self) -> None:
        try:
            await self._find_and_take_part()
        except ConnectionLost as ended:
            self._note_end(str(ended))
        except MasterNotAuthenticated:
            self._note_not_authenticated()
        except MasterRefused as refusal:
            self._note_refused(refusal)
        except CannotLaunchMaster as reason:
            if self._ever_connected:
                # It worked before. Workers may be running, and the state directory may come back.
                self._launcher.log_once(str(reason))
                self._note_end(str(reason))
            else:
                self._give_up(str(reason), is_user_error=True)

    def _learn(self, assignment: Assignment) -> None:
        self._succession.learn(assignment.successors, assignment.ranks.nodes if assignment.ranks else 0)

    async def close(self) -> None:
        if self._recalling is not None:
            self._recalling.cancel()
        await super().close()

    async def _find_and_take_part(self) -> None:
        """Connect to the master, and stay connected until that ends: where it was, at the endpoint, or where another
        node has started the next one, if this node does not start it."""
        known = self._succession
        if self._master.is_host is False and self._master.hosts and not known.candidates:
            known.learn_listed(await resolve_listed(self._master.hosts, self._spec.local_addr), len(self._master.hosts))
        is_first_attempt = not known.is_searching
        known.note_lost(self._loop.time())
        if not known.candidates or self._is_leaving or (is_first_attempt and not self._ever_connected):
            return await self._take_part_at_endpoint()
        ended = ConnectionLost("its machine does not answer")
        endpoint, port = self._master.host, self._master.port
        places = dict.fromkeys((known.place, endpoint, *known.others))
        found = await asyncio.gather(*(self._probe(place, port) for place in places))
        reached = dict(zip(places, found, strict=True))
        if self._successor is not None and known.place == self._successor_at:
            await self._successor.ensure(await resolve(known.place, port))
            reached[known.place] = Reach.ACCEPTS
        own = known.own or self._own_address
        step = known.step(own, reached, self._rules, self._loop.time())
        first = [known.place] if self._is_elsewhere and reached[known.place] is Reach.ACCEPTS else []
        # An endpoint that is of this node is not silent; while the job is elsewhere, no master is started there.
        useful = (Reach.ACCEPTS,) if self._is_elsewhere else (Reach.ACCEPTS, Reach.REFUSES)
        at_endpoint = reached[endpoint] in useful
        for place in (*first, *([""] if at_endpoint else []), *step.follow):
            try:
                return await (self._take_part_in(place) if place else self._take_part_at_endpoint())
            except ConnectionLost as error:
                if self._connected:
                    raise
                ended = error
        if step.starts is not None and own is not None:
            return await self._succeed(own, step.starts)
        raise ConnectionLost(f"{ended}; {step.obstacle}") if step.obstacle else ended

    async def _succeed(self, own: str, lost: LostMaster) -> None:
        """Start the next master on this node, and take part in it."""
        if self._ever_connected:
            self._log_once(f"{self._server} is lost with its machine; this node starts the next one")
        else:
            waited = f"{succession.FIRST_DELAY:g} s"
            self._log_once(f"{self._server} was not found within {waited}; this node starts one in its place")
        spec = replace(self._master, host=own, bind=own, is_host=True)
        self._successor, self._successor_at = MasterLauncher(spec, self._log, lost), own
        self._other_places = self._succession.other_places(own)
        await self._successor.ensure(await resolve(own, self._master.port))
        if self._successor.problem is not None:
            raise ConnectionLost(self._successor.problem)
        await self._take_part_in(own)

    async def _take_part_in(self, place: str) -> None:
        """Take part in the job of the master at another address than the endpoint."""
        try:
            addresses = await resolve(place, self._master.port)
        except UnresolvedHost as unknown:
            raise ConnectionLost(str(unknown)) from None
        self._trying = place
        for spec in verified_as(self._master, place):
            try:
                return await self._take_part_at(addresses, spec)
            except ConnectionLost as error:
                if self._connected:
                    raise
                ended = error
        if ConnectionProblem.OTHER_NAME.value in str(ended):
            self._log_once(
                f"the next master, on {place}, is not trusted: with TLS its certificate has to be for {place} or for "
                f"{self._master.host}"
            )
        raise ended

    async def _recall(self, own: str) -> None:
        """While this node has the successor of the master: send the nodes of a master at the endpoint here, and those
        of the one that it has replaced, which a divided network may have hidden, or of a candidate before this one,
        which may have started a master at the same time. A successor that has formed no round sends its own nodes
        there instead."""
        places = dict.fromkeys((self._master.host, *self._other_places))
        while True:
            await asyncio.sleep(succession.RECALL_INTERVAL)
            for place in places:
                if await self._probe(place, self._master.port) is not Reach.ACCEPTS:
                    continue
                with contextlib.suppress(AskFailed, TimeoutError):
                    async with TimeLimit(HANDSHAKE_TIMEOUT):
                        if await self._recall_from(place, own):
                            return

    async def _recall_from(self, place: str, own: str) -> bool:
        """Let one of the masters at `place` and on this node have all nodes; return whether it is the other one. Raises
        AskFailed."""
        there = "" if place == self._master.host else place
        if self.assignment.phase is PlanPhase.TRAINING or self._formed_round:
            await send_question(self._master, self._spec.run_id, Ask(moved=own), self._connect, there)
            return False
        # Any program may accept connections there: the nodes are sent only to one that answers as a master.
        await send_question(self._master, self._spec.run_id, Ask(), self._connect, there)
        await send_question(self._master, self._spec.run_id, Ask(moved=place), self._connect, own)
        return True

    async def _take_part_at_endpoint(self) -> None:
        """Connect to the master at the endpoint, which this node starts if it is the host, and stay connected until
        that ends."""
        self._trying = ""
        try:
            addresses = await resolve(self._master.host, self._master.port)
        except UnresolvedHost as unknown:
            raise ConnectionLost(str(unknown)) from None
        if not self._is_leaving:
            await self._launcher.ensure(addresses)
        ended = ConnectionLost("it has no address")
        # A name may have addresses of two families, and a gRPC channel takes those of one.
        for _, group in itertools.groupby(addresses, lambda address: address.family):
            try:
                return await self._take_part_at(list(group))
            except ConnectionLost as error:
                if self._connected:
                    raise
                ended = error
        raise ended

    @property
    def _formed_round(self) -> bool:
        """Whether the coordinator of this node has formed a round itself."""
        report = self._latest_report
        return report is not None and report.known_round.epoch == self.assignment.epoch > 0

    async def _take_part_at(self, addresses: list[Address], spec: kinds.Master | None = None) -> None:
        if self._spec.local_addr is None:
            self._own_address = route_source(addresses[0]) or self._own_address
        connection = self._connection = self._connect(spec or self._master, addresses)
        place = self._trying or addresses[0].host
        try:
            session = MasterSession(connection, self._master.token)
            report = self._own_report()
            welcome = await session.join(self._spec.run_id, report, self._rules)
            self._note_place(place)
            self._apply_welcome(welcome)
            stay = Stay(
                session,
                self._rules,
                self._own_report,
                lambda: self._closing,
                self._take,
                lambda text: self._log_once(f"warning: {text}"),
                self._answer_stacks,
                self._changed,
                self._wait_for_change,
            )
            await stay.run(report)
        finally:
            if self._recalling is not None:
                self._recalling.cancel()
                self._recalling = None
            self._connection = None
            await connection.close()

    def _note_place(self, place: str) -> None:
        """Note where the master is that has taken this node in."""
        self._is_elsewhere = bool(self._trying)
        if self._is_elsewhere and place != self._succession.place:
            self._log(f"the master of the job is now at {join_address(place, self._master.port)}")
            self._loss_shown = False
        self._succession.note_connected(place)
        self._server = server_name(replace(self._master, host=self._trying or self._master.host))
        if self._trying and place == self._successor_at:
            self._recalling = self._background.start(self._recall(place))

    async def _answer_stacks(self, message: ReadStacks) -> StacksFound | None:
        """The stacks of this node's workers; None if there are none that can be sent."""
        if self.stack_source is None:
            return None
        # Imported only here: a node that is not asked does not need it.
        from dlrover_run.rendezvous.answer_stacks import answer_stacks

        found = await answer_stacks(self.stack_source, message, self._log_once)
        return None if found is None else StacksFound(message.number, msgspec.Raw(msgspec.json.encode(found)))

    def _apply_welcome(self, welcome: Welcome) -> None:
        try:
            self._rules = decode_rules(welcome.rules)
        except InvalidMessage as error:
            raise ConnectionLost(f"its message is {error}") from None
        self._follow_rules(self._rules)
        self._note_connected()
        if welcome.notice:
            self._log_once(f"warning: {welcome.notice}")

    def _note_not_authenticated(self) -> None:
        """Handle a server without the job's token. At the start the token is wrong; later another process may listen at
        the endpoint, and it cannot end the job."""
        if self._ever_connected:
            self._note_end("the server there does not know the job's token")
        else:
            self._give_up(
                f"{self._server} does not know this job's token, so this node ignores it: "
                "give every node and the master the same one, by DLROVER_RDZV_TOKEN or --rdzv-conf token_file=PATH"
            )

    def _note_refused(self, refusal: MasterRefused) -> None:
        reason = f"{self._server} refuses this node: {refusal}"
        if refusal.moved and refusal.authenticated:
            self._follow_to(refusal.moved, str(refusal))
        elif refusal.over and refusal.authenticated:
            self._give_up(reason)
        elif (self._connected and refusal.retry) or (self._ever_connected and not refusal.authenticated):
            # Another process may listen at the address of a lost master: it cannot end a running job.
            self._note_end(str(refusal))
            if self._is_training and not (self._is_done or self._is_leaving):
                # A master has no console of its own, and its reason may be an internal error.
                self._log_once(f"{reason}; the workers train on")
        elif self._is_training and not self._connected:
            # A master that came back must not end running workers: it may be the wrong one.
            self._note_end(str(refusal))
            self._log_once(f"{reason}; running workers do not need it")
        else:
            self._note_refusal(reason, refusal.retry)

    def _follow_to(self, place: str, reason: str) -> None:
        """Look for the master of the job at another address, to which the one at the endpoint sends this node."""
        self._note_end(reason, show_reason=True)
        if not self._succession.candidates:
            self._succession.learn((place,), 0)
        self._succession.place = place
        self._ever_connected = True
        # A successor without a round sends its nodes to a master that is back at the endpoint.
        self._is_elsewhere = place != self._master.host
        self._backoff.retry_now()
        if self._latest_report is not None and self._latest_report.known_round == RoundKey():
            # It was in no round of the other master, whose epoch may be later than that of the successor.
            self._assignments = AssignmentTracker()

    def _own_report(self) -> NodeReport:
        report = super()._own_report()
        if self._assignments.assignment.epoch == 0 and report.known_round == RoundKey():
            report = replace(report, epoch=0)
        return report

    def _note_end(self, reason: str, show_reason: bool = False) -> None:
        if self._connected:
            self._succession.note_lost(self._loop.time())
        super()._note_end(self._launcher.problem or reason, show_reason)

    def _describe_absence(self, reason: str) -> str:
        text = super()._describe_absence(reason)
        if self._ever_connected or self._launcher.problem is not None:
            return text
        return f"{text}; the node with that address starts a master, or start one with `python -m dlrover_run.master`"
