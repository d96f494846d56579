"""The addresses of the nodes that a cluster lists, so that they find each other without the first of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.coordination.records.assignment import MAX_SUCCESSORS
from dlrover_run.transport.addresses import Address, UnresolvedHost, is_local_address, resolve, route_source


class ListedHosts(NamedTuple):
    """The first nodes that a cluster lists, by their addresses; a name without an address stays as it is. `own` is that
    of this node, None if it is none of them."""

    addresses: tuple[str, ...]
    own: str | None


async def resolve_listed(hosts: Sequence[str], local_addr: str | None) -> ListedHosts:
    """The addresses of the first nodes of a list, of which one is this node. A list names a host as the others find
    it; if its own name is a loopback address on this machine, it is the address from which it reaches the others."""
    first = hosts[:MAX_SUCCESSORS]
    found = await asyncio.gather(*map(_first_address, first))
    own = next((at for at, address in enumerate(found) if address and _is_own(address, local_addr)), None)
    addresses = [address.host if address else name for name, address in zip(first, found, strict=True)]
    if own is not None and (address := found[own]) is not None and address.loopback:
        other = next((each for each in found if each and not each.loopback), None)
        addresses[own] = local_addr or (other and route_source(other)) or address.host
    return ListedHosts(tuple(addresses), None if own is None else addresses[own])


async def _first_address(host: str) -> Address | None:
    with contextlib.suppress(UnresolvedHost):
        return (await resolve(host, 0))[0]
    return None


def _is_own(address: Address, local_addr: str | None) -> bool:
    return address.host == local_addr or is_local_address(address)
