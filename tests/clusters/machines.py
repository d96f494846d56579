"""Several machines on this one, for programs that are not ours: each has its own network, host name and processes.

A machine is a set of namespaces whose first process keeps it; killing that process simulates a loss of power. All
machines are in one PID namespace whose first process exits when this process does, also by SIGKILL; the kernel then
kills every process in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dlrover_run.features.local_nodes.network import Network, NetworkError, node_address

START_TIMEOUT = 60.0
"""Seconds for the creation of the namespaces, which takes a fraction of one."""

# The first process of a machine. bash also waits for the orphans that become its children.
_INIT = 'hostname "$0" && echo ready && { sleep infinity & wait; }'


@dataclass(frozen=True)
class Machine:
    """One machine, by its host name. `pid` is that of its first process, as this process sees it."""

    name: str
    address: str
    pid: int

    def command(self, argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs `argv` on the machine; its exit code is that of `argv`."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount", "--"]
        # A directory that is entered before the mount namespace has no path in it, so `env` changes the directory.
        # What a loss of power leaves is removed with the directory of the test.
        assignments = [f"{name}={value}" for name, value in {"TMPDIR": str(cwd), **(env or {})}.items()]
        return [*enter, "env", f"--chdir={cwd}", *assignments, *map(str, argv)]

    def start(
        self, argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        """Start a program on the machine."""
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace", **popen}
        return subprocess.Popen(self.command(argv, cwd, env), **options)

    def processes(self) -> list[psutil.Process]:
        """All processes on the machine but the first; none after a loss of power."""
        found: list[psutil.Process] = []
        try:
            space = os.readlink(f"/proc/{self.pid}/ns/pid")
        except OSError:
            return found
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return found

    def set_link(self, state: str) -> None:
        """Set the network link `up` or `down`. While it is down the machine runs on and is silent to the others."""
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", "ip", "link", "set", "eth0", state], check=True)

    def lose_power(self) -> None:
        """Kill every process of the machine at once; its address is removed with them."""
        os.kill(self.pid, signal.SIGKILL)


class Machines:
    """Machines with these host names, which resolve each other's names, also with the domain if there is one.

    Raises NetworkError where the kernel cannot create one.
    """

    def __init__(self, names: Sequence[str], directory: Path, domain: str = "") -> None:
        addresses = {name: node_address(number) for number, name in enumerate(names)}
        hosts = directory / "etc-hosts"
        full = {name: f"{name}.{domain} " if domain else "" for name in names}
        lines = [f"{address} {full[name]}{name}" for name, address in addresses.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        self._owner = subprocess.Popen(
            [*spaces, sys.executable, __file__, str(hosts), *names],
            stdin=subprocess.PIPE,  # Its end ends all machines.
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._owner.stdout is not None
        try:
            if self._owner.stdout.readline() != "ready\n":
                _, reason = self._owner.communicate(timeout=START_TIMEOUT)
                raise NetworkError(reason.strip().rpartition("\n")[2] or "no namespaces can be made")
            shells = [one for one in psutil.Process(self._owner.pid).children(True) if one.name() == "bash"]
            # For a moment the first process of a machine has a copy of itself, which is about to run sleep.
            pids = {one.pid for one in shells}
            by_name = {one.cmdline()[-1]: one for one in shells if one.ppid() not in pids}
            self.by_name = {name: Machine(name, address, by_name[name].pid) for name, address in addresses.items()}
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Machine:
        return self.by_name[name]

    def close(self) -> None:
        """End all machines and their processes."""
        self._owner.kill()
        self._owner.communicate()


@contextlib.contextmanager
def machines(names: Sequence[str], directory: Path, domain: str = "") -> Iterator[Machines]:
    """Create machines that are ended after the test."""
    with contextlib.closing(Machines(names, directory, domain)) as made:
        yield made


def _own(hosts: str, names: Sequence[str]) -> None:
    """Be the first process of all machines: create them, and exit at the end of standard input."""
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    network = Network()
    inits = []
    for number, name in enumerate(names):
        with network.connect(number).entered():
            spaces = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
            inits.append(
                subprocess.Popen(
                    [*spaces, "bash", "-c", _INIT, name],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
    for init in inits:
        assert init.stdout is not None
        if init.stdout.readline() != "ready\n":
            raise NetworkError("a machine has no process namespace")
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _own(sys.argv[1], sys.argv[2:])
