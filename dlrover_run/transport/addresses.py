"""How the place of a server is written.

Which addresses a name stands for, which of them are this machine's own, and how others reach this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import threading
from typing import NamedTuple

from dlrover_run.process_tree import signals


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


RESOLVE_TIMEOUT = 10.0
"""Seconds to look a name up; then the attempt that needed it has failed, and the next one asks again."""


class UnresolvedHost(Exception):
    """A name that stands for no address; the message is a clause."""


class Address(NamedTuple):
    """A place that can be connected to; `host` is an IP address."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return join_address(self.host, self.port)

    @property
    def loopback(self) -> bool:
        """Whether nobody but this machine can reach it."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback


async def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a name, the preferred one first. Raises UnresolvedHost.

    The system's own resolver is asked, for it knows what the machine's administrator has set up, and gRPC's does not.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return _look_up(host, port)
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[Address]] = loop.create_future()

    def settle(addresses: list[Address], problem: UnresolvedHost | None) -> None:
        if found.done():
            return
        if problem is None:
            found.set_result(addresses)
        else:
            found.set_exception(problem)

    def ask() -> None:
        addresses: list[Address] = []
        problem: UnresolvedHost | None = None
        try:
            addresses = _look_up(host, port)
        except UnresolvedHost as unknown:
            problem = unknown
        # The loop may be closed by the time that the answer comes.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, addresses, problem)

    # The resolver can only be asked by waiting for it. A daemon, because an agent's end waits for no name server.
    with signals.blocked_in_new_threads():
        threading.Thread(target=ask, name="look-up", daemon=True).start()
    try:
        return await asyncio.wait_for(found, RESOLVE_TIMEOUT)
    except TimeoutError:
        raise UnresolvedHost(f"no name server told the address of {host} within {RESOLVE_TIMEOUT:g} s") from None


def _look_up(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnresolvedHost(f"{host} has no address ({reason})") from None
    places = dict.fromkeys(Address(family, str(place[0]), port) for family, _, _, _, place in found)
    # One node may say localhost and another one on this machine 127.0.0.1, and they mean the same.
    return sorted(places, key=lambda place: place.loopback and place.family is socket.AF_INET6)


def route_source(address: Address) -> str | None:
    """The address of this machine from which it reaches `address`; None without a route. Nothing is sent."""
    if address.loopback:
        return "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only has the kernel choose a route.
        probe.connect((address.host, address.port or 1))
        return str(probe.getsockname()[0])
    return None


def is_local_address(address: Address) -> bool:
    """Whether the address is one of this machine's."""
    return bind_error(address._replace(port=0)) is None


def bind_error(address: Address) -> OSError | None:
    """What the kernel would say to a server that wants to listen at `address` now; None when it may."""
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            # As gRPC does it: a connection that ended a moment ago is no obstacle, a server that listens is one.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return error
    return None


def is_in_use(error: OSError) -> bool:
    """Whether `bind_error` said that somebody listens already."""
    return error.errno == errno.EADDRINUSE
