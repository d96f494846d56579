"""The client of NCCL RAS, against a server that answers as NCCL does: in JSON and as an older version, slow, silent,
damaged, and none at all."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.nccl_ras import RasAnswers, RasServer, generated_job, json_report, recorded_report

from dlrover_run.features.hangs.collectives import ras_client
from dlrover_run.features.hangs.collectives.evidence import is_local_address
from dlrover_run.features.hangs.collectives.ras_client import RasProblem, read_report
from dlrover_run.features.hangs.collectives.ras_report import parse_report
from dlrover_run.features.hangs.node.ras_address import RasAddress


def _job(ranks: int = 4):
    return generated_job(ranks, lambda group, rank: {"AllReduce": 100 - (rank == 1)})


@contextmanager
def _server(**how) -> Iterator[RasServer]:
    with RasServer(RasAnswers(_job, **how)) as server:
        yield server


def _read(address: str, timeout: float = 30.0) -> str:
    return asyncio.run(read_report(address, timeout))


@pytest.mark.parametrize("knows_json", [True, False])
def test_a_report_is_read_in_the_format_that_the_version_has(knows_json) -> None:
    with _server(knows_json=knows_json) as server:
        report = _read(server.address)
    assert report.startswith("{") is knows_json
    (one,) = parse_report(report)
    assert one.launched["AllReduce"].by_rank[1] == 99
    assert server.answers.asked == 1


def test_a_report_that_takes_a_while_is_waited_for() -> None:
    with _server(delay=1.0) as server:
        assert parse_report(_read(server.address))


def test_a_recorded_and_a_damaged_report_come_as_they_are() -> None:
    with RasServer(RasAnswers(_job, recorded=recorded_report().encode())) as server:
        assert _read(server.address) == recorded_report()
    with _server(damage=lambda data: data[: len(data) // 2] + b"\xff\x00") as server:
        assert "\ufffd" in _read(server.address)


def test_a_report_of_512_ranks_is_read() -> None:
    with RasServer(RasAnswers(lambda: _job(512))) as server:
        (one,) = parse_report(_read(server.address))
    assert len(one.places) == 512


def test_one_that_does_not_answer_is_given_up_in_time(monkeypatch) -> None:
    monkeypatch.setattr(ras_client, "NEXT_CONNECTION", 0.01)
    with _server(silent=True) as server, pytest.raises(RasProblem, match=r"has not answered in 0 s"):
        _read(server.address, timeout=0.3)


def test_a_process_that_is_stopped_does_not_keep_the_others_from_answering(monkeypatch) -> None:
    """All processes of a job listen at one address, and the kernel chooses one for each connection: here one that never
    accepts, twice, and then one that answers."""
    monkeypatch.setattr(ras_client, "NEXT_CONNECTION", 0.01)
    connect = asyncio.open_connection
    with socket.create_server(("127.0.0.1", 0)) as stopped, _server() as answering:
        ports = [stopped.getsockname()[1]] * 2

        def chosen(host, port, **options):
            return connect(host, ports.pop() if ports else port, **options)

        monkeypatch.setattr(asyncio, "open_connection", chosen)
        assert parse_report(_read(answering.address))


@contextmanager
def _reusable(port: int) -> Iterator[socket.socket]:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", port))
        yield one


def test_what_is_not_ras_and_what_is_not_there_is_a_problem_with_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RasProblem, match="nothing answers at"):
        _read(f"127.0.0.1:{port}")
    for address in ("nonsense", "127.0.0.1:", ":28028", "127.0.0.1:99999", ""):
        with pytest.raises(RasProblem, match="is no HOST:PORT"):
            _read(address)
    with _server(protocol="x") as server:
        server.answers._answer = lambda command: "HTTP/1.1 400"
        with pytest.raises(RasProblem, match="is not NCCL RAS"):
            _read(server.address)


def test_a_report_without_end_is_not_read(monkeypatch) -> None:
    monkeypatch.setattr(ras_client, "MAX_REPORT", 1000)
    with _server() as server, pytest.raises(RasProblem, match="is not NCCL RAS"):
        _read(server.address)
    assert len(json_report(_job())) > 1000


def test_no_connection_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with _server() as server:
        _read(server.address)
    assert set(os.listdir("/proc/self/fd")) == before


def test_addresses_of_this_machine_are_told_from_others() -> None:
    assert is_local_address("127.0.0.1")
    for host in ("192.0.2.1", "nonsense", "", "10.0.0.1.5", "a\x00b"):
        assert not is_local_address(host)


def test_a_node_reserves_an_address_that_nccl_can_share() -> None:
    ras = RasAddress({})
    try:
        address = ras.address
        assert ras.variables == {"NCCL_RAS_ADDR": address}
        assert ras.address == address
        port = int(address.rpartition(":")[2])
        with _reusable(port) as one, _reusable(port) as other:
            one.listen()
            other.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass
        # No program gets it by chance, and without a worker nothing answers there.
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    finally:
        ras.close()
    ras.close()


def test_an_address_of_the_user_is_used_and_one_that_is_off_is_not() -> None:
    given = RasAddress({"NCCL_RAS_ADDR": "localhost:28028"})
    assert (given.address, given.variables) == ("localhost:28028", {})
    off = RasAddress({"NCCL_RAS_ENABLE": "0"})
    assert (off.address, off.variables) == (None, {})
