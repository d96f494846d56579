"""The store that an agent serves, compared with torch's own server: the real client, the same calls, equal answers."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from dlrover_run.processes.ports import HeldPort
from dlrover_run.workers.store_process import BOOT, PACKAGE
from dlrover_run.workers.tcp_store import parser, server

pytest.importorskip("torch")
from torch.distributed import TCPStore  # type: ignore[attr-defined]

SHORT = timedelta(seconds=0.1)


@contextmanager
def served() -> Iterator[int]:
    """A server of ours; its port."""
    held = HeldPort()
    listener = held.listen()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BOOT, PACKAGE, str(listener.fileno())],
        pass_fds=[listener.fileno()],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield held.number
    finally:
        held.release()
        process.kill()
        process.wait()


@contextmanager
def torchs() -> Iterator[int]:
    """A server of torch; its port. A process of its own, as some calls of a client hold the interpreter's lock."""
    code = (
        "import torch.distributed as d, sys\n"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def connect(port: int) -> Any:
    """A client."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))


class Calls:
    """Calls of the real client, and what each returned or raised."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.client = connect(port)
        self.answers: list[tuple[str, Any]] = []

    def call(self, method: str, *args: Any) -> None:
        """Call a method; after an error that ends the connection, go on with another one."""
        if not hasattr(self.client, method):
            return
        try:
            answer = getattr(self.client, method)(*args)
            self.answers.append((method, sorted(answer) if method == "list_keys" else answer))
        except RuntimeError as error:
            self.answers.append((method, type(error).__name__))
            self.client = connect(self._port)

    def woken_by(self, keys: list[str], *calls: tuple[Any, ...]) -> None:
        """Note whether a client that waits for these keys is woken by calls of another one."""
        other = connect(self._port)
        ended: list[str] = []

        def wait() -> None:
            try:
                other.wait(keys, timedelta(seconds=0.5))
                ended.append("woken")
            except RuntimeError as error:
                ended.append(type(error).__name__)

        # The call holds no lock of the interpreter while it waits, so the calls below come after its command.
        thread = threading.Thread(target=wait)
        thread.start()
        probe = connect(self._port)
        probe.set("probe", "1")
        threading.Event().wait(0.1)
        for method, *args in calls:
            self.call(method, *args)
        thread.join()
        self.answers.append((f"wait {keys}", ended))


def plain(calls: Calls) -> None:
    call = calls.call
    call("set", "a", "v"), call("get", "a"), call("set", "a", ""), call("get", "a")
    call("add", "n", 5), call("add", "n", -7), call("get", "n"), call("check", ["a", "zz"]), call("check", ["a", "n"])
    call("check", []), call("wait", ["a", "n"]), call("wait", []), call("wait", ["no"], SHORT), call("num_keys")
    call("compare_set", "cs", "", "x"), call("compare_set", "cs2", "y", "x"), call("check", ["cs2"])
    call("compare_set", "cs", "x", "z"), call("compare_set", "cs", "x", "w"), call("get", "cs")
    call("set", "e", ""), call("compare_set", "e", "", "new"), call("get", "e")
    call("delete_key", "cs"), call("delete_key", "cs"), call("num_keys"), call("append", "ap", "1")
    call("append", "ap", "22"), call("get", "ap"), call("append", "none", ""), call("check", ["none"])
    call("multi_set", ["m1", "m2"], ["1", "22"]), call("multi_get", ["m1", "m2"]), call("multi_get", [])
    call("has_extended_api"), call("list_keys"), call("num_keys"), call("set", "", "v"), call("get", "")


def numbers(calls: Calls) -> None:
    for text in ("12", " 12", "12x", "+3", "-4", "0x10", "text", "", "9" * 20, str(2**63 - 1)):
        calls.call("set", "n", text)
        calls.call("add", "n", 1)
        calls.call("get", "n")


def queues(calls: Calls) -> None:
    call = calls.call
    call("queue_pop", "q", False), call("queue_push", "q", "1"), call("queue_push", "q", "2"), call("queue_len", "q")
    call("check", ["q"]), call("num_keys"), call("list_keys"), call("delete_key", "q"), call("queue_pop", "q")
    call("queue_pop", "q", False), call("queue_pop", "q", False), call("queue_len", "q"), call("check", ["q"])
    call("set", "s", "1"), call("queue_push", "s", "2"), call("get", "s"), call("queue_pop", "s")
    call("queue_len", "none")


def waits(calls: Calls) -> None:
    woken = calls.woken_by
    woken(["a1", "a2"], ("set", "a1", "1"), ("delete_key", "a1"), ("set", "a2", "1"))
    woken(["b1", "b1"], ("set", "b1", "1"))
    woken(["c1", "c2"], ("set", "c1", "1"), ("set", "c1", "2"))
    woken(["d"], ("append", "d", "1"))
    woken(["e"], ("compare_set", "e", "", "1"))
    woken(["f"], ("compare_set", "f", "other", "1"))
    woken(["g"], ("add", "g", 1))
    woken(["h"], ("multi_set", ["h"], ["1"]))
    woken(["i"], ("queue_push", "i", "1"))


def barriers(calls: Calls) -> None:
    call = calls.call
    call("barrier", "b1", 1, SHORT), call("barrier", "b1", 1, SHORT), call("get", "b1")
    call("barrier", "b2", 2, SHORT), call("get", "b2"), call("barrier", "b2", 2, SHORT), call("barrier", "b2", 2, SHORT)
    call("get", "b2"), call("set", "b3", "text"), call("barrier", "b3", 1, SHORT), call("barrier", "b4", 0, SHORT)


@pytest.mark.parametrize("script", [plain, numbers, queues, waits, barriers], ids=lambda script: script.__name__)
def test_the_real_client_gets_the_answers_of_torchs_own_server(script: Callable[[Calls], None]) -> None:
    answers = []
    for start in (torchs, served):
        with start() as port:
            calls = Calls(port)
            script(calls)
            answers.append(calls.answers)
    assert answers[0] == answers[1]
    assert len(answers[1]) >= 9 or (script is barriers and not hasattr(TCPStore, "barrier"))


def test_a_value_of_64_mib_comes_back_whole() -> None:
    value = os.urandom(1 << 20) * 64
    with served() as port:
        connect(port).set("large", value)
        assert connect(port).get("large") == value


def test_a_client_that_waits_for_all_workers_goes_on() -> None:
    with served() as port:
        for _ in range(2):
            TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=1))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<BI", parser.VALIDATE, 1),
        struct.pack("<BIBQ", parser.VALIDATE, parser.MAGIC, parser.GET, parser.MAX_KEY_BYTES + 1),
        struct.pack("<BIBQ", parser.VALIDATE, parser.MAGIC, parser.CHECK, parser.MAX_COUNT + 1),
        struct.pack("<BIB", parser.VALIDATE, parser.MAGIC, 200),
    ],
)
def test_only_the_connection_that_sends_no_command_ends(data: bytes) -> None:
    with served() as port:
        good = connect(port)
        with socket.create_connection(("127.0.0.1", port), 10) as bad:
            bad.sendall(data)
            assert _ends(bad)
        good.set("a", "1")
        assert good.get("a") == b"1"


def _ends(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_a_client_that_takes_no_answers_holds_up_no_other() -> None:
    size = 8 << 20
    with served() as port:
        good = connect(port)
        good.set("large", b"x" * size)
        good.wait(["large"])
        with socket.create_connection(("127.0.0.1", port), 10) as greedy:
            get = struct.pack("<BQ", parser.GET, 6) + b"/large"
            greedy.sendall(struct.pack("<BI", parser.VALIDATE, parser.MAGIC) + get * 40)
            assert good.get("large") == b"x" * size
            # It gets them all when it reads.
            received = 0
            while received < 40 * (8 + size):
                received += len(greedy.recv(1 << 20))


def test_the_address_of_the_first_client_is_reported_once() -> None:
    lines: list[str] = []
    held = HeldPort()
    own = server.StoreServer(held.listen().dup(), lines.append)
    threading.Thread(target=own.serve, daemon=True).start()
    with socket.create_connection(("127.0.0.1", held.number), 10) as scanner:
        scanner.sendall(b"hello")
        assert _ends(scanner)
    connect(held.number).set("a", "1")
    assert connect(held.number).get("a") == b"1"
    assert len(lines) == 2
    assert lines[0].startswith(server.WARNING)
    assert lines[1] == f"{server.CLIENT}127.0.0.1"
    held.release()
