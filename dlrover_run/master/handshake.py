"""The handshake of a connection: which node joins which job, and whether it may. Pure."""

from __future__ import annotations

from dlrover_run.transport import auth
from dlrover_run.transport.messages import PROTOCOL, Challenge, Hello, Join, NodeMessage, Proof, Refused

JOIN_TIMEOUT = 10.0
"""Seconds from the opening of a connection until its `Join`; a slower one is ended.

A node needs two round trips. This limits how long an unauthenticated client can hold a connection.
"""

MAX_HANDSHAKE_MESSAGE = 16 * 1024
"""Maximum bytes of a message from an unauthenticated client: several times the longest valid one."""

MAX_ERROR_TEXT = 500
"""Characters of an internal error that are quoted, so that the rest of the sentence fits too."""

TOKEN_REMEDY = (
    "give every node and the master the same token in DLROVER_RDZV_TOKEN, in the file that DLROVER_RDZV_TOKEN_FILE "
    "names, or by --rdzv-conf token_file=PATH"
)


class RequestRefused(Exception):
    """The connection must end; `last_word` is the last message to the node."""

    def __init__(self, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.last_word = Refused(reason[:2000], retry)


def internal_error(defect: Exception) -> str:
    """A sentence about an internal error. It is also sent to nodes, because a launched master has no console."""
    return f"internal error of the master: {repr(defect)[:MAX_ERROR_TEXT]}; please report it"


class Handshake:
    """Checks the first three messages of a connection. `nonce` is random and new for each connection."""

    def __init__(self, token: str, nonce: str) -> None:
        self._token = token
        self._nonce = nonce

    def greet(self, message: NodeMessage) -> Hello:
        """Take the first message. Raises RequestRefused."""
        if not isinstance(message, Hello):
            raise _out_of_order(message, "hello")
        if message.protocol != PROTOCOL:
            raise RequestRefused(
                f"this master speaks protocol {PROTOCOL} and the node {str(message.protocol)[:20]}: install one "
                "version of dlrover-run on all nodes"
            )
        return message

    def challenge(self) -> Challenge:
        """The answer to the first message."""
        return Challenge(self._nonce)

    def admit(self, hello: Hello, message: NodeMessage) -> Proof:
        """Check the node's proof and return the master's own. Raises RequestRefused."""
        if not isinstance(message, Proof):
            raise _out_of_order(message, "proof")
        if not auth.macs_equal(message.mac, auth.node_mac(self._token, hello, self._nonce)):
            raise RequestRefused(self._wrong_token(message))
        return Proof(auth.master_mac(self._token, hello, self._nonce))

    def join(self, hello: Hello, message: NodeMessage) -> Join:
        """Take the node's first status. Raises RequestRefused."""
        if not isinstance(message, Join):
            raise _out_of_order(message, "join")
        if message.status.key != (hello.node_id, hello.incarnation):
            raise RequestRefused("a node may only report itself, and this one sent hello under another id")
        return message

    def _wrong_token(self, message: Proof) -> str:
        if not self._token:
            return f"this node has a token and the master has none: {TOKEN_REMEDY}"
        if not message.mac:
            return f"the master asks for the job's token and this node has none: {TOKEN_REMEDY}"
        return f"this node's token is not the master's: {TOKEN_REMEDY}"


def _out_of_order(message: NodeMessage, wanted: str) -> RequestRefused:
    return RequestRefused(f"the node sent {type(message).__name__.lower()} where {wanted} was expected")
