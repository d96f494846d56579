"""The master over real streams: which nodes it accepts, which messages a stream may carry, and that a bad stream
affects no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support.harness import WAIT
from support.master_node import FAST, Bed, Ended, Node, grpc, serving, status

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.model import CheckKey, NodeCheck, NodeCheckState
from dlrover_run.features.node_check.rules import NodeCheckRules
from dlrover_run.master import job as job_module
from dlrover_run.master import jobs, server, session
from dlrover_run.master.journal import Journal
from dlrover_run.transport import auth
from dlrover_run.transport.grpc_setup import SERVER_OPTIONS, UNAUTHENTICATED_TIMEOUT_MS
from dlrover_run.transport.messages import (
    MAX_NODE_MESSAGE,
    PROTOCOL,
    Challenge,
    Hello,
    Join,
    Proof,
    Refused,
    Report,
    Welcome,
    encode,
    encode_rules,
)


def live(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in its own event loop, with a time limit."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), WAIT)

        asyncio.run(bounded())

    return run


async def goes_on(bed: Bed, a: Node, b: Node) -> None:
    """Check that two nodes that had joined form a round, whatever happened on other streams."""
    found = [await node.until(lambda wanted: wanted.ranks is not None) for node in (a, b)]
    assert sorted(wanted.ranks.node_rank for wanted in found if wanted.ranks) == [0, 1]
    assert not any("internal error" in line for line in bed.output)


@live
async def test_the_rules_of_the_first_node_apply_and_the_others_are_informed() -> None:
    async with serving() as bed:
        first = await bed.node("a").join(FAST)
        second = await bed.node("b").join(JobRules(min_nodes=1, max_nodes=5))
        assert first.notice == ""
        assert second.rules == encode_rules(FAST)
        assert "--nnodes (most) is 2, not 5" in second.notice


@live
async def test_a_second_stream_of_a_node_replaces_the_first() -> None:
    async with serving() as bed:
        a, b = await bed.joined("a", "b")
        await a.take_ranks(1)
        taken = await b.take_ranks(1)
        again = Node(bed.channel, b.status)
        await again.join()
        assert (await b.refused()).reason == "this node has opened another stream"
        await b.ended()
        for _ in range(3):
            await again.report()
            assert (await again.until(bool)).key == taken.key
        await a.report()
        assert (await a.until(bool)).key == taken.key


@pytest.mark.parametrize(
    ("masters", "nodes", "words"),
    [
        ("right", "wrong", "this node's token is not the master's"),
        ("right", "", "the master requires the job's token and this node has none"),
        ("", "wrong", "this node has a token and the master has none"),
    ],
)
@live
async def test_a_node_that_cannot_prove_the_token_is_refused_with_a_hint(masters: str, nodes: str, words: str) -> None:
    async with serving(token=masters) as bed:
        stranger = bed.node("s")
        await stranger.send(stranger.hello)
        challenge = await stranger.receive()
        assert isinstance(challenge, Challenge)
        mac = auth.node_mac(nodes, stranger.hello, challenge.nonce)
        await stranger.send(Proof(mac), Join(stranger.status, encode_rules(FAST)))
        refused = await stranger.refused()
        assert refused.reason.startswith(words)
        assert not refused.retry
        for name in ("DLROVER_RDZV_TOKEN", "DLROVER_RDZV_TOKEN_FILE", "--rdzv-conf token_file="):
            assert name in refused.reason
        assert bed.server.jobs.empty
        if masters:
            assert "right" not in str(bed.output) + refused.reason.replace("this node's", "")


@live
async def test_the_master_proves_the_token_only_to_a_node_that_has_it() -> None:
    """With an HMAC from the master any client could search for a short token offline."""
    async with serving(token="job") as bed:
        stranger = bed.node("s")
        await stranger.send(stranger.hello)
        challenge = await stranger.receive()
        assert isinstance(challenge, Challenge)
        assert auth.master_mac("job", stranger.hello, challenge.nonce).encode() not in encode(challenge)
        guess = auth.node_mac("guess", stranger.hello, challenge.nonce)
        await stranger.send(Proof(guess), Join(stranger.status, encode_rules(FAST)))
        assert isinstance(await stranger.receive(), Refused)
        await stranger.ended()


@live
async def test_a_recorded_proof_cannot_be_replayed() -> None:
    async with serving(token="secret") as bed:
        victim = bed.node("a")
        await victim.send(victim.hello)
        challenge = await victim.receive()
        assert isinstance(challenge, Challenge)
        mac = auth.node_mac("secret", victim.hello, challenge.nonce)
        await victim.send(Proof(mac), Join(victim.status, encode_rules(FAST)))
        shown = await victim.receive()
        assert isinstance(shown, Proof)
        assert isinstance(await victim.receive(), Welcome)
        replays = [
            (victim.hello, mac),
            (msgspec.structs.replace(victim.hello, job="other"), mac),
            (victim.hello, shown.mac),
        ]
        for hello, overheard in replays:
            thief = Node(bed.channel, status("a"))
            await thief.send(hello)
            assert isinstance(await thief.receive(), Challenge)
            await thief.send(Proof(overheard), Join(victim.status, encode_rules(FAST)))
            assert (await thief.refused()).reason.startswith("this node's token is not the master's")


HELLO = Hello(PROTOCOL, "job", "a", "one", "0" * 64)
JOIN = Join(status("a"), encode_rules(FAST))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([Proof("")], "the node sent proof where hello was expected"),
        ([JOIN], "the node sent join where hello was expected"),
        ([HELLO, HELLO], "the node sent hello where proof was expected"),
        ([HELLO, JOIN], "the node sent join where proof was expected"),
        ([HELLO, Proof(""), Report(status("a"))], "the node sent report where join was expected"),
        ([HELLO, Proof(""), Join(status("b"), encode_rules(FAST))], "a node may only report itself"),
        ([HELLO, Proof(""), Join(status("a", "two"), encode_rules(FAST))], "a node may only report itself"),
        ([HELLO, Proof(""), Join(status("a"), {"leest": 3})], "unknown rules: leest"),
        ([HELLO, Proof(""), Join(status("a"), {"min_nodes": 3})], "not 3 to 1"),
        ([HELLO, Proof(""), Join(status("a"), {"max_restarts": 2**70})], "max_restarts is too large"),
        ([HELLO, Proof(""), Join(status("a"), {"store": 1})], "unknown rules: store"),
        ([HELLO, Proof(""), JOIN, JOIN], "the node sent join where report was expected"),
        ([HELLO, Proof(""), JOIN, Report(status("b"))], "a node may only report itself"),
        ([msgspec.structs.replace(HELLO, protocol=9)], f"this master speaks protocol {PROTOCOL} and the node 9"),
    ],
)
@live
async def test_an_unexpected_message_ends_that_stream_with_a_reason(messages: list[Any], words: str) -> None:
    async with serving() as bed:
        a, b = await bed.joined("x", job="other"), await bed.joined("y", job="other")
        stranger = Node(bed.channel, status("a"))
        await stranger.send(*messages)
        refused = await stranger.refused()
        assert words in refused.reason
        assert not refused.retry
        await stranger.ended()
        assert any(words in line for line in bed.output)
        await goes_on(bed, *a, *b)


@live
async def test_a_message_above_the_size_limit_ends_the_stream() -> None:
    async with serving() as bed:
        node = bed.node("a")
        await node.join()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await node.call.write(b" " * (MAX_NODE_MESSAGE + 1))
        with pytest.raises(Ended):
            await node.refused()


@live
async def test_a_stream_that_sends_nothing_is_refused_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "JOIN_TIMEOUT", 0.01)
    async with serving() as bed:
        mute = bed.node("a")
        refused = await mute.refused()
        assert refused.retry
        assert "did not join within" in refused.reason
        await mute.ended()


@live
async def test_the_number_of_unauthenticated_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED", 2)
    async with serving() as bed:
        mute = [bed.node("a"), bed.node("b")]
        for node in mute:
            await node.send(node.hello)
            assert isinstance(await node.receive(), Challenge)
        third = bed.node("c")
        assert (await third.refused()).retry
        mute[0].cut()
        await mute[0].ended()
        while True:
            try:
                await bed.node("d").join()
                return
            except (AssertionError, Ended):
                continue


@live
async def test_the_number_of_jobs_and_of_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_JOBS", 1)
    monkeypatch.setattr(job_module, "MAX_NODES", 2)
    async with serving() as bed:
        a, b = await bed.joined("a", "b")
        with pytest.raises(AssertionError, match=r"1 jobs and takes no more.*retry=True"):
            await bed.node("x", job="other").join()
        with pytest.raises(AssertionError, match=r"the job has 2 nodes.*retry=True"):
            await bed.node("c").join()
        await goes_on(bed, a, b)


@pytest.mark.parametrize("method", ["step", "receive"])
@live
async def test_an_internal_error_of_the_master_is_reported_to_the_nodes_with_its_text(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("x" * 5000)

    async with serving() as bed:
        a = bed.node("a")
        await a.join()
        monkeypatch.setattr(job_module.JobHost, method, fail)
        await a.report(phase=NodePhase.LEAVING)
        refused = await a.refused()
        assert refused.reason.startswith("internal error of the master: ZeroDivisionError('xxx")
        assert refused.reason.endswith("xxx; please report it")
        assert refused.retry
        assert any(refused.reason in line for line in bed.output)


@live
async def test_invalid_streams_do_not_fill_the_log() -> None:
    async with serving() as bed:
        for _ in range(50):
            stranger = bed.node("a")
            await stranger.call.write(b"garbage")
            await stranger.refused()
        assert len([line for line in bed.output if "refused" in line]) == 1


@live
async def test_a_master_that_was_stalled_longer_than_its_timeout_continues_in_the_same_round() -> None:
    loop, asleep = asyncio.get_running_loop(), [0.0]
    time = loop.time
    loop.time = lambda: time() + asleep[0]  # type: ignore[method-assign]
    async with serving() as bed:
        a, b = await bed.joined("a", "b", rules=JobRules(min_nodes=1, max_nodes=2, lost_after=1.0))
        taken = await a.take_ranks(1)
        await b.take_ranks(1)
        asleep[0] += 60.0
        for node in (a, b):
            await node.report()
            assert (await node.until(bool)).key == taken.key
        assert bed.output[2].startswith("this master was stopped or overloaded for ")
        assert len(bed.output) == 3


@live
async def test_a_master_that_was_replaced_steps_down_and_stays_so(tmp_path: Path) -> None:
    async with serving(state_dir=tmp_path) as old, serving(state_dir=tmp_path) as new:
        a, b = await old.joined("a", "b")
        await a.take_ranks(1)
        await b.take_ranks(1)
        elsewhere = Node(new.channel, a.status)
        await elsewhere.join()
        assert (await elsewhere.until(bool)).key == a.assignment.key if a.assignment else False
        b.cut()
        refused = await a.refused()
        assert refused.retry
        assert "another master has taken over the journal" in refused.reason
        with pytest.raises(AssertionError, match=r"another master has taken this job over.*retry=True"):
            await Node(old.channel, a.status).join()
        await elsewhere.report()
        await elsewhere.until(bool)


@live
async def test_a_master_whose_nodes_obey_a_later_one_steps_down_and_recovers_the_job_from_their_reports() -> None:
    async with serving() as old:
        a, b = await old.joined("a", "b")
        first = await a.take_ranks(1)
        await b.take_ranks(1)
        b.cut()
        await a.until(lambda wanted: wanted.ranks is None)
        # Another master had the job in the same round meanwhile, and is gone.
        later = first.epoch + 1000
        await a.report(epoch=later)
        refused = await a.refused()
        assert refused.retry
        assert refused.reason == "a node obeys a later master; this master starts again from the nodes' reports"
        nodes = [Node(old.channel, msgspec.structs.replace(node.status, epoch=later)) for node in (a, b)]
        for node in nodes:
            await node.join()
        for node in nodes:
            found = await node.until(lambda wanted: wanted.epoch > later)
            assert (found.key, found.ranks) == (node.status.known_round, node.status.ranks)
        assert not any("internal error" in line for line in old.output)


@live
async def test_a_damaged_journal_is_reported_to_the_nodes_and_affects_no_other_job(tmp_path: Path) -> None:
    async with serving(state_dir=tmp_path) as bed:
        for node in await bed.joined("a", "b"):
            await node.take_ranks(1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"min_nodes":2', b'"min_nodes":1'))
    async with serving(state_dir=tmp_path) as bed:
        with pytest.raises(AssertionError, match=r"is damaged, line 1: the checksum is wrong.*retry=False"):
            await bed.node("a").join()
        assert str(path) in bed.output[0]
        await goes_on(bed, *await bed.joined("x", "y", job="other"))


@live
async def test_a_journal_that_cannot_be_created_is_reported_once_and_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        # The file exists at that point, and it is open.
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    async with serving(state_dir=tmp_path) as bed:
        for _ in range(3):
            with pytest.raises(AssertionError, match=r"the master cannot use .*: Input/output error.*retry=True"):
                await bed.node("a").join()
        assert [line for line in bed.output if line.startswith("job")] == [bed.output[0]]
        assert not [file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]


async def finish(bed: Bed, *nodes: Node) -> None:
    """Let all nodes of the only job succeed and leave, and wait until it is deleted."""
    for phase in (NodePhase.SUCCEEDED, NodePhase.LEFT):
        for node in nodes:
            await node.report(phase=phase)
    for node in nodes:
        await node.close()
    await bed.until(lambda: bed.server.jobs.empty)


@live
async def test_the_journal_is_removed_with_the_job(tmp_path: Path) -> None:
    async with serving(state_dir=tmp_path) as bed:
        a, b = await bed.joined("a", "b")
        for node in (a, b):
            await node.take_ranks(1)
        assert len(os.listdir(tmp_path)) == 1
        await finish(bed, a, b)
        assert os.listdir(tmp_path) == []


@live
async def test_a_node_that_returns_after_the_end_of_its_job_does_not_begin_it_again(tmp_path: Path) -> None:
    async with serving(state_dir=tmp_path) as bed:
        a, b = await bed.joined("a", "b")
        epochs = {(await node.take_ranks(1)).epoch for node in (a, b)}
        await finish(bed, a, b)
        (epoch,) = epochs
        for is_new_job in (False, True):
            if is_new_job:
                await bed.joined("a")
            with pytest.raises(AssertionError, match=r"has ended while this node was not connected.*over=True"):
                await bed.node("b", incarnation="earlier", epoch=epoch).join()
            assert bed.server.jobs.empty is not is_new_job


@live
async def test_a_connection_without_a_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = [(name, 200 if limit == UNAUTHENTICATED_TIMEOUT_MS else limit) for name, limit in SERVER_OPTIONS]
    monkeypatch.setattr("dlrover_run.master.server.SERVER_OPTIONS", soon)
    async with serving() as bed:
        await bed.channel.channel_ready()
        await bed.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await goes_on(bed, *await bed.joined("a", "b"))


@live
async def test_the_master_listens_only_on_the_given_address() -> None:
    async with serving() as bed:
        port = int(bed.address.rpartition(":")[2])
        with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
            elsewhere.connect(("127.0.0.2", port))


@live
async def test_a_journal_whose_plan_does_not_fit_is_refused_and_kept_until_it_is_moved_away(tmp_path: Path) -> None:
    """A check whose groups name a node that it does not have: by hand, or from another version."""
    rules = msgspec.structs.replace(FAST, parts=(NodeCheckRules(check=1),))
    check = NodeCheck(key=CheckKey(), since=0.0, nodes=(), groups=((0, 7),))
    journal = Journal(tmp_path, "job")
    journal.take_over(rules, 1)
    journal.append(Plan(epoch=1, parts=(NodeCheckState(check=check, check_count=1),)))
    journal.close()
    path = journal.path
    async with serving(state_dir=tmp_path) as bed:
        for name in ("a", "b"):
            with pytest.raises(AssertionError, match=r"not a plan that fits together.*Move it away.*retry=False"):
                await bed.node(name).join(rules)
        assert b"[[0,7]]" in path.read_bytes(), "the plan is kept"
        assert sum(line.startswith("job 'job': the journal ") for line in bed.output) == 1
        path.rename(tmp_path / "moved")
        await bed.node("a").join(rules)
        assert path.exists()
