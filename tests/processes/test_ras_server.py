"""The server that stands in for NCCL RAS: it writes what NCCL has written on a GPU, and converses as NCCL does."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.nccl_ras import (
    Communicator,
    MissingRank,
    RasAnswers,
    RasJob,
    RasRank,
    RasServer,
    generated_job,
    json_report,
    recorded_report,
    text_report,
)

WAIT = 20.0

# Two ranks shared one GPU.
RECORDED_JOB = RasJob(
    [
        Communicator(
            0x1991020451F915DD,
            [
                RasRank(0, 1364, {"AllReduce": 121, "Broadcast": 5}),
                RasRank(1, 1365, {"AllReduce": 119, "Broadcast": 5}),
            ],
        )
    ]
)


def ask(port: int, *commands: str) -> tuple[list[str], str]:
    """The answers to each command but the last, and the report that the last one asks for."""
    with socket.create_connection(("127.0.0.1", port), WAIT) as client, client.makefile("r") as answers:
        said = []
        for command in commands[:-1]:
            client.sendall(command.encode() + b"\n")
            said.append(answers.readline().rstrip("\n"))
        client.sendall(commands[-1].encode() + b"\n")
        return said, answers.read()


def test_the_generated_text_is_what_nccl_has_written() -> None:
    assert text_report(RECORDED_JOB) == recorded_report()


def test_a_report_that_is_not_verbose_lists_the_outliers_alone() -> None:
    job = generated_job(512, lambda group, rank: {"AllReduce": 7 - (rank == 300), "AllGather": 3})
    lines = text_report(job).splitlines()
    assert "     64          8            1        512      512" in lines
    assert "    0         1        64         8       512       512   RUNNING  MISMATCH" in lines
    assert lines[lines.index("  Communicator ranks have different AllReduce operation counts") + 1 :][:2] == [
        "  511 ranks have launched up to operation 7",
        "  Rank 300 has launched up to operation 6 -- GPU 4 managed by process 1300 on node 10.0.0.38",
    ]


def test_a_rank_that_does_not_answer_is_missing() -> None:
    job = generated_job(4, lambda group, rank: {"AllReduce": 7}, [(0, 1), (2, 3)], missing=[3])
    text = text_report(job)
    assert "INCOMPLETE\n  Missing communicator data from 1 job process\n  Process 1003 on node 10.0.0.1" in text
    assert "#0-0 (1991020451f915dd) INCOMPLETE\n  Missing communicator data from 1 rank\n  Rank 3 -- GPU 3" in text
    assert "#1-0 (1991020451f915df) INCOMPLETE\n  Missing communicator data from 1 rank\n  Rank 1 -- GPU 3" in text
    assert "MISMATCH" not in text
    missing = json.loads(json_report(job))["communicators"][0]["missing_ranks"]
    assert [(one["rank"], one["pid"], one["status"]["unresponsive"]) for one in missing] == [(3, 1003, True)]


def test_ranks_that_have_left_a_communicator_differ_in_their_status() -> None:
    left = MissingRank(1, 1365, responsive=True)
    (one,) = RECORDED_JOB.communicators
    text = text_report(RasJob([replace(one, ranks=one.ranks[:1], missing=[left])]))
    assert "  Communicator ranks have different status\n  Rank 0 has status RUNNING" in text
    assert "  Rank 1 has status NOCOMM -- GPU 0 managed by process 1365" in text


def counts(group: int, rank: int) -> Mapping[str, int]:
    return {"AllReduce": 10 * group + 4, "AllGather": rank}


def test_a_client_is_answered_in_its_format() -> None:
    answers = RasAnswers(lambda: generated_job(4, counts, [(0, 2), (1, 3)]))
    with RasServer(answers) as server:
        said, text = ask(server.port, "CLIENT PROTOCOL 2", "TIMEOUT 3", "TIMEOUT x", "what", "VERBOSE STATUS")
        assert said == ["SERVER PROTOCOL 2", "OK", "ERROR: Invalid timeout value x", "ERROR: Unknown command what"]
        assert text.startswith("NCCL version 2.28.9 ")
        said, text = ask(server.port, "CLIENT PROTOCOL 2", "SET FORMAT json", "STATUS")
        report = json.loads(text)
        assert [one["size"] for one in report["communicators"]] == [4, 2, 2]
        assert [one["collective_counts"]["AllGather"] for one in report["communicators"][2]["ranks"]] == [1, 3]
        assert report["communicators"][1]["ranks"][0]["collective_counts"]["AllReduce"] == 14
        assert answers.asked == 2


def test_an_older_server_knows_no_json_and_another_protocol() -> None:
    with RasServer(RasAnswers(lambda: RECORDED_JOB, knows_json=False, protocol=1)) as server:
        said, text = ask(server.port, "CLIENT PROTOCOL 2", "SET FORMAT json", "STATUS")
    assert said == ["SERVER PROTOCOL 1", "ERROR: Unknown command SET FORMAT json"]
    assert text.startswith("NCCL version")


def test_reports_may_be_recorded_and_damaged() -> None:
    answers = RasAnswers(lambda: RECORDED_JOB, recorded=recorded_report().encode(), damage=lambda text: text[:400])
    with RasServer(answers) as server:
        assert ask(server.port, "STATUS")[1] == recorded_report()[:400]


def test_a_silent_server_answers_nothing_until_it_ends() -> None:
    with RasServer(RasAnswers(lambda: RECORDED_JOB, silent=True)) as server:
        client = socket.create_connection(("127.0.0.1", server.port), WAIT)
        client.sendall(b"CLIENT PROTOCOL 2\n")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    # The command was not read, so the end of the server is a reset.
    client.settimeout(WAIT)
    with client, pytest.raises(ConnectionResetError):
        client.recv(1)
