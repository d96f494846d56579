"""The connection between a TensorFlow process and its agent, on the process's side."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tf_ps_runner.worker.agent_connection import MAX_MESSAGE, AgentConnection, AgentGone, TaskOrder

TIMEOUT = 30.0
"""Seconds for what takes a few milliseconds."""


class Agent:
    """The other end of the connection."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + address[1:] if address.startswith("@") else address)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT)
        self._line: socket.socket | None = None

    def read(self) -> dict[str, Any]:
        """The next message."""
        if self._line is None:
            self._line, _ = self._listener.accept()
            self._lines = self._line.makefile("rb")
        message: dict[str, Any] = json.loads(self._lines.readline())
        return message

    def write(self, **message: Any) -> None:
        """Send a message."""
        assert self._line is not None
        self._line.sendall(json.dumps(message).encode() + b"\n")

    def has_no_connection(self) -> bool:
        """Whether no process has connected."""
        self._listener.setblocking(False)
        try:
            self._listener.accept()
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """Close the connection, and listen no more."""
        self._listener.close()
        if self._line is not None:
            self._lines.close()
            self._line.close()


@pytest.fixture(params=["file", "abstract"])
def agent(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent that listens at the address in the environment."""
    address = str(tmp_path / "agent") if request.param == "file" else f"@tf-ps-test-{tmp_path}"[:100]
    monkeypatch.setenv("TF_PS_AGENT", address)
    monkeypatch.setenv("TF_PS_TASK_TOKEN", "secret")
    listening = Agent(address)
    yield listening
    listening.close()


def test_a_connection_is_opened_by_the_first_message_and_begins_with_the_token(agent: Agent) -> None:
    connection = AgentConnection()
    assert connection.active
    connection.report("step", step=7)
    assert agent.read() == {"type": "hello", "token": "secret", "pid": os.getpid()}
    assert agent.read() == {"type": "step", "step": 7}


def test_the_latest_order_wakes_a_thread_that_waits_for_it(agent: Agent) -> None:
    connection = AgentConnection()
    assert connection.order == TaskOrder()
    agent.read()
    agent.write(type="order", version=3, open=False, pause=False, save=False, ending=False)
    assert connection.wait_for(lambda order: order.version == 3, TIMEOUT)
    opened = threading.Thread(target=lambda: connection.wait_for(lambda order: order.open, TIMEOUT), daemon=True)
    opened.start()
    agent.write(type="order", version=3, open=True, pause=False, save=False, ending=False)
    opened.join(TIMEOUT)
    assert connection.order == TaskOrder(version=3, open=True)


def test_unknown_messages_of_a_newer_agent_are_ignored(agent: Agent) -> None:
    connection = AgentConnection()
    connection.report("ready")
    agent.read()
    agent.write(type="weather", sun=True)
    agent.write(type="order", version=1, open=True, weather="fine")
    assert connection.wait_for(lambda order: order.open, TIMEOUT)


def test_each_request_gets_its_own_answer(agent: Agent) -> None:
    connection = AgentConnection()
    answers: dict[str, Any] = {}
    asking = [
        threading.Thread(target=lambda what=what: answers.update({what: connection.request(what)}), daemon=True)
        for what in ("take", "snapshot")
    ]
    for thread in asking:
        thread.start()
    agent.read()
    requests = {request["type"]: request["request"] for request in (agent.read(), agent.read())}
    agent.write(answer=requests["snapshot"], state={"a": 1})
    agent.write(answer=requests["take"], over=True)
    for thread in asking:
        thread.join(TIMEOUT)
    assert answers["take"] == {"answer": requests["take"], "over": True}
    assert answers["snapshot"] == {"answer": requests["snapshot"], "state": {"a": 1}}


def test_a_waiting_thread_gets_an_error_when_the_agent_ends(agent: Agent) -> None:
    connection = AgentConnection()
    connection.report("ready")
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            connection.request("take")
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    agent.read(), agent.read(), agent.read()
    agent.close()
    asking.join(TIMEOUT)
    assert [type(error) for error in failed] == [AgentGone]
    assert connection.gone
    assert not connection.wait_for(lambda order: order.open)
    connection.report("step", step=1)


def test_a_message_that_is_too_long_is_not_sent(agent: Agent) -> None:
    with pytest.raises(ValueError, match="the agent accepts at most"):
        AgentConnection().request("rollback", state={str(number): 0 for number in range(MAX_MESSAGE)})


def test_without_an_agent_in_the_environment_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_PS_AGENT", raising=False)
    connection = AgentConnection()
    connection.report("ready")
    assert not connection.active
    assert connection.order == TaskOrder()
    assert not connection.wait_for(lambda order: order.open)
    with pytest.raises(AgentGone):
        connection.request("take")


def test_an_unreachable_agent_is_reported_and_the_script_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_PS_AGENT", str(tmp_path / "nobody"))
    connection = AgentConnection()
    connection.report("ready")
    connection.report("step", step=1)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "continues as under plain TensorFlow" in printed
    assert connection.gone


def test_a_forked_child_has_no_connection(agent: Agent) -> None:
    connection = AgentConnection()
    connection.claim()
    child = os.fork()
    if child == 0:
        connection.report("step", step=1)
        os._exit(3 if connection.active else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert agent.has_no_connection()
