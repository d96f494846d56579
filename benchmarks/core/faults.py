"""What is done to a process, a disk or a machine from outside. Each is a context that undoes it at its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import create_server, socket

from dlrover_run.features.local_nodes.network import Namespace, Network

DATA_NETWORK = "data"
"""The name of the network interface on which the ranks of two nodes exchange data."""

FREEZER = Path("/sys/fs/cgroup/freezer")
"""A process that is frozen by version 1 of control groups is in state D; version 2 lets it sleep as if it waited."""

COMMAND_TIMEOUT = 20.0
"""Seconds for one command that mounts or freezes, which takes milliseconds."""

CHUNK_INTERVAL = 0.5
"""Seconds between two pieces of a slow download."""

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_ANY_CHILD = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def why_no_freezer() -> str | None:
    """Why processes cannot be frozen here; None if they can."""
    if not os.access(FREEZER / "cgroup.procs", os.W_OK):
        return "there is no freezer of control groups version 1 that may be written"
    return None


def why_no_mount() -> str | None:
    """Why file systems cannot be mounted here; None if they can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        with small_disk():
            return None
    except subprocess.CalledProcessError as error:
        return f"mounting is not allowed ({error.stderr.decode(errors='replace').strip()})"


def why_no_own_disk() -> str | None:
    """Why a file system cannot be blocked here, which is tried; None if it can."""
    missing = [program for program in ("mkfs.ext4", "fsfreeze") if shutil.which(program) is None]
    if missing:
        return f"there is no program {missing[0]}"
    if why := why_no_mount():
        return why
    try:
        with own_disk() as disk, blocked(disk):
            return None
    except subprocess.CalledProcessError as error:
        return f"a file in a loop cannot be mounted and frozen ({error.stderr.decode(errors='replace').strip()})"


@contextlib.contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """These processes do not run."""
    group = FREEZER / f"benchmark-{os.getpid()}"
    group.mkdir()
    try:
        for pid in pids:
            # One that has ended meanwhile needs no freezing.
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        for member in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (FREEZER / "cgroup.procs").write_text(member)
        group.rmdir()


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """These processes are stopped by a signal."""
    pids = list(pids)
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@dataclass(frozen=True)
class TwoNetworks:
    """Two nodes, each with two cables: `eth0` for the launchers, and DATA_NETWORK for the ranks."""

    nodes: tuple[Namespace, ...]
    switch: Namespace

    def cut(self, node: int) -> None:
        """Disconnect the ranks of a node from those of the other one."""
        self.switch.ip(f"link set {DATA_NETWORK}-{node} down")


@contextlib.contextmanager
def two_networks() -> Iterator[TwoNetworks]:
    """Two nodes that are connected twice. Raises NetworkError."""
    with contextlib.closing(Network()) as launchers:
        switch = launchers.switch
        switch.ip(f"link add {DATA_NETWORK} type bridge stp_state 0 forward_delay 0", f"link set {DATA_NETWORK} up")
        nodes = []
        for number in (0, 1):
            node = launchers.connect(number)
            node.ip(
                f"link add {DATA_NETWORK} type veth peer name {DATA_NETWORK}-{number} netns /proc/self/fd/{switch.fd}",
                f"addr add 10.78.0.{number + 1}/24 dev {DATA_NETWORK}",
                f"link set {DATA_NETWORK} up",
                descriptors=(switch.fd,),
            )
            switch.ip(f"link set {DATA_NETWORK}-{number} master {DATA_NETWORK} up")
            nodes.append(node)
        yield TwoNetworks(tuple(nodes), switch)


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """A debugger is attached to this process and has stopped it."""
    _ptrace(_PTRACE_SEIZE, pid)
    _ptrace(_PTRACE_INTERRUPT, pid)
    os.waitpid(pid, _ANY_CHILD)
    yield
    # The kernel detaches from a process that was killed meanwhile.
    with contextlib.suppress(OSError):
        _ptrace(_PTRACE_DETACH, pid)


@contextlib.contextmanager
def small_disk() -> Iterator[str]:
    """A folder on a disk of 64 KiB."""
    in_memory = ("-t", "tmpfs", "-o", "size=64k", "none")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, _mounted(folder, *in_memory):
        yield folder


@contextlib.contextmanager
def own_disk() -> Iterator[str]:
    """A folder on a disk of its own, which `blocked` can block."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        image, mountpoint = os.path.join(folder, "image"), os.path.join(folder, "disk")
        os.mkdir(mountpoint)
        _run("truncate", "--size=8M", image)
        _run("mkfs.ext4", "-q", image)
        with _mounted(mountpoint, "-o", "loop", image):
            yield mountpoint


@contextlib.contextmanager
def blocked(disk: str) -> Iterator[None]:
    """What is written to the disk of this folder waits."""
    _run("fsfreeze", "--freeze", disk)
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", disk)


@contextlib.contextmanager
def slow_server() -> Iterator[str]:
    """HOST:PORT of a server that sends 8 KiB twice a second to each client, as long as it is connected."""
    ended = threading.Event()

    def send(client: socket) -> None:
        with client, contextlib.suppress(OSError):
            while not ended.wait(CHUNK_INTERVAL):
                client.sendall(bytes(8192))

    def serve(server: socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=send, args=(server.accept()[0],), daemon=True).start()

    with create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        ended.set()


@contextlib.contextmanager
def console() -> Iterator[str]:
    """A FIFO from which a debugger reads its commands; `continuing` sends one."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        path = os.path.join(folder, "console")
        os.mkfifo(path)
        # There is a writer at any time, so that the debugger waits for a command.
        fd = os.open(path, os.O_RDWR)
        try:
            yield path
        finally:
            os.close(fd)


@contextlib.contextmanager
def continuing(path: str) -> Iterator[None]:
    """At the end the debugger that reads this FIFO lets its program continue."""
    yield
    Path(path).write_text("continue\n")


@contextlib.contextmanager
def _mounted(folder: str, *arguments: str) -> Iterator[None]:
    _run("mount", *arguments, folder)
    try:
        yield
    finally:
        _run("umount", folder)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _ptrace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, None) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
