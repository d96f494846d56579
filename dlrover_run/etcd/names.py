"""The addresses that the names of etcd's endpoints stand for, also while the name server is slow or away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dlrover_run.etcd.answers import Broken
from dlrover_run.wire import own_address
from dlrover_run.wire.own_address import Address

_Found = Sequence[Address] | own_address.Unknown


class Names:
    """What was told last of each endpoint, and whom a name server is being asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Sequence[Address]] = {}
        self._asking: dict[tuple[str, int], asyncio.Future[_Found]] = {}

    async def find(self, host: str, port: int, patience: float) -> Sequence[Address]:
        """The addresses that a name has now, or those that it had when nobody tells within `patience` seconds.

        Raises Broken when it never had any. The question is not withdrawn then, so that whoever comes next may find it
        answered.
        """
        place = host, port
        asking = self._asking.get(place)
        if asking is None:
            asking = self._asking[place] = asyncio.ensure_future(self._ask(host, port))
        await asyncio.wait([asking], timeout=patience)
        found = asking.result() if asking.done() and not asking.cancelled() else None
        if addresses := self._known.get(place):
            return addresses
        if found is None:
            raise Broken(f"no name server told the address of {host} within {patience:g} s")
        raise Broken(str(found))

    def close(self) -> None:
        """Wait for no answer any more."""
        for asking in self._asking.values():
            asking.cancel()

    async def _ask(self, host: str, port: int) -> _Found:
        # A failure is a result, because it may be that nobody asks for it any more.
        try:
            found = self._known[host, port] = await own_address.look_up(host, port)
        except own_address.Unknown as problem:
            return problem
        finally:
            del self._asking[host, port]
        return found
