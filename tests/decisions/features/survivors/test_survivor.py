"""The worker's side of a round that it outlives: blocks, orders and messages, with a stand-in for torch's group."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from msgspec.structs import replace
from support.harness import WAIT

from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.survivors import line as agent_side
from dlrover_run.features.survivors.line import Formed, Lost, Offer, WorkerHello, WorkerMessage, after_message
from dlrover_run.features.survivors.model import Formation, Store, SurvivorsAssignment
from dlrover_run.features.survivors.worker_record import WorkerRecord
from dlrover_run.training import agent_line, reconfigurable_group
from dlrover_run.training.agent_line import AgentGone, AgentLine
from dlrover_run.training.reconfigurable_group import ReconfigurableGroup
from dlrover_run.training.survivor import NextRound, Round, Survivor
from dlrover_run.workers.environment import FEATURE_VARIABLES

STORE = Store("a", "1", "127.0.0.1", 7000)
LOST = RuntimeError("Connection closed by peer [127.0.0.1]:1")


@dataclass
class FakeGroup(ReconfigurableGroup):
    """Notes what is asked of torch. `broken` are uuids by which no group forms; `values` is what the ranks have."""

    able: bool = True  # type: ignore[misc]
    broken: tuple[int, ...] = ()
    values: list[Any] = field(default_factory=list)
    cannot_abort: bool = False
    calls: list[Any] = field(default_factory=list)

    version = "2.15.0"  # type: ignore[assignment]

    def open_as_in_any_script(self) -> None:
        self.calls.append("plain")

    def handle(self, address: str, port: int, rank: int, world_size: int) -> str:
        assert (address, port) == (STORE.address, STORE.port)
        self.calls.append(("handle", rank, world_size))
        return f"h{len(self.calls)}"

    def form(self, uuid: int, handles: Any, timeout: float) -> None:
        self.calls.append(("form", uuid, tuple(handles), timeout))
        if uuid in self.broken:
            raise RuntimeError("Wait timeout")

    def abort(self) -> None:
        self.calls.append("abort")
        if self.cannot_abort:
            raise OSError(107, "Transport endpoint is not connected")

    def of_all(self, value: Any) -> list[Any]:
        return self.values

    def of_rank(self, value: Any, source: int) -> Any:
        self.calls.append(("of_rank", value, source))
        return "theirs" if value is None else value


class Agent:
    """The other end of a line. It answers a hello with an order for round 1, and an offer with all handles; `place` is
    the rank of the worker and the size of its world."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair()
        self.line = AgentLine(theirs, "secret")
        self.place = (0, 2)
        self.plain = False
        self._heard: queue.Queue[WorkerMessage] = queue.Queue()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def hear(self) -> WorkerMessage:
        """The next message of the worker."""
        return self._heard.get(timeout=WAIT)

    def order(self, number: int, uuid: int | None = None) -> None:
        """Order the worker to offer a handle, or to form a group."""
        key, (rank, world) = RoundKey(5, number), self.place
        counts = ("restart_count", "node_rank", "role_first_rank", "store_port")
        ranks = RankAssignment(
            key=key,
            nodes=1,
            workers=world,
            first_rank=rank,
            world_size=world,
            role_world_size=world,
            store_address="",
            **dict.fromkeys(counts, 0),
        )
        handles = tuple(f"h{rank}" for rank in range(world)) if uuid else ()
        formation = None if uuid is None else Formation(key, uuid, handles)
        part = SurvivorsAssignment(key, STORE, formation, 10.0, 600.0)
        self._end.sendall(agent_side.order_line(ranks, 0, part, forms=uuid is not None))

    def leave(self) -> None:
        """End the line, as the agent's end does."""
        self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.leave()
        self._thread.join()
        self._end.close()
        self.line.close()

    def _serve(self) -> None:
        with self._end.makefile("rb") as lines:
            for line in lines:
                message = agent_side.read_message(line)
                self._heard.put(message)
                if isinstance(message, WorkerHello):
                    self.order(1, 0 if self.plain else None)
                elif isinstance(message, Offer):
                    self.order(message.round[1], 20 + message.round[1])


@pytest.fixture
def agent() -> Iterator[Agent]:
    one = Agent()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A worker that outlives its round writes its new rank into its environment, which here is that of the tests."""
    with patch.dict(os.environ):
        yield


def begin(agent: Agent, group: FakeGroup) -> Generator[Round, None, None]:
    """The rounds of a worker."""
    return Survivor(group=group, line=agent.line).rounds()


def test_a_worker_outlives_its_round(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    group = FakeGroup()
    rounds = begin(agent, group)
    with next(rounds) as first:
        assert (first.rank, first.world_size) == (0, 2)
        assert agent.hear() == WorkerHello("secret", os.getpid(), True, "2.15.0")
        first_offer = agent.hear()
        assert isinstance(first_offer, Offer)
        assert agent.hear() == Formed((5, 1))
        raise LOST
    agent.place = (1, 3)
    agent.order(2)
    second = next(rounds)
    with second:
        assert (second.rank, second.world_size) == (1, 3)
        assert agent.hear() == Lost((5, 1))
        offer = agent.hear()
        assert isinstance(offer, Offer)
        assert (offer.round, offer.handle != first_offer.handle) == ((5, 2), True)
        assert agent.hear() == Formed((5, 2))
    assert list(rounds) == []
    assert group.calls[-1] == ("form", 22, ("h0", "h1", "h2"), 5.0)


@pytest.mark.parametrize("cannot_abort", [False, True])
def test_the_next_round_interrupts_a_collective_and_leaves_the_block(agent: Agent, cannot_abort: bool) -> None:
    group = FakeGroup(cannot_abort=cannot_abort)
    rounds = begin(agent, group)
    with next(rounds) as first:
        first.check()
        agent.order(2)
        assert agent.line.wait(lambda order: order.round == (5, 2), WAIT)
        with pytest.raises(NextRound):
            first.check()
        # What torch says of a collective that was aborted is no word of a lost peer.
        raise RuntimeError("aborted")
    assert next(rounds).rank == 0
    assert "abort" in group.calls


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1",
        "[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer",
        "[gloo/transport/tcp/pair.cc:300] writev [127.0.0.1]:1: Broken pipe",
        "[enforce fail at gloo/transport/tcp/pair.cc:900] state_ >= CONNECTED. Pair is not connected (0 <--> 1)",
    ],
)
def test_what_gloo_says_of_a_lost_peer_or_of_closed_connections_leaves_the_block(agent: Agent, text: str) -> None:
    group = FakeGroup()
    rounds = begin(agent, group)
    with next(rounds):
        raise RuntimeError(text)
    # The others may wait for this worker.
    assert group.calls[-1] == "abort"
    agent.order(2)
    assert next(rounds).rank == 0


def test_an_error_of_the_script_ends_the_worker(agent: Agent) -> None:
    rounds = begin(agent, FakeGroup())
    with pytest.raises(ValueError, match="loss is nan"), next(rounds):
        raise ValueError("loss is nan")
    rounds.close()


def test_a_group_that_does_not_form_is_reported_and_the_next_round_is_joined(agent: Agent) -> None:
    group = FakeGroup(broken=(21,))
    rounds = begin(agent, group)
    formed: list[Round] = []
    worker = threading.Thread(target=lambda: formed.append(next(rounds)), daemon=True)
    worker.start()
    found = [agent.hear() for _ in range(3)]
    agent.order(2)
    worker.join(WAIT)
    assert found[-1] == Lost((5, 1))
    assert [round.rank for round in formed] == [0]


@pytest.mark.parametrize("able", [True, False])
def test_a_round_of_today_is_formed_once_and_its_failure_ends_the_worker(agent: Agent, able: bool) -> None:
    group = FakeGroup(able=able)
    agent.plain = True
    with pytest.raises(RuntimeError, match="Connection closed"), next(begin(agent, group)):
        raise LOST
    hello = agent.hear()
    assert isinstance(hello, WorkerHello)
    assert hello.able is able
    assert agent.hear() == Formed((5, 1))
    assert group.calls == ["plain"]


def test_without_an_agent_the_group_is_that_of_any_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(agent_line.LINE_VARIABLE, raising=False)
    group = FakeGroup()
    with pytest.raises(RuntimeError, match="Connection closed"), next(Survivor(group=group).rounds()):
        raise LOST
    with next(Survivor(group=group).rounds()) as round:
        round.check()
    assert group.calls == ["plain", "plain"]


def test_a_worker_whose_agent_has_ended_says_so(agent: Agent) -> None:
    agent.leave()
    with pytest.raises(AgentGone):
        next(begin(agent, FakeGroup()))
    with pytest.raises(AgentGone):
        AgentLine.from_environment({agent_line.LINE_VARIABLE: "@dlrover-run-nothing-listens-here"})


@pytest.mark.parametrize(
    ("steps", "own", "found", "sent"),
    [
        ([4, 4], 4, (4, None), None),
        # This rank has the newest state, a newcomer that of an older checkpoint.
        ([5, 3], 5, (5, None), ("of_rank", "mine", 0)),
        # The newcomer has a checkpoint of a step that this rank has lost.
        ([3, 5], 3, (5, "theirs"), ("of_rank", None, 1)),
    ],
)
def test_the_newest_state_of_all_ranks_counts(agent: Agent, steps: list[int], own: int, found: Any, sent: Any) -> None:
    group = FakeGroup(values=steps)
    with next(begin(agent, group)) as round:
        assert round.newest(own, lambda: "mine") == found
        assert sent is None or group.calls[-1] == sent
        assert sent is not None or group.calls[-1][0] == "form"


def test_what_an_agent_knows_of_a_worker_follows_from_its_messages() -> None:
    key = RoundKey(5, 2)
    worker = WorkerRecord(started=key, store=STORE)
    assert after_message(worker, WorkerHello("t", 1, True, "2.15.0"), 0.0).able
    unable = after_message(worker, WorkerHello("t", 1, False, "2.13.0"), 0.0)
    assert (unable.able, [one.params for one in unable.unable]) == (False, [{"version": "2.13.0"}])
    asked = replace(worker, able=True).note_asked(key, 1.0)
    offered = after_message(asked, Offer((5, 2), "h"), 2.0)
    assert (offered.offered, offered.handle) == (key, "h")
    informed = offered.note_informed(Formation(key, 7, ("h",)), 3.0)
    assert after_message(informed, Formed((5, 2)), 4.0).formed == key
    assert after_message(informed, Lost((5, 2)), 5.0).lost_at == 5.0
    assert after_message(informed, Formed((5, 1)), 4.0) == informed


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"type":"offer"}', b'{"type":"formed","round":[1,-1]}', b"\xff", b"[" * 9999]
)
def test_a_line_that_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        agent_side.read_message(text)


def test_both_sides_have_the_same_order_and_variables() -> None:
    assert all(name.startswith(FEATURE_VARIABLES) for name in (agent_line.LINE_VARIABLE, agent_line.TOKEN_VARIABLE))
    assert set(agent_line.Order._fields) == set(
        msgspec.structs.asdict(agent_side.WorkerOrder((1, 1), 0, 1, "", 0, 1.0, 1.0))
    )


def set_nccl2(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Set the variable of torch, or leave it out."""
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", value)


@pytest.mark.parametrize(
    ("backend", "variable", "seen"),
    [("nccl", None, "1"), ("nccl", "0", "0"), ("nccl", "1", "1"), ("gloo", None, None), (None, None, None)],
)
def test_the_nccl_backend_that_forms_in_place_is_selected_while_the_group_opens(
    backend: str | None, variable: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    class Torch(OldBackend):
        @staticmethod
        def init_process_group(*args: object, **options: object) -> None:
            found.append(os.environ.get("TORCH_DIST_USE_NCCL2"))

        _get_reconfigure_handle = _supports_reconfigure = staticmethod(lambda: True)

    set_nccl2(monkeypatch, variable)
    monkeypatch.setattr(reconfigurable_group, "_distributed", lambda: Torch)
    monkeypatch.setattr(reconfigurable_group, "_c10d", lambda: Torch)
    reconfigurable_group.ReconfigurableGroup(backend).handle("127.0.0.1", 1, 0, 1)
    assert found == [seen]
    assert os.environ.get("TORCH_DIST_USE_NCCL2") == variable, "a group as in any script is that of torch's default"


class OldBackend:
    """The parts of torch that open a group, with a backend that cannot be formed in place."""

    @staticmethod
    def TCPStore(*args: object, **options: object) -> None: ...

    @staticmethod
    def init_process_group(*args: object, **options: object) -> None: ...

    @staticmethod
    def _supports_reconfigure() -> bool:
        return False


@pytest.mark.parametrize(
    ("backend", "variable", "remedy"),
    [
        ("nccl", None, "start the workers with TORCH_DIST_USE_NCCL2=1"),
        ("nccl", "0", "without TORCH_DIST_USE_NCCL2=0"),
        ("nccl-legacy", None, "use the backend nccl,"),
        ("ucc", None, "use gloo or nccl"),
    ],
)
def test_a_backend_that_cannot_form_in_place_says_what_to_do(
    backend: str, variable: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_nccl2(monkeypatch, variable)
    monkeypatch.setattr(reconfigurable_group, "_distributed", OldBackend)
    monkeypatch.setattr(reconfigurable_group, "_c10d", OldBackend)
    with pytest.raises(RuntimeError, match=remedy):
        reconfigurable_group.ReconfigurableGroup(backend).handle("127.0.0.1", 1, 0, 1)
