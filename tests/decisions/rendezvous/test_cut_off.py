"""When a node counts as cut off from the others, and which nodes it probes to find out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from support.harness import WAIT

from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.node_views import choose_peers
from dlrover_run.coordination.records.assignment import MAX_PEERS, Peer
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.processes.ports import HeldPort
from dlrover_run.rendezvous import cut_off
from dlrover_run.rendezvous.cut_off import PROBE_INTERVAL, CutOffDetector, reaches


class TestDetector:
    def test_a_node_is_cut_off_when_nothing_has_answered_for_the_time(self) -> None:
        detector = CutOffDetector(60.0, now=100.0)
        assert not detector.is_cut_off(159.9, due=159.9)
        assert detector.is_cut_off(160.1, due=160.1)

    def test_one_answer_is_enough(self) -> None:
        detector = CutOffDetector(60.0, now=100.0)
        detector.note_answer(155.0)
        assert not detector.is_cut_off(214.0, due=214.0)
        assert detector.is_cut_off(215.1, due=215.1)

    def test_the_time_for_which_the_process_was_stopped_does_not_count(self) -> None:
        detector = CutOffDetector(60.0, now=100.0)
        assert not detector.is_cut_off(1000.0, due=105.0)
        assert not detector.is_cut_off(1059.0, due=1059.0)
        assert detector.is_cut_off(1061.0, due=1061.0)

    def test_zero_is_never(self) -> None:
        assert not CutOffDetector(0.0, now=0.0).is_cut_off(1e9, due=1e9)

    def test_others_are_probed_several_times_before(self) -> None:
        assert CutOffDetector(300.0, 0.0).interval == PROBE_INTERVAL
        assert CutOffDetector(3.0, 0.0).interval == 1.0


def present(hosts: Sequence[str]) -> tuple[list[NodeKey], Nodes]:
    """One node on each of these machines, connected unless its address is marked with `!`."""
    nodes = {}
    for index, host in enumerate(hosts):
        report = NodeReport(node_id=f"n{index}", incarnation="a", host="h", address=host.strip("!"), port=1000 + index,
                            workers=1)  # fmt: skip
        away = 1.0 if host.endswith("!") else None
        nodes[report.key] = KnownNode(report, 0.0, 0.0, disconnected_at=away, lost_at=away)
    return list(nodes), nodes


class TestPeers:
    def test_the_neighbours_and_one_far_away(self) -> None:
        keys, nodes = present([f"10.0.0.{number}" for number in range(8)])
        assert choose_peers(keys, nodes)[keys[0]] == (
            Peer("10.0.0.1", 1001), Peer("10.0.0.7", 1007), Peer("10.0.0.4", 1004)
        )  # fmt: skip

    @pytest.mark.parametrize("count", range(1, 12))
    def test_every_node_of_several_has_some_other_and_no_more_than_travel(self, count: int) -> None:
        keys, nodes = present([f"10.0.0.{number}" for number in range(count)])
        chosen = choose_peers(keys, nodes)
        assert set(chosen) == (set(keys) if count > 1 else set())
        for key, peers in chosen.items():
            assert 1 <= len(peers) == len(set(peers)) <= MAX_PEERS
            assert nodes[key].report.address not in {peer.address for peer in peers}

    def test_a_node_on_the_same_machine_shows_nothing(self) -> None:
        keys, nodes = present(["10.0.0.1", "10.0.0.1"])
        assert choose_peers(keys, nodes) == {}

    def test_a_disconnected_node_is_no_peer(self) -> None:
        keys, nodes = present(["10.0.0.1", "10.0.0.2!", "10.0.0.3"])
        chosen = choose_peers(keys, nodes)
        assert chosen == {keys[0]: (Peer("10.0.0.3", 1002),), keys[2]: (Peer("10.0.0.1", 1000),)}


class TestProbe:
    def test_a_machine_on_which_nothing_listens_answers(self) -> None:
        held = HeldPort()
        assert asyncio.run(reaches("127.0.0.1", held.number))
        held.release()

    def test_a_listening_process_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert asyncio.run(reaches("127.0.0.1", server.getsockname()[1]))

    def test_a_machine_that_drops_every_packet_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel drops what comes to a listener whose queue is full."""
        monkeypatch.setattr(cut_off, "PROBE_TIMEOUT", 0.2)
        with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
            first.settimeout(WAIT)
            first.connect(server.getsockname())
            assert not asyncio.run(reaches("127.0.0.1", server.getsockname()[1]))

    def test_a_name_without_an_address_does_not(self) -> None:
        assert not asyncio.run(reaches("no such name", 1))
