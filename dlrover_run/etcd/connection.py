"""The way to whichever member of etcd answers: one at a time, the next one when it does not, logged in if need be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dlrover_run.etcd import codec, diagnosis, endpoints
from dlrover_run.etcd.endpoints import AddressCache, Answer, Call, EndpointChannel, Metadata
from dlrover_run.etcd.errors import AuthNotEnabled, EndpointFailed, LoginRequired, join_clauses
from dlrover_run.etcd.operations import EtcdUnavailable
from dlrover_run.spec import EtcdSpec

CALL_TIMEOUT = 3.0
"""Seconds that a member gets to answer, the look-up of its name and a new connection to it included; then the next one
is asked. A cluster that has lost its leader chooses another one in one or two, but what it was asked just before may
never be answered."""


class EtcdConnection:
    """The endpoints, in an order by `chance` (a random number from 0 to 1), so that nodes share the load."""

    def __init__(self, spec: EtcdSpec, chance: Callable[[], float]) -> None:
        self.api = codec.load()
        self.spec = spec
        self._endpoints = sorted(spec.endpoints, key=lambda _: chance())
        self.tries = max(2, len(self._endpoints))
        self._names = AddressCache()
        self._turn = 0
        self._line = self._next_line()
        self._reached = self._closed = False
        self._logging_in = asyncio.Lock()
        # Empty without a user, and where the cluster knows none.
        self._token = None if spec.user else ""

    async def ask(self, method: str, request: Any, timeout: float = CALL_TIMEOUT) -> Any:
        """Ask once and be answered once, as `carry_out` does."""
        _, answer = await self.carry_out(endpoints.unary_call(self.api.method(method), request), timeout)
        return answer

    async def carry_out(self, action: Call[Answer], timeout: float = CALL_TIMEOUT) -> tuple[EndpointChannel, Answer]:
        """Do something with the first endpoint that lets it be done, each for at most `timeout` seconds; also the line
        over which it was done. Only one endpoint is tried twice.

        Raises Away, Mistake, and what the answer means otherwise.
        """
        problems: dict[str, str] = {}
        for _ in range(self.tries):
            if self._closed:
                raise EtcdUnavailable("this node has let go of it")
            tried = self._line
            try:
                answer = await self._with_login(tried, action, timeout)
            except EndpointFailed as error:
                problems[tried.place] = str(error)
                await self.leave(tried)
            else:
                self._reached = True
                return tried, answer
        if not self._reached:
            problems |= await diagnosis.examine(self.spec, self._names)
        raise EtcdUnavailable(join_clauses(problems))

    async def leave(self, broken: EndpointChannel) -> None:
        """Go on to the next endpoint, unless somebody else whom the same line has failed was quicker."""
        if broken is self._line:
            self._turn += 1
            self._line = self._next_line()
            await broken.close()

    async def close(self) -> None:
        """Let go of the connection."""
        self._closed = True
        self._names.close()
        await self._line.close()

    def _next_line(self) -> EndpointChannel:
        lap, place = divmod(self._turn, len(self._endpoints))
        return EndpointChannel(self.spec, self._names, *self._endpoints[place], lap)

    async def _with_login(self, tried: EndpointChannel, action: Call[Answer], timeout: float) -> Answer:
        token = await self._log_in(tried, None) if self._token is None else self._token
        try:
            return await tried.carry_out(action, _metadata(token), timeout)
        except LoginRequired as refusal:
            if not self.spec.user:
                raise refusal.otherwise from None
        token = await self._log_in(tried, token)
        try:
            return await tried.carry_out(action, _metadata(token), timeout)
        except LoginRequired as refusal:
            raise refusal.otherwise from None

    async def _log_in(self, tried: EndpointChannel, stale: str | None) -> str:
        """A token other than the stale one, for all members."""
        async with self._logging_in:
            if self._token is None or self._token == stale:
                method = self.api.method("Auth.Authenticate")
                request = method.request(name=self.spec.user, password=self.spec.password)
                try:
                    answer = await tried.carry_out(endpoints.unary_call(method, request), (), CALL_TIMEOUT)
                    self._token = answer.token
                except AuthNotEnabled:
                    # As etcdctl does: users may be given before the administrator switches to them.
                    self._token = ""
            return self._token


def _metadata(token: str) -> Metadata:
    return (("token", token),) if token else ()
