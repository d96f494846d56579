"""What a node does with each of its workers so that the process group of its round forms: pure.

The agent knows each worker by its `WorkerRecord`, asks `next_step` what is due, carries it out, and notes it in the
record. Times are seconds of the agent's own monotonic clock. A worker that keeps its process takes these steps:

  asked to offer -> offered a handle -> informed of all handles -> in the group -> (a peer is lost) -> asked to offer

A worker that does not answer in time is ended, so the round never waits for it any longer. In the place of one of an
earlier round that does not leave its last group, another one starts in the same round: the round has begun because of a
failure or a change that was counted already. The end of any other is a failure of the round, which is counted once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.survivors.model import Formation, Store, SurvivorsAssignment, SurvivorsReport
from dlrover_run.words.reasons import Reasons

NO_ROUND = RoundKey()

PEER_MARGIN = 1.0
"""Seconds that a worker which has reported the loss of a peer gets beyond the limit. By then the peer that did not
answer was ended, here or on its own node, and is the failure that is named."""


class Step(enum.Enum):
    """What is due for a worker."""

    WAIT = "nothing, as far as is known"
    ASK = "send it the order to leave its last group, and to offer a handle"
    FORM = "send it how its group is formed"
    REPLACE = "stop it as at the end of a round, and start another one in its place"
    GIVE_UP = "kill it, and start another one in its place"
    FAIL = "kill it, as a failure of the round"


class Due(NamedTuple):
    """The step that is due, and when to ask again though nothing has happened, None for never."""

    step: Step
    at: float | None = None


def follow(before: SurvivorsAssignment | None, given: SurvivorsAssignment | None, key: RoundKey) -> SurvivorsAssignment:
    """The assignment that is in force for the round `key`, in which the node has ranks, after `before` and after one
    with the part `given`.

    What is known of a round stays: a coordinator that has lost its records sends no part at first. A round without any
    belongs to a job whose workers restart.
    """
    known = before if before is not None and before.key == key else None
    if given is None or given.key != key:
        return known or SurvivorsAssignment(key, formation=Formation(key))
    if known is None:
        return given
    return replace(given, store=known.store, formation=known.formation or given.formation)


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running worker as its agent knows it.

    It was started for the round `started` with the store `store`. `able` is set once it has connected and can take part
    in a group that is formed in place; `unable` says why it cannot. `plain`: it forms its group as any
    script does, and such a group cannot be changed later. The other fields name the latest round for which something
    holds: it was `asked` for a handle, has `offered` the handle `handle`, was `informed` how to form, is or was in the
    group that has `formed`, and has `lost` it. `asked_at` is when it was first asked without an answer since.
    """

    started: RoundKey
    store: Store | None = None
    able: bool = False
    unable: Reasons = ()
    plain: bool = False
    asked: RoundKey = NO_ROUND
    asked_at: float = 0.0
    offered: RoundKey = NO_ROUND
    handle: str = ""
    informed: RoundKey = NO_ROUND
    informed_at: float = 0.0
    formed: RoundKey = NO_ROUND
    lost: RoundKey = NO_ROUND
    lost_at: float = 0.0

    def note_hello(self) -> WorkerRecord:
        """The record of a worker that has connected and can take part, unless it is too late: how its group is formed
        may be known before it has connected."""
        return replace(self, able=not self.plain)

    def note_asked(self, key: RoundKey, now: float) -> WorkerRecord:
        answered = self.offered == self.asked
        return replace(self, asked=key, asked_at=now if answered else self.asked_at)

    def note_offer(self, key: RoundKey, handle: str) -> WorkerRecord:
        """The record after an offer; an offer for a round that it was not asked for is too late, and is ignored."""
        return replace(self, offered=key, handle=handle) if key == self.asked else self

    def note_informed(self, formation: Formation, now: float) -> WorkerRecord:
        """The record after it was informed how its group is formed. In a `plain` group it ends with its round."""
        plain = self.plain or not formation.in_place
        return replace(self, informed=formation.key, informed_at=now, plain=plain, able=self.able and not plain)

    def note_formed(self, key: RoundKey) -> WorkerRecord:
        return replace(self, formed=key) if key == self.informed else self

    def note_lost(self, key: RoundKey, now: float) -> WorkerRecord:
        """The record after a report that the group of that round was lost, or could not be formed."""
        return replace(self, lost=key, lost_at=now) if key == self.informed else self


def next_step(worker: WorkerRecord, part: SurvivorsAssignment, now: float) -> Due:
    """What is due for the worker in the round of that assignment, which is the round in which the node has ranks."""
    key, formation = part.key, part.own_formation
    if worker.lost == key:
        # A peer has ended, so another round is about to begin. If it does not, no other worker reports this. A group
        # that has never formed gets no more time than one whose workers do not answer.
        since = worker.lost_at if worker.formed == key else worker.informed_at
        return _within(since, part.timeout + PEER_MARGIN, now, Step.FAIL)
    if worker.formed == key:
        return Due(Step.WAIT)
    if formation is None:
        return _before_offers_are_complete(worker, part, now)
    if not formation.in_place and worker.started != key:
        return Due(Step.REPLACE)
    if worker.informed != key:
        return Due(Step.FORM)
    return _within(worker.informed_at, part.timeout, now, Step.FAIL) if formation.in_place else Due(Step.WAIT)


def _before_offers_are_complete(worker: WorkerRecord, part: SurvivorsAssignment, now: float) -> Due:
    is_new = worker.started == part.key
    if not is_new and not can_survive(worker, part):
        return Due(Step.REPLACE)
    if worker.offered == part.key or not worker.able:
        return Due(Step.WAIT)
    if worker.asked != part.key:
        return Due(Step.ASK)
    # One that has started for this round may never answer, and nor may those that follow it: that must have an end.
    return _within(worker.asked_at, part.timeout, now, Step.FAIL if is_new else Step.GIVE_UP)


def can_survive(worker: WorkerRecord, part: SurvivorsAssignment) -> bool:
    """Whether a worker of an earlier round can take part in the next group. One that has not connected, as its script
    knows nothing of this, restarts as in any other job; so does one whose store is not that of the round."""
    return worker.able and worker.store is not None and worker.store == part.store


def ended_before_its_group(worker: WorkerRecord, key: RoundKey, code: int) -> bool:
    """Whether a worker that has ended with this code is to be replaced in the round `key` as if it had never been in
    it: it is of an earlier round, and its script has ended before it offered a handle for the group of this one."""
    return code == 0 and worker.started != key and worker.offered != key


def _within(since: float, timeout: float, now: float, otherwise: Step) -> Due:
    due = since + timeout
    return Due(otherwise) if now >= due else Due(Step.WAIT, due)


def node_part(workers: Sequence[WorkerRecord], expected: int, part: SurvivorsAssignment, port: int) -> SurvivorsReport:
    """What the node reports of its running workers, in the order of their ranks; it should have `expected` of them, and
    `port` is that of its own store."""
    key = part.key
    here = len(workers) == expected
    complete = here and all(worker.offered == key for worker in workers)
    return SurvivorsReport(
        key=key,
        handles=tuple(worker.handle for worker in workers) if complete else (),
        kept=sum(worker.started != key for worker in workers) if complete else 0,
        unable=next((worker.unable for worker in workers if worker.unable), ()),
        formed=here and all(worker.formed == key for worker in workers),
        port=port,
        store=part.store,
    )
