"""A master for tests, in the test's own event loop: it sends what a script says, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.transport import auth, grpc_setup, messages
from dlrover_run.transport.messages import (
    Assigned,
    Challenge,
    Hello,
    Join,
    MasterMessage,
    NodeMessage,
    Proof,
    Report,
    Welcome,
)


class Stream:
    """The master's end of one node's stream."""

    def __init__(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        self._incoming = incoming
        self._context = context
        self.hello: Hello | None = None
        self.joined: NodeReport | None = None

    async def receive(self) -> NodeMessage:
        """Return the node's next message. Raises EOFError at the end of the stream."""
        async for data in self._incoming:
            return messages.decode_from_node(data)
        raise EOFError

    async def send(self, message: MasterMessage) -> None:
        await self._context.write(messages.encode(message))

    async def challenge(self, token: str = "") -> Proof:
        """Receive the node's hello and its proof, send the master's proof, and return the node's proof."""
        hello = await self.receive()
        assert isinstance(hello, Hello)
        self.hello = hello
        nonce = auth.new_nonce()
        await self.send(Challenge(nonce))
        answer = await self.receive()
        assert isinstance(answer, Proof)
        await self.send(Proof(auth.master_mac(token, hello, nonce)))
        return answer

    async def welcome(self, rules: JobRules | None = None, notice: str = "", token: str = "") -> NodeReport:
        """Accept the node, and return its first status."""
        await self.challenge(token)
        join = await self.receive()
        assert isinstance(join, Join)
        self.joined = join.report
        values = join.rules if rules is None else messages.encode_rules(rules)
        await self.send(Welcome(values, notice))
        return join.report

    async def assign(self, **fields: Any) -> None:
        await self.send(Assigned(Assignment(**fields)))

    async def status(self) -> NodeReport:
        """Return the next status that the node reports."""
        report = await self.receive()
        assert isinstance(report, Report)
        return report.report


Script = Callable[[Stream], Awaitable[None]]


class ScriptedMaster:
    """Runs one script for each stream, in order; the last script serves all further streams.

    A stream ends when its script returns or when the node ends it.
    """

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self._server: Any = None
        self.streams = 0
        self.failure: BaseException | None = None

    async def start(self, port: int = 0) -> int:
        grpc = grpc_setup.load_grpc()
        self._server = grpc.aio.server(options=grpc_setup.SERVER_OPTIONS)
        service, method = messages.METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        bound: int = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _serve(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        self.streams += 1
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        try:
            await script(Stream(incoming, context))
        except EOFError:
            return
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            self.failure = failure
            raise
