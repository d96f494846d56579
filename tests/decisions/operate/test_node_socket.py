"""The socket of an agent for operators, which the job does not need, and what it does at the end of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_run.agent.result import JobResult
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.features.operate.agent_socket import AgentSocket
from dlrover_run.features.operate.node import OperatorSocket

LINE = "warning: `status` does not find this node from here: "


class Node:
    """The services of an agent, as far as the socket uses them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun: list[asyncio.Task[Any]] = []
        self.order: list[str] = []
        services: Any = SimpleNamespace(
            console=SimpleNamespace(info=self.lines.append),
            events=SimpleNamespace(lines=None, path=None),
            start=self._start,
            end_logs=self._end_logs,
            ask=None,
            ask_stacks=None,
            read_activity=None,
        )
        self.feature = OperatorSocket(services, SimpleNamespace())  # type: ignore[arg-type]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.begun.append(asyncio.ensure_future(work))

    async def _end_logs(self) -> None:
        self.order.append("end logs")


@pytest.mark.parametrize(
    ("step", "error", "problem"),
    [
        ("listen", OSError(24, "Too many open files"), "Too many open files"),
        ("accept", OSError(24, "Too many open files"), "Too many open files"),
        ("accept", ZeroDivisionError("planted"), "internal error: ZeroDivisionError('planted'); please report it"),
    ],
)
def test_a_socket_that_cannot_be_had_is_a_warning_and_ends_no_node(
    monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, problem: str
) -> None:
    def fail(socket: AgentSocket) -> None:
        raise error

    async def accept(socket: AgentSocket) -> None:
        fail(socket)

    monkeypatch.setattr(AgentSocket, step, fail if step == "listen" else accept)

    async def run() -> list[str]:
        node = Node()
        node.feature.open()
        # What is begun here ends the node if it raises.
        await asyncio.gather(*node.begun)
        await node.feature.close(JobResult(exit_code=0, exit_reason=ExitReason.SUCCESS, reason=""))
        return node.lines

    assert asyncio.run(run()) == [LINE + problem]


def test_readers_of_logs_have_the_rest_before_those_who_wait_for_the_end_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> list[str]:
        node = Node()

        async def finish(socket: AgentSocket, end: object) -> None:
            node.order.append("finish")

        monkeypatch.setattr(AgentSocket, "finish", finish)
        monkeypatch.setattr(AgentSocket, "close", lambda socket: node.order.append("close"))
        await node.feature.close(JobResult(exit_code=0, exit_reason=ExitReason.SUCCESS, reason=""))
        return node.order

    assert asyncio.run(run()) == ["end logs", "finish", "close"]
