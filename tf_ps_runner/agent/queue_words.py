"""What two agents say to each other about the queues: JSON lines over TCP, after both have shown that they know the
job's token, if it has one, and the key that the chief's host has drawn and the coordinator has told.

The caller opens with `Opening`, the server answers with `Challenge`, the caller with `Proof`, and the server with
`Welcome` or `Refused`. The caller then says which answers it still waits for, in one or more `Resume`, and passes
requests on, each with a number of its own: what is said again after a connection has broken is done once. As with a
master without TLS, what follows the proof is neither hidden nor protected.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dlrover_run.coordination.bounds import NodeId, Total
from dlrover_run.policies.parameter_servers.model import TaskKey
from dlrover_run.transport import auth
from dlrover_run.transport.messages import Hello, JobId, Mac, Nonce
from tf_ps_runner.agent.protocol import MAX_LINE, Answer, Take, Used

PROTOCOL = 1
"""Raised when two versions of this program could not understand each other."""

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for both to show who they are. After that the connection is ended, and the caller tries again."""

PAGE = 500
"""Numbers in one `Resume`."""

GONE_AFTER_MS = 10_000
"""Milliseconds after which a connection is broken whose other end's machine does not answer any more."""


class LinkBroken(Exception):
    """The connection has ended, or what came over it is no word of these; the message is a clause."""


class Opening(msgspec.Struct, frozen=True, tag="opening", forbid_unknown_fields=True):
    """Who calls, of which job. `nonce` is random and new with each connection."""

    protocol: int
    job: JobId
    node_id: NodeId
    incarnation: NodeId
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof", forbid_unknown_fields=True):
    """That the caller knows the token. `version` is the one of the cluster whose tasks it speaks for, and `session` is
    the same for all its connections in that version."""

    mac: Mac
    version: Total
    session: Nonce


class Resume(msgspec.Struct, frozen=True, tag="resume", forbid_unknown_fields=True):
    """Answers that the caller still waits for. With the `last` one all others are known to be heard."""

    wanted: Annotated[tuple[Total, ...], Meta(max_length=PAGE)] = ()
    last: bool = True


class Passed(msgspec.Struct, frozen=True, tag="passed", forbid_unknown_fields=True):
    """A request of a task of the caller, or without one the word that it has gone, which is answered too. `heard` are
    the numbers of answers that have arrived since the last one."""

    number: Total
    task: TaskKey
    take: Take | None = None
    used: Used | None = None
    heard: Annotated[tuple[Total, ...], Meta(max_length=PAGE)] = ()


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """A random text that the caller's proof has to cover, and the server's own proof."""

    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The caller is heard from now on."""


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The connection ends here; the same may be granted a little later."""

    reason: Annotated[str, Meta(max_length=500)]


class Answered(msgspec.Struct, frozen=True, tag="answered", forbid_unknown_fields=True):
    """The answer to the request of that number."""

    number: Total
    answer: Answer


FromCaller = Opening | Proof | Resume | Passed
FromServer = Challenge | Welcome | Refused | Answered
_encoder = msgspec.json.Encoder()
_from_caller: msgspec.json.Decoder[FromCaller] = msgspec.json.Decoder(FromCaller)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


@dataclass(frozen=True)
class Membership:
    """To which job this node belongs and how it shows that. `token` is the job's secret, empty for none."""

    job: str
    node_id: str
    incarnation: str
    token: str = field(default="", repr=False)

    def opening(self) -> Opening:
        """The first word of a call."""
        return Opening(PROTOCOL, self.job, self.node_id, self.incarnation, auth.new_nonce())

    def caller_mac(self, opening: Opening, nonce: str, key: str) -> str:
        """The caller's proof."""
        return auth.node_mac(self._secret(key), _hello(opening), nonce)

    def server_mac(self, opening: Opening, nonce: str, key: str) -> str:
        """The server's proof."""
        return auth.master_mac(self._secret(key), _hello(opening), nonce)

    def _secret(self, key: str) -> str:
        # Both: the key travels over a network that may be overheard, which the token never does, and where etcd decides
        # who takes part there is no token.
        return hmac.new(self.token.encode(), f"queues {key}".encode(), hashlib.sha256).hexdigest()


def _hello(opening: Opening) -> Hello:
    return Hello(opening.protocol, opening.job, opening.node_id, opening.incarnation, opening.nonce)


def line_of(message: FromCaller | FromServer) -> bytes:
    """A message as it travels."""
    return _encoder.encode(message) + b"\n"


async def from_caller(reader: asyncio.StreamReader) -> FromCaller:
    """What a caller says next. Raises LinkBroken."""
    said: FromCaller = await _read(reader, _from_caller)
    return said


async def from_server(reader: asyncio.StreamReader) -> FromServer:
    """What a server says next. Raises LinkBroken."""
    said: FromServer = await _read(reader, _from_server)
    return said


async def _read(reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(await reader.readuntil(b"\n"))
    except asyncio.IncompleteReadError:
        raise LinkBroken("it ended the connection") from None
    except asyncio.LimitOverrunError:
        raise LinkBroken(f"it said more than {MAX_LINE} bytes at once") from None
    except OSError as error:
        raise LinkBroken(f"the connection broke ({error.strerror or error})") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise LinkBroken(f"it does not speak as an agent does: {error}"[:300]) from None


def resume(wanted: Iterable[int]) -> list[Resume]:
    """The words that say what is still waited for."""
    numbers = list(wanted)
    pages = max(1, -(-len(numbers) // PAGE))
    return [Resume(tuple(numbers[page * PAGE : (page + 1) * PAGE]), page == pages - 1) for page in range(pages)]


def notice_death(writer: asyncio.StreamWriter) -> None:
    """Have the kernel break the connection when the other machine is gone, which TCP else finds out after a quarter of
    an hour, or never."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_MS)
