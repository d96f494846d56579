"""What the kernel reports about real connections and processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import until

from dlrover_run.observe import processes, sock_diag
from dlrover_run.observe.carriers import Carriers
from dlrover_run.observe.records import summarize
from dlrover_run.observe.sample import Sampler
from dlrover_run.observe.sock_diag import SockDiag, SocketCounters, TooManySockets, parse
from dlrover_run.observe.waits import Waits, read_main_thread

WAIT = 30


@pytest.fixture
def diag() -> Iterator[SockDiag]:
    opened = SockDiag()
    yield opened
    opened.close()


def pair(family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    with socket.socket(family) as listener:
        listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        listener.listen()
        client = socket.create_connection(listener.getsockname()[:2])
        return client, listener.accept()[0]


def of(diag: SockDiag, one: socket.socket) -> SocketCounters:
    inode = os.fstat(one.fileno()).st_ino
    return next(found for found in diag.dump() if found.inode == inode)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_bytes_of_both_ends(diag: SockDiag, family: int) -> None:
    client, server = pair(family)
    with client, server:
        before = of(diag, client), of(diag, server)
        client.sendall(b"x" * 100_000)
        until(lambda: of(diag, client).acked - before[0].acked == 100_000)
        after = of(diag, server)
        assert after.received - before[1].received == 100_000
        assert after.unread == 100_000
        assert of(diag, client).unsent == 0
        assert after.local_port == server.getsockname()[1]
        assert after.remote_port == client.getsockname()[1]


def test_a_kernel_without_the_request_for_both_families(diag: SockDiag, monkeypatch: pytest.MonkeyPatch) -> None:
    # No kernel knows this one.
    monkeypatch.setattr(diag, "_requests", [(99, b"")])
    for family in (socket.AF_INET, socket.AF_INET6):
        client, server = pair(family)
        with client, server:
            assert of(diag, client).local_port == client.getsockname()[1]


def test_the_time_since_data_was_sent(diag: SockDiag) -> None:
    client, server = pair()
    with client, server:
        client.sendall(b"x")
        until(lambda: of(diag, client).sent_age >= 0.2)
        client.sendall(b"x")
        until(lambda: of(diag, client).sent_age < 0.2)


def test_a_dump_has_a_limit_and_the_next_one_is_complete(diag: SockDiag, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = pair()
    with client, server:
        with monkeypatch.context() as patch:
            patch.setattr(sock_diag, "MAX_SOCKETS", 1)
            with pytest.raises(TooManySockets):
                diag.dump()
        assert of(diag, client).local_port == client.getsockname()[1]


@pytest.mark.parametrize("message", [b"", b"\0" * 71, b"\xff" * 72, b"\xff" * 75, b"\1" * 400])
def test_a_message_that_describes_no_connection(message: bytes) -> None:
    assert parse(message) is None


def test_figures_of_a_process_and_its_child() -> None:
    # The kernel counts processor time in ticks of up to 10 ms, and those of the process that runs at a tick.
    script = "import os, subprocess\nwhile sum(os.times()[:2]) < 0.05: pass\nsubprocess.run(['sleep', '100'])"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            until(lambda: [c.name for c in _figures(process.pid).children] == ["sleep"])
            figures = _figures(process.pid)
            assert figures.own.parent == os.getpid()
            assert figures.children[0].parent == process.pid
            assert figures.own.cpu > 0
            assert figures.own.faults > 0
            assert figures.main_faults is None, "its main thread sleeps"
            assert figures.own.read > 0
            assert not figures.traced
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: _figures(process.pid).own.stopped)
        finally:
            os.kill(_figures(process.pid).children[0].pid, signal.SIGKILL)
            process.kill()
        process.wait(WAIT)
        assert processes.read_worker(process.pid) is None


def _figures(pid: int) -> processes.WorkerFigures:
    found = processes.read_worker(pid)
    assert found is not None
    return found


def test_a_process_that_waits_for_a_processor() -> None:
    (processor, *_) = os.sched_getaffinity(0)
    script = f"import os; os.sched_setaffinity(0, [{processor}])\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", script]) for _ in range(2)]
    try:
        until(lambda: all(_figures(one.pid).own.queued > 0 for one in spinning))
        assert all(one.own.ready > one.own.cpu for one in (_figures(each.pid) for each in spinning))
        pid, last = spinning[0].pid, [_figures(spinning[0].pid)]

        def spins_on() -> bool:
            before, now = last[-1], _figures(pid)
            last.append(now)
            return now.own.turns > before.own.turns and now.never_waited(before)

        until(spins_on)
        assert not last[-1].never_waited(last[-2]._replace(voluntary_switches=None))
        assert not last[-1].never_waited(last[-2]._replace(own=last[-2].own._replace(state="S")))
    finally:
        for one in spinning:
            one.kill()
            one.wait(WAIT)


_COPIES = """
import mmap, threading

def copy():
    while True:
        memory = mmap.mmap(-1, 1 << 20)
        for at in range(0, 1 << 20, 4096):
            memory[at] = 1
        memory.close()

threading.Thread(target=copy).start()
while True:
    pass
"""


def test_the_new_memory_of_a_main_thread_is_not_that_of_another_thread() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", _COPIES]) as process:
        try:
            until(lambda: _figures(process.pid).own.faults > 5_000)
            first = until(lambda: one if (one := _figures(process.pid)).main_faults is not None else None)
            until(lambda: _figures(process.pid).own.faults > first.own.faults + 5_000)
            last = until(lambda: one if (one := _figures(process.pid)).main_faults is not None else None)
            assert last.main_faults - first.main_faults < 1_000
        finally:
            process.kill()


def test_a_process_that_writes() -> None:
    before = _figures(os.getpid()).own
    with open(os.devnull, "wb", buffering=0) as sink:
        sink.write(b"x" * 50_000)
    assert _figures(os.getpid()).own.written - before.written >= 50_000


def test_a_process_that_has_exited(tmp_path: Path) -> None:
    assert processes.read_process(1, tmp_path) is None
    assert processes.read_worker(1, tmp_path) is None
    assert processes.socket_inodes(1, tmp_path) == set()


def test_each_connection_belongs_to_the_worker_that_has_it_open() -> None:
    client, server = pair()
    store_client, store_server = pair()
    with client, server, store_client, store_server:
        sampler = Sampler({3: os.getpid(), 4: os.getppid()}, store_server.getsockname()[1])
        before = {one.rank: one.traffic for one in sampler.sample(full=False)}
        assert before[3].at_store
        assert not before[4].at_store
        client.sendall(b"x" * 5000)
        store_client.sendall(b"x" * 5000)
        until(lambda: sampler.sample(full=False)[0].traffic.acked - before[3].acked == 5000)
        after = {one.rank: one for one in sampler.sample(full=True)}
        # Both ends of the connection are here.
        assert after[3].traffic.received - before[3].received == 5000
        assert after[3].figures is not None
        assert after[3].figures.own.pid == os.getpid()
        assert after[4].traffic.acked == before[4].acked
        sampler.forget(4)
        assert [one.rank for one in sampler.sample(full=True)] == [3]
        sampler.close()


def test_the_last_time_is_that_of_connections_with_much_data() -> None:
    def one(acked: int, sent_age: float, remote: int = 2) -> SocketCounters:
        return SocketCounters(1, 1, remote, acked, 0, sent_age, 9, 0, 0)

    assert summarize([one(1_000_000, 5), one(900_000, 3), one(100, 0.1)], 29500, Carriers()).sent_age == 3
    assert summarize([one(1_000_000, 5, remote=29500)], 29500, Carriers()).sent_age is None
    assert summarize([one(1, 5)], 29500, Carriers()).sent_age is None
    assert summarize([], 29500, Carriers()).sent_age is None
    assert summarize([one(1_000_000, 5), one(100, 0.1)], 29500, Carriers()).data_age == 0.1
    assert summarize([one(1_000_000, 5, remote=29500)], 29500, Carriers()).data_age is None


def test_the_connections_with_unacknowledged_data_are_counted() -> None:
    counts = [
        summarize([SocketCounters(1, 1, 2, 9, 9, 0, 0, 0, unsent)] * 2, 0, Carriers()).unsent_peers
        for unsent in (0, 70)
    ]
    assert counts == [0, 2]


@pytest.mark.parametrize(
    ("script", "waits"),
    [
        ("import time; time.sleep(999)", Waits.TIME),
        ("import os; os.read(os.pipe()[0], 1)", Waits.DATA),
        ("import select, os; p = select.poll(); p.register(os.pipe()[0]); p.poll()", Waits.DATA),
        ("import socket; here, there = socket.socketpair(); here.recv(1)", Waits.DATA),
        ("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", Waits.PEERS),
        ("while True: pass", Waits.NOTHING),
    ],
)
def test_what_a_main_thread_waits_for_is_what_the_script_does(script: str, waits: Waits) -> None:
    begins = f"print(flush=True)\n{script}"
    with subprocess.Popen([sys.executable, "-S", "-c", begins], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            until(lambda: (found := read_main_thread(process.pid)) is not None and found.waits is waits)
        finally:
            process.kill()
        process.wait()
        assert read_main_thread(process.pid) is None


def test_what_a_stopped_thread_waits_for_is_not_known() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: (found := read_main_thread(process.pid)) is not None and found.waits is None)
        finally:
            process.kill()


def test_the_time_without_a_processor_grows_with_more_threads_than_processors() -> None:
    processors = len(os.sched_getaffinity(0))
    script = "while True: pass"
    crowd = [subprocess.Popen([sys.executable, "-S", "-c", script]) for _ in range(processors + 1)]
    try:
        until(lambda: any((found := read_main_thread(one.pid)) is not None and found.queued > 0.01 for one in crowd))
    finally:
        for one in crowd:
            one.kill()
            one.wait()
