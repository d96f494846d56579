"""What may go wrong beside training ends no node: a question for stacks, a request that no leader answers, policies
that do not settle, a journal that is compacted while a successor takes it over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from support.master_node import FAST
from support.virtual_loop import run_virtually

from dlrover_run.coordination import decide, decision
from dlrover_run.coordination.decision import Decision, Unsettled
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds import round_engine
from dlrover_run.features import registry
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import NodeStacks
from dlrover_run.master import journal
from dlrover_run.master.journal import Journal, JournalReplaced
from dlrover_run.rendezvous.answer_stacks import answer_stacks
from dlrover_run.rendezvous.client import AskFailed, AssignmentTracker
from dlrover_run.rendezvous.kv.election import Election
from dlrover_run.rendezvous.kv.requests import REQUEST_LEASE, _read_answer
from dlrover_run.store.operations import Change, LeaseExpired


def test_a_request_that_no_leader_answers_says_so_when_its_key_is_gone() -> None:
    async def watched() -> AsyncIterator[Sequence[Change]]:
        yield [Change("/requests/1", None)]
        # As a watch of etcd: it yields for ever.
        await asyncio.sleep(1e9)

    async def ask() -> None:
        async with asyncio.timeout(60):
            await _read_answer(watched(), b"written", "etcd")

    with pytest.raises(AskFailed, match=f"no leader of the job has answered within {REQUEST_LEASE} s"):
        run_virtually(ask())


@pytest.mark.parametrize("error", [ValueError("a line number of 5,000 digits"), KeyError("x"), OSError("gone")])
def test_stacks_that_cannot_be_read_are_no_answer(error: Exception) -> None:
    async def source(rank: int | None) -> NodeStacks:
        raise error

    lines: list[str] = []
    assert asyncio.run(answer_stacks(source, StackQuery(), lines.append)) is None
    assert len(lines) == 1
    assert lines[0].startswith("warning: the stacks of the workers of this node cannot be sent: ")


def test_features_that_do_not_settle_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job = registry.job_of(JobRules())
    monkeypatch.setattr(decide, "MAX_STEPS", 10)
    monkeypatch.setattr(round_engine, "gather", lambda rules, gate, plan, nodes, now: Decision(plan, again=True))
    with pytest.raises(Unsettled):
        decide.decide(job, Plan(), {}, 0.0)
    assert decision.MAX_STEPS > 1000


def test_a_journal_that_is_compacted_during_a_takeover_stays_the_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Journal(tmp_path, "job"), Journal(tmp_path, "job")
    old.take_over(FAST, 1)
    old.append(Plan(epoch=1, clock=1.0))
    monkeypatch.setattr(journal, "COMPACT_BYTES", 0)
    real_rename: Callable[[str, Path], None] = os.rename
    replaced = []

    def rename(draft: str, path: Path) -> None:
        """The old master sleeps just before it renames; the new one takes over meanwhile."""
        with patch.object(os, "rename", real_rename):
            new.take_over(FAST, 2)
            # What the old master goes on with: its draft is gone.
            replaced.append(not os.path.exists(draft))
            real_rename(draft, path)

    with patch.object(os, "rename", rename), pytest.raises((JournalReplaced, OSError)):
        old.append(Plan(epoch=1, clock=2.0))
    assert replaced == [True]
    new.append(Plan(epoch=2, clock=3.0))


def test_a_draft_that_is_made_after_the_clean_up_does_not_replace_the_successors_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Journal(tmp_path, "job"), Journal(tmp_path, "job")
    old.take_over(FAST, 1)
    old.append(Plan(epoch=1, clock=1.0))
    monkeypatch.setattr(journal, "COMPACT_BYTES", 0)
    real_open, real_rename = os.open, os.rename
    acted = False

    def old_compacts_between(path: str | Path, flags: int, mode: int = 0o777) -> int:
        """The new master has cleaned up and opens its draft: now the old one makes its own and renames it later."""
        nonlocal acted
        if str(path).endswith(".new") and not acted:
            acted = True

            def sleep_first(draft: str, target: Path) -> None:
                # The new master renames first.
                pending.append((draft, target))

            with patch.object(os, "rename", sleep_first), patch.object(os, "open", real_open):
                old.append(Plan(epoch=1, clock=2.0))
        return real_open(path, flags, mode)

    def new_renames(draft: str, target: Path) -> None:
        real_rename(draft, target)
        while pending:
            real_rename(*pending.pop())

    pending: list[tuple[str, Path]] = []
    with patch.object(os, "open", old_compacts_between), patch.object(os, "rename", new_renames):
        new.take_over(FAST, 2)
    new.append(Plan(epoch=2, clock=3.0))
    with pytest.raises(JournalReplaced):
        old.append(Plan(epoch=1, clock=4.0))


class FailingLeader:
    """A leader whose first attempts raise."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def lead(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def test_an_internal_error_of_the_leader_ends_no_node() -> None:
    """Each node would be the next leader, fail like the one before, and end."""
    lines: list[str] = []
    election = Election(None, None, FAST, AssignmentTracker(), lambda: 0.0, lines.append)  # type: ignore[arg-type]
    leader = FailingLeader(ZeroDivisionError("planted"), KeyError("planted"))
    run_virtually(election._keep_leading(leader))  # type: ignore[arg-type]
    assert [line.split("; ")[0] for line in lines] == [
        "warning: internal error of the leader: ZeroDivisionError('planted')",
        "warning: internal error of the leader: KeyError('planted')",
    ]
    with pytest.raises(LeaseExpired):
        run_virtually(election._keep_leading(FailingLeader(LeaseExpired("gone"))))  # type: ignore[arg-type]
