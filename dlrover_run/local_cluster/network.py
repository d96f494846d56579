"""Networks of their own for nodes on one machine, so that one of them can really be cut.

Each node has a network namespace with one end of a cable, `eth0`; the other end is in a switch, a bridge in a namespace
of its own. None of it has a name in the file system: a namespace lives for as long as a process is in it or holds a
descriptor of it, and what was connected goes with it. So nothing is left once the supervisor and its nodes have ended,
however they did.
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
"""Seconds for one run of `ip`, which takes milliseconds unless the kernel is busy taking many networks apart; then it
is killed, and the node cannot be connected."""

NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
"""The network of all nodes. It has no route out, so other machines may have the same addresses."""

MASTER_ADDRESS = "10.77.0.1"

NODES_BEYOND = 25_400
"""The first number that has no address any more: 254 times a hundred do."""

_SWITCH_HARDWARE_ADDRESS = "02:00:0a:4d:00:01"
"""Without one, a bridge has that of a cable, and another one's when that is gone: nodes would lose the master for
seconds."""

_NOBODYS_HARDWARE_ADDRESS = "02:00:00:00:00:99"

_CLONE_NEWNET = 0x40000000

_FAILED_ORDER = re.compile(r"Command failed -:(\d+)")

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(OSError):
    """There is no such network, or it cannot be changed; the message is a clause with the cause."""


def why_not() -> str | None:
    """A clause on why nodes cannot have networks of their own here; None if they can, for one just had."""
    try:
        with contextlib.closing(Network()) as network:
            network.connect(0)
    except NetworkError as error:
        return str(error)
    return None


def node_address(number: int) -> str:
    """The address of a node on `eth0`. The last two digits are those of its number: node 7 has 10.77.1.107.

    Raises NetworkError for a number that has none.
    """
    if not 0 <= number < NODES_BEYOND:
        raise NetworkError(f"there is no address for a node {number}, for they end with node {NODES_BEYOND - 1}")
    hundreds, rest = divmod(number, 100)
    return str(NETWORK[(1 + hundreds) * 256 + 100 + rest])


class Namespace:
    """A network namespace that lives for as long as this holds it, or a process is in it.

    A process that is started while the thread is inside `entered` is in it; it inherits no descriptor.
    Raises NetworkError where the kernel makes none.
    """

    def __init__(self) -> None:
        with _away(_leave):
            self.fd = _own_namespace()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread in the namespace. Nothing may be awaited meanwhile: others would run in it too."""
        with _away(lambda: _move_to(self.fd)):
            yield

    def ip(self, *orders: str, descriptors: tuple[int, ...] = ()) -> None:
        """Give orders to `ip` in the namespace; those after one that fails are not carried out.

        `descriptors` are open in `ip` too, which can then be given `/proc/self/fd/N` as a path. Blocks for
        milliseconds. Raises NetworkError.
        """
        with self.entered():
            _give_orders(orders, descriptors)

    def close(self) -> None:
        """Hold it no longer."""
        os.close(self.fd)


class Network:
    """A switch, which also has an address on it where the master listens, and the nodes that are connected to it.

    A switch has room for a thousand nodes at once. Raises NetworkError where there can be none.
    """

    def __init__(self) -> None:
        self.master_address = MASTER_ADDRESS
        self.switch = Namespace()
        self._nodes: dict[int, Namespace] = {}
        try:
            # Without a spanning tree to look for, a cable is of use the moment it is plugged in.
            self.switch.ip(
                "link set lo up",
                f"link add switch address {_SWITCH_HARDWARE_ADDRESS} type bridge stp_state 0 forward_delay 0",
                *_without_ipv6("switch"),
                f"addr add {MASTER_ADDRESS}/{NETWORK.prefixlen} dev switch",
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
        """Let the namespace of a node go whose processes are gone; its cable goes with it. Its number may not come
        back."""
        self._nodes.pop(number).close()

    def cut(self, one: int, other: int) -> None:
        """Drop everything that these two nodes send to each other, until the `eth0` of either is set down and up again.

        It is sent to a hardware address that no interface has, so both get no answer and no error. Raises NetworkError.
        """
        for near, far in ((one, other), (other, one)):
            self._nodes[near].ip(
                f"neigh replace {node_address(far)} lladdr {_NOBODYS_HARDWARE_ADDRESS} dev eth0 nud permanent"
            )

    def close(self) -> None:
        """Remove all of it. Processes that are still in a namespace keep it, but reach no other node."""
        for namespace in (self.switch, *self._nodes.values()):
            namespace.close()
        self._nodes.clear()


@contextlib.contextmanager
def _away(go: Callable[[], None]) -> Iterator[None]:
    """Have this thread go to another network namespace, and back to the one that it is in now."""
    home = _own_namespace()
    try:
        go()
        try:
            yield
        finally:
            _move_to(home)
    finally:
        os.close(home)


def _own_namespace() -> int:
    try:
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    except OSError as error:
        raise NetworkError(f"the kernel shows no network namespaces ({error.strerror})") from None


def _move_to(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise NetworkError(f"a network namespace cannot be entered ({os.strerror(code)})")


def _leave() -> None:
    """Go to a network namespace that is made for this."""
    if _libc.unshare(_CLONE_NEWNET) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EPERM:
        raise NetworkError(f"the kernel makes no network namespace ({os.strerror(code)})")
    if os.geteuid() != 0:
        raise NetworkError("this needs root")
    raise NetworkError("root lacks CAP_SYS_ADMIN here, as in most containers; `docker run --privileged` gives it")


def _without_ipv6(device: str) -> tuple[str, ...]:
    """The order that keeps IPv6 off a device: its addresses are of no use before seconds have gone by."""
    return (f"link set {device} addrgenmode none",) if Path("/proc/net/if_inet6").exists() else ()


def _give_orders(orders: tuple[str, ...], descriptors: tuple[int, ...]) -> None:
    try:
        done = subprocess.run(
            ["ip", "-batch", "-"],
            input="".join(f"{order}\n" for order in orders),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
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
    failed = _FAILED_ORDER.search(done.stderr)
    what = f"ip {orders[int(failed[1]) - 1]}" if failed else "ip -batch"
    words = next((line.strip() for line in done.stderr.splitlines() if line.strip()), f"exit code {done.returncode}")
    raise NetworkError(f"`{what}` failed: {words}")
