"""The part that the clients of a master and of etcd share: connect, reconnect after a loss, and give up.

The server may die, hang and come back. Workers are not affected: the last assignment stays in force.
"""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec

from dlrover_run.background import Background, wait_for_event
from dlrover_run.coordination.records.assignment import Assignment, Peer, Waiting
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import cut_off
from dlrover_run.rendezvous.client import AssignmentTracker, OnChange, StackSource
from dlrover_run.rendezvous.cut_off import CutOffDetector
from dlrover_run.spec import JobSpec
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.words.reasons import sentence

Reaches = Callable[[str, int], Awaitable[bool]]
"""Finds out whether a machine answers at an address and a port."""

BACKOFF_FIRST = 0.2
"""Maximum seconds of the pause before the second attempt to connect."""

BACKOFF_MAX = 3.0
"""Maximum seconds of a pause between two attempts. A coordinator's RETURN_GRACE is twice that."""

ID_IN_USE_TIMEOUT = 30.0
"""Seconds during which a temporary refusal leads to another attempt; then the node gives up with its reason.

A node id is refused while another process with that id is alive, which may be this node's dying predecessor.
"""

CLOSE_TIMEOUT = 2.0
"""Seconds that a leaving node waits until its last report is stored; after that the others find it lost instead."""

_WITHOUT_WORKERS = frozenset({NodePhase.WAITING, NodePhase.SUCCEEDED, NodePhase.FAILED})


class ReconnectBackoff:
    """When to try to connect again, and when to give up. Pure: times of one monotonic clock are passed in.

    A node with running workers retries for ever. Without workers it gives up when the server has not been found for
    `join_timeout` seconds, has been unreachable for `return_timeout` seconds after a connection to it, or has refused
    the node for `refusal_timeout` seconds. `rng` returns a random number from 0 to 1.
    """

    def __init__(
        self,
        join_timeout: float,
        now: float,
        rng: Callable[[], float],
        refusal_timeout: float = ID_IN_USE_TIMEOUT,
        return_timeout: float | None = None,
    ) -> None:
        self.join_timeout = join_timeout
        self.return_timeout = join_timeout if return_timeout is None else return_timeout
        self._ever_connected = False
        self.refusal_timeout = refusal_timeout
        self._rng = rng
        self._failures = 0
        self._connected_at = now
        self._away_since: float | None = now
        self._idle_since: float | None = now
        self._refused_since: float | None = None

    def note_phase(self, phase: NodePhase, now: float) -> None:
        if phase not in _WITHOUT_WORKERS:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def note_connected(self, now: float) -> None:
        self._connected_at = now
        self._ever_connected = True
        self._away_since = None
        self._refused_since = None

    def note_disconnected(self, now: float) -> None:
        self._away_since = now
        self._refused_since = None
        # Otherwise a node would reconnect without a pause to a master that ends every connection at once.
        self._failures = 0 if now - self._connected_at >= BACKOFF_MAX else self._failures + 1

    def note_failed(self) -> None:
        self._failures += 1
        self._refused_since = None

    def note_refused(self, now: float) -> bool:
        """Record a temporary refusal; return whether it has lasted too long."""
        self._failures += 1
        if self._away_since is None:
            self._away_since = now
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self.refusal_timeout

    def retry_now(self) -> None:
        """Make the next attempt without a pause, because the reason of the refusal is gone."""
        self._failures = 0

    def next_pause(self) -> float:
        """Seconds until the next attempt; random, so that a thousand nodes do not connect at once.

        With n failures so far: none for n = 0, else up to the least of BACKOFF_MAX and BACKOFF_FIRST * 2**n.
        """
        if not self._failures:
            return 0.0
        return self._rng() * min(BACKOFF_MAX, BACKOFF_FIRST * 2.0 ** min(self._failures, 16))

    def time_left(self, now: float) -> float | None:
        """Seconds after which the node gives up; None while it is connected or has running workers."""
        if self._away_since is None or self._idle_since is None:
            return None
        timeout = self.return_timeout if self._ever_connected else self.join_timeout
        return max(0.0, max(self._away_since, self._idle_since) + timeout - now)


class RemoteClient(abc.ABC):
    """A client that runs in a task of its own on the running loop. `server` is the name of the server in messages.

    `return_rule` is the rule of the job, and the key of --rdzv-conf, for how long a node without running workers looks
    for a server that it has lost.

    The client adds two things to the agent's report: the address that this node advertises, because it knows from which
    of its addresses it reaches the server, and what a node has to repeat to a coordinator that has lost its records.
    """

    return_rule = "join_timeout"

    def __init__(
        self,
        spec: JobSpec,
        server: str,
        on_change: OnChange,
        log: Callable[[str], None],
        rng: Callable[[], float] = random.random,
        refusal_timeout: float = ID_IN_USE_TIMEOUT,
        reaches: Reaches = cut_off.reaches,
    ) -> None:
        self._spec = spec
        self._server = server
        self._on_change = on_change
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._backoff = ReconnectBackoff(
            spec.rules.join_timeout, self._loop.time(), rng, refusal_timeout, getattr(spec.rules, self.return_rule)
        )
        self._latest_report: NodeReport | None = None
        self._changed = asyncio.Event()
        self._reaches = reaches
        self._cut_off_timeout = spec.rules.cut_off_timeout
        self._peers: tuple[Peer, ...] = ()
        self._cut_off_watch: asyncio.Task[None] | None = None
        self._own_address = spec.local_addr
        self._assignments = AssignmentTracker()
        self._ever_connected = False
        self._connected = False
        self._loss_shown = False
        self._closing = False
        self._logged: set[str] = set()
        self.problem: str | None = None
        self.is_user_error = False
        self.is_cut_off = False
        self.stack_source: StackSource | None = None
        self._background = Background(self._note_internal_error)
        self._task = self._background.start(self._take_part())

    @property
    def assignment(self) -> Assignment:
        return self._assignments.assignment

    @property
    def pids(self) -> set[int]:
        return set()

    @property
    def is_away(self) -> bool:
        """Whether the server cannot be reached now, and could be before."""
        return self._ever_connected and not self._connected

    def report(self, report: NodeReport) -> None:
        if report != self._latest_report:
            before, self._latest_report = self._latest_report, report
            self._backoff.note_phase(report.phase, self._loop.time())
            self._changed.set()
            if before is not None and before.phase is not report.phase and self.is_away and not self._is_leaving:
                self._show_end_of_workers(report)

    async def close(self) -> None:
        self._closing = True
        self._changed.set()
        if self._connected:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        await self._background.close()

    @abc.abstractmethod
    async def _attempt(self) -> None:
        """Connect, and stay connected until the connection ends or `close` has finished. Failures go to the `_note_...`
        methods of this class; only internal errors are raised."""

    async def _take_part(self) -> None:
        await self._changed.wait()
        while not self._is_done:
            await asyncio.sleep(self._backoff.next_pause())
            await self._attempt()

    @property
    def _is_done(self) -> bool:
        return self._closing or self.problem is not None or self.assignment.phase in OVER

    def _take(self, assignment: Assignment) -> None:
        # A coordinator that has just taken over may not know them yet.
        self._peers = assignment.peers or self._peers
        self._learn(assignment)
        before = self._assignments.memory
        if self._assignments.take(assignment):
            if self._assignments.memory != before:
                # The memory is part of the report that is sent, and the agent does not know of it.
                self._changed.set()
            self._on_change()

    def _learn(self, assignment: Assignment) -> None:  # noqa: B027 (etcd has no successors)
        """Note what an assignment says of where the next server may be."""

    def _follow_rules(self, rules: JobRules) -> None:
        """Take the times of the job, which are those of its first node."""
        self._backoff.join_timeout = rules.join_timeout
        self._backoff.return_timeout = getattr(rules, self.return_rule)
        self._cut_off_timeout = rules.cut_off_timeout

    def _note_connected(self) -> None:
        if self._cut_off_watch is not None:
            self._cut_off_watch.cancel()
            self._cut_off_watch = None
        self._backoff.note_connected(self._loop.time())
        self._ever_connected = self._connected = True
        if self._loss_shown:
            self._loss_shown = False
            self._log(f"{self._server} is back")

    def _note_end(self, reason: str, show_reason: bool = False) -> None:
        """Handle the end of the connection, or a failed attempt. `show_reason` adds the reason to the logged line."""
        now = self._loop.time()
        if self._connected:
            self._connected = False
            self._backoff.note_disconnected(now)
            if self._cut_off_timeout and self._peers:
                self._cut_off_watch = self._background.start(self._watch_others())
        else:
            self._backoff.note_failed()
        if self._is_done or self._is_leaving:
            # The same signal may have ended the server, and this node does not need it any more.
            return
        if self._ever_connected and not self._loss_shown:
            self._loss_shown = True
            # Workers that lost a peer together with the server may be about to fail, so this says no more of them.
            then = "running workers do not need it" if self._is_training else f"this node waits for it{self._at_most()}"
            because = f" ({reason})" if show_reason else ""
            self._log(f"lost {self._server}{because}; {then}")
        left = self._backoff.time_left(now)
        if left == 0:
            self._give_up(self._describe_absence(reason))
        elif not self._ever_connected:
            self._show_waiting(f"{self._server} ({reason})", left)

    def _note_refusal(self, reason: str, retry: bool) -> None:
        """Handle a refusal; `retry`: it may be temporary."""
        if self._backoff.note_refused(self._loop.time()) or not retry:
            self._give_up(reason)
        else:
            self._show_waiting(reason, None)

    def _show_end_of_workers(self, report: NodeReport) -> None:
        """Say what the workers came to while the server is away, and for how long this node waits for it."""
        if report.phase is NodePhase.FAILED and report.failure is not None:
            what = f"rank {report.failure.rank} failed: {report.failure.exit_text}"
        elif report.phase is NodePhase.SUCCEEDED:
            what = "the workers have finished"
        else:
            return
        self._log(f"{what}; this node waits for {self._server}{self._at_most()}")

    def _at_most(self) -> str:
        left = self._backoff.time_left(self._loop.time())
        return "" if left is None else f", at most {left:.0f} s"

    async def _watch_others(self) -> None:
        """End this node's part in the job if it cannot reach the server nor another node. Cancelled by the next
        connection to the server."""
        detector = CutOffDetector(self._cut_off_timeout, self._loop.time())
        while not (self._is_done or self._is_leaving):
            due = self._loop.time() + detector.interval
            await asyncio.sleep(detector.interval)
            is_time = detector.is_cut_off(self._loop.time(), due)
            if any(await asyncio.gather(*(self._reaches(peer.address, peer.port) for peer in self._peers))):
                detector.note_answer(self._loop.time())
            elif is_time:
                self.is_cut_off = True
                self._give_up(
                    f"this node is cut off: neither {self._server} nor another node has answered for "
                    f"{self._cut_off_timeout:g} s (--rdzv-conf cut_off_timeout)"
                )

    def _describe_absence(self, reason: str) -> str:
        if self._ever_connected:
            duration = f"{self._backoff.return_timeout:g} s (--rdzv-conf {self.return_rule})"
            return f"{self._server} was unreachable for {duration}: {reason}"
        return (
            f"{self._server} was not found within {self._backoff.join_timeout:g} s (--rdzv-conf join_timeout): {reason}"
        )

    def _show_waiting(self, what: str, seconds: float | None) -> None:
        """Show what the node waits for, until a coordinator sends that."""
        if self._assignments.show_waiting(Waiting(sentence(what), seconds)):
            self._on_change()

    def _give_up(self, problem: str, is_user_error: bool = False) -> None:
        self.problem = problem
        self.is_user_error = is_user_error
        self._on_change()

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)

    @property
    def _is_leaving(self) -> bool:
        return self._latest_report is not None and self._latest_report.phase in (NodePhase.LEAVING, NodePhase.LEFT)

    @property
    def _is_training(self) -> bool:
        return self._latest_report is not None and self._latest_report.phase is NodePhase.RUNNING

    def _own_report(self) -> NodeReport:
        assert self._latest_report is not None, "`_take_part` waits for the first report"
        report = self._latest_report
        if self._own_address is not None:
            report = msgspec.structs.replace(report, address=self._own_address)
        memory = self._assignments.memory
        if report.parts and memory.by_feature:
            report = msgspec.structs.replace(report, parts=memory.add_to(report.parts))
        return report

    async def _wait_for_change(self, until: float | None = None) -> None:
        """Return when there is a new report, or `close` was called, or at that time."""
        self._changed.clear()
        await wait_for_event(self._changed, None if until is None else until - self._loop.time())

    def _note_internal_error(self, error: Exception) -> None:
        self._give_up(internal_error(error, f" with {self._server}"))
        log_frames(self._log, error)
