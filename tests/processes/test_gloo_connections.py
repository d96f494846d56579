"""The connections of a group are found by the addresses at which its members listen."""

from __future__ import annotations

import socket

from support.harness import open_descriptors

from dlrover_run.training.reconfigurable_group import close_connections, listening


def test_the_connections_of_a_group_end_and_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as theirs:
        assert {ours.getsockname(), theirs.getsockname()} <= listening()
        out = socket.create_connection(theirs.getsockname())
        peer = socket.create_connection(ours.getsockname())
        accepted, _ = ours.accept()
        other, kept = socket.socketpair()
        before = open_descriptors()
        assert close_connections({ours.getsockname()}, {theirs.getsockname()}) == 2
        assert not open_descriptors() - before
        assert out.recv(1) == peer.recv(1) == accepted.recv(1) == b""
        other.send(b"x")
        assert kept.recv(1) == b"x"
        # The listening sockets stay, for the next group.
        socket.create_connection(ours.getsockname()).close()
        for one in (out, peer, accepted, other, kept):
            one.close()
