"""Passes the requests of this node's processes on to the node that hosts the chief, and their answers back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dlrover_run.policies.parameter_servers.model import TaskKey
from dlrover_run.rendezvous.reconnect import BACKOFF_FIRST, BACKOFF_MAX
from dlrover_run.transport import auth
from tf_ps_runner.agent.protocol import MAX_LINE, Answer, Request, Take, Used
from tf_ps_runner.agent.queue_words import (
    HANDSHAKE_TIMEOUT,
    PAGE,
    Answered,
    Challenge,
    FromCaller,
    LinkBroken,
    Membership,
    Passed,
    Proof,
    Refused,
    Welcome,
    from_server,
    line_of,
    notice_death,
    resume,
)

if TYPE_CHECKING:
    from tf_ps_runner.agent.queue_service import Reply

COMPLAIN_AFTER = 5
"""Attempts in a row that fail before the person is told: the chief's node may hear of a new version a moment later."""


class QueueCaller:
    """Keeps a connection to where the queues are, for as long as there is a place that `follow` was told.

    While there is none, or it cannot be reached, requests wait. `say` tells the person what keeps it from there.
    """

    def __init__(self, membership: Membership, say: Callable[[str], None]) -> None:
        self._membership = membership
        self._say = say
        self._place = ""
        self._key = ""
        self._version = 0
        self._session = auth.new_nonce()
        self._number = 0
        self._asked: dict[int, tuple[Passed, Reply]] = {}
        self._heard: list[int] = []
        self._tasks: dict[TaskKey, None] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._calling: asyncio.Task[None] | None = None
        self._told = ""

    def follow(self, place: str, version: int, key: str) -> None:
        """Where the queues of that version are answered for, HOST:PORT, for those who know the key; empty for nowhere,
        as far as is known."""
        if (place, version, key) == (self._place, self._version, self._key):
            return
        if version != self._version:
            # Those who asked are being ended.
            self._asked.clear()
            self._tasks.clear()
        self._place, self._version, self._key = place, version, key
        self._session = auth.new_nonce()
        self._heard.clear()
        self._hang_up()
        if place:
            self._calling = asyncio.get_running_loop().create_task(self._call(place))

    def ask(self, task: TaskKey, ask: Request, reply: Reply) -> None:
        """A process asks; `reply` is called once, unless `gone` comes before."""
        if isinstance(ask, Take):
            self._tasks[task] = None
            self._pass(Passed(self._next_number(), task, take=ask), reply)
        elif isinstance(ask, Used):
            self._pass(Passed(self._next_number(), task, used=ask), reply)
        else:
            reply(Answer(error="only the chief has to do with the state of the queues"))

    def gone(self, task: TaskKey) -> None:
        """A process has ended: what it holds goes back."""
        if task not in self._tasks:
            return
        del self._tasks[task]
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0].task != task}
        self._pass(Passed(self._next_number(), task), lambda answer: None)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _pass(self, passed: Passed, reply: Reply) -> None:
        self._asked[passed.number] = (passed, reply)
        if self._writer is not None:
            heard, self._heard = tuple(self._heard[:PAGE]), self._heard[PAGE:]
            self._tell(msgspec.structs.replace(passed, heard=heard))

    async def close(self) -> None:
        """Call nobody any more."""
        calling = self._calling
        self._hang_up()
        if calling is not None:
            await asyncio.wait([calling])

    def _hang_up(self) -> None:
        if self._calling is not None:
            self._calling.cancel()
            self._calling = None
        self._writer = None

    def _tell(self, message: FromCaller) -> None:
        # What is not heard is said again over the next connection.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line_of(message))

    async def _call(self, place: str) -> None:
        failures = 0
        # Asked each time, because `wait_for` forgets that it was cancelled when that comes with its result.
        while self._calling is asyncio.current_task():
            try:
                await self._converse(place)
                failures = 0
            except LinkBroken as broken:
                failures += 1
                self._complain(place, str(broken), failures)
            # Other ones each time, so that a thousand nodes do not call at once.
            await asyncio.sleep(random.random() * min(BACKOFF_MAX, BACKOFF_FIRST * 2.0 ** min(failures, 8)))

    def _complain(self, place: str, clause: str, failures: int) -> None:
        """Tell the person once what keeps this node from its data, when it was no matter of a moment."""
        if failures >= COMPLAIN_AFTER and clause != self._told:
            self._told = clause
            self._say(f"warning: the queues of the data at {place}, with the chief, cannot be reached: {clause}")

    async def _converse(self, place: str) -> None:
        """Connect and pass requests on until the connection ends; raises LinkBroken when it never was one."""
        host, _, port = place.rpartition(":")
        opening = asyncio.open_connection(host.strip("[]"), int(port), limit=MAX_LINE)
        try:
            reader, writer = await asyncio.wait_for(opening, HANDSHAKE_TIMEOUT)
        except TimeoutError:
            raise LinkBroken(f"nobody answered within {HANDSHAKE_TIMEOUT:g} s") from None
        except OSError as error:
            raise LinkBroken(error.strerror or str(error)) from None
        try:
            notice_death(writer)
            await asyncio.wait_for(self._greet(reader, writer), HANDSHAKE_TIMEOUT)
            self._resume(writer)
            with contextlib.suppress(LinkBroken):
                while self._writer is writer:
                    self._hear(await from_server(reader))
        except TimeoutError:
            raise LinkBroken(f"whoever listens there said nothing for {HANDSHAKE_TIMEOUT:g} s") from None
        except OSError as error:
            raise LinkBroken(error.strerror or str(error)) from None
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opening = self._membership.opening()
        writer.write(line_of(opening))
        challenge = await from_server(reader)
        if isinstance(challenge, Refused):
            raise LinkBroken(challenge.reason)
        if not isinstance(challenge, Challenge):
            raise LinkBroken("it does not speak as an agent does")
        if not auth.macs_equal(challenge.mac, self._membership.server_mac(opening, challenge.nonce, self._key)):
            raise LinkBroken("whoever answers there knows another token than this job's, or is another host by now")
        mac = self._membership.caller_mac(opening, challenge.nonce, self._key)
        writer.write(line_of(Proof(mac, self._version, self._session)))
        welcome = await from_server(reader)
        if isinstance(welcome, Refused):
            raise LinkBroken(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise LinkBroken("it does not speak as an agent does")

    def _resume(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._told = ""
        self._heard.clear()
        for said in resume(self._asked):
            self._tell(said)
        for passed, _ in self._asked.values():
            self._tell(passed)

    def _hear(self, said: object) -> None:
        if not isinstance(said, Answered):
            raise LinkBroken("it does not speak as an agent does")
        self._heard.append(said.number)
        asked = self._asked.pop(said.number, None)
        if asked is not None:
            asked[1](said.answer)
