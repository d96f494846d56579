"""A network for the nodes on one machine, so that one of them can really be cut off.

Each node has a network namespace with one end of a cable, `eth0`; the other end is in a switch, a bridge in a namespace
of its own. No namespace has a name in the file system: each exists as long as a process is in it or holds a descriptor
of it, and its cables with it. So nothing is left once the supervisor and its nodes have ended, also by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

IP_TIMEOUT = 30.0
"""Seconds for one run of `ip`, which takes milliseconds unless the kernel is removing many networks. Then it is killed,
and the node cannot be connected."""

NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
"""The network of all nodes. It has no route out, so other machines may have the same addresses."""

MASTER_ADDRESS = "10.77.0.1"

MAX_NODES = 25_400
"""Nodes with an address: a hundred in each of 254 subnets."""

_SWITCH_HARDWARE_ADDRESS = "02:00:0a:4d:00:01"
"""Otherwise a bridge has that of a cable, and changes it with the cable: nodes would lose the master for seconds."""

ADDRESS_REQUESTS = 30
"""Requests for a hardware address, one a second, before a node counts as unreachable. The kernel's default is 3: on a
busy machine a new cable may carry nothing for longer, and the first connection of a node would fail at once."""

_UNUSED_HARDWARE_ADDRESS = "02:00:00:00:00:99"

_CLONE_NEWNET = 0x40000000

_FAILED_COMMAND = re.compile(r"Command failed -:(\d+)")

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(OSError):
    """A network cannot be made or changed; the message is a clause with the cause."""


def why_not() -> str | None:
    """A clause on why nodes cannot have networks here; None if they can, which is tried with one node."""
    try:
        with contextlib.closing(Network()) as network:
            network.connect(0)
    except NetworkError as error:
        return str(error)
    return None


def node_address(number: int) -> str:
    """The address of a node on `eth0`, in which the last two digits are those of its number: node 7 has 10.77.1.107.

    Raises NetworkError for a number without an address.
    """
    if not 0 <= number < MAX_NODES:
        raise NetworkError(f"there is no address for node {number}: the last one is that of node {MAX_NODES - 1}")
    hundreds, rest = divmod(number, 100)
    return str(NETWORK[(1 + hundreds) * 256 + 100 + rest])


class Namespace:
    """A new network namespace, which exists until `close`, and as long as a process is in it. Raises NetworkError."""

    def __init__(self) -> None:
        with _elsewhere(_unshare):
            self.fd = _current_namespace()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread into the namespace, and so the processes that it starts. Nothing may be awaited meanwhile:
        other tasks would run in it too."""
        with _elsewhere(lambda: _move_to(self.fd)):
            yield

    def ip(self, *commands: str, descriptors: tuple[int, ...] = ()) -> None:
        """Execute commands of `ip` in the namespace, up to the first that fails. Blocks for milliseconds.

        `descriptors` are inherited, so that a command can have `/proc/self/fd/N` as a path. Raises NetworkError.
        """
        with self.entered():
            _execute(commands, descriptors)

    def close(self) -> None:
        os.close(self.fd)


class Network:
    """A switch, with the address of the master, and the nodes that are connected to it, a thousand at most at a time.

    Raises NetworkError.
    """

    def __init__(self) -> None:
        self.master_address = MASTER_ADDRESS
        self.switch = Namespace()
        self._nodes: dict[int, Namespace] = {}
        try:
            # Without a spanning tree, a cable can be used as soon as it is connected.
            self.switch.ip(
                "link set lo up",
                f"link add switch address {_SWITCH_HARDWARE_ADDRESS} type bridge stp_state 0 forward_delay 0",
                *_without_ipv6("switch"),
                f"addr add {MASTER_ADDRESS}/{NETWORK.prefixlen} dev switch",
                _more_address_requests("switch"),
                "link set switch up",
            )
        except NetworkError:
            self.switch.close()
            raise

    def connect(self, number: int) -> Namespace:
        """Give a node its namespace: `eth0` with the node's address, and `lo`. Raises NetworkError."""
        address = node_address(number)
        node = Namespace()
        cable = f"node-{number}"
        try:
            node.ip(
                "link set lo up",
                f"link add eth0 type veth peer name {cable} netns /proc/self/fd/{self.switch.fd}",
                *_without_ipv6("eth0"),
                f"addr add {address}/{NETWORK.prefixlen} dev eth0",
                _more_address_requests("eth0"),
                "link set eth0 up",
                descriptors=(self.switch.fd,),
            )
            self.switch.ip(*_without_ipv6(cable), f"link set {cable} master switch up")
        except NetworkError:
            node.close()
            raise
        self._nodes[number] = node
        return node

    def disconnect(self, number: int) -> None:
        """Remove the namespace of a node whose processes have ended, and its cable. A number is used once."""
        self._nodes.pop(number).close()

    def cut(self, one: int, other: int) -> None:
        """Drop everything that these two nodes send to each other, until the `eth0` of either is set down and up again.

        It is sent to a hardware address that no interface has, so neither gets an answer or an error. Raises
        NetworkError.
        """
        for near, far in ((one, other), (other, one)):
            self._nodes[near].ip(
                f"neigh replace {node_address(far)} lladdr {_UNUSED_HARDWARE_ADDRESS} dev eth0 nud permanent"
            )

    def close(self) -> None:
        """Remove the network. Processes that are still in a namespace keep it, but reach no other node."""
        for namespace in (self.switch, *self._nodes.values()):
            namespace.close()
        self._nodes.clear()


@contextlib.contextmanager
def _elsewhere(move: Callable[[], None]) -> Iterator[None]:
    """Move this thread to another network namespace, and back at the end."""
    before = _current_namespace()
    try:
        move()
        try:
            yield
        finally:
            _move_to(before)
    finally:
        os.close(before)


def _current_namespace() -> int:
    try:
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    except OSError as error:
        raise NetworkError(f"the kernel shows no network namespaces ({error.strerror})") from None


def _move_to(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise NetworkError(f"a network namespace cannot be entered ({os.strerror(code)})")


def _unshare() -> None:
    """Move to a new network namespace."""
    if _libc.unshare(_CLONE_NEWNET) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EPERM:
        raise NetworkError(f"the kernel makes no network namespace ({os.strerror(code)})")
    if os.geteuid() != 0:
        raise NetworkError("this needs root")
    raise NetworkError("root lacks CAP_SYS_ADMIN here, as in most containers; `docker run --privileged` gives it")


def _without_ipv6(device: str) -> tuple[str, ...]:
    """The command that keeps IPv6 off a device, because its addresses cannot be used in the first seconds."""
    return (f"link set {device} addrgenmode none",) if Path("/proc/net/if_inet6").exists() else ()


def _more_address_requests(device: str) -> str:
    return f"ntable change name arp_cache dev {device} mcast_probes {ADDRESS_REQUESTS}"


def _execute(commands: tuple[str, ...], descriptors: tuple[int, ...]) -> None:
    try:
        done = subprocess.run(
            ["ip", "-batch", "-"],
            input="".join(f"{command}\n" for command in commands),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IP_TIMEOUT,
            pass_fds=descriptors,
            # A Ctrl-C is for the supervisor alone.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise NetworkError("the program ip is missing: install iproute2") from None
    except subprocess.TimeoutExpired:
        raise NetworkError(f"the program ip did not end within {IP_TIMEOUT:g} s") from None
    except OSError as error:
        raise NetworkError(f"the program ip cannot be run ({error.strerror})") from None
    if done.returncode == 0:
        return
    failed = _FAILED_COMMAND.search(done.stderr)
    what = f"ip {commands[int(failed[1]) - 1]}" if failed else "ip -batch"
    reason = next((line.strip() for line in done.stderr.splitlines() if line.strip()), f"exit code {done.returncode}")
    raise NetworkError(f"`{what}` failed: {reason}")
