"""Unauthenticated clients and defective nodes: whatever they send, only their own stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.harness import WAIT
from support.master_node import FAST, Node, grpc, status
from support.master_process import Master, master
from test_master_job import Line

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Failure, RankAssignment, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.registry import decode_part
from dlrover_run.master.job import JobHost, RequestRefused
from dlrover_run.transport.grpc_setup import CHANNEL_OPTIONS
from dlrover_run.transport.messages import (
    PROTOCOL,
    Hello,
    InvalidMessage,
    Join,
    NodeMessage,
    Proof,
    Report,
    decode_from_node,
    decode_rules,
    encode,
    encode_rules,
)

EPOCHS = st.integers(-1, 9) | st.integers(2**60, 2**80)
COUNTS = st.integers(0, 3) | st.integers(0, 1_000_000)
KEYS = st.builds(RoundKey, epoch=EPOCHS, number=st.integers(0, 4))
TEXTS = st.text(max_size=20)
# Mostly messages that can be sent; others are refused before a job receives them.
NAMES = st.text(st.characters(min_codepoint=0x20, exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=20)
RANKS = st.integers(0, 4)
RANK_ASSIGNMENTS = st.builds(
    RankAssignment,
    key=KEYS,
    node_rank=COUNTS,
    nodes=COUNTS,
    store_address=NAMES,
    store_port=st.integers(0, 65535),
    **dict.fromkeys(
        ("restart_count", "workers", "first_rank", "world_size", "role_first_rank", "role_world_size"), COUNTS
    ),
)
FAILURES = st.builds(
    Failure, rank=RANKS | st.integers(), host=NAMES | TEXTS, exit_text=TEXTS, lost_peer=st.booleans(), trace=TEXTS
)
STATUSES = st.builds(
    NodeReport,
    node_id=st.sampled_from("ab"),
    incarnation=st.sampled_from(["one", "two"]),
    host=NAMES | TEXTS,
    address=NAMES,
    port=st.integers(0, 65535),
    workers=COUNTS,
    role=NAMES,
    preferred_rank=st.none() | COUNTS,
    phase=st.sampled_from(NodePhase),
    ranks=st.none() | RANK_ASSIGNMENTS,
    known_round=KEYS,
    epoch=EPOCHS,
    progressed=st.booleans(),
    failure=st.none() | FAILURES,
)
RULES = st.dictionaries(
    st.sampled_from(list(JobRules.__struct_fields__)) | TEXTS,
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.tuples(TEXTS, st.integers()),
    max_size=4,
)
MESSAGES = st.one_of(
    st.builds(Hello, st.sampled_from([PROTOCOL, 0, -1]), TEXTS, st.just("a"), st.just("one"), st.just("0" * 64)),
    st.builds(Proof, st.sampled_from(["", "0" * 64, "x"])),
    st.builds(Join, STATUSES, st.just(encode_rules(FAST)) | RULES),
    st.builds(Report, STATUSES),
)


def damaged(frame: bytes, place: int, junk: bytes) -> bytes:
    cut = place % (len(frame) + 1)
    return frame[:cut] + junk + frame[cut + len(junk) :]


FRAMES = st.one_of(
    MESSAGES.map(encode),
    st.builds(damaged, MESSAGES.map(encode), st.integers(0, 2000), st.binary(min_size=1, max_size=4)),
    st.binary(max_size=200),
    st.recursive(st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)).map(
        msgspec.json.encode
    ),
)


@given(FRAMES)
def test_any_bytes_decode_to_a_message_or_raise_bad_message(frame: bytes) -> None:
    try:
        message = decode_from_node(frame)
    except InvalidMessage:
        return
    assert decode_from_node(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(PROTOCOL, "job", "a\n", "one", "0" * 64),
        Hello(PROTOCOL, "job", "a", "one\n", "0" * 64),
        Hello(PROTOCOL, "job", "a", "one", "0" * 64 + "\n"),
        Proof("\n"),
        Proof("0" * 64 + "\n"),
        Report(status("a", host="a\x1b[2J")),
        Report(status("a", address="10.0.0.1\0")),
        Report(status("a", role="one\ntwo")),
        Report(status("a", failure=Failure(-1, "a", "failed"))),
        Report(status("a", failure=Failure(10**30, "a", "failed"))),
    ],
)
def test_names_and_numbers_are_validated_to_the_last_character(message: NodeMessage) -> None:
    with pytest.raises(InvalidMessage):
        decode_from_node(encode(message))


def test_a_store_of_the_command_line_is_not_a_rule_that_is_sent() -> None:
    rules = JobRules(max_nodes=2, store=("10.0.0.1", 4000))
    assert decode_rules(encode_rules(rules)) == JobRules(max_nodes=2)
    with pytest.raises(InvalidMessage, match="unknown rules: store"):
        decode_rules({"store": 1})


@given(st.lists(st.tuples(STATUSES, st.sampled_from(["join", "report", "part", "wait"])), max_size=25))
@settings(deadline=None)
def test_a_job_decides_or_refuses_whatever_nodes_report(events: list[tuple[NodeReport, str]]) -> None:
    now = 0.0
    job = JobHost(
        "job", Coordinator(JobRules(min_nodes=1, max_nodes=3, lost_after=1.0, max_restarts=2), now, 5), None, now, str
    )
    lines = {key: Line() for key in [("a", "one"), ("a", "two"), ("b", "one"), ("b", "two")]}
    for report, event in events:
        try:
            decode_from_node(encode(Report(report)))
        except InvalidMessage:
            continue
        line = lines[report.key]
        with contextlib.suppress(RequestRefused):
            if event == "join":
                job.join(line, report, FAST, now)
            elif event == "report":
                job.receive(line, report, now)
            elif event == "part":
                job.disconnect(line, report.key, now)
            else:
                now += 5.0
        if job.stepped_down is None:
            job.step(now)
        for each in lines.values():
            for wanted in each.assignments:
                # Every assignment can be encoded and decoded.
                assert (
                    msgspec.json.decode(msgspec.json.encode(wanted), type=type(wanted), dec_hook=decode_part) == wanted
                )
            each.assignments.clear()


@pytest.fixture(scope="module")
def running() -> Iterator[Master]:
    with master() as one:
        yield one
        one.process.terminate()
        code, output = one.finish()
        assert code == 0
        assert "internal error" not in output
        assert "Traceback" not in output


async def send(address: str, frames: list[bytes]) -> None:
    """Send these frames on an unauthenticated stream until it ends; then check that two nodes form a round."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stranger = Node(channel, status("a"))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await stranger.call.write(frame)
            await stranger.call.done_writing()
        await stranger.ended()
        nodes = [Node(channel, status(name), "other") for name in "ab"]
        for node in nodes:
            await node.join()
        for node in nodes:
            await node.take_ranks(1)
        for phase in (NodePhase.SUCCEEDED, NodePhase.LEFT):
            for node in nodes:
                await node.report(phase=phase)
        for node in nodes:
            await node.close()


def conversation(messages: list[NodeMessage], then: list[bytes]) -> list[bytes]:
    return [*map(encode, messages), *then]


HELLO = Hello(PROTOCOL, "job", "a", "one", "0" * 64)
BEGINNINGS: st.SearchStrategy[list[NodeMessage]] = st.sampled_from(
    [[], [HELLO], [HELLO, Proof("")], [HELLO, Proof(""), Join(status("a"), encode_rules(FAST))]]
)


@given(st.builds(conversation, BEGINNINGS, st.lists(FRAMES, max_size=4)))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_frames_of_any_kind_affect_no_other_job(running: Master, frames: list[bytes]) -> None:
    asyncio.run(asyncio.wait_for(send(running.address, frames), WAIT))


@given(st.binary(min_size=1, max_size=2000), st.booleans())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_bytes_that_are_not_http_end_only_their_connection(running: Master, junk: bytes, polite: bool) -> None:
    host, _, port = running.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) if polite else b""
    with socket.create_connection((host, int(port)), timeout=WAIT) as connection, contextlib.suppress(OSError):
        connection.sendall(preface + junk)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    assert running.process.poll() is None
