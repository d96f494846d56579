"""What people and machines do to jobs of several nodes that no rule foresaw: each test has once broken something."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from cluster import SOON, Cluster, quiet_port, succeed, tell
from links import Link

from dlrover_run.coordination.model import NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.rendezvous.master_client import MasterSession
from dlrover_run.spec import MasterSpec
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.connection import ConnectionLost, GrpcConnection

STATUS = NodeReport(node_id="n0", incarnation="a", host="here", address="", port=0, workers=1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "another program listens there, which is not a master: give",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program listens there, which is not a master: give"),
        (b"", "it closed the connection, as a master with TLS does to a node without"),
    ],
)
def test_another_program_at_the_endpoint_is_known_for_what_it_is(answer: bytes, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read(1)
        writer.close()

    async def meet() -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = GrpcConnection(MasterSpec("127.0.0.1", port), [Address(socket.AF_INET, "127.0.0.1", port)])
        try:
            with pytest.raises(ConnectionLost) as ended:
                await MasterSession(connection, "").join("job", STATUS, JobRules())
        finally:
            await connection.close()
            server.close()
        return str(ended.value)

    assert words in asyncio.run(meet())


def test_a_node_goes_on_under_a_master_that_knows_nothing_of_its_rounds(cluster: Cluster, tmp_path: Path) -> None:
    """As when a link heals and a new master, without a journal, has begun the job anew on the other side."""
    logs = tmp_path / "logs"
    first = cluster.stand_alone_master()
    link = Link(cluster.port)
    a = cluster.node(
        "a", "1:2", "--max-restarts=1", f"--log-dir={logs}", "--redirects=1", conf=SOON, endpoint=link.port
    )
    tell(cluster.world(1), signal.SIGUSR2)
    a.until_says("restart 1 of 1")
    cluster.world(1)
    elsewhere = quiet_port()
    second = cluster.stand_alone_master(port=elsewhere)
    c = cluster.node("c", "1:2", conf=SOON, endpoint=elsewhere)
    cluster.world(1)
    link.target = elsewhere
    link.cut()
    succeed(cluster.world(2), a, c)
    # Its third round is the second of that master, and nothing of an earlier one was written over.
    assert {path.name for path in logs.glob("*/attempt_*")} == {f"attempt_{number}" for number in range(3)}
    assert a.has_said("; round 2 with 2 nodes")
    link.close()
    for master in (first, second):
        master.signal(signal.SIGTERM)
        assert master.finish() == 0
