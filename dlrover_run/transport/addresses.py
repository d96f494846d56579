"""Network addresses: resolving host names, recognising local addresses, and choosing the one to advertise."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from functools import partial
from typing import NamedTuple

from dlrover_run.background import TimeLimit, begin_in_thread
from dlrover_run.words.text import join_address

RESOLVE_TIMEOUT = 10.0
"""Seconds to resolve a host name. After this the connection attempt has failed; the next one resolves again."""


class UnresolvedHost(Exception):
    """A host name without an address; the message is a clause."""


class Address(NamedTuple):
    """A socket address; `host` is an IP address."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return join_address(self.host, self.port)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. Called before an address is opened, or named, for several nodes."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback


def is_ip_address(host: str) -> bool:
    """Whether a host is given by its address, and not by a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


async def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a host name, the preferred one first. Raises UnresolvedHost.

    This uses the system's resolver, which follows what the administrator has set up; gRPC's own does not.
    """
    if is_ip_address(host):
        return _resolve(host, port)
    # getaddrinfo blocks, and an agent must not wait for a name server when it exits.
    found, _ = begin_in_thread(partial(_resolve, host, port), "resolve")
    try:
        async with TimeLimit(RESOLVE_TIMEOUT):
            return await found
    except TimeoutError:
        raise UnresolvedHost(f"no name server returned an address for {host} within {RESOLVE_TIMEOUT:g} s") from None


def _resolve(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnresolvedHost(f"{host} has no address ({reason})") from None
    addresses = dict.fromkeys(Address(family, str(place[0]), port) for family, _, _, _, place in found)
    # One node may use localhost and another one on the same machine 127.0.0.1: both must reach the same server.
    return sorted(addresses, key=lambda address: address.loopback and address.family is socket.AF_INET6)


def route_source(address: Address) -> str | None:
    """The address of this machine from which it reaches `address`; None without a route. No packet is sent."""
    if address.loopback:
        return "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only makes the kernel choose a route.
        probe.connect((address.host, address.port or 1))
        return str(probe.getsockname()[0])
    return None


def is_local_address(address: Address) -> bool:
    """Whether an address is one of this machine. Called to learn whether this node owns the endpoint, before it starts
    a master there."""
    return bind_error(address._replace(port=0)) is None


def bind_error(address: Address) -> OSError | None:
    """The error that a server would get if it listened at `address` now; None if it can."""
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            # As gRPC does: a connection that has just ended does not prevent listening, a listening server does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return error
    return None
